"""The built-in kwargs done by plain hooks on a Hugging Face model's own modules: what a reference compares with.

Imports no transformers: the caller has the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks import adapters
from kwflow.blocks.parts import on_part
from kwflow.errors import KwargError
from kwflow.kwargs import points, prefix_kv
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import INSIDE, at_points
from kwflow.kwargs.kwarg import LayerCall
from kwflow.models.families import Family

Change = Callable[[Tensor], Tensor]


def edit_hooks(
    layers: nn.ModuleList,
    family: Family,
    sizes: Mapping[str, int],
    bound: Bound,
    token_position: Tensor | None,
    shape: torch.Size,
) -> list[Any]:
    """Hooks for the kwargs of ``bound``'s layers, in the order in which a block does them; handles to remove them.

    ``token_position``: (batch, seq); ``shape``: of hidden. A prefix_kv is not a hook's, but a cache's. Raises
    KwargError for kwargs that no hook can do.
    """
    handles, parts = [], family.parts(sizes)
    for number in range(bound.start, bound.stop):
        layer, layer_kwargs = layers[number], bound.for_layer(number)
        if unknown := layer_kwargs.keys() - INSIDE.keys() - {prefix_kv.NAME} | layer_kwargs.keys() & {"capture"}:
            raise KwargError(f"a Hugging Face model has no kwarg {min(unknown)!r} to compare with")
        by_projection = adapters.by_projection(layer_kwargs)
        handles += _adapter_outputs(layer, by_projection, shape)
        acts = at_points(layer_kwargs, LayerCall(number, (shape[0], shape[1]), sizes, token_position))
        for name in sorted(acts, key=_order):
            at = points.point_at(name)
            path = at.projection or family.points.get(name, "")  # the layer itself has the others
            hook = on_input if at.reached == "input" else on_output
            handles.append(hook(layer.get_submodule(path), on_part(parts.get(name), acts[name])))
        for name, adapter in by_projection.items():  # a head's edits come before what scales the projection's input
            scale = functools.partial(adapters.before, adapter=adapter, batch_seq=(shape[0], shape[1]))
            handles.append(on_input(layer.get_submodule(name), scale))
    return handles


def _order(name: str) -> int:
    """Hooks of one module act in the order in which they were put there: a projection's own stand next to it."""
    at = points.point_at(name)
    if at.projection:
        return -1 if at.reached == "output" else len(points.POINTS)
    return list(points.POINTS).index(name)


def _adapter_outputs(layer: nn.Module, by_projection: Mapping[str, adapters.Adapter], shape: torch.Size) -> list[Any]:
    def hook(adapter: adapters.Adapter) -> Any:
        return lambda _, args, out: adapters.after(out, args[0], adapter, (shape[0], shape[1]))

    return [layer.get_submodule(name).register_forward_hook(hook(adapter)) for name, adapter in by_projection.items()]


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
