"""PEFT's adapters as kwargs of a call: made anew, read from a folder or a live model, trained, by row, written.

    adapter = kf.adapters.new("lora", flow, targets=["q_proj", "v_proj"], rank=4)       # to be trained from nothing
    adapter = kf.adapters.read("my-lora")                  # or a live PeftModel; print(adapter) says what it holds
    out = flow(**x, **adapter)                             # also in sessions and in model.generate(**inputs, **adapter)
    out = flow(**x, **kf.adapters.rows([adapter, other, None, adapter]))      # each row its own, or none
    loss(flow(**x, **adapter.requires_grad_())).backward() # adapter.parameters() for an optimizer
    adapter.save("my-lora-further")                        # PeftModel.from_pretrained reads it
    tasks = kf.adapters.new("ia3", flow, targets="v_proj", tasks=3)           # rows; tasks.take([0, 2, None, 0])
    tasks.save("tasks"), kf.adapters.read_rows("tasks")    # a subfolder for each
    kf.adapters.write("mine", {"lora": lora}, flow=flow)   # what was trained as plain tensors

LoRA (alpha / r or rsLoRA, patterns of ranks and alphas, some layers only), AdaLoRA, VeRA, LoHa, LoKr, IA3, BEFT, prefix
tuning, cartridges, prompt tuning, P-tuning: ``kwflow.research.peft_types`` has a row for every type of PEFT's. What
cannot be carried is refused by name. Dropout is left out, as it is in PEFT's eval mode. Only PEFT's file formats are
used: peft need not be there. The base model is never changed, so nothing is merged or unloaded: a call without the
adapter is the base model's, and ``adapter.delta_weights()`` is what a merge would add.
"""

# L layers, K key and value, H heads, P virtual tokens, D head_dim

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kwflow.client.flow import Flow
from kwflow.errors import KwargError
from kwflow.research.adapter_kinds import BEFT as BEFT
from kwflow.research.adapter_kinds import IA3 as IA3
from kwflow.research.adapter_kinds import Adapter as Adapter
from kwflow.research.adapter_kinds import Prefix as Prefix
from kwflow.research.adapter_kinds import Prompt as Prompt
from kwflow.research.adapter_low_rank import AdaLoRA as AdaLoRA
from kwflow.research.adapter_low_rank import LoHa as LoHa
from kwflow.research.adapter_low_rank import LoKr as LoKr
from kwflow.research.adapter_low_rank import LoRA as LoRA
from kwflow.research.adapter_low_rank import VeRA as VeRA
from kwflow.research.adapter_low_rank import scaling
from kwflow.research.adapter_reading import KINDS
from kwflow.research.adapter_reading import read as read
from kwflow.research.adapter_rows import Rows as Rows
from kwflow.research.adapter_rows import read_rows as read_rows
from kwflow.research.adapter_rows import rows as rows
from kwflow.research.new_adapters import base_config
from kwflow.research.new_adapters import new as new
from kwflow.research.peft_files import PROMPTS, Saved


def write(
    folder: str | os.PathLike[str],
    kwargs: Mapping[str, Any],
    *,
    flow: Flow | None = None,
    base_model: str | None = None,
) -> None:
    """Write an Adapter, Rows of them (into subfolders), or the kwarg ``lora``, ``ia3`` or ``prefix_kv``, as PEFT does.

        kf.adapters.write("mine", {"lora": {"q_proj": {"A": A, "B": B, "scale": 2.0}}}, flow=flow)

    ``flow``: for kwargs, over all layers; it knows the layers' and projections' names. ``base_model``: the name of the
    model it is for. ``PeftModel.from_pretrained(local_model, folder)`` computes the same; read again, the tensors are
    the same to the bit. Raises KwargError for what PEFT has no place for: a kwarg with a row's own, several kwargs.
    """
    if isinstance(kwargs, Adapter | Rows):
        return kwargs.save(folder, base_model)
    if flow is None:
        raise KwargError(
            "kwargs do not say the names of the model's layers: kf.adapters.write(folder, kwargs, flow=flow)"
        )
    _from_kwargs(flow, kwargs).save(folder, base_model)


