"""lora and ia3 with ``rows``: each row takes one of many adapters, or none."""

# B batch, S seq, D hidden, L layers, R rank, N adapters; B == L == R == S == N == 4

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import kwflow as kf
from kwflow.blocks import adapters as adapt
from kwflow.errors import AxesError, KwargError, ShapeError
from kwflow.kwargs.bind import bind_kwargs, check_bound
from kwflow.research.verify import exact_match
from tests.families.configs import HIDDEN, LAYERS
from tests.families.marks import families
from tests.families.table import distributed
from tests.kwargs.test_adapters import SCALE, TARGETS, alone, full, lora_of, peft_lora
from tests.oracle import assert_bits, assert_close, assert_near, tiny
from tests.oracle.tiny import EACH, TWO, Requests, flow, huggingface, ids, left_padded, random, span

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

B, S, D, L, R = 4, 4, HIDDEN, LAYERS, 4
ROWS = torch.tensor([0, 1, -1, 0])
BOTH = torch.ones(1, S, dtype=torch.long)


def joined(*loras: dict[str, Any], rows: Tensor = ROWS, scale: Any = SCALE) -> dict[str, Any]:
    """Adapters of the same projections side by side: A "layer adapter rank in", B "layer adapter out rank"."""
    sides = {name: {key: torch.stack([one[name][key] for one in loras], 1) for key in "AB"} for name in loras[0]}
    return {name: {**parts, "scale": scale, "rows": rows} for name, parts in sides.items()}


def per_row(given: dict[str, Any], rows: Tensor = ROWS) -> dict[str, Any]:
    """The same with a batch axis, and zeros for none."""
    there = (rows >= 0).double().view(-1, 1, 1)

    def own(tensor: Tensor) -> Tensor:
        return tensor[:, rows.clamp(min=0)] * there.to(tensor.dtype)

    return {n: {"A": own(p["A"]), "B": own(p["B"]), "scale": p["scale"]} for n, p in given.items()}


@families([*TARGETS])
def test_each_row_is_its_adapters_solo_run(family: str) -> None:
    """A, B, none and A, with a scale for each adapter: as PEFT or the plain model computes each row alone."""
    first, second, hidden = lora_of(family, seed=50), lora_of(family, seed=90), random(B, S, D)
    given = joined(first, second, scale=torch.tensor([SCALE, 2.0]))
    twice = {n: {**p, "B": p["B"] * 2.0 / SCALE} for n, p in second.items()}
    models = [peft_lora(family, first), peft_lora(family, twice), huggingface(family), peft_lora(family, first)]
    for cuts, rows in ((TWO, 4), (EACH, 3)):
        out = flow(family, cuts).options(batch_tokens=rows * S)(hidden, lora=given)
        for row, model in enumerate(models):
            one = slice(row, row + 1)
            assert_near(out[one], alone(model, hidden[one], BOTH), f"{cuts}, row {row}")
    report = exact_match(flow(family, TWO), huggingface(family), hidden, lora=given)
    assert report, str(report)


@pytest.mark.parametrize("side", ["out", "in"])
def test_ia3_of_a_row_is_its_solo_run(side: str) -> None:
    name, hidden, remote = "down_proj", random(B, S, D), flow("llama", TWO).options(batch_tokens=3 * S)
    size = span("llama", 0, L).schema.projections[full("llama", name)][side == "out"]
    scale = 1 + random(L, 2, size, seed=3)
    given = {"scale": kf.axes(scale, f"layer adapter {side}"), "rows": ROWS}
    out, plain = remote(hidden, ia3={name: given}), remote(hidden)
    for row, number in enumerate(ROWS.tolist()):
        own = {name: kf.axes(scale[:, number], f"layer {side}")} if number >= 0 else None
        assert_near(out[row : row + 1], remote(hidden[row : row + 1], ia3=own), f"row {row}")
    assert_bits(out[2], plain[2], "none")
    report = exact_match(flow("llama", TWO), huggingface("llama"), hidden, ia3={name: given})
    assert report, str(report)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_with_none_is_the_plain_row_whatever_the_adapters_hold(broken: float) -> None:
    """Its values to the bit, and its gradients."""
    good, bad = lora_of("llama"), lora_of("llama", seed=90)
    for parts in bad.values():
        parts["A"].fill_(broken)
        parts["B"].fill_(broken)
    rows = torch.tensor([-1, 1, -1, -1])
    remote, hidden = flow("llama", TWO), random(B, S, D).requires_grad_()
    given = joined(bad, good, rows=rows, scale=torch.tensor([broken, SCALE]))
    sizes = (L, 2, span("llama", 0, L).schema.projections[full("llama", "v_proj")][1])
    vectors = torch.full(sizes, broken)
    vectors[:, 1] = 1.5
    leaves = [tensor.requires_grad_() for parts in given.values() for tensor in (parts["A"], parts["B"])]
    out = remote(hidden, lora=given, ia3={"v_proj": {"scale": vectors.requires_grad_(), "rows": rows}})
    assert_bits(out[rows < 0], remote(hidden.detach()[rows < 0]), "none")
    out.square().sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and hidden.grad.abs().min(2).values.max() > 0
    for tensor in (*leaves, vectors):
        assert tensor.grad is not None and not tensor.grad[:, 0].any() and tensor.grad[:, 1].abs().max() > 0


