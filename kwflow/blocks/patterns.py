"""Attention patterns: a layer that is asked for its pattern runs attention in plain operations, which give the weights.

transformers' eager attention of the layer's own family is called (softcaps and sinks are its business), through the
config that its attention module reads. That module is the layer's own, and is held by ``Block.lock`` meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def eager(attention: nn.Module) -> Iterator[None]:
    """Within, this module computes its attention eagerly; the config, which other layers share, is not touched."""
    shared: Any = attention.__dict__.get("config")
    if shared is None:  # it has one way to compute
        yield
        return
    config = copy.copy(shared)
    config._attn_implementation = "eager"
    attention.__dict__["config"] = config
    try:
        yield
    finally:
        attention.__dict__["config"] = shared


def eager_mask(mask: Tensor | None, hidden: Tensor, past: int) -> Tensor:
    """A mask as eager attention takes it, added to the scores; None and bools are what fused attention takes."""
    if mask is None:  # fused attention is told "causal", or nothing where there is one query
        query = torch.arange(past, past + hidden.shape[1], device=hidden.device)
        mask = (torch.arange(past + hidden.shape[1], device=hidden.device) <= query[:, None])[None, None]
    if mask.dtype is not torch.bool:
        return mask
    lowest = torch.finfo(hidden.dtype).min
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, lowest)


def attention_path(model: Any, layer: nn.Module) -> str:
    """The module of a layer whose second output is its weights, as transformers records them; empty: none is known."""
    base = getattr(model, model.base_model_prefix)
    recorded = (getattr(base, "_can_record_outputs", None) or {}).get("attentions")
    kind = getattr(recorded, "target_class", recorded)
    paths = [name for name, module in layer.named_modules() if isinstance(kind, type) and isinstance(module, kind)]
    return paths[0] if len(paths) == 1 else ""
