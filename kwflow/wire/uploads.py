"""What a client has put on workers, so that requests name it instead of bringing it again.

A piece is a tensor as a worker gets it: an uploaded one, or a view of its memory, such as the layers of one worker's
span. Its name is the sha256 of dtype, shape and bytes. Before a request goes out, each tensor that lies in an uploaded
one's memory is replaced by an empty one, and ``meta["kept"]`` says which piece stands there:

    {"scope": TEXT, "at": [[number of the tensor, NAME], [number, NAME, [[start, length] by dimension]], ...]}

The second form is a part of a piece, which need not be a piece of its own where the whole is there already.

``scope`` is this client's secret: without it nobody can name its pieces, or learn whether they are there. A piece that
the worker lacks goes before the request, in chunks: {"op": "keep", "scope", "name", "shape", "idle", "at"} and a flat
part of it from element ``at`` on. {"op": "drop", "scope", "names"} ends it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError
from kwflow.kwargs import tree
from kwflow.kwargs.axes import Axed, describe
from kwflow.wire.loop import in_thread
from kwflow.wire.message import Message

SMALLEST = 1024  # bytes: what is less goes along with each request
CHUNK = 4 << 20  # bytes of a piece in one message

Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]  # where in its memory a piece lies


@dataclass(frozen=True, eq=False)
class Upload:
    """One uploaded tensor: the memory by which its views are known, held until it is closed."""

    tensor: Tensor
    idle: float  # seconds without use until a worker drops a piece
    version: int
    names: dict[Key, str] = field(default_factory=dict)  # of the pieces that were needed


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor of a request that lies in an uploaded one's memory."""

    tensor: Tensor
    upload: Upload

    @property
    def key(self) -> Key:
        return int(self.tensor.storage_offset()), self.tensor.shape, self.tensor.stride(), self.tensor.dtype

    async def name(self) -> str:
        """Hashed once, in a thread of its own."""
        key = self.key
        if key not in self.upload.names:
            self.upload.names[key] = await in_thread(lambda: name_of(self.tensor))
        return self.upload.names[key]

    def within(self, there: Collection[str]) -> tuple[str, Piece, list[list[int]]] | None:
        """A piece that is there of which this one is a part: its name, itself, and which part."""
        for key, name in [*self.upload.names.items()]:
            if name in there and (part := _part(self.key, key)) is not None:
                offset, shape, strides, _ = key
                return name, Piece(self.upload.tensor.as_strided(shape, strides, offset), self.upload), part
        return None

    def chunks(self, meta: dict[str, Any]) -> Iterator[Message]:
        """The messages that bring it to a worker, each made when it is asked for."""
        flat = self.tensor.reshape(-1)
        step = CHUNK // flat.itemsize
        for at in range(0, len(flat), step):
            where = {"shape": [*self.tensor.shape], "idle": self.upload.idle, "at": at}
            yield Message({"op": "keep", **meta, **where}, flat[at : at + step])


class Uploads:
    """A client's uploaded tensors, and which of their pieces are on which worker, as far as it knows."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """In a forked child: a client of its own, to which the parent's tensors are tensors."""
        self.scope = secrets.token_hex(16)
        self._uploads: dict[int, Upload] = {}  # by the address of the memory
        self.there: defaultdict[str, set[str]] = defaultdict(set)  # the names of pieces, by worker
        self.unable: set[str] = set()  # workers of versions that keep nothing
        self.turns: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def add(self, tensor: Tensor, idle: float) -> Upload:
        """Take note of a tensor whose memory nobody else writes to."""
        upload = Upload(tensor, idle, tensor._version)
        if tensor.nbytes >= SMALLEST:
            self._uploads[tensor.untyped_storage().data_ptr()] = upload
        return upload

    def remove(self, upload: Upload) -> dict[str, list[str]]:
        """From now on it is a tensor like any other; returns what no other needs, by worker."""
        self._uploads = {at: one for at, one in self._uploads.items() if one is not upload}
        # lists: the network thread goes on meanwhile
        needed = {name for one in self._uploads.values() for name in [*one.names.values()]}
        return self._gone({*[*upload.names.values()]} - needed)

    def clear(self) -> dict[str, list[str]]:
        """Forget all; returns what is to be dropped, by worker."""
        self._uploads = {}
        return self._gone({name for names in self.there.values() for name in names})

    def _gone(self, names: set[str]) -> dict[str, list[str]]:
        gone = {peer: sorted(there & names) for peer, there in [*self.there.items()] if there & names}
        for peer in gone:
            self.there[peer] -= names
        return gone

    def find(self, tensor: Tensor) -> Upload | None:
        """The upload in whose memory a tensor lies. Raises KwargError where that was changed since."""
        if not self._uploads or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_neg():
            return None
        try:
            upload = self._uploads.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # it has no memory
            return None
        if upload is not None and upload.tensor._version != upload.version:
            raise KwargError(
                f"{describe(upload.tensor)} was changed in place after flow.upload: workers keep what it was then; "
                f"change the tensor that it was made of, and upload that again"
            )
        return upload

    async def refer(self, peer: str, request: Message) -> tuple[Message, dict[str, Piece]]:
        """A request that names what was uploaded, and these pieces by name; the request itself where there are none."""
        if not self._uploads or peer in self.unable:
            return request, {}
        leaves, skeleton = tree.flatten(request.tree)
        pieces, at = dict[str, Piece](), list[list[Any]]()
        for number, leaf in enumerate(leaves):
            tensor = leaf.tensor if isinstance(leaf, Axed) else leaf
            if tensor.nbytes < SMALLEST or (upload := self.find(tensor)) is None:
                continue
            piece = Piece(tensor.detach(), upload)
            if piece.key not in upload.names and (found := piece.within(self.there[peer])) is not None:
                name, piece, part = found
                at.append([number, name, part])
            else:
                name = await piece.name()
                at.append([number, name])
            pieces[name] = piece
            empty = torch.empty((0,) * max(1, tensor.dim()), dtype=tensor.dtype)
            leaves[number] = Axed(empty, leaf.axes) if isinstance(leaf, Axed) else empty
        if not pieces:
            return request, {}
        kept = {"scope": self.scope, "at": at}
        return Message({**request.meta, "kept": kept}, tree.unflatten(leaves, skeleton)), pieces

    def forget(self, peer: str, names: Iterable[str]) -> None:
        """A worker has not got some of them any more, whichever."""
        self.there[peer] -= set(names)


def _part(key: Key, whole: Key) -> list[list[int]] | None:
    """Where a piece lies in a larger one, [start, length] by dimension; None where it does not, or in another order."""
    (offset, shape, strides, dtype), (first, sizes, whole_strides, whole_dtype) = key, whole
    left, part = offset - first, list[list[int]]()
    if left < 0 or dtype != whole_dtype or strides != whole_strides or min(strides) < 1:
        return None
    for length, size, stride in zip(shape, sizes, strides, strict=True):
        start = min(left // stride, size - length)
        if start < 0:
            return None
        left -= start * stride
        part.append([start, length])
    return None if left else part


def name_of(tensor: Tensor) -> str:
    """The sha256 of a tensor's dtype, shape and bytes (row-major, little-endian), in hexadecimal."""
    digest = hash_of(tensor.dtype, tensor.shape)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def hash_of(dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """The hash of a piece before its bytes."""
    return hashlib.sha256(f"{str(dtype).removeprefix('torch.')} {math.prod(shape)} {[*shape]}\n".encode())


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes, dense and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
