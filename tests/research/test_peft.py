"""kf.adapters against PEFT: folders and live models read, run, joined by row, trained and written back."""

# B batch, S seq, D hidden, L layers, P virtual tokens

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.errors import KwargError, ModelError, ShapeError, SpanError, UnknownKwarg, UnsupportedError
from kwflow.research.peft_files import CONFIG, PICKLE, WEIGHTS
from tests.families.configs import CONFIGS, HIDDEN, LAYERS
from tests.families.marks import every_family, quickly
from tests.families.table import distributed
from tests.models.test_quantize import MODES, quantized_flow, reference
from tests.oracle import assert_bits, assert_close, assert_near, residual, tiny
from tests.oracle.tiny import EACH, TWO, Requests, flow, huggingface, ids, left_padded, positions_of, random, span

# peft 0.21 asks transformers 5.24 for names that are to go
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

B, S, D, L, P = 4, 6, HIDDEN, LAYERS, 3
FAMILIES = ("llama", "gpt2", "bloom")
OUTER = {"llama": "v_proj", "gpt2": "attn.c_attn", "bloom": "query_key_value"}
INNER = {"llama": "down_proj", "gpt2": "mlp.c_proj", "bloom": "dense_4h_to_h"}
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def lora(family: str, **more: Any) -> Any:
    given = {"r": 4, "lora_alpha": 6, "target_modules": [OUTER[family], INNER[family]], **more}
    return peft.LoraConfig(fan_in_fan_out=family == "gpt2", **CAUSAL, **given)


def ia3(family: str) -> Any:
    both, inner = [OUTER[family], INNER[family]], [INNER[family]]
    turned = family == "gpt2"
    return peft.IA3Config(target_modules=both, feedforward_modules=inner, fan_in_fan_out=turned, **CAUSAL)


KINDS: dict[str, Callable[[str], Any]] = {
    "lora": lora,
    "ia3": ia3,
    "prefix": lambda family: peft.PrefixTuningConfig(num_virtual_tokens=P, **CAUSAL),
    "projected prefix": lambda family: peft.PrefixTuningConfig(
        num_virtual_tokens=P, prefix_projection=True, encoder_hidden_size=8, **CAUSAL
    ),
    "prompt": lambda family: peft.PromptTuningConfig(num_virtual_tokens=P, **CAUSAL),
}


def tuned(family: str, config: Any, dtype: torch.dtype = torch.float32, seed: int = 0, base: Any = None) -> Any:
    """A live PeftModel whose adapter is random: none of its tensors is PEFT's initial zeros or ones.

    ``base``: the model to adapt, if not the tiny one as it is.
    """
    model: Any = peft.get_peft_model(copy.deepcopy(base or huggingface(family, dtype)), config).eval()
    with torch.no_grad():
        for number, tensor in enumerate(t for t in model.parameters() if t.requires_grad):
            tensor.copy_(random(*tensor.shape, seed=seed + number, scale=0.3) + (config.peft_type == "IA3"))
    return model


def logits(remote: Any, adapter: Any, tokens: Tensor) -> Tensor:
    """Through the flow, as PEFT's forward has them: the virtual tokens' columns first."""
    if isinstance(adapter, kf.adapters.Prompt):
        return remote.head(remote(**adapter.inputs(remote, tokens)))
    prefix = {"prefix": adapter.length} if isinstance(adapter, kf.adapters.Prefix) else {}
    return remote.head(remote(**remote.inputs(tokens, **prefix), **adapter))


def assert_same_tensors(ours: Any, theirs: Any) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert_bits(ours.tensors[name], tensor, name)


