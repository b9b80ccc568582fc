"""``edit``: add, put, scale, project_out at a point of a layer. A new one is a row of ``OPERATIONS``.

    flow(**x, edit=[kf.add(v, layers=12, at="prompt[-1]", scale=2.0), kf.put(clean, layers=8, at=[3])])

A value is cast to the hidden's dtype where it acts, so its gradient comes back in the caller's dtype. Pure functions;
no network.
"""

# B batch, S seq (columns of this call)

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ShapeError, SpanError
from kwflow.kwargs.axes import Axed, spread
from kwflow.kwargs.kwarg import Act, Features, LayerCall, Place
from kwflow.kwargs.points import EDITED, EMBED, HEAD, features_of, no_point, numbers, point_at, takes_edits, within
from kwflow.kwargs.positions import Columns, select
from kwflow.kwargs.schema import Spec
from kwflow.kwargs.signatures import bind_floats, check_sizes, expansions


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit; made by :func:`add`, :func:`put`, :func:`scale` or :func:`project_out`."""

    kind: str  # of OPERATIONS
    values: Mapping[tuple[int, ...], Any]  # for some layers, a tensor, its axes or a number
    point: str
    at: Any
    strength: Any
    heads: tuple[int, ...] | None

    def __repr__(self) -> str:
        layers = ", ".join(str(layer) for layers in self.values for layer in layers)
        return f"kf.{self.kind}(layers=[{layers}], point={self.point!r}, at={self.at!r:.60})"


def add(
    value: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", scale: Any = 1.0, heads: Any = None
) -> Edit:
    """Add ``scale * value`` to activations.

    ``value``: (hidden,), or axes any of "[batch] [pos] hidden" (kf.axes where the rank leaves it open), at the point
    ``head`` "[batch] [pos] head head_dim"; or {layer: value}. ``layers``: absolute numbers. ``at``: see
    ``kwflow.kwargs.positions``. Differentiable with respect to value and scale.
    """
    return _edit("add", value, layers, point, at, scale, heads)


def put(value: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None) -> Edit:
    """Replace activations by ``value`` (activation patching; Meng et al. 2022). Arguments as :func:`add`'s."""
    return _edit("put", value, layers, point, at, 1.0, heads)


def scale(factor: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None) -> Edit:
    """Multiply activations by ``factor``: a number, or a tensor with axes any of "[batch] [pos]" (and "head" there)."""
    return _edit("scale", factor, layers, point, at, 1.0, heads)


def project_out(
    direction: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", scale: Any = 1.0, heads: Any = None
) -> Edit:
    """Remove ``scale`` of the component along ``direction`` (directional ablation; Arditi et al. 2024)."""
    return _edit("project_out", direction, layers, point, at, scale, heads)


def _edit(kind: str, value: Any, layers: Any, point: str, at: Any, strength: Any, heads: Any) -> Edit:
    what = f"kf.{kind}"
    if not takes_edits(point):
        raise no_point(what, point, EDITED)
    if point == EMBED and layers is None and not isinstance(value, Mapping):
        layers = 0
    if heads is not None and point != HEAD:
        raise KwargError(f"{what}: heads={heads!r} belong to point='head', not to {point!r}")
    if isinstance(value, Mapping):
        if layers is not None:
            raise KwargError(f"{what}: give {{layer: value}} or layers=, not both")
        values = {numbers(layer, "layers", what): layer_value for layer, layer_value in value.items()}
    elif layers is None:
        raise KwargError(f"{what}: say where: layers=12, layers=range(10, 20), or {{layer: value}}")
    else:
        values = {numbers(layers, "layers", what): value}
    if point == EMBED and any(layer_numbers != (0,) for layer_numbers in values):
        raise SpanError(f"{what}: the point 'embed' is the input of layer 0, got layers={layers!r:.60}")
    return Edit(kind, values, point, at, strength, None if heads is None else numbers(heads, "heads", what))


