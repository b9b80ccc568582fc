"""Workers of this process behind a flow: a Transport that a test listens to, and that fails where the test says so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from kwflow.client.flow import Flow
from kwflow.client.peers import KnownPeers
from kwflow.client.routing import Serves
from kwflow.errors import WorkerFailed
from kwflow.swarm.connect import in_process
from kwflow.wire.channel import DIAL_SECONDS, Accept, Channel, Connection, Cut
from kwflow.wire.in_process import InProcess
from kwflow.wire.message import Message
from kwflow.worker.server import Served

Answer = Callable[[Message], Message]


@dataclass(frozen=True)
class Listed:
    """A worker as a directory has it."""

    peer: str
    start: int
    stop: int
    checkpoint: str = ""


class Workers:
    """A Transport to workers of this process, through the same bytes as the network; a test knows them by number.

    ``seen``: who was asked for what; ``dialled``: to whom channels were opened; ``hidden``: who is not in the
    directory. ``before_dial`` and ``before`` (a request) are awaited with the worker's number.
    """

    def __init__(self, served: Sequence[Served]):
        self.served, self.names = list(served), list[str]()
        self.seen, self.dialled = list[tuple[int, str]](), list[int]()
        self.hidden: set[int] = set()
        self.listeners: list[Callable[[str, Message, Message], object]] = []  # peer, request, reply
        self.before_dial: Callable[[int], Awaitable[object]] | None = None
        self.before: Callable[[int], Awaitable[object]] | None = None
        self.frees_after: dict[int, float] = {}  # seconds until a worker knows that a channel was closed
        self.left: dict[int, int] = {}  # requests until a worker dies
        self.changes: dict[int, Answer] = {}

    def kill(self, worker: int, after: int = 0) -> None:
        """Let it die: now, or as soon as it has answered so many more requests (but hello)."""
        self.left[worker] = after

    def revive(self, worker: int) -> None:
        self.left.pop(worker, None)

    def answers(self, worker: int, answer: Answer) -> None:
        """Let it change its replies (but hello)."""
        self.changes[worker] = answer

    def asked(self, worker: int) -> int:
        return sum(number == worker and op in ("run", "step") for number, op in self.seen)

    def interrupt(
        self, step: Callable[[], object], worker: int = 0, then: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Interrupt the caller of a step, as Jupyter does, once a worker has its part, which goes on after ``then``."""

        async def before(number: int) -> None:
            if number == worker:
                self.before = None
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if then is not None:
                    await then()

        self.before, handler = before, signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                step()
        finally:
            signal.signal(signal.SIGINT, handler)

    def peers(self, checkpoint: str = "") -> KnownPeers:
        return in_process(self.served, checkpoint=checkpoint, transport=self._to, view=self._view)

    def _to(self, accept: Mapping[str, Accept]) -> Workers:
        self.names = list(accept)
        self._inner = InProcess({peer: self._listening(peer, one) for peer, one in accept.items()})
        return self

    def _listening(self, peer: str, accept: Accept) -> Accept:
        return lambda remote: _Listening(self, peer, accept(remote))

    def _view(self) -> list[Serves]:
        return [self.listed(number) for number in range(len(self.served)) if number not in self.hidden]

    def listed(self, number: int) -> Serves:
        """What the directory says of a worker."""
        spec = self.served[number].spec
        return Listed(self.names[number], spec.start, spec.stop)

    async def open(self, peer: str, *, timeout: float = DIAL_SECONDS) -> Channel:
        number = self.names.index(peer)
        self.dialled.append(number)
        if self.before_dial is not None:
            await self.before_dial(number)
        if self.left.get(number) == 0:
            raise WorkerFailed("connection refused", peer=peer)
        return await self._inner.open(peer, timeout=timeout)


class _Listening:
    """The worker's side of a channel (a Connection), with what a test does there."""

    def __init__(self, workers: Workers, peer: str, inner: Connection):
        self.workers, self.peer, self.inner = workers, peer, inner
        self.number = workers.names.index(peer)

    async def handle(self, request: Message) -> Message:
        workers, number, op = self.workers, self.number, str(request.meta["op"])
        workers.seen.append((number, op))
        if op != "hello" and number in workers.left:
            if workers.left[number] == 0:
                raise Cut()
            workers.left[number] -= 1
        if op != "hello" and workers.before is not None:
            await workers.before(number)
        reply = await self.inner.handle(request)
        change = workers.changes.get(number) if op != "hello" and "error" not in reply.meta else None
        reply = reply if change is None else change(reply)
        for listener in workers.listeners:
            listener(self.peer, request, reply)
        return reply

    def close(self) -> None:
        if seconds := self.workers.frees_after.get(self.number):
            threading.Timer(seconds, self.inner.close).start()
        else:
            self.inner.close()


def workers_of(flow: Flow) -> Workers:
    """The workers of a flow that a test made."""
    transport = cast(Any, flow.peers.pool.transport)
    assert isinstance(transport, Workers), f"this flow goes to {transport!r}: make it with tests.doubles.workers"
    return transport


class Requests:
    """Counts and keeps what a flow's workers are asked while the ``with`` block runs: (peer, request, reply)."""

    def __init__(self, flow: Flow):
        self.workers, self.seen = workers_of(flow), list[tuple[str, Any, Any]]()
        flow.kwargs()  # hello goes first

    def _heard(self, peer: str, request: Message, reply: Message) -> None:
        if request.meta["op"] != "push":  # between workers
            self.seen.append((peer, request, reply))

    def __enter__(self) -> Requests:
        self.workers.listeners.append(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.listeners.remove(self._heard)

    def __len__(self) -> int:
        return len(self.seen)


def kv_used(flow: Flow) -> list[int]:
    """Bytes that each worker keeps for sessions."""
    return [one.kv_used for one in workers_of(flow).served]


def settle(flow: Flow, want: list[int]) -> None:
    """Wait until the workers have freed what closed sessions held."""
    deadline = time.monotonic() + 5
    while kv_used(flow) != want:
        assert time.monotonic() < deadline, f"{kv_used(flow)} in use, expected {want}"
        time.sleep(0.005)
