"""Adapters given as kwargs: ``lora`` and ``ia3`` at a layer's projections, ``head_mask`` at its heads.

    flow(**x, lora={"q_proj": {"A": A, "B": B, "scale": 2.0}}, ia3={"v_proj": v}, head_mask=mask)

At a projection ``y = module(x)``, then ``y * ia3``, then ``+ scale * B(A(x))`` (LoRA, Hu et al. 2021; IA3, Liu et al.
2022). They act on activations, not on merged weights: that is exact on quantized weights too, and each row may have
another adapter (zeros are none). Cast to the activation's dtype where they act, so gradients come back in the
caller's. Pure functions; no torch.nn, no network.
"""

# B batch, S seq, R rank, I in, O out, H head

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kwflow.axes import Axed, bind, check_sizes, describe, spread, without_layer
from kwflow.errors import KwargError, UnknownKwarg, did_you_mean

Projections = Mapping[str, tuple[int, int]]  # by dotted name in the layer: features in and out
Adapter = Mapping[str, Any]  # of one projection: "lora": {A, B, scale}, "ia3": Axed

LORA = ("A", "B", "scale")


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def check(
    name: str, given: Any, projections: Projections, sizes: Mapping[str, int], what: str, *, own_layer: bool
) -> dict[str, Any]:
    """``lora`` or ``ia3`` with full names of projections and axes on its tensors; also on a worker, of a peer's.

    ``own_layer``: it is one layer's part. Raises KwargError, UnknownKwarg, AxesError or ShapeError.
    """
    if not isinstance(given, Mapping):
        raise KwargError(f"{what} is a {type(given).__name__}; it takes {{projection: …}} with {_names(projections)}")
    bound: dict[str, Any] = {}
    for asked, value in given.items():
        if value is None:
            continue
        full = resolve(asked, projections, what)
        if full in bound:
            raise KwargError(f"{what} names the projection {full!r} twice")
        features = dict(zip(("in", "out"), projections[full], strict=True))
        parts = _lora if name == "lora" else _ia3
        bound[full] = parts(value, {**sizes, **features}, f"{what}[{asked!r}]", own_layer)
    return bound


def resolve(asked: Any, projections: Projections, what: str) -> str:
    """A projection's full name, from that name or from its end: ``"q_proj"`` is ``"self_attn.q_proj"``."""
    if asked in projections:
        return asked
    found = [name for name in projections if isinstance(asked, str) and name.endswith(f".{asked}")]
    if len(found) > 1:
        raise KwargError(f"{what}: {asked!r} may mean {' or '.join(map(repr, found))}; give the full name")
    if not found:
        near = did_you_mean(str(asked), [*projections, *(name.rpartition(".")[2] for name in projections)])
        having = f"these layers have {_names(projections)}"
        raise UnknownKwarg(f"{what}: no projection {asked!r:.60}; {having}.{near}")
    return found[0]


def _names(projections: Projections) -> str:
    return ", ".join(projections) or "no projections"


