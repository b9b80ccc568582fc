"""Every family and every variant of tests/families/configs.py against transformers, check by check: a row each.

``python -m benchmarks.families`` prints the same checks as a table.
"""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp

import kwflow as kf
from kwflow.blocks.kv import KV
from kwflow.errors import BlockError, KwargError, UnsupportedError
from kwflow.models.families import FAMILIES, family_of
from kwflow.models.files.checkpoint import Checkpoint, layer_count
from kwflow.models.spans import load_span
from tests.doubles.workers import workers_of
from tests.families.configs import CONFIGS, HEADS, MAX_LENGTH, config
from tests.families.marks import marks
from tests.families.table import (
    CHECKS,
    IDS,
    MASK,
    NOT_IN_FLOAT64,
    REAL,
    B,
    Compared,
    D,
    L,
    S,
    crops,
    distributed,
    higher_order,
)
from tests.oracle import assert_bits, assert_close, residual
from tests.oracle.tiny import (
    ONE,
    TWO,
    derivable,
    flow,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
    span,
)

QUICK = ["gemma3_text", "bloom", "opt", "gpt_oss"]


# other code than llama's, and not in tests/kwargs/test_every_kwarg.py; ``python -m benchmarks.families`` shows the rest
DERIVED = [
    *("gemma2", "gemma3_text", "gpt_neox", "gpt_neo", "gptj", "phi", "phi3_longrope", "stablelm", "cohere", "granite"),
    *("smollm3", "glm4", "falcon", "falcon_alibi", "opt", "mpt", "xglm", "bitnet", "diffllama"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "phimoe"),
]


def rows(quick: list[str], names: list[str] | None = None) -> Any:
    """Every row; those that are not quick are the breadth."""
    marked = [pytest.param(n, marks=marks(n, quick, ())) for n in names or CONFIGS]
    return pytest.mark.parametrize("name", marked)


def test_every_family_has_a_small_config() -> None:
    assert {config(name).model_type for name in CONFIGS} == set(FAMILIES)


# ---- the table


@rows(QUICK)
@pytest.mark.parametrize("check", CHECKS)
def test_a_family_is_transformers_own(name: str, check: str) -> None:
    expect(check, name, CHECKS[check](name, torch.float32))


@pytest.mark.parametrize("check", ["forward", "cached decode", "gradient"])
@rows(["gemma2"], ["gpt2", "gemma2", "qwen2", "deepseek_v3"])
def test_families_in_bfloat16(name: str, check: str) -> None:
    expect(check, name, CHECKS[check](name, torch.bfloat16))


def expect(check: str, name: str, found: Compared) -> None:
    """To the bit, but for gradients, which are summed in another order, and where Hugging Face's own sliding cache
    drops columns: attention over fewer columns is another sum."""
    exact = check != "gradient" and not (check == "cached decode" and crops(name))
    assert found
    for what, ours, expected in found:
        (assert_bits if exact else assert_close)(ours, expected, f"{name}: {what}")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of deepseek's router, locally too
@rows(["gpt_neo"], DERIVED)
def test_derivatives_of_any_order(name: str) -> None:
    """jvp, vmap, vmap of grad, and both second orders, in float64; what torch cannot derive is refused with why."""
    if name in NOT_IN_FLOAT64:
        for run in (residual, None):
            with pytest.raises((RuntimeError, BlockError), match=NOT_IN_FLOAT64[name]):
                hidden = random(B, S, D, dtype=torch.float64)
                flow(name, ONE, torch.float64)(hidden) if run is None else run(derivable(name), hidden)
        return
    for what, ours, expected in higher_order(name):
        assert_close(ours, expected, f"{name}: {what}")


@rows(["gpt_oss"], ["mixtral", "gpt_oss"])
def test_a_mixture_has_derivatives_in_float32_too(name: str) -> None:
    """Values and gradients by the grouped kernel, the rest by another way: the same numbers."""
    remote, x, v = flow(name, TWO), random(2, 4, D), random(D, seed=1)

    def fn(v: Tensor) -> Tensor:
        return remote(x, steer={0: v}).square().sum()

    leaf = v.clone().requires_grad_()
    fn(leaf).backward()
    assert leaf.grad is not None
    value, slope = jvp(fn, (v,), (leaf.grad,))  # along itself: along ones the sum cancels to a twelfth of its terms
    assert_close(slope, leaf.grad @ leaf.grad)
    assert_close(value, fn(v))
    assert_close(torch.func.vmap(fn)(v[None].expand(2, -1))[1], fn(v))


# ---- kwargs that a family takes, and those that it would ignore


