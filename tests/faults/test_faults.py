"""Faults: each befalls exactly the requests it names, here and in a worker's process; scripts come from seeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kwflow as kf
from kwflow.client.routing import covers
from kwflow.errors import KwargError, KwflowError, ProtocolError, UnsupportedError, WorkerFailed, WorkerFull
from kwflow.faults import kinds as faults
from kwflow.faults.faulty import Faulty
from kwflow.swarm import serve as serving
from kwflow.swarm.hivemind import Node
from kwflow.swarm.streams import BEAT_SECONDS
from kwflow.wire import in_process, loop
from kwflow.wire.channel import call
from kwflow.wire.message import Message
from kwflow.worker.server import Served
from tests.doubles.here import HereSwarm
from tests.doubles.processes import until
from tests.oracle import tiny

F = kf.faults
HIDDEN = tiny.random(2, 3, tiny.HIDDEN)


class Client:
    """One client of one worker, below everything that tries again."""

    def __init__(
        self, open_channel: Callable[[], Any], inject: Callable[[F.Fault], None], clear: Callable[[], None], beat: float
    ):
        self._open, self.inject, self.clear, self.beat = open_channel, inject, clear, beat
        self.channel: Any = None

    def ask(self, op: str = "forward") -> Any:
        """The reply's tensors to a request of layers 0:2."""
        meta: dict[str, Any] = {"op": {"forward": "run", "backward": "run"}.get(op, op), "span": [0, 2]}
        tree: dict[str, Any] = {"hidden": HIDDEN}
        if op == "step":
            meta |= {"start": 0, "max_length": 8}
        if op == "backward":
            meta["ops"], tree["given"] = [{"vjp": [0], "given": [0]}], [HIDDEN]
        return self.send(Message(meta, tree)).tree

    def send(self, request: Message, seconds: float = 10.0) -> Message:
        if self.channel is None or self.channel.closed:
            self.channel = self._open()
        return loop.run(call(self.channel, request), seconds)


@pytest.fixture
def worker() -> Iterator[Faulty]:
    worker = Faulty(Served(tiny.span("llama", 0, 2)))
    yield worker
    worker.close()


@pytest.fixture
def client(worker: Faulty) -> Client:
    transport = in_process.InProcess({"w": worker.accept})
    return Client(lambda: loop.run(transport.open("w")), worker.inject, lambda: loop.run(_clear(worker)), 0.05)


async def _clear(worker: Faulty) -> None:
    worker.clear()


def test_a_fault_befalls_the_requests_it_names(client: Client, worker: Faulty) -> None:
    client.inject(F.Refuse(op="step", after=1, count=2))
    seen = []
    for op in ("forward", "step", "backward", "step", "hello", "step", "step"):
        try:
            client.ask(op)
            seen.append(op)
        except WorkerFailed:
            seen.append(f"{op} refused")
    assert seen == ["forward", "step", "backward", "step refused", "hello", "step refused", "step"]
    assert worker.hits == 2
    for op, others in (("forward", "backward"), ("backward", "forward"), ("hello", "step"), (None, "hello")):
        client.inject(F.Raise(op=op, count=None))
        client.ask(others)
        with pytest.raises(WorkerFailed, match="RuntimeError"):
            client.ask(op or "backward")
        client.clear()


# ---- what a client sees, in this process and over libp2p

SEEN: list[tuple[Any, type[KwflowError], str]] = [
    (F.Refuse(), WorkerFailed, "refuses"),
    (F.Refuse(full=True), WorkerFull, "refuses"),
    (F.Raise(), WorkerFailed, "RuntimeError"),
    (F.Drop(), WorkerFailed, "EOF"),
    (F.Drop(0.5), WorkerFailed, "EOF"),
    (F.Corrupt("bytes"), ProtocolError, "message"),
    (F.Corrupt("frame"), ProtocolError, "frame"),
]
DEADLY = [F.Die(), F.Die(computed=True)]


