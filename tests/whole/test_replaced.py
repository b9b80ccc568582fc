"""Sessions on worker processes of which one is killed or stopped, and another, which has other layers, takes over."""

# B batch, S seq, D hidden

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from benchmarks.faults import tiny_model
from tests.doubles.processes import until
from tests.oracle import tiny
from tests.oracle.tiny import random

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

B, S, D = 3, 4, tiny.HIDDEN


def changing(session: Any, layers: int, lost: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Eight steps whose kwargs change, on both sides of layer 14, with a reorder and a rollback; a loss before one."""
    v, acts = random(D, seed=1), kf.Capture(resid=[7, 10, 20])
    prompts = random(layers, 1, 2, D, seed=2)
    a_b = {"A": random(layers, 2, D, seed=3), "B": random(layers, D, 2, seed=4), "scale": 0.5}
    outs = [session.step(random(B, S, D), attention_mask=tiny.left_padded([0, 1, 3], S), prompts=prompts)]

    def step(seq: int, **kwargs: Any) -> None:
        outs.append(session.step(random(B, seq, D, seed=10 + len(outs)), **kwargs))

    step(1, steer={9: v, 20: v})
    step(1, steer={9: 2 * v}, lora={"q_proj": a_b})
    session.reorder([2, 0, 0])
    step(2, capture=acts)
    session.rollback(7)
    lost()
    step(1, steer={9: -v}, capture=acts)
    step(1, edit=[kf.scale(0.5, layers=[8, 13, 16])])
    step(1, lora={"o_proj": a_b})
    step(1)
    return [*outs, *(acts["resid", layer] for layer in (7, 10, 20))]


def test_the_middle_one_dies_and_a_larger_one_closes_the_gap(tmp_path: Path) -> None:
    """Three workers of 24 layers; the one that comes has the lost layers, and some of both neighbours'."""
    with kf.local_swarm(tiny_model(str(tmp_path), 24), [(0, 8), (8, 14), (14, 24)]) as swarm:
        flow = kf.connect(swarm.model, peers=swarm.peers)
        with torch.no_grad(), flow.session(16) as session:
            expected = changing(session, 24)
            assert [worker.hop.span for worker in session.workers] == [(0, 8), (8, 14), (14, 24)]

        def lost() -> None:
            swarm.add(6, 24)
            swarm.kill(1)
            until(lambda: any((one.start, one.stop) == (6, 24) for one in flow.peers.known()))

        with torch.no_grad(), flow.session(16) as session:
            got = changing(session, 24, lost)
            (told,) = session.replays
        assert told.layers == (8, 14) and told.position == 7 and told.steps == 4
        assert told.peer == swarm.workers[1].peer and told.by == ((swarm.workers[3].peer, 8, 14),)
        assert told.mode == "stepwise" and told.bitwise
        assert "layers 8:14" in str(told) and "4 steps repeated stepwise, bitwise" in str(told)
        for number, (mine, want) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(mine, want), f"output {number}"
        flow.close()


@pytest.mark.rest
def test_beside_a_stopped_worker_a_dead_one_is_found_out_in_a_moment() -> None:
    """Of two that could take its place the one that is dialled first was killed, and is still in the directory."""
    with kf.local_swarm(tiny.folder("llama"), [(0, 1), (1, 3), (1, 3), (1, 3), (3, 4)]) as swarm:
        flow = kf.connect(swarm.model, peers=swarm.peers)
        used, dead, other = sorted(range(1, 4), key=lambda i: swarm.workers[i].peer)
        with torch.no_grad(), flow.session(16) as session:
            session.step(random(B, S, D))
            session.step(random(B, 1, D))
            swarm.kill(dead)
            swarm.pause(used)
            session.step(random(B, 1, D))
            (told,) = session.replays
        assert told.peer == swarm.workers[used].peer and "silent" in told.reason
        assert told.by == ((swarm.workers[other].peer, 1, 3),)
        assert told.seconds < 2.5, "5 s where p2pd asks the stopped one for the dead one's addresses"
        flow.close()
