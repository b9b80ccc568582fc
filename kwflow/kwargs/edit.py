"""``edit``: what changes activations at a point of a layer. A new one is a row of ``operations``.

    flow(**x, edit=[kf.add(v, layers=12, at="prompt[-1]", scale=2.0), kf.put(clean, layers=8, at=[3])])

A value is cast to the hidden's dtype where it acts, so its gradient comes back in the caller's dtype. Pure functions;
no network.
"""

# B batch, S seq (columns of this call)

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ShapeError, SpanError
from kwflow.kwargs.axes import Axed, spread
from kwflow.kwargs.kwarg import Act, Features, LayerCall, Place
from kwflow.kwargs.noise import Noise, selected
from kwflow.kwargs.operations import KINDS, OPERATIONS, Operation, widened
from kwflow.kwargs.points import (
    EDITED,
    EMBED,
    features_of,
    no_heads,
    no_point,
    numbers,
    point_at,
    takes_edits,
    within,
)
from kwflow.kwargs.positions import Columns, select
from kwflow.kwargs.schema import Spec
from kwflow.kwargs.signatures import bind_floats, check_sizes, expansions

ENTRY_KEYS = ("kind", "point", "value", "strength", "at", "heads", "dims", "basis")


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit; made by the functions of ``kf.edits``."""

    kind: str  # of OPERATIONS; or noise, which becomes an add
    values: Mapping[tuple[int, ...], Any]  # for some layers, a tensor, its axes or a number
    point: str
    at: Any
    strength: Any
    heads: tuple[int, ...] | None
    dims: tuple[int, ...] | None = None
    basis: Any = None
    seed: int | None = None  # of noise, whose values are how strong it is

    def __repr__(self) -> str:
        layers = ", ".join(str(layer) for layers in self.values for layer in layers)
        return f"{name_of(self.kind)}(layers=[{layers}], point={self.point!r}, at={self.at!r:.60})"


def name_of(kind: str) -> str:
    """What a caller writes."""
    return f"kf.{kind}" if kind in ("add", "put", "scale", "project_out") else f"kf.edits.{kind}"


def make(
    kind: str,
    value: Any,
    layers: Any,
    point: Any,
    at: Any,
    heads: Any = None,
    dims: Any = None,
    *,
    strength: Any = 1.0,
    basis: Any = None,
    seed: int | None = None,
) -> Edit:
    """An edit of a kind, as a caller gives it. Raises KwargError or SpanError."""
    what = name_of(kind)
    if not takes_edits(point):
        raise no_point(what, point, EDITED)
    if point == EMBED and layers is None and not isinstance(value, Mapping):
        layers = 0
    if heads is not None and not point_at(point).by_head:
        raise no_heads(what, heads, point)
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
    heads = None if heads is None else numbers(heads, "heads", what)
    dims = None if dims is None else numbers(dims, "dims", what)
    return Edit(kind, values, point, at, strength, heads, dims, basis, seed)


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
        index = select(edit.at, columns, what=f"{what}, {name_of(edit.kind)}")
        for layers, value in edit.values.items():
            if outside := [layer for layer in layers if not span[0] <= layer < span[1]]:
                raise SpanError(f"{what} names layer {outside[0]}; this flow has layers {span[0]}:{span[1]} (absolute)")
            if edit.seed is None:
                entries = [(layers, _entry(edit, value, index, columns, what))]
            else:
                entries = _noisy(edit, value, layers, *selected(index, columns.position_BS))
            if index is None or not columns.session or bool((index >= 0).any()):
                lowered += entries
    return lowered


def _entry(edit: Edit, value: Any, index_BS: Tensor | None, columns: Columns, what: str) -> dict[str, Any]:
    """An edit's entry for some of its layers, as it goes over the wire but for the axes of its tensors."""
    entry: dict[str, Any] = {"kind": edit.kind, "point": edit.point}
    entry.update(value=_as_float(value), strength=_as_float(edit.strength))
    positions = _positions_of(value, OPERATIONS[edit.kind].signature(edit.point))
    entry |= {key: list(chosen) for key in ("heads", "dims") if (chosen := getattr(edit, key)) is not None}
    entry |= {} if edit.basis is None else {"basis": edit.basis}
    if index_BS is not None:
        entry["at"] = Axed(index_BS, ("batch", "seq"))
    elif positions is not None:
        entry["at"] = Axed(columns.position_BS, ("batch", "seq"))
    if not columns.session and positions is not None and columns.position_BS.numel():
        count = _selected(columns.position_BS if index_BS is None else index_BS)
        if positions != count:
            raise ShapeError(
                f"{what}, {name_of(edit.kind)}: value has pos = {positions}, at= selects {count} positions"
            )
    return entry


