"""What PEFT saves and holds: adapter_config.json, adapter_model.safetensors and live models; and what is not carried.

Only the formats: peft is not imported, a live model is read by what it has (``peft_config``, its state dict). Never a
pickle. Names are PEFT's without ``base_model.model.`` and without the adapter's own name:
``model.layers.3.self_attn.q_proj.lora_A.weight``. The first number in a name is the layer, what follows it up to
``lora_A`` is the projection, in every family.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kwflow.errors import KwargError, ModelError, UnsupportedError, did_you_mean
from kwflow.research.peft_types import CARRIED, REFUSED

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
WHOLE = "base_model."  # what is the whole model's stands there, as VeRA's projections do
PROMPTS = "prompt_embeddings"  # the one tensor of prefix and prompt tuning
_ADAPTING = ("lora_", "ia3_", "vera_", "hada_", "lokr_", "beft_")  # what names of adapters' tensors begin with

# what a config may say of any adapter without a bearing on what it computes
_IGNORED = {
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type"),
    *("inference_mode", "target_modules", "exclude_modules"),
}
_DEFAULTS = {"bias": "none", "num_transformer_submodules": 1}  # what these say when they say nothing
_INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")  # that leave the base weights alone

_WHY = {
    "bias": "it changes biases of the base model, which are the workers'",
    "modules_to_save": "it holds whole modules of the base model, which workers and flow.head have from the checkpoint",
    "use_dora": "DoRA divides by the norm of the adapted weights",
    "layer_replication": "it runs layers of the base model several times",
    "target_parameters": "it adapts parameters that are no projection's weight",
    "trainable_token_indices": "it changes the embedding, which is in flow.embed",
    "lora_bias": "its B has a bias",
    "alora_invocation_tokens": "it acts from those tokens on only",
    "num_transformer_submodules": "it is an encoder-decoder's",
}
_NOT_KNOWN = "what that changes is not known here"


@dataclass(frozen=True)
class Saved:
    """One adapter as PEFT has it. ``scales``: of a live model's modules, which may differ from the config's."""

    where: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    scales: dict[str, float] = field(default_factory=dict)


class Place(NamedTuple):
    """A module's place: the name of its list of layers, the layer's number, the projection's name in the layer."""

    layers: str
    layer: int
    projection: str


def place(module: str, where: str) -> Place:
    """The place of a module by its dotted name. Raises UnsupportedError for one outside of the layers."""
    parts = module.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None or at + 1 == len(parts):
        raise UnsupportedError(
            f"{where} adapts {module!r}, which is not in a layer: embeddings and head are the client's, in flow.embed "
            f"and flow.head"
        )
    return Place(".".join(parts[:at]), int(parts[at]), ".".join(parts[at + 1 :]))


def check(saved: Saved) -> str:
    """The kind of an adapter. Raises UnsupportedError that names what is not carried, and why."""
    config, where = saved.config, saved.where
    kind = str(config.get("peft_type"))
    if kind not in CARRIED:
        why = f": {REFUSED[kind]}" if kind in REFUSED else ""
        hint = did_you_mean(kind, CARRIED) if not why else ""
        raise UnsupportedError(f"{where} is of peft_type {kind!r:.40}{why}; carried are {', '.join(CARRIED)}.{hint}")
    for name, value in config.items():
        if name not in _IGNORED | CARRIED[kind].keys and value and value != _DEFAULTS.get(name):
            raise UnsupportedError(f"{where} has {name}={value!r:.60}: {_WHY.get(name, _NOT_KNOWN)}")
    if config.get("init_lora_weights") not in _INITS:
        raise UnsupportedError(
            f"{where} has init_lora_weights={config['init_lora_weights']!r:.40}: PEFT changes the base "
            f"model's weights when it loads one; its save_pretrained makes a plain LoRA of it with "
            f"path_initial_model_for_weight_conversion="
        )
    return kind


# ---- folders -----------------------------------------------------------------------------------------------------


def read_folder(folder: str | os.PathLike[str]) -> Saved:
    """Read what ``save_pretrained`` wrote. Raises ModelError for what is missing or broken, or is a pickle."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder)
    if not (path / CONFIG).is_file():
        within = numbered(path)
        hint = "give a folder that PEFT's save_pretrained wrote"
        if within:
            hint = f"it holds {len(within)} adapters: kf.adapters.read_rows(folder)"
        raise ModelError(f"{os.fspath(folder)!r} has no {CONFIG}; {hint}")
    if not (path / WEIGHTS).is_file():
        pickled = f"; {PICKLE} is a pickle, which may run any code: save it anew, as safetensors"
        raise ModelError(f"{path} has no {WEIGHTS}{pickled if (path / PICKLE).exists() else ''}")
    try:
        config = json.loads((path / CONFIG).read_text())
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / CONFIG} is not a JSON object")
    # cloned: the file is mapped, and may be written again
    return Saved(str(path), config, {name.removeprefix(PREFIX): tensor.clone() for name, tensor in tensors.items()})


def numbered(folder: str | os.PathLike[str]) -> list[Path]:
    """The subfolders ``0``, ``1``, … that hold an adapter each."""
    path, number, found = Path(folder), 0, list[Path]()
    while (path / str(number) / CONFIG).is_file():
        found.append(path / str(number))
        number += 1
    return found


def write_folder(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write what ``PeftModel.from_pretrained`` reads."""
    from safetensors.torch import save_file

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # not sort_keys: of patterns that fit one module, the first one counts
    (path / CONFIG).write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    whole = (PROMPTS, WHOLE)
    named = {name if name.startswith(whole) else PREFIX + name: tensor for name, tensor in tensors.items()}
    prefixed = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    save_file(prefixed, path / WEIGHTS, metadata={"format": "pt"})


# ---- live models -------------------------------------------------------------------------------------------------


def read_model(model: Any, name: str | None) -> Saved:
    """Copy one adapter of a live model: a PeftModel, or a transformers model with ``load_adapter``."""
    configs: Mapping[str, Any] = model.peft_config
    name = _active(model, configs) if name is None else name
    if name not in configs:
        raise KwargError(f"{type(model).__name__} has no adapter {name!r:.40}; it has {', '.join(configs)}")
    config, where = _plain(configs[name].to_dict()), f"adapter {name!r} of {type(model).__name__}"
    if config.get("peft_type") in ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "CARTRIDGE"):
        if config["inference_mode"]:
            prompts = model.prompt_encoder[name].embedding.weight
        else:
            prompts = model.get_prompt_embedding_to_save(name)
        return Saved(where, config, {PROMPTS: prompts.detach().clone()})
    tensors, scales, held = dict[str, Tensor](), dict[str, float](), model.state_dict()
    for full, tensor in held.items():
        parts = full.split(".")
        at = next((i for i, part in enumerate(parts) if part.startswith(_ADAPTING)), len(parts))
        module = ".".join(parts[:at])
        if parts[at + 1 : at + 2] != [name] or (full.startswith(PREFIX) and f"{WHOLE}{'.'.join(parts[at:])}" in held):
            continue  # another's, or what all modules have as one
        tensors[".".join([*parts[: at + 1], *parts[at + 2 :]]).removeprefix(PREFIX)] = tensor.detach().clone()
        layer = model.get_submodule(module)
        if name in (scaling := getattr(layer, "scaling", {})):
            divisor = float(layer.ranknum[name]) + 1e-5 if hasattr(layer, "ranknum") else 1.0  # AdaLoRA's
            scales[module.removeprefix(PREFIX)] = float(scaling[name]) / divisor
    return Saved(where, config, tensors, scales)


def _active(model: Any, configs: Mapping[str, Any]) -> str:
    """The one adapter that acts."""
    if len(configs) == 1:
        return next(iter(configs))
    active = model.active_adapters  # a property of PEFT's, a method of transformers'
    names: list[str] = list(active() if callable(active) else active)  # type: ignore[arg-type]
    if len(names) != 1:
        names_text = ", ".join(map(repr, configs))
        raise KwargError(f"{len(names)} adapters of this model are active; name one of {names_text}: adapter=…")
    return names[0]


def _plain(value: Any) -> Any:
    """A config's value as JSON has it: enums are their text, sets are lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value.value) if hasattr(value, "value") else value