def test_none_adds_nothing_to_minus_zero_and_nothing_of_infinity() -> None:
    sides = {
        "A": kf.axes(torch.ones(1, 2, 3), "adapter rank in"),
        "B": kf.axes(torch.ones(1, 2, 2), "adapter out rank"),
    }
    lora = {**sides, "scale": 1.0, "rows": kf.axes(torch.tensor([-1]), "batch")}
    y, x = torch.tensor([[[-0.0, 1.0]]]), torch.full((1, 1, 3), float("inf"))
    assert_bits(adapt.after(y, x, {"lora": lora}, (1, 1)), y)


@pytest.mark.slow
def test_gradients_sum_over_the_rows_that_use_an_adapter() -> None:
    remote = flow("llama", TWO, torch.float64).options(batch_tokens=3 * S)
    hidden, weights = (random(B, S, D, seed=seed, dtype=torch.float64) for seed in (0, 7))
    loras = [lora_of("llama", seed=seed, dtype=torch.float64) for seed in (50, 90, 130, 170)]
    scale = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    given = joined(*loras, rows=torch.tensor([0, 3, -1, 0]), scale=scale)
    names = [(name, key) for name in given for key in "AB"]

    def told(tensors: tuple[Tensor, ...], form: Callable[[Any], Any]) -> Tensor:
        parts = {name: dict(own) for name, own in given.items()}
        for (name, key), tensor in zip(names, tensors, strict=True):
            parts[name][key] = tensor
        return (remote(hidden, lora=form(parts)) * weights).sum()

    def by_batch(parts: dict[str, Any]) -> dict[str, Any]:
        rows = torch.tensor([0, 3, -1, 0])
        return {n: {**p, "scale": scale[rows.clamp(min=0)]} for n, p in per_row(parts, rows).items()}

    tensors = tuple(given[name][key].clone() for name, key in names)
    ours, expected = (grad(told)(tensors, form) for form in (lambda parts: parts, by_batch))
    for (name, key), a, b in zip(names, ours, expected, strict=True):
        assert_close(a, b, f"{name} {key}")
        assert not a[:, 1:3].any() and a[:, 0].abs().max() > 1e-3
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    told(tuple(leaves), lambda parts: parts).backward()
    for leaf, b in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert_close(leaf.grad, b, "plain autograd")
    direction = tuple(map(torch.sin, tensors))
    values = [jvp(lambda *t, form=form: told(t, form), tensors, direction)[1] for form in (lambda p: p, by_batch)]
    assert_close(values[0], values[1], "jvp")
    three = torch.stack([tensors[0], -tensors[0], 2 * tensors[0]])
    each = vmap(lambda a: told((a, *tensors[1:]), lambda parts: parts))(three)
    assert_close(each, torch.stack([told((a, *tensors[1:]), by_batch) for a in three]), "vmap")


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [1, 3])
def test_sessions_and_beams_carry_the_rows(num_beams: int) -> None:
    given = joined(lora_of("llama", seed=50), lora_of("llama", seed=90))
    call = {"input_ids": ids(B, 9), "attention_mask": left_padded((0, 1, 3, 8), 9), "max_new_tokens": 6}
    model = distributed("llama", torch.float32)
    call |= {"do_sample": False, "num_beams": num_beams}
    ours = model.generate(**call, lora=given)
    assert torch.equal(ours, model.generate(**call, lora=per_row(given)))
    assert not torch.equal(ours, model.generate(**call))


def wrong_rows(rows: Any) -> dict[str, Any]:
    return {"lora": joined(lora_of("llama"), lora_of("llama", seed=90), rows=rows)}


