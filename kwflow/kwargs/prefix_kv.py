"""``prefix_kv``: keys and values that stand before a call's columns, in every layer (prefix tuning; Li & Liang 2021).

    flow(**flow.inputs(texts, prefix=8), prefix_kv={"k": k, "v": v})   # (layers, batch or 1, kv heads, 8, head size)

They are as a cache keeps them, behind rotary embeddings. Positions start at the prefix's length; masks, ``at=`` and
``position`` count the call's own columns only, and what stands before is always seen, as far as a layer's window
reaches. ``layer_past=`` is the same as Hugging Face gives it. Cast where they act, so gradients come back in the
caller's dtype. Pure functions; no torch.nn, no network.
"""

# B batch, H key/value head, P prefix, D head size

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import is_mapped, is_wrapped
from kwflow.errors import KwargError, ShapeError, did_you_mean
from kwflow.kwargs.axes import Axed, describe
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.kwarg import Features, Place
from kwflow.kwargs.schema import Spec
from kwflow.kwargs.signatures import bind_floats

NAME, HUGGING_FACE = "prefix_kv", "layer_past"
_TAKES = "{'k': tensor, 'v': tensor} with axes 'layer batch kv_head prefix head_dim'"


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def spec(_: Features) -> Spec:
    return Spec(prefix=_TAKES, by_layer=True)


def named(kwargs: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """A caller's kwargs with ``layer_past`` as ``prefix_kv``, stacked. Raises KwargError or ShapeError."""
    if HUGGING_FACE not in kwargs:
        return kwargs
    others = {name: value for name, value in kwargs.items() if name != HUGGING_FACE}
    if (past := kwargs[HUGGING_FACE]) is None:
        return others
    if others.get(NAME) is not None:
        raise KwargError(f"{NAME} and {HUGGING_FACE} are one kwarg in two forms; give one of them")
    return {**others, NAME: _stacked(past, layers)}


def _stacked(past: Any, layers: int) -> dict[str, Tensor]:
    """``layer_past``, a (k, v) for each layer or a cache that holds them, as ``{"k", "v"}``."""
    cached = getattr(past, "layers", None)
    pairs = [(layer.keys, layer.values) for layer in cached] if isinstance(cached, Sequence) else past
    form = f"it takes a list with one (k, v) for each of the {layers} layers, (batch, kv_head, prefix, head_dim)"
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise KwargError(f"{HUGGING_FACE} is a {type(past).__name__}; {form}")
    if len(pairs) != layers:
        raise ShapeError(f"{HUGGING_FACE} has {len(pairs)} entries; {form}")
    for number, pair in enumerate(pairs):
        good = isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)
        if not good or any(t.dim() != 4 for t in pair):
            shown = ", ".join(describe(t) if isinstance(t, Tensor) else str(t)[:40] for t in pair) if good else pair
            raise KwargError(f"{HUGGING_FACE}[{number}] is ({shown!s:.80}); {form}")
        for t, first in zip(pair, pairs[0], strict=True):
            if t.shape != first.shape or t.dtype != first.dtype:
                raise ShapeError(
                    f"{HUGGING_FACE}[{number}] has {describe(t)}, {HUGGING_FACE}[0] {describe(first)}; "
                    f"every layer has one of the same shape"
                )
    if cached is not None and (seen := past.get_seq_length()) != pairs[0][0].shape[2]:
        raise ShapeError(
            f"{HUGGING_FACE} is a {type(past).__name__} that saw {seen} columns and kept {pairs[0][0].shape[2]}: "
            f"fill a DynamicCache() without a config, which keeps all"
        )
    return {"k": torch.stack([k for k, _ in pairs]), "v": torch.stack([v for _, v in pairs])}


def is_pair(value: Mapping[Any, Any]) -> bool:
    """Whether a dict is the kwarg itself, and not one for each layer."""
    return any(isinstance(key, str) for key in value)


def bind(value: Any, place: Place) -> dict[str, Axed]:
    """``{"k", "v"}`` with axes; also on a worker, of a peer's. Raises KwargError, AxesError or ShapeError."""
    what = place.what
    if not isinstance(value, Mapping):
        raise KwargError(f"{what} is a {type(value).__name__}; it takes {_TAKES}")
    for key in value:
        if key not in ("k", "v"):
            raise KwargError(f"{what} has {key!r:.40}; it takes k and v.{did_you_mean(str(key), ('k', 'v'))}")
    free: dict[str, int] = {}  # k's prefix is v's
    return {
        key: _leaf(value.get(key), key, place.sizes, free, f"{what}[{key!r}]", place.single_layer) for key in ("k", "v")
    }


