"""Trees of kwargs: split one into its tensors and a skeleton, join it again, write the skeleton as JSON.

A tree is a nested dict (str or int keys), list or tuple. Its leaves are tensors and ``Axed`` tensors; None, bool, int,
float and str stay in the skeleton, where each tensor leaves a ``Slot``. Nothing else is a tree: not a subclass such as
``defaultdict`` or ``np.float64``, since it would arrive as something else than was sent. The JSON of a skeleton:

    null  true  3  0.5  "text"  [...]  {"key": ...}         themselves
    {"$": 0}  {"$": 1, "axes": "layer hidden"}              a tensor, an Axed; numbered from 0 in order of appearance
    {"$tuple": [...]}                                       a tuple
    {"$float": "nan"}                                       nan, inf, -inf
    {"$items": [[key, ...], ...]}                           a dict with an int key, or a key that starts with "$"

A name that starts with "$" is a tag: it stands first in its object, and alone but for the axes.

May import torch, kwflow.kwargs.axes and kwflow.errors. It knows no bytes and no network.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from kwflow.errors import AxesError, KwargError, ProtocolError
from kwflow.kwargs.axes import Axed, parse

# The types say Any because a recursive alias would make every reader narrow each node; the walk below checks them all.
Tree: TypeAlias = Any
Skeleton: TypeAlias = Any
Path: TypeAlias = "tuple[str | int, ...]"

DEPTH = 64  # levels of nesting; a list that contains itself ends here too
INT_BITS = 8192  # below Python's limit on the digits of an int in text (4300 digits, 14,284 bits)

_TREE = "a tree holds dicts (str or int keys), lists and tuples of tensors, None, bool, int, float and str"
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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


def to_json(skeleton: Skeleton) -> Any:
    """Write a skeleton as a JSON value, in the form given at the top of this module.

    >>> to_json({"steer": {12: Slot(0, ("hidden",))}, "scale": float("inf")})
    {'steer': {'$items': [[12, {'$': 0, 'axes': 'hidden'}]]}, 'scale': {'$float': 'inf'}}
    """
    kind = type(skeleton)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in skeleton):
            return {key: to_json(value) for key, value in skeleton.items()}
        return {"$items": [[key, to_json(value)] for key, value in skeleton.items()]}
    if kind is list:
        return [to_json(value) for value in skeleton]
    if kind is tuple:
        return {"$tuple": [to_json(value) for value in skeleton]}
    if kind is Slot:
        axes = {} if skeleton.axes is None else {"axes": " ".join(skeleton.axes)}
        return {"$": skeleton.index, **axes}
    if kind is float and not math.isfinite(skeleton):
        return {"$float": repr(skeleton)}
    return skeleton


def from_json(json: Any, *, depth: int = DEPTH) -> Skeleton:
    """Read a skeleton that ``to_json`` wrote: ``from_json(to_json(s)) == s``, types and order of keys included.

    ``json`` may come from anyone. Raises ``ProtocolError`` for what ``to_json`` cannot have written.
    """
    seen = 0

    def read(value: Any, level: int) -> Skeleton:
        nonlocal seen
        if not isinstance(value, dict | list):
            return _read_scalar(value)
        if level >= depth:
            raise ProtocolError(f"a tree is nested deeper than {depth} levels")
        if isinstance(value, list):
            return [read(part, level + 1) for part in value]
        tag, body = next(iter(value.items()), ("", None))
        if not tag.startswith("$"):
            if any(key.startswith("$") for key in value):
                raise ProtocolError("a tree holds a dict with a tag beside its keys")
            return _read_items([(key, read(part, level + 1)) for key, part in value.items()])
        if tag == "$" and type(body) is int and body == seen and (len(value) == 1 or [*value] == ["$", "axes"]):
            seen += 1
            return Slot(body, _read_axes(value["axes"]) if len(value) == 2 else None)
        if tag == "$tuple" and type(body) is list and len(value) == 1:
            return tuple([read(part, level + 1) for part in body])
        if tag == "$items" and type(body) is list and len(value) == 1:
            return _read_items([(key, read(part, level + 1)) for key, part in map(_read_pair, body)])
        if tag == "$float" and type(body) is str and body in _NONFINITE and len(value) == 1:
            return _NONFINITE[body]
        raise ProtocolError(f"a tree holds a {tag[:20]!r} that is unknown, malformed or out of order")

    return read(json, 0)


def _read_scalar(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, float, str):
        raise ProtocolError(f"a tree holds a {type(value).__name__}, which no JSON has")
    if fault := _fault(value):
        raise ProtocolError(f"a tree holds {fault}")
    if type(value) is float and not math.isfinite(value):
        raise ProtocolError("a tree holds a number too large for a float")
    return value


def _read_axes(text: Any) -> tuple[str, ...]:
    try:
        names = parse(text) if type(text) is str else ()
    except AxesError as error:
        raise ProtocolError(f"a tree holds a tensor with bad axes: {error}") from error
    if " ".join(names) != text:
        raise ProtocolError("the axes of a tensor are not names with one space between them")
    return names


def _read_pair(pair: Any) -> tuple[str | int, Any]:
    if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ProtocolError("a tree holds an item that is not [str or int, value]")
    return pair[0], pair[1]


def _read_items(items: list[tuple[str | int, Any]]) -> dict[str | int, Any]:
    read = dict(items)
    if len(read) != len(items):
        raise ProtocolError("a tree holds a dict with a key given twice")
    for key in read:
        if fault := _fault(key):
            raise ProtocolError(f"a tree holds a dict with, as key, {fault}")
    return read


def _walk(node: Any, path: Path, leaf: type | tuple[type, ...], visit: Callable[[Any, Path], Any]) -> Any:
    """Copy a tree with ``visit(leaf, path)`` in place of each leaf; the only place that says what a tree is."""
    kind = type(node)
    if isinstance(node, leaf):
        return visit(node, path)
    if node is None or kind in (bool, int, float, str):
        if fault := _fault(node):
            raise KwargError(f"{_name(path)} is {fault}")
        return node
    if len(path) >= DEPTH:
        raise KwargError(f"{_name(path[:3])}… is nested deeper than {DEPTH} levels, or contains itself")
    if kind is dict:
        for key in node:
            if type(key) not in (str, int):
                raise KwargError(f"{_name(path)} has a key of type {type(key).__qualname__}, {key!r}: {_TREE}")
            if fault := _fault(key):
                raise KwargError(f"{_name(path)} has, as key, {fault}")
        return {key: _walk(value, (*path, key), leaf, visit) for key, value in node.items()}
    if kind is list:
        return [_walk(value, (*path, i), leaf, visit) for i, value in enumerate(node)]
    if kind is tuple:
        return tuple([_walk(value, (*path, i), leaf, visit) for i, value in enumerate(node)])
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    raise KwargError(f"{_name(path)} is of type {module}{kind.__qualname__}: {_TREE}")


def _fault(scalar: Any) -> str:
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
