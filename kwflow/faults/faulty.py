"""A worker that fails on purpose: faults around what a ``Served`` accepts, for tests and notebooks.

Only a worker that a local swarm started has it, and it obeys the pipe that it inherited; no request reaches it. Tests
put it around workers of their own process, where a worker that is dead answers nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.blocks.span import SpanSpec
from kwflow.errors import KwargError, WorkerFailed, WorkerFull, to_wire
from kwflow.faults import late
from kwflow.faults.kinds import (
    Corrupt,
    Die,
    Drop,
    Expire,
    Fault,
    Freeze,
    Hang,
    Latency,
    OfRequests,
    Raise,
    Refuse,
    Slow,
    from_json,
)
from kwflow.wire.channel import Connection, Cut
from kwflow.wire.frames import Kind, frame, frames
from kwflow.wire.message import Message, dumps
from kwflow.worker.inbox import Neighbour
from kwflow.worker.server import Served

Announce = Callable[[int], AbstractAsyncContextManager[None]]  # given how often it was announced before


@dataclass
class _Armed:
    """A fault of requests that is in force, and how many of its requests have come."""

    fault: OfRequests
    requests: int = 0

    def strikes(self, operation: str) -> bool:
        """Whether this request is one of those; it is counted."""
        fault = self.fault
        if operation != fault.op and (fault.op is not None or operation == "hello"):
            return False
        self.requests += 1
        return self.requests > fault.after and not self._over(self.requests - 1)

    @property
    def over(self) -> bool:
        return self._over(self.requests)

    def _over(self, requests: int) -> bool:
        return self.fault.count is not None and requests >= self.fault.after + self.fault.count


class Faulty:
    """A served span with faults; in its place, ``Served``'s own ``accept``.

        worker = Faulty(Served(spec))
        worker.inject(Drop(op="step", after=6))
        flow = Flow(ends, in_process([worker]), (0, 4))

    ``end``: how it dies; in a process of its own, with the process.
    """

    def __init__(self, served: Served, *, end: Callable[[], None] | None = None):
        self.served = served
        self.dead, self.hits, self.latency = False, 0, 0.0
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._end, self._late = end, False
        self._armed: list[_Armed] = []
        self._announce: Announce | None = None
        self._announced: AsyncExitStack | None = None
        self._listings = 0  # times that it was announced

    @property
    def spec(self) -> SpanSpec:
        return self.served.spec

    @property
    def neighbours(self) -> Neighbour | None:
        return self.served.neighbours

    @neighbours.setter
    def neighbours(self, value: Neighbour | None) -> None:
        self.served.neighbours = value

    def accept(self, remote: str) -> FaultyConnection:
        """Serve a channel. Raises WorkerFailed once it is dead."""
        if self.dead:
            raise WorkerFailed("the worker is dead (a fault)")
        return FaultyConnection(self, self.served.accept(remote))

    def late(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Any, Any]:
        """A stream to this worker, with its latency."""
        self._late = True
        return late.late(reader, writer, self)

    def close(self) -> None:
        self.served.close()

    # ---- what is in force

    def inject(self, fault: Fault) -> None:
        """Put a fault of requests, or a latency, in force. Call it on the network thread, or before the first call."""
        if isinstance(fault, OfRequests):
            self._armed.append(_Armed(fault))
        elif isinstance(fault, Latency):
            self.latency = fault.seconds
        else:
            raise KwargError(f"{fault!r} is of a worker that a directory knows: kf.faults.inject(swarm, …)")

    def clear(self) -> None:
        """End every fault; what was frozen goes on."""
        self._armed.clear()
        self.latency = 0.0
        self.thawed.set()

    async def command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the process that started this one asks for; done when it is in force."""
        if "fault" in request:
            fault = from_json(request)
            if isinstance(fault, Expire):
                await self._show(False)
            else:
                self.inject(fault)
        elif request.get("do") == "clear":
            self.clear()
            await self._show(True)
        return {"hits": self.hits}

    def strikes(self, operation: str) -> list[OfRequests]:
        """The faults that befall a request which has come now."""
        struck = [armed.fault for armed in self._armed if armed.strikes(operation)]
        self._armed = [armed for armed in self._armed if not armed.over]
        self.hits += bool(struck)
        return struck

    def die(self) -> None:
        """End the process, or where there is none, every connection."""
        self.dead = True
        self.thawed.set()
        if self._end is not None:
            self._end()

    async def pass_on(self) -> None:
        """Wait as long as a message is late here; a stream has seen to it where there is one."""
        if self.latency and not self._late:
            await asyncio.sleep(self.latency)
        await self.thawed.wait()
        if self.dead:
            raise Cut

    # ---- in the directory

    @asynccontextmanager
    async def announced(self, announce: Announce) -> AsyncIterator[None]:
        """Keep the worker in the directory, but for the times in which it is expired."""
        self._announce = announce
        await self._show(True)
        try:
            yield
        finally:
            await self._show(False)

    async def _show(self, shown: bool) -> None:
        if not shown and self._announced is not None:
            announced, self._announced = self._announced, None
            await announced.aclose()
        elif shown and self._announced is None and self._announce is not None:
            self._announced = AsyncExitStack()
            await self._announced.enter_async_context(self._announce(self._listings))
            self._listings += 1


