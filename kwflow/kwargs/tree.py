"""Trees of kwargs: split one into its tensors and a skeleton, join it again.

A tree is a nested dict (str or int keys), list or tuple. Its leaves are tensors and ``Axed`` tensors; None, bool, int,
float and str stay in the skeleton, where each tensor leaves a ``Slot``. Nothing else is a tree: not a subclass such as
``defaultdict`` or ``np.float64``, since it would arrive as something else than was sent.

It knows no bytes and no network: ``wire/skeleton.py`` writes a skeleton as JSON.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from kwflow.errors import KwargError
from kwflow.kwargs.axes import Axed

# The types say Any because a recursive alias would make every reader narrow each node; the walk below checks them all.
Tree: TypeAlias = Any
Skeleton: TypeAlias = Any
Path: TypeAlias = "tuple[str | int, ...]"

DEPTH = 64  # levels of nesting; a list that contains itself ends here too
INT_BITS = 8192  # below Python's limit on the digits of an int in text (4300 digits, 14,284 bits)

_TREE = "a tree holds dicts (str or int keys), lists and tuples of tensors, None, bool, int, float and str"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of tensor number ``index`` in a skeleton; ``axes`` are those of an ``Axed``, None for a bare tensor."""

    index: int
    axes: tuple[str, ...] | None = None


def as_int(value: Any) -> int | None:
    """The int that a caller's number stands for: an int, a NumPy integer, an integer tensor without dimensions.

    >>> import torch
    >>> as_int(torch.tensor([3, 5]).argmax()), as_int(True), as_int(3.0)
    (1, None, None)

    None for all else, bools too.
    """
    if isinstance(value, bool) or getattr(value, "ndim", 0) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def flatten(tree: Tree) -> tuple[list[Tensor | Axed], Skeleton]:
    """Split a tree into its tensors, in order, and the skeleton that holds everything else.

    >>> import torch
    >>> leaves, skeleton = flatten({"steer": {12: torch.ones(4)}, "scale": 2.0})
    >>> len(leaves), skeleton
    (1, {'steer': {12: Slot(index=0, axes=None)}, 'scale': 2.0})

    Tensors are not copied. Raises ``KwargError`` that names the path and type of what no tree can hold.
    """
    leaves: list[Tensor | Axed] = []

    def take(leaf: Tensor | Axed, path: Path) -> Slot:
        leaves.append(leaf)
        return Slot(len(leaves) - 1, leaf.axes if isinstance(leaf, Axed) else None)

    return leaves, _walk(tree, (), (Tensor, Axed), take)


def unflatten(leaves: Sequence[Any], skeleton: Skeleton) -> Tree:
    """Put ``leaves`` into the slots of ``skeleton``: the inverse of ``flatten``.

    A bare tensor in a slot with axes becomes an ``Axed``; anything else (an ``Axed``, None for "no gradient") is put in
    as it is. Raises ``KwargError`` unless every leaf has its slot. Axes and ranks are not compared: under a vmap a
    tensor has a dimension more than its axes say; whoever binds a kwarg does.
    """
    count = 0

    def put(slot: Slot, path: Path) -> Any:
        nonlocal count
        count += 1
        if not 0 <= slot.index < len(leaves):
            raise KwargError(f"{_name(path)} is tensor {slot.index}, but {len(leaves)} were given")
        leaf = leaves[slot.index]
        return leaf if slot.axes is None or not isinstance(leaf, Tensor) else Axed(leaf, slot.axes)

    tree = _walk(skeleton, (), Slot, put)
    if count != len(leaves):
        raise KwargError(f"{len(leaves)} tensors were given for a tree of {count}")
    return tree


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply ``fn`` to every tensor and ``Axed``, in order, and keep the rest.

    >>> import torch
    >>> map_leaves(lambda t: tuple(t.shape), {"A": [torch.ones(2, 3), None], "scale": 0.5})
    {'A': [(2, 3), None], 'scale': 0.5}
    """
    return _walk(tree, (), (Tensor, Axed), lambda leaf, path: fn(leaf))


def paths(tree: Tree) -> list[str]:
    """Name every tensor of a tree, in the order of ``flatten``, for messages.

    >>> import torch
    >>> paths({"lora": {"q_proj": (torch.ones(1), 3, torch.ones(1))}})
    ["lora['q_proj'][0]", "lora['q_proj'][2]"]
    """
    names: list[str] = []
    _walk(tree, (), (Tensor, Axed), lambda leaf, path: names.append(_name(path)))
    return names


def _walk(node: Any, path: Path, leaf: type | tuple[type, ...], visit: Callable[[Any, Path], Any]) -> Any:
    """Copy a tree with ``visit(leaf, path)`` in place of each leaf; the only place that says what a tree is."""
    kind = type(node)
    if isinstance(node, leaf):
        return visit(node, path)
    if node is None or kind in (bool, int, float, str):
        if fault := scalar_fault(node):
            raise KwargError(f"{_name(path)} is {fault}")
        return node
    if len(path) >= DEPTH:
        raise KwargError(f"{_name(path[:3])}… is nested deeper than {DEPTH} levels, or contains itself")
    if kind is dict:
        for key in node:
            if type(key) not in (str, int):
                raise KwargError(f"{_name(path)} has a key of type {type(key).__qualname__}, {key!r}: {_TREE}")
            if fault := scalar_fault(key):
                raise KwargError(f"{_name(path)} has, as key, {fault}")
        return {key: _walk(value, (*path, key), leaf, visit) for key, value in node.items()}
    if kind is list:
        return [_walk(value, (*path, i), leaf, visit) for i, value in enumerate(node)]
    if kind is tuple:
        return tuple([_walk(value, (*path, i), leaf, visit) for i, value in enumerate(node)])
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    raise KwargError(f"{_name(path)} is of type {module}{kind.__qualname__}: {_TREE}")


def scalar_fault(scalar: Any) -> str:
    """Say why a scalar cannot be written as JSON text and read back as it was; "" if it can."""
    if type(scalar) is str and not scalar.isascii():
        try:
            scalar.encode()
        except UnicodeEncodeError:
            return "a str that is not Unicode text (a lone surrogate)"
    if type(scalar) is int and scalar.bit_length() > INT_BITS:
        return f"an int of more than {INT_BITS} bits"
    return ""


def _name(path: Path) -> str:
    """``lora['q_proj'][0]``; the root is "the tree"."""
    if not path:
        return "the tree"
    first, *rest = path
    named = isinstance(first, str) and first.isidentifier()
    return (str(first) if named else f"[{first!r}]") + "".join(f"[{key!r}]" for key in rest)
