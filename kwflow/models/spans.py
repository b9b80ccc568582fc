"""SpanSpecs: layers of a model read from its files, and no other tensor, as pure functions."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import Block, SpanSpec
from kwflow.edits import schema
from kwflow.errors import ModelError, SpanError, UnsupportedError
from kwflow.models.checkpoint import Checkpoint, find_model, layer_hash
from kwflow.models.checkpoint import model_name as model_name
from kwflow.models.families import cache_argument, family_of, model_sizes
from kwflow.models.progress import progress


def read_config(model: str | os.PathLike[str]) -> tuple[Any, str]:
    """A model's config and its folder."""
    from transformers import AutoConfig

    folder = find_model(model)
    return AutoConfig.from_pretrained(folder), str(folder)


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
    own = tuple(f"{prefix}.{number}." for number in range(start, stop))
    checkpoint.fetch(name for name in checkpoint.names() if name.startswith(own))
    for number in progress(range(start, stop), f"reading layers {start}:{stop}", stop - start):
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
