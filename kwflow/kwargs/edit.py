"""``edit``: add, put, scale, project_out at a point of a layer.

    flow(**x, edit=[kf.add(v, layers=12, at="prompt[-1]", scale=2.0), kf.put(clean, layers=8, at=[3])])

``steer={12: v}`` is short for ``add`` at every column's ``resid`` (activation addition; Turner et al. 2023);
``prompts`` are added at a layer's input, at token positions 0..prefix (deep prompts; Liu et al. 2021). A kwarg is cast
to the hidden's dtype where it acts, so its gradient comes back in the caller's dtype. Pure functions; no network.
"""

# B batch, S seq (columns of this call), P prefix or pos, D hidden, H head

from __future__ import annotations

import functools
import numbers as kinds
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ShapeError, SpanError
from kwflow.kwargs.axes import Axed, bind_floats, check_sizes, expansions, spread
from kwflow.kwargs.kwarg import Act, Features, LayerCall, Place
from kwflow.kwargs.points import EDITED, POINTS, no_point, numbers
from kwflow.kwargs.positions import Columns, select
from kwflow.kwargs.schema import Spec

KINDS = ("add", "put", "scale", "project_out")


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit; made by :func:`add`, :func:`put`, :func:`scale` or :func:`project_out`."""

    kind: str
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
    if point not in EDITED:
        raise no_point(what, point, EDITED)
    if point == "embed" and layers is None and not isinstance(value, Mapping):
        layers = 0
    if heads is not None and point != "head":
        raise KwargError(f"{what}: heads={heads!r} belong to point='head', not to {point!r}")
    if isinstance(value, Mapping):
        if layers is not None:
            raise KwargError(f"{what}: give {{layer: value}} or layers=, not both")
        values = {numbers(layer, "layers", what): own for layer, own in value.items()}
    elif layers is None:
        raise KwargError(f"{what}: say where: layers=12, layers=range(10, 20), or {{layer: value}}")
    else:
        values = {numbers(layers, "layers", what): value}
    if point == "embed" and any(own != (0,) for own in values):
        raise SpanError(f"{what}: the point 'embed' is the input of layer 0, got layers={layers!r:.60}")
    return Edit(kind, values, point, at, strength, None if heads is None else numbers(heads, "heads", what))


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def lower(given: Any, span: tuple[int, int], columns: Columns) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The entries of ``edit=``, each with its layers: positions are looked up here, where all columns are known.

    Entries that select nothing in this step are left out. Raises KwargError, SpanError, ShapeError, SessionError.
    """
    edits = given if isinstance(given, Sequence) else [given]
    lowered = []
    for number, edit in enumerate(edits):
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
            entry: dict[str, Any] = {"kind": edit.kind, "point": edit.point}
            entry.update(value=_number(value), strength=_number(edit.strength))
            positions = _positions_of(value, _forms(edit.kind, edit.point))
            if edit.heads is not None:
                entry["heads"] = list(edit.heads)
            if index is not None:
                entry["at"] = Axed(index, ("batch", "seq"))
            elif positions is not None:
                entry["at"] = Axed(columns.position_BS, ("batch", "seq"))
            if not columns.session and positions is not None and columns.position_BS.numel():
                reached = _reached(columns.position_BS if index is None else index)
                if positions != reached:
                    raise ShapeError(
                        f"{what}, kf.{edit.kind}: value has pos = {positions}, at= selects {reached} positions"
                    )
            if index is None or not columns.session or bool((index >= 0).any()):
                lowered.append((layers, entry))
    return lowered


def _number(given: Any) -> Any:
    """A number of Python or numpy as a float; anything else as it is."""
    return float(given) if isinstance(given, kinds.Real) and not isinstance(given, bool) else given


def _positions_of(value: Any, forms: Sequence[str]) -> int | None:
    """How many positions a value has; None: the same for all, or its axes are not clear, which ``check`` says."""
    if isinstance(value, Tensor):
        fit = [form for form in expansions(forms[0]) if len(form) == value.dim()]
        return Axed(value, fit[0]).size("pos") if len(fit) == 1 else None
    return value.size("pos") if isinstance(value, Axed) else None


