"""SpanSpecs: layers of a model read from its files, and no other tensor, as pure functions."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import hooks as points
from kwflow.blocks import projections
from kwflow.blocks.block import Block
from kwflow.blocks.patterns import attention_path
from kwflow.blocks.span import SpanSpec
from kwflow.errors import ModelError, SpanError
from kwflow.kwargs.builtin import schema
from kwflow.kwargs.points import PATTERN, edited_in
from kwflow.kwargs.schema import Schema
from kwflow.models.experts import derivable_experts
from kwflow.models.families import family_of, layer_kinds, layer_list, model_sizes, unsupported
from kwflow.models.files.checkpoint import CONFIG, Checkpoint, find_model, layer_hash, read_json
from kwflow.models.files.checkpoint import model_name as model_name
from kwflow.models.prepare import cache_argument, recorder, scaling
from kwflow.models.quantize import check_mode, kept_modules, quantize_layer
from kwflow.models.weights import Sources, fill_buffers
from kwflow.show.progress import progress


def read_config(model: str | os.PathLike[str]) -> tuple[Any, str]:
    """A model's config and its folder. Raises UnsupportedError for a model that no row of families describes."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = find_model(model)
    name = read_json(folder / CONFIG).get("model_type")
    if name is None:
        raise ModelError(f"{folder / CONFIG} has no model_type; a model is a folder in Hugging Face layout")
    if name not in CONFIG_MAPPING:
        raise unsupported(str(name), "this version of transformers does not know it")
    config = AutoConfig.from_pretrained(folder)
    family_of(config)
    return config, str(folder)


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


def resolve_device(device: torch.device | str | None) -> torch.device:
    """``None`` is the CPU; ``"auto"`` is CUDA or MPS where torch sees one. Raises ModelError for what is not there."""
    if device == "auto":
        there = ("cuda" if torch.cuda.is_available() else "", "mps" if torch.backends.mps.is_available() else "")
        device = next(filter(None, there), "cpu")
    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r}; give auto, cpu, cuda, cuda:1 or mps") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices here; give auto or cpu"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {device!r}: torch sees no MPS here; give auto or cpu")
    if found.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device {device!r}; give auto, cpu, cuda, cuda:1 or mps")
    return found


def skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The family's CausalLM without memory for its weights; what it makes itself has the dtype that it would have."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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


def load_span(
    model: str | os.PathLike[str],
    start: int | None = None,
    stop: int | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    device: torch.device | str | None = None,
) -> SpanSpec:
    """Read layers ``[start, stop)`` of a model, and no other tensor, as a SpanSpec.

    ``quantize``: ``"int8"`` or ``"nf4"``. ``device``: ``"cpu"`` (the default), ``"cuda"``, ``"cuda:1"``, ``"mps"`` or
    ``"auto"``. Raises ModelError, SpanError, UnsupportedError.
    """
    mode, where = check_mode(quantize), resolve_device(device)
    config, folder = read_config(model)
    family, layers = family_of(config), int(config.num_hidden_layers)
    start, stop = start or 0, layers if stop is None else stop
    if not (isinstance(start, int) and isinstance(stop, int)):
        raise SpanError(f"layers are given as start, stop; got {start!r}, {stop!r}")
    if not 0 <= start < stop <= layers:
        raise SpanError(f"layers {start}:{stop} of a model that has layers 0:{layers}")
    target = resolve_dtype(dtype, config)
    if mode and target is torch.float64:
        raise ModelError(f"quantize={mode!r} with dtype float64; bitsandbytes takes float32, bfloat16 or float16")
    whole, checkpoint = skeleton(config, target), Checkpoint(folder)
    base, kinds = getattr(whole, whole.base_model_prefix), layer_kinds(config)
    sources, modules = Sources(whole, checkpoint, target), list(layer_list(base, family))[start:stop]
    prefix = f"{whole.base_model_prefix}.{family.layers}"
    kept = kept_modules(whole) if mode else []
    fill_buffers(whole, base.get_submodule(family.layers.rpartition(".")[0]), skip=layer_list(base, family))
    attention, taken = attention_path(whole, modules[0]), _schema(whole, config, modules)
    prepare = recorder(whole.config, base, family, kinds)  # which uses base up
    at = {**family.points, **({PATTERN: attention} if attention else {})}
    blocks, hashes = [], []
    prefixes = tuple(f"{prefix}.{number}." for number in range(start, stop))
    checkpoint.fetch(sources.names(lambda name: name.startswith(prefixes)))
    for number, layer in progress(enumerate(modules, start), f"reading layers {start}:{stop}", stop - start):
        hashes.append(_read_layer(layer, f"{prefix}.{number}.", sources))
        family.mend(layer)
        derivable_experts(layer)
        layer.to(where)
        if mode:
            quantize_layer(layer, mode, name=f"{prefix}.{number}", kept=kept)
        projections.install(layer)
        points.install(layer, at)
        layer.requires_grad_(False).eval()
        params = dict(layer.named_parameters())
        own = (cache_argument(layer.forward), kinds[number])
        blocks.append(Block(number, layer, params, prepare, taken, *own, attention=attention))
    identity = {
        "checkpoint": checkpoint.checkpoint_id(),
        "attention": config_attention(whole),
        "layers": hashes,
        "bytes_read": checkpoint.bytes_read,
        "model_layers": layers,
        "quantization": mode,
    }
    return SpanSpec(start, stop, tuple(blocks), taken, identity, dtype=target, device=where)


def _schema(whole: Any, config: Any, modules: Sequence[nn.Module]) -> Schema:
    """What these layers of a skeleton take, and the model's sizes."""
    family = family_of(config)
    return schema(
        model_sizes(config),
        positions=not family.positions,
        refused={"position_ids": family.positions} if family.positions else {},
        points=edited_in(family.points),
        captured_only=(PATTERN,) if attention_path(whole, modules[0]) else (),
        projections=projections.common(map(projections.find, modules)),
        scaling=scaling(getattr(whole, whole.base_model_prefix), family),
    )


def _read_layer(layer: nn.Module, prefix: str, sources: Sources) -> str:
    """Fill a skeleton's layer with the tensors whose names begin with ``prefix``; the hash of what was read."""
    fill_buffers(sources.model, layer)
    tensors, raw = sources.read(lambda name: name.startswith(prefix))
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    lacking = sorted(layer.state_dict().keys() - own.keys())
    if lacking:
        raise ModelError(f"{sources.checkpoint.folder} has no tensor for {prefix}{lacking[0]}")
    layer.load_state_dict(own, assign=True)
    layer.requires_grad_(False).eval()
    return layer_hash(raw)[:16]


@dataclass(frozen=True)
class ModelSpec:
    """What clients and workers need of a model besides its weights; a SpanSpec has the weights of some layers.

    ``name``: what a swarm calls it, unless ``kwflow worker --name`` and ``kf.connect(name=)`` say another. ``family``:
    transformers' model_type. ``checkpoint``: id of the weights, equal for all who work together; of every tensor the
    name, dtype, shape and first 4 KiB. ``layers``: how many; ``kinds``: of each, such as "full_attention" or
    "sliding_attention"; ``layers_name``: of their list in the model, "model.layers". ``dtype``: the checkpoint's; a
    worker or a client may take another. ``schema``: what a worker of all layers announces: ``.kwargs`` by name,
    ``.sizes`` by axis, ``.projections`` by name, for adapters, with features in and out.
    """

    name: str
    family: str
    checkpoint: str
    layers: int
    hidden_size: int
    dtype: torch.dtype
    layers_name: str
    kinds: tuple[str, ...] = field(repr=False)
    schema: Schema = field(repr=False)


def model_spec(model: str | os.PathLike[str]) -> ModelSpec:
    """Read a model's config and the heads of its tensors. Raises ModelError, UnsupportedError."""
    config, folder = read_config(model)
    family, whole = family_of(config), skeleton(config)
    return ModelSpec(
        name=model_name(model),
        family=config.model_type,
        checkpoint=Checkpoint(folder).checkpoint_id(),
        layers=int(config.num_hidden_layers),
        hidden_size=config.hidden_size,
        dtype=resolve_dtype(None, config),
        layers_name=f"{whole.base_model_prefix}.{family.layers}",
        kinds=tuple(layer_kinds(config)),
        schema=_schema(whole, config, list(layer_list(getattr(whole, whole.base_model_prefix), family))),
    )


def config_attention(model: Any) -> str:
    """The attention implementation that transformers chose for this model."""
    return str(model.config._attn_implementation)


def load_blocks(
    model: str | os.PathLike[str],
    start: int | None = None,
    stop: int | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    device: torch.device | str | None = None,
) -> list[tuple[Block, Mapping[str, Tensor]]]:
    """Layers of a model as ``[(block_fn, params)]``, for a notebook with no swarm at all.

    for block_fn, params in kf.load_blocks("smollm2-135m", 0, 3):
        hidden = block_fn(params, hidden, attention_mask=mask)

    ``dtype``, ``quantize`` and ``device`` as a worker's; hidden and kwargs are given in that dtype on that device.
    """
    spec = load_span(model, start, stop, dtype=dtype, quantize=quantize, device=device)
    return [(block, block.params) for block in spec.blocks]
