"""What a config says of a family's layers, and where they are in its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks.projections import common, find
from kwflow.kwargs.points import NEURON
from kwflow.models.families import Family, family_of

# ---- what a config says ------------------------------------------------------------------------------------------


def model_sizes(config: Any) -> dict[str, int]:
    """The sizes that axes are checked against; ``key_dim`` and ``value_dim`` where they are not ``head_dim``."""
    heads, family = config.num_attention_heads, family_of(config)
    sizes = {
        "hidden": config.hidden_size,
        "head": heads,
        "kv_head": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }
    return {**sizes, **(family.kv(config) if family.kv else {})}


def span_sizes(config: Any, family: Family, layers: Sequence[nn.Module]) -> dict[str, int]:
    """The model's sizes, and what differs between its layers: ``neuron`` where all have as many."""
    down = common(map(find, layers)).get(family.down)
    there = NEURON in family.points_in(layers)
    return {**model_sizes(config), **({NEURON: down[0]} if there and down is not None else {})}


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer; those of one kind get the same mask and positions."""
    layers = int(config.num_hidden_layers)
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    return kinds[:layers] if len(kinds) >= layers else ["full_attention"] * layers


# ---- where the layers are ----------------------------------------------------------------------------------------


def layer_list(base: nn.Module, family: Family) -> Any:
    """The base model's ModuleList of layers."""
    return base.get_submodule(family.layers)


def replace_layers(base: nn.Module, family: Family, modules: Sequence[nn.Module] | nn.ModuleList) -> None:
    """Put other modules in the layers' place."""
    owner, _, name = family.layers.rpartition(".")
    listed = modules if isinstance(modules, nn.ModuleList) else nn.ModuleList(modules)
    setattr(base.get_submodule(owner), name, listed)


def blank_inputs(model: Any, hidden: Tensor) -> Tensor:
    """inputs_embeds for a model whose layers get ``hidden`` from elsewhere: as wide as its embedding (opt's own)."""
    width = model.get_input_embeddings().weight.shape[1]
    return torch.zeros(*hidden.shape[:-1], width, dtype=hidden.dtype, device=hidden.device)