def _reached(index_BS: Tensor) -> int:
    """How many positions a selection has."""
    return int(index_BS.max()) + 1 if index_BS.numel() else 0


def check(entry: Any, points: Sequence[str], sizes: Mapping[str, int], what: str) -> dict[str, Any]:
    """One entry with axes on its tensors. Raises KwargError, AxesError or ShapeError; also on a worker, of a peer's."""
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS or entry.get("point") not in points:
        said = entry.get("point") if isinstance(entry, dict) else entry
        raise KwargError(f"{what}: no point {said!r:.40} in these blocks; they have {', '.join(points)}")
    if unknown := [key for key in entry if key not in ("kind", "point", "value", "strength", "at", "heads")]:
        raise KwargError(f"{what} carries {unknown[0]!r:.40}, which no edit has")
    point, heads = entry["point"], entry.get("heads")
    what = f"{what}, kf.{entry['kind']}"
    if "heads" in entry and not (
        isinstance(heads, list)
        and all(type(h) is int and 0 <= h < sizes["head"] for h in heads)
        and 0 < len(heads) == len(set(heads))
    ):
        raise KwargError(f"{what}: heads={heads!r:.60}; these layers have heads 0:{sizes['head']}")
    known = {**sizes, "head": len(heads) if heads else sizes["head"]}
    known.pop("head_dim", None)  # of what comes before the output projection: other families' keys have another
    free: dict[str, int] = {}
    bound = dict(entry)
    if (at := entry.get("at")) is not None:
        if not isinstance(at, Axed) or at.axes != ("batch", "seq") or at.tensor.dtype != torch.long:
            raise KwargError(f"{what}: at is a tensor of int64, 'batch seq', on the wire")
        check_sizes(at, known, {}, what=f"{what}, at")
    bound["value"] = _bound(entry.get("value"), _forms(entry["kind"], point), known, free, f"{what}, value")
    bound["strength"] = _bound(entry.get("strength"), ("[batch]",), known, free, f"{what}, scale")
    if isinstance(bound["value"], Axed) and "pos" in bound["value"].axes:
        given, reached = bound["value"].size("pos"), _reached(at.tensor) if isinstance(at, Axed) else 0
        if given is None or reached > given or at is None:
            raise ShapeError(f"{what}: value has pos = {given}, and {reached} positions are selected")
    return bound


def _forms(kind: str, point: str) -> tuple[str, ...]:
    """The axes that a value may have; a factor has none of the last one."""
    features = POINTS[point].features
    if kind == "scale":
        features = tuple(f"[{axis}]" for axis in features[:-1])
    return (" ".join(("[batch]", "[pos]", *features)),)


def _bound(value: Any, forms: Sequence[str], sizes: Mapping[str, int], free: dict[str, int], what: str) -> Any:
    if isinstance(value, float) and forms[0].split()[-1] not in ("hidden", "head_dim"):
        return value
    return bind_floats(value, forms, sizes, free, what=what)


# ---- how they act ------------------------------------------------------------------------------------------------


def spec(features: Features) -> Spec:
    return Spec(points=features.points)


def bind(value: Any, place: Place) -> list[dict[str, Any]]:
    """The entries that :func:`lower` made, or a peer sent."""
    if not isinstance(value, list):
        raise KwargError(f"{place.what} is a {type(value).__name__}; it takes {place.spec.says()}")
    return [check(entry, place.spec.points, place.sizes, place.what) for entry in value]


def at_points(entries: Sequence[Mapping[str, Any]], call: LayerCall) -> Mapping[str, Act]:
    """One layer's edits by their points, in the order given."""
    by_point: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_point.setdefault(entry["point"], []).append(entry)
    return {point: functools.partial(_apply_all, entries=own, heads=call.heads) for point, own in by_point.items()}


def _apply_all(activation: Tensor, *, entries: Sequence[Mapping[str, Any]], heads: int) -> Tensor:
    for entry in entries:
        activation = apply(activation, entry, heads)
    return activation


