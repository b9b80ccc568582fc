"""What a flow is compared with: a Hugging Face model run as it is, or the files streamed one layer at a time.

A reference is ``run(hidden, bound, dtype) -> hidden`` over the layers of ``bound``.
"""

from __future__ import annotations

import copy
import os
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kwflow.blocks.block import run
from kwflow.blocks.precision import precision, upcast
from kwflow.errors import KwargError, SpanError, UnsupportedError
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.positions import token_positions
from kwflow.models.families import family_of
from kwflow.models.files.checkpoint import model_name, model_path
from kwflow.models.hooks import edit_hooks, on_input, on_output
from kwflow.models.layout import blank_inputs, layer_list, model_sizes
from kwflow.models.prepare import cache_argument
from kwflow.models.quantize import as_pure, mode_of
from kwflow.models.spans import config_attention, load_span, quiet
from kwflow.show.progress import progress


class Reference(Protocol):
    """The local side of a comparison."""

    name: str
    dtype: torch.dtype
    attention: str  # transformers' name of the attention implementation
    quantization: str  # "int8", "nf4", …, or empty
    device: torch.device

    def run(self, hidden: Tensor, bound: Bound, dtype: torch.dtype) -> Tensor:
        """The layers ``[bound.start, bound.stop)`` on hidden, in ``dtype``."""
        ...

    def cast(self, dtype: torch.dtype) -> Reference:
        """The same with its weights in ``dtype``, as a worker of that dtype reads them."""
        ...


class Stream:
    """A model's files as a reference that never holds more than one layer."""

    def __init__(
        self, model: str | os.PathLike[str], dtype: torch.dtype | str | None = None, quantize: str | None = None
    ):
        self.model, self._dtype = model, dtype
        self.name = f"{model_name(model)}, streamed"
        first = load_span(model, 0, 1, dtype=dtype, quantize=quantize)
        self.dtype, self.attention, self.device = first.dtype, first.identity["attention"], first.device
        self.quantization: str = first.identity["quantization"]

    def cast(self, dtype: torch.dtype) -> Reference:
        return self if dtype == self.dtype else Stream(self.model, dtype, self.quantization)

    def run(self, hidden: Tensor, bound: Bound, dtype: torch.dtype) -> Tensor:
        with torch.no_grad(), precision(dtype):
            layers = range(bound.start, bound.stop)
            for layer in progress(layers, f"streaming layers {bound.start}:{bound.stop}", len(layers)):
                spec = load_span(self.model, layer, layer + 1, dtype=self._dtype, quantize=self.quantization)
                params = spec.params if dtype == spec.dtype else upcast(spec.params, dtype)
                layer_bound, _ = bound.part(None, (layer, layer + 1))
                hidden = run(spec.blocks, params, hidden, layer_bound)
        return hidden


class HuggingFace:
    """A local Hugging Face model, run by its own forward; steer, prompts and edits are plain hooks on its modules."""

    def __init__(self, model: nn.Module):
        self.model: Any = model
        self.name = type(model).__name__
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.family, self.attention = family_of(model.config), config_attention(model)
        self.quantization, self.device = mode_of(model), next(model.parameters()).device
        self.repacked = any(getattr(module, "support_avx512bf16_for_cpu", False) for module in model.modules())

    def cast(self, dtype: torch.dtype) -> Reference:
        return self if dtype == self.dtype or self.quantization else HuggingFace(_in_dtype(self.model, dtype))

    def run(self, hidden: Tensor, bound: Bound, dtype: torch.dtype) -> Tensor:
        if dtype != self.dtype and self.quantization not in ("", "nf4"):
            raise UnsupportedError(f"{self.name} is quantized ({self.quantization}); it runs in {self.dtype} only")
        model = self.model if dtype == self.dtype else _in_dtype(self.model, dtype)
        hidden, bound = hidden.to(self.device), bound.with_tensors([t.to(self.device) for t in bound.tensors])
        base = getattr(model, model.base_model_prefix)
        layers = layer_list(base, self.family)
        if bound.stop > len(layers):
            raise SpanError(f"{self.name} has {len(layers)} layers, the flow asks for {bound.start}:{bound.stop}")
        inputs = {name: leaf.tensor for name, leaf in bound.call().items()}
        if (mask := inputs.get("attention_mask")) is not None and mask.dim() == 2:
            inputs["attention_mask"] = mask.expand(hidden.shape[0], -1)
        token_position = token_positions(inputs.get("attention_mask"), 0, hidden.shape[1], hidden.device)
        if prefix_length := prefix_kv.length(bound):
            inputs["attention_mask"] = prefix_kv.before(inputs.get("attention_mask"), prefix_length)
            inputs[cache_argument(base.forward)] = _prefilled(bound, len(layers), hidden)
        if self.family.counts_mask:  # it would count a 4-D mask; learned positions are in hidden already
            inputs["position_ids"] = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        seen: list[Tensor] = []
        hooks = []

        try:
            hooks.append(on_input(layers[bound.start], lambda _: hidden))
            sizes = model_sizes(self.model.config)
            hooks += edit_hooks(layers, self.family, sizes, bound, token_position, hidden.shape)
            hooks.append(on_output(layers[bound.stop - 1], lambda out: seen.append(out) or out))
            with torch.no_grad(), precision(dtype):
                base(inputs_embeds=blank_inputs(model, hidden), use_cache=True, **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0]


def _prefilled(bound: Bound, layers: int, hidden: Tensor) -> Any:
    """transformers' own cache with a prefix in it; the layers that are not asked for get zeros."""
    from transformers import DynamicCache

    cache = DynamicCache()
    keys_values = {
        n: prefix_kv.keys_values(bound.for_layer(n)[prefix_kv.NAME], hidden) for n in range(bound.start, bound.stop)
    }
    blank = [torch.zeros_like(t) for t in keys_values[bound.start] or ()]
    for number in range(layers):
        k, v = keys_values.get(number) or blank
        cache.update(k, v, number)
    return cache


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """A copy with its parameters in another precision, as a worker casts them; buffers (rotary) stay."""
    copied = as_pure(copy.deepcopy(model))
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return copied


def load_local(model: str | os.PathLike[str]) -> Any:
    """A model whole, in this process, as transformers loads it; quietly."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # transformers asks for it when it is imported
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(model_path(model), dtype="auto").eval().requires_grad_(False)


def as_reference(reference: Any) -> Reference:
    """A reference as it is, a Hugging Face model wrapped."""
    if hasattr(reference, "run") and hasattr(reference, "dtype"):
        return reference
    if isinstance(reference, nn.Module) and hasattr(reference, "config"):
        return HuggingFace(reference)
    raise KwargError(
        f"the reference is a {type(reference).__name__}; give a Hugging Face model, or kf.stream(path), "
        f"which holds one layer at a time"
    )
