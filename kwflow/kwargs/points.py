"""The points of a layer: their names and meaning, in one place. Edits, captures, hooks and families read it here.

    embed       the input of layer 0                  resid_pre   the input of a layer
    norm1 norm2 what attention is given, and what the feed-forward is: the outputs of the norms before them
    q  k  v     each head's queries, keys and values as their projection gives them, before norms and rotary positions
    attn  mlp   what that part adds to the residual stream
    head        the attention's heads, before their output projection
    neuron      the feed-forward's activations, before its output projection
    resid       the output of a layer
    resid_mid   the residual stream between attention and feed-forward; captured only: it goes on beside what is seen
    pattern     the attention's weights, which are captured only

Where a family has these but ``embed``, ``resid_pre`` and ``resid`` its row says (``models.families``). Every
projection has two points more, by the name that ``lora`` takes: ``"mlp.down_proj.in"``, what it is given, behind
``head`` and ``neuron`` and before ``ia3`` and ``lora`` act; ``"q_proj.out"``, what it gives, behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kwflow.errors import KwargError, UnknownKwarg, did_you_mean
from kwflow.kwargs.schema import Schema
from kwflow.kwargs.tree import as_int

Projections = Mapping[str, tuple[int, int]]  # by dotted name in the layer: features in and out


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
    projection: str = ""  # whose input or output it is

    @property
    def by_head(self) -> bool:
        """Whether the layer's own tensor has the heads side by side in its last dimension."""
        return self.features[-1] == "head_dim"


EMBED, HEAD, NEURON, PATTERN = "embed", "head", "neuron", "pattern"
QKV = ("q", "k", "v")
ENTERING = (EMBED, "resid_pre")  # the block's own input
LEAVING = "resid"  # and its output

_ALL = (  # in the order in which a block comes by them
    Point(EMBED, reached="input"),
    Point("resid_pre", reached="input"),
    Point("norm1", aliases=("ln1", "ln_1", "input_layernorm")),
    Point("q", ("head", "head_dim"), aliases=("query", "queries")),
    Point("k", ("kv_head", "head_dim"), aliases=("key", "keys")),
    Point("v", ("kv_head", "head_dim"), aliases=("value", "values")),
    Point("attn", aliases=("attn_out", "attention")),
    Point("resid_mid", reached="input", edited=False),
    Point("norm2", aliases=("ln2", "ln_2")),
    Point("mlp", aliases=("mlp_out",)),
    Point(HEAD, ("head", "head_dim"), "input", aliases=("z",)),
    Point(NEURON, (NEURON,), "input", aliases=("post", "mlp_post", "neurons")),
    Point(LEAVING, aliases=("resid_post", "hidden_states", "hidden")),
    Point(PATTERN, ("head", "key"), "weights", edited=False),
)
POINTS = {point.name: point for point in _ALL}
EDITED = tuple(point.name for point in _ALL if point.edited)

_ENDS = {"in": "input", "out": "output"}  # of a projection

_MAX_NUMBERS = 1 << 16  # layers or heads of one edit
# Kwargs whose value in a layer is a list of entries, each at a point: all that are given act, in order.
ENTRIES = frozenset({"edit", "capture"})


def find_point(name: Any) -> Point | None:
    """The point of a name: one of ``POINTS``, or a projection's input or output."""
    projection, _, end = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if projection and end in _ENDS:
        return Point(name, ("feature",), _ENDS[end], projection=projection)
    return POINTS.get(name) if isinstance(name, str) else None


def takes_edits(name: Any) -> bool:
    """Whether edits act at a point of this name, where blocks have it."""
    found = find_point(name)
    return found is not None and found.edited


def point_at(name: str) -> Point:
    """As :func:`find_point`, of a name that was checked."""
    found = find_point(name)
    assert found is not None, name
    return found


