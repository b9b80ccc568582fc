"""lora, ia3 and head_mask, against PEFT on the Hugging Face model and against plain hooks."""

# B batch, S seq, D hidden, L layers, R rank, H head; B == L == H == R == S == 4 where nothing is padded

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.blocks.projections import adapting, find
from kwflow.errors import AxesError, BlockError, KwargError, ShapeError, UnknownKwarg
from kwflow.kwargs.bind import bind_kwargs
from kwflow.kwargs.schema import Schema
from kwflow.research.verify import exact_match
from tests.families.configs import CONFIGS, HEADS
from tests.families.marks import families
from tests.families.table import MASK, REAL, B, D, L, S, distributed
from tests.oracle import assert_bits, assert_close, assert_near, layers_of, residual, tiny
from tests.oracle.tiny import EACH, TWO, Requests, flow, huggingface, ids, random, span

# peft 0.21 asks transformers 5.24 for a name that is to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

R = 4
TARGETS = {"llama": ("q_proj", "v_proj"), "gpt2": ("c_attn",)}
SCALE = 0.75


def full(family: str, name: str) -> str:
    return next(one for one in span(family, 0, L).schema.projections if one.endswith(name))


def lora_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """A random adapter of every layer: ``{projection: {A "layer rank in", B "layer out rank", scale}}``."""
    sizes = span(family, 0, L).schema.projections
    made = {}
    for number, name in enumerate(TARGETS[family]):
        i, o = sizes[full(family, name)]
        a = random(L, R, i, seed=seed + 10 * number, dtype=dtype, scale=0.3)
        b = random(L, o, R, seed=seed + 10 * number + 1, dtype=dtype, scale=0.3)
        made[name] = {"A": a, "B": b, "scale": SCALE}
    return made


def peft_lora(family: str, lora: Mapping[str, Mapping[str, Any]], dtype: torch.dtype = torch.float32) -> Any:
    """The Hugging Face model with the same adapter, by PEFT."""
    config = peft.LoraConfig(r=R, lora_alpha=int(SCALE * R), target_modules=list(lora), fan_in_fan_out=family == "gpt2")
    model: Any = peft.get_peft_model(copy.deepcopy(huggingface(family, dtype)), config).eval()
    for layer, block in enumerate(layers_of(model.base_model.model)):
        for name, parts in lora.items():
            module: Any = block.get_submodule(full(family, name))
            module.lora_A["default"].weight.data = parts["A"][layer].clone()
            module.lora_B["default"].weight.data = parts["B"][layer].clone()
    return model.base_model.model


def alone(model: nn.Module, hidden: Tensor, mask: Tensor = MASK) -> Tensor:
    with torch.no_grad():
        return residual(model, hidden, attention_mask=mask)


@pytest.mark.parametrize("family", TARGETS)
def test_lora_is_what_peft_does(family: str) -> None:
    lora, hidden = lora_of(family), random(B, S, D)
    expected = alone(peft_lora(family, lora), hidden)
    spec = span(family, 0, L)
    whole = kf.chain(spec.blocks)(spec.params, hidden, attention_mask=MASK, lora=lora)
    assert_near(whole[REAL], expected[REAL], "chain")
    assert (whole - flow(family)(hidden, attention_mask=MASK)).abs().max() > 0.1
    for cuts, rows in ((TWO, B), (EACH, 3)):
        out = flow(family, cuts).options(batch_tokens=rows * S)(hidden, attention_mask=MASK, lora=lora)
        assert_near(out[REAL], expected[REAL], f"{cuts}")


