"""Published sparse autoencoders: read from a folder in SAELens' layout, for activations and edits of a flow.

    features = kf.features.read("gpt2-small/blocks.8.hook_resid_pre")      # cfg.json and sae_weights.safetensors
    out, acts = flow.capture({features.point: [features.layer]}, **x)
    f = features.encode(acts[features.point, features.layer])              # (batch, pos, features)
    flow(**x, edit=[kf.add(features.direction(7), features.layer, point=features.point, scale=20.0)])

Architectures: standard (Bricken et al. 2023), gated (Rajamanoharan et al. 2024, arXiv:2404.16014), jumprelu
(Rajamanoharan et al. 2024, arXiv:2407.14435), topk (Gao et al. 2024). In a file W_enc is (d_in, d_sae), W_dec
(d_sae, d_in); beside them b_enc, b_dec, and by the architecture b_gate, r_mag and b_mag, or threshold. What is not
known here is refused by name.
"""

# D d_in, F d_sae: features

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ModelError, UnsupportedError, did_you_mean
from kwflow.kwargs.axes import describe
from kwflow.kwargs.points import HEAD, NEURON
from kwflow.kwargs.tree import as_int
from kwflow.research.autoencoders import ARCHITECTURES, NORMS, SCALING, Features

__all__ = ["Features", "read"]

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
HOOKS = {  # TransformerLens' names behind "blocks.8."
    "hook_resid_pre": "resid_pre",
    "hook_resid_post": "resid",
    "hook_attn_out": "attn",
    "hook_mlp_out": "mlp",
    "attn.hook_z": HEAD,
    "mlp.hook_post": NEURON,
}
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_CHANGED = ("fold_value_biases", "refactor_factored_attn_matrices")  # by which a model's heads are others
_NESTED = ("activation_fn_kwargs", "model_from_pretrained_kwargs")
_RENAMED = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def read(folder: str | os.PathLike[str], *, center: bool | None = None) -> Features:
    """Read a sparse autoencoder in SAELens' layout: a folder with cfg.json and sae_weights.safetensors.

    ``center``: subtract an activation's mean over its features first. Where cfg.json says that the model's weights were
    centered (``center_writing_weights``) it must be said: True where the model's norms are LayerNorms (gpt2), whose
    stream that centers; False where they are not. Raises UnsupportedError for what is not known here, naming it, and
    ModelError for files that are broken or do not fit each other.
    """
    path = Path(folder)
    said, weights = _config(path / CONFIG), _tensors(path / WEIGHTS)
    point, layer = _place(said)
    architecture, k = _architecture(said)
    centered = [n for n in ("center_writing_weights", *_CHANGED) if (said["model_from_pretrained_kwargs"] or {}).get(n)]
    if changed := [name for name in centered if name in _CHANGED and point == HEAD]:
        raise UnsupportedError(f"{path} is of a model changed by {changed[0]}, whose heads are not this model's")
    if "center_writing_weights" in centered and center is None and point not in (HEAD, NEURON):
        raise KwargError(
            f"{path} is of a model whose weights were centered (center_writing_weights): say center=True where its "
            f"norms are LayerNorms, as gpt2's, and center=False where they are RMSNorms, which leave it as it was"
        )
    if type(by_norm := said["rescale_acts_by_decoder_norm"]) is not bool or (by_norm and architecture != "topk"):
        raise UnsupportedError(f"{path}: rescale_acts_by_decoder_norm={by_norm!r:.20} of {architecture}")
    if type(subtract := said["apply_b_dec_to_input"]) is not bool:
        raise ModelError(f"{path / CONFIG}: apply_b_dec_to_input is {subtract!r:.40}")
    return Features(
        point,
        layer,
        _checked(weights, said, architecture, k, path),
        architecture=architecture,
        normalize=_normalization(said),
        k=k,
        by_decoder_norm=by_norm,
        subtract_b_dec=subtract,
        center=bool(center),
        model=str(said["model_name"] or ""),
    )


def _config(file: Path) -> dict[str, Any]:
    """What a cfg.json says, under the newer names; what it leaves out is as SAELens has it then."""
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("metadata", {}), dict):
        raise ModelError(f"{file} is no config of a sparse autoencoder")
    said: dict[str, Any] = {**given.get("metadata", {}), **given}
    said |= {new: said[old] for old, new in _RENAMED.items() if old in said}
    optional = ("hook_name", "hook_layer", "hook_head_index", "model_name", "k", "d_in", "d_sae", "dtype")
    defaults: dict[str, Any] = dict.fromkeys((*optional, *_NESTED))
    defaults |= {"architecture": "standard", "activation_fn": "relu", "apply_b_dec_to_input": True}
    defaults |= {"normalize_activations": "none", SCALING: False, "rescale_acts_by_decoder_norm": False}
    for name in _NESTED:
        if not isinstance(said.get(name, {}), dict | None):
            raise ModelError(f"{file}: {name} is {said[name]!r:.60}")
    return {**defaults, **said}


