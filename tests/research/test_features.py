"""Sparse autoencoders in SAELens' layout: files made here, arithmetic written again, uses in a flow, refusals."""

# B batch, S seq, D d_in, F d_sae

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kwflow as kf
from kwflow.errors import KwargError, KwflowError, ModelError, ShapeError, UnsupportedError
from kwflow.research.autoencoders import ARCHITECTURES
from kwflow.research.features import HOOKS
from tests.oracle import assert_bits, assert_close, layers_of, residual
from tests.oracle.tiny import HEADS, HIDDEN, TWO, flow, huggingface, ids, random

D, F, K = HIDDEN, 40, 5
OWN = {  # what an architecture has beside W_enc, W_dec and b_dec, all (d_sae,)
    "standard": ("b_enc",),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
}


def tensors(architecture: str, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = {
        "W_enc": random(D, F, seed=1, scale=0.3),
        "W_dec": random(F, D, seed=2, scale=0.3),
        "b_dec": random(D, seed=3, scale=0.3),
    }
    made |= {name: random(F, seed=4 + n, scale=0.3) for n, name in enumerate(OWN[architecture])}
    if "threshold" in made:
        made["threshold"] = made["threshold"].abs()
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def newer(architecture: str = "standard", **more: Any) -> dict[str, Any]:
    """A cfg.json as newer versions write it: what is about the model stands under ``metadata``."""
    about = {"hook_name": "blocks.2.hook_resid_pre", "hook_head_index": None, "model_name": "tiny"}
    about |= {name: more.pop(name) for name in (*about, "hook_layer", "model_from_pretrained_kwargs") if name in more}
    return {
        **{"d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True},
        **{"normalize_activations": "none", "reshape_activations": "none", "metadata": about},
        **{"architecture": architecture, **({"k": K} if architecture == "topk" else {})},
        **more,
    }


def older(architecture: str = "standard", **more: Any) -> dict[str, Any]:
    """As older versions wrote it: flat, and topk an activation of the standard architecture."""
    topk = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}} if architecture == "topk" else {}
    return {
        **{"architecture": "standard" if topk else architecture, "d_in": D, "d_sae": F, "dtype": "torch.float32"},
        **{"activation_fn_str": "relu", "activation_fn_kwargs": {}, "apply_b_dec_to_input": True, **topk},
        **{"finetuning_scaling_factor": False, "normalize_activations": "none", "model_name": "tiny", "hook_layer": 2},
        **{"hook_name": "blocks.2.hook_resid_pre", "hook_head_index": None, "prepend_bos": True, "context_size": 128},
        **{"model_from_pretrained_kwargs": {"center_writing_weights": False}, "sae_lens_training_version": "3.1.0"},
        **more,
    }


def saved(folder: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    said = {**config, **config.get("metadata", {})}
    name = "topk" if said.get("activation_fn_str") == "topk" else said["architecture"]
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file(tensors(name) if weights is None else weights, folder / "sae_weights.safetensors")
    return folder


def one_by_one(w: dict[str, Tensor], architecture: str, x: Tensor, subtract: bool = True) -> Tensor:
    """The features of one activation (D,), a feature at a time."""
    entering = [float(x[i] - w["b_dec"][i]) if subtract else float(x[i]) for i in range(D)]
    out = []
    for j in range(F):
        dot = sum(entering[i] * float(w["W_enc"][i, j]) for i in range(D))
        if architecture == "gated":
            magnitude = dot * math.exp(float(w["r_mag"][j])) + float(w["b_mag"][j])
            out.append(max(magnitude, 0.0) if dot + float(w["b_gate"][j]) > 0 else 0.0)
            continue
        before = dot + float(w["b_enc"][j])
        out.append(max(before, 0.0) if before > (float(w["threshold"][j]) if architecture == "jumprelu" else 0) else 0)
    if architecture == "topk":
        kept = sorted(out, reverse=True)[:K]
        out = [value if value in kept else 0.0 for value in out]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", [newer, older])
@pytest.mark.parametrize("subtract", [True, False])
def test_it_encodes_and_decodes(architecture: str, config: Any, subtract: bool, tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, config(architecture, apply_b_dec_to_input=subtract)))
    w, x = tensors(architecture), random(2, 3, D, seed=9)
    assert (len(features), features.d_in, features.point, features.layer) == (F, D, "resid_pre", 2)
    f = features.encode(x)
    expected = torch.stack([one_by_one(w, architecture, row, subtract) for row in x.flatten(0, 1)]).view(2, 3, F)
    assert_close(f, expected.float())
    assert 0 < int((f > 0).sum()) < f.numel()
    decoded = sum(f[..., j, None] * w["W_dec"][j] for j in range(F)) + w["b_dec"]
    assert_close(features.decode(f), decoded)
    assert_bits(features.direction(7), w["W_dec"][7])
    step = torch.zeros(F)
    step[7] = 1.0
    assert_close(features.decode(step) - features.decode(torch.zeros(F)), features.direction(7))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_differentiable(architecture: str, tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, newer(architecture))).to(torch.float64)
    x = random(2, D, seed=9, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: features.decode(features.encode(x)), x)


