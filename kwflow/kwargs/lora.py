"""Adapters given as kwargs: ``lora`` and ``ia3`` at a layer's projections.

    flow(**x, lora={"q_proj": {"A": A, "B": B, "scale": 2.0}}, ia3={"v_proj": v})

At a projection ``y = module(x)``, then ``y * ia3``, then ``+ scale * B(A(x))`` (LoRA, Hu et al. 2021; IA3, Liu et al.
2022). They act on activations, not on merged weights: that is exact on quantized weights too. Cast to the activation's
dtype where they act, so gradients come back in the caller's. Pure functions; no torch.nn, no network.

Each row may have another adapter: by a ``batch`` axis, or by ``"rows"`` (batch), the number of each row's adapter along
an ``adapter`` axis; -1 is none, and leaves the row as it is whatever the adapters hold (NaN and infinity too).
"""

# B batch, S seq, R rank, I in, O out

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import is_mapped
from kwflow.errors import AxesError, KwargError, did_you_mean
from kwflow.kwargs import points, tree
from kwflow.kwargs.axes import Axed, describe, spread
from kwflow.kwargs.kwarg import Features, Place, Projections
from kwflow.kwargs.schema import Spec
from kwflow.kwargs.signatures import bind_floats, bind_tensor, check_sizes, without_layer

Adapter = Mapping[str, Any]  # of a projection: "lora": {A, B, scale[, rows]}, "ia3": Axed or {scale, rows}

_LORA_TAKES = (
    "{projection: {'A': 'layer [batch] rank in', 'B': 'layer [batch] out rank', 'scale': number}}, or with 'layer "
    "adapter …' for [batch] and 'rows': 'batch', the number of each row's adapter"
)
_IA3_TAKES = (
    "{projection: 'layer [batch] out'}, or 'in' where declared so; or {projection: {'scale': 'layer adapter out', "
    "'rows': 'batch'}}"
)
_READ = "kf.adapters.read(folder)"
LORA_KEYS = ("A", "B", "scale", "rows")
IA3_KEYS = ("scale", "rows")


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def lora_spec(features: Features) -> Spec | None:
    return Spec(projections=_LORA_TAKES) if features.projections else None


def ia3_spec(features: Features) -> Spec | None:
    return Spec(projections=_IA3_TAKES) if features.projections else None


def bind_lora(value: Any, place: Place) -> dict[str, Any]:
    return _bind(value, place, _lora)


def bind_ia3(value: Any, place: Place) -> dict[str, Any]:
    return _bind(value, place, _ia3)


def _bind(value: Any, place: Place, bind_adapter: Callable[..., Any]) -> dict[str, Any]:
    """``lora`` or ``ia3`` with full names of projections and axes on its tensors; also on a worker, of a peer's.

    Raises KwargError, UnknownKwarg, AxesError or ShapeError.
    """
    what, projections = place.what, place.projections
    if not isinstance(value, Mapping):
        how = f"it takes {{projection: …}} with {_names(projections)}; of PEFT's folder, flow(**x, **{_READ})"
        raise KwargError(f"{what} is a {type(value).__name__}; {how}")
    if kwargs := {"lora", "ia3"} & value.keys() - projections.keys():
        raise KwargError(f"{what} is {{{kwargs.pop()!r}: …}}: that is kwargs already, so flow(**x, **adapter)")
    bound: dict[str, Any] = {}
    for name, adapter in value.items():
        if adapter is None:
            continue
        full_name = points.resolve(name, projections, what)
        if full_name in bound:
            raise KwargError(f"{what} names the projection {full_name!r} twice")
        features = dict(zip(("in", "out"), projections[full_name], strict=True))
        sizes = {**place.sizes, **features}
        bound[full_name] = bind_adapter(adapter, sizes, f"{what}[{name!r}]", place.single_layer)
    return bound