# ---- read, run, written back -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@every_family
def test_a_folder_and_a_live_model_compute_what_peft_does(family: str, kind: str, tmp_path: Path) -> None:
    tokens = ids(B, S)
    for dtype in (torch.float32, torch.float64):
        model, where = tuned(family, KINDS[kind](family), dtype), tmp_path / str(dtype)
        model.save_pretrained(where / "peft")
        adapter = kf.adapters.read(where / "peft")
        assert_same_tensors(kf.adapters.read(model), adapter)
        adapter.save(where / "ours")
        assert_same_tensors(kf.adapters.read(where / "ours"), adapter)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface(family, dtype)), str(where / "ours")).eval()
        with LiftFloat32():
            live, expected = model(input_ids=tokens).logits, again(input_ids=tokens).logits
        assert (expected[:, -S:] - huggingface(family, dtype)(tokens).logits).abs().max() > 0.01
        if kind == "projected prefix":  # projected for all rows at once when live, for one when saved
            assert_close(expected.float(), live.float(), "PEFT reads what was written")
        else:
            assert_bits(expected, live, "PEFT reads what was written")
        for cuts, rows in ((TWO, B), (EACH, 3)):
            remote = flow(family, cuts, dtype).options(batch_tokens=rows * (S + P))
            with LiftFloat32():
                assert_near(logits(remote, adapter, tokens), expected, f"{dtype} {cuts}")


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "some layers": {"layers_to_transform": [1, 3], "lora_dropout": 0.5},
    "patterns": {
        "rank_pattern": {"v_proj": 2, r"layers\.3\.mlp\.down_proj": 5},
        "alpha_pattern": {"layers.2.self_attn.v_proj": 9, "down_proj": 3},
        "use_rslora": True,
    },
    "a regular expression": {"target_modules": r".*layers\.[02]\.(self_attn\.q_proj|mlp\.up_proj)"},
}


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_ranks_and_layers_are_pefts(variant: str, tmp_path: Path) -> None:
    model, tokens = tuned("llama", lora("llama", **VARIANTS[variant])), ids(B, S)
    expected = model(input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        adapter: Any = kf.adapters.read(source)
        assert_close(logits(flow("llama", TWO), adapter, tokens), expected, variant)
    held = {name: m.scaling["default"] for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert {f"base_model.model.{module}": scale for module, scale in adapter.scales.items()} == held
    # the same as kwargs of a flow: PEFT has its patterns from there
    kf.adapters.write(tmp_path / "ours", dict(adapter), flow=flow("llama", TWO))
    again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface("llama")), str(tmp_path / "ours")).eval()
    assert_close(again(input_ids=tokens).logits, expected, "written from kwargs")
    assert_same_tensors(kf.adapters.read(tmp_path / "ours"), adapter)


@torch.no_grad()
def test_of_patterns_that_fit_one_module_the_first_counts_in_a_folder_too(tmp_path: Path) -> None:
    model, tokens = tuned("llama", lora("llama", alpha_pattern={"v_proj": 3, "2.self_attn.v_proj": 9})), ids(B, S)
    expected, adapter = model(input_ids=tokens).logits, kf.adapters.read(model)
    adapter.save(tmp_path)
    for read in (adapter, kf.adapters.read(tmp_path)):
        assert_close(logits(flow("llama", TWO), read, tokens), expected)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface("llama")), str(tmp_path)).eval()
    assert_close(again(input_ids=tokens).logits, expected)


@torch.no_grad()
def test_of_a_live_model_one_adapter_is_read_at_its_live_scale(tmp_path: Path) -> None:
    model, tokens = tuned("llama", lora("llama")), ids(B, S)
    model.add_adapter("other", lora("llama", r=2))
    with torch.no_grad():
        for number, (name, tensor) in enumerate(model.named_parameters()):
            if ".other." in name:
                tensor.copy_(random(*tensor.shape, seed=90 + number, scale=0.3))
    for name in ("default", "other"):
        model.set_adapter(name)
        expected = model(input_ids=tokens).logits
        for adapter in (kf.adapters.read(model), kf.adapters.read(model, adapter=name)):
            assert_close(logits(flow("llama", TWO), adapter, tokens), expected, name)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("other", 3)
    adapter, expected = kf.adapters.read(model), model(input_ids=tokens).logits
    assert_close(logits(flow("llama", TWO), adapter, tokens), expected, "scaled")
    adapter.save(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface("llama")), str(tmp_path)).eval()
    assert_close(again(input_ids=tokens).logits, expected, "scaled, written")
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(KwargError, match="2 adapters of this model are active; name one of 'default', 'other'"):
        kf.adapters.read(model)
    with pytest.raises(KwargError, match="no adapter 'third'; it has default, other"):
        kf.adapters.read(model, adapter="third")