class FaultyConnection:
    """One client's channel to a worker with faults."""

    def __init__(self, worker: Faulty, connection: Connection):
        self._worker, self._connection = worker, connection

    async def handle(self, request: Message) -> Message:
        """Answer one request, or fail as is in force. Raises ``wire.channel.Cut`` where the stream has to end."""
        await self._worker.pass_on()
        struck = self._worker.strikes(_operation(request))
        try:
            for fault in struck:
                self._before(fault)
        except (WorkerFailed, RuntimeError) as error:
            return Message({"error": to_wire(error, span=request.meta.get("span"))})
        await self._worker.pass_on()
        reply = await self._connection.handle(request)
        for fault in struck:
            reply = await self._after(fault, reply)
        await self._worker.pass_on()
        return reply

    def close(self) -> None:
        self._connection.close()

    def _before(self, fault: OfRequests) -> None:
        match fault:
            case Refuse(full=full):
                raise (WorkerFull if full else WorkerFailed)("the worker refuses (a fault)")
            case Raise():
                raise RuntimeError("a bug of the worker's (a fault)")
            case Die(computed=False):
                self._worker.die()
            case Freeze():
                self._worker.thawed.clear()

    async def _after(self, fault: OfRequests, reply: Message) -> Message:
        match fault:
            case Slow(seconds=seconds):
                await asyncio.sleep(seconds)
            case Hang():
                await asyncio.Event().wait()
            case Die(computed=True):
                self._worker.die()
            case Drop(part=part):
                data = b"".join(frames(dumps(reply)))
                raise Cut(data[: int(part * len(data))])
            case Corrupt(how=how):
                return _corrupted(reply, how)
        return reply


def _operation(request: Message) -> str:
    name = request.meta.get("op")
    if name == "run":
        return "backward" if request.meta.get("ops") else "forward"
    return str(name)


def _corrupted(reply: Message, how: str) -> Message:
    if how == "frame":
        raise Cut(b"\xff" * 64)
    if how == "bytes":
        raise Cut(frame(Kind.LAST, b"this is no message, though it came in a frame"))
    if how == "missing":
        return Message()
    if not isinstance(reply.tree, list) or not any(isinstance(leaf, Tensor) for leaf in reply.tree):
        return reply  # an error, or hello
    at = next(i for i, leaf in enumerate(reply.tree) if isinstance(leaf, Tensor))
    tree = list(reply.tree)
    tree[at] = _wrong(tree[at], how)
    return Message(reply.meta, tree)


def _wrong(tensor: Tensor, how: str) -> Tensor:
    if how == "shape":
        return tensor[..., :-1]
    if how == "dtype":
        return tensor.to(torch.float32 if tensor.dtype is torch.float64 else torch.float64)
    tensor = tensor.clone()
    tensor[..., 0] = float("nan")
    return tensor