def check_errors(client: Client, cases: list[tuple[Any, type[KwflowError], str]]) -> None:
    """Each fault is seen once, by its error; what is asked next is answered as before."""
    good = client.ask()[0]
    for fault, error, said in cases:
        client.inject(fault)
        with pytest.raises(error, match=said):
            client.ask()
        assert torch.equal(client.ask()[0], good), fault


def check_corruptions(client: Client) -> None:
    good = client.ask()[0]
    wrong: dict[str, Callable[[Any], bool]] = {
        "missing": lambda tree: tree is None,
        "shape": lambda tree: tree[0].shape == (*good.shape[:-1], good.shape[-1] - 1),
        "dtype": lambda tree: tree[0].shape == good.shape and tree[0].dtype is torch.float64,
        "nan": lambda tree: tree[0].shape == good.shape and bool(tree[0].isnan().any()),
    }
    for how, seen in wrong.items():
        client.inject(F.Corrupt(how))
        assert seen(client.ask()), how
        assert torch.equal(client.ask()[0], good)


def check_delays(client: Client) -> None:
    client.ask()
    for fault, seconds in ((F.Slow(0.3), 0.3), (F.Latency(0.15), 0.3)):
        client.inject(fault)
        began = time.perf_counter()
        client.ask()
        assert seconds <= time.perf_counter() - began < seconds + 1.0
        client.clear()


def check_freeze(client: Client) -> None:
    """Nothing comes until it is cleared; then what was asked before is answered."""
    good = client.ask()[0]
    client.inject(F.Freeze(after=1))
    client.ask()
    asked = loop.submit(client.channel(Message({"op": "run", "span": [0, 2]}, {"hidden": HIDDEN})))
    received = client.channel.bytes_received
    time.sleep(1.5 * client.beat)
    assert not asked.done() and client.channel.bytes_received == received
    client.clear()
    assert torch.equal(asked.result(5.0).tree[0], good)


def check_hang(client: Client) -> None:
    client.ask()
    client.inject(F.Hang())
    with pytest.raises(TimeoutError):
        client.send(Message({"op": "run", "span": [0, 2]}, {"hidden": HIDDEN}), 0.3)
    client.channel = None  # in this process nothing closes it
    client.ask()


