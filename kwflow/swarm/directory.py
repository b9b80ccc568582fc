"""Who serves which layers of which model: records in the DHT, written by workers, read in the background by clients.

Under ``kwflow/MODEL/LAYER`` each worker of that layer has one record, by its peer id; under ``kwflow/models`` each
model has one, by its name. A worker renews its records long before they expire, and marks them gone when it stops.
Anybody may write to the DHT: what does not read as a record is left out. Imports no hivemind, no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from kwflow.background import Background
from kwflow.errors import KwflowError

MODELS = "kwflow/models"
TTL_SECONDS = 30.0
RENEW_SECONDS = 10.0
REFRESH_SECONDS = 3.0
READ_SECONDS = 10.0  # a read behind a stopped peer takes 3
MAX_LAYERS, MAX_ADDRS = 10_000, 32  # in a record that we believe

log = logging.getLogger(__name__)


class Store(Protocol):
    """The part of a node that the directory uses."""

    async def store(self, records: dict[str, tuple[str, Any]], ttl: float) -> None: ...

    async def get(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]: ...

    def learn(self, peer: str, addrs: Iterable[str]) -> None: ...


@dataclass(frozen=True)
class WorkerRecord:
    """One worker, as the directory knows it: it serves layers ``[start, stop)`` of the ``layers`` of ``model``."""

    model: str
    peer: str
    addrs: tuple[str, ...]
    start: int
    stop: int
    layers: int
    checkpoint: str = ""
    version: str = ""
    throughput: float = 0.0  # tokens per second through the span, as the worker measured it; 0: not measured


@dataclass(frozen=True)
class ModelRecord:
    """One model that somebody serves."""

    model: str
    layers: int
    checkpoint: str = ""


@asynccontextmanager
async def announced(
    node: Store, record: WorkerRecord, *, ttl: float = TTL_SECONDS, period: float = RENEW_SECONDS
) -> AsyncIterator[None]:
    """Keep a worker in the directory for as long as the context lasts; on return from its start it can be found."""
    records = _written(record)
    await node.store(records, ttl)
    renewing = Background(lambda: _renew(node, records, ttl, period), "renewing this worker's records")
    try:
        yield
    finally:
        await renewing.stop()
        gone = {key: (subkey, None) for key, (subkey, _) in records.items() if key != MODELS}
        try:
            async with asyncio.timeout(2.0):
                await node.store(gone, ttl + period)  # a record wins by expiring later
        except (KwflowError, OSError) as error:  # OSError: TimeoutError too. The records will expire.
            log.info("could not mark the worker as gone: %s", error)


async def _renew(node: Store, records: dict[str, tuple[str, Any]], ttl: float, period: float) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            async with asyncio.timeout(READ_SECONDS):
                await node.store(records, ttl)
        except (KwflowError, OSError) as error:
            log.warning("could not renew this worker's records: %s", error)


class Directory:
    """The workers of one model, read again every few seconds.

        directory = await Directory(node, "smollm2-135m", layers=30).start()
        directory.view()                                    # (WorkerRecord(...), ...), as last read, at once

    It goes on until ``stop``.
    """

    def __init__(self, node: Store, model: str, layers: int, *, period: float = REFRESH_SECONDS):
        self._node, self._model, self._layers, self._period = node, model, layers, period
        self._view: tuple[WorkerRecord, ...] = ()
        self._seen = float("-inf")  # when a read last found anything
        self._looked = float("-inf")  # when the last read began
        self._refreshing: Background | None = None

    def view(self) -> tuple[WorkerRecord, ...]:
        """The workers found by the last read, by their span and peer id; nothing is awaited."""
        return self._view

    def looked(self) -> float:
        """From when on, by time.monotonic(), the view is."""
        return self._looked

    async def refresh(self) -> tuple[WorkerRecord, ...]:
        """Read the directory now. Raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(READ_SECONDS):
            found = await self._node.get(_key(self._model, layer) for layer in range(self._layers))
        now = time.monotonic()
        if found or now - self._seen > TTL_SECONDS:  # not even a record of who is gone: perhaps nobody answered
            self._view = _records(self._model, self._layers, found)
        if found:
            self._seen, self._looked = now, began
        for record in self._view:
            self._node.learn(record.peer, record.addrs)
        return self._view

    async def start(self) -> Self:
        """Read once, then go on reading in the background."""
        await self.refresh()
        self._refreshing = Background(self._refresh_forever, f"reading who serves {self._model!r}")
        return self

    async def stop(self) -> None:
        if self._refreshing is not None:
            await self._refreshing.stop()

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            try:
                await self.refresh()
            except (KwflowError, OSError) as error:  # the last view stands
                log.info("could not read the directory: %s", error)


async def workers(node: Store, model: str, layers: int) -> tuple[WorkerRecord, ...]:
    """Read who serves a model of ``layers`` layers."""
    return _records(model, layers, await node.get(_key(model, layer) for layer in range(layers)))


def _records(model: str, layers: int, found: Mapping[str, Mapping[str, Any]]) -> tuple[WorkerRecord, ...]:
    said: dict[str, list[Any]] = {}
    for entry in found.values():
        for peer, value in entry.items():
            said.setdefault(peer, []).append(value)
    records = [_worker(model, peer, values[-1]) for peer, values in said.items() if None not in values]
    live = [record for record in records if record is not None and record.stop <= layers]
    return tuple(sorted(live, key=lambda record: (record.start, record.stop, record.peer)))


async def learn(node: Store, model: str, layer: int) -> set[str]:
    """Read who serves one layer, for ``node.open`` to find; returns their peer ids."""
    async with asyncio.timeout(READ_SECONDS):
        found = await node.get([_key(model, layer)])
    said = found.get(_key(model, layer), {})
    records = [_worker(model, peer, value) for peer, value in said.items()]
    for record in records:
        if record is not None:
            node.learn(record.peer, record.addrs)
    return {record.peer for record in records if record is not None}


async def models(node: Store) -> tuple[ModelRecord, ...]:
    """Read which models are served at all."""
    found = (await node.get([MODELS])).get(MODELS, {})
    records = [_model(name, value) for name, value in sorted(found.items())]
    return tuple(record for record in records if record is not None)


def _key(model: str, layer: int) -> str:
    return f"kwflow/{model}/{layer}"


def _written(record: WorkerRecord) -> dict[str, tuple[str, Any]]:
    value = {name: part for name, part in asdict(record).items() if name not in ("model", "peer")}
    spread = {_key(record.model, layer): (record.peer, value) for layer in range(record.start, record.stop)}
    return {**spread, MODELS: (record.model, {"layers": record.layers, "checkpoint": record.checkpoint})}


def _worker(model: str, peer: str, value: Any) -> WorkerRecord | None:
    """Read a record that anyone may have written; fields that this version does not know are left out."""
    match value:
        case {
            "addrs": list() | tuple() as addrs,
            "start": int(start),
            "stop": int(stop),
            "layers": int(layers),
            "checkpoint": str(checkpoint),
            "version": str(version),
            "throughput": int() | float() as throughput,
        } if 0 <= start < stop <= layers and len(addrs) <= MAX_ADDRS and all(isinstance(addr, str) for addr in addrs):
            return WorkerRecord(model, peer, tuple(addrs), start, stop, layers, checkpoint, version, float(throughput))
    return None


def _model(name: str, value: Any) -> ModelRecord | None:
    match value:
        case {"layers": int(layers), "checkpoint": str(checkpoint)} if 0 < layers <= MAX_LAYERS:
            return ModelRecord(name, layers, checkpoint)
    return None
