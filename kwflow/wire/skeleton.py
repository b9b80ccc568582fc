"""A tree's skeleton (``kwargs/tree.py``) as JSON, and read again from anyone.

    null  true  3  0.5  "text"  [...]  {"key": ...}         themselves
    {"$": 0}  {"$": 1, "axes": "layer hidden"}              a tensor, an Axed; numbered from 0 in order of appearance
    {"$tuple": [...]}                                       a tuple
    {"$float": "nan"}                                       nan, inf, -inf
    {"$items": [[key, ...], ...]}                           a dict with an int key, or a key that starts with "$"

A name that starts with "$" is a tag: it stands first in its object, and alone but for the axes.
"""

from __future__ import annotations

import math
from typing import Any

from kwflow.errors import AxesError, ProtocolError
from kwflow.kwargs.axes import parse
from kwflow.kwargs.tree import DEPTH, Skeleton, Slot, scalar_fault

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
    if fault := scalar_fault(value):
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
        if fault := scalar_fault(key):
            raise ProtocolError(f"a tree holds a dict with, as key, {fault}")
    return read
