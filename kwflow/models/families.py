"""One row per model family, and SpanSpecs built from it: the only place that knows how a layer is called.

A row says where the layers are, what positions mean, and how to prepare what the layers need; the layer itself is
transformers' own. To add a family: add a row to FAMILIES, run ``pytest tests/test_families.py``.
"""

# B batch, S seq, K key (all columns), D hidden

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import Prepare
from kwflow.errors import UnsupportedError, did_you_mean


@dataclass(frozen=True)
class Family:
    """What differs between families."""

    prepare: Callable[[Any, nn.Module], Prepare]  # (config, base model) -> prepare
    layers: str = "layers"  # the layer list, within the base model
    positions: str = ""  # why position_ids are refused; empty: the blocks take them
    tuples: bool = False  # the model expects a tuple from each layer
    mend: Callable[[nn.Module], None] = lambda layer: None


class Past:
    """What transformers' mask functions ask of a cache: how many columns stand before these."""

    is_compileable = False

    def __init__(self, length: int):
        self._length = length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0


def causal_mask(config: Any, hidden: Tensor, attention_mask: Tensor | None, past: int) -> Tensor | None:
    """The layers' mask, by transformers' own function; a 4-D one is the caller's, in the form that attention takes.

    NOTE [literal positions] transformers reads position_ids that jump as packed sequences when it has no cache;
    here positions are literal, in a call as in a session, so the mask never depends on them.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        lowest = torch.finfo(hidden.dtype).min
        if attention_mask.is_floating_point():
            return attention_mask.to(hidden.dtype).clamp(min=lowest)
        if config._attn_implementation == "sdpa":
            return attention_mask
        return torch.zeros_like(attention_mask, dtype=hidden.dtype).masked_fill(~attention_mask, lowest)
    from transformers.masking_utils import create_causal_mask

    cache: Any = {cache_argument(create_causal_mask): Past(past)}
    return create_causal_mask(config=config, inputs_embeds=hidden, attention_mask=attention_mask, **cache)


def cache_argument(function: Callable[..., Any]) -> str:
    """What this version calls the cache: read from the signature, since 5.x renames it."""
    names = inspect.signature(function).parameters
    return next(name for name in ("cache", "layer_past", "past_key_values") if name in names)


def rotary(config: Any, base: nn.Module) -> Prepare:
    """Rotary families: a causal mask, and cos/sin of the positions."""
    kind: Any = type(base.rotary_emb)
    embed = kind(config=config)
    # NOTE [dynamic rope] transformers' dynamic type keeps the longest length it has seen: a function keeps nothing
    remembers = "dynamic" in str(getattr(embed, "rope_type", ""))

    def prepare(
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        kinds: Collection[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        if position_ids is None:
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
        args = {
            "attention_mask": causal_mask(config, hidden, attention_mask, past),
            "position_ids": position_ids,
            "position_embeddings": (kind(config=config) if remembers else embed)(hidden, position_ids=position_ids),
        }
        return dict.fromkeys(kinds, args)

    return prepare


def learned(config: Any, base: nn.Module) -> Prepare:
    """Learned positions: they act in the embedding, the layers need a mask only."""

    def prepare(
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        kinds: Collection[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        return dict.fromkeys(kinds, {"attention_mask": causal_mask(config, hidden, attention_mask, past)})

    return prepare


def alibi(config: Any, base: nn.Module) -> Prepare:
    """ALiBi (Press et al. 2022): a bias that follows the mask."""
    build: Any = base.build_alibi_tensor
    heads = config.num_attention_heads

    def prepare(
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        kinds: Collection[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        two_d = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if two_d is None:
            two_d = torch.ones(hidden.shape[0], past + hidden.shape[1], dtype=torch.long, device=hidden.device)
        args = {
            "attention_mask": causal_mask(config, hidden, attention_mask, past),
            "alibi": build(two_d.long(), heads, dtype=hidden.dtype),
        }
        return dict.fromkeys(kinds, args)

    return prepare


class TanhGelu(nn.Module):
    """Bloom's gelu, in the arithmetic of transformers' BloomGelu, whose autograd.Function torch.func cannot take."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def plain_gelu(layer: nn.Module) -> None:
    layer.mlp.gelu_impl = TanhGelu()  # type: ignore[union-attr]


FAMILIES: dict[str, Family] = {
    "llama": Family(rotary),
    "gpt2": Family(
        learned, layers="h", positions="this family's positions are learned and act in flow.embed(ids, position_ids=…)"
    ),
    "bloom": Family(
        alibi,
        layers="h",
        positions="this family uses ALiBi, which follows attention_mask",
        tuples=True,
        mend=plain_gelu,
    ),
}


def family_of(config: Any) -> Family:
    """The row of a model's family. Raises UnsupportedError that lists the families there are."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        hint = did_you_mean(config.model_type, FAMILIES)
        raise UnsupportedError(f"model_type {config.model_type!r} is not supported yet; supported: {known}.{hint}")
    return FAMILIES[config.model_type]


def model_sizes(config: Any) -> dict[str, int]:
    """The sizes that axes are checked against."""
    heads = config.num_attention_heads
    return {
        "hidden": config.hidden_size,
        "head": heads,
        "kv_head": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }
