"""SpanSpecs: layers of a model read from its files, and no other tensor, as pure functions.

Imports transformers only inside the functions that need it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import hooks, projections
from kwflow.blocks.block import Block
from kwflow.blocks.patterns import attention_path
from kwflow.blocks.span import SpanSpec
from kwflow.errors import ModelError, SpanError
from kwflow.kwargs.builtin import schema
from kwflow.kwargs.points import PATTERN, captured_in, edited_in
from kwflow.kwargs.schema import Schema
from kwflow.models.experts import derivable_experts
from kwflow.models.families import family_of, unsupported
from kwflow.models.files.checkpoint import CONFIG, Checkpoint, find_model, layer_hash, model_name, read_json
from kwflow.models.layout import layer_kinds, layer_list, model_sizes, span_sizes
from kwflow.models.prepare import cache_argument, make_prepare, scaling
from kwflow.models.quantize import check_mode, kept_modules, quantize_layer
from kwflow.models.weights import Sources, fill_buffers
from kwflow.show.progress import progress


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
    mode, target_device = check_mode(quantize), resolve_device(device)
    config, folder = read_config(model)
    family, layers = family_of(config), int(config.num_hidden_layers)
    start, stop = _check_span(start or 0, layers if stop is None else stop, layers)
    target = resolve_dtype(dtype, config)
    if mode and target is torch.float64:
        raise ModelError(f"quantize={mode!r} with dtype float64; bitsandbytes takes float32, bfloat16 or float16")
    skeleton_model, checkpoint = skeleton(config, target), Checkpoint(folder)
    base, kinds = getattr(skeleton_model, skeleton_model.base_model_prefix), layer_kinds(config)
    sources, modules = Sources(skeleton_model, checkpoint, target), list(layer_list(base, family))[start:stop]
    prefix = f"{skeleton_model.base_model_prefix}.{family.layers}"
    kept = kept_modules(skeleton_model) if mode else []
    fill_buffers(skeleton_model, base.get_submodule(family.layers.rpartition(".")[0]), skip=layer_list(base, family))
    attention, span_schema = attention_path(skeleton_model, modules[0]), _schema(skeleton_model, config, modules)
    prepare = make_prepare(skeleton_model.config, base, family, kinds)  # which uses base up
    points = {**family.points_in(modules), **({PATTERN: attention} if attention else {})}
    blocks, hashes = [], []
    prefixes = tuple(f"{prefix}.{number}." for number in range(start, stop))
    checkpoint.fetch(sources.names(lambda name: name.startswith(prefixes)))
    for number, layer in progress(enumerate(modules, start), f"reading layers {start}:{stop}", stop - start):
        hashes.append(_read_layer(layer, f"{prefix}.{number}.", sources))
        family.patch(layer)
        derivable_experts(layer)
        layer.to(target_device)
        if mode:
            quantize_layer(layer, mode, name=f"{prefix}.{number}", kept=kept)
        projections.install(layer)
        hooks.install(layer, points, family.parts(model_sizes(config)))
        layer.requires_grad_(False).eval()
        params = dict(layer.named_parameters())
        cache_name = cache_argument(layer.forward)
        block = Block(number, layer, params, prepare, span_schema, cache_name, kinds[number], attention=attention)
        blocks.append(block)
    identity = {
        "checkpoint": checkpoint.checkpoint_id(),
        "attention": config_attention(skeleton_model),
        "layers": hashes,
        "bytes_read": checkpoint.bytes_read,
        "model_layers": layers,
        "quantization": mode,
    }
    return SpanSpec(start, stop, tuple(blocks), span_schema, identity, dtype=target, device=target_device)


def _check_span(start: Any, stop: Any, layers: int) -> tuple[int, int]:
    if not (isinstance(start, int) and isinstance(stop, int)):
        raise SpanError(f"layers are given as start, stop; got {start!r}, {stop!r}")
    if not 0 <= start < stop <= layers:
        raise SpanError(f"layers {start}:{stop} of a model that has layers 0:{layers}")
    return start, stop


def _schema(skeleton_model: Any, config: Any, modules: Sequence[nn.Module]) -> Schema:
    """What these layers of a skeleton take, and the model's sizes."""
    family, attention = family_of(config), attention_path(skeleton_model, modules[0])
    points = {**family.points_in(modules), **({PATTERN: attention} if attention else {})}
    return schema(
        span_sizes(config, family, modules),
        positions=not family.positions,
        refused={"position_ids": family.positions} if family.positions else {},
        points=edited_in(points),
        captured_only=captured_in(points),
        projections=projections.common(map(projections.find, modules)),
        scaling=scaling(getattr(skeleton_model, skeleton_model.base_model_prefix), family),
    )


def _read_layer(layer: nn.Module, prefix: str, sources: Sources) -> str:
    """Fill a skeleton's layer with the tensors whose names begin with ``prefix``; the hash of what was read."""
    fill_buffers(sources.model, layer)
    tensors, raw = sources.read(lambda name: name.startswith(prefix))
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    missing = sorted(layer.state_dict().keys() - state.keys())
    if missing:
        raise ModelError(f"{sources.checkpoint.folder} has no tensor for {prefix}{missing[0]}")
    layer.load_state_dict(state, assign=True)
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
    family, skeleton_model = family_of(config), skeleton(config)
    return ModelSpec(
        name=model_name(model),
        family=config.model_type,
        checkpoint=Checkpoint(folder).checkpoint_id(),
        layers=int(config.num_hidden_layers),
        hidden_size=config.hidden_size,
        dtype=resolve_dtype(None, config),
        layers_name=f"{skeleton_model.base_model_prefix}.{family.layers}",
        kinds=tuple(layer_kinds(config)),
        schema=_schema(
            skeleton_model, config, list(layer_list(getattr(skeleton_model, skeleton_model.base_model_prefix), family))
        ),
    )


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


def config_attention(model: Any) -> str:
    """The attention implementation that transformers chose for this model."""
    return str(model.config._attn_implementation)


def resolve_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    """``None`` and ``"auto"`` mean the checkpoint's own."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype in (None, "auto"):
        dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        return getattr(torch, dtype)
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {dtype!r}; give auto, float32, bfloat16, float16 or float64")
    return getattr(torch, str(dtype))


def resolve_device(device: torch.device | str | None) -> torch.device:
    """``None`` is the CPU; ``"auto"`` is CUDA or MPS where torch sees one. Raises ModelError for what is not there."""
    if device == "auto":
        available = ("cuda" if torch.cuda.is_available() else "", "mps" if torch.backends.mps.is_available() else "")
        device = next(filter(None, available), "cpu")
    try:
        resolved = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r}; give auto, cpu, cuda, cuda:1 or mps") from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices here; give auto or cpu"
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {device!r}: torch sees no MPS here; give auto or cpu")
    if resolved.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device {device!r}; give auto, cpu, cuda, cuda:1 or mps")
    return resolved
