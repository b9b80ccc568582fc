"""Workers with quantized weights: the bits and gradients of transformers' own, as pure functions."""

# B batch, S seq, D hidden

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.span import SpanSpec, chain
from kwflow.client.flow import Flow
from kwflow.errors import KwargError, ModelError, UnsupportedError
from kwflow.models import quantize
from kwflow.models.spans import load_span
from kwflow.research.reference import as_reference
from kwflow.swarm.connect import in_process
from kwflow.swarm.local import local_swarm
from kwflow.worker.server import Served
from tests import oracle
from tests.families.marks import every_family, families, quickly
from tests.oracle import assert_bits, assert_close, assert_near, tiny

MODES = quantize.MODES
DTYPES = quickly([torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16])
BATCH, SEQ = 3, 5
MASK = tiny.left_padded([0, 1, 3], SEQ)


@functools.cache
def span(family: str, mode: str, start: int, stop: int, dtype: torch.dtype = torch.float32) -> SpanSpec:
    return load_span(tiny.folder(family), start, stop, dtype=dtype, quantize=mode)


def quantized_flow(
    family: str, mode: str, cuts: tuple[int, ...] = tiny.TWO, dtype: torch.dtype = torch.float32, **limits: int
) -> Flow:
    spans = zip((0, *cuts), cuts, strict=False)
    served = [Served(span(family, mode, start, stop, dtype), model=family, **limits) for start, stop in spans]
    return Flow(tiny.ends(family), in_process(served), (0, tiny.LAYERS))


@functools.cache
def reference(family: str, mode: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model quantized by transformers."""
    from transformers import AutoModelForCausalLM

    # bitsandbytes says at every int8 product that it casts to float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(
        tiny.folder(family), dtype=dtype, quantization_config=quantize.config(mode, dtype)
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # such a CPU computes in bfloat16 when nothing is derived
            module.support_avx512bf16_for_cpu = False
    return model.eval().requires_grad_(False)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, a steering vector, deep prompts."""
    hidden = tiny.random(BATCH, SEQ, tiny.HIDDEN, seed=1)
    hidden[0, :, 5] *= 40  # what LLM.int8() would compute apart
    prompts = tiny.random(tiny.LAYERS, 1, 2, tiny.HIDDEN, seed=2)
    return hidden.to(dtype), tiny.random(tiny.HIDDEN, seed=3).to(dtype), prompts.to(dtype)


def expected(model: nn.Module, hidden: Tensor, vector: Tensor, prompts: Tensor) -> Tensor:
    return oracle.residual(
        model, hidden, steer={1: vector}, prompts=dict(enumerate(prompts)), attention_mask=MASK.to(torch.long)
    )


# ---------------------------------------------------------------- values and gradients against transformers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_family
@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_of_the_model_that_transformers_quantized(mode: str, family: str, dtype: torch.dtype) -> None:
    hidden, vector, prompts = inputs(dtype)
    with torch.no_grad():
        want = expected(reference(family, mode, dtype), hidden, vector, prompts)
    with quantized_flow(family, mode, dtype=dtype) as flow:
        assert_bits(flow(hidden, attention_mask=MASK, steer={1: vector}, prompts=prompts), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_family
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_model_that_transformers_quantized(
    mode: str, family: str, dtype: torch.dtype
) -> None:
    given = [tensor.requires_grad_() for tensor in inputs(dtype)]
    weight = tiny.random(BATCH, SEQ, tiny.HIDDEN, seed=4).to(dtype)
    with quantized_flow(family, mode, cuts=tiny.ONE, dtype=dtype) as flow:
        hidden, vector, prompts = given
        out = flow(hidden, attention_mask=MASK, steer={1: vector}, prompts=prompts)
        ours = torch.autograd.grad(out, given, weight)
    theirs = torch.autograd.grad(expected(reference(family, mode, dtype), *given), given, weight)
    for mine, want, name in zip(ours, theirs, ("hidden", "steer", "prompts"), strict=True):
        if family == "bloom" or name == "prompts":  # bloom's gelu and the oracle's prompts are derived otherwise
            assert_close(mine, want, name)
        else:
            assert_bits(mine, want, name)


@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_do_not_depend_on_the_cuts(mode: str) -> None:
    hidden, vector, prompts = inputs()
    vector.requires_grad_()
    found = []
    for cuts, tokens in ((tiny.ONE, 1 << 16), (tiny.EACH, SEQ)):  # all rows at once, and one row at a time
        with quantized_flow("llama", mode, cuts, batch_tokens=tokens) as flow:
            out = flow(hidden, attention_mask=MASK, steer={1: vector}, prompts=prompts)
            found.append([out, *torch.autograd.grad(out.sin().sum(), vector)])
    for ours, want in zip(*found, strict=True):
        assert_near(ours, want)


@families(["llama", "gpt2"])
@pytest.mark.parametrize("mode", MODES)
def test_decoding_with_keys_and_values_gives_the_same_bits(mode: str, family: str) -> None:
    from transformers import DynamicCache

    hidden, vector, _ = inputs()
    cache, model = DynamicCache(), reference(family, mode)
    with quantized_flow(family, mode) as flow, flow.session(max_length=SEQ) as session, torch.no_grad():
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            ours = session.step(hidden[:, start:stop], attention_mask=MASK[:, :stop], steer={1: vector})
            # transformers takes positions from the columns, as a session does
            want = oracle.residual(
                model, hidden[:, start:stop], steer={1: vector}, attention_mask=MASK[:, :stop], cache=cache
            )
            assert_bits(ours, want, f"columns {start}:{stop}")


@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_local_ids(mode: str) -> None:
    ids = tiny.ids(2, 4)
    flow = Flow(tiny.ModelEnds(tiny.folder("llama")), in_process([Served(span("llama", mode, 0, 4))]), (0, 4))
    with flow:
        model = kf.AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=flow)
        ours = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, reference("llama", mode).generate(ids, max_new_tokens=6, do_sample=False))