# ---- the operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What a kind of edit does: one row of ``OPERATIONS``.

    ``change``: of an activation, the value and the strength, which broadcast over it, to the changed activation.
    ``by_factor``: the value is a factor, a number or a tensor without the activation's last axis; else a vector.
    """

    change: Callable[[Tensor, Any, Any], Tensor]
    by_factor: bool = False

    def signature(self, point: str) -> str:
        """The axes that a value may have at a point."""
        features = point_at(point).features
        if self.by_factor:
            features = tuple(f"[{axis}]" for axis in features[:-1])
        return " ".join(("[batch]", "[pos]", *features))

    def value_dtype(self, activation: Tensor) -> torch.dtype:
        """Factors act in float32 where an activation has less, as Python's numbers do: a row's own is the same."""
        return _widened(activation) if self.by_factor else activation.dtype


def _add(x: Tensor, vector: Tensor, strength: Any) -> Tensor:
    unscaled = isinstance(strength, float) and strength == 1.0
    return x + (vector if unscaled else (strength * vector).to(x.dtype))


def _put(x: Tensor, vector: Tensor, _: Any) -> Tensor:
    return vector.expand(x.shape).clone()  # a model may go on in place


def _scale(x: Tensor, factor: Any, _: Any) -> Tensor:
    return (x * factor).to(x.dtype)


def _project_out(x: Tensor, direction: Tensor, strength: Any) -> Tensor:
    dtype = _widened(x)  # sums of half precision would overflow in float16
    wide_x, direction = x.to(dtype), direction.to(dtype)
    square = (direction * direction).sum(-1, keepdim=True)
    along = (wide_x * direction).sum(-1, keepdim=True) / torch.where(square > 0, square, 1)  # along zero is nothing
    return x - (strength * along * direction).to(x.dtype)


def _widened(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


OPERATIONS = {
    "add": Operation(_add),
    "put": Operation(_put),
    "scale": Operation(_scale, by_factor=True),
    "project_out": Operation(_project_out),
}
KINDS = tuple(OPERATIONS)


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def spec(features: Features) -> Spec:
    return Spec(points=features.points)


def lower(edits: Any, span: tuple[int, int], columns: Columns) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The entries of ``edit=``, each with its layers: positions are looked up here, where all columns are known.

    Entries that select nothing in this step are left out. Raises KwargError, SpanError, ShapeError, SessionError.
    """
    lowered = []
    for number, edit in enumerate(edits if isinstance(edits, Sequence) else [edits]):
        what = f"edit[{number}]"
        if not isinstance(edit, Edit):
            raise KwargError(
                f"{what} is a {type(edit).__name__}; make edits with kf.add, kf.put, kf.scale, kf.project_out, or with "
                "v.edits() of vectors, a list that joins others: edit=[*v.edits(), kf.scale(0.0, 3)]"
            )
        index = select(edit.at, columns, what=f"{what}, kf.{edit.kind}")
        for layers, value in edit.values.items():
            if outside := [layer for layer in layers if not span[0] <= layer < span[1]]:
                raise SpanError(f"{what} names layer {outside[0]}; this flow has layers {span[0]}:{span[1]} (absolute)")
            entry = _entry(edit, value, index, columns, what)
            if index is None or not columns.session or bool((index >= 0).any()):
                lowered.append((layers, entry))
    return lowered


def _entry(edit: Edit, value: Any, index_BS: Tensor | None, columns: Columns, what: str) -> dict[str, Any]:
    """An edit's entry for some of its layers, as it goes over the wire but for the axes of its tensors."""
    entry: dict[str, Any] = {"kind": edit.kind, "point": edit.point}
    entry.update(value=_as_float(value), strength=_as_float(edit.strength))
    positions = _positions_of(value, OPERATIONS[edit.kind].signature(edit.point))
    if edit.heads is not None:
        entry["heads"] = list(edit.heads)
    if index_BS is not None:
        entry["at"] = Axed(index_BS, ("batch", "seq"))
    elif positions is not None:
        entry["at"] = Axed(columns.position_BS, ("batch", "seq"))
    if not columns.session and positions is not None and columns.position_BS.numel():
        selected = _selected(columns.position_BS if index_BS is None else index_BS)
        if positions != selected:
            raise ShapeError(f"{what}, kf.{edit.kind}: value has pos = {positions}, at= selects {selected} positions")
    return entry


def _as_float(value: Any) -> Any:
    """A number of Python or numpy as a float; anything else as it is."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _positions_of(value: Any, signature: str) -> int | None:
    """How many positions a value has; None: the same for all, or its axes are not clear, which ``check`` says."""
    if isinstance(value, Tensor):
        fit = [axes for axes in expansions(signature) if len(axes) == value.dim()]
        return Axed(value, fit[0]).size("pos") if len(fit) == 1 else None
    return value.size("pos") if isinstance(value, Axed) else None


def _selected(index_BS: Tensor) -> int:
    """How many positions a selection has."""
    return int(index_BS.max()) + 1 if index_BS.numel() else 0


def bind(value: Any, place: Place) -> list[dict[str, Any]]:
    """The entries that :func:`lower` made, or a peer sent."""
    if not isinstance(value, list):
        raise KwargError(f"{place.what} is a {type(value).__name__}; it takes {place.spec.says()}")
    return [check(entry, place) for entry in value]


def check(entry: Any, place: Place) -> dict[str, Any]:
    """One entry with axes on its tensors. Raises KwargError, AxesError or ShapeError; also on a worker, of a peer's."""
    what, sizes = place.what, place.sizes
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        raise KwargError(f"{what} is {entry!r:.60}; it takes {place.spec.says()}")
    name = within(entry.get("point"), place.spec.points, place.projections, what)
    if unknown := [key for key in entry if key not in ("kind", "point", "value", "strength", "at", "heads")]:
        raise KwargError(f"{what} carries {unknown[0]!r:.40}, which no edit has")
    heads, operation = entry.get("heads"), OPERATIONS[entry["kind"]]
    what = f"{what}, kf.{entry['kind']}"
    if "heads" in entry and not (
        isinstance(heads, list)
        and all(type(h) is int and 0 <= h < sizes["head"] for h in heads)
        and 0 < len(heads) == len(set(heads))
    ):
        raise KwargError(f"{what}: heads={heads!r:.60}; these layers have heads 0:{sizes['head']}")
    known = {**sizes, "head": len(heads) if heads else sizes["head"]}
    known.pop("head_dim", None)  # of what comes before the output projection: other families' keys have another
    if (features := features_of(point_at(name), place.projections)) is not None:
        known["feature"] = features
    free: dict[str, int] = {}
    if (at := entry.get("at")) is not None:
        if not isinstance(at, Axed) or at.axes != ("batch", "seq") or at.tensor.dtype != torch.long:
            raise KwargError(f"{what}: at is a tensor of int64, 'batch seq', on the wire")
        check_sizes(at, known, {}, what=f"{what}, at")
    value, strength = entry.get("value"), entry.get("strength")
    if not (operation.by_factor and isinstance(value, float)):
        value = bind_floats(value, [operation.signature(name)], known, free, what=f"{what}, value")
    if not isinstance(strength, float):
        strength = bind_floats(strength, ["[batch]"], known, free, what=f"{what}, scale")
    if isinstance(value, Axed) and (positions := value.size("pos")) is not None:
        selected = _selected(at.tensor) if isinstance(at, Axed) else 0
        if selected > positions or at is None:
            raise ShapeError(f"{what}: value has pos = {positions}, and {selected} positions are selected")
    return {**entry, "point": name, "value": value, "strength": strength}


