"""A swarm of workers in this process that fail as scripts say: what ``kf.local_swarm`` is to ``kf.faults``, cheaply.

A worker that is paused is frozen, a dead one answers nothing, one that is expired is not in the view.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kwflow.client.flow import Flow
from kwflow.client.peers import KnownPeers
from kwflow.errors import WorkerFailed
from kwflow.faults.faulty import Faulty
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span
from kwflow.wire import channel, in_process, loop
from kwflow.wire.message import Message
from kwflow.worker.server import Served

SILENCE_SECONDS = 0.05


class Worker:
    """One worker: ``span``, ``peer``, ``alive``, ``paused``."""

    checkpoint = ""

    def __init__(self, folder: Path, span: tuple[int, int], peer: str):
        self.span, self.peer = span, peer
        self.start, self.stop = span
        self.paused = self.listed = False
        self.faulty = Faulty(Served(load_span(folder, *span)))
        self._listing = self.faulty.announced(self._announce)

    @property
    def alive(self) -> bool:
        return not self.faulty.dead

    @asynccontextmanager
    async def _announce(self, before: int) -> Any:
        self.listed = True
        yield
        self.listed = False

    async def serve(self) -> None:
        await self._listing.__aenter__()

    async def die(self) -> None:
        self.faulty.die()

    async def freeze(self, frozen: bool) -> None:
        self.paused = frozen
        (self.faulty.thawed.clear if frozen else self.faulty.thawed.set)()


class HereSwarm:
    """Workers of a model's folder, in this process; ``flow()`` connects to them."""

    def __init__(self, folder: Path, spans: Sequence[tuple[int, int]]):
        self.folder, self.workers = folder, list[Worker]()
        self._numbers = itertools.count()
        self._pool = channel.Pool(_Transport(self))  # between workers
        self.start(spans)

    def start(self, spans: Sequence[tuple[int, int]]) -> list[Worker]:
        new = [Worker(self.folder, span, f"here-{next(self._numbers)}") for span in spans]
        for worker in new:
            worker.faulty.neighbours = self._bring
            loop.run(worker.serve())
        self.workers += new
        return new

    async def _bring(self, peer: str, layer: int, message: Message) -> Message:
        return await self._pool(peer, message)

    def add(self, start: int, stop: int) -> Worker:
        return self.start([(start, stop)])[0]

    def kill(self, index: int) -> None:
        loop.run(self.workers[index].die())

    def pause(self, index: int) -> None:
        loop.run(self.workers[index].freeze(True))

    def resume(self, index: int) -> None:
        loop.run(self.workers[index].freeze(False))

    def tell(self, index: int, what: Mapping[str, Any]) -> dict[str, Any]:
        return loop.run(self.workers[index].faulty.command(what))

    def flow(self) -> Flow:
        peers = KnownPeers(_Transport(self), lambda: [one for one in self.workers if one.listed])
        ends = ModelEnds(self.folder)
        return Flow(ends, peers, (0, ends.layers))

    def close(self) -> None:
        loop.run(self._pool.aclose())
        for worker in self.workers:
            worker.faulty.close()


class _Transport:
    def __init__(self, swarm: HereSwarm):
        self._swarm = swarm

    async def open(self, peer: str, *, timeout: float = 5.0) -> channel.Channel:
        worker = next(one for one in self._swarm.workers if one.peer == peer)
        if not worker.faulty.thawed.is_set():
            await asyncio.sleep(SILENCE_SECONDS)
            raise WorkerFailed(f"worker {peer} did not answer a dial", peer=peer)
        channel: Any = await in_process.InProcess({peer: worker.faulty.accept}).open(peer)
        return _Watched(channel, worker.faulty)  # type: ignore[return-value]


class _Watched:
    """A channel that takes a frozen worker for dead after a while, as a stream without heartbeats is."""

    def __init__(self, channel: Any, worker: Faulty):
        self._channel, self._worker = channel, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __call__(self, request: Message) -> Message:
        reply = asyncio.ensure_future(self._channel(request))
        silent = False
        try:
            while not (await asyncio.wait({reply}, timeout=SILENCE_SECONDS))[0]:
                if silent and not self._worker.thawed.is_set():
                    raise WorkerFailed(f"worker {self._channel.peer} has been silent", peer=self._channel.peer)
                silent = not self._worker.thawed.is_set()
            return reply.result()
        finally:
            if not reply.done() or reply.cancelled() or reply.exception() is not None:
                reply.cancel()
                await self._channel.aclose()