@rows(QUICK)
def test_position_ids_are_literal_or_refused(name: str) -> None:
    jumps = positions_of(MASK) * 2 + torch.tensor([[5], [0], [1], [2]])
    hidden, remote = random(B, S, D), flow(name, TWO)
    why = family_of(config(name)).positions
    if why:
        with pytest.raises(KwargError, match=r"position_ids.*(learned|ALiBi)"):
            remote(hidden, position_ids=jumps)
        assert "position_ids" not in remote.inputs("w1 w2")
        return
    out = remote(hidden, position_ids=jumps, attention_mask=MASK)
    assert_bits(out, residual(huggingface(name), hidden, position_ids=jumps, attention_mask=MASK))
    assert_bits(remote(hidden, position_ids=jumps), residual(huggingface(name), hidden, position_ids=jumps))


@rows(QUICK)
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_4d_mask_is_literal_or_refused(name: str, kind: str) -> None:
    """Every layer gets it as it is, sliding ones too; a float one is a bias (its gradient: tests/kwargs/suite.py)."""
    seen = torch.ones(S, S, dtype=torch.bool).tril() & REAL[:, None, None, :] | torch.eye(S, dtype=torch.bool)
    hidden, remote = random(B, S, D), flow(name, TWO)
    if family_of(config(name)).four_d:
        with pytest.raises(KwargError, match="4-D attention_mask is not taken"):
            remote(hidden, attention_mask=seen)
        return
    lowest = torch.finfo(torch.float32).min
    bias = torch.where(seen, random(B, HEADS, S, S, seed=3), lowest)
    additive = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    given, literal = (bias, bias) if kind == "float" else (seen, additive)
    assert_close(remote(hidden, attention_mask=given), residual(huggingface(name), hidden, attention_mask=literal))


@rows(["opt", "gemma2"])
@torch.no_grad()
def test_the_model_s_forward_is_transformers_own(name: str) -> None:
    """Without position_ids: transformers' forward counts columns, and opt's the unmasked ones."""
    for mask in (MASK, None):
        ours = distributed(name, torch.float32)(input_ids=IDS, attention_mask=mask).logits
        expected = huggingface(name)(input_ids=IDS, attention_mask=mask).logits
        assert_bits(ours[REAL], expected[REAL], f"mask {mask is not None}")


@pytest.mark.slow
@torch.no_grad()
def test_longrope_changes_its_factors_while_generating() -> None:
    """Past its original length, and back: a call keeps nothing of the one before."""
    ours, theirs = distributed("phi3_longrope", torch.float32), huggingface("phi3_longrope")
    for seq in (28, 40, 28):
        call = {"input_ids": ids(2, seq), "attention_mask": left_padded([0, 3], seq), "max_new_tokens": 10}
        assert_bits(ours.generate(**call, do_sample=False), theirs.generate(**call, do_sample=False))


# ---- what a row says


@rows(QUICK)
def test_points_are_where_the_row_says(name: str) -> None:
    """attn and mlp are modules of every layer; all heads, side by side, enter out."""
    spec, family = span(name, 0, L), family_of(config(name))
    for block in spec.blocks:
        attn, mlp, out = (block.module.get_submodule(path) for path in (family.attn, family.mlp, family.out))
        entered: list[Tensor] = []
        ran: list[str] = []
        hooks = [
            out.register_forward_pre_hook(lambda _, args, seen=entered: seen.append(args[0])),
            attn.register_forward_hook(lambda *_, seen=ran: seen.append("attn")),
            mlp.register_forward_hook(lambda *_, seen=ran: seen.append("mlp")),
        ]
        block(block.params, random(2, 3, D))
        for hook in hooks:
            hook.remove()
        assert ran == ["attn", "mlp"]
        assert [tuple(x.shape) for x in entered] == [(2, 3, HEADS * spec.schema.sizes["head_dim"])]


