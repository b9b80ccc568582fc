"""The points inside a layer: neurons, and every projection's input and output; what stands before what at one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.blocks.projections import find
from kwflow.errors import KwargError, ShapeError, UnknownKwarg
from kwflow.models.families import family_of
from tests.families.configs import CONFIGS, config
from tests.families.marks import families
from tests.families.table import IDS, MASK
from tests.kwargs.row import qkv
from tests.oracle import assert_bits, assert_close, layers_of, residual
from tests.oracle.tiny import TWO, Requests, flow, folder, huggingface, ids, make_flow, random, span

B, S = IDS.shape
WITH_NEURONS = [name for name in CONFIGS if "neuron" in span(name, 0, 4).schema.kwargs["edit"].points]


def ends(family: str) -> dict[str, list[int]]:
    """Both points of every projection, and the layers that have it: some layers of a family may be mixtures."""
    spec = span(family, 0, 4)
    return {
        f"{name}.{end}": [block.layer for block in spec.blocks if name in find(block.module)]
        for name in spec.schema.projections
        for end in ("in", "out")
    }


def seen(family: str, hidden: Tensor) -> dict[tuple[str, int], Tensor]:
    """The same, by plain hooks on the Hugging Face model."""
    model, found, hooks = huggingface(family), {}, []

    def keep(point: str, layer: int) -> Callable[..., None]:
        def hook(_: Any, args: Any, out: Any = None) -> None:
            value = args[0] if point.endswith(".in") else out
            found[point, layer] = value.reshape(B, S, value.shape[-1]).clone()

        return hook

    for number, layer in enumerate(layers_of(model)):
        for name in find(layer):
            module = layer.get_submodule(name)
            hooks += [(module, "pre", keep(f"{name}.in", number)), (module, "post", keep(f"{name}.out", number))]
    residual(model, hidden, attention_mask=MASK, extra=hooks)
    return found


@families([*CONFIGS])
def test_all_that_enters_and_leaves_a_projection(family: str) -> None:
    x = random(B, S, 32)
    expected = seen(family, x)
    out, acts = flow(family, TWO).capture(ends(family), x, attention_mask=MASK)
    assert_bits(out, flow(family, TWO)(x, attention_mask=MASK))
    for (point, layer), value in expected.items():
        if (point, layer) in acts:
            for row, tokens in enumerate(MASK.sum(1).tolist()):
                assert_bits(acts[point, layer][row, :tokens], value[row, S - tokens :], f"{point} of layer {layer}")
    assert set(acts) <= expected.keys()


WITHOUT_QKV = ("falcon", "deepseek_v2", "deepseek_v3")
QKV = ("q", "k", "v")


@families([*CONFIGS])
def test_queries_keys_and_values_are_what_attention_takes_of_its_projections(family: str) -> None:
    """Seen, and one head of each changed: as by hooks on transformers' own projections."""
    one, model, x = flow(family, TWO), huggingface(family), random(B, S, 32)
    if family in WITHOUT_QKV:
        for point in QKV:
            with pytest.raises(KwargError, match=f"no point '{point}' in these blocks; they have .*head"):
                one(x, edit=kf.scale(0.0, 1, point=point))
        return
    layer, paths, found = layers_of(model)[1], family_of(config(family)).points, {}

    def hook(point: str) -> Any:
        def change(_: Any, __: Any, out: Tensor) -> Tensor:
            features = qkv(family, layer, out.shape[-1])["qkv".index(point)]
            seen = out[..., features].unflatten(-1, (-1, head_dim))
            found[point] = seen = torch.cat([seen[..., :1, :], seen[..., 1:2, :] * -3.0, seen[..., 2:, :]], -2)
            return out.index_copy(-1, features, seen.flatten(-2))

        return layer.get_submodule(paths[point]), "post", change

    head_dim = span(family, 0, 4).schema.sizes["head_dim"]
    heads = [1 if span(family, 0, 4).schema.sizes[axis] > 1 else 0 for axis in ("head", "kv_head", "kv_head")]
    changed = [point for point, head in zip(QKV, heads, strict=True) if head]
    expected = residual(model, x, attention_mask=MASK, extra=[hook(point) for point in changed])
    edits = [kf.scale(-3.0, 1, point=point, heads=[1]) for point in changed]
    out, acts = one.capture(dict.fromkeys(QKV, 1), x, attention_mask=MASK, edit=edits)
    for row, tokens in enumerate(MASK.sum(1).tolist()):
        assert_bits(out[row, S - tokens :], expected[row, S - tokens :])
        for point in changed:
            assert_bits(acts[point, 1][row, :tokens], found[point][row, S - tokens :], point)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "gpt_bigcode", "codegen", "persimmon", "opt"])
