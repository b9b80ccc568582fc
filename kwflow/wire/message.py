"""Messages as bytes. Imports torch, safetensors, kwflow.errors and kwflow.kwargs; no network.

A message is one document in the safetensors layout, so ``safetensors.safe_open`` can read one that was kept in a file:

    8 bytes   N, the size of the header, little-endian; N MUST be a multiple of 8 (the header is padded with spaces)
    N bytes   JSON {"__metadata__": {"kwflow": TEXT},
                    "0": {"dtype": "BF16", "shape": [1, 7, 576], "data_offsets": [0, 8064]}, "1": ...}
    the rest  the tensors' elements, dense, row-major, little-endian, in their own dtype

TEXT is JSON, {"v": 1, "meta": {...}, "tree": ...}, both as ``kwargs.tree`` says; "tree" MAY be left out for None.
Tensors MUST be named "0", "1", ... in the order in which the tree holds them, each once; they MUST tile the rest of the
document without a gap, each at a multiple of its item size. A name MUST NOT be given twice, nor a field unknown here.

On a stream a message goes as frames: 1 byte kind, 4 bytes big-endian length, payload of at most 1 MiB. DATA* LAST carry
a message; BEAT, empty, says that the sender lives and MAY stand between any two frames.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import safetensors
import torch
from torch import Tensor

from kwflow.errors import BudgetError, CallerError, KwargError, ProtocolError
from kwflow.kwargs.axes import not_dense
from kwflow.kwargs.tree import DEPTH, Skeleton, Tree, flatten, paths, unflatten
from kwflow.wire.skeleton import from_json, to_json

PROTOCOL = 1

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SPEC_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}


@dataclass(frozen=True, eq=False)
class Message:
    """One request or reply: ``meta`` says what is asked, as plain data; ``tree`` holds the tensors."""

    meta: dict[str, Any] = field(default_factory=dict)
    tree: Tree = None


@dataclass(frozen=True)
class Limits:
    """What one message may hold; ``dumps`` refuses to write more, ``loads`` to read more. Sizes are in bytes."""

    message_bytes: int = 1 << 30
    header_bytes: int = 8 << 20
    tensors: int = 100_000
    rank: int = 64  # torch's own limit
    depth: int = DEPTH  # of the tree


LIMITS = Limits()


def dumps(message: Message, limits: Limits = LIMITS) -> bytes:
    """Write a message as bytes.

    >>> data = dumps(Message({"op": "forward", "span": [0, 15]}, {"hidden": torch.ones(1, 7, 576)}))
    >>> len(data) - 4 * 7 * 576 <= 200
    True

    Tensors are detached, made dense and brought to the CPU; a bf16 stays 2 bytes. Raises ``KwargError`` (a sparse,
    complex or other tensor that cannot be sent) or ``BudgetError`` (beyond ``limits``).
    """
    (stray, meta), (leaves, skeleton) = flatten(message.meta), flatten(message.tree)
    if stray or not _is_meta(meta):
        raise KwargError(f"the meta of a message is a dict with str keys and no tensors, got {message.meta!r:.200}")
    tensors = [leaf if isinstance(leaf, Tensor) else leaf.tensor for leaf in leaves]
    _check_sendable(tensors, message.tree, limits)
    document = {"v": PROTOCOL, "meta": to_json(meta)} | ({} if skeleton is None else {"tree": to_json(skeleton)})
    # `dense` keeps the memory alive while safetensors reads it through the pointers.
    # NOTE [zero tensor] forward mode makes tensors of zeros without memory: reading one ends the process, a clone not
    dense = [tensor.detach().cpu().resolve_neg() for tensor in tensors]
    dense = [(t.clone() if t._is_zerotensor() else t).contiguous() for t in dense]
    specs = {
        str(index): safetensors.TensorSpec(
            dtype=_SPEC_DTYPES[t.dtype], shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes
        )
        for index, t in enumerate(dense)
    }
    data = safetensors.serialize(specs, {"kwflow": _ENCODER.encode(document)})
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > limits.header_bytes or len(data) > limits.message_bytes:
        raise BudgetError(
            f"a message of {len(data)} bytes, {header_bytes} of them header, is over the limits of "
            f"{limits.message_bytes} and {limits.header_bytes}: send fewer rows, tensors or names at once"
        )
    return data


def loads(data: bytes | bytearray | memoryview, limits: Limits = LIMITS) -> Message:
    """Read a message that anyone may have sent.

    >>> message = loads(dumps(Message({"op": "forward"}, {"hidden": torch.ones(1, 7, 576)})))
    >>> message.meta, message.tree["hidden"].shape
    ({'op': 'forward'}, torch.Size([1, 7, 576]))

    The tensors are writable and lie at multiples of 64 bytes: views of ``data`` where that is so there (it then lives
    as long as one of them), else copies. Every declared size, shape and dtype is checked before a tensor is allocated.
    Raises ``ProtocolError`` for anything malformed.
    """
    view = memoryview(data).cast("B")
    if len(view) > limits.message_bytes:
        raise ProtocolError(f"a message of {len(view)} bytes, over the limit of {limits.message_bytes}")
    header, start = _read_header(view, limits)
    meta, skeleton = _read_document(header.pop("__metadata__", None), limits)
    layout = _read_layout(header, len(view) - start, limits)
    tensors = _read_tensors(_own(view), start, layout)
    try:
        return Message(unflatten([], meta), unflatten(tensors, skeleton))
    except CallerError as error:
        raise ProtocolError(f"a message whose tree and tensors do not fit: {error}") from error


def _in_memory(tensor: Tensor) -> bool:
    """Whether there are numbers to read: a traced call's tensors have none."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except (RuntimeError, NotImplementedError):  # it has none
        return False


