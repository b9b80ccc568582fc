"""One row per model family, and SpanSpecs built from it: the only place that knows how a layer is called.

A row says where the layers are, what positions mean, and how to prepare what the layers need; the layer itself is
transformers' own. To add a family: add a row to FAMILIES, run ``pytest tests/test_families.py``.
"""

# B batch, S seq, K key (all columns), D hidden

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import Block, Prepare, SpanSpec
from kwflow.edits import schema
from kwflow.errors import ModelError, SpanError, UnsupportedError, did_you_mean
from kwflow.models.checkpoint import Checkpoint, layer_hash, model_path


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
        hidden: Tensor, *, attention_mask: Tensor | None, position_ids: Tensor | None, past: int
    ) -> Mapping[str, Any]:
        if position_ids is None:
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
        return {
            "attention_mask": causal_mask(config, hidden, attention_mask, past),
            "position_ids": position_ids,
            "position_embeddings": (kind(config=config) if remembers else embed)(hidden, position_ids=position_ids),
        }

    return prepare


def learned(config: Any, base: nn.Module) -> Prepare:
    """Learned positions: they act in the embedding, the layers need a mask only."""

    def prepare(
        hidden: Tensor, *, attention_mask: Tensor | None, position_ids: Tensor | None, past: int
    ) -> Mapping[str, Any]:
        return {"attention_mask": causal_mask(config, hidden, attention_mask, past)}

    return prepare


def alibi(config: Any, base: nn.Module) -> Prepare:
    """ALiBi (Press et al. 2022): a bias that follows the mask."""
    build: Any = base.build_alibi_tensor
    heads = config.num_attention_heads

    def prepare(
        hidden: Tensor, *, attention_mask: Tensor | None, position_ids: Tensor | None, past: int
    ) -> Mapping[str, Any]:
        two_d = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if two_d is None:
            two_d = torch.ones(hidden.shape[0], past + hidden.shape[1], dtype=torch.long, device=hidden.device)
        return {
            "attention_mask": causal_mask(config, hidden, attention_mask, past),
            "alibi": build(two_d.long(), heads, dtype=hidden.dtype),
        }

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


def read_config(model: str | os.PathLike[str]) -> tuple[Any, str]:
    """A model's config and its folder."""
    from transformers import AutoConfig

    folder = model_path(model)
    return AutoConfig.from_pretrained(folder), str(folder)


def model_name(model: str | os.PathLike[str]) -> str:
    """What a swarm calls a model: the last part of its path or hub id, without the user's name."""
    return os.path.basename(os.path.normpath(os.fspath(model)))


def resolve_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    """``None`` and ``"auto"`` mean the checkpoint's own."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype in (None, "auto"):
        own = getattr(config, "dtype", None)
        return (
            own
            if isinstance(own, torch.dtype)
            else getattr(torch, str(own).removeprefix("torch."))
            if own
            else torch.float32
        )
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {dtype!r}; give auto, float32, bfloat16, float16 or float64")
    return getattr(torch, str(dtype))


def skeleton(config: Any) -> Any:
    """The family's CausalLM without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(config)
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' remarks about configs, which are the checkpoint's author's matter."""
    log = importlib.import_module("transformers.utils.logging")
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)


def tensor_prefix(checkpoint: Checkpoint, model: nn.Module) -> str:
    """Checkpoints name tensors with or without the base model's prefix (``transformer.h.0…`` or ``h.0…``)."""
    prefix = f"{model.base_model_prefix}."
    return prefix if any(name.startswith(prefix) for name in checkpoint.names()) else ""


def model_sizes(config: Any) -> dict[str, int]:
    """The sizes that axes are checked against."""
    heads = config.num_attention_heads
    return {
        "hidden": config.hidden_size,
        "head": heads,
        "kv_head": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def load_span(
    model: str | os.PathLike[str],
    start: int | None = None,
    stop: int | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> SpanSpec:
    """Read layers ``[start, stop)`` of a model, and no other tensor, as a SpanSpec."""
    config, folder = read_config(model)
    family, layers = family_of(config), int(config.num_hidden_layers)
    start, stop = start or 0, layers if stop is None else stop
    if not 0 <= start < stop <= layers:
        raise SpanError(f"layers {start}:{stop} of a model that has layers 0:{layers}")
    target = resolve_dtype(dtype, config)
    whole, checkpoint = skeleton(config), Checkpoint(folder)
    base = getattr(whole, whole.base_model_prefix)
    prefix = f"{tensor_prefix(checkpoint, whole)}{family.layers}"
    prepare = family.prepare(config, base)
    refused = {"position_ids": family.positions} if family.positions else {}
    taken = schema(model_sizes(config), positions=not family.positions, refused=refused)
    blocks, hashes = [], []
    for number in range(start, stop):
        layer = getattr(base, family.layers)[number]
        names = {f"{prefix}.{number}.{name}": name for name in layer.state_dict()}
        read = checkpoint.read(names, target)
        hashes.append(layer_hash(read)[:16])
        layer.load_state_dict({names[name]: tensor for name, tensor in read.items()}, assign=True)
        family.mend(layer)
        on_meta = [name for name, tensor in [*layer.named_parameters(), *layer.named_buffers()] if tensor.is_meta]
        if on_meta:
            raise UnsupportedError(
                f"layer {number} of {config.model_type} holds {on_meta[0]!r}, which no checkpoint has"
            )
        layer.requires_grad_(False).eval()
        params = dict(layer.named_parameters())
        blocks.append(Block(number, layer, params, prepare, taken, cache_argument(layer.forward)))
    identity = {
        "checkpoint": checkpoint.checkpoint_id(),
        "attention": config_attention(whole),
        "layers": hashes,
        "bytes_read": checkpoint.bytes_read,
        "model_layers": layers,
    }
    return SpanSpec(start, stop, tuple(blocks), taken, identity)


def config_attention(model: Any) -> str:
    """The attention implementation that transformers chose for this model."""
    return str(model.config._attn_implementation)


def load_blocks(
    model: str | os.PathLike[str],
    start: int | None = None,
    stop: int | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> list[tuple[Block, Mapping[str, Tensor]]]:
    """Layers of a model as ``[(block_fn, params)]``, for a notebook with no swarm at all.

    for block_fn, params in kf.load_blocks("smollm2-135m", 0, 3):
        hidden = block_fn(params, hidden, attention_mask=mask)
    """
    return [(block, block.params) for block in load_span(model, start, stop, dtype=dtype).blocks]
