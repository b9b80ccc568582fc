"""Dataclasses read from JSON that a peer wrote: each field of its type and bounded, else KwargError.

What this version does not know is left out: a newer peer says more. Imports kwflow.errors only.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kwflow.errors import KwargError, KwflowError

MAX_TEXT, MAX_ITEMS = 4096, 10_000  # characters of a text, items of a list
MAX_INT = 1 << 63

T = TypeVar("T")


def read_fields(cls: type[T], json: Any, **known: Any) -> T:
    """Make a dataclass from a JSON object. ``known``: the fields that do not stand in it.

    A field may be str, int, float (finite), ``tuple[str, ...]``, ``tuple[int, int]``, a class with ``from_json``, or
    one of these or None. Raises KwargError.
    """
    if not isinstance(json, Mapping):
        raise KwargError(f"{cls.__name__} is {json!r:.40}; a JSON object was expected")
    types_by_name = {name: kind for name, kind in _types(cls).items() if name not in known}
    values = {
        name: _read(json[name], kind, f"{cls.__name__}'s {name}")
        for name, kind in types_by_name.items()
        if name in json
    }
    if missing := [name for name in types_by_name if name not in values and name in _required(cls)]:
        raise KwargError(f"{cls.__name__} lacks {', '.join(missing)}; it has {', '.join(map(str, json))!r:.80}")
    return cls(**values, **known)


@functools.cache
def _types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


@functools.cache
def _required(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)


def _read(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else _read(value, get_args(kind)[0], where)
    if hasattr(kind, "from_json"):
        try:
            return kind.from_json(value)
        except KwflowError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise KwargError(f"{where} is {value!r:.40}, which does not read: {error!r:.80}") from error
    if get_origin(kind) is tuple:
        item, more = get_args(kind)
        if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and (more is ... or len(value) == 2):
            return tuple(_read(each, item, where) for each in value)
    elif kind is float and type(value) in (int, float):
        if abs(value) < MAX_INT and math.isfinite(value):  # in this order: an int may be larger than any float
            return float(value)
    elif type(value) is kind and (len(value) <= MAX_TEXT if kind is str else abs(value) < MAX_INT):
        return value
    raise KwargError(f"{where} is {value!r:.40}; {getattr(kind, '__name__', kind)} of bounded size was expected")