def _check_sendable(tensors: list[Tensor], tree: Tree, limits: Limits) -> None:
    if len(tensors) > limits.tensors:
        raise BudgetError(f"a message of {len(tensors)} tensors, over the limit of {limits.tensors}")
    for index, t in enumerate(tensors):
        kind = not_dense(t)
        if kind or t.dtype not in _SPEC_DTYPES:
            raise KwargError(
                f"{paths(tree)[index]} is a {f'{kind} ' * bool(kind)}tensor of {t.dtype}; "
                f"dense {', '.join(_SPEC_DTYPES.values())} can be sent"
            )
        if not _in_memory(t):
            raise KwargError(f"{paths(tree)[index]} is a fake tensor: a trace, such as torch.export's, has no values")
        if t.ndim > limits.rank or _extent(t.shape, t.dtype) > limits.message_bytes:
            raise BudgetError(
                f"{paths(tree)[index]} of shape {tuple(t.shape)} is over the limits of a message: "
                f"{limits.message_bytes} bytes, rank {limits.rank}"
            )
    if (total := sum(t.nbytes for t in tensors)) > limits.message_bytes:
        raise BudgetError(f"tensors of {total} bytes, over the limit of {limits.message_bytes} for a message")


def _is_meta(meta: Any) -> bool:
    return type(meta) is dict and all(type(key) is str for key in meta)