def _place(said: Mapping[str, Any]) -> tuple[str, int]:
    """The point and layer of a hook's name."""
    name, head = said["hook_name"], said["hook_head_index"]
    matched = re.fullmatch(r"blocks\.(\d{1,5})\.(.+)", name) if isinstance(name, str) else None
    if matched is None or matched[2] not in HOOKS:
        raise UnsupportedError(
            f"hook_name is {name!r:.60}; those of known points are blocks.N. and one of {', '.join(HOOKS)}."
            f"{did_you_mean(matched[2], HOOKS) if matched else ''}"
        )
    if head is not None:
        raise UnsupportedError(f"hook_head_index is {head!r:.20}: features of one head are not read here")
    layer = int(matched[1])
    if said["hook_layer"] not in (None, layer):
        raise ModelError(f"hook_layer is {said['hook_layer']!r:.20}, and hook_name {name!r:.60}")
    return HOOKS[matched[2]], layer


def _architecture(said: Mapping[str, Any]) -> tuple[str, int]:
    """The architecture, and topk's k."""
    name, activation = said["architecture"], said["activation_fn"]
    if name == "standard" and activation == "topk":  # as older files say it
        name = "topk"
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"architecture {name!r:.40}; known are {', '.join(ARCHITECTURES)}")
    if activation not in ("relu", None) and (name, activation) != ("topk", "topk"):
        raise UnsupportedError(f"activation_fn {activation!r:.40} of architecture {name}; known is relu")
    if name != "topk":
        return name, 0
    k = as_int(said["k"] if said["k"] is not None else (said["activation_fn_kwargs"] or {}).get("k"))
    if k is None or k < 1:
        raise ModelError(f"{CONFIG} of topk has k={k!r}")
    return name, k


def _normalization(said: Mapping[str, Any]) -> str:
    name = said["normalize_activations"]
    name = {None: "none", False: "none", True: "expected_average_only_in"}.get(name, name)
    if name == "expected_average_only_in":
        raise UnsupportedError(
            f"normalize_activations {name!r}: its factor, of the data it was trained on, is not in the files; "
            f"SAELens' fold_activation_norm_scaling_factor and save_model write it into the weights"
        )
    if name not in NORMS:
        raise UnsupportedError(f"normalize_activations {name!r:.40}; known are {', '.join(NORMS)}")
    return name


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def _checked(
    weights: dict[str, Tensor], said: Mapping[str, Any], architecture: str, k: int, path: Path
) -> dict[str, Tensor]:
    """The tensors that an architecture has, in the config's dtype."""
    weights, scaled = dict(weights), bool(said[SCALING])
    if architecture == "jumprelu" and "log_threshold" in weights and "threshold" not in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()  # as it is trained
    older = weights.pop("scaling_factor", None)  # its name once, when files had it whether it was used or not
    if older is not None and bool((older == 1).all()):
        scaled = False
    elif older is not None:
        weights[SCALING] = older
    if (SCALING in weights) != scaled:
        raise ModelError(f"{path}: {SCALING} is {said[SCALING]!r:.20} in {CONFIG}, and the weights say otherwise")
    if "W_dec" not in weights or weights["W_dec"].dim() != 2:
        raise ModelError(f"{path / WEIGHTS} has no W_dec (d_sae, d_in)")
    features, size = weights["W_dec"].shape
    expected = {"W_enc": (size, features), "W_dec": (features, size), "b_dec": (size,)}
    sized = (*ARCHITECTURES[architecture].sized, *((SCALING,) if SCALING in weights else ()))
    expected.update(dict.fromkeys(sized, (features,)))
    if names := sorted(expected.keys() ^ weights.keys()):
        what = "lacks" if names[0] in expected else "has a tensor that is not known here,"
        raise ModelError(f"{path / WEIGHTS} {what} {names[0]!r:.60} (architecture {architecture})")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"{path / WEIGHTS}: {name} is {describe(weights[name])}, with this W_dec it is {shape}")
    if (said["d_sae"] or features, said["d_in"] or size) != (features, size) or k > features:
        sizes = f"d_sae={said['d_sae']!r:.20}, d_in={said['d_in']!r:.20}, k={k}"
        raise ModelError(f"{path}: {CONFIG} says {sizes}; W_dec is {describe(weights['W_dec'])}")
    dtype = str(said["dtype"] or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{path / CONFIG}: dtype {dtype!r:.40}; known are {', '.join(_DTYPES)}")
    return {name: weights[name].to(getattr(torch, dtype)) for name in expected}