@torch.no_grad()
def test_a_transformers_model_that_loaded_an_adapter_is_read(tmp_path: Path) -> None:
    model = tuned("gpt2", lora("gpt2"))
    model.save_pretrained(tmp_path)
    local: Any = copy.deepcopy(huggingface("gpt2"))
    local.load_adapter(str(tmp_path))
    assert_same_tensors(kf.adapters.read(local), kf.adapters.read(tmp_path))


@pytest.mark.parametrize(
    "family", ["opt", "gpt_neo", *(pytest.param(name, marks=pytest.mark.rest) for name in CONFIGS)]
)
def test_names_of_every_familys_projections_are_its_modules(family: str) -> None:
    from kwflow.research.peft_files import place

    modules, ends = dict(huggingface(family).named_modules()), tiny.ends(family)
    for layer in range(L):
        own = span(family, layer, layer + 1).schema.projections
        for projection in own:
            name = f"{ends.layers_name}.{layer}.{projection}"
            assert name in modules and place(name, "") == (ends.layers_name, layer, projection)
        assert own


@torch.no_grad()
def test_prefixes_are_pefts_keys_and_values() -> None:
    for family in FAMILIES:
        model = tuned(family, KINDS["prefix"](family))
        cache, given = model.get_prompt(1), kf.adapters.read(model)["prefix_kv"]
        for layer in range(L):
            assert_bits(given["k"][layer], cache.layers[layer].keys, f"{family} keys {layer}")
            assert_bits(given["v"][layer], cache.layers[layer].values, f"{family} values {layer}")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_prompt_stands_before_padded_texts_and_in_a_model(family: str) -> None:
    """Positions count tokens, the prompt's first, as generate has them."""
    model, mask = tuned(family, KINDS["prompt"](family)), left_padded((0, 1, 3, 5), S)
    adapter: Any = kf.adapters.read(model)
    tokens = ids(B, S) * mask
    whole = torch.cat([torch.ones(B, P).long(), mask], 1)
    embeds = torch.cat([adapter.vectors.expand(B, -1, -1), huggingface(family).get_input_embeddings()(tokens)], 1)  # type: ignore[operator]
    positions = {} if family == "bloom" else {"position_ids": positions_of(whole)}
    expected = huggingface(family)(inputs_embeds=embeds, attention_mask=whole, **positions).logits
    x = adapter.inputs(flow(family, TWO), {"input_ids": tokens, "attention_mask": mask})
    out = flow(family).head(flow(family, TWO)(**x))
    assert_close(out[whole.bool()], expected[whole.bool()], "flow")
    causal: Any = kf.AutoDistributedModelForCausalLM
    remote = tiny.make_flow(family, TWO, own_ends=True)
    local = causal.from_pretrained(tiny.folder(family), flow=remote, tuning_mode="ptune", pre_seq_len=adapter.length)
    local.prompt_embeddings.data.copy_(adapter.vectors)
    assert_near(local(tokens[:1]).logits, model(input_ids=tokens[:1]).logits[:, P:], "a model with the prompt")
    with pytest.raises(UnsupportedError, match=r"x = adapter\.inputs\(flow, texts\)"):
        flow(family)(**x, **adapter)


# ---- rows --------------------------------------------------------------------------------------------------------


def mixed(dtype: torch.dtype = torch.float32) -> tuple[list[Any], list[Any]]:
    """PeftModels of different ranks, projections and layers, and the adapters: two LoRAs, none, an IA3."""
    other = lora("llama", r=2, lora_alpha=5, target_modules=["v_proj", "q_proj"], layers_to_transform=2)
    models: list[Any] = [tuned("llama", lora("llama"), dtype), tuned("llama", other, dtype)]
    models += [huggingface("llama", dtype), tuned("llama", ia3("llama"), dtype, seed=50)]
    return models, [kf.adapters.read(one) if hasattr(one, "peft_config") else None for one in models]