# ---- kwargs as an adapter ----------------------------------------------------------------------------------------


def _from_kwargs(flow: Flow, kwargs: Mapping[str, Any]) -> Adapter:
    """A kwarg as PEFT would hold it, copied."""
    makers = {"lora": _from_lora, "ia3": _from_ia3, "prefix_kv": _from_prefix}
    present = {name: value for name, value in kwargs.items() if value is not None}
    if len(present) != 1 or not present.keys() <= makers.keys():
        raise KwargError(
            f"kf.adapters.write got {', '.join(present) or 'nothing'}; a folder holds one of {', '.join(makers)}"
        )
    ends: Any = flow.ends
    if flow.span != (0, ends.layers):
        raise KwargError(f"give the flow over all {ends.layers} layers; this one has {flow.start}:{flow.stop}")
    bound = flow.plan(torch.empty(1, 1, ends.hidden_size, device="meta"), present).bound
    [name] = present
    by_layer = {layer: bound.for_layer(layer).get(name) or {} for layer in range(flow.stop)}
    config, tensors = makers[name](by_layer, ends)
    return KINDS[config["peft_type"]](Saved(f"the kwarg {name}", {**base_config(ends), **config}, tensors))


ConfigAndTensors = tuple[dict[str, Any], dict[str, Tensor]]  # an adapter's config and tensors


def _from_lora(by_layer: Mapping[int, Any], ends: Any) -> ConfigAndTensors:
    tensors, ranks, scales = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for module, parts in _modules(by_layer, ends):
        for side in "AB":
            tensors[f"{module}.lora_{side}.weight"] = _without_rows(parts[side], module)
        if not isinstance(parts["scale"], float):
            raise KwargError(f"lora of {module}: its scale is a tensor; PEFT has a number for each module")
        ranks[module], scales[module] = len(tensors[f"{module}.lora_A.weight"]), parts["scale"]
    config = {"peft_type": "LORA", "target_modules": list(ranks)}
    return {**config, **scaling(ranks, scales)}, tensors


def _from_ia3(by_layer: Mapping[int, Any], ends: Any) -> ConfigAndTensors:
    tensors, feedforward = dict[str, Tensor](), list[str]()
    for module, leaf in _modules(by_layer, ends):
        vector = _without_rows(leaf, module)
        if "in" in leaf.axes:
            feedforward.append(module)
        tensors[f"{module}.ia3_l"] = vector[None] if "in" in leaf.axes else vector[:, None]
    modules = [name.removesuffix(".ia3_l") for name in tensors]
    config = {"peft_type": "IA3", "target_modules": modules, "feedforward_modules": feedforward}
    return {**config}, tensors


def _from_prefix(by_layer: Mapping[int, Any], ends: Any) -> ConfigAndTensors:
    layers_KHPD = [torch.stack([prefix[side].tensor[0] for side in "kv"]) for prefix in by_layer.values()]
    all_LKHPD = torch.stack(layers_KHPD).detach()
    layers, _, heads, length, width = all_LKHPD.shape
    config = {"num_virtual_tokens": length, "num_layers": layers, "num_attention_heads": heads}
    config |= {"peft_type": "PREFIX_TUNING", "token_dim": heads * width, "num_transformer_submodules": 1}
    return config, {PROMPTS: all_LKHPD.permute(3, 0, 1, 2, 4).reshape(length, -1).clone()}


def _modules(by_layer: Mapping[int, Any], ends: Any) -> Iterator[tuple[str, Any]]:
    """PEFT's name of each module, and what the kwarg has for it."""
    for layer, projections in by_layer.items():
        for projection, value in projections.items():
            yield f"{ends.layers_name}.{layer}.{projection}", value


def _without_rows(leaf: Any, module: str) -> Tensor:
    """A tensor that holds for all rows, copied. Raises KwargError for one with a row axis."""
    if isinstance(leaf, Mapping) or {"batch", "adapter"} & set(leaf.axes):
        raise KwargError(f"{module}: what differs by row has no place in PEFT's folders; write each adapter by itself")
    return leaf.tensor.detach().clone()
