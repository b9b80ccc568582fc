"""Faults: each befalls exactly the requests it names, here and in a worker's process; scripts come from seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kwflow as kf
from kwflow import link
from kwflow.errors import KwargError, KwflowError, ProtocolError, UnsupportedError, WorkerFailed, WorkerFull
from kwflow.swarm import faults
from kwflow.swarm.faulty import Faulty
from kwflow.swarm.worker import Served
from kwflow.wire import Message
from tests import tiny

HIDDEN = tiny.random(2, 3, tiny.HIDDEN)


class Client:
    """One client of one worker, below everything that tries again."""

    def __init__(self, worker: Faulty):
        self.worker, self.channel = worker, link.run(link.InProcess({"w": worker.accept}).open("w"))

    def ask(self, op: str = "forward") -> Any:
        if self.channel.closed:
            self.channel = link.run(link.InProcess({"w": self.worker.accept}).open("w"))
        meta: dict[str, Any] = {"op": {"forward": "run", "backward": "run"}.get(op, op), "span": [0, 2]}
        tree: dict[str, Any] = {"hidden": HIDDEN}
        if op == "step":
            meta |= {"start": 0, "max_length": 8}
        if op == "backward":
            meta["ops"], tree["given"] = [{"vjp": [0], "given": [0]}], [HIDDEN]
        return link.run(link.call(self.channel, Message(meta, tree)), 5.0)


@pytest.fixture
def client() -> Iterator[Client]:
    worker = Faulty(Served(tiny.span("llama", 0, 2)))
    yield Client(worker)
    worker.close()


def test_a_fault_befalls_the_requests_it_names(client: Client) -> None:
    good = client.ask("step").tree[0]
    client.worker.inject(kf.faults.Refuse(op="step", after=1, count=2))
    seen = []
    for op in ("forward", "step", "backward", "step", "hello", "step", "step"):
        try:
            client.ask(op)
            seen.append(op)
        except WorkerFailed:
            seen.append(f"{op} refused")
    assert seen == ["forward", "step", "backward", "step refused", "hello", "step refused", "step"]
    assert client.worker.hits == 2 and torch.equal(client.ask("step").tree[0], good)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (kf.faults.Refuse(), WorkerFailed, "refuses"),
        (kf.faults.Refuse(full=True), WorkerFull, "refuses"),
        (kf.faults.Raise(), WorkerFailed, "RuntimeError"),
        (kf.faults.Drop(), WorkerFailed, "EOF"),
        (kf.faults.Drop(0.5), WorkerFailed, "EOF"),
        (kf.faults.Corrupt("bytes"), ProtocolError, "message"),
        (kf.faults.Corrupt("frame"), ProtocolError, "frame"),
        (kf.faults.Die(), WorkerFailed, "EOF"),
        (kf.faults.Die(computed=True), WorkerFailed, "EOF"),
    ],
    ids=repr,
)
def test_what_a_client_sees(client: Client, fault: Any, error: type[KwflowError], said: str) -> None:
    good = client.ask().tree[0]
    client.worker.inject(fault)
    with pytest.raises(error, match=said):
        client.ask()
    if client.worker.dead:
        with pytest.raises(WorkerFailed, match="dead"):
            client.ask()
    else:
        assert torch.equal(client.ask().tree[0], good)


def test_corrupt_tensors(client: Client) -> None:
    good = client.ask().tree[0]
    for how in ("missing", "shape", "dtype", "nan"):
        client.worker.inject(kf.faults.Corrupt(how))
    for how in ("missing", "shape", "dtype", "nan"):
        client.worker.clear()
        client.worker.inject(kf.faults.Corrupt(how))
        tree = client.ask().tree
        match how:
            case "missing":
                assert tree is None
            case "shape":
                assert tree[0].shape != good.shape
            case "dtype":
                assert tree[0].shape == good.shape and tree[0].dtype == torch.float64
            case "nan":
                assert tree[0].isnan().any() and tree[0].shape == good.shape
    assert torch.equal(client.ask().tree[0], good)


def test_late_replies(client: Client) -> None:
    client.ask()
    for fault, seconds in ((kf.faults.Slow(0.2), 0.2), (kf.faults.Latency(0.1), 0.2)):
        client.worker.inject(fault)
        began = time.perf_counter()
        client.ask()
        assert seconds <= time.perf_counter() - began < seconds + 0.2
    client.worker.clear()
    client.worker.inject(kf.faults.Freeze(after=1))
    client.ask()
    asked = link.submit(client.channel(Message({"op": "hello"})))
    with pytest.raises(TimeoutError):
        link.run(link.call(link.run(link.InProcess({"w": client.worker.accept}).open("w")), _request()), 0.1)
    asked = link.submit(client.channel(Message({"op": "hello"})))
    time.sleep(0.05)
    assert not asked.done()
    link.network_loop().call_soon_threadsafe(client.worker.clear)
    assert asked.result(2.0).meta["hello"]["span"] == [0, 2]


def _request() -> Message:
    return Message({"op": "run", "span": [0, 2]}, {"hidden": HIDDEN})


def test_no_request_can_ask_for_a_fault(client: Client) -> None:
    for meta in ({"op": "fault", "fault": "Die"}, {"op": "clear"}, {"do": "clear"}):
        with pytest.raises(UnsupportedError, match="no operation"):
            link.run(link.call(client.channel, Message(meta)), 5.0)
    assert not client.worker.dead


def test_faults_are_checked_and_travel_as_data() -> None:
    for wrong in (
        lambda: kf.faults.Slow(-1.0),
        lambda: kf.faults.Slow(float("nan")),
        lambda: kf.faults.Drop(1.0),
        lambda: kf.faults.Corrupt("colour"),
        lambda: kf.faults.Refuse(op="stap"),
        lambda: kf.faults.Refuse(after=-1),
        lambda: kf.faults.Refuse(count=0),
        lambda: faults.from_json({"fault": "Explode"}),
        lambda: faults.from_json({"fault": "Slow", "minutes": 3}),
        lambda: kf.faults.inject(None, 0, "kill"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KwargError):
            wrong()
    some = kf.faults.Slow(0.5, count=3, op="step", after=6)
    assert repr(some) == "Slow(0.5, op='step', after=6, count=3)"
