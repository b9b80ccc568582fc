"""What carries a request to a worker and its reply back.

A transport opens channels to peers; a channel is one long-lived exchange, and closing it frees the sessions behind it.
``in_process`` is the transport of tests and of ``kf.connect(model)`` without peers: it goes through the same bytes as
libp2p. Words only: no torch.nn, no network library.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kwflow.errors import KwflowError, NotKept, UnsupportedError, WorkerFailed, from_wire
from kwflow.kwargs.schema import Span
from kwflow.wire.message import Message
from kwflow.wire.uploads import Piece, Uploads

DIAL_SECONDS = 5.0
DROP_SECONDS = 1.0  # for a worker to free what was uploaded, when all is closed


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
_OPS = {"step": "step", "keep": "upload"}  # what Timing calls them


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

    op: str  # forward, derivative (backward, jvp and others), step, or upload: of one piece, in all its chunks
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
        self.uploads = Uploads()
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
        """``call`` on a channel that nobody else uses, counted. What was uploaded is named, brought where lacking."""
        referring, pieces = await self.uploads.refer(channel.peer, request)
        for again in (True, False):
            if not await self._bring(channel, request, pieces):
                break
            try:
                return await self._counted(channel, referring)
            except NotKept:  # dropped, or the worker is a new one
                self.uploads.forget(channel.peer, pieces)
                if not again:
                    raise
        return await self._counted(channel, request)

    async def _bring(self, channel: Channel, request: Message, pieces: Mapping[str, Piece]) -> bool:
        """Put pieces on a worker that lacks them, each once; False where it keeps nothing."""
        uploads, peer = self.uploads, channel.peer
        for name, piece in pieces.items():
            async with uploads.turns[peer, name]:
                if name in uploads.there[peer]:
                    continue
                meta = {"scope": uploads.scope, "name": name, "span": request.meta.get("span")}
                try:
                    await self._counted(channel, *piece.chunks(meta))
                except UnsupportedError:
                    uploads.unable.add(peer)
                    return False
                uploads.there[peer].add(name)
        return True

    async def _counted(self, channel: Channel, request: Message, *more: Message) -> Message:
        """The reply to the last of some requests, all counted as one; chunks that a worker needs not are not sent."""
        began, sent, received = time.perf_counter(), channel.bytes_sent, channel.bytes_received
        try:
            reply = await call(channel, request)
            for chunk in more:
                if reply.meta.get("kept") is True:
                    break
                reply = await call(channel, chunk)
        finally:
            sent, received = channel.bytes_sent - sent, channel.bytes_received - received
            self.bytes_sent += sent
            self.bytes_received += received
        if self._watching and request.meta.get("span") is not None:
            seconds = time.perf_counter() - began
            spent = {name: _announced_seconds(reply, name, seconds) for name in ("waited", "queue", "compute")}
            op = "derivative" if "ops" in request.meta else _OPS.get(request.meta["op"], "forward")
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
        for peer, names in self.uploads.clear().items():
            if idle := [channel for channel in self._idle.get(peer, ()) if not channel.closed]:
                with contextlib.suppress(KwflowError, OSError, TimeoutError):
                    async with asyncio.timeout(DROP_SECONDS):
                        await idle[0](Message({"op": "drop", "scope": self.uploads.scope, "names": names}))
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
        self.uploads.forked()
        self._lock = threading.Lock()  # a thread of the parent's may have had it


def _announced_seconds(reply: Message, name: str, seconds: float) -> float:
    """What a worker says that something took, up to the ``seconds`` of the whole; 0 where it says no such thing."""
    value = reply.meta.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= seconds:
        return 0.0
    return float(value)