def apply(activation: Tensor, entry: Mapping[str, Any], heads: int) -> Tensor:
    """Edit an activation (batch, seq, features); at the point ``head`` its features are ``heads`` side by side."""
    at, chosen = entry.get("at"), entry.get("heads")
    inner = POINTS[entry["point"]].features
    by_head = "head" in inner
    x = activation.unflatten(-1, (heads, -1)) if by_head else activation
    index = None if at is None else at.tensor.to(x.device)
    if by_head and isinstance(entry["value"], Axed) and entry["value"].size("head_dim") not in (None, x.shape[-1]):
        raise ShapeError(f"kf.{entry['kind']}: value is {entry['value']}; the heads of these layers have {x.shape[-1]}")
    kind, wide = entry["kind"], torch.promote_types(x.dtype, torch.float32)
    factor = kind == "scale"  # numbers act in float32 where x has less, as Python's do: a row's own is the same
    value = _over(entry["value"], ("batch", "seq", *inner), index, x, wide if factor else x.dtype, chosen)
    strength = _over(entry["strength"], ("batch", "seq", *inner), index, x, wide, None)
    if kind == "add":
        changed = x + (value if _is_one(strength) else (strength * value).to(x.dtype))
    elif kind == "put":
        changed = value.expand(x.shape).clone()  # a model may go on in place
    elif kind == "scale":
        changed = (x * value).to(x.dtype)
    else:
        changed = x - _along(x, value, strength)
    keep = None if index is None else (index < 0).view(*index.shape, *[1] * (x.dim() - 2))
    if chosen is not None:
        others = torch.ones(heads, dtype=torch.bool, device=x.device)
        others[chosen] = False
        keep = others[:, None] if keep is None else keep | others[:, None]
    out = changed if keep is None else torch.where(keep, x, changed)
    return out.flatten(-2) if by_head else out


def _along(x: Tensor, direction: Tensor, strength: Any) -> Tensor:
    """``strength`` times the component of ``x`` along a direction; sums of half precision would overflow in float16."""
    own, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, direction = x.to(wide), direction.to(wide)
    square = (direction * direction).sum(-1, keepdim=True)
    along = (x * direction).sum(-1, keepdim=True) / torch.where(square > 0, square, 1)  # along zero there is nothing
    return (strength * along * direction).to(own)


def _is_one(strength: Any) -> bool:
    return isinstance(strength, float) and strength == 1.0


def _over(
    value: Any,
    order: tuple[str, ...],
    index: Tensor | None,
    x: Tensor,
    dtype: torch.dtype,
    heads: Sequence[int] | None,
) -> Any:
    """A value as a tensor that broadcasts over ``x``; ``pos`` is laid out over the columns that ``index`` selects."""
    if not isinstance(value, Axed):
        return value
    leaf = Axed(value.tensor.to(x.device, dtype), value.axes)
    if heads is not None and "head" in leaf.axes:
        dim, count = leaf.axes.index("head"), x.shape[2]
        shape = [*leaf.tensor.shape[:dim], count, *leaf.tensor.shape[dim + 1 :]]
        # ones, not zeros: nothing is projected on zero, and a NaN that is not used still makes its gradient NaN
        whole = leaf.tensor.new_ones(shape).index_copy(dim, torch.tensor(heads, device=x.device), leaf.tensor)
        leaf = Axed(whole, leaf.axes)
    if "pos" not in leaf.axes:
        return spread(leaf, order)
    assert index is not None
    rest = [axis for axis in order if axis not in ("batch", "seq")]
    wide = spread(leaf, ("batch", "pos", *rest))  # (batch or 1, pos, …)
    rows = max(len(wide), len(index))
    chosen = index.clamp(min=0).expand(rows, -1).view(rows, -1, *[1] * len(rest)).expand(-1, -1, *wide.shape[2:])
    return torch.gather(wide.expand(rows, *wide.shape[1:]), 1, chosen)