def _extent(shape: torch.Size | list[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor whose sizes 0 were 1: bounds what torch multiplies for its strides too."""
    return math.prod(max(size, 1) for size in shape) * dtype.itemsize


# NOTE [own reader] safetensors writes: its serialize takes 3 us for a step, where a join in Python takes 12 (110 ms
# against 54 for 64 MB, of 1.2 s on the network). It does not read: its deserialize returns no metadata, so that the
# header would be parsed twice; copies the tensors (53 ms for 64 MB, frombuffer none); takes no bytearray and no limits;
# and ignores alignment. The tests hold that it reads whatever is accepted here.


def _read_header(view: memoryview, limits: Limits) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > len(view) - 8:
        raise ProtocolError(f"a message that is cut short: {len(view)} bytes, with a header of {size}")
    if size > limits.header_bytes or size % 8:
        raise ProtocolError(f"a header of {size} bytes; at most {limits.header_bytes} and a multiple of 8")
    if view[8:9] != b"{":
        raise ProtocolError("a header that is no JSON object")
    return _parse(view[8 : 8 + size]), 8 + size


def _read_document(metadata: Any, limits: Limits) -> tuple[Skeleton, Skeleton]:
    """The skeletons of ``meta`` and ``tree``."""
    if type(metadata) is not dict or metadata.keys() != {"kwflow"} or type(metadata["kwflow"]) is not str:
        raise ProtocolError("a message whose __metadata__ is not {'kwflow': text}")
    document = _parse(metadata["kwflow"])
    if type(document) is not dict:
        raise ProtocolError("a message whose metadata is no JSON object")
    version = document.pop("v", None)
    if type(version) is not int or version != PROTOCOL:
        raise ProtocolError(f"a message of protocol version {version!r:.20}; version {PROTOCOL} is spoken here")
    if not {"meta"} <= document.keys() <= {"meta", "tree"}:
        raise ProtocolError(f"a message with the fields {sorted(document)!r:.200}; this version has meta and tree")
    meta = from_json(document["meta"], depth=limits.depth)
    if not _is_meta(meta):
        raise ProtocolError("a message whose meta is no dict with str keys")
    return meta, from_json(document.get("tree"), depth=limits.depth)


class _Layout(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def _read_layout(header: dict[str, Any], size: int, limits: Limits) -> list[_Layout]:
    """Check what the header says of each tensor, and that together they tile ``size`` bytes."""
    if len(header) > limits.tensors:
        raise ProtocolError(f"a message of {len(header)} tensors, over the limit of {limits.tensors}")
    layout = []
    for index in range(len(header)):
        entry = header.get(str(index))
        if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ProtocolError(f"{len(header)} tensors, of which {str(index)!r} is missing or lacks a field")
        name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(name) if type(name) is str else None
        if dtype is None:
            raise ProtocolError(f"tensor {index} has dtype {name!r:.20}; {', '.join(_DTYPES)} can be sent")
        if not (_are_sizes(shape) and len(shape) <= limits.rank and _extent(shape, dtype) <= limits.message_bytes):
            raise ProtocolError(f"tensor {index} has shape {shape!r:.200}: malformed, or over the limits")
        if not (_are_sizes(offsets) and len(offsets) == 2 and offsets[0] % dtype.itemsize == 0):
            raise ProtocolError(f"tensor {index} has offsets {offsets!r:.200}: malformed, or not aligned")
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise ProtocolError(f"tensor {index} of {name} and shape {shape} does not take the bytes {offsets}")
        layout.append(_Layout(dtype, shape, *offsets))
    reached = 0
    for begin, end in sorted((entry.begin, entry.end) for entry in layout):
        if begin != reached:
            raise ProtocolError(f"tensors that overlap or leave a hole at byte {min(begin, reached)}")
        reached = end
    if reached != size:
        raise ProtocolError(f"tensors of {reached} bytes in a message that holds {size}")
    return layout


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(size) is int and size >= 0 for size in value)


def _own(view: memoryview) -> memoryview | bytearray:
    """The same bytes, writable and at an address that is a multiple of 8."""
    if view.readonly or torch.frombuffer(view, dtype=torch.uint8).data_ptr() % 8:
        return bytearray(view)
    return view


def _read_tensors(data: memoryview | bytearray, start: int, layout: list[_Layout]) -> list[Tensor]:
    tensors = []
    for index, (dtype, shape, begin, end) in enumerate(layout):
        if begin == end:  # frombuffer refuses 0 bytes
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
            continue
        raw = torch.uint8 if dtype is torch.bool else dtype
        tensor = torch.frombuffer(data, dtype=raw, count=(end - begin) // dtype.itemsize, offset=start + begin)
        if dtype is torch.bool:
            if tensor.max() > 1:
                raise ProtocolError(f"tensor {index} is BOOL with a byte other than 0 and 1")
            tensor = tensor.view(torch.bool)
        # NOTE [alignment] MKL's results depend on an address modulo 16; torch's own tensors lie at multiples of 64
        tensors.append((tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()).view(shape))
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ProtocolError("a JSON object with a name given twice")
    return names


def _no_constant(name: str) -> NoReturn:
    raise ProtocolError(f"{name} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _parse(text: memoryview | str) -> Any:
    try:
        return _DECODER.decode(text if isinstance(text, str) else str(text, "utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an int of too many digits, nested too deep
        raise ProtocolError(f"a message whose JSON cannot be read: {error!r:.200}") from error