@pytest.mark.parametrize("family, outs, ins", [("llama", ["k_proj", "v_proj"], "down_proj"), ("gpt2", ["c_attn"], "")])
def test_ia3_is_what_peft_does(family: str, outs: list[str], ins: str) -> None:
    hidden, given = random(B, S, D), {}
    ins_ = [ins] if ins else []
    config = peft.IA3Config(target_modules=[*outs, *ins_], feedforward_modules=ins_, fan_in_fan_out=family == "gpt2")
    model: Any = peft.get_peft_model(copy.deepcopy(huggingface(family)), config).eval()
    for name in (*outs, *ins_):
        size = span(family, 0, L).schema.projections[full(family, name)][name not in ins_]
        vectors = 1 + random(L, size, seed=len(given))
        given[name] = kf.axes(vectors, "layer in") if name in ins_ else vectors
        for layer, block in enumerate(layers_of(model.base_model.model)):
            held: Any = block.get_submodule(full(family, name))
            held.ia3_l["default"].data = vectors[layer].view(held.ia3_l["default"].shape).clone()
    expected = alone(model.base_model.model, hidden)
    for cuts, rows in ((TWO, B), (EACH, 3)):
        out = flow(family, cuts).options(batch_tokens=rows * S)(hidden, attention_mask=MASK, ia3=given)
        assert_near(out[REAL], expected[REAL], f"{cuts}")


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_projection_of_every_family_is_reached(family: str) -> None:
    """ia3 of each row's own at all projections of all layers at once: as hooks on the model's modules do it."""
    hidden, spec, hooks, given = random(B, S, D), span(family, 0, L), [], []
    for block, hf in zip(spec.blocks, layers_of(huggingface(family)), strict=True):
        own = {}
        for name, (_, size) in find(block.module).items():
            own[name] = 1 + 0.2 * random(B, size, seed=len(hooks))

            def times(_: Any, __: Any, out: Tensor, factor: Tensor = own[name]) -> Tensor:
                return (out.reshape(B, S, -1) * factor[:, None]).reshape(out.shape)

            hooks.append((hf.get_submodule(name), "post", times))
        given.append({"ia3": own})
    expected = residual(huggingface(family), hidden, attention_mask=MASK, extra=hooks)
    out = flow(family, TWO)(hidden, attention_mask=MASK, **kf.per_layer(given))
    assert_close(out[REAL], expected[REAL], family)


@families([*TARGETS])
def test_each_row_has_its_own_adapter_or_none(family: str) -> None:
    """Rows with A, B, none and A: each as PEFT or the plain model computes it alone."""
    first, second = lora_of(family, seed=50), lora_of(family, seed=90)
    hidden = random(4, 4, D)
    given: dict[str, Any] = {}
    for name in first:
        a, b = ([one[name][key] for one in (first, second)] for key in ("A", "B"))
        none = [torch.zeros_like(a[0]), torch.zeros_like(b[0])]
        rows = [torch.stack([*both, zero, both[0]], 1) for both, zero in zip((a, b), none, strict=True)]
        given[name] = {"A": rows[0], "B": rows[1], "scale": torch.tensor([SCALE, SCALE, 1.0, SCALE])}
    models = [peft_lora(family, first), peft_lora(family, second), huggingface(family), peft_lora(family, first)]
    for cuts, rows in ((TWO, 4), (EACH, 3)):
        out = flow(family, cuts).options(batch_tokens=rows * 4)(hidden, lora=given)
        for row, model in enumerate(models):
            one = slice(row, row + 1)
            assert_near(out[one], alone(model, hidden[one], torch.ones(1, 4, dtype=torch.long)), f"{cuts}, row {row}")


def test_a_head_mask_may_be_of_bools_and_of_some_layers() -> None:
    hidden, remote, mask = random(B, S, D), flow("llama", TWO), random(L, HEADS, seed=2) > 0
    assert_bits(remote(hidden, head_mask=mask), remote(hidden, head_mask=mask.float()), "bool")
    some = torch.ones(L, HEADS)
    some[2] = mask[2].float()
    assert_bits(remote(hidden, head_mask={2: mask[2]}), remote(hidden, head_mask=some), "one layer")