def stacked(by_layer: Mapping[int, Any], span: tuple[int, int]) -> Any:
    """Every layer's value as one with a ``layer`` axis; None where layers differ in more than their numbers.

    One tensor for thirty: what binds, checks and sends a kwarg at every step has as many fewer to look at.
    """
    layers = range(*span)
    if by_layer.keys() != set(layers) or any(_by_row(adapters) for adapters in by_layer.values()):
        return None
    try:
        flat = [tree.flatten(by_layer[layer]) for layer in layers]
    except KwargError:
        return None  # whoever binds it says what is wrong
    if len({repr(skeleton) for _, skeleton in flat}) > 1:
        return None
    whole = [_stack(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return None if any(leaf is None for leaf in whole) else tree.unflatten(whole, flat[0][1])


def _by_row(adapters: Any) -> bool:
    """Whether a layer's value has tensors that take no ``layer`` axis: rows, or a tensor for lora's scale."""
    parts = adapters.values() if isinstance(adapters, Mapping) else [None]
    return any(
        part is None or (isinstance(part, Mapping) and ("rows" in part or isinstance(part.get("scale"), Tensor | Axed)))
        for part in parts
    )


def _stack(leaves: Sequence[Tensor | Axed]) -> Tensor | Axed | None:
    axes = {leaf.axes if isinstance(leaf, Axed) else None for leaf in leaves}
    tensors = [leaf.tensor if isinstance(leaf, Axed) else leaf for leaf in leaves]
    if len(axes) > 1 or len({(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors}) > 1:
        return None
    whole, [names] = torch.stack(tensors), axes
    if names is None:
        return whole
    return None if "layer" in names else Axed(whole, ("layer", *names))


def _names(projections: Projections) -> str:
    return ", ".join(projections) or "no projections"


def _lora(value: Any, sizes: Mapping[str, int], what: str, single_layer: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise KwargError(f"{what} is a {type(value).__name__}; it takes {{'A': tensor, 'B': tensor, 'scale': number}}")
    _known(value, LORA_KEYS, what)
    rows = value.get("rows")
    row_axis = "[batch]" if rows is None else "adapter"
    free: dict[str, int] = {}  # A's rank is B's, and so is the number of adapters
    bound: dict[str, Any] = {}
    for key, inner in (("A", "rank in"), ("B", "out rank")):
        if value.get(key) is None:
            raise KwargError(f"{what} has no {key!r}, a tensor {f'layer {row_axis} {inner}'!r}; give both A and B")
        bound[key] = _leaf(value[key], row_axis, (inner,), sizes, free, f"{what}[{key!r}]", single_layer)
    scale = value.get("scale", 1.0)
    if isinstance(scale, Tensor | Axed):
        bound["scale"] = bind_floats(scale, (row_axis,), sizes, free, what=f"{what}['scale']")
    elif isinstance(scale, int | float) and not isinstance(scale, bool):
        bound["scale"] = float(scale)
    else:
        raise KwargError(f"{what}['scale'] is {scale!r:.40}; it takes a number or a tensor {row_axis!r}")
    return bound if rows is None else {**bound, "rows": _rows(rows, sizes, free["adapter"], what)}


def _ia3(value: Any, sizes: Mapping[str, int], what: str, single_layer: bool) -> Axed | dict[str, Axed]:
    if not isinstance(value, Mapping):
        return _leaf(value, "[batch]", ("out", "in"), sizes, {}, what, single_layer)
    _known(value, IA3_KEYS, what)
    if missing := [key for key in IA3_KEYS if value.get(key) is None]:
        raise KwargError(f"{what} has no {missing[0]!r}; it takes a tensor, or {{'scale': tensor, 'rows': tensor}}")
    free: dict[str, int] = {}
    scale = _leaf(value["scale"], "adapter", ("out", "in"), sizes, free, f"{what}['scale']", single_layer)
    return {"scale": scale, "rows": _rows(value["rows"], sizes, free["adapter"], what)}


def _known(value: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in value:
        if key not in known:
            raise KwargError(f"{what} has {key!r:.40}; it takes {', '.join(known)}.{did_you_mean(str(key), known)}")


def _rows(value: Any, sizes: Mapping[str, int], adapters: int, what: str) -> Axed:
    """Which adapter each row takes, -1 for none. Raises KwargError for a number that is no adapter's."""
    what = f"{what}['rows']"
    form = f"an int tensor 'batch' of numbers from 0 to {adapters - 1}, and -1 for none"
    if not isinstance(value, Tensor | Axed):
        raise KwargError(f"{what} is {value!r:.60}; it takes {form}")
    if not adapters:
        raise KwargError(f"{what}: there are no adapters to take: the axis 'adapter' has size 0")
    leaf = bind_tensor(value, ("batch",), what=what)
    if leaf.tensor.dtype not in (torch.int64, torch.int32):
        raise KwargError(f"{what} is {describe(leaf.tensor)}; it takes {form}")
    check_sizes(leaf, sizes, {}, what=what)
    if is_mapped(leaf.tensor):
        raise KwargError(f"{what} is mapped over by torch.func.vmap, which hides the numbers; map over A and B")
    if not leaf.tensor.is_meta:
        wrong = ((leaf.tensor < -1) | (leaf.tensor >= adapters)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise KwargError(f"{what}[{row}] is {int(leaf.tensor[row])}; it takes {form}")
    return leaf


def _leaf(
    value: Any,
    row_axis: str,
    inner: tuple[str, ...],
    sizes: Mapping[str, int],
    free: dict[str, int],
    what: str,
    single_layer: bool,
) -> Axed:
    """A tensor ``"layer ROW_AXIS …"`` (without ``layer`` for a single one), bare only as the first of ``inner``.

    ``row_axis``: ``[batch]``, or ``adapter`` where rows say which. Declared axes may leave ``layer`` out, too: the same
    for all layers.
    """
    if isinstance(value, Axed):
        forms = tuple(f"[layer] {row_axis} {axes}" for axes in inner)
        if ("adapter" in value.axes) != (row_axis == "adapter"):
            lacks = "'rows', which say which adapter each row takes" if row_axis == "[batch]" else "an 'adapter' axis"
            raise AxesError(f"{what} was declared {' '.join(value.axes)!r} without {lacks}; give both or neither")
    else:
        forms = (f"layer {row_axis} {inner[0]}",)
    return bind_floats(value, tuple(map(without_layer, forms)) if single_layer else forms, sizes, free, what=what)


# ---- how they act ------------------------------------------------------------------------------------------------


def by_projection(kwargs: Mapping[str, Any]) -> Mapping[str, Adapter]:
    """The adapters among one layer's kwargs, by projection."""
    adapters: dict[str, dict[str, Any]] = {}
    for kwarg in ("lora", "ia3"):
        for name, value in (kwargs.get(kwarg) or {}).items():
            adapters.setdefault(name, {})[kwarg] = value
    return adapters


def adapt(module: Callable[[Tensor], Tensor], x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """A projection with its adapter on x (batch, seq, in), or the same flattened."""
    x = before(x, adapter, batch_seq)
    return after(module(x), x, adapter, batch_seq)


def before(x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """What goes into the projection: ia3 of axes ``in`` acts here."""
    factor = _factor(adapter)
    return _times(x, factor, batch_seq) if factor is not None and "in" in factor.axes else x


def after(y: Tensor, x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """What comes out of it: ia3 of axes ``out``, then the low-rank product of what went in."""
    factor, lora = _factor(adapter), adapter.get("lora")
    if factor is not None and "out" in factor.axes:
        y = _times(y, factor, batch_seq)
    if lora is None:
        return y
    rows, scale = lora.get("rows"), lora["scale"]
    x_BSI = x.reshape(*batch_seq, x.shape[-1])
    # or with a batch in front
    A_RI, B_OR = (_of_rows(lora[key], rows, 0).tensor.to(x.device, x.dtype) for key in "AB")
    added_BSO = x_BSI @ A_RI.mT @ B_OR.mT
    if isinstance(scale, Axed):  # in float32 where x has less, as a number of Python acts
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = spread(_of_rows(scale, rows, 0), ("batch", "seq", "features")).to(x.device, wide)
    added_BSO = added_BSO if isinstance(scale, float) and scale == 1.0 else (added_BSO * scale).to(x.dtype)
    sum_BSO = y.reshape(*batch_seq, y.shape[-1]) + added_BSO.to(y.dtype)
    if rows is not None:  # adding zeros is not quite nothing: it takes the sign of -0.0
        sum_BSO = torch.where(_has_adapter(rows, 3).to(y.device), sum_BSO, y.reshape(sum_BSO.shape))
    return sum_BSO.reshape(y.shape)


def _factor(adapter: Adapter) -> Axed | None:
    """ia3 as a tensor with a factor for each row, or for all rows."""
    ia3 = adapter.get("ia3")
    return _of_rows(ia3["scale"], ia3["rows"], 1) if isinstance(ia3, Mapping) else ia3


def _of_rows(leaf: Axed, rows: Axed | None, default: float) -> Axed:
    """Each row's part of what has an ``adapter`` axis; ``default`` for a row without one, also in derivatives."""
    if rows is None:
        return leaf
    assert leaf.axes[0] == "adapter"
    picked = leaf.tensor.index_select(0, rows.tensor.clamp(min=0).to(leaf.tensor.device))
    picked = torch.where(_has_adapter(rows, picked.dim()).to(picked.device), picked, default)
    return Axed(picked, ("batch", *leaf.axes[1:]))


def _has_adapter(rows: Axed, dims: int) -> Tensor:
    return (rows.tensor >= 0).reshape(-1, *[1] * (dims - 1))


def _times(activation: Tensor, ia3: Axed, batch_seq: tuple[int, int]) -> Tensor:
    x = activation.reshape(*batch_seq, activation.shape[-1])  # opt flattens rows before its feed-forward
    factor = Axed(ia3.tensor.to(x.device, x.dtype), (*ia3.axes[:-1], "features"))
    return (x * spread(factor, ("batch", "seq", "features"))).reshape(activation.shape)