def resolve(name: Any, projections: Projections, what: str) -> str:
    """A projection's full name, from that name or from its end: ``"q_proj"`` is ``"self_attn.q_proj"``."""
    if name in projections:
        return name
    matches = [full for full in projections if isinstance(name, str) and full.endswith(f".{name}")]
    if len(matches) > 1:
        raise KwargError(f"{what}: {name!r} may mean {' or '.join(map(repr, matches))}; give the full name")
    if not matches:
        near = did_you_mean(str(name), [*projections, *(full.rpartition(".")[2] for full in projections)])
        allowed = f"these layers have {', '.join(projections) or 'no projections'}"
        raise UnknownKwarg(f"{what}: no projection {name!r:.60}; {allowed}.{near}")
    return matches[0]


def within(name: Any, points: Collection[str], projections: Projections, what: str) -> str:
    """A point's full name where it is one of ``points`` or a projection's, else KwargError; also on a worker."""
    found = find_point(name)
    if found is not None and found.projection:
        return f"{resolve(found.projection, projections, what)}.{name.rpartition('.')[2]}"
    if found is None or name not in points:
        also = ", and any projection's .in and .out" if projections else ""
        raise KwargError(f"{what}: no point {name!r:.40} in these blocks; they have {', '.join(points)}{also}")
    return name


def edited_in(modules: Collection[str]) -> tuple[str, ...]:
    """The points where edits act in blocks whose modules have these: every block has its own input and output."""
    return tuple(name for name in EDITED if name in (*ENTERING, LEAVING) or name in modules)


def captured_in(modules: Collection[str]) -> tuple[str, ...]:
    """The points where captures alone act in such blocks."""
    return tuple(point.name for point in _ALL if not point.edited and point.name in modules)


def no_point(what: str, name: Any, points: Iterable[str]) -> KwargError:
    """The error that says which points there are, and which of them has this name elsewhere."""
    base = str(name).rpartition("hook_")[2]
    known_as = next((point.name for point in _ALL if base in (point.name, *point.aliases)), None)
    hint = did_you_mean(base, points) if known_as is None else f" Did you mean {known_as!r}?"
    hint = hint if known_as is None or known_as in points else f" {known_as!r} is for captures alone."
    also = 'and of a projection, its ".in" and ".out": "mlp.down_proj.in"'
    return KwargError(f"{what}: no point {name!r:.60}; points are {', '.join(points)}, {also}.{hint}")


def no_heads(what: str, heads: Any, name: str) -> KwargError:
    """The error for heads chosen where there are none."""
    by_head = " or ".join(map(repr, (HEAD, *QKV)))
    return KwargError(f"{what}: heads={heads!r:.60} belong to point={by_head}, not to {name!r}")


def features_of(point: Point, projections: Projections) -> int | None:
    """The size of the axis ``feature``, which a projection's input and output have."""
    if not point.projection:
        return None
    return projections[resolve(point.projection, projections, point.name)][point.reached == "output"]


def captured_features(name: str, schema: Schema, keys: int) -> tuple[int, ...]:
    """What stands behind (batch, pos) in what a capture at a point brings back; ``keys``: all columns so far."""
    at = point_at(name)
    known = {**schema.sizes, "key": keys, "feature": features_of(at, schema.projections)}
    return tuple(known[axis] for axis in at.features)  # type: ignore[misc]


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


def with_layers(points: Any, span: tuple[int, int]) -> Any:
    """``{point: layers}`` by absolute numbers, where layers may be "all", a slice, or counted from a flow's end."""
    if not isinstance(points, Mapping):
        return points  # Capture says what is wrong
    return {
        point: [0] if layers == "all" and point == EMBED else _absolute(layers, span)
        for point, layers in points.items()
    }


def _absolute(layers: Any, span: tuple[int, int]) -> Any:
    start, stop = span
    if isinstance(layers, str) and layers == "all":
        return range(start, stop)
    if isinstance(layers, slice):
        ends = [
            default if end is None else as_int(end) for end, default in ((layers.start, start), (layers.stop, stop))
        ]
        first, last = (end if end is None or end >= 0 else stop + end for end in ends)
        if first is None or last is None or not start <= first < last <= stop or layers.step not in (None, 1):
            raise KwargError(f"layers={layers!r}: this flow has layers {start}:{stop} (absolute)")
        return range(first, last)
    if as_int(layers) is not None:
        layers = [layers]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        return layers
    given = [(layer, as_int(layer)) for layer in layers]
    return [layer if number is None or number >= 0 else stop + number for layer, number in given]