def test_a_layer_of_its_own_and_all_forms_agree() -> None:
    lora, hidden, remote = lora_of("llama"), random(B, S, D), flow("llama", TWO)
    by_layer = kf.per_layer(
        [{"lora": {n: {**p, "A": p["A"][i], "B": p["B"][i]} for n, p in lora.items()}} for i in range(L)]
    )
    stacked = remote(hidden, lora=lora)
    assert_bits(remote(hidden, **by_layer), stacked, "per_layer")
    whole = {f"self_attn.{name}": parts for name, parts in lora.items()}
    assert_bits(remote(hidden, lora=whole), stacked, "full names")
    only = {"q_proj": {k: kf.axes(lora["q_proj"][k][2], a) for k, a in (("A", "rank in"), ("B", "out rank"))}}
    one = remote(hidden, **kf.per_layer({2: {"lora": only}}))
    zeros = {k: torch.zeros(L, *v.tensor.shape) for k, v in only["q_proj"].items()}
    for key in zeros:
        zeros[key][2] = only["q_proj"][key].tensor
    assert_close(one, remote(hidden, lora={"q_proj": zeros}), "one layer")
    shared = {n: {k: kf.axes(p[k][0], a) for k, a in (("A", "rank in"), ("B", "out rank"))} for n, p in lora.items()}
    same = {n: {k: p[k][:1].expand(L, -1, -1) for k in "AB"} for n, p in lora.items()}
    assert_close(remote(hidden, lora=shared), remote(hidden, lora=same), "the same for all layers")


def leaves(family: str) -> list[Tensor]:
    lora = lora_of(family, dtype=torch.float64)
    tensors = [parts[key] for parts in lora.values() for key in ("A", "B")]
    return [*tensors, 1 + random(L, B, D, seed=70, dtype=torch.float64), random(L, HEADS, seed=71, dtype=torch.float64)]


def told(family: str, tensors: list[Tensor]) -> dict[str, Any]:
    pairs = zip(TARGETS[family], tensors[0:-2:2], tensors[1:-2:2], strict=True)
    lora = {name: {"A": a, "B": b, "scale": SCALE} for name, a, b in pairs}
    last = "down_proj" if family == "llama" else "mlp.c_proj"
    return {"lora": lora, "ia3": {last: tensors[-2]}, "head_mask": tensors[-1]}


def test_gradients_come_back_in_the_callers_dtype() -> None:
    tensors = [one.clone().requires_grad_() for one in leaves("llama")]  # float64 over float32 workers
    flow("llama", TWO)(random(B, S, D), attention_mask=MASK, **told("llama", tensors)).sum().backward()
    for one in tensors:
        assert one.grad is not None and one.grad.dtype is torch.float64 and one.grad.abs().max() > 0