@rows(QUICK)
def test_a_session_holds_what_was_counted(name: str) -> None:
    """Bytes of keys and values, as the budget is told before there are any."""
    remote = make_flow(name, ONE)
    (served,), used = workers_of(remote).served, dict[int, int]()
    write = KV.write

    def spy(self: KV, layer: int, *args: Any) -> Any:
        pair = write(self, layer, *args)
        used[layer] = sum(tensor.untyped_storage().nbytes() for tensor in pair)  # of which the pair is a view
        return pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KV, "write", spy)
        with remote.session(MAX_LENGTH // 2) as session:
            session.step(random(B, 3, D))
    assert len(used) == L and sum(used.values()) == served.kv_size(B, MAX_LENGTH // 2, L)


@rows(["opt", "gpt_oss"], ["opt", "mpt", "gemma2", "mixtral", "falcon", "gpt_neo", "deepseek_v3", "gpt_oss"])
def test_exact_match_knows_every_family(name: str) -> None:
    remote = flow(name, TWO)
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    steer = {2: random(D, seed=5)}
    for reference in (huggingface(name), kf.stream(folder(name))):
        assert kf.verify.exact_match(remote, reference, **x, steer=steer).bitwise


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_reads_its_own_tensors_and_has_transformers_bits(name: str, dtype: torch.dtype) -> None:
    """Files of mixtures hold a tensor per expert; the layer holds one for all."""
    where = folder(name, dtype)
    spec, whole = load_span(where, 2, 3), huggingface(name, dtype, dtype)
    checkpoint = Checkpoint(where)
    own = {n: t for n, t in checkpoint.read(checkpoint.names()).items() if ".layers.2." in n}
    if name in ("mixtral", "qwen3_moe"):
        assert any(".experts.3." in n for n in own), "this checkpoint has no tensor per expert: nothing is converted"
    heads = sum(min(4096, t.numel() * t.element_size()) for t in checkpoint.read(checkpoint.names()).values())
    assert spec.identity["bytes_read"] == heads + sum(t.numel() * t.element_size() for t in own.values())
    theirs = dict(whole.model.layers[2].named_parameters())  # type: ignore[index, union-attr]
    assert theirs.keys() == spec.params[0].keys()
    for key, tensor in spec.params[0].items():
        assert_bits(tensor, theirs[key], key)


def test_what_transformers_keeps_in_float32_stays_so() -> None:
    """gpt_oss has its norms in float32 when the rest is float16."""
    spec, whole = load_span(folder("gpt_oss"), 1, 2, dtype="float16"), huggingface("gpt_oss", torch.float16)
    theirs = dict(whole.model.layers[1].named_parameters())  # type: ignore[index, union-attr]
    assert {t.dtype for t in theirs.values()} == {torch.float16, torch.float32} and spec.dtype is torch.float16
    for key, tensor in spec.params[0].items():
        assert_bits(tensor, theirs[key], key)


def test_a_checkpoint_without_an_expert_is_refused(tmp_path: Path) -> None:
    import safetensors.torch

    where = folder("mixtral")
    tensors = Checkpoint(where).read(Checkpoint(where).names())
    gone = next(n for n in tensors if ".layers.1." in n and ".experts.2." in n)
    safetensors.torch.save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((where / "config.json").read_text())
    with pytest.raises(kf.errors.ModelError):
        load_span(tmp_path, 1, 2)


# ---- what is not supported says why


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("t5", "encoder-decoder"),
        ("gemma3", r"gemma3_text\) is nested"),
        ("mamba", "keep a state"),
        ("jamba", r"keep a state \(linear_attention, mamba\)"),
        ("qwen3_next", r"keep a state \(linear_attention\)"),
        ("bert", "not supported"),
        ("vit", "no causal language model"),
        ("lama", "does not know it.*Did you mean 'llama'"),
    ],
)
def test_an_unsupported_family_says_why(model_type: str, why: str, tmp_path: Path) -> None:
    """At connect, and where a worker starts."""
    import safetensors.torch

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=why) as raised:
        load_span(tmp_path, 0, 1)
    assert f"model_type {model_type!r} is not supported" in str(raised.value) and "bloom, " in str(raised.value)
    with pytest.raises(UnsupportedError, match=why):
        kf.connect(tmp_path)


@rows(QUICK)
def test_layers_are_counted_without_transformers(name: str) -> None:
    assert layer_count(folder(name)) == L


def test_the_oracle_takes_what_transformers_takes() -> None:
    """derivable() is the same model: in float64, of the same weights."""
    for name in ("deepseek_v3", "phi3_longrope"):
        hidden = random(2, 4, D)
        wide = residual(derivable(name), hidden.double())
        assert (wide - residual(huggingface(name), hidden)).abs().max() < 1e-4
    assert "position_ids" in inspect.signature(huggingface("llama").forward).parameters


@pytest.mark.swarm
@pytest.mark.rest
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_two_processes_are_one_model(name: str) -> None:
    """Mixed kinds of layers, and experts, over libp2p: to the bit, and the ids of beams."""
    with kf.local_swarm(folder(name), workers=2) as swarm:
        with kf.connect(swarm.model, peers=swarm.peers) as remote:
            x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
            given = {key: value for key, value in x.items() if key != "hidden"}
            assert_bits(remote(**x), residual(huggingface(name), x["hidden"], **given))
            ours = kf.AutoDistributedModelForCausalLM.from_pretrained(swarm.model, flow=remote)
            call = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
            assert_bits(ours.generate(**call), huggingface(name).generate(**call))