def test_a_threshold_may_stand_there_as_its_logarithm(tmp_path: Path) -> None:
    weights, x = tensors("jumprelu"), random(2, 3, D, seed=9)
    plain = kf.features.read(saved(tmp_path / "plain", newer("jumprelu")))
    logarithm = weights.pop("threshold").log()
    features = kf.features.read(saved(tmp_path / "log", newer("jumprelu"), {**weights, "log_threshold": logarithm}))
    assert_close(features.weights["threshold"], plain.weights["threshold"])
    assert_close(features.encode(x), plain.encode(x))
    with pytest.raises(ModelError, match="lacks 'threshold'"):
        kf.features.read(saved(tmp_path / "none", newer("jumprelu"), weights))


@pytest.mark.parametrize("name", ["constant_norm_rescale", "layer_norm"])
def test_what_was_normalized_is_undone_by_its_own_activations(name: str, tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, newer(normalize_activations=name)))
    plain = kf.features.read(saved(tmp_path / "plain", newer()))
    x = random(2, 3, D, seed=9)
    if name == "layer_norm":
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        normal, undo = (x - mean) / (deviation + 1e-5), lambda y: y * deviation + mean
    else:
        length = x.pow(2).sum(-1, keepdim=True).sqrt()
        normal, undo = x * D**0.5 / length, lambda y: y * length / D**0.5
    f = features.encode(x)
    assert_close(f, plain.encode(normal))
    assert_close(features.decode(f, x), undo(plain.decode(f)))
    with pytest.raises(KwargError, match=rf"normalizes by {name}: decode\(f, x\)"):
        features.decode(f)


def test_topk_by_the_decoders_norms_and_a_factor_for_each_feature(tmp_path: Path) -> None:
    w, x = tensors("topk"), random(4, D, seed=9)
    features = kf.features.read(saved(tmp_path / "norm", newer("topk", rescale_acts_by_decoder_norm=True)))
    before = ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu() * w["W_dec"].pow(2).sum(1).sqrt()
    least = before.sort(-1, descending=True).values[:, K - 1 : K]
    f = features.encode(x)
    assert_close(f, torch.where(before >= least, before, 0.0))
    assert_close(features.decode(f), (f / w["W_dec"].pow(2).sum(1).sqrt()) @ w["W_dec"] + w["b_dec"])
    factor = 1 + random(F, seed=12).abs()
    for name in ("scaling_factor", "finetuning_scaling_factor"):
        config = older("standard", finetuning_scaling_factor=True)
        scaled = kf.features.read(saved(tmp_path / name, config, {**tensors("standard"), name: factor}))
        f = scaled.encode(x)
        assert_close(scaled.decode(f), (f * factor) @ w["W_dec"] + w["b_dec"])
    unused = {**tensors("standard"), "scaling_factor": torch.ones(F)}  # as files had it once
    features = kf.features.read(saved(tmp_path / "ones", older(), unused))
    assert_close(features.decode(f), f @ w["W_dec"] + w["b_dec"])


@pytest.mark.parametrize("hook", HOOKS)
def test_its_hook_is_a_point_of_a_flow(hook: str, tmp_path: Path) -> None:
    here = flow("gpt2", TWO)
    features = kf.features.read(saved(tmp_path, newer(hook_name=f"blocks.2.{hook}")))
    out, acts = here.capture({features.point: [features.layer]}, **here.inputs(ids(2, 5)))  # type: ignore[arg-type]
    seen = acts[features.point, features.layer]
    if features.point == "neuron":  # four times as wide
        with pytest.raises(ShapeError, match="the last axis is"):
            features.encode(seen)
        return
    f = features.encode(seen)
    assert f.shape == (2, 5, F)
    assert_bits(f, features.encode(seen.reshape(2, 5, D)))
    direction = features.direction(3)
    direction = direction.unflatten(0, (HEADS, -1)) if features.point == "head" else direction
    edited = here(**here.inputs(ids(2, 5)), edit=[kf.add(direction, 2, point=features.point)])
    assert float((edited - out).detach().abs().max()) > 1e-3


def test_a_feature_is_added_as_by_a_plain_hook(tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, newer("jumprelu", hook_name="blocks.2.hook_resid_post")))
    here, model = flow("llama", TWO), huggingface("llama")
    x = here.inputs(ids(2, 5))
    found: list[Tensor] = []
    hook = (layers_of(model)[2], "post", lambda _, __, out: found.append(out))
    mask = {name: value for name, value in x.items() if name != "hidden"}
    residual(model, x["hidden"], extra=[hook], **mask)
    _, acts = here.capture({features.point: [features.layer]}, **x)  # type: ignore[arg-type]
    assert_bits(features.encode(acts["resid", 2]), features.encode(found[0]))
    ours = here(**x, edit=[kf.add(features.direction(7), features.layer, point=features.point, scale=3.0)])
    assert_close(ours, residual(model, x["hidden"], steer={2: 3.0 * tensors("jumprelu")["W_dec"][7]}, **mask))


