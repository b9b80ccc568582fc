"""The built-in kwargs done by plain hooks on a Hugging Face model's own modules: what a reference compares with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.errors import KwargError
from kwflow.kwargs import lora as adapt
from kwflow.kwargs import prefix_kv as prefix
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.edit import apply
from kwflow.kwargs.steer import add_prompts, add_steer
from kwflow.models.families import Family

Change = Callable[[Tensor], Tensor]


def on_input(module: nn.Module, change: Change) -> Any:
    """Change a module's first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (change(args[0]), *args[1:]), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def on_output(module: nn.Module, change: Change) -> Any:
    """Change what a module returns, or the first of it."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return module.register_forward_hook(hook)


def edit_hooks(
    layers: nn.ModuleList, family: Family, heads: int, bound: Bound, where: Tensor | None, shape: torch.Size
) -> list[Any]:
    """Hooks for the kwargs of ``bound``'s layers, in the order in which a block does them; handles to remove them.

    ``where``: token positions (batch, seq); ``shape``: of hidden. A prefix_kv is not a hook's, but a cache's. Raises
    KwargError for kwargs that no hook can do.
    """
    handles = []
    for number in range(bound.start, bound.stop):
        layer, own = layers[number], bound.for_layer(number)
        if unknown := set(own) - {"prompts", "steer", "edit", "lora", "ia3", "head_mask", prefix.NAME}:
            raise KwargError(f"a Hugging Face model has no kwarg {sorted(unknown)[0]!r} to compare with")
        if "prompts" in own:
            assert where is not None
            prompts, at = own["prompts"], where
            handles.append(on_input(layer, functools.partial(add_prompts, prompts=prompts, token_position_BS=at)))
        if "steer" in own:
            handles.append(on_output(layer, functools.partial(add_steer, steer=own["steer"])))
        adapted = adapt.by_projection(own.get("lora") or {}, own.get("ia3") or {})
        handles += _adapter_outputs(layer, adapted, shape)
        if "head_mask" in own:
            mask = functools.partial(adapt.mask_heads, mask=own["head_mask"], heads=heads)
            handles.append(on_input(layer.get_submodule(family.out), mask))
        edits = own.get("edit", ())
        for point in ("embed", "resid_pre", "attn", "mlp", "head", "resid"):
            for entry in (one for one in edits if one["point"] == point):
                module = layer.get_submodule(family.points[point]) if point in family.points else layer
                place = on_input if point in ("embed", "resid_pre", "head") else on_output
                handles.append(place(module, functools.partial(_edited, entry=entry, heads=heads, shape=shape)))
        for name, adapter in adapted.items():  # a head's edits come before what scales the projection's input
            scaled = functools.partial(adapt.before, adapter=adapter, rows=(shape[0], shape[1]))
            handles.append(on_input(layer.get_submodule(name), scaled))
    return handles


def _adapter_outputs(layer: nn.Module, adapted: Mapping[str, adapt.Adapter], shape: torch.Size) -> list[Any]:
    def hook(adapter: adapt.Adapter) -> Any:
        return lambda _, args, out: adapt.after(out, args[0], adapter, (shape[0], shape[1]))

    return [layer.get_submodule(name).register_forward_hook(hook(own)) for name, own in adapted.items()]


def _edited(activation: Tensor, *, entry: dict[str, Any], heads: int, shape: torch.Size) -> Tensor:
    rows = activation.reshape(*shape[:2], activation.shape[-1])  # opt flattens rows before its feed-forward
    return apply(rows, entry, heads).reshape(activation.shape)
