"""The points of a layer: their names and meaning, in one place. Edits, captures, hooks and families read it here.

    embed       the input of layer 0                  resid_pre   the input of a layer
    attn  mlp   what that part adds to the residual stream
    head        the attention's heads, before their output projection
    resid       the output of a layer                 pattern     the attention's weights, which are captured only

Where a family has ``attn``, ``mlp``, ``head`` and ``pattern`` its row says (``models.families``).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kwflow.errors import KwargError, did_you_mean
from kwflow.kwargs.tree import as_int


@dataclass(frozen=True)
class Point:
    """``features``: the axes of an activation there, behind batch and seq; side by side in the layer's own tensor.

    ``reached``: at a module's "input", its "output", or as the "weights" that attention returns beside its output.
    ``aliases``: what TransformerLens, behind its ``hook_``, and others call it.
    """

    name: str
    features: tuple[str, ...] = ("hidden",)
    reached: str = "output"
    edited: bool = True  # else it is captured only
    aliases: tuple[str, ...] = ()

    @property
    def by_head(self) -> bool:
        """Whether the layer's own tensor has the heads side by side in its last dimension."""
        return self.features == ("head", "head_dim")


EMBED, HEAD, PATTERN = "embed", "head", "pattern"
ENTERING = (EMBED, "resid_pre")  # the block's own input
LEAVING = "resid"  # and its output

_ALL = (  # in the order in which a block comes by them
    Point(EMBED, reached="input"),
    Point("resid_pre", reached="input"),
    Point("attn", aliases=("attn_out", "attention")),
    Point("mlp", aliases=("mlp_out",)),
    Point(HEAD, ("head", "head_dim"), "input", aliases=("z",)),
    Point(LEAVING, aliases=("resid_post", "hidden_states", "hidden")),
    Point(PATTERN, ("head", "key"), "weights", edited=False),
)
POINTS = {point.name: point for point in _ALL}
EDITED = tuple(point.name for point in _ALL if point.edited)

_NO_POINT = ("resid_mid",)  # what others have between attention and the MLP
_MAX_NUMBERS = 1 << 16  # layers or heads of one edit
# Kwargs whose value in a layer is a list of entries, each at a point: all that are given act, in order.
ENTRIES = frozenset({"edit", "capture"})


def edited_in(modules: Collection[str]) -> tuple[str, ...]:
    """The points where edits act in blocks whose modules have these: every block has its own input and output."""
    return tuple(name for name in EDITED if name in (*ENTERING, LEAVING) or name in modules)


def no_point(what: str, name: Any, points: Iterable[str]) -> KwargError:
    """The error that says which points there are, and which of them has this name elsewhere."""
    base = str(name).rpartition("hook_")[2]
    known_as = next((point.name for point in _ALL if base in point.aliases), None)
    hint = "" if base in _NO_POINT else did_you_mean(base, points)
    hint = f" Did you mean {known_as!r}?" if known_as is not None else hint
    return KwargError(f"{what}: no point {name!r}; points are {', '.join(points)}.{hint}")


def captured_features(point: str, sizes: Mapping[str, int], keys: int) -> tuple[int, ...]:
    """What stands behind (batch, pos) in what a capture at a point brings back; ``keys``: all columns so far."""
    return tuple({**sizes, "key": keys}[axis] for axis in POINTS[point].features)


def numbers(value: Any, name: str, what: str) -> tuple[int, ...]:
    """Layer or head numbers, one or several. Raises KwargError that names ``name`` of ``what``."""
    several = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0  # an array without dimensions is one
    try:
        items: list[Any] = list(itertools.islice(value, _MAX_NUMBERS + 1)) if several else [value]
    except TypeError:
        items = [None]
    ints = [number for number in map(as_int, items) if number is not None]
    if len(ints) < len(items):
        raise KwargError(f"{what}: {name}={value!r:.60}; give a number or several")
    if not ints or len(set(ints)) != len(ints) or len(ints) > _MAX_NUMBERS:
        raise KwargError(f"{what}: {name}={value!r:.60}: give at least one, each once, and at most {_MAX_NUMBERS}")
    return tuple(ints)
