"""``head_mask``: a factor for each attention head, before the heads' output projection."""

# B batch, S seq, F features (the heads side by side)

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor

from kwflow.kwargs.axes import Axed, spread
from kwflow.kwargs.kwarg import Act, Features, LayerCall
from kwflow.kwargs.points import HEAD
from kwflow.kwargs.schema import Spec


def spec(features: Features) -> Spec | None:
    form = ("layer [batch] head", ("float", "int", "bool"))
    return Spec(forms=(form,), by_layer=True) if HEAD in features.points else None


def at_points(mask: Axed, call: LayerCall) -> Mapping[str, Act]:
    return {HEAD: functools.partial(mask_heads, mask=mask, heads=call.heads_at(HEAD))}


def mask_heads(activation_BSF: Tensor, mask: Axed, heads: int) -> Tensor:
    """Multiply each head's output; ``mask`` has axes ``[batch] head``."""
    factor = Axed(mask.tensor.to(activation_BSF.device, activation_BSF.dtype), mask.axes)
    by_head = activation_BSF.unflatten(-1, (heads, -1)) * spread(factor, ("batch", "seq", "head", "head_dim"))
    return by_head.flatten(-2)
