"""The points of a layer, where edits and captures act, and how layers and heads are numbered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kwflow.errors import KwargError, did_you_mean
from kwflow.kwargs.tree import as_int

POINTS = ("embed", "resid_pre", "attn", "mlp", "head", "resid")
_MOST = 1 << 16  # layers or heads of one edit
# what TransformerLens calls the points, behind its "hook_"; after attention and before the MLP there is none
_ELSEWHERE = {
    **{"resid_post": "resid", "resid_mid": "", "attn_out": "attn", "mlp_out": "mlp", "z": "head"},
    **{"hidden_states": "resid", "hidden": "resid", "attention": "attn"},
}


def no_point(what: str, point: Any, points: Sequence[str]) -> KwargError:
    """The error that says which points there are, and which of them has this name elsewhere."""
    name = str(point).rpartition("hook_")[2]
    ours = _ELSEWHERE.get(name)
    hint = did_you_mean(name, points) if ours is None else ours and f" Did you mean {ours!r}?"
    return KwargError(f"{what}: no point {point!r}; points are {', '.join(points)}.{hint}")


def numbers(given: Any, name: str, what: str) -> tuple[int, ...]:
    """Layer or head numbers, one or several."""
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0  # an array without dimensions is one
    try:
        items: list[Any] = list(itertools.islice(given, _MOST + 1)) if several else [given]
    except TypeError:
        items = [None]
    numbers = [number for number in map(as_int, items) if number is not None]
    if len(numbers) < len(items):
        raise KwargError(f"{what}: {name}={given!r:.60}; give a number or several")
    if not numbers or len(set(numbers)) != len(numbers) or len(numbers) > _MOST:
        raise KwargError(f"{what}: {name}={given!r:.60}: give at least one, each once, and at most {_MOST}")
    return tuple(numbers)


PATTERN = "pattern"