def test_a_head_is_its_pattern_of_values(family: str) -> None:
    sizes = span(family, 0, 4).schema.sizes
    _, acts = flow(family, TWO).capture({"v": 1, "pattern": 1, "head": 1}, random(B, S, 32))
    values = acts["v", 1].repeat_interleave(sizes["head"] // sizes["kv_head"], 2)
    mixed = torch.einsum("bphk,bkhd->bphd", acts["pattern", 1], values)
    assert_close(mixed, acts["head", 1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "codegen"])
def test_hooks_of_the_local_model_edit_queries_keys_and_values(family: str) -> None:
    keys = (span(family, 0, 4).schema.sizes["kv_head"], 8)
    local, edits = huggingface(family), [
        kf.scale(0.5, 1, point="q", heads=[3], at="prompt[-1]"),
        kf.edits.noise(0.5, 2, point="k", seed=3, heads=[1], at=[0, 2]),
        kf.put(random(*keys, seed=4), 3, point="v", at=[1]),
        kf.add(random(1, 8, seed=5), 3, point="q", heads=[0]),
    ]  # fmt: skip
    one = make_flow(family, TWO, own_ends=True)
    remote = kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=one)
    with torch.no_grad(), kf.steering.as_hooks(local, edits):
        expected = local(ids(2, 6)).logits
    assert_bits(remote(ids(2, 6), edit=edits).logits, expected)
    x = one.inputs(ids(2, 6))
    variants = [{"edit": [kf.scale(factor, 1, point="k", heads=[1]), *edits]} for factor in (0.0, 2.0)]
    assert_close(kf.sweep(one, x, variants), torch.stack([one(**x, **variant) for variant in variants]))


def test_wrong_heads_and_sizes_of_keys_are_refused() -> None:
    one, x = make_flow("llama", TWO), random(1, 3, 32)
    with Requests(one) as requests:
        with pytest.raises(KwargError, match=r"heads=\[2\]; there are heads 0:2"):
            one(x, edit=kf.scale(0.0, 1, point="k", heads=[2]))
        with pytest.raises(ShapeError, match="kv_head = 4, expected 2"):
            one(x, edit=kf.add(random(4, 8), 1, point="v"))
        assert not len(requests)
    for theirs in ("hook_q", "blocks.1.attn.hook_k", "values"):
        with pytest.raises(KwargError, match="Did you mean '[qkv]'"):
            kf.scale(0.0, 1, point=theirs)


def test_where_the_parts_of_one_projection_are() -> None:
    """In variants that the small models are not: GPT-BigCode with each head's own keys, Falcon without groups."""
    sizes, numbers = {"head": 4, "kv_head": 4}, torch.arange(96)
    bigcode, falcon = config("gpt_bigcode"), config("falcon")
    bigcode.multi_query, falcon.num_kv_heads = False, 4
    for own in (bigcode, falcon):
        parts = family_of(own).parts(sizes)
        for number, point in enumerate(QKV):
            part = parts[point].read(numbers)
            assert part.tolist() == numbers.view(4, 3, 8)[:, number].flatten().tolist()
            assert_bits(parts[point].written(numbers * 0, part)[part], part)


WITHOUT_MID = (
    "gptj",
    "codegen",
    "cohere",
    "cohere2",
    "phi",
    "gpt_neox",
    "stablelm_parallel",
    "falcon",
    "falcon_multi_query",
    "opt_norm_after",
)


