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
from kwflow.kwargs.axes import Axed, describe
from kwflow.kwargs.kwarg import Features, Place, Projections
from kwflow.kwargs.schema import Spec
from kwflow.kwargs.signatures import bind_floats, bind_tensor, check_sizes, without_layer

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
    if any(getattr(t, "kept", False) for t in tensors):
        return None  # workers keep it as it is
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