# ---------------------------------------------------------------- every derivative


@families(["llama", "gpt2"])
@pytest.mark.parametrize("mode", quickly(["nf4"], MODES))
def test_jvp_vmap_and_second_order_equal_the_local_ones(mode: str, family: str) -> None:
    hidden, vector, _ = inputs()
    local = chain(span(family, mode, 0, tiny.LAYERS).blocks)
    params = span(family, mode, 0, tiny.LAYERS).params
    with quantized_flow(family, mode) as flow:
        sides: list[Any] = [flow, lambda hidden, **kwargs: local(params, hidden, **kwargs)]
        losses = [lambda v, side=side: side(hidden, steer={1: v}).sin().sum() for side in sides]
        with sdpa_kernel(SDPBackend.MATH):
            for transform in (
                torch.func.grad,
                lambda f: lambda v: torch.func.jvp(f, (v,), (v.cos(),))[1],
                lambda f: lambda v: torch.func.vmap(f)(torch.stack([v, 2 * v])),
                lambda f: lambda v: torch.func.jvp(torch.func.grad(f), (v,), (v.cos(),))[1],
                lambda f: lambda v: torch.func.vmap(torch.func.grad(f))(torch.stack([v, 2 * v])),
            ):
                ours, want = (transform(loss)(vector) for loss in losses)
                assert_close(ours, want)


def test_derivatives_of_nf4_are_those_of_the_dequantized_weights() -> None:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    plain = copy.deepcopy(reference("gpt2", "nf4"))
    for name, module in list(plain.named_modules()):
        if type(module).__name__ == "Linear4bit":
            linear = nn.Linear(module.in_features, module.out_features)
            linear.weight, linear.bias = nn.Parameter(dequantize_bnb_weight(module.weight)), module.bias
            plain.set_submodule(name, linear)
    hidden, vector, _ = inputs()

    def loss(side: Any, v: Tensor) -> Tensor:
        return side(v).sin().sum()

    with quantized_flow("gpt2", "nf4") as flow, sdpa_kernel(SDPBackend.MATH):
        sides = (lambda v: flow(hidden, steer={1: v}), lambda v: oracle.residual(plain, hidden, steer={1: v}))
        ours, want = (
            torch.func.jvp(torch.func.grad(functools.partial(loss, side)), (vector,), (vector.cos(),))[1]
            for side in sides
        )
    assert_close(ours, want)


@pytest.mark.parametrize("mode", MODES)
def test_int8_in_jvp_agrees_with_its_vjp(mode: str) -> None:
    hidden, vector, _ = inputs()
    with quantized_flow("llama", mode) as flow:
        loss = lambda v: flow(hidden, steer={1: v}).sin().sum()  # noqa: E731
        gradient = torch.func.grad(loss)(vector)
        forward = torch.func.jvp(loss, (vector,), (gradient,))[1]  # along itself: the sum does not cancel
        assert_close(forward, gradient @ gradient)