@families([*CONFIGS])
def test_the_stream_between_the_parts_is_the_layers_input_and_what_attention_adds(family: str) -> None:
    one, x, points = flow(family, TWO), random(B, S, 32), span(family, 0, 4).schema.kwargs["capture"].points
    if family in WITHOUT_MID:
        with pytest.raises(KwargError, match="no point 'resid_mid' in these blocks; they have .*attn"):
            one.capture({"resid_mid": 1}, x)
        return
    assert "resid_mid" in points
    added = [point for point in ("attn", "mlp") if point in points]  # granite scales what these give
    out, acts = one.capture(dict.fromkeys(("resid_pre", "resid_mid", "resid", *added), 1), x, attention_mask=MASK)
    assert_bits(out, one(x, attention_mask=MASK))
    assert not torch.equal(acts["resid_mid", 1], acts["resid_pre", 1])
    if added:
        assert_bits(acts["resid_mid", 1], acts["resid_pre", 1] + acts["attn", 1])
        assert_bits(acts["resid", 1], acts["resid_mid", 1] + acts["mlp", 1])
    with pytest.raises(KwargError, match="no point 'resid_mid'; .*'resid_mid' is for captures alone"):
        kf.scale(0.0, 1, point="resid_mid")


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "phi"])
def test_neurons_are_what_the_down_projection_takes(family: str) -> None:
    row, module = family_of(config(family)), layers_of(huggingface(family))[2]
    x = random(B, S, 32)
    _, acts = flow(family, TWO).capture({"neuron": 2, "mlp": 2, f"{row.down}.in": 2, f"{row.down}.out": 2}, x)
    assert_bits(acts["neuron", 2], acts[f"{row.down}.in", 2])
    assert_bits(acts["mlp", 2], acts[f"{row.down}.out", 2])
    assert_close(module.get_submodule(row.down)(acts["neuron", 2]), acts["mlp", 2])


def test_families_with_neurons() -> None:
    """All but those where some layer is a mixture, whose experts have neurons of their own."""
    assert "llama" in WITH_NEURONS and "gemma2" in WITH_NEURONS and "stablelm_parallel" in WITH_NEURONS
    without = {family for family in CONFIGS if family not in WITH_NEURONS}
    assert without == {name for name in CONFIGS if "moe" in name or name in MIXTURES}
    with pytest.raises(KwargError, match="no point 'neuron' in these blocks; they have .*resid"):
        flow("mixtral", TWO)(random(1, 2, 32), edit=kf.scale(0.0, 1, point="neuron"))


MIXTURES = ("mixtral", "gpt_oss", "flex_olmo", "minimax_m2", "dots1", "deepseek_v2", "deepseek_v3")


def test_a_point_of_all_layers_is_one_tensor() -> None:
    _, acts = flow("llama", TWO).capture({"resid": [3, 1, 0], "attn": [2]}, random(B, S, 32), at=[1, 2])
    assert_bits(acts.stack("resid"), torch.stack([acts["resid", layer] for layer in (0, 1, 3)]))
    assert acts.stack("attn").shape == (1, B, 2, 32)
    with pytest.raises(KeyError, match="'mlp' was not captured; there are resid, attn"):
        acts.stack("mlp")


def test_the_order_at_one_place() -> None:
    """head, then the input of its projection, then the adapters, then the output, then attn."""
    x, v = random(B, S, 32), random(32, seed=3)
    one = flow("llama", TWO)
    name, zero = "self_attn.o_proj", {"scale": 0.0, "layers": 1}
    lora = kf.per_layer({1: {"lora": {name: {"A": random(2, 32, seed=5), "B": random(32, 2, seed=6)}}}})
    points = {"head": 1, f"{name}.in": 1, f"{name}.out": 1, "attn": 1}

    def run(*edits: Any, **more: Any) -> Any:
        return one.capture(points, x, edit=list(edits), **more)[1]

    acts = run(kf.put(random(4, 8, seed=4), 1, point="head"))
    assert_bits(acts[f"{name}.in", 1], acts["head", 1].flatten(-2))
    acts = run(kf.put(v, 1, point=f"{name}.in"))
    assert not torch.equal(acts[f"{name}.in", 1], acts["head", 1].flatten(-2))  # head came first
    assert_bits(acts[f"{name}.in", 1], v.expand(B, S, 32))
    plain, adapted = run(kf.put(v, 1, point=f"{name}.in")), run(kf.put(v, 1, point=f"{name}.in"), **lora)
    a, b = (lora["lora"].values[1][name][key] for key in "AB")
    assert_close(adapted[f"{name}.out", 1] - plain[f"{name}.out", 1], (v @ a.T @ b.T).expand(B, S, 32))
    acts = run(kf.put(v, 1, point=f"{name}.out"), **lora)
    assert_bits(acts[f"{name}.out", 1], v.expand(B, S, 32))
    assert_bits(acts["attn", 1], v.expand(B, S, 32))
    acts = run(kf.scale(zero["scale"], zero["layers"], point="attn"))
    assert bool((acts["attn", 1] == 0).all()) and bool((acts[f"{name}.out", 1] != 0).any())


