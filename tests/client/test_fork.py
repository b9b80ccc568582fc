"""Forks of a session: the same columns to the last bit, and then two sessions that know nothing of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import DeadlineError, NoRoute, SessionError, WorkerFull
from kwflow.wire import loop
from tests.doubles.mortal import Swarm
from tests.families.marks import every_family
from tests.oracle import assert_near, tiny
from tests.oracle.tiny import random

B, S, D, LAYERS = 4, 4, tiny.HIDDEN, tiny.LAYERS
V, P, MASK = random(D, seed=1), random(LAYERS, 1, 2, D, seed=2), tiny.left_padded([0, 1, 3, 2], S)
LORA = {"q_proj": {"A": random(LAYERS, 2, D, seed=3), "B": random(LAYERS, D, 2, seed=4), "scale": 0.5}}
KV = {n: random(LAYERS, 1, tiny.KV_HEADS, 3, D // tiny.HEADS, seed=i) for i, n in enumerate(("k", "v"), 7)}

Op = Callable[[Any], Tensor | None]


def step(seed: int, seq: int = 1, **kwargs: Any) -> Op:
    def take(session: Any) -> Tensor:
        given = {name: value() if callable(value) else value for name, value in kwargs.items()}
        return session.step(random(B, seq, D, seed=seed), **given)

    return take


PATTERN = {"capture": lambda: kf.Capture(pattern=[1], resid=[2])}
RESID = {"capture": lambda: kf.Capture(resid=[1, 2])}
HISTORY: list[Op] = [
    step(0, S, attention_mask=MASK, prompts=P, steer={1: V}, prefix_kv=KV, phase="prompt"),
    step(1, steer={1: V}, lora=LORA, phase="generated"),
    step(2, lora=LORA, edit=[kf.scale(0.5, layers=2, at="generated")], phase="generated", **PATTERN),
    lambda session: session.reorder([1, 1, 0, 3]),
    step(3, steer={2: kf.axes(random(B, 1, D, seed=5), "batch seq hidden")}),
    step(4, 2, edit=kf.add(V, layers=[1, 2], at="all"), **RESID),
    lambda session: session.reorder([3, 2, 1, 0]),
    lambda session: session.rollback(7),  # and the reorder is of all columns
    lambda session: session.reorder([1, 2, 3, 0]),
    step(5),
    lambda session: session.rollback(6),
    step(6, 2, steer={1: V * 2}),
    lambda session: session.rollback(0),
    lambda session: session.reorder([3, 2, 1, 0]),
    step(7, S),
    step(8, steer={1: V}),
]


def run(session: Any, ops: list[Op]) -> list[Tensor]:
    return [out for op in ops if (out := op(session)) is not None]


def swarm_of(*spans: tuple[int, int], family: str = "llama", **more: Any) -> Swarm:
    return Swarm(family, *(spans or ((0, 1), (1, 3), (3, 4))), **more)


@pytest.mark.parametrize("mode", ["stepwise", pytest.param("merged", marks=pytest.mark.rest)])
def test_both_go_on_to_the_last_bit_from_wherever_it_was_forked(mode: str) -> None:
    with swarm_of().flow.session(16) as session:
        expected = run(session, HISTORY)
    swarm = swarm_of()
    for at in range(len(HISTORY) + 1):
        with swarm.flow.session(16, replay=mode) as session:
            before = run(session, HISTORY[:at])
            fork = session.fork()
            now = [(one.position, one.prefix, one.batch, one.mode) for one in (fork, session)]
            assert now[0] == now[1]
            with fork:
                rest = run(fork, HISTORY[at:])
            for mine in ([*before, *rest], [*before, *run(session, HISTORY[at:])]):
                assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True)), f"forked at {at}"
            assert not session.replays and not fork.replays
    tiny.settle(swarm.flow, [0, 0, 0])


@every_family
def test_neither_knows_of_the_other(family: str) -> None:
    flow = swarm_of(family=family).flow
    x, more = random(B, S, D), random(B, 2, D, seed=1)
    with flow.session() as alone:
        expected = [alone.step(t) for t in (x, more, more)]
    session = flow.session()
    session.step(x)
    fork, second = session.fork(), session.fork()
    steered = fork.step(more, steer={1: V})
    fork.reorder([3, 2, 1, 0])
    fork.rollback(2)
    assert torch.equal(session.step(more), expected[1]) and not torch.equal(steered, expected[1])
    third = second.fork()
    session.close()
    assert torch.equal(second.step(more), expected[1]) and torch.equal(third.step(more), expected[1])
    assert torch.equal(third.fork().step(more), expected[2])
    with pytest.raises(SessionError, match="closed"):
        session.fork()


def test_a_forks_workers_may_fail() -> None:
    """A fork has a history of its own: others take its workers' place, as a session's."""
    for mode in ("stepwise", "merged"):
        with swarm_of().flow.session(16) as session:
            expected = run(session, HISTORY[:6])
        for lost in (None, "before", "behind"):
            swarm = swarm_of((0, 1), (1, 3), (3, 4), (1, 2), (2, 3))
            swarm.hidden = {3, 4}
            with swarm.flow.session(16, replay=mode) as session:
                outs = run(session, HISTORY[:3])
                swarm.hidden = {1}
                if lost == "before":
                    swarm.kill(1)
                fork = session.fork()
                assert len(fork.replays) == (lost == "before") and not session.replays
                for told in fork.replays:
                    assert told.layers == (1, 3) and told.mode == "stepwise" and told.bitwise and told.position == 6
                if lost == "behind":
                    swarm.kill(1)
                for one in (fork, session):
                    for mine, want in zip([*outs, *run(one, HISTORY[3:6])], expected, strict=True):
                        assert_near(mine, want)
                        assert mode == "merged" or torch.equal(mine, want)
                    assert len(one.replays) == (lost is not None)


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_after_a_failover_the_fork_has_what_the_session_has(mode: str) -> None:
    swarm = swarm_of((0, 1), (1, 3), (3, 4), (1, 2), (2, 3))
    swarm.hidden = {3, 4}
    with swarm.flow.session(16, replay=mode) as session:
        run(session, HISTORY[:5])
        swarm.kill(1)
        swarm.hidden = {1}
        run(session, HISTORY[5:7])
        fork = session.fork()
        assert fork.replays == session.replays and len(fork.replays) == 1
        for mine, want in zip(run(fork, HISTORY[7:12]), run(session, HISTORY[7:12]), strict=True):
            assert torch.equal(mine, want)


def test_captures_stay_with_the_session_and_do_not_travel_again() -> None:
    flow = swarm_of().flow
    acts, pattern = kf.Capture(resid=range(LAYERS)), kf.Capture(pattern=[1])
    with flow.session() as session:
        session.step(random(B, S, D), capture=acts)
        session.step(random(B, 1, D), capture=pattern)
        held = acts["resid", 1]
        with tiny.Requests(flow) as requests, session.fork() as fork:
            sent = ["capture" in str(request.tree) for _, request, _ in requests.seen if request.meta["op"] == "step"]
            assert sent == [False, False, False, True, False, False], "a pattern's layer is eager, so that one stays"
            more = random(B, 1, D, seed=2)
            with pytest.raises(SessionError, match="another session"):
                fork.step(more, capture=acts)
            own = kf.Capture(resid=[1])
            assert torch.equal(fork.step(more, capture=own), session.step(more))
        assert acts["resid", 1].shape[1] == S and torch.equal(acts["resid", 1], held) and own["resid", 1].shape[1] == 1


def test_where_there_is_no_room_for_both_the_fork_goes_elsewhere_or_says_so() -> None:
    x, more = random(B, S, D), random(B, 1, D, seed=1)
    for spans in ([(0, 4), (0, 4)], [(0, 4)]):
        swarm = swarm_of(*spans, kv_bytes=20_000)
        with swarm.flow.session(8) as session:
            session.step(x)
            if len(spans) == 2:
                with session.fork() as fork:
                    (told,) = fork.replays
                    assert "no room" in told.reason and told.bitwise
                    assert torch.equal(fork.step(more), session.step(more))
            else:
                with pytest.raises(WorkerFull, match="no room"):
                    session.fork()
                assert session.step(more).shape == (B, 1, D)
        assert not swarm.bans
        tiny.settle(swarm.flow, [0] * len(spans))


def test_a_fork_that_fails_leaves_the_session_as_it_was() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    x, more = random(B, S, D), random(B, 1, D, seed=1)
    with swarm.flow.session(8) as session:
        session.step(x)
        expected = session.step(more)
        session.rollback(S)
        session.dispatcher = swarm.flow.options(timeout=0.5).dispatcher
        swarm.interrupt(lambda: session.fork(), worker=1, then=asyncio.Event().wait)
        assert torch.equal(session.step(more), expected)
        session.rollback(S)
        swarm.hidden = {1}
        swarm.kill(1)
        with pytest.raises((NoRoute, DeadlineError)):
            session.fork()


def test_a_fork_in_the_middle_of_a_step_that_was_interrupted() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    x, more = random(B, S, D), random(B, 1, D, seed=1)
    with swarm.flow.session(8) as session:
        session.step(x)
        session.reorder([1, 2, 3, 0])
        go_on = asyncio.Event()
        swarm.interrupt(lambda: session.step(random(B, 2, D, seed=3)), then=go_on.wait)
        loop.network_loop().call_soon_threadsafe(go_on.set)
        with session.fork() as fork:
            assert fork.position == S
            assert torch.equal(fork.step(more), session.step(more))
