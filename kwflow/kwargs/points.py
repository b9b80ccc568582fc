"""The points of a layer: their names and meaning, in one place. Edits, captures, hooks and families read it here.

    embed       the input of layer 0                  resid_pre   the input of a layer
    attn  mlp   what that part adds to the residual stream
    head        the attention's heads, before their output projection
    resid       the output of a layer                 pattern     the attention's weights, which are looked at only

Where a family has ``attn``, ``mlp``, ``head`` and ``pattern`` its row says (``models.families``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kwflow.errors import KwargError, did_you_mean
from kwflow.kwargs.tree import as_int


@dataclass(frozen=True)
class Point:
    """``features``: the axes of an activation there, behind batch and seq; side by side in the layer's own tensor.

    ``reached``: at a module's "input", its "output", or as the "weights" that attention returns beside its output.
    ``elsewhere``: what TransformerLens, behind its ``hook_``, and others call it.
    """

    name: str
    features: tuple[str, ...] = ("hidden",)
    reached: str = "output"
    edited: bool = True  # else it is captured only
    elsewhere: tuple[str, ...] = ()


_ALL = (  # in the order in which a block comes by them
    Point("embed", reached="input"),
    Point("resid_pre", reached="input"),
    Point("attn", elsewhere=("attn_out", "attention")),
    Point("mlp", elsewhere=("mlp_out",)),
    Point("head", ("head", "head_dim"), "input", elsewhere=("z",)),
    Point("resid", elsewhere=("resid_post", "hidden_states", "hidden")),
    Point("pattern", ("head", "key"), "weights", edited=False),
)
POINTS = {point.name: point for point in _ALL}
EDITED = tuple(point.name for point in _ALL if point.edited)
PATTERN = "pattern"
ENTERING = ("embed", "resid_pre")  # the block's own input
LEAVING = "resid"  # and its output
NOWHERE = ("resid_mid",)  # what others have between attention and the MLP, and is no point here

_MOST = 1 << 16  # layers or heads of one edit


def no_point(what: str, name: Any, points: Iterable[str]) -> KwargError:
    """The error that says which points there are, and which of them has this name elsewhere."""
    theirs = str(name).rpartition("hook_")[2]
    ours = [point.name for point in _ALL if theirs in point.elsewhere]
    hint = "" if theirs in NOWHERE else did_you_mean(theirs, points)
    hint = f" Did you mean {ours[0]!r}?" if ours else hint
    return KwargError(f"{what}: no point {name!r}; points are {', '.join(points)}.{hint}")


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