@torch.no_grad()
def test_rows_each_compute_their_solo_run() -> None:
    models, adapters = mixed()
    order, tokens = [0, 1, 2, 3, 0], ids(5, S)
    joined = kf.adapters.rows([adapters[i] for i in order])
    for cuts, rows in ((TWO, 5), (EACH, 2)):
        out = logits(flow("llama", cuts).options(batch_tokens=rows * S), joined, tokens)
        for row, number in enumerate(order):
            assert_near(out[row], models[number](input_ids=tokens[row : row + 1]).logits[0], f"{cuts}, row {row}")
    assert repr(joined).startswith("Rows(0, 1, none, 2, 0)\n  0: LoRA(")
    call = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    ours = distributed("llama", torch.float32).generate(input_ids=tokens, **call, **joined)
    theirs = [models[i].generate(input_ids=tokens[row : row + 1], **call) for row, i in enumerate(order)]
    assert torch.equal(ours, torch.cat(theirs))
    none = kf.adapters.rows([None] * 5)
    assert_bits(logits(flow("llama", TWO), none, tokens), logits(flow("llama", TWO), {}, tokens), "none")


def test_rows_train_the_adapters_that_they_share() -> None:
    order, tokens, adapters = [0, 1, 2, 3, 0], ids(5, S), mixed(torch.float64)[1]
    remote = flow("llama", TWO, torch.float64).options(batch_tokens=3 * S)
    joined = kf.adapters.rows([adapters[i] and adapters[i].requires_grad_() for i in order])
    logits(remote, joined, tokens).square().sum().backward()
    for number in (0, 1, 3):
        mine: Any = adapters[number]
        found = [tensor.grad for tensor in mine.parameters()]
        for tensor in mine.parameters():
            tensor.grad = None
        own = tokens[[row for row, i in enumerate(order) if i == number]]
        logits(remote, mine, own).square().sum().backward()
        for name, grad in zip(mine.tensors, found, strict=True):
            assert_near(grad, mine.tensors[name].grad, f"{number}: {name}")


# ---- trained -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, kind",
    [
        ("llama", "lora"),
        pytest.param("gpt2", "lora", marks=pytest.mark.rest),
        pytest.param("llama", "ia3", marks=pytest.mark.rest),
        ("gpt2", "prompt"),
    ],
)
def test_steps_of_training_through_a_flow_are_pefts_own(family: str, kind: str, tmp_path: Path) -> None:
    model, tokens = tuned(family, KINDS[kind](family), torch.float64), ids(B, S)
    adapter, remote = kf.adapters.read(model).requires_grad_(), flow(family, TWO, torch.float64)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    ours, theirs = (torch.optim.Adam(one, lr=0.01) for one in (adapter.parameters(), trained))
    with LiftFloat32():
        for step in range(3):
            for optimizer, run in (
                (ours, lambda: logits(remote, adapter, tokens)),
                (theirs, lambda: model(tokens).logits),
            ):
                optimizer.zero_grad()
                run()[:, -S:-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).mean().neg().backward()
                optimizer.step()
            for name, tensor in kf.adapters.read(model).tensors.items():
                assert_close(adapter.tensors[name], tensor, f"step {step}, {name}")
        adapter.save(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface(family, torch.float64)), str(tmp_path)).eval()
        assert_close(again(input_ids=tokens).logits, logits(remote, adapter, tokens), "written")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_trained_as_plain_tensors_is_written(family: str, tmp_path: Path) -> None:
    """Stacked tensors under short names, and layers of their own, become what PEFT computes the same with."""
    tokens, remote = ids(B, S), flow(family, TWO)
    sizes = remote.kwargs() and span(family, 0, L).schema.projections
    name = next(one for one in sizes if one.endswith(INNER[family]))
    i, o = sizes[name]
    A, B_ = random(L, 3, i, seed=1, scale=0.3), random(L, o, 3, seed=2, scale=0.3)
    low = {INNER[family]: {"A": A, "B": B_, "scale": 0.7}}
    one = kf.per_layer({2: {"lora": {INNER[family]: {"A": A[2], "B": B_[2]}}}})
    vectors = {INNER[family]: kf.axes(1 + random(L, i, seed=3), "layer in"), OUTER[family]: 1 + random(L, 1, seed=4)}
    outer = next(n for n in sizes if n.endswith(OUTER[family]))
    vectors[OUTER[family]] = 1 + random(L, sizes[outer][1], seed=4)
    given: list[dict[str, Any]] = [{"lora": low}, one, {"ia3": vectors}]
    for number, kwargs in enumerate(given):
        kf.adapters.write(tmp_path / str(number), kwargs, flow=remote, base_model="mine")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(huggingface(family)), str(tmp_path / str(number))).eval()
        expected = again(input_ids=tokens).logits
        assert_close(remote.head(remote(**remote.inputs(tokens), **kwargs)), expected, f"{number}")
        adapter = kf.adapters.read(tmp_path / str(number))
        assert_close(logits(remote, adapter, tokens), expected, f"{number}, read")
        assert adapter.config["base_model_name_or_path"] == "mine"