def test_what_is_no_point_is_refused_before_anything_is_sent() -> None:
    one, x = make_flow("llama", TWO), random(1, 3, 32)
    with Requests(one) as requests:
        for point, error, words in (
            ("mlp.down_proj.inn", KwargError, r"points are .*\.in"),
            (".in", KwargError, "no point '.in'"),
            ("down.out", UnknownKwarg, "no projection 'down'; .*Did you mean 'down_proj'"),
            (3, KwargError, "no point 3"),
        ):
            with pytest.raises(error, match=words):
                one(x, edit=kf.add(random(32), 1, point=point))
            with pytest.raises(error, match=words):
                one.capture({point: 1}, x)
        with pytest.raises(ShapeError, match="feature = 32, expected 48"):
            one(x, edit=kf.add(random(32), 1, point="down_proj.in"))
        with pytest.raises(KwargError, match="heads=.* belong to point='head'"):
            one(x, edit=kf.scale(0.0, 1, point="o_proj.in", heads=[0]))
        assert not len(requests)


def test_vectors_at_neurons_and_at_a_projection() -> None:
    one = make_flow("llama", TWO, own_ends=True)
    x = one.inputs("w1 w2 w3")
    for point in ("neuron", "k_proj.out"):
        vectors = kf.steering.contrast(one, ["w1 w2"], ["w3 w4 w5"], layers=[2], point=point)
        plain, edited = (one.capture({point: 2}, **x, edit=edits)[1][point, 2] for edits in ([], vectors.edits(3.0)))
        assert_close(edited - plain, 3.0 * vectors[2].expand_as(plain))


def test_a_step_without_such_a_token_captures_nothing_of_the_right_width() -> None:
    with torch.no_grad(), make_flow("llama", TWO).session() as session:
        session.step(random(2, 3, 32))
        acts = kf.Capture({"down_proj.in": [3], "neuron": [0], "k_proj.out": [1]}, at=[0])
        session.step(random(2, 1, 32), capture=acts)
        assert [acts[key].shape for key in acts] == [(2, 0, 48), (2, 0, 16), (2, 0, 48)]


def test_hooks_of_the_local_model_do_the_same() -> None:
    local, edits = huggingface("llama"), [
        kf.add(random(48, seed=2), 1, point="mlp.down_proj.in", at="prompt[-1]"),
        kf.scale(0.5, 2, point="neuron"),
        kf.add(random(32, seed=3), 3, point="q_proj.out", at=[0, 2]),
    ]  # fmt: skip
    remote = kf.AutoDistributedModelForCausalLM.from_pretrained(
        folder("llama"), flow=make_flow("llama", TWO, own_ends=True)
    )
    with torch.no_grad(), kf.steering.as_hooks(local, edits):
        expected = local(ids(2, 6)).logits
    assert_bits(remote(ids(2, 6), edit=edits).logits, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gptj", "opt", "apertus"])
def test_a_norms_output_is_what_the_next_projection_is_given(family: str):
    points = span(family, 0, 4).schema.kwargs["edit"].points
    projections = span(family, 0, 4).schema.projections
    first = next(name for name in projections if name.rpartition(".")[2] in ("q_proj", "c_attn"))
    assert "norm1" in points
    x = random(B, S, span(family, 0, 4).schema.sizes["hidden"], seed=3)
    edit = kf.add(random(x.shape[-1], seed=4), layers=1, point="norm1")
    _, acts = flow(family).capture({"norm1": [1], f"{first}.in": [1]}, x, edit=edit)
    assert_bits(acts["norm1", 1], acts[f"{first}.in", 1])
    _, plain = flow(family).capture({"norm1": [1]}, x)
    assert (acts["norm1", 1] - plain["norm1", 1]).abs().max() > 0.1