A, OUT = lora_of("llama")["q_proj"], torch.zeros(L, 2, D)
MANY = joined({"q_proj": A}, {"q_proj": A})["q_proj"]
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "too large": (wrong_rows(torch.tensor([0, 2, 0, 0])), KwargError, r"\['rows'\]\[1\] is 2.*from 0 to 1, and -1 for"),
    "below none": (wrong_rows(torch.tensor([0, 0, 0, -2])), KwargError, r"\['rows'\]\[3\] is -2"),
    "float": (wrong_rows(torch.zeros(B)), KwargError, r"'rows'\] is float32\(4,\); it takes an int tensor"),
    "bool": (wrong_rows(torch.ones(B).bool()), KwargError, r"'rows'\] is bool\(4,\)"),
    "a list": (wrong_rows([0, 1, 0, 0]), KwargError, r"'rows'\] is \[0, 1, 0, 0\]; it takes an int tensor"),
    "too few": (wrong_rows(torch.zeros(3).long()), ShapeError, "batch = 3, expected 4 or 1"),
    "no rows": (
        {"lora": {"q_proj": {**A, "A": kf.axes(A["A"][:, None], "layer adapter rank in")}}},
        AxesError,
        "'rows'",
    ),
    "no adapter axis": (
        {"lora": {"q_proj": {"A": kf.axes(A["A"], "layer rank in"), "B": A["B"], "rows": ROWS}}},
        AxesError,
        "without an 'adapter' axis",
    ),
    "another rank": ({"lora": {"q_proj": {**A, "rows": ROWS}}}, ShapeError, "rank 3; it takes 'layer adapter rank in'"),
    "adapters of B": (
        {"lora": {"q_proj": {"A": A["A"][:, None], "B": torch.zeros(L, 2, D, R), "rows": ROWS}}},
        ShapeError,
        "adapter = 2, expected 1",
    ),
    "scales": ({"lora": {"q_proj": {**MANY, "scale": torch.ones(3)}}}, ShapeError, "adapter = 3"),
    "none at all": (
        {"ia3": {"q_proj": {"scale": torch.zeros(L, 0, D), "rows": -torch.ones(B).long()}}},
        KwargError,
        "there are no adapters",
    ),
    "ia3 without": ({"ia3": {"q_proj": {"scale": OUT}}}, KwargError, r"ia3\['q_proj'\] has no 'rows'"),
    "ia3's own": (
        {"ia3": {"q_proj": {"scale": OUT, "rows": ROWS, "A": OUT}}},
        KwargError,
        "has 'A'; it takes scale, rows",
    ),
    "ia3 too large": ({"ia3": {"q_proj": {"scale": OUT, "rows": ROWS + 1}}}, KwargError, r"rows'\]\[1\] is 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_before_anything_is_sent(case: str) -> None:
    kwargs, error, words = WRONG[case]
    remote = tiny.make_flow("llama", TWO)
    with Requests(remote) as requests, pytest.raises(error, match=words):
        remote(random(B, S, D), **kwargs)
    assert len(requests) == 0


def test_a_worker_checks_the_rows_again() -> None:
    schema, sizes = span("llama", 0, L).schema, {"batch": B, "seq": S, "key": S}
    kwargs = {"lora": joined(lora_of("llama"), lora_of("llama", seed=90))}
    bound = bind_kwargs([((0, L), schema)], (0, L), kwargs, sizes)
    check_bound(bound, schema, sizes)
    whose = [i for i, tensor in enumerate(bound.tensors) if not tensor.is_floating_point()]
    assert len(whose) == len(TARGETS["llama"])
    for rows, words in ((ROWS + 1, "is 2; it takes"), (ROWS.float(), "it takes an int tensor")):
        tensors = [rows if i in whose else tensor for i, tensor in enumerate(bound.tensors)]
        with pytest.raises(KwargError, match=words):
            check_bound(replace(bound, tensors=tuple(tensors)), schema, sizes)


def test_rows_are_not_mapped_over() -> None:
    given, remote, hidden = joined(lora_of("llama")), flow("llama", TWO), random(B, S, D)
    with pytest.raises(KwargError, match="vmap, which hides the numbers"):
        vmap(lambda rows: remote(hidden, lora={n: {**p, "rows": rows} for n, p in given.items()}))(ROWS[None] - 1)


def test_a_call_is_checked_and_counted_without_values() -> None:
    given, hidden = joined(lora_of("llama"), lora_of("llama", seed=90)), random(B, S, D).to("meta")
    meta = {n: {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in p.items()} for n, p in given.items()}
    flow("llama", TWO).check(hidden, lora=meta)