def test_a_prefix_is_written_and_read(tmp_path: Path) -> None:
    given = {side: random(L, 1, tiny.KV_HEADS, P, D // tiny.HEADS, seed=n) for n, side in enumerate("kv")}
    kf.adapters.write(tmp_path, {"prefix_kv": given}, flow=flow("llama"))
    for side, tensor in kf.adapters.read(tmp_path)["prefix_kv"].items():
        assert_bits(tensor, given[side], side)


# ---- quantized ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "ia3"])
@pytest.mark.parametrize("mode", quickly(["nf4"], MODES))
@every_family
def test_quantized_workers_adapt_as_peft_over_transformers_quantized_model(family: str, mode: str, kind: str) -> None:
    """Values and gradients of PEFT's own layers over bitsandbytes' linears: A and B, or the vectors, and hidden.

    Bloom's gelu is derived otherwise. In bfloat16 PEFT's IA3 hands float32 on to the attention, which refuses it.
    """
    half = [torch.bfloat16] if kind == "lora" and family != "bloom" else []
    for dtype in (torch.float32, *half):
        model = tuned(family, KINDS[kind](family), base=reference(family, mode, dtype))
        trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        for tensor in trained.values():
            tensor.data = tensor.to(dtype)  # PEFT would compute in float32
        adapter, remote = kf.adapters.read(model).requires_grad_(), quantized_flow(family, mode, TWO, dtype)
        hidden = random(B, S, D, seed=1).to(dtype).requires_grad_()
        ours, theirs = remote(hidden, **adapter), residual(model.base_model.model, hidden)
        assert_bits(ours, theirs, f"{dtype}")
        plain = remote(hidden)
        assert (ours - plain).abs().max() > 0.1
        by_row = remote(hidden, **kf.adapters.rows([adapter, None, adapter, None]))
        assert_near(by_row[::2], theirs[::2], "rows with it")
        assert_bits(by_row[1::2], plain[1::2], "rows without")
        cotangent = random(B, S, D, seed=2).to(dtype)
        mine = torch.autograd.grad(ours, [hidden, *adapter.parameters()], cotangent)
        expected = torch.autograd.grad(theirs, [hidden, *trained.values()], cotangent)
        names = [name.removeprefix("base_model.model.").replace(".default", "") for name in trained]
        found = dict(zip([None, *adapter.tensors], mine, strict=True))
        for name, grad in zip([None, *names], expected, strict=True):
            (assert_close if family == "bloom" else assert_bits)(found[name], grad, f"{dtype} {name}")


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": "all"}, "bias='all': it changes biases of the base model"),
    "only its own bias": ({"bias": "lora_only"}, "bias='lora_only'"),
    "DoRA": ({"use_dora": True}, "use_dora=True: DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: it holds whole modules"),
    "layers again": ({"layer_replication": [[0, 4], [2, 4]]}, "layer_replication=.*several times"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.*no projection's weight"),
    "tokens": ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]: it changes the embedding"),
    "B's bias": ({"lora_bias": True}, "lora_bias=True"),
    "a key of a later PEFT": ({"use_newer": {"how": 1}}, "use_newer=.*what that changes is not known here"),
    "an init that changes the base": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': PEFT changes the base"),
    "another kind": ({"peft_type": "OFT"}, "peft_type 'OFT': it turns a projection's input.*; carried are LORA, IA3"),
    "a kind of a later PEFT": ({"peft_type": "LORAS"}, "peft_type 'LORAS'; carried are LORA,.*Did you mean 'LORA'"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tuned("llama", lora("llama", target_modules=["v_proj"])).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_carried_is_refused_by_name(case: str, folder: Path) -> None:
    changes, words = REFUSED[case]
    change(folder, **changes)
    with pytest.raises(UnsupportedError, match=words):
        kf.adapters.read(folder)


@pytest.mark.parametrize("target, tied", [("lm_head", "gpt2"), ("embed_tokens", "llama")])
def test_embeddings_and_head_are_refused(target: str, tied: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=[target])
    model: Any = peft.get_peft_model(copy.deepcopy(huggingface("llama")), config)
    with pytest.raises(UnsupportedError, match=f"adapts '(model.)?{target}', which is not in a layer"):
        kf.adapters.read(model)


def test_live_models_that_train_more_are_refused() -> None:
    for more, words in (
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["norm"]}, "norm"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            kf.adapters.read(tuned("llama", lora("llama", **more)))
    with pytest.raises(UnsupportedError, match="'HIRA': it multiplies a weight"):
        kf.adapters.read(
            peft.get_peft_model(copy.deepcopy(huggingface("llama")), peft.HiraConfig(target_modules=["v_proj"]))
        )


def test_broken_folders_are_said_to_be(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = load_file(folder / WEIGHTS)
    first = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    change(folder, r=5)
    with pytest.raises(ModelError, match=r"v_proj has A float32\(4, 32\) .* its config says rank 5"):
        kf.adapters.read(folder)
    change(folder, r=4, alpha_pattern={"(": 2})
    with pytest.raises(ModelError, match="alpha_pattern is not a dict of regular expressions"):
        kf.adapters.read(folder)
    change(folder, alpha_pattern={})
    for tensors, error, words in (
        (
            {n: t for n, t in whole.items() if n != first},
            ModelError,
            "no tensor 'model.layers.0.self_attn.v_proj.lora_A",
        ),
        (
            {**whole, "base_model.model.model.layers.0.mlp.x": torch.zeros(2)},
            UnsupportedError,
            "holds 'model.layers.0.mlp.x'",
        ),
        ({**whole, first.replace("model.layers", "vision.layers"): torch.zeros(4, 32)}, UnsupportedError, "layers of"),
        ({}, ModelError, "holds no tensor"),
    ):
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(error, match=words):
            kf.adapters.read(folder)
    (folder / WEIGHTS).write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot read"):
        kf.adapters.read(folder)
    (folder / WEIGHTS).rename(folder / PICKLE)
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle, which may run any code"):
        kf.adapters.read(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ModelError, match="no adapter_config.json; give a folder"):
        kf.adapters.read(folder)
    with pytest.raises(KwargError, match="got a int"):
        kf.adapters.read(3)


def test_what_a_model_or_a_folder_has_no_place_for_is_refused(folder: Path) -> None:
    remote, adapter = tiny.make_flow("gpt2", TWO), kf.adapters.read(folder)
    with (
        Requests(remote) as requests,
        pytest.raises(UnknownKwarg, match="no projection 'self_attn.v_proj'; these.*c_attn"),
    ):
        remote(random(B, S, D), **adapter)
    assert len(requests) == 0
    ours, low = flow("llama"), next(iter(adapter["lora"].values.values()))["self_attn.v_proj"]
    with pytest.raises(SpanError, match="lora names layer 3; this flow has layers 0:3"):
        ours[:3](random(B, S, D), **adapter)
    hidden: Any = random(B, S, D)
    parts = ours[:3](hidden, **adapter.at_layers(range(3))), ours(hidden, **adapter)  # type: ignore[attr-defined]
    assert_close(ours[3:](parts[0], **adapter.at_layers([3])), parts[1], "in two slices")  # type: ignore[attr-defined]
    stacked = {key: low[key][None].expand(L, -1, -1) for key in "AB"}
    many = {key: tensor[:, None] for key, tensor in stacked.items()}
    for kwargs, error, words in (
        ({"lora": {"v_proj": {**many, "rows": torch.tensor([0])}}}, KwargError, "differs by row"),
        ({"lora": {"v_proj": many}}, KwargError, "differs by row"),
        ({"lora": {"v_proj": {**stacked, "scale": torch.ones(1)}}}, KwargError, "its scale is a tensor"),
        ({"lora": {"v_proj": stacked}, "ia3": {}}, KwargError, "got lora, ia3; a folder holds one of"),
        ({"steer": {1: random(D)}}, KwargError, "got steer; a folder holds one"),
        ({"lora": {"v_proj": {**stacked, "A": random(L, 4, 7)}}}, ShapeError, "in = 7, expected 32"),
    ):
        with pytest.raises(error, match=words):
            kf.adapters.write(folder, kwargs, flow=ours)
    with pytest.raises(KwargError, match=r"write\(folder, kwargs, flow=flow\)"):
        kf.adapters.write(folder, {"lora": {"v_proj": stacked}})
    with pytest.raises(KwargError, match="all 4 layers; this one has 0:3"):
        kf.adapters.write(folder, {"lora": {"v_proj": stacked}}, flow=ours[:3])
    prompt = kf.adapters.read(tuned("llama", KINDS["prompt"]("llama")))
    with pytest.raises(UnsupportedError, match="row 1 has Prompt.*rows join LoRA and IA3"):
        kf.adapters.rows([adapter, prompt])
    narrow = kf.adapters.read(tuned("llama", KINDS["prompt"]("llama")))
    narrow.tensors["prompt_embeddings"] = torch.zeros(P, D - 1)
    with pytest.raises(ShapeError, match=r"float32\(3, 31\) stands before embeddings of width 32"):
        logits(flow("llama"), narrow, ids(1, 2))
    with pytest.raises(KwargError, match="row 0 is a dict"):
        kf.adapters.rows([{}])  # type: ignore[list-item]


def test_an_adapter_says_what_it_holds() -> None:
    some = tuned("llama", lora("llama", layers_to_transform=[1, 3], lora_dropout=0.1))
    assert repr(kf.adapters.read(some)) == (
        "LoRA(self_attn.v_proj, mlp.down_proj of layers 1, 3, rank 4, scale 1.5, lora_dropout 0.1 left out as in eval "
        "mode; 1,024 numbers of float32, from adapter 'default' of PeftModelForCausalLM)"
    )
    assert repr(kf.adapters.read(tuned("gpt2", ia3("gpt2")))).startswith(
        "IA3(attn.c_attn, mlp.c_proj of layers 0:4; 896 "
    )
    prompt = repr(kf.adapters.read(tuned("llama", KINDS["prompt"]("llama"))))
    assert "3 vectors before the text, by x = adapter.inputs(flow, texts)" in prompt
    assert "prefix of 3 keys and values at layers 0:4" in repr(
        kf.adapters.read(tuned("llama", KINDS["prefix"]("llama")))
    )


@pytest.mark.slow
def test_smollm2s_adapter_is_pefts(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], **CAUSAL)
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(smollm2).eval(), config).eval()
    with torch.no_grad():
        for number, tensor in enumerate(t for t in model.parameters() if t.requires_grad):
            tensor.copy_(random(*tensor.shape, seed=number, scale=0.02))
    model.save_pretrained(tmp_path)
    remote = kf.connect(str(smollm2))
    x = (
        remote.tokenize("The weather in Paris is")
        if hasattr(remote, "tokenize")
        else remote.ends.tokenize(["The weather in Paris is"])
    )
    with torch.no_grad():
        ours, theirs = logits(remote, kf.adapters.read(tmp_path), x["input_ids"]), model(x["input_ids"]).logits
        assert (theirs - logits(remote, {}, x["input_ids"])).abs().max() > 0.1
    assert_close(ours, theirs)
