"""What carries a request to a worker and its reply back.

A transport opens channels to peers; a channel is one long-lived exchange, and closing it frees the sessions behind it.
``in_process`` is the transport of tests and of ``kf.connect(model)`` without peers: it goes through the same bytes as
libp2p. Words only: no torch.nn, no network library.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kwflow.errors import WorkerFailed, from_wire
from kwflow.kwargs.schema import Span
from kwflow.wire.message import Message

DIAL_SECONDS = 5.0


class Channel(Protocol):
    """One long-lived exchange with one worker: one request at a time."""

    @property
    def peer(self) -> str: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def closed(self) -> bool: ...

    async def __call__(self, request: Message) -> Message:
        """Send a request and wait for its reply. Raises WorkerFailed on EOF, silence or broken bytes."""
        ...

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """Opens channels to peers."""

    async def open(self, peer: str, *, timeout: float = DIAL_SECONDS) -> Channel: ...


class Connection(Protocol):
    """The worker's side of a channel."""

    async def handle(self, request: Message) -> Message: ...

    def close(self) -> None: ...


Accept = Callable[[str], Connection]


class Cut(Exception):
    """Raised by a connection whose stream ends in the middle of a reply; ``sent``: the bytes that still get out.

    Faults raise it (``kwflow.faults.faulty``), to be seen by a client as a worker that dies while it answers.
    """

    def __init__(self, sent: bytes = b""):
        super().__init__("the stream is cut (a fault)")
        self.sent = sent


# ---- calls -------------------------------------------------------------------------------------------------------


async def call(channel: Channel, request: Message) -> Message:
    """Send a request; a reply that carries an error is raised as that error."""
    try:
        reply = await channel(request)
    except WorkerFailed as error:
        error.peer = error.peer or channel.peer
        raise
    description = reply.meta.get("error")
    if isinstance(description, Mapping):
        raise from_wire(description, peer=channel.peer)
    return reply


@dataclass(frozen=True)
class Timing:
    """One request for some layers and its reply, as the client saw them; times in seconds. See ``flow.timed``."""

    op: str  # forward, derivative (backward, jvp and others) or step
    layers: Span
    peer: str
    began: float  # by time.perf_counter()
    seconds: float  # in all: from the request to its reply, on a stream that is open
    waited: float  # by the worker, for the worker before it, which hands its output of a step on
    queue: float  # behind other work of the worker
    compute: float
    bytes_sent: int
    bytes_received: int

    @property
    def network(self) -> float:
        """What is left: tensors to bytes and back, and their way both ways."""
        return max(0.0, self.seconds - self.waited - self.queue - self.compute)

    def __str__(self) -> str:
        names = ("network", "waited", "queue", "compute")
        parts = ", ".join(f"{name} {1000 * getattr(self, name):.1f}" for name in names)
        start, stop = self.layers
        return (
            f"{self.op} of layers {start}:{stop} on {self.peer[-8:]}: {1000 * self.seconds:.1f} ms ({parts}), "
            f"{self.bytes_sent:,} bytes there, {self.bytes_received:,} back"
        )


class Pool:
    """Idle channels to each peer, for requests that need no session; a channel that failed is not used again.

    What goes through ``exchange`` is counted: bytes, and while somebody watches (``timed``), time.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        self.bytes_sent = self.bytes_received = 0
        self._idle: dict[str, list[Channel]] = defaultdict(list)
        self._watching: tuple[list[Timing], ...] = ()
        self._lock = threading.Lock()

    async def __call__(self, peer: str, request: Message) -> Message:
        idle = self._idle[peer]
        while idle and idle[-1].closed:
            idle.pop()
        channel = idle.pop() if idle else await self.transport.open(peer)
        try:
            return await self.exchange(channel, request)
        finally:
            if channel.closed:
                await channel.aclose()
            else:
                idle.append(channel)

    async def exchange(self, channel: Channel, request: Message) -> Message:
        """``call`` on a channel that nobody else uses, counted."""
        began, sent, received = time.perf_counter(), channel.bytes_sent, channel.bytes_received
        try:
            reply = await call(channel, request)
        finally:
            sent, received = channel.bytes_sent - sent, channel.bytes_received - received
            self.bytes_sent += sent
            self.bytes_received += received
        if self._watching and "span" in request.meta:
            seconds = time.perf_counter() - began
            spent = {name: _announced_seconds(reply, name, seconds) for name in ("waited", "queue", "compute")}
            op = "derivative" if "ops" in request.meta else "step" if request.meta["op"] == "step" else "forward"
            start, stop = request.meta["span"]
            moved = {"bytes_sent": sent, "bytes_received": received}
            timing = Timing(op, (start, stop), channel.peer, began, seconds, **spent, **moved)
            for timings in self._watching:
                timings.append(timing)
        return reply

    @contextlib.contextmanager
    def timed(self) -> Iterator[list[Timing]]:
        """Collect the time of each request for layers that is answered meanwhile."""
        timings: list[Timing] = []
        with self._lock:
            self._watching = (*self._watching, timings)
        try:
            yield timings
        finally:
            with self._lock:
                self._watching = tuple(watching for watching in self._watching if watching is not timings)

    async def aclose(self) -> None:
        for channels in self._idle.values():
            while channels:
                await channels.pop().aclose()

    @property
    def idle(self) -> bool:
        """Whether a channel is open that nobody uses."""
        return any(self._idle.values())

    def forget(self) -> None:
        """In a forked child: drop the parent's channels without closing them."""
        self._idle.clear()
        self._lock = threading.Lock()  # a thread of the parent's may have had it


def _announced_seconds(reply: Message, name: str, seconds: float) -> float:
    """What a worker says that something took, up to the ``seconds`` of the whole; 0 where it says no such thing."""
    value = reply.meta.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= seconds:
        return 0.0
    return float(value)