# ---------------------------------------------------------------- pure functions


@families(["llama", "gpt2"])
@pytest.mark.parametrize("mode", MODES)
def test_a_block_is_a_function_of_its_params(mode: str, family: str) -> None:
    (first, _), (second, theirs) = kf.load_blocks(tiny.folder(family), 0, 2, quantize=mode)
    hidden, vector, _ = inputs()
    held = {name: tensor.clone() for name, tensor in theirs.items()}
    with torch.no_grad():
        assert_bits(first(held, hidden, steer=vector), second(theirs, hidden, steer=vector))
    hidden.requires_grad_()
    second(theirs, hidden).sum().backward()
    for name, tensor in theirs.items():
        assert tensor.dtype == held[name].dtype and torch.equal(tensor, held[name]), name


def test_the_projections_take_half_a_byte_a_number_or_one() -> None:
    def size(mode: str | None) -> tuple[int, int]:
        params = load_span(tiny.folder("llama"), 0, 1, quantize=mode).params[0]
        bytes_of = {name: tensor.numel() * tensor.itemsize for name, tensor in params.items() if "norm" not in name}
        return sum(bytes_of.values()), len(params)

    numbers = size(None)[0] // 4
    assert size("nf4") == (numbers // 2 + numbers // 64 * 4, 16)
    outputs = 32 + 2 * 16 + 32 + 2 * 48 + 32
    assert size("int8") == (numbers + 4 * outputs, 16)


# ---------------------------------------------------------------- what is said of it


@pytest.mark.parametrize("mode", MODES)
def test_hello_and_repr_name_the_quantization(mode: str) -> None:
    served = Served(span("llama", mode, 0, 4))
    hello = served.hello()
    served.close()
    assert hello.quantization == hello.fingerprint.quantization == mode
    assert ("float64" in hello.features) == (mode == "nf4")
    assert {"vjp", "jvp", "vmap", "nested"} <= set(hello.features)
    with quantized_flow("llama", mode, dtype=torch.bfloat16) as flow:
        flow(inputs()[0])
        assert repr(flow) == f"Flow({flow.ends.name}, layers 0:4, float32, workers {mode} bfloat16)"


@pytest.mark.parametrize("mode", MODES)
def test_exact_match_is_bitwise_against_the_same_quantized_model(mode: str) -> None:
    hidden, vector, _ = inputs()
    with quantized_flow("llama", mode) as flow:
        for local in (reference("llama", mode), kf.stream(tiny.folder("llama"), quantize=mode)):
            match = kf.verify.exact_match(flow, local, hidden, attention_mask=MASK, steer={1: vector})
            assert match.bitwise, match


@pytest.mark.parametrize("mode", MODES)
def test_exact_match_names_the_quantization_that_differs(mode: str) -> None:
    other = {"int8": "nf4", "nf4": "int8"}[mode]
    hidden, *_ = inputs()
    with quantized_flow("llama", mode) as flow:
        for local, said in ((tiny.huggingface("llama"), "is not quantized"), (reference("llama", other), other)):
            match = kf.verify.exact_match(flow, local, hidden)
            assert match.verdict == "different" and not match
            assert f"runs {mode}, the reference {said}" in match.why
    with tiny.make_flow("llama") as flow:
        match = kf.verify.exact_match(flow, reference("llama", mode), hidden)
        assert f"is not quantized, the reference {mode}" in match.why


def test_float64_tells_noise_from_bug_for_nf4_and_is_refused_for_int8() -> None:
    hidden, *_ = inputs()
    local = chain(span("llama", "nf4", 0, 4).blocks)(span("llama", "nf4", 0, 4).params, hidden)
    with quantized_flow("llama", "nf4") as flow:
        wide = flow.options(dtype="float64")(hidden.double())
        assert wide.dtype is torch.float64
        assert_close(wide.float(), local)
        assert 0 < (wide - local.double()).abs().max() < 1e-4
    with quantized_flow("llama", "int8") as flow:
        with pytest.raises(UnsupportedError, match="runs int8, which has no float64"):
            flow.options(dtype="float64")(hidden.double())
        blocks = kf.load_blocks(tiny.folder("llama"), 0, 1, quantize="int8")
        with pytest.raises(UnsupportedError, match="rounds activations to 8 bits"):
            blocks[0][0](blocks[0][1], hidden.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_match_tells_noise_from_bug_between_nf4_models(dtype: torch.dtype) -> None:
    local = copy.deepcopy(reference("llama", "nf4", dtype))
    local.set_attn_implementation("eager")  # type: ignore[operator]
    hidden, vector, _ = inputs(dtype)
    with quantized_flow("llama", "nf4", dtype=dtype) as flow:
        match = kf.verify.exact_match(flow, local, hidden, steer={1: vector})
        assert match.verdict == "noise", match
        assert "attention sdpa" in match.why
        oracle.layers_of(local)[2].mlp.down_proj.weight.quant_state.absmax[0] *= 1.01  # type: ignore[union-attr]
        assert kf.verify.exact_match(flow, local, hidden).verdict == "different"


def test_exact_match_has_no_fp64_verdict_for_int8() -> None:
    local = copy.deepcopy(reference("llama", "int8"))
    oracle.layers_of(local)[1].input_layernorm.weight.data[0] *= 1.01  # type: ignore[union-attr, index]
    with quantized_flow("llama", "int8") as flow:
        match = kf.verify.exact_match(flow, local, inputs()[0])
    assert match.verdict == "no fp64 verdict"
    assert "runs int8, which has no float64" in match.why


def test_exact_match_names_what_bitsandbytes_does_on_some_cpus() -> None:
    local = copy.deepcopy(reference("llama", "nf4"))
    hidden, *_ = inputs()
    with quantized_flow("llama", "nf4") as flow:
        plans = [flow.plan(hidden, {})]
        assert not kf.verify.differences(plans, as_reference(local), hidden)
        oracle.layers_of(local)[0].mlp.down_proj.support_avx512bf16_for_cpu = True  # type: ignore[union-attr]
        (found,) = kf.verify.differences(plans, as_reference(local), hidden)
    assert "computes the reference's nf4 in bfloat16" in found


def test_a_config_that_no_worker_runs_is_named() -> None:
    from transformers import BitsAndBytesConfig

    class Model(nn.Linear):
        config: Any = type("Config", (), {})()

    model = Model(2, 2)
    said = {
        "int8 with threshold 6": BitsAndBytesConfig(load_in_8bit=True),
        "int8": quantize.config("int8", torch.float32),
        "nf4": quantize.config("nf4", torch.float32),
        "nf4 computed in torch.bfloat16": quantize.config("nf4", torch.bfloat16),
        "fp4": BitsAndBytesConfig(load_in_4bit=True),
    }
    for name, config in said.items():
        model.config.quantization_config = config
        assert quantize.mode_of(model) == name


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'kwflow\[quantized\]'"):
        kf.load_blocks(tiny.folder("llama"), 0, 1, quantize="nf4")


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"quantize='nf8'; give one of int8, nf4\. Did you mean 'nf4'"):
        kf.connect(tiny.folder("llama"), quantize="nf8")
    with pytest.raises(KwargError, match=r"quantize belongs to the workers.*kf.local_swarm\(…, quantize=…\)"):
        kf.connect(tiny.folder("llama"), peers=["/ip4/127.0.0.1/tcp/1/p2p/Qm"], quantize="nf4")


# ---------------------------------------------------------------- real workers


@pytest.mark.slow
@pytest.mark.swarm
def test_quantized_workers_of_the_embedded_model_give_the_local_bits(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    with local_swarm("smollm2-135m", workers=[(0, 3)], dtype="float32", quantize="nf4") as swarm:
        local = AutoModelForCausalLM.from_pretrained(
            smollm2,
            num_hidden_layers=3,
            dtype=torch.float32,
            quantization_config=quantize.config("nf4", torch.float32),
        )
        for module in local.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        with kf.connect(swarm.model, peers=swarm.peers) as flow:
            match = kf.verify.exact_match(flow[0:3], local.eval(), **flow.inputs(["The weather in Paris is"]))
            assert match.bitwise, match


@pytest.mark.swarm
def test_a_worker_says_what_is_wrong_with_its_options() -> None:
    with pytest.raises(ModelError, match="quantize='int7'"):
        local_swarm(str(tiny.folder("llama")), workers=1, quantize="int7")
    with pytest.raises(ModelError, match="device 'tpu'"):
        local_swarm(str(tiny.folder("llama")), workers=1, device="tpu")
