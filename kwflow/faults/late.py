"""A stream whose bytes come late, or not for a while, in order: what a slow link or a stopped worker looks like.

It wraps asyncio's reader and writer of one stream and asks a ``LinkState`` how things stand. No torch, no network
library.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kwflow.background import Background

READ_BYTES = 1 << 18


class LinkState(Protocol):
    """How late messages are now, in seconds, and whether any go through."""

    latency: float
    thawed: asyncio.Event


def calm(link: LinkState) -> bool:
    """Whether messages go through at once."""
    return not link.latency and link.thawed.is_set()


def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: LinkState) -> tuple[Any, Any]:
    """The same stream as ``streams.answer_stream`` reads and writes it, over the link."""
    return _Reader(reader, link), _Writer(writer, link)


class _Line:
    """Hands things on in order, each as late as the link is, and none while it is frozen."""

    def __init__(self, link: LinkState, deliver: Callable[[bytes], None]):
        self._link, self._deliver = link, deliver
        self._held: deque[tuple[float, bytes]] = deque()
        self._task: Background | None = None

    def put(self, data: bytes) -> None:
        if self._task is None and calm(self._link):
            self._deliver(data)
            return
        self._held.append((asyncio.get_running_loop().time(), data))
        if self._task is None:
            self._task = Background(self._run, "what a link is late with")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._held:
            since, data = self._held[0]
            await self._link.thawed.wait()
            wait = since + self._link.latency - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            if self._link.thawed.is_set():
                self._held.popleft()
                self._deliver(data)
        self._task = None


class _Reader:
    """Reads at once for as long as the link is calm; from then on a task reads ahead, so that nothing waits in turn."""

    def __init__(self, reader: asyncio.StreamReader, link: LinkState):
        self._reader, self._link = reader, link
        self._arrived: asyncio.StreamReader | None = None
        self._reading: asyncio.Task[None] | None = None

    async def read(self, size: int) -> bytes:
        if self._arrived is None:
            data = await self._reader.read(size)
            if calm(self._link):
                return data
            self._arrived = asyncio.StreamReader()
            self._reading = asyncio.create_task(self._read_on(data, self._arrived), name="kwflow late reader")
        return await self._arrived.read(size)

    async def _read_on(self, data: bytes, arrived: asyncio.StreamReader) -> None:
        line = _Line(self._link, lambda part: arrived.feed_data(part) if part else arrived.feed_eof())
        try:
            while data:
                line.put(data)
                data = await self._reader.read(READ_BYTES)
        except Exception as error:  # noqa: BLE001  raised by who reads
            arrived.set_exception(error)
        else:
            line.put(b"")


class _Writer:
    def __init__(self, writer: asyncio.StreamWriter, link: LinkState):
        self._writer, self.transport = writer, writer.transport
        self._line = _Line(link, self._write)

    def write(self, data: bytes) -> None:
        self._line.put(data)

    def write_eof(self) -> None:
        self._line.put(b"")

    def close(self) -> None:
        self._writer.close()

    async def drain(self) -> None:
        await self._writer.drain()

    def _write(self, data: bytes) -> None:
        if self._writer.is_closing():
            return
        if data:
            self._writer.write(data)
        else:
            self._writer.write_eof()