def _leaf(value: Any, key: str, sizes: Mapping[str, int], free: dict[str, int], what: str, single_layer: bool) -> Axed:
    """One of the two; axes that are declared may leave ``batch`` out, and ``layer``: the same for all."""
    width = "key_dim" if key == "k" else "value_dim"
    inner = f"kv_head prefix {width if width in sizes else 'head_dim'}"
    layer, batch = ("[layer] ", "[batch] ") if isinstance(value, Axed) else ("layer ", "batch ")
    form = batch + inner if single_layer else layer + batch + inner
    return bind_floats(value, [form], sizes, free, what=what)


def length(bound: Bound) -> int:
    """How many columns stand before a call's own, in all of its layers alike.

    Raises KwargError that names the layers without a prefix, ShapeError that names the lengths where they differ.
    """
    lengths: dict[int, int] = {}  # by layer
    for number, section in enumerate(bound.sections):
        if NAME in section.skeleton:
            layers = range(bound.start, bound.stop) if isinstance(section.layers, str) else section.layers
            columns: int = bound.section(number)[NAME]["k"].size("prefix")
            lengths |= dict.fromkeys(layers, columns)
    if not lengths:
        return 0
    if lacking := [layer for layer in range(bound.start, bound.stop) if layer not in lengths]:
        raise KwargError(
            f"{NAME} is given for layers {sorted(lengths)} and not for {lacking}: "
            f"every layer of a call has one of the same length, or none has"
        )
    first, *others = sorted(set(lengths.values()))
    if others:
        shown = [f"{size} in layers {sorted(n for n in lengths if lengths[n] == size)}" for size in (first, *others)]
        raise ShapeError(f"{NAME} has prefix = {', '.join(shown)}; it is of one length in every layer of a call")
    return first


def check_call(bound: Bound) -> None:
    """What holds between a call's prefix and its positions. Raises KwargError or ShapeError."""
    if prefix_length := length(bound):
        call = {name: leaf.tensor for name, leaf in bound.call().items()}
        check_positions(prefix_length, call.get("position_ids"), call.get("attention_mask"))


def check_positions(prefix_length: int, position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raise KwargError where a token's position is one of the prefix's; the mask has the same columns, or is 4-D."""
    if position_ids is None or not prefix_length:
        return
    tensors = [position_ids] if attention_mask is None else [position_ids, attention_mask]
    if any(is_wrapped(t) or t.is_meta for t in tensors):  # their values cannot be looked at
        return
    inside = position_ids < prefix_length
    if attention_mask is not None and attention_mask.dim() == 2:
        inside = inside & attention_mask.bool()
    if bool(inside.any()):
        lowest = int(torch.where(inside, position_ids, prefix_length).min())
        raise KwargError(
            f"position_ids has {lowest} at a token, and {NAME} holds the positions below {prefix_length}: a call's own "
            f"start at {prefix_length} (flow.inputs(texts, prefix={prefix_length}))"
        )


# ---- how it acts -------------------------------------------------------------------------------------------------


def before(mask: Tensor | None, prefix_length: int) -> Tensor | None:
    """An attention mask with the prefix's columns, which every token sees."""
    if mask is None or not prefix_length:
        return mask
    blank = mask.new_zeros if mask.is_floating_point() else mask.new_ones
    return torch.cat([blank(*mask.shape[:-1], prefix_length), mask], -1)


def keys_values(prefix: Mapping[str, Axed] | None, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """One layer's prefix as the keys and values (batch, kv_head, prefix, head_dim) of hidden's rows, in its dtype."""
    if prefix is None:
        return None
    k_BHPD, v_BHPD = (_rows(prefix[key], hidden) for key in ("k", "v"))
    if is_mapped(k_BHPD) or is_mapped(v_BHPD):
        return _mapped_like(k_BHPD, v_BHPD), _mapped_like(v_BHPD, k_BHPD)
    return k_BHPD, v_BHPD


def _mapped_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same values, mapped over by every vmap that maps over ``other``.

    NOTE [mapped alike] deepseek writes the one into a buffer made like the other, in place, which vmap lets it do only
    where it maps over both.
    """
    return torch.where(torch.zeros_like(other.sum(), dtype=torch.bool), tensor, tensor)


def _rows(leaf: Axed, hidden: Tensor) -> Tensor:
    tensor = leaf.tensor if "batch" in leaf.axes else leaf.tensor[None]
    return tensor.to(hidden.device, hidden.dtype).expand(hidden.shape[0], *tensor.shape[1:])