def _noisy(edit: Edit, std: Any, layers: Sequence[int], at_BS: Tensor, position_BP: Tensor) -> list[Any]:
    """The entries of noise, each layer's own: an add, whose value is drawn when it is bound."""
    assert edit.seed is not None
    entry = {"kind": "add", "point": edit.point, "strength": _as_float(std), "at": Axed(at_BS, ("batch", "seq"))}
    entry |= {key: list(chosen) for key in ("heads", "dims") if (chosen := getattr(edit, key)) is not None}
    return [((layer,), {**entry, "value": Noise(edit.seed, layer, position_BP)}) for layer in layers]


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
    if unknown := [key for key in entry if key not in ENTRY_KEYS]:
        raise KwargError(f"{what} carries {unknown[0]!r:.40}, which no edit has")
    value, strength, noise = entry.get("value"), entry.get("strength"), isinstance(entry.get("value"), Noise)
    operation, what = OPERATIONS[entry["kind"]], f"{what}, {name_of('noise' if noise else entry['kind'])}"
    known, features = {**sizes}, features_of(point_at(name), place.projections)
    known |= {} if features is None else {"feature": features}
    whole = {**known}
    last = point_at(name).features[-1]
    if "heads" in entry and not point_at(name).by_head:
        raise no_heads(what, entry["heads"], name)
    for key, axis in (("heads", point_at(name).features[0]), ("dims", last)):
        if key in entry:
            known[axis] = _check_chosen(entry[key], key, known[axis], what)
    if "dims" not in entry:
        known.pop("head_dim", None)  # of what comes before the output projection: other families' keys have another
    free: dict[str, int] = {}
    if (at := entry.get("at")) is not None:
        if not isinstance(at, Axed) or at.axes != ("batch", "seq") or at.tensor.dtype != torch.long:
            raise KwargError(f"{what}: at is a tensor of int64, 'batch seq', on the wire")
        check_sizes(at, known, {}, what=f"{what}, at")
    if isinstance(value, Noise):  # the caller's own: from the wire come tensors only
        value = value.drawn(name, whole, entry)
    if not (operation.by_factor and isinstance(value, float)):
        value = bind_floats(value, [operation.signature(name)], known, free, what=f"{what}, value")
    if not isinstance(strength, float):
        strength = bind_floats(strength, ["[batch]"], known, free, what=f"{what}, {'std' if noise else 'scale'}")
    basis = _check_basis(entry, operation, known, free, what)
    if isinstance(value, Axed) and (positions := value.size("pos")) is not None:
        count = _selected(at.tensor) if isinstance(at, Axed) else 0
        if count > positions or at is None:
            raise ShapeError(f"{what}: value has pos = {positions}, and {count} positions are selected")
    return {**entry, "point": name, "value": value, "strength": strength, **basis}


def _check_basis(
    entry: Mapping[str, Any], operation: Operation, known: Mapping[str, int], free: dict[str, int], what: str
) -> dict[str, Axed]:
    """The basis of an edit that takes one, with axes."""
    if operation.in_basis != ("basis" in entry):
        raise KwargError(f"{what}: {'it takes a basis' if operation.in_basis else 'it has no basis'}")
    signatures = [operation.basis_signature(entry["point"])]
    given = {"basis": entry["basis"]} if operation.in_basis else {}
    return {key: bind_floats(basis, signatures, known, free, what=f"{what}, {key}") for key, basis in given.items()}


