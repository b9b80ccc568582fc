"""What carries a request to a worker and its reply back, and the one network thread of a process.

A transport opens channels to peers; a channel is one long-lived exchange, and closing it frees the sessions behind it.
``InProcess`` is the transport of tests and of ``kf.connect(model)`` without peers: it goes through the same bytes as
libp2p. Words only: no torch.nn, no network library.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kwflow import wire
from kwflow.errors import KwflowError, WorkerFailed, from_wire, to_wire
from kwflow.wire import Message

T = TypeVar("T")

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

    Faults raise it (``swarm.faulty``), to be seen by a client as a worker that dies while it answers.
    """

    def __init__(self, sent: bytes = b""):
        super().__init__("the stream is cut (a fault)")
        self.sent = sent


# ---- the network thread ------------------------------------------------------------------------------------------

_lock = threading.RLock()  # also taken by finalizers, which may run anywhere
_loop: asyncio.AbstractEventLoop | None = None
_pid: int | None = None


def network_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's one network thread, started at first use (again in a forked child)."""
    global _loop, _pid
    with _lock:
        if _loop is None or _loop.is_closed() or _pid != os.getpid():
            loop, ready = asyncio.new_event_loop(), threading.Event()

            def serve() -> None:
                asyncio.set_event_loop(loop)
                loop.call_soon(ready.set)
                loop.run_forever()

            threading.Thread(target=serve, name="kwflow-network", daemon=True).start()
            ready.wait()
            if _pid is None:
                atexit.register(_wind_up)
            _loop, _pid = loop, os.getpid()
        return _loop


def _wind_up() -> None:
    """At exit: cancel what still runs on the network thread, so that nothing is destroyed while it is pending."""

    async def cancel_others() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)

    if _loop is not None and _pid == os.getpid() and _loop.is_running():
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(cancel_others(), _loop).result(2.0)


def on_network_thread() -> bool:
    """Whether the caller runs on the network thread, where nothing may wait for it."""
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the network thread; its result is awaited there or elsewhere."""
    return asyncio.run_coroutine_threadsafe(work, network_loop())


def run(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine on the network thread and wait for it here; an interrupt cancels it.

    Raises RuntimeError when called from the network thread itself, where it would wait for itself for ever.
    """
    if on_network_thread():
        work.close()
        raise RuntimeError("a blocking kwflow call on kwflow's own network thread; use `await flow.acall(...)` there")
    future = submit(work)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


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
        with _lock:
            self._watching = (*self._watching, timings)
        try:
            yield timings
        finally:
            with _lock:
                self._watching = tuple(own for own in self._watching if own is not timings)

    async def aclose(self) -> None:
        for channels in self._idle.values():
            while channels:
                await channels.pop().aclose()


def _said(reply: Message, name: str, seconds: float) -> float:
    """What a worker says that something took, up to the ``seconds`` of the whole; 0 where it says no such thing."""
    said = reply.meta.get(name)
    if not isinstance(said, int | float) or isinstance(said, bool) or not 0 <= said <= seconds:
        return 0.0
    return float(said)


# ---- in-process --------------------------------------------------------------------------------------------------


class InProcess:
    """A transport to workers in this process, through the same bytes as the network."""

    def __init__(self, accept: Mapping[str, Accept]):
        self._accept = dict(accept)

    async def open(self, peer: str, *, timeout: float = DIAL_SECONDS) -> Channel:
        if peer not in self._accept:
            raise WorkerFailed(f"no worker {peer!r} in this process", peer=peer)
        try:
            return _InProcessChannel(peer, self._accept[peer]("in-process"))
        except WorkerFailed as error:
            error.peer = error.peer or peer
            raise


class _InProcessChannel:
    def __init__(self, peer: str, connection: Connection):
        self.peer, self._connection = peer, connection
        self.bytes_sent = self.bytes_received = 0
        self.closed = False
        self._turn = asyncio.Lock()

    async def __call__(self, request: Message) -> Message:
        async with self._turn:
            if self.closed:
                raise WorkerFailed("the channel is closed", peer=self.peer)
            data = wire.dumps(request)
            self.bytes_sent += len(data)
            try:
                reply = await self._connection.handle(wire.loads(data))
            except KwflowError as error:
                reply = Message({"error": to_wire(error)})
            except Cut as cut:
                await self.aclose()
                return self._rest_of(cut.sent)
            answer = wire.dumps(reply)
            self.bytes_received += len(answer)
            return wire.loads(answer)

    def _rest_of(self, sent: bytes) -> Message:
        """What is read of a reply that was cut. Raises WorkerFailed, as a stream's end does."""
        for kind, payload in wire.Frames().feed(sent):
            if kind is wire.Kind.LAST:
                return wire.loads(payload)
        raise WorkerFailed(f"worker {self.peer} closed the stream (EOF)", peer=self.peer)

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.close()