CHECKS = {
    "errors": lambda client: check_errors(client, SEEN),
    "corruptions": check_corruptions,
    "delays": check_delays,
    "freeze": check_freeze,
    "hang": check_hang,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_what_a_client_sees(client: Client, check: Callable[[Client], None]) -> None:
    check(client)


@pytest.mark.parametrize("fault", DEADLY, ids=repr)
def test_a_dead_worker_answers_nothing_more(client: Client, worker: Faulty, fault: F.Fault) -> None:
    client.ask()
    client.inject(fault)
    for said in ("EOF", "dead"):
        with pytest.raises(WorkerFailed, match=said):
            client.ask()
    assert worker.dead


@pytest.mark.swarm
@pytest.mark.rest
def test_what_a_client_sees_of_a_workers_process() -> None:
    """Every fault over a real worker's pipe, stream and directory; the last one ends its process."""
    with kf.local_swarm(tiny.folder("llama"), [(0, 2), (0, 4)]) as swarm:
        node = loop.run(Node.start(own_session=True, client=True, initial_peers=swarm.peers), 30)
        first = swarm.workers[0]
        client = Client(
            lambda: loop.run(node.open(first.peer), 10),
            lambda fault: F.inject(swarm, 0, fault),
            lambda: F.clear(swarm),
            BEAT_SECONDS,
        )
        try:
            for check in CHECKS.values():
                check(client)
            assert F.hits(swarm, 0) >= len(SEEN) and F.hits(swarm, 1) == 0
            _check_directory(swarm, client)
            swarm.pause(1)
            with pytest.raises(WorkerFailed, match="cannot be told"):
                F.inject(swarm, 1, F.Slow(1.0))
            F.heal(swarm)
            assert not swarm.workers[1].paused
            F.inject(swarm, 0, F.Die(computed=True, op="step"))
            client.ask()
            with pytest.raises(WorkerFailed, match="EOF"):
                client.ask("step")
            until(lambda: not first.alive, 10)
            with pytest.raises(WorkerFailed, match="cannot be told"):
                F.inject(swarm, 0, F.Slow(1.0))
        finally:
            loop.run(node.stop(), 10)


def _check_directory(swarm: Any, client: Client) -> None:
    with kf.connect(swarm.model, peers=swarm.peers[1:]) as flow:

        def listed(there: bool) -> None:
            deadline = time.monotonic() + 8.0
            while (swarm.workers[0].peer in [one.peer for one in flow.peers.known()]) != there:
                assert time.monotonic() < deadline
                time.sleep(0.05)

        for _ in range(2):
            listed(True)
            F.inject(swarm, 0, F.Expire())
            listed(False)
            client.ask()  # it serves whoever knows it
            F.clear(swarm)
        listed(True)


def test_no_request_can_ask_for_a_fault(client: Client, worker: Faulty) -> None:
    for meta in ({"op": "fault", "fault": "Die"}, {"op": "clear"}, {"do": "clear"}):
        with pytest.raises(UnsupportedError, match="no operation"):
            client.send(Message(meta))
    assert not worker.dead and not worker.hits


class _Node:
    """In a node's place: keeps what it is to serve, and ends the worker."""

    peer_id, addrs = "peer", ("/ip4/127.0.0.1",)
    accept: Any = None

    @classmethod
    async def start(cls, **_: Any) -> Any:
        return cls()

    async def serve(self, accept: Any, **more: Any) -> None:
        type(self).accept = accept
        assert bool(more) == isinstance(accept.__self__, Faulty)

    async def store(self, records: Any, ttl: float) -> None: ...

    async def stop(self) -> None: ...


class _Parent:
    told: Any = None

    def ready(self, **_: Any) -> None: ...

    def obey(self, command: Any) -> None:
        type(self).told = command


@pytest.mark.parametrize("parent", [None, _Parent()], ids=["on its own", "of a local swarm"])
def test_only_a_local_swarms_worker_can_fail_on_purpose(monkeypatch: pytest.MonkeyPatch, parent: Any) -> None:
    monkeypatch.setattr(serving, "Node", _Node)

    async def work() -> None:
        how: Any = {"join": [], "listen": "127.0.0.1", "port": 0, "public": False, "kv_bytes": 1, "parent": parent}
        task = asyncio.create_task(serving.serve(tiny.span("llama", 0, 2), "llama", **how))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(work())
    assert isinstance(_Node.accept.__self__, Served if parent is None else Faulty)
    assert parent is None or parent.told.__self__ is _Node.accept.__self__


def test_faults_are_checked_and_travel_as_data() -> None:
    for wrong in (
        lambda: F.Slow(-1.0),
        lambda: F.Latency(float("nan")),
        lambda: F.Drop(1.0),
        lambda: F.Corrupt("colour"),
        lambda: F.Refuse(op="stap"),
        lambda: F.Refuse(after=-1),
        lambda: F.Refuse(count=0),
        lambda: faults.from_json({"fault": "Explode"}),
        lambda: faults.from_json({"fault": "Slow", "minutes": 3}),
        lambda: F.inject(None, 0, "kill"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KwargError):
            wrong()
    some = F.Slow(0.5, count=3, op="step", after=6)
    assert repr(some) == "Slow(0.5, op='step', after=6, count=3)" and repr(F.Die(computed=True)) == "Die(computed=True)"
    for fault in (some, *(fault for fault, _, _ in SEEN), *DEADLY, F.Latency(0.1), F.Expire(), F.Freeze(), F.Hang()):
        assert faults.from_json(fault.to_json()) == fault


# ---- scripts

SPANS = [(0, 2), (1, 4), (0, 3), (2, 4)]


def test_random_scripts_come_from_their_seed_and_leave_a_route() -> None:
    texts = set()
    for seed in range(300):
        script = F.Script.random(seed, SPANS, faults=5, moments=20, deaths=2)
        assert script == F.Script.random(seed, SPANS, faults=5, moments=20, deaths=2)
        assert [event.moment for event in script.events] == sorted(event.moment for event in script.events)
        texts.add(str(script))
        for there in _healthy(script):
            assert covers(there, 0, 4), str(script)  # type: ignore[arg-type]
    assert len(texts) == 300
    without = [F.Script.random(seed, SPANS, faults=6, moments=20, spares=False, deaths=4) for seed in range(100)]
    assert any(not covers(there, 0, 4) for script in without for there in _healthy(script))  # type: ignore[arg-type]


class _Span:
    peer = checkpoint = ""

    def __init__(self, span: tuple[int, int]):
        self.start, self.stop = span


def _healthy(script: F.Script) -> Iterator[list[_Span]]:
    """At each moment, whoever lives, answers, and can be found; who comes back or is new, from the next one on."""
    spans, away, dead = list(SPANS), set[int](), set[int]()
    for moment in range(script.events[-1].moment + 1):
        late = []
        for event in (event for event in script.events if event.moment == moment):
            match event.what:
                case "add":
                    assert event.span is not None
                    late.append(event)
                    spans.append(event.span)
                    away.add(len(spans) - 1)
                case "kill" | F.Die():
                    dead.add(event.worker)
                case "pause" | F.Freeze() | F.Expire() | F.Refuse(count=None):
                    away.add(event.worker)
                case F.Corrupt(how="nan") | F.Refuse(full=True):  # believed, if nobody else can be asked
                    away.add(event.worker)
                case "resume" | "clear":
                    late.append(event)
                    away -= {event.worker} if event.later else set()
        yield [_Span(span) for number, span in enumerate(spans) if number not in away | dead]
        away -= {event.worker for event in late}


def test_a_script_is_carried_out_at_its_moments() -> None:
    swarm = HereSwarm(tiny.folder("llama"), [(0, 4), (0, 2)])
    events = (
        F.Event(0, 0, F.Refuse(after=1)),
        F.Event(0, 1, F.Expire()),
        F.Event(2, 1, "pause"),
        F.Event(3, 1, "resume"),
        F.Event(3, 1, "clear"),
        F.Event(4, 2, "add", (1, 4)),
        F.Event(4, 0, "kill"),
        F.Event(5, 0, F.Raise()),  # to the dead, nothing
        F.Event(5, 1, "pause", later=0.05),
    )
    script = F.Script(events)
    assert str(script).startswith("0: worker 0 Refuse(after=1); 0: worker 1 Expire(); 2: worker 1 pause")
    assert "4: add 1:4" in str(script) and str(F.Script(())) == "nothing"
    seen = []
    for moment in range(6):
        assert script.at(moment, swarm) == tuple(event for event in events if event.moment == moment)
        seen.append([(one.alive, one.paused, one.listed) for one in swarm.workers])
    well, paused, expired = (True, False, True), (True, True, False), (True, False, False)
    dead = (False, False, True)
    assert seen == [
        [well, expired],
        [well, expired],
        [well, paused],
        [well, well],
        [dead, well, well],
        [dead, well, well],
    ]
    assert str(script).endswith("5: worker 1 pause after 0.05 s")
    script.wait()
    assert swarm.workers[1].paused
    F.heal(swarm)
    assert not swarm.workers[1].paused
    swarm.close()


def test_an_event_that_cannot_happen_is_refused() -> None:
    for what, span, said in (("add", None, "of a span"), ("kill", (0, 2), "of a span"), ("kil", None, "one of kill")):
        with pytest.raises(KwargError, match=said):
            kf.faults.Event(0, 0, what, span)  # type: ignore[arg-type]
