"""What clients keep on a worker: tensors by the hash of their content, of each client its own, for a while.

    keep, in chunks --Keeping--> as its hash says? --Kept--> in place of what a request names (``kwflow.wire.uploads``)

Runs on the asyncio thread; only copies and hashes do not.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import BudgetError, KwargError, NotKept, WorkerFailed, WorkerFull
from kwflow.kwargs import tree
from kwflow.kwargs.axes import Axed
from kwflow.wire.loop import in_thread
from kwflow.wire.message import LIMITS, Message
from kwflow.wire.uploads import SMALLEST, bytes_of, hash_of

DEFAULT_KEEP_BYTES = 1 << 30  # of all clients
DEFAULT_KEEP_CLIENT_BYTES = 512 << 20
LONGEST_IDLE = 24 * 3600.0  # seconds
MAX_RANK, MAX_SCOPE, NAME = 64, 64, 64  # dimensions, letters of a client's secret and of a piece's name

Name = tuple[str, str]  # the client's secret, the hash


@dataclass(eq=False)
class _Held:
    """A tensor that is kept, or is on its way: it has its room already."""

    tensor: Tensor
    idle: float
    used: float

    @property
    def room(self) -> int:
        return max(SMALLEST, self.tensor.nbytes)

    @property
    def over(self) -> float:
        """When it is dropped, by ``time.monotonic``."""
        return self.used + self.idle


class Kept:
    """The tensors that clients keep on a worker, within ``total`` bytes, and ``each`` of one client's."""

    def __init__(self, device: torch.device, total: int, each: int):
        self.device, self.total, self.each = device, total, each
        self._held: dict[Name, _Held] = {}
        self._coming: dict[object, tuple[str, int]] = {}  # whose, bytes
        self._timer: asyncio.TimerHandle | None = None

    def clear(self) -> None:
        self._held.clear()
        self._coming.clear()
        self._timer = None

    def bytes(self, scope: str | None = None) -> int:
        """What is kept or has its room already, in all or of one client."""
        kept = sum(held.room for (owner, _), held in self._held.items() if scope in (None, owner))
        return kept + sum(size for owner, size in self._coming.values() if scope in (None, owner))

    def reserve(self, key: object, scope: str, size: int) -> None:
        """Keep room for a tensor that comes. Raises WorkerFull."""
        self.sweep()
        size = max(SMALLEST, size)
        own, everybody = self.bytes(scope), self.bytes()
        free = min(self.each - own, self.total - everybody)
        if size > free:
            raise WorkerFull(
                f"no room to keep {size / 1e6:.1f} MB: {max(0, free) / 1e6:.1f} MB are free; this client keeps "
                f"{own / 1e6:.1f} of {self.each / 1e6:.1f} MB here, all together {everybody / 1e6:.1f} of "
                f"{self.total / 1e6:.1f} MB (close what is not needed; workers with more: kwflow worker --keep-mb, "
                f"--keep-client-mb)"
            )
        self._coming[key] = scope, size

    def release(self, key: object) -> None:
        self._coming.pop(key, None)

    def put(self, name: Name, tensor: Tensor, idle: float) -> None:
        self._held[name] = _Held(tensor, idle, time.monotonic())
        self.sweep()

    def get(self, name: Name) -> Tensor | None:
        """What is kept by a name; it is in use again."""
        held = self._held.get(name)
        if held is None or held.over < time.monotonic():
            return None
        held.used = time.monotonic()
        return held.tensor

    def drop(self, scope: str, names: list[Any]) -> None:
        for name in names:
            self._held.pop((scope, name), None)

    def sweep(self) -> None:
        """Drop what nobody used for its time; again when the next one's is over."""
        now = time.monotonic()
        self._held = {name: held for name, held in self._held.items() if held.over >= now}
        if self._held and self._timer is None:
            this: weakref.ref[Kept] = weakref.ref(self)
            first = min(held.over for held in self._held.values()) - now
            self._timer = asyncio.get_running_loop().call_later(max(first, 0.01), _sweep, this)

    def timed_out(self) -> None:
        self._timer = None
        self.sweep()

    def resolved(self, request: Message) -> Message:
        """A request with the tensors that it names. Raises NotKept, before anything is done."""
        asked = request.meta.get("kept")
        if asked is None:
            return request
        scope = _scope(asked)
        at = asked.get("at")
        leaves, skeleton = tree.flatten(request.tree)
        if not isinstance(at, list) or len(at) > len(leaves):
            raise KwargError(f"a request's kept tensors are [[number, name], …], got {at!r:.80}")
        copied = 0
        for entry in at:
            number, name, part = _entry(entry, len(leaves))
            if (tensor := self.get((scope, name))) is None:
                raise NotKept(f"this worker does not keep {name[:16]}, or not any more")
            if part is not None:
                tensor = _part(tensor, part)
                copied += tensor.nbytes
                if copied > LIMITS.message_bytes:
                    raise BudgetError(f"parts of kept tensors of {copied} bytes, over the limit of a message")
                # as a message's own tensors lie: what is computed depends on it (wire/message.py, NOTE [alignment])
                aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
                tensor = tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)
            leaf = leaves[number]
            leaves[number] = Axed(tensor, leaf.axes) if isinstance(leaf, Axed) else tensor
        return Message(request.meta, tree.unflatten(leaves, skeleton))