def _lora(value: Any, sizes: Mapping[str, int], what: str, own_layer: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise KwargError(f"{what} is a {type(value).__name__}; it takes {{'A': tensor, 'B': tensor, 'scale': number}}")
    for key in value:
        if key not in LORA:
            raise KwargError(f"{what} has {key!r:.40}; it takes {', '.join(LORA)}.{did_you_mean(str(key), LORA)}")
    free: dict[str, int] = {}  # A's rank is B's
    bound: dict[str, Any] = {}
    for key, inner in (("A", "rank in"), ("B", "out rank")):
        if value.get(key) is None:
            raise KwargError(f"{what} has no {key!r}, a tensor {f'layer [batch] {inner}'!r}; give both A and B")
        bound[key] = _leaf(value[key], (inner,), sizes, free, f"{what}[{key!r}]", own_layer)
    scale = value.get("scale", 1.0)
    if isinstance(scale, Tensor | Axed):
        bound["scale"] = _bound(scale, ("[batch]",), sizes, free, f"{what}['scale']")
    elif isinstance(scale, int | float) and not isinstance(scale, bool):
        bound["scale"] = float(scale)
    else:
        raise KwargError(f"{what}['scale'] is {scale!r:.40}; it takes a number or a tensor '[batch]'")
    return bound


def _ia3(value: Any, sizes: Mapping[str, int], what: str, own_layer: bool) -> Axed:
    return _leaf(value, ("out", "in"), sizes, {}, what, own_layer)


def _leaf(
    value: Any, inner: tuple[str, ...], sizes: Mapping[str, int], free: dict[str, int], what: str, own_layer: bool
) -> Axed:
    """A tensor ``"layer [batch] …"`` (``"[batch] …"`` for one layer), bare only as the first of ``inner``.

    Declared axes may leave ``layer`` out, too: the same for all layers.
    """
    if isinstance(value, Axed):
        forms = tuple(f"[layer] [batch] {one}" for one in inner)
    else:
        forms = (f"layer [batch] {inner[0]}",)
    return _bound(value, tuple(map(without_layer, forms)) if own_layer else forms, sizes, free, what)


def _bound(value: Any, forms: tuple[str, ...], sizes: Mapping[str, int], free: dict[str, int], what: str) -> Axed:
    if not isinstance(value, Tensor | Axed):
        raise KwargError(f"{what} is {value!r:.60}; it takes a tensor with axes {' | '.join(map(repr, forms))}")
    leaf = bind(value, forms, what=what)
    if not leaf.tensor.is_floating_point():
        raise KwargError(f"{what} is {describe(leaf.tensor)}; it takes float tensors")
    check_sizes(leaf, sizes, free, what=what)
    return leaf


# ---- how they act ------------------------------------------------------------------------------------------------


def by_projection(lora: Mapping[str, Any], ia3: Mapping[str, Any]) -> Mapping[str, Adapter]:
    """One layer's adapters, by projection."""
    found: dict[str, dict[str, Any]] = {}
    for kind, given in (("lora", lora), ("ia3", ia3)):
        for name, value in given.items():
            found.setdefault(name, {})[kind] = value
    return found


def adapt(module: Callable[[Tensor], Tensor], x: Tensor, adapter: Adapter, rows: tuple[int, int]) -> Tensor:
    """A projection with its adapter on x (batch, seq, in), or the same flattened; ``rows``: (batch, seq)."""
    x = before(x, adapter, rows)
    return after(module(x), x, adapter, rows)


def before(x: Tensor, adapter: Adapter, rows: tuple[int, int]) -> Tensor:
    """What goes into the projection: ia3 of axes ``in`` acts here."""
    ia3 = adapter.get("ia3")
    return _times(x, ia3, rows) if ia3 is not None and "in" in ia3.axes else x


def after(y: Tensor, x: Tensor, adapter: Adapter, rows: tuple[int, int]) -> Tensor:
    """What comes out of it: ia3 of axes ``out``, then the low-rank product of what went in."""
    ia3, lora = adapter.get("ia3"), adapter.get("lora")
    if ia3 is not None and "out" in ia3.axes:
        y = _times(y, ia3, rows)
    if lora is None:
        return y
    x_BSI = x.reshape(*rows, x.shape[-1])
    A_RI, B_OR = (lora[key].tensor.to(x.device, x.dtype) for key in ("A", "B"))  # with a batch in front or without
    added_BSO, scale = x_BSI @ A_RI.mT @ B_OR.mT, lora["scale"]
    if isinstance(scale, Axed):
        scale = spread(scale, ("batch", "seq", "features")).to(x.device, x.dtype)
    added_BSO = added_BSO if isinstance(scale, float) and scale == 1.0 else added_BSO * scale
    return y + added_BSO.to(y.dtype).reshape(y.shape)


def _times(activation: Tensor, ia3: Axed, rows: tuple[int, int]) -> Tensor:
    wide = activation.reshape(*rows, activation.shape[-1])  # opt flattens rows before its feed-forward
    factor = Axed(ia3.tensor.to(wide.device, wide.dtype), (*ia3.axes[:-1], "features"))
    return (wide * spread(factor, ("batch", "seq", "features"))).reshape(activation.shape)


def mask_heads(activation_BSF: Tensor, mask: Axed, heads: int) -> Tensor:
    """Multiply each head's output; ``mask`` has axes ``[batch] head``, features are the heads side by side."""
    factor = Axed(mask.tensor.to(activation_BSF.device, activation_BSF.dtype), mask.axes)
    by_head = activation_BSF.unflatten(-1, (heads, -1)) * spread(factor, ("batch", "seq", "head", "head_dim"))
    return by_head.flatten(-2)
