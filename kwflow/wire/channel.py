"""What carries a request to a worker and its reply back, and the one network thread of a process.

A transport opens channels to peers; a channel is one long-lived exchange, and closing it frees the sessions behind it.
``InProcess`` is the transport of tests and of ``kf.connect(model)`` without peers: it goes through the same bytes as
libp2p. Words only: no torch.nn, no network library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kwflow import background
from kwflow.errors import WorkerFailed, from_wire
from kwflow.wire.loop import network_loop
from kwflow.wire.message import Message

DIAL_SECONDS = 5.0

log = logging.getLogger(__name__)


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

    Faults raise it (``swarm.faulty``), to be seen by a client as a worker that dies while it answers.
    """

    def __init__(self, sent: bytes = b""):
        super().__init__("the stream is cut (a fault)")
        self.sent = sent


_network: _Network | None = None
_parents: list[_Network] = []  # in a forked child: nothing of it may be finalized here


class _Network:
    """An event loop and its thread. Nothing but the end of the process ends it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._over = False
        background.start_thread(self._serve, "kwflow-network", stop=self._stop)
        background.disown_in_forks(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._over:
            error = None
            try:
                self.loop.run_forever()
            except BaseException as raised:  # noqa: BLE001  SystemExit in a task, say
                error = raised
            if not self._over:
                log.warning("the network thread was ended (%r); it goes on", error, exc_info=error)
        self.loop.close()

    def _stop(self) -> None:
        self._over = True
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    async def _end(self) -> None:
        """Cancel what still runs, so that nothing is destroyed while it is pending."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)
        self.loop.stop()

    def forked(self) -> None:
        """In a forked child: keep the parent's loop as it stands, and out of what it shares with the parent's."""
        global _network
        _network = None
        _parents.append(self)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        own = [self._selector.fileno()] if hasattr(self._selector, "fileno") else []
        background.blind([*own, *(key.fd for key in self._selector.get_map().values())])


def begin(work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Start ``background.Background`` on the network thread, from any thread."""
    network_loop().call_soon_threadsafe(background.Background, work, what)


# ---- calls -------------------------------------------------------------------------------------------------------


async def call(channel: Channel, request: Message) -> Message:
    """Send a request; a reply that carries an error is raised as that error."""
    try:
        reply = await channel(request)
    except WorkerFailed as error:
        error.peer = error.peer or channel.peer
        raise
    said = reply.meta.get("error")
    if isinstance(said, Mapping):
        raise from_wire(said, peer=channel.peer)
    return reply


@dataclass(frozen=True)
class Timing:
    """One request for some layers and its reply, as the client saw them; times in seconds. See ``flow.timed``."""

    op: str  # forward, derivative (backward, jvp and others) or step
    layers: tuple[int, int]
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
            spent = {name: _said(reply, name, seconds) for name in ("waited", "queue", "compute")}
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
                self._watching = tuple(own for own in self._watching if own is not timings)

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


def _said(reply: Message, name: str, seconds: float) -> float:
    """What a worker says that something took, up to the ``seconds`` of the whole; 0 where it says no such thing."""
    said = reply.meta.get(name)
    if not isinstance(said, int | float) or isinstance(said, bool) or not 0 <= said <= seconds:
        return 0.0
    return float(said)
