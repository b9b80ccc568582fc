"""What comes in a request, read and checked before anything is computed: anyone may have sent it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, SessionError, UnsupportedError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.bound import Bound, Span
from kwflow.kwargs.builtin import CHOSEN

MAX_ORDER, MAX_OPERATIONS = 4, 8  # derivatives, and operations in all, of one request
MAX_REORDERS = 256  # of one step


def sizes_of(hidden: Tensor) -> dict[str, int]:
    return {"batch": hidden.shape[0], "seq": hidden.shape[1], "key": hidden.shape[1]}


def key_size(bound: Bound, past: int, seq: int) -> int:
    """A 2-D mask of a step covers its own columns on the wire; a 4-D one covers all."""
    return past + seq if any(len(leaf.axes) == 4 and leaf.what == "attention_mask" for leaf in bound.leaves) else seq


def take_mask(bound: Bound) -> tuple[Tensor | None, Bound]:
    """Split a step's 2-D mask, which the session remembers, from its other kwargs."""
    at = next((i for i, leaf in enumerate(bound.leaves) if leaf.what == "attention_mask" and len(leaf.axes) == 2), None)
    if at is None:
        return None, bound
    return bound.tensors[at], bound.without("attention_mask")


def read_count(meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name)
    if type(value) is not int or value < 0:
        raise KwargError(f"a step carries {name}, a number of columns, got {value!r:.40}")
    return value


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """On the blocks' device, in memory that holds nothing else of the message it came in."""
    moved = tensor.to(device)
    return moved.clone() if moved.untyped_storage().nbytes() > moved.nbytes else moved


def read_request(tree: Any, span: Span, previous: Bound | None = None) -> tuple[Tensor, Bound, list[Tensor]]:
    """What a request carries: hidden, kwargs, its operations' arguments. ``previous``: the kwargs of the last step."""
    if not isinstance(tree, dict) or not isinstance(tree.get("hidden"), Tensor):
        raise KwargError("a request carries hidden, a tensor, by that name")
    arguments = tree.get("given", [])
    if not isinstance(arguments, list) or not all(isinstance(t, Tensor) for t in arguments):
        raise KwargError("what a request's operations are given is a list of tensors")
    return tree["hidden"], Bound.from_tree(span, tree.get("kwargs", []), previous), arguments


def unmapped(operations: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor], bound: Bound) -> list[Tensor]:
    """Hidden and the kwargs' tensors as one call has them: without the dimensions that are mapped over.

    What each operation was given stands last, the last operation's at the end. Raises KwargError.
    """
    left = list(tensors)
    for operation in reversed(operations):
        dims = operation.get("vmap")
        if dims is None:
            extra = operation.get("given", ()) if "vjp" in operation else operation["jvp"]
            left = left[: len(left) - (len(extra) if isinstance(extra, list) else 0)]
            continue
        if not isinstance(dims, list) or len(dims) != len(left):
            raise KwargError(f"vmap of {len(left)} tensors over {dims!r:.80}")
        for i, (dim, tensor) in enumerate(zip(dims, left, strict=True)):
            if dim is None:
                continue
            if type(dim) is not int or not 0 <= dim < tensor.dim() or not tensor.shape[dim]:
                raise KwargError(f"vmap over dimension {dim!r:.20} of {describe(tensor)}")
            leaf = bound.leaves[i - 1] if 0 < i <= len(bound.leaves) else None
            if leaf is not None and leaf.name in CHOSEN and not tensor.is_floating_point():
                raise KwargError(f"{leaf.what}: whole numbers, which say where it acts, are not mapped over")
            left[i] = tensor.select(dim, 0)
    if len(left) != 1 + len(bound.leaves):
        raise KwargError(f"{len(left)} tensors for hidden and {len(bound.leaves)} of the kwargs")
    return left


def read_reorders(value: Any, batch: int) -> list[tuple[int, list[int]]]:
    """Beam reorders of a step: numbered, each a new order of the rows."""
    if not isinstance(value, list) or len(value) > MAX_REORDERS:
        raise SessionError(f"a step carries at most {MAX_REORDERS} reorders, each [number, rows]")
    for reorder in value:
        if not (
            isinstance(reorder, list) and len(reorder) == 2 and type(reorder[0]) is int and isinstance(reorder[1], list)
        ):
            raise SessionError(f"a reorder is [number, rows], got {reorder!r:.80}")
        if len(reorder[1]) != batch or not all(type(row) is int and 0 <= row < batch for row in reorder[1]):
            raise SessionError(f"reorder takes {batch} row numbers below {batch}, got {reorder[1]!r:.80}")
    return [(number, rows) for number, rows in value]


def read_operations(value: Any) -> list[dict[str, Any]]:
    known = {"vjp", "jvp", "vmap"}
    if not isinstance(value, list) or not all(isinstance(o, dict) and len(known & o.keys()) == 1 for o in value):
        raise UnsupportedError(f"operations {value!r:.200} are not a list of vjp, jvp and vmap")
    orders = sum("vmap" not in operation for operation in value)
    if orders > MAX_ORDER or len(value) > MAX_OPERATIONS:
        raise UnsupportedError(
            f"{orders} derivatives in {len(value)} operations; a worker nests {MAX_ORDER} in {MAX_OPERATIONS} at most, "
            f"since each doubles the work"
        )
    return value