def test_a_centered_model_is_said_to_be_one(tmp_path: Path) -> None:
    config = newer(model_from_pretrained_kwargs={"center_writing_weights": True})
    folder, x = saved(tmp_path, config), random(3, D, seed=9)
    with pytest.raises(KwargError, match="say center=True where its norms are LayerNorms"):
        kf.features.read(folder)
    as_it_is, centered = (kf.features.read(folder, center=center) for center in (False, True))
    assert_bits(centered.encode(x), as_it_is.encode(x - x.mean(-1, keepdim=True)))
    heads = newer(hook_name="blocks.2.attn.hook_z", model_from_pretrained_kwargs={"center_writing_weights": True})
    assert not kf.features.read(saved(tmp_path / "heads", heads)).center


def test_weights_are_in_the_configs_dtype(tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, newer(dtype="bfloat16")))
    assert features.encode(random(3, D)).dtype is torch.bfloat16 is features.direction(0).dtype
    assert features.to(torch.float64).encode(random(3, D)).dtype is torch.float64
    assert repr(features) == f"Features(standard, {F} of bfloat16({D},) at resid_pre of layer 2 of tiny)"


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (
            newer(architecture="matching_pursuit"),
            UnsupportedError,
            "architecture 'matching_pursuit'; known are standard",
        ),
        (newer(architecture="transcoder"), UnsupportedError, "architecture 'transcoder'"),
        (newer(activation_fn="tanh-relu"), UnsupportedError, "activation_fn 'tanh-relu'"),
        (newer(normalize_activations="expected_average_only_in"), UnsupportedError, "not in the files"),
        (older(normalize_activations=True), UnsupportedError, "expected_average_only_in"),
        (newer(normalize_activations="other"), UnsupportedError, "'other'; known are none"),
        (newer(rescale_acts_by_decoder_norm=True), UnsupportedError, "rescale_acts_by_decoder_norm=True of standard"),
        (newer(hook_name="blocks.2.hook_resid_mid"), UnsupportedError, "hook_name is 'blocks.2.hook_resid_mid'"),
        (newer(hook_name="blocks.2.hook_resid_pree"), UnsupportedError, "Did you mean 'hook_resid_pre'"),
        (newer(hook_name="hook_embed"), UnsupportedError, "hook_name is 'hook_embed'"),
        (newer(hook_name=None), UnsupportedError, "hook_name is None"),
        (newer(hook_head_index=3), UnsupportedError, "hook_head_index is 3"),
        (older(hook_layer=3), ModelError, "hook_layer is 3, and hook_name 'blocks.2"),
        (
            newer(hook_name="blocks.2.attn.hook_z", model_from_pretrained_kwargs={"fold_value_biases": True}),
            UnsupportedError,
            "fold_value_biases",
        ),
        (newer(d_sae=F + 1), ModelError, f"d_sae={F + 1}"),
        (newer("topk", k=None), ModelError, "k=None"),
        (newer("topk", k=F + 1), ModelError, f"k={F + 1}"),
        (newer(dtype="int8"), UnsupportedError, "dtype 'int8'"),
        (older(finetuning_scaling_factor=True), ModelError, "the weights say otherwise"),
        (newer(apply_b_dec_to_input="yes"), ModelError, "apply_b_dec_to_input is 'yes'"),
        (older(activation_fn_kwargs=[1]), ModelError, "activation_fn_kwargs is"),
    ],
)
def test_refusals(config: dict[str, Any], error: type[KwflowError], says: str, tmp_path: Path) -> None:
    weights = tensors("topk" if config["architecture"] == "topk" else "standard")
    with pytest.raises(error, match=says):
        kf.features.read(saved(tmp_path, config, weights))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b_enc": None}, "lacks 'b_enc'"),
        ({"W_dec": None}, "has no W_dec"),
        ({"W_enc": torch.zeros(F, D)}, "W_enc is float32"),
        ({"W_skip": torch.zeros(D, D)}, "has a tensor that is not known here, 'W_skip'"),
        ({"scaling_factor": torch.full((F,), 2.0)}, "the weights say otherwise"),
    ],
)
def test_broken_files(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in {**tensors("standard"), **change}.items() if tensor is not None}
    folder = saved(tmp_path, older(), weights)
    with pytest.raises(ModelError, match=says):
        kf.features.read(folder)
    (folder / "sae_weights.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="cannot read .*sae_weights"):
        kf.features.read(folder)
    for text in ("{", "[]"):
        (folder / "cfg.json").write_text(text)
        with pytest.raises(ModelError, match="cfg.json"):
            kf.features.read(folder)


def test_what_is_given_must_fit(tmp_path: Path) -> None:
    features = kf.features.read(saved(tmp_path, newer()))
    with pytest.raises(ShapeError, match=f"the last axis is {D}"):
        features.encode(random(2, D + 1))
    with pytest.raises(ShapeError, match=f"the last axis is {F}"):
        features.decode(random(2, D))
    for number in (-1, F, 1.5):
        with pytest.raises(KwargError, match=f"from 0 to {F - 1}"):
            features.direction(number)  # type: ignore[arg-type]
