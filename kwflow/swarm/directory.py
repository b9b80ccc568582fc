"""Who serves which layers of which model: records in the DHT, written by workers, read in the background by clients.

Under ``kwflow/MODEL/LAYER`` each worker of that layer has one record, by its peer id; under ``kwflow/models`` each
model has one, by its name. A worker renews its records long before they expire, and marks them gone when it stops.
Anybody may write to the DHT: what does not read as a record is left out. Imports no hivemind, no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from kwflow.background import Background
from kwflow.errors import KwargError, KwflowError
from kwflow.wire.fields import read_fields
from kwflow.wire.hello import MAX_LAYERS

MODELS = "kwflow/models"
TTL_SECONDS = 30.0
RENEW_SECONDS = 10.0
REFRESH_SECONDS = 3.0
READ_SECONDS = 10.0  # a read behind a stopped peer takes 3
MAX_ADDRS = 32  # in a record that we believe

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

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.layers <= MAX_LAYERS:
            raise KwargError(
                f"a record of layers {self.start}:{self.stop} of {self.layers}; 0 <= start < stop <= layers "
                f"<= {MAX_LAYERS} is possible"
            )
        if len(self.addrs) > MAX_ADDRS or self.throughput < 0:
            raise KwargError(f"a record of {len(self.addrs)} addresses, at most {MAX_ADDRS}, and {self.throughput:g}/s")

    def to_json(self) -> dict[str, Any]:
        """What is stored, by model and layer under the peer's id."""
        return {name: value for name, value in asdict(self).items() if name not in ("model", "peer")}

    @classmethod
    def from_json(cls, json: Any, *, model: str, peer: str) -> WorkerRecord:
        """Read what anybody may have stored. Raises KwargError."""
        return read_fields(cls, json, model=model, peer=peer)


@dataclass(frozen=True)
class ModelRecord:
    """One model that somebody serves."""

    model: str
    layers: int
    checkpoint: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.layers <= MAX_LAYERS:
            raise KwargError(f"a record of a model of {self.layers} layers; 1 to {MAX_LAYERS} are possible")

    def to_json(self) -> dict[str, Any]:
        """What is stored under the model's name."""
        return {"layers": self.layers, "checkpoint": self.checkpoint}

    @classmethod
    def from_json(cls, json: Any, *, model: str) -> ModelRecord:
        """Read what anybody may have stored. Raises KwargError."""
        return read_fields(cls, json, model=model)


@asynccontextmanager
async def announced(
    node: Store, record: WorkerRecord, *, ttl: float = TTL_SECONDS, period: float = RENEW_SECONDS
) -> AsyncIterator[None]:
    """Keep a worker in the directory for as long as the context lasts; on return from its start it can be found."""
    records = records_of(record)
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
        self._last_result = float("-inf")  # when a read last found anything
        self._refreshed_at = float("-inf")  # when the last read began
        self._refreshing: Background | None = None

    def view(self) -> tuple[WorkerRecord, ...]:
        """The workers found by the last read, by their span and peer id; nothing is awaited."""
        return self._view

    def refreshed_at(self) -> float:
        """From when on, by time.monotonic(), the view is."""
        return self._refreshed_at

    async def refresh(self) -> tuple[WorkerRecord, ...]:
        """Read the directory now. Raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(READ_SECONDS):
            by_key = await self._node.get(_key(self._model, layer) for layer in range(self._layers))
        now = time.monotonic()
        if by_key or now - self._last_result > TTL_SECONDS:  # not even a record of who is gone: perhaps nobody answered
            self._view = _records(self._model, self._layers, by_key)
        if by_key:
            self._last_result, self._refreshed_at = now, began
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


def _records(model: str, layers: int, by_key: Mapping[str, Mapping[str, Any]]) -> tuple[WorkerRecord, ...]:
    by_peer: dict[str, list[Any]] = {}
    for entry in by_key.values():
        for peer, value in entry.items():
            by_peer.setdefault(peer, []).append(value)
    latest = {peer: values[-1] for peer, values in by_peer.items() if None not in values}  # None: it is gone
    live = [record for record in _workers(model, latest) if record.stop <= layers]
    return tuple(sorted(live, key=lambda record: (record.start, record.stop, record.peer)))


async def learn(node: Store, model: str, layer: int) -> set[str]:
    """Read who serves one layer, for ``node.open`` to find; returns their peer ids."""
    async with asyncio.timeout(READ_SECONDS):
        by_key = await node.get([_key(model, layer)])
    records = _workers(model, by_key.get(_key(model, layer), {}))
    for record in records:
        node.learn(record.peer, record.addrs)
    return {record.peer for record in records}


async def models(node: Store) -> tuple[ModelRecord, ...]:
    """Read which models are served at all."""
    by_name = (await node.get([MODELS])).get(MODELS, {})
    records = []
    for name, value in sorted(by_name.items()):
        with _left_out():
            records.append(ModelRecord.from_json(value, model=name))
    return tuple(records)


def _key(model: str, layer: int) -> str:
    return f"kwflow/{model}/{layer}"


def records_of(record: WorkerRecord) -> dict[str, tuple[str, Any]]:
    """A worker's record under each of its layers, and its model's."""
    value, model = record.to_json(), ModelRecord(record.model, record.layers, record.checkpoint)
    by_layer = {_key(record.model, layer): (record.peer, value) for layer in range(record.start, record.stop)}
    return {**by_layer, MODELS: (record.model, model.to_json())}


def _workers(model: str, by_peer: Mapping[str, Any]) -> list[WorkerRecord]:
    records = []
    for peer, value in by_peer.items():
        with _left_out():
            records.append(WorkerRecord.from_json(value, model=model, peer=peer))
    return records


@contextmanager
def _left_out() -> Iterator[None]:
    """Go on without a record that does not read as one: anybody may have stored it."""
    try:
        yield
    except KwargError as error:
        log.debug("a record is left out: %s", error)
