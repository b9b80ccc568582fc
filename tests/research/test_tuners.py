"""Adapters from nothing, and PEFT's other tuners, against PEFT: values, gradients, training, folders, refusals."""

# B batch, S seq, L layers, P virtual tokens

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
from kwflow.research.adapter_reading import KINDS
from kwflow.research.peft_files import CONFIG
from kwflow.research.peft_types import CARRIED, REFUSED
from tests.families.configs import CONFIGS
from tests.families.marks import quickly
from tests.families.table import distributed
from tests.oracle import assert_bits, assert_close, assert_near, tiny
from tests.oracle.tiny import EACH, TWO, flow, huggingface, ids, random
from tests.research import test_peft
from tests.research.test_peft import CAUSAL, INNER, OUTER, B, L, P, S, assert_same_tensors, logits

pytestmark = [
    *test_peft.pytestmark,
    pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias term"),
    pytest.mark.filterwarnings("ignore:Specified to not save vera_A"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor.s. have invalid shape"),  # AdaLoRA's of no rank
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning"),  # AdaLoRA's are
]
LINEAR = ("llama", "bloom")  # whose projections are nn.Linear: PEFT's lycoris and BEFT take no other
BOTH = ("llama", "gpt2")


def both(family: str) -> dict[str, Any]:
    return {"target_modules": [OUTER[family], INNER[family]], **CAUSAL}


def turned(family: str) -> dict[str, Any]:
    return {"fan_in_fan_out": family == "gpt2"}


def outer(family: str) -> list[str]:  # of one width
    return {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bloom": ["query_key_value"]}[family]


TYPES: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "P_TUNING": (lambda _: peft.PromptEncoderConfig(num_virtual_tokens=P, encoder_hidden_size=8, **CAUSAL), BOTH),
    "CARTRIDGE": (lambda _: peft.CartridgeConfig(num_virtual_tokens=P, num_frozen_tokens=1, **CAUSAL), BOTH),
    "ADALORA": (lambda f: peft.AdaLoraConfig(total_step=10, init_r=5, lora_alpha=3, **both(f), **turned(f)), BOTH),
    "VERA": (lambda f: peft.VeraConfig(r=5, target_modules=outer(f), **CAUSAL, **turned(f)), BOTH),
    "LOHA": (lambda f: peft.LoHaConfig(r=3, alpha=2, alpha_pattern={OUTER[f]: 5}, **both(f)), LINEAR),
    "LOKR": (lambda f: peft.LoKrConfig(r=2, alpha=3, rank_pattern={INNER[f]: 1}, **both(f)), LINEAR),
    "LOKR of both": (lambda f: peft.LoKrConfig(r=1, alpha=3, decompose_both=True, **both(f)), LINEAR),
    "LOKR, whole": (lambda f: peft.LoKrConfig(r=64, **both(f)), LINEAR),
    "BEFT": (lambda f: peft.BeftConfig(**both(f)), LINEAR),
}
QUICK = [("llama", kind) for kind in TYPES if kind not in ("LOKR of both", "LOKR, whole")]


def types(chosen: Callable[[str], bool] = lambda kind: True) -> list[Any]:
    """Families and types, as parameters."""
    every = [(family, kind) for kind, (_, families) in TYPES.items() for family in families if chosen(kind)]
    return [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in every]


def config(family: str, kind: str) -> Any:
    return TYPES[kind][0](family)


def tuned(family: str, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """As test_peft's; AdaLoRA's rank, which a cast makes a parameter, is no tensor of the adapter."""
    model = test_peft.tuned(family, config, dtype)
    for name, tensor in model.named_parameters():
        if name.endswith("ranknum.default"):
            tensor.requires_grad_(False).fill_(config.init_r)
    return model


def loaded(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """PEFT's model of a folder."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(huggingface(family, dtype)), str(folder)).eval()


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits[:, -S:-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).mean().neg()


# ---- PEFT's other types ------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family, kind", types())
def test_another_type_computes_what_peft_does(family: str, kind: str, tmp_path: Path) -> None:
    tokens = ids(B, S)
    for dtype in (torch.float32, torch.float64):
        model, where = tuned(family, config(family, kind), dtype), tmp_path / str(dtype)
        model.save_pretrained(where / "peft")
        adapter = kf.adapters.read(where / "peft")
        assert_same_tensors(kf.adapters.read(model), adapter)
        adapter.save(where / "ours")
        assert_same_tensors(kf.adapters.read(where / "ours"), adapter)
        with LiftFloat32():
            expected = loaded(family, where / "peft", dtype)(input_ids=tokens).logits
            assert_bits(loaded(family, where / "ours", dtype)(input_ids=tokens).logits, expected, "PEFT reads it")
        assert (expected[:, -S:] - huggingface(family, dtype)(tokens).logits).abs().max() > 0.01
        for cuts, rows in ((TWO, B), (EACH, 3)):
            remote = flow(family, cuts, dtype).options(batch_tokens=rows * (S + P))
            with LiftFloat32():
                assert_near(logits(remote, adapter, tokens), expected, f"{dtype} {cuts}")


@pytest.mark.parametrize("family, kind", types(lambda kind: kind != "P_TUNING"))  # of whose encoder PEFT saves nothing
def test_another_type_is_trained_as_peft_trains_it(family: str, kind: str) -> None:
    model, tokens = tuned(family, config(family, kind), torch.float64), ids(B, S)
    adapter = kf.adapters.read(model).requires_grad_()
    with LiftFloat32():
        loss(model(tokens).logits, tokens).backward()
        loss(logits(flow(family, TWO, torch.float64), adapter, tokens), tokens).backward()
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    if kind == "CARTRIDGE":
        [ours], [theirs] = adapter.parameters(), trained.values()
        assert ours.grad is not None
        assert not ours.grad[:1].any()
        return assert_close(ours.grad[1:], theirs.grad, kind)
    assert len(trained) == len(adapter.parameters()) > 0
    for name, tensor in trained.items():
        own = name.removeprefix("base_model.model.").replace(".default", "")
        assert_close(adapter.tensors[own].grad, tensor.grad, own)


@torch.no_grad()
@pytest.mark.parametrize("kind", quickly(["LOKR", "BEFT"], ("ADALORA", "VERA", "LOHA", "LOKR", "BEFT")))
def test_another_type_acts_in_generate_in_sessions_and_by_row(kind: str) -> None:
    model, tokens = tuned("llama", config("llama", kind)), ids(B, S)
    adapter: Any = kf.adapters.read(model)
    call = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2}
    assert torch.equal(
        distributed("llama", torch.float32).generate(input_ids=tokens, **call, **adapter),
        model.generate(input_ids=tokens, **call),
    )
    remote, x = tiny.make_flow("llama", TWO), flow("llama").inputs(tokens)
    whole = remote(**x, **adapter)
    with remote.session() as session:
        steps = [session.step(x["hidden"][:, i : i + 1], **adapter) for i in range(S)]
    assert_near(torch.cat(steps, 1), whole, "a session")
    halves = remote[:2](x["hidden"], **adapter.at_layers(range(2)))
    assert_near(remote[2:](halves, **adapter.at_layers(range(2, L))), whole, "slices")
    if kind == "BEFT":
        with pytest.raises(UnsupportedError, match="row 0 has BEFT.*rows join LoRA and IA3"):
            kf.adapters.rows([adapter])
        return
    by_row = remote(**x, **kf.adapters.rows([adapter, None, adapter, None]))
    assert_near(by_row[::2], whole[::2], "rows with it")
    assert_bits(by_row[1::2], remote(**x)[1::2], "rows without")


@torch.no_grad()
def test_ranks_that_adalora_took_away(tmp_path: Path) -> None:
    """A live model has them as zeros, a folder not at all; of one module nothing is left."""
    model, tokens = tuned("llama", config("llama", "ADALORA")), ids(B, S)
    kept, pattern = (torch.tensor([True, False, True, True, False]), torch.tensor([False] * 5)), {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_E"):
            mask = kept[name.endswith("0.mlp.down_proj")]
            module.lora_E["default"].mul_(mask[:, None])
            pattern[f"{name.removeprefix('base_model.model.')}.lora_E.default"] = mask.tolist()
    live, expected = kf.adapters.read(model), model(tokens).logits
    model.peft_config["default"].rank_pattern = pattern
    for adapter in (live, kf.adapters.read(model)):
        assert_close(logits(flow("llama", TWO), adapter, tokens), expected, "live")
        adapter.save(tmp_path / "live")
        assert_close(loaded("llama", tmp_path / "live")(tokens).logits, expected, "live, written")
    model.save_pretrained(tmp_path / "peft")
    saved: Any = kf.adapters.read(tmp_path / "peft")
    assert sorted({len(tensor) for name, tensor in saved.tensors.items() if name.endswith("lora_E")}) == [0, 3]
    assert_close(logits(flow("llama", TWO), saved, tokens), expected, "a folder")
    saved.save(tmp_path / "ours")
    assert_close(loaded("llama", tmp_path / "ours")(tokens).logits, expected, "a folder, written")


@torch.no_grad()
def test_live_scales_of_another_type(tmp_path: Path) -> None:
    model, tokens = tuned("llama", config("llama", "LOHA")), ids(B, S)
    for name, module in model.named_modules():
        if hasattr(module, "set_scale") and "layers.2" in name:
            module.set_scale("default", 3)
    expected, adapter = model(tokens).logits, kf.adapters.read(model)
    assert_close(logits(flow("llama", TWO), adapter, tokens), expected)
    adapter.save(tmp_path)
    assert_close(loaded("llama", tmp_path)(tokens).logits, expected, "written")
    model = tuned("llama", config("llama", "ADALORA"))
    next(module for module in model.modules() if hasattr(module, "lora_E")).scaling["default"] = 2.0
    with pytest.raises(UnsupportedError, match="scales or ranknum of its own"):
        kf.adapters.read(model)


def test_what_another_type_lacks_is_said(tmp_path: Path) -> None:
    drawn = peft.VeraConfig(r=5, target_modules=["v_proj"], save_projection=False, **CAUSAL)
    with pytest.raises(UnsupportedError, match="has no base_model.vera_A.*save_projection=True"):
        kf.adapters.read(tuned("llama", drawn))
    wide = tuned("llama", peft.VeraConfig(r=5, target_modules=["v_proj", "down_proj"], **CAUSAL))
    with pytest.raises(ShapeError, match=r"v_proj.*in = \d+, expected 32"):
        logits(flow("llama"), kf.adapters.read(wide), ids(1, 2))
    for kind, changed, words in (
        ("LOKR", {"alpha": "much"}, "the config's alpha is 'much'"),
        ("LOHA", {"rank_pattern": {"(": 1}}, "rank_pattern is not a dict of regular expressions"),
        ("LOKR", {"rank_pattern": {".*": 0}}, "the config's r is 0"),
        ("ADALORA", {"init_r": None}, "the config's init_r is None"),
        ("CARTRIDGE", {"num_frozen_tokens": P + 1}, "num_frozen_tokens is 4, of 3 tokens"),
    ):
        tuned("llama", config("llama", kind)).save_pretrained(tmp_path / kind)
        held = json.loads((tmp_path / kind / CONFIG).read_text())
        (tmp_path / kind / CONFIG).write_text(json.dumps(held | changed))
        with pytest.raises(ModelError, match=words):
            kf.adapters.read(tmp_path / kind)
    adapter = kf.adapters.read(tuned("llama", config("llama", "LOKR")))
    whole = dict(adapter.tensors)
    for name in [name for name in whole if ".lokr_w2" in name][:1]:
        adapter.tensors.pop(name)
        adapter.save(tmp_path / "less")
        with pytest.raises(ModelError, match=rf"has no tensor '{name}"):
            kf.adapters.read(tmp_path / "less")


# ---- every type --------------------------------------------------------------------------------------------------


def test_every_type_of_pefts_is_carried_or_refused() -> None:
    assert CARRIED.keys() | REFUSED.keys() == {kind.value for kind in peft.PeftType}
    assert not CARRIED.keys() & REFUSED.keys()
    assert KINDS.keys() == CARRIED.keys()
    assert all(KINDS[name].kwarg == row.kwarg for name, row in CARRIED.items())


@pytest.mark.parametrize("kind", [kind.value for kind in peft.PeftType if kind.value not in CARRIED])
def test_a_type_that_is_not_carried_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    tuned("llama", peft.LoraConfig(target_modules=["v_proj"])).save_pretrained(tmp_path)
    held = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(held | {"peft_type": kind}))
    with pytest.raises(UnsupportedError) as refused:
        kf.adapters.read(tmp_path)
    assert f"peft_type {kind!r}: {REFUSED[kind]}; carried are LORA, IA3" in str(refused.value)


# ---- from nothing ------------------------------------------------------------------------------------------------


def peft_new(family: str, kind: str, dtype: torch.dtype, seed: int = 0, tasks: int = 1) -> Any:
    """PEFT's model with new adapters, after ``torch.manual_seed``."""
    inner = {"feedforward_modules": [INNER[family]]} if kind == "ia3" else {"r": 4, "lora_alpha": 6}
    made = (peft.IA3Config if kind == "ia3" else peft.LoraConfig)(**both(family), **turned(family), **inner)
    base: Any = copy.deepcopy(huggingface(family, dtype))
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(base, made).eval()
    for number in range(1, tasks):
        model.add_adapter(str(number), copy.deepcopy(made))
    return model


def our_new(family: str, kind: str, dtype: torch.dtype = torch.float32, seed: Any = 0, **more: Any) -> Any:
    options = {"feedforward": INNER[family]} if kind == "ia3" else {"rank": 4, "alpha": 6}
    targets = [INNER[family], OUTER[family]]
    if family == "gpt2":
        targets = ["mlp.c_proj", "attn.c_attn"]
        options = {"feedforward": "mlp.c_proj"} if kind == "ia3" else options
    return kf.adapters.new(kind, flow(family, TWO, dtype), targets=targets, seed=seed, **options, **more)


@pytest.mark.parametrize("kind", ["lora", "ia3"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_tensors_are_pefts_to_the_bit(family: str, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        theirs = kf.adapters.read(peft_new(family, kind, dtype))
        ours = our_new(family, kind, dtype)
        assert_same_tensors(ours, theirs)
        assert [t.dtype for t in ours.parameters()] == [t.dtype for t in theirs.parameters()]
        assert all(tensor.is_leaf and tensor.requires_grad for tensor in ours.parameters())
    torch.manual_seed(0)
    for seed in (None, torch.Generator().manual_seed(0)):
        assert_same_tensors(our_new(family, kind, dtype, seed=seed), theirs)
    half = our_new(family, kind, dtype=torch.float32)
    assert_same_tensors(our_new(family, kind, seed=0), half)


@pytest.mark.parametrize("family", ["opt", "falcon", *(pytest.param(name, marks=pytest.mark.rest) for name in CONFIGS)])
def test_new_tensors_of_every_family_are_pefts(family: str) -> None:
    """At all projections that every layer has: they are drawn in the order in which the model has them."""
    remote, modules = flow(family), dict(huggingface(family).named_modules())
    ends: Any = remote.ends
    shared = [
        name
        for name in remote.projections()
        if all(f"{ends.layers_name}.{layer}.{name}" in modules for layer in range(L))
    ]
    ours = kf.adapters.new("lora", remote, targets=shared[::-1], seed=3)
    targets = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in ours.tensors))
    base: Any = copy.deepcopy(huggingface(family))
    torch.manual_seed(3)
    theirs: Any = peft.get_peft_model(base, peft.LoraConfig(target_modules=targets, **turned(family)))
    assert_same_tensors(ours, kf.adapters.read(theirs))
    with torch.no_grad():
        assert_bits(logits(remote, ours, ids(2, S)), logits(remote, {}, ids(2, S)), "as it was")


@pytest.mark.parametrize("kind, family", [("lora", "llama"), ("ia3", "llama"), ("lora", "gpt2")])
def test_twenty_steps_of_a_new_adapter_are_pefts_own(family: str, kind: str, tmp_path: Path) -> None:
    model, tokens, remote = peft_new(family, kind, torch.float32), ids(B, S), flow(family, TWO)
    adapter: Any = our_new(family, kind)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    ours, theirs = (torch.optim.Adam(one, lr=0.01) for one in (adapter.parameters(), trained))
    losses: list[tuple[Tensor, Tensor]] = []
    for _ in range(20):
        found = loss(logits(remote, adapter, tokens), tokens), loss(model(tokens).logits, tokens)
        for one, optimizer in zip(found, (ours, theirs), strict=True):
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
        losses.append((found[0].detach(), found[1].detach()))
    assert losses[-1][1] < losses[0][1] - 0.01
    assert_bits(*(torch.stack(side) for side in zip(*losses, strict=True)), "losses")
    adapter.save(tmp_path)
    with torch.no_grad():
        assert_bits(loaded(family, tmp_path)(tokens).logits, logits(remote, adapter, tokens), "saved")


def test_new_adapters_for_several_tasks_are_rows(tmp_path: Path) -> None:
    model, tokens, remote = peft_new("llama", "lora", torch.float32, tasks=3), ids(B, S), flow("llama", TWO)
    tasks: Any = our_new("llama", "lora", tasks=3)
    for name, adapter in zip(("default", "1", "2"), tasks.adapters, strict=True):
        assert_same_tensors(adapter, kf.adapters.read(model, adapter=name))
    assert len(tasks.parameters()) == 3 * len(tasks.adapters[0].parameters())
    optimizer, mixed = torch.optim.Adam(tasks.parameters(), lr=0.05), tasks.take([2, None, 0, 2])
    for _ in range(2):
        optimizer.zero_grad()
        loss(logits(remote, mixed, tokens), tokens).backward()
        optimizer.step()
    assert [bool(adapter.tensors[next(iter(adapter.tensors))].grad.any()) for adapter in tasks.adapters[::2]] == [
        True
    ] * 2
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in tasks.adapters[1].parameters())
    kf.adapters.write(tmp_path, tasks, base_model="mine")
    again = kf.adapters.read_rows(tmp_path)
    with torch.no_grad():
        out = logits(remote, again.take([2, None, 0, 2]), tokens)
        assert_bits(out, logits(remote, mixed, tokens), "read")
        for row, folder in ((0, "2"), (2, "0")):
            expected = loaded("llama", tmp_path / folder)(tokens[row : row + 1]).logits
            assert_near(out[row : row + 1], expected, f"PEFT reads {folder}")
    assert not any(tensor.requires_grad for tensor in again.parameters())
    assert all(tensor.requires_grad for tensor in again.requires_grad_().parameters())
    for number in (3, -1, True, "1"):
        with pytest.raises(KwargError, match=r"take got .*; there are adapters 0:3, and None for none"):
            tasks.take([number])
    with pytest.raises(KwargError, match="holds 3 adapters, these are 2"):
        tasks.take([0, 1]).save(tmp_path)
    with pytest.raises(ModelError, match=r"it holds 3 adapters: kf\.adapters\.read_rows\(folder\)"):
        kf.adapters.read(tmp_path)
    with pytest.raises(ModelError, match=r"no adapters in subfolders 0, 1, …; kf\.adapters\.read reads one"):
        kf.adapters.read_rows(tmp_path / "0")


def test_new_adapters_of_some_layers_and_of_a_slice() -> None:
    model: Any = peft.get_peft_model(
        copy.deepcopy(huggingface("llama")),
        peft.LoraConfig(
            target_modules=list(flow("llama").projections()),
            layers_to_transform=[1, 3],
            use_rslora=True,
            lora_alpha=3,
            **CAUSAL,
        ),
    )
    expected = kf.adapters.read(model)
    for remote, layers in ((flow("llama"), [3, 1]), (flow("llama")[1:], [1, 3])):
        adapter = kf.adapters.new("lora", remote, targets="all-linear", layers=layers, alpha=3, rslora=True)
        assert adapter.tensors.keys() == expected.tensors.keys()
        assert adapter.scale == expected.scale == 3 / 8**0.5  # type: ignore[attr-defined]
    assert repr(kf.adapters.new("ia3", flow("llama")[2:], targets="v_proj")).startswith(
        "IA3(self_attn.v_proj of layers 2:4; "
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_scale_and_what_a_merge_would_add(family: str, tmp_path: Path) -> None:
    model, tokens = tuned(family, peft_new(family, "lora", torch.float32).peft_config["default"]), ids(B, S)
    adapter: Any = kf.adapters.read(model)
    assert adapter.scale == 1.5
    deltas = adapter.delta_weights()
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            assert_bits(deltas.pop(f"{name}.weight"), module.get_delta_weight("default"), name)
    assert not deltas
    adapter.scale = 0.25
    merged: Any = copy.deepcopy(huggingface(family))
    for name, delta in adapter.delta_weights().items():
        merged.get_parameter(name).add_(delta)
    assert_near(logits(flow(family, TWO), adapter, tokens), merged(tokens).logits, "merged")
    adapter.save(tmp_path)
    assert kf.adapters.read(tmp_path).scale == 0.25  # type: ignore[attr-defined]
    adapter.scales[next(iter(adapter.scales))] = 2.0
    with pytest.raises(KwargError, match=r"has scales 0\.25, 2; see adapter\.scales"):
        _ = adapter.scale
    with pytest.raises(UnsupportedError, match="IA3 adds nothing to weights"):
        our_new(family, "ia3").delta_weights()


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "VERA", "ADALORA"])
def test_what_a_merge_of_another_type_would_add(kind: str) -> None:
    model = tuned("llama", config("llama", kind))
    deltas = kf.adapters.read(model).delta_weights()
    for name, module in model.base_model.model.named_modules():
        if f"{name}.weight" in deltas:
            assert_close(deltas.pop(f"{name}.weight"), module.get_delta_weight("default").detach(), name)
    assert not deltas


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target": (
        {"targets": ["q_prj"]},
        UnknownKwarg,
        "targets: no projection 'q_prj'; these.*self_attn.v_proj.*'q_proj'",
    ),
    "no target": ({"targets": []}, KwargError, "targets is empty; these layers have self_attn.q_proj"),
    "a number": ({"targets": 3}, KwargError, "targets=3; give names of self_attn.q_proj.*or 'all-linear'"),
    "rank": ({"rank": 0}, KwargError, "rank=0; give a number from 1 on"),
    "half a rank": ({"rank": 2.5}, KwargError, "rank=2.5"),
    "alpha": ({"alpha": "much"}, KwargError, "alpha='much'; give a number"),
    "layer": ({"layers": [1, 4]}, KwargError, "layers names layer 4; this flow has layers 0:4"),
    "layers": ({"layers": [1, 1]}, KwargError, "layers=.*each once"),
    "tasks": ({"tasks": 0}, KwargError, "tasks=0; give a number from 1 on"),
    "seed": ({"seed": "today"}, KwargError, "seed='today'; give a number, a torch.Generator"),
    "dtype": ({"dtype": torch.int8}, KwargError, "dtype=torch.int8; give one of floating point"),
    "option": ({"ranks": 3}, KwargError, "takes no 'ranks'; it takes rank, alpha, rslora. Did you mean 'rank'"),
    "of ia3": ({"kind": "ia3", "rank": 3}, KwargError, "takes no 'rank'; it takes feedforward"),
    "feedforward": (
        {"kind": "ia3", "feedforward": "down_proj"},
        UnknownKwarg,
        "feedforward, of the targets: no projection 'down_proj'; these layers have self_attn.v_proj",
    ),
    "kind": ({"kind": "lor"}, KwargError, "makes 'lora' and 'ia3', not 'lor'. Did you mean 'lora'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_made_is_said_with_what_there_is(case: str) -> None:
    given, error, words = WRONG[case]
    options = {"kind": "lora", "targets": "v_proj", **given}
    with pytest.raises(error, match=words):
        kf.adapters.new(options.pop("kind"), flow("llama"), **options)


def test_an_ambiguous_target_is_named_in_full() -> None:
    with pytest.raises(KwargError, match="'c_proj' may mean 'attn.c_proj' or 'mlp.c_proj'; give the full name"):
        kf.adapters.new("lora", flow("gpt2"), targets="c_proj")
    with pytest.raises(SpanError, match="lora names layer"):
        flow("llama")[:2](random(B, S, 32), **kf.adapters.new("lora", flow("llama"), targets="v_proj"))
