"""Two models of one shape and different weights in one swarm: a client is served with its own, or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import ModelError, NoRoute, WorkerFailed
from kwflow.models.ends import ModelEnds
from kwflow.models.files.checkpoint import Checkpoint
from kwflow.models.spans import load_span
from kwflow.swarm.connect import in_process
from kwflow.swarm.directory import WorkerRecord
from kwflow.swarm.lifetime import same_imports
from kwflow.worker.server import Served
from tests.doubles.workers import Workers
from tests.oracle import assert_bits, tiny


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with other weights."""
    folder = tmp_path_factory.mktemp("other") / "llama-float32"
    shutil.copytree(tiny.folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor * 1.5 for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def served(folder: Path, *spans: tuple[int, int]) -> list[Served]:
    return [Served(load_span(folder, start, stop), model="tiny") for start, stop in spans]


def flow(folder: Path, workers: list[Served]) -> Flow:
    """A client of ``folder`` in a swarm of ``workers``, who are asked for their weights."""
    ends = ModelEnds(folder)
    return Flow(ends, in_process(workers, checkpoint=Checkpoint(folder).checkpoint_id()), (0, ends.layers))


def ids(folder: Path) -> str:
    return Checkpoint(folder).checkpoint_id()[:16]


HIDDEN = tiny.random(2, 5, tiny.HIDDEN)


def test_each_client_is_served_with_its_own_weights(other: Path) -> None:
    mine = tiny.folder("llama")
    assert ids(mine) != ids(other)
    for client in (mine, other):
        alone = flow(client, served(client, (0, 2), (2, 4)))(HIDDEN)
        both = (
            served(other, (0, 4)) + served(mine, (0, 2), (2, 4)) + served(other, (0, 2), (2, 4)) + served(mine, (0, 4))
        )
        mixed = flow(client, both)
        assert_bits(mixed(HIDDEN), alone)
        with mixed.session(8) as session:
            session.step(HIDDEN)


def test_only_other_weights_left_is_refused_and_both_ids_are_named(other: Path) -> None:
    mine = tiny.folder("llama")
    with pytest.raises(ModelError, match=f"layers 0:4 .*{ids(mine)}.*{ids(other)}"):
        flow(mine, served(other, (0, 4)))(HIDDEN)
    halves = flow(mine, served(mine, (0, 2)) + served(other, (2, 4)))
    with pytest.raises(ModelError, match=f"{ids(mine)}.*{ids(other)}"):
        halves(HIDDEN)
    halves[0:2](HIDDEN)  # what its own worker serves goes on


def test_layers_that_nobody_serves_are_not_blamed_on_weights(other: Path) -> None:
    with pytest.raises(NoRoute, match="layer 2"):
        flow(tiny.folder("llama"), served(tiny.folder("llama"), (0, 2)) + served(other, (0, 2)))(HIDDEN)


def test_a_worker_that_does_not_say_its_weights_is_not_used() -> None:
    (worker,) = served(tiny.folder("llama"), (0, 4))
    worker.spec.identity.pop("checkpoint")
    with pytest.raises(ModelError, match="unknown"):
        flow(tiny.folder("llama"), [worker])(HIDDEN)


class Recorded(Workers):
    """A swarm whose directory holds the workers' checkpoints, as a real one does."""

    def __init__(self, client: Path, *workers: Served):
        super().__init__(workers)
        self.flow = Flow(ModelEnds(client), self.peers(Checkpoint(client).checkpoint_id()), (0, 4))

    def listed(self, number: int) -> WorkerRecord:
        spec = self.served[number].spec
        return WorkerRecord("tiny", self.names[number], (), spec.start, spec.stop, 4, spec.identity["checkpoint"])


def test_whom_the_directory_gives_other_weights_is_not_even_asked(other: Path) -> None:
    swarm = Recorded(tiny.folder("llama"), *served(other, (0, 4)), *served(tiny.folder("llama"), (0, 4)))
    swarm.flow(HIDDEN)
    assert set(swarm.dialled) == {1}


def test_a_dead_worker_is_no_route_though_others_have_other_weights(other: Path) -> None:
    """It may come back: the caller made no mistake."""
    swarm = Recorded(tiny.folder("llama"), *served(other, (0, 4)), *served(tiny.folder("llama"), (0, 4)))
    swarm.flow(HIDDEN)
    swarm.kill(1)
    with pytest.raises(NoRoute) as raised:
        swarm.flow.options(timeout=0.5)(HIDDEN)
    assert isinstance(raised.value.__cause__, WorkerFailed)
    swarm.hidden.add(1)
    with pytest.raises(ModelError, match=ids(other)):
        swarm.flow(HIDDEN)


@pytest.mark.parametrize("name", ["", " x", "a\nb", "x" * 201])
def test_a_name_that_no_swarm_can_use_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="1 to 200 printable characters"):
        kf.connect(tiny.folder("llama"), peers=["/ip4/127.0.0.1/tcp/1/p2p/x"], name=name)


# ---------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def swarm(other: Path) -> Iterator[Any]:
    """A worker with each weights under one name, in one DHT."""
    command = [sys.executable, "-m", "kwflow", "worker", str(other), "--blocks", "0:4", "--name", "shared name"]
    with kf.local_swarm(tiny.folder("llama"), workers=[(0, 4)], name="shared name") as swarm:
        env = {**same_imports(), "OMP_NUM_THREADS": "1"}
        stranger = subprocess.Popen([*command, "--join", swarm.peers[0]], stdout=subprocess.PIPE, text=True, env=env)
        try:
            assert stranger.stdout is not None
            assert "serving layers 0:4 of shared name" in stranger.stdout.readline()
            yield swarm
        finally:
            stranger.terminate()
            stranger.wait(30)
            stranger.stdout.close()  # type: ignore[union-attr]


@pytest.mark.swarm
@pytest.mark.rest
def test_one_name_in_a_real_swarm(swarm: Any, other: Path) -> None:
    peers = swarm.peers
    for folder in (tiny.folder("llama"), other):
        local = kf.connect(folder)(HIDDEN)
        with kf.connect(folder, peers=peers, name="shared name") as remote:
            assert_bits(remote(HIDDEN), local)
            assert len(remote.peers.known()) == 2
    with kf.connect(tiny.folder("llama"), peers=peers) as nameless, pytest.raises(NoRoute):
        nameless(HIDDEN)
    with kf.connect(other, peers=peers, name="shared name") as remote:
        third = shutil.copytree(other, other.parent / "third")
        weights = load_file(third / "model.safetensors")
        save_file({name: tensor * 2 for name, tensor in weights.items()}, third / "model.safetensors")
        with kf.connect(third, peers=peers, name="shared name") as stranger:
            both = f"(?s){ids(third)}.*{ids(tiny.folder('llama'))}|{ids(third)}.*{ids(other)}"
            with pytest.raises(ModelError, match=both):
                stranger(HIDDEN)
        remote(HIDDEN)