# ---- how they act ------------------------------------------------------------------------------------------------


def at_points(entries: Sequence[Mapping[str, Any]], call: LayerCall) -> Mapping[str, Act]:
    """One layer's edits by their points, in the order given."""
    by_point: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_point.setdefault(entry["point"], []).append(entry)
    return {
        point: functools.partial(_apply_all, entries=in_order, heads=call.heads) for point, in_order in by_point.items()
    }


def _apply_all(activation: Tensor, *, entries: Sequence[Mapping[str, Any]], heads: int) -> Tensor:
    for entry in entries:
        activation = apply(activation, entry, heads)
    return activation


def apply(activation: Tensor, entry: Mapping[str, Any], heads: int) -> Tensor:
    """Edit an activation (batch, seq, features); at the point ``head`` its features are ``heads`` side by side."""
    operation, point, value = OPERATIONS[entry["kind"]], point_at(entry["point"]), entry["value"]
    at, chosen = entry.get("at"), entry.get("heads")
    x = activation.unflatten(-1, (heads, -1)) if point.by_head else activation
    index = None if at is None else at.tensor.to(x.device)
    if point.by_head and isinstance(value, Axed) and value.size("head_dim") not in (None, x.shape[-1]):
        raise ShapeError(f"kf.{entry['kind']}: value is {value}; the heads of these layers have {x.shape[-1]}")
    order = ("batch", "seq", *point.features)
    value = _over(value, order, index, x, operation.value_dtype(x), chosen)
    strength = _over(entry["strength"], order, index, x, _widened(x), None)
    changed = operation.change(x, value, strength)
    keep = None if index is None else (index < 0).view(*index.shape, *[1] * (x.dim() - 2))
    if chosen is not None:
        others = torch.ones(heads, dtype=torch.bool, device=x.device)
        others[chosen] = False
        keep = others[:, None] if keep is None else keep | others[:, None]
    out = changed if keep is None else torch.where(keep, x, changed)
    return out.flatten(-2) if point.by_head else out


def _over(
    value: Any,
    order: tuple[str, ...],
    index_BS: Tensor | None,
    x: Tensor,
    dtype: torch.dtype,
    heads: Sequence[int] | None,
) -> Any:
    """A value as a tensor that broadcasts over ``x``; ``pos`` is laid out over the columns that are selected."""
    if not isinstance(value, Axed):
        return value
    leaf = Axed(value.tensor.to(x.device, dtype), value.axes)
    if heads is not None and "head" in leaf.axes:
        dim, count = leaf.axes.index("head"), x.shape[2]
        shape = [*leaf.tensor.shape[:dim], count, *leaf.tensor.shape[dim + 1 :]]
        # ones, not zeros: nothing is projected on zero, and a NaN that is not used still makes its gradient NaN
        all_heads = leaf.tensor.new_ones(shape).index_copy(dim, torch.tensor(heads, device=x.device), leaf.tensor)
        leaf = Axed(all_heads, leaf.axes)
    if "pos" not in leaf.axes:
        return spread(leaf, order)
    assert index_BS is not None
    features = [axis for axis in order if axis not in ("batch", "seq")]
    by_pos = spread(leaf, ("batch", "pos", *features))  # (batch or 1, pos, …)
    rows = max(len(by_pos), len(index_BS))
    pos_index = index_BS.clamp(min=0).expand(rows, -1).view(rows, -1, *[1] * len(features))
    return torch.gather(by_pos.expand(rows, *by_pos.shape[1:]), 1, pos_index.expand(-1, -1, *by_pos.shape[2:]))