@families([*TARGETS])
def test_generate_gives_pefts_ids(family: str) -> None:
    lora = lora_of(family)
    call = {"input_ids": ids(B, S), "attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    ours = distributed(family, torch.float32).generate(**call, lora=lora)
    assert torch.equal(ours, peft_lora(family, lora).generate(**call))
    assert not torch.equal(ours, huggingface(family).generate(**call))  # type: ignore[operator]
    per_row = {n: {**p, **{k: p[k][:, None].expand(-1, B, -1, -1) for k in "AB"}} for n, p in lora.items()}
    assert torch.equal(ours, distributed(family, torch.float32).generate(**call, lora=per_row))


def test_a_workers_own_block_fn_hands_them_on() -> None:
    def twice(params: Any, hidden: Tensor, /, *, block: Any, gain: float = 1.0, **kw: Any) -> Tensor:
        return block(params, hidden, **kw)

    hidden, kwargs = random(B, S, D), {"lora": lora_of("llama"), "head_mask": random(L, HEADS)}
    kwargs["ia3"] = {"v_proj": 1 + random(L, span("llama", 0, L).schema.projections[full("llama", "v_proj")][1])}
    assert_bits(flow("llama", TWO, block_fn=twice)(hidden, **kwargs), flow("llama", TWO)(hidden, **kwargs), "own")

    def fixed(params: Any, hidden: Tensor, /, *, block: Any) -> Tensor:
        return block(params, hidden, head_mask=torch.zeros(HEADS), ia3={"v_proj": torch.zeros(16)})

    zero = flow("llama", TWO)(hidden, head_mask=torch.zeros(L, HEADS))
    assert_close(flow("llama", TWO, block_fn=fixed)(hidden), zero, "given by the worker")


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ({"lora": {"q_prj": {}}}, UnknownKwarg, "'q_prj'; these.*self_attn.q_proj.*mean 'q_proj'"),
    "no B": ({"lora": {"q_proj": {"A": torch.zeros(L, R, D)}}}, KwargError, r"lora\['q_proj'\] has no 'B'"),
    "an unknown part": ({"lora": {"q_proj": {"a": 1}}}, KwargError, "has 'a'; it takes A, B, scale"),
    "wrong in": (
        {"lora": {"q_proj": {"A": torch.zeros(L, R, D + 1), "B": torch.zeros(L, D, R)}}},
        ShapeError,
        rf"lora\['q_proj'\]\['A'\] has in = {D + 1}, expected {D}",
    ),
    "wrong out": (
        {"lora": {"q_proj": {"A": torch.zeros(L, R, D), "B": torch.zeros(L, D + 1, R)}}},
        ShapeError,
        rf"out = {D + 1}, expected {D}",
    ),
    "another rank": (
        {"lora": {"q_proj": {"A": torch.zeros(L, R, D), "B": torch.zeros(L, D, R + 1)}}},
        ShapeError,
        rf"rank = {R + 1}, expected {R}",
    ),
    "layers": (
        {"lora": {"q_proj": {"A": torch.zeros(L + 1, R, D), "B": torch.zeros(L, D, R)}}},
        ShapeError,
        "layer = 5, expected 4 or 1",
    ),
    "neither layer nor batch": (
        {"lora": {"q_proj": {"A": torch.zeros(R, D), "B": torch.zeros(D, R)}}},
        ShapeError,
        "of rank 2; it takes 'layer .batch. rank in'",
    ),
    "axes": ({"ia3": {"q_proj": kf.axes(torch.zeros(D), "hidden")}}, AxesError, "declared 'hidden'"),
    "whole numbers": ({"ia3": {"q_proj": torch.zeros(L, D, dtype=torch.long)}}, KwargError, "float tensors"),
    "a number": ({"ia3": {"q_proj": 2.0}}, KwargError, "is 2.0; it takes a tensor"),
    "no mapping": ({"lora": torch.zeros(2)}, KwargError, "lora is a Tensor"),
    "scale": ({"lora": {"q_proj": {**lora_of("llama")["q_proj"], "scale": "big"}}}, KwargError, "scale.* is 'big'"),
    "twice": (
        {"ia3": {"q_proj": torch.zeros(L, D), "self_attn.q_proj": torch.zeros(L, D)}},
        KwargError,
        "names the projection 'self_attn.q_proj' twice",
    ),
    "heads": ({"head_mask": torch.zeros(L, HEADS + 1)}, ShapeError, "head = 5, expected 4"),
    "a head_mask for no layer": ({"head_mask": torch.zeros(HEADS)}, ShapeError, "of rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_before_anything_is_sent(case: str) -> None:
    kwargs, error, words = WRONG[case]
    remote = tiny.make_flow("llama", TWO)
    with Requests(remote) as requests, pytest.raises(error, match=words):
        remote(random(B, S, D), **kwargs)
    assert len(requests) == 0


def test_an_ambiguous_end_of_a_name_is_refused() -> None:
    remote = tiny.make_flow("gpt2", TWO)
    with Requests(remote) as requests, pytest.raises(KwargError, match="'attn.c_proj' or 'mlp.c_proj'"):
        remote(random(B, S, D), ia3={"c_proj": torch.ones(L, D)})
    assert len(requests) == 0


def test_a_projection_must_be_that_of_every_worker_addressed() -> None:
    mine = span("llama", 0, L).schema
    fewer = replace(mine, projections={n: s for n, s in mine.projections.items() if not n.endswith("q_proj")})
    workers, sizes = [((0, 2), mine), ((2, 4), fewer)], {"batch": B, "seq": S, "key": S}
    lora = lora_of("llama")
    with pytest.raises(UnknownKwarg, match="no projection 'q_proj'"):
        bind_kwargs(workers, (0, L), {"lora": lora}, sizes)
    with pytest.raises(KwargError, match=r"'lora': …}: that is kwargs already, so flow\(\*\*x, \*\*adapter\)"):
        bind_kwargs(workers, (0, L), {"lora": {"lora": lora}}, sizes)  # as kf.adapters gives it
    with pytest.raises(KwargError, match=r"lora is a str.*kf.adapters.read\(folder\)"):
        bind_kwargs(workers, (0, L), {"lora": "folder"}, sizes)
    one = {"q_proj": {key: lora["q_proj"][key][0] for key in "AB"}}
    bound = bind_kwargs(workers, (0, L), kf.per_layer({1: {"lora": one}}), sizes)
    assert list(bound.for_layer(1)["lora"]) == ["self_attn.q_proj"] and bound.for_layer(2) == {}


def test_a_projection_that_is_not_called_is_an_error() -> None:
    block = span("llama", 0, L).blocks[0]
    with pytest.raises(BlockError, match="layer 0 did not call a projection 'elsewhere'"):
        with adapting({"elsewhere": lambda module, x: module(x)}, 0):
            block(block.params, random(1, 2, D))


def test_a_schema_without_projections_is_read() -> None:
    said = span("llama", 0, L).schema.to_json()
    assert Schema.from_json(said).projections == span("llama", 0, L).schema.projections
    del said["projections"]
    assert Schema.from_json(said).projections == {}


@families([*TARGETS])
def test_exact_match_knows_them(family: str) -> None:
    kwargs = told(family, [one.float() for one in leaves(family)])
    report = exact_match(flow(family, TWO), huggingface(family), random(B, S, D), attention_mask=MASK, **kwargs)
    assert report, str(report)


# ---- layer by layer


def by_layer(lora: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{n: {"A": own["A"][i], "B": own["B"][i], "scale": SCALE} for n, own in lora.items()} for i in range(L)]


def test_adapters_by_layer_go_as_one_where_layers_are_alike() -> None:
    """Bound by layer, a LoRA made a step of SmolLM2 1.33 times as long, and as one 1.19."""
    remote, hidden, lora = flow("llama", TWO), random(B, S, D), lora_of("llama")
    ia3 = {"v_proj": random(L, D // 2)}
    given = kf.per_layer([{"lora": own, "ia3": {"v_proj": ia3["v_proj"][i]}} for i, own in enumerate(by_layer(lora))])
    with Requests(remote) as requests:
        assert_bits(remote(hidden, **given), remote(hidden, lora=lora, ia3=ia3))
        wire = [request.tree["kwargs"] for _, request, _ in requests.seen]
        assert [layers for layers, _ in wire[0]] == ["layers", "layers"]
        assert [str(tree) for tree in wire[:2]] == [str(tree) for tree in wire[2:]]


@pytest.mark.parametrize("change", ["another rank", "another scale", "not everywhere", "one that is trained"])
def test_layers_that_are_not_alike_go_by_layer(change: str) -> None:
    remote, hidden = flow("llama", TWO), random(B, S, D)
    own, whole = by_layer(lora_of("llama")), lora_of("llama")
    if change == "another rank":  # the last component of layer 1 was zero
        own[1]["q_proj"] |= {"A": own[1]["q_proj"]["A"][:-1], "B": own[1]["q_proj"]["B"][:, :-1]}
        whole["q_proj"]["A"] = whole["q_proj"]["A"].clone()
        whole["q_proj"]["A"][1, -1] = 0
    elif change == "another scale":
        own[1]["q_proj"] |= {"scale": 2 * SCALE, "B": own[1]["q_proj"]["B"] / 2}
    elif change == "not everywhere":
        del own[1]["q_proj"]
        whole["q_proj"]["B"] = whole["q_proj"]["B"].clone()
        whole["q_proj"]["B"][1] = 0
    else:
        own[1]["q_proj"]["A"] = own[1]["q_proj"]["A"].clone().requires_grad_()
    with Requests(remote) as requests:
        out = remote(hidden, **kf.per_layer([{"lora": one} for one in own]))
        assert [layers for layers, _ in requests.seen[0][1].tree["kwargs"]] == [[0], [1]]
    assert_close(out.detach(), remote(hidden, lora=whole))
    if out.requires_grad:
        with Requests(remote) as requests:
            out.sum().backward()
            assert [len(reply.tree) for _, _, reply in requests.seen] == [
                1,
                1,
            ]  # the cotangent, then that one's gradient
        assert own[1]["q_proj"]["A"].grad is not None