def _check_chosen(chosen: Any, key: str, size: int, what: str) -> int:
    """How many heads or dims are chosen."""
    good = isinstance(chosen, list) and all(type(number) is int and 0 <= number < size for number in chosen)
    if not good or not 0 < len(chosen) == len(set(chosen)):
        raise KwargError(f"{what}: {key}={chosen!r:.60}; there are {key} 0:{size}")
    return len(chosen)


# ---- how they act ------------------------------------------------------------------------------------------------


def at_points(entries: Sequence[Mapping[str, Any]], call: LayerCall) -> Mapping[str, Act]:
    """One layer's edits by their points, in the order given."""
    by_point: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_point.setdefault(entry["point"], []).append(entry)
    return {
        point: functools.partial(_apply_all, entries=in_order, heads=call.heads_at(point))
        for point, in_order in by_point.items()
    }


def _apply_all(activation: Tensor, *, entries: Sequence[Mapping[str, Any]], heads: int) -> Tensor:
    for entry in entries:
        activation = apply(activation, entry, heads)
    return activation


def apply(activation: Tensor, entry: Mapping[str, Any], heads: int) -> Tensor:
    """Edit an activation (batch, seq, features); at a point by head its features are ``heads`` side by side."""
    operation, point, at = OPERATIONS[entry["kind"]], point_at(entry["point"]), entry.get("at")
    whole = activation.unflatten(-1, (heads, -1)) if point.by_head else activation
    index = None if at is None else at.tensor.to(whole.device)
    _check_head_dim(entry, whole)
    chosen = [(dim, entry[key]) for key, dim in (("heads", 2), ("dims", whole.dim() - 1)) if key in entry]
    x = whole
    for dim, which in chosen:
        x = x.index_select(dim, torch.tensor(which, device=x.device))
    order = ("batch", "seq", *point.features)
    value = _over(entry["value"], order, index, x, operation.value_dtype(x))
    strength = _over(entry["strength"], order, index, x, widened(x))
    more = [_over(entry["basis"], (*order, "rank"), index, x, x.dtype)] if operation.in_basis else []
    changed = operation.change(x, value, strength, *more)
    if index is not None:
        changed = torch.where((index < 0).view(*index.shape, *[1] * (x.dim() - 2)), x, changed)
    out = _put_back(whole, changed, chosen)
    return out.flatten(-2) if point.by_head else out


def _check_head_dim(entry: Mapping[str, Any], x: Tensor) -> None:
    value = entry["value"]
    size = value.size("head_dim") if isinstance(value, Axed) and "dims" not in entry else None
    if size is not None and size != x.shape[-1]:
        raise ShapeError(f"{name_of(entry['kind'])}: value is {value}; the heads of these layers have {x.shape[-1]}")


def _put_back(whole: Tensor, part: Tensor, chosen: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """``whole`` with the chosen heads and dims as in ``part``."""
    if not chosen:
        return part
    (dim, which), *deeper = chosen
    index = torch.tensor(which, device=whole.device)
    inner = _put_back(whole.index_select(dim, index), part, deeper)
    return whole.index_copy(dim, index, inner)


def _over(value: Any, order: tuple[str, ...], index_BS: Tensor | None, x: Tensor, dtype: torch.dtype) -> Any:
    """A value as a tensor that broadcasts over ``x``; ``pos`` is laid out over the columns that are selected."""
    if not isinstance(value, Axed):
        return value
    leaf = Axed(value.tensor.to(x.device, dtype), value.axes)
    if "pos" not in leaf.axes:
        return spread(leaf, order)
    assert index_BS is not None
    features = [axis for axis in order if axis not in ("batch", "seq")]
    by_pos = spread(leaf, ("batch", "pos", *features))  # (batch or 1, pos, …)
    rows = max(len(by_pos), len(index_BS))
    pos_index = index_BS.clamp(min=0).expand(rows, -1).view(rows, -1, *[1] * len(features))
    return torch.gather(by_pos.expand(rows, *by_pos.shape[1:]), 1, pos_index.expand(-1, -1, *by_pos.shape[2:]))