def _entry(entry: Any, tensors: int) -> tuple[int, str, list[Any] | None]:
    """What a request says of one kept tensor: its number, its name, and which part of it, if not all."""
    if not (isinstance(entry, list) and len(entry) in (2, 3) and type(entry[0]) is int and isinstance(entry[1], str)):
        raise KwargError(f"a kept tensor is [number, name] or [number, name, part], got {entry!r:.80}")
    if not 0 <= entry[0] < tensors:
        raise KwargError(f"kept tensor {entry[0]} of a request that has {tensors}")
    part = entry[2] if len(entry) == 3 else None
    if part is not None and not isinstance(part, list):
        raise KwargError(f"a part is [[start, length], …], got {part!r:.80}")
    return entry[0], entry[1], part


def _part(tensor: Tensor, part: list[Any]) -> Tensor:
    """The part ``[[start, length] by dimension]``. Raises KwargError."""
    if len(part) != tensor.dim():
        raise KwargError(f"a part of {len(part)} dimensions of a tensor of {tensor.dim()}")
    for dim, pair in enumerate(part):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise KwargError(f"a part is [[start, length], …], got {pair!r:.80}")
        start, length = pair
        if start + length > tensor.shape[dim]:
            raise KwargError(f"a part {start}:{start + length} of a dimension of {tensor.shape[dim]}")
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _sweep(kept: weakref.ref[Kept]) -> None:
    if (one := kept()) is not None:
        one.timed_out()


class Keeping:
    """What one channel brings to be kept: one tensor at a time, chunk by chunk."""

    def __init__(self, kept: Kept):
        self.kept = kept
        self._coming: _Coming | None = None

    def close(self) -> None:
        self.kept.release(self)
        self._coming = None

    async def keep(self, request: Message) -> Message:
        """Take one chunk; the last one's content must be as its name says. Raises WorkerFull, KwargError."""
        meta, chunk = request.meta, request.tree
        name = _scope(meta), _name(meta.get("name"))
        if not isinstance(chunk, Tensor) or chunk.dim() != 1 or not chunk.numel():
            raise KwargError("what is to be kept comes in chunks, each a tensor of one dimension")
        if meta.get("at") == 0:
            self.close()
            if self.kept.get(name) is not None:
                return Message({"kept": True})
            shape, idle = _shape(meta.get("shape")), _idle(meta.get("idle"))
            self.kept.reserve(self, name[0], math.prod(shape) * chunk.itemsize)
            buffer = torch.empty(math.prod(shape), dtype=chunk.dtype, device=self.kept.device)
            self._coming = _Coming(name, shape, idle, buffer, hash_of(chunk.dtype, shape))
        coming = self._coming
        if coming is None or coming.name != name or meta.get("at") != coming.reached or not coming.takes(chunk):
            self.close()
            raise KwargError(f"chunk {meta.get('at')!r:.40} of {name[1][:16]} does not follow what came before")
        await in_thread(lambda: coming.add(chunk))
        if self._coming is not coming:
            raise WorkerFailed("the channel is closed")
        if coming.reached < len(coming.buffer):
            return Message({"kept": False})
        self.close()
        if coming.hash.hexdigest() != name[1]:
            raise KwargError(f"what came as {name[1][:16]} has another hash: it is not kept")
        self.kept.put(name, coming.buffer.view(coming.shape), coming.idle)
        return Message({"kept": True})

    async def drop(self, request: Message) -> Message:
        """Free a client's own, by name."""
        names = request.meta.get("names")
        if not isinstance(names, list):
            raise KwargError(f"what is to be dropped is a list of names, got {names!r:.80}")
        self.kept.drop(_scope(request.meta), [name for name in names if isinstance(name, str)])
        return Message()


@dataclass(eq=False)
class _Coming:
    """A tensor that comes in chunks: where they go, and the hash of those that came."""

    name: Name
    shape: list[int]
    idle: float
    buffer: Tensor
    hash: Any
    reached: int = 0

    def takes(self, chunk: Tensor) -> bool:
        return chunk.dtype == self.buffer.dtype and self.reached + len(chunk) <= len(self.buffer)

    def add(self, chunk: Tensor) -> None:
        self.hash.update(bytes_of(chunk))
        self.buffer[self.reached : self.reached + len(chunk)] = chunk.to(self.buffer.device)
        self.reached += len(chunk)


def _scope(meta: Any) -> str:
    scope = meta.get("scope") if isinstance(meta, Mapping) else None
    if not isinstance(scope, str) or not 0 < len(scope) <= MAX_SCOPE:
        raise KwargError(f"what is kept belongs to a client, by a secret of up to {MAX_SCOPE} letters")
    return scope


def _name(name: Any) -> str:
    if not isinstance(name, str) or len(name) != NAME:
        raise KwargError(f"the name of what is kept is its sha256, {NAME} letters, got {name!r:.80}")
    return name


def _shape(shape: Any) -> list[int]:
    sizes = (
        isinstance(shape, list) and len(shape) <= MAX_RANK and all(type(n) is int and 0 < n < 1 << 48 for n in shape)
    )
    if not sizes:
        raise KwargError(f"what is kept has a shape, got {shape!r:.80}")
    return shape  # type: ignore[no-any-return]


def _idle(idle: Any) -> float:
    if type(idle) not in (int, float) or not 0 < idle:
        raise KwargError(f"what is kept is dropped after idle seconds, got {idle!r:.40}")
    return float(min(idle, LONGEST_IDLE))
