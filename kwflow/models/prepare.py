"""What a layer needs besides hidden, made by transformers' own forward.

The base model's forward makes masks, rotary cos/sin, ALiBi and position bias, and hands them to its layers. Here it
runs with recorders in the layers' place, one for each kind of layer (full attention, sliding attention, …): what they
are handed is what the layers get. Nothing of a family is written again, so nothing of it can be written wrongly.
"""

# B batch, S seq, K key (all columns), D hidden

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks.block import Prepare
from kwflow.errors import KwargError
from kwflow.kwargs.schema import Scaling
from kwflow.models.families import Family
from kwflow.models.layout import layer_list, replace_layers

CACHE_NAMES = ("cache", "layer_past", "past_key_values")  # in transformers 5.24, in some of its families, before it
_recorded: ContextVar[dict[str, dict[str, Any]]] = ContextVar("kwflow_recorded")


def make_prepare(config: Any, base: nn.Module, family: Family, kinds: Sequence[str]) -> Prepare:
    """Turn a base model into its layers' Prepare. ``kinds``: of every layer of the model, in order.

    The base model is used up: recorders take the place of its layers, and what has weights passes hidden on.
    """
    _hollow(config, base, family, kinds)
    cache_name, parameters = cache_argument(base.forward), inspect.signature(base.forward).parameters

    def prepare(
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        kinds: Collection[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        literal = None
        if attention_mask is not None and attention_mask.dim() == 4:
            if family.four_d:
                raise KwargError(f"a 4-D attention_mask is not taken: {family.four_d}")
            literal, attention_mask = literal_mask(config, hidden, attention_mask), None
        inputs = {cache_name: Past(past), "attention_mask": attention_mask, "use_cache": True}
        if position_ids is not None and "position_ids" in parameters:
            inputs["position_ids"] = position_ids
        blank = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
        token = _recorded.set({})
        try:
            base(inputs_embeds=blank, **inputs)
            recorded = _recorded.get()
        finally:
            _recorded.reset(token)
        layer_kwargs = {}
        for kind in kinds:
            kind_kwargs = {k: v for k, v in recorded[kind].items() if k not in CACHE_NAMES and k != "use_cache"}
            layer_kwargs[kind] = kind_kwargs if literal is None else {**kind_kwargs, "attention_mask": literal}
        return layer_kwargs

    return prepare


def _hollow(config: Any, base: nn.Module, family: Family, kinds: Sequence[str]) -> None:
    """Leave of a base model what makes its layers' arguments: a recorder for each kind, nothing with weights."""
    layers = layer_list(base, family)
    first = {kind: layers[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
    replace_layers(base, family, [Recorder(kind, layer, family.tuples) for kind, layer in first.items()])
    reduced = copy.deepcopy(config)
    reduced.num_hidden_layers = len(first)
    if getattr(reduced, "layer_types", None):
        reduced.layer_types = list(first)
    owners = _owners(base, family)
    kept_modules = [layer_list(base, family), *owners]
    for owner in owners:
        owner.config = reduced
        for name, child in list(owner.named_children()):
            if any(child is module for module in kept_modules):
                continue
            if any(True for _ in child.parameters()):
                setattr(owner, name, Passes())
            elif _rescales(child):
                setattr(owner, name, Fresh(child))


def _owners(base: nn.Module, family: Family) -> list[nn.Module]:
    """The base model and, where the layers are deeper in it, the module that holds them."""
    return [base, *(base.get_submodule(path) for path in [family.layers.rpartition(".")[0]] if path)]


class Recorder(nn.Module):
    """In the place of the layers of one kind: keeps what it is handed, and hands hidden on."""

    def __init__(self, kind: str, layer: nn.Module, tuples: bool):
        super().__init__()
        self.kind, self.tuples = kind, tuples
        self._names = list(inspect.signature(layer.forward).parameters)[1:]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self._names, args, strict=False))
        _recorded.get()[self.kind] = {**named, **kwargs}
        return (hidden, None) if self.tuples else hidden


class Passes(nn.Module):
    """In the place of an embedding or a norm, whose weights a worker lacks: adds nothing, changes nothing."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x if x.is_floating_point() and x.dim() == 3 else torch.zeros((), device=x.device)


class Fresh(nn.Module):
    """A rotary embedding that forgets.

    NOTE [dynamic rope] transformers' dynamic type keeps the longest length it has seen, and longrope writes its choice
    into a buffer, which torch.func forbids: a function keeps nothing.
    """

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(self.rotary)(*args, **kwargs)


class Past:
    """What transformers' mask functions ask of a cache: how many columns stand before these; none is ever dropped."""

    is_compileable = False

    def __init__(self, length: int):
        self._length = length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0


def literal_mask(config: Any, hidden: Tensor, mask: Tensor) -> Tensor:
    """A 4-D mask as the caller's, in the form that the layers' attention takes.

    NOTE [literal positions] transformers reads position_ids that jump as packed sequences when it has no cache;
    here positions are literal, in a call as in a session, so the mask never depends on them.
    """
    lowest = torch.finfo(hidden.dtype).min
    if mask.is_floating_point():
        return mask.to(hidden.dtype).clamp(min=lowest)
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, lowest)


def scaling(base: nn.Module, family: Family) -> Scaling:
    """How a base model's rotary scaling depends on a call's length: what transformers' dynamic_rope_update does."""
    total, children = Scaling(), [child for owner in _owners(base, family) for child in owner.children()]
    rotary: Any
    for rotary in filter(_rescales, children):
        rope_types, rope_parameters = rotary.rope_type, rotary.config.rope_parameters
        by_layer_type = rope_types if isinstance(rope_types, dict) else {None: rope_types}  # gemma3's is by layer type
        for layer_type, rope_type in by_layer_type.items():
            parameters = rope_parameters if layer_type is None else rope_parameters[layer_type]
            if "dynamic" in rope_type:
                total = total.joined(Scaling(beyond=int(rotary.max_seq_len_cached)))
            elif rope_type == "longrope":
                total = total.joined(Scaling((int(parameters["original_max_position_embeddings"]),)))
    return total


def _rescales(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose scale depends on a call's length."""
    return any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope"))


def cache_argument(function: Callable[..., Any]) -> str:
    """What this version calls the cache: read from the signature, since 5.x renames it."""
    names = inspect.signature(function).parameters
    return next(name for name in CACHE_NAMES if name in names)


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, those of its ``**kwargs`` too."""
    signature = inspect.signature(function)
    call = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            call.update(call.pop(name, {}))
    return call
