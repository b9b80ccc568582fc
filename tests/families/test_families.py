"""One suite: every family, every kwarg and every transform against the Hugging Face model with plain hooks.

A new family is a row in tiny.FAMILIES, a new kwarg a row in CASES.
"""

# B batch, S seq, P prefix, D hidden, L layers

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.blocks.span import chain, with_block_fn
from kwflow.client.flow import Flow
from kwflow.errors import AxesError, KwargError, KwflowError, ShapeError, SpanError, UnknownKwarg
from tests.families.marks import every_family, families
from tests.families.table import MASK, B, D, L, S
from tests.oracle import assert_bits, assert_close, assert_near, residual
from tests.oracle.tiny import (
    EACH,
    FAMILIES,
    HEADS,
    LAYERS,
    ONE,
    THREE,
    TWO,
    Requests,
    derivable,
    flow,
    huggingface,
    left_padded,
    positions_of,
    random,
    span,
)

DEEP = (*FAMILIES, "gemma2", "gpt_neo")  # mixed kinds of layers and scores that are capped; windows within the layer
ROTARY = ("llama", "gemma2")
JUMPS = positions_of(MASK) * 2 + torch.tensor([[5], [0], [1], [2]])
Leaves = Mapping[str, Tensor]


def gained(params, hidden, /, *, block, gain: kf.Axes["[layer] [batch] hidden"] = None, **kw):
    """A worker's own block_fn: what the block adds is multiplied."""
    out = block(params, hidden, **kw)
    if gain is None:
        return out
    gain = gain if gain.dim() == 1 else gain[:, None]
    return hidden + gain.to(hidden.dtype) * (out - hidden)


@dataclass(frozen=True)
class Case:
    """A kwarg as a flow takes it, and what it means: for each layer a tensor over (batch, seq, hidden)."""

    name: str
    leaves: Mapping[str, tuple[int, ...]]  # the float tensors, differentiated alone and together
    given: Callable[[Leaves], dict[str, Any]]
    local: Callable[[Leaves], dict[str, Any]]
    families: tuple[str, ...] = DEEP
    block_fn: Callable[..., Tensor] | None = None
    mask: Tensor | None = MASK


def steered(axes: str, *shape: int) -> Case:
    """``steer`` with declared axes, the canonical meaning spelt out."""
    names = axes.split()

    def local(leaves: Leaves) -> dict[str, Any]:
        by_layer = {}
        for layer in range(L):
            value = leaves["v"]
            if "layer" in names:
                value = value[layer if len(value) > 1 else 0]
            value = value if "seq" in names else value.unsqueeze(-2)
            by_layer[layer] = value if "batch" in names else value[None]
        return {"steer": by_layer}

    return Case(f"steer {axes} {shape}", {"v": shape}, lambda x: {"steer": kf.axes(x["v"], axes)}, local)


def four_d(leaves: Leaves) -> Tensor:
    """A float mask: causal and padded, and a bias of each head on what is seen."""
    seen = torch.ones(S, S, dtype=torch.bool).tril() & MASK.bool()[:, None, None, :]
    seen = seen | torch.eye(S, dtype=torch.bool)  # a row of -inf has no softmax
    return torch.where(seen, leaves["bias"], torch.finfo(leaves["bias"].dtype).min)


BOOL = torch.ones(S, S, dtype=torch.bool).tril() & MASK.bool()[:, None, None, :] | torch.eye(S, dtype=torch.bool)


def prompts(batch: int, prefix: int) -> Case:
    return Case(
        f"prompts of {batch} x {prefix}",
        {"p": (L, batch, prefix, D)},
        lambda x: {"prompts": x["p"]},
        lambda x: {"prompts": dict(enumerate(x["p"]))},
    )


def together(family: str) -> Case:
    positions = {"position_ids": JUMPS} if family in ROTARY else {}
    return Case(
        "together",
        {"p": (L, 1, 3, D), "v": (L, B, D), "g": (B, D)},
        lambda x: {
            **positions,
            **kf.per_layer({2: {"gain": kf.axes(x["g"], "batch hidden")}}),
            "prompts": x["p"],
            "steer": kf.axes(x["v"], "layer batch hidden"),
        },
        lambda x: {
            **positions,
            "prompts": dict(enumerate(x["p"])),
            "steer": {n: x["v"][n, :, None] for n in range(L)},
            "gain": {2: x["g"][:, None]},
        },
        (family,),
        gained,
    )


CASES = [
    Case("nothing", {}, lambda x: {}, lambda x: {}, mask=None),
    Case("mask of one row", {}, lambda x: {}, lambda x: {}, mask=MASK[2:3]),
    Case("mask of bool", {}, lambda x: {}, lambda x: {}, mask=MASK.bool()),
    Case("mask", {}, lambda x: {}, lambda x: {}),
    Case(
        "float mask",
        {"bias": (B, HEADS, S, S)},
        lambda x: {"attention_mask": four_d(x)},
        lambda x: {"attention_mask": four_d(x)},
        mask=None,
    ),
    Case(
        "float mask of one row and head",
        {"bias": (1, 1, 1, S)},
        lambda x: {"attention_mask": four_d(x)[3:]},
        lambda x: {"attention_mask": four_d(x)[3:]},
        mask=None,
    ),
    Case(
        "bool mask 4-D",
        {},
        lambda x: {"attention_mask": BOOL},
        lambda x: {"attention_mask": torch.zeros(BOOL.shape).masked_fill(~BOOL, torch.finfo(torch.float32).min)},
        mask=None,
    ),
    Case("position_ids", {}, lambda x: {"position_ids": JUMPS}, lambda x: {"position_ids": JUMPS}, ROTARY),
    Case(
        "position_ids of one row",
        {},
        lambda x: {"position_ids": JUMPS[1:2]},
        lambda x: {"position_ids": JUMPS[1:2]},
        ROTARY,
    ),
    prompts(1, 3),
    prompts(B, 4),
    prompts(1, S + 3),
    steered("hidden", D),
    steered("seq hidden", S, D),
    steered("batch hidden", B, D),
    steered("batch seq hidden", B, S, D),
    steered("layer hidden", L, D),
    steered("layer seq hidden", L, S, D),
    steered("layer batch hidden", L, B, D),
    steered("layer batch seq hidden", L, B, S, D),
    steered("layer batch seq hidden", 1, 1, 1, D),
    steered("layer batch seq hidden", L, 1, S, D),
    steered("batch seq hidden", B, 1, D),
    Case("steer by layer", {"v": (D,)}, lambda x: {"steer": {2: x["v"]}}, lambda x: {"steer": {2: x["v"][None, None]}}),
    Case(
        "steer by layer, with axes",
        {"v": (B, D), "w": (S, D)},
        lambda x: {"steer": {1: kf.axes(x["v"], "batch hidden"), 3: kf.axes(x["w"], "seq hidden")}},
        lambda x: {"steer": {1: x["v"][:, None], 3: x["w"][None]}},
    ),
    Case(
        "per_layer list",
        {"v": (D,), "p": (B, 2, D)},
        lambda x: kf.per_layer(
            [{"steer": x["v"]}, None, {"prompts": x["p"], "steer": 2 * x["v"]}, {"prompts": x["p"][:1]}]
        ),
        lambda x: {
            "steer": {0: x["v"][None, None], 2: 2 * x["v"][None, None]},
            "prompts": {2: x["p"], 3: x["p"][:1]},
        },
    ),
    Case(
        "per_layer dict",
        {"v": (D,)},
        lambda x: kf.per_layer({3: {"steer": x["v"]}, 0: {}}),
        lambda x: {"steer": {3: x["v"][None, None]}},
    ),
    Case(
        "own kwarg, by rank",
        {"g": (L, B, D)},
        lambda x: {"gain": x["g"]},
        lambda x: {"gain": {n: x["g"][n][:, None] for n in range(L)}},
        block_fn=gained,
    ),
    Case(
        "own kwarg of one row",
        {"g": (1, D)},
        lambda x: {"gain": kf.axes(x["g"], "batch hidden")},
        lambda x: {"gain": dict.fromkeys(range(L), x["g"][:, None])},
        block_fn=gained,
    ),
    *(together(family) for family in DEEP),
]
FEW = ("nothing", "mask of one row", "together")

# every form for one family: how kwargs are cut is the same in all; tests/kwargs/suite.py has each kwarg in several
ROWS = [
    pytest.param(f, c, id=f"{f}-{c.name}", marks=() if f == "llama" else pytest.mark.rest)
    for c in CASES
    for f in c.families
    if f == "llama" or c.name in FEW
]
every_row = pytest.mark.parametrize(("family", "case"), ROWS)
QUICK = (*FEW, "float mask", "position_ids", "prompts of 4 x 4", "steer by layer, with axes", "per_layer list")
few_rows = pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(*row.values, id=row.id, marks=row.marks if row.values[1].name in QUICK else pytest.mark.rest)
        for row in ROWS
    ],
)
TOGETHER = [
    pytest.param(family, together(family), id=family, marks=() if family == "llama" else pytest.mark.rest)
    for family in (*FAMILIES, "gemma2")
]
all_at_once = pytest.mark.parametrize(("family", "case"), TOGETHER)


def tensors(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """hidden, and the case's leaves."""
    leaves = {name: random(*shape, seed=i + 1, dtype=dtype) for i, (name, shape) in enumerate(case.leaves.items())}
    return {"hidden": random(B, S, D, dtype=dtype), **leaves}


def given(case: Case, x: Leaves) -> dict[str, Any]:
    return {**({} if case.mask is None else {"attention_mask": case.mask}), **case.given(x)}


def expected(
    family: str, case: Case, x: Leaves, rows: slice = slice(None), dtype: torch.dtype = torch.float32
) -> Tensor:
    """The oracle's residual for some rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(part) for key, part in value.items()}
        return value[rows] if value is not None and len(value) > 1 else value

    mask = None if case.mask is None else case.mask.expand(B, S)  # transformers takes no mask of one row
    local = cut({"attention_mask": mask, **case.local(x)})
    model = huggingface(family, dtype) if dtype is torch.float32 else derivable(family)
    return residual(model, x["hidden"][rows], **local)


WEIGHTS = random(B, S, D, seed=99) * MASK[..., None]


def loss(out: Tensor) -> Tensor:
    """Every real position counts, each differently."""
    return (out * WEIGHTS.to(out.dtype)).sum()


def leaves_that_require(x: Leaves, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: value.clone().requires_grad_(name in names) for name, value in x.items()}


# ---- values


@every_row
def test_values_are_huggingface_s_to_the_bit(family: str, case: Case) -> None:
    x = tensors(case)
    reference = expected(family, case, x)
    for cuts in (ONE, TWO, THREE):
        assert_bits(
            flow(family, cuts, block_fn=case.block_fn)(x["hidden"], **given(case, x)), reference, f"spans {cuts}"
        )
    spec = span(family, 0, L)
    blocks = (spec if case.block_fn is None else with_block_fn(spec, case.block_fn, "")).blocks
    assert_bits(chain(blocks)(spec.params, x["hidden"], **given(case, x)), reference, "chain")


@few_rows
def test_values_do_not_depend_on_how_rows_are_cut(family: str, case: Case) -> None:
    x = tensors(case)
    whole = expected(family, case, x)
    same_cuts = torch.cat([expected(family, case, x, rows) for rows in (slice(0, 3), slice(3, B))])
    out = flow(family, TWO, block_fn=case.block_fn).options(batch_tokens=3 * S)(x["hidden"], **given(case, x))
    assert_bits(out, same_cuts, "three rows, then one")
    assert_near(out, whole, "three rows, then one")


@all_at_once
def test_one_block_workers_are_one_worker_to_the_bit(family: str, case: Case) -> None:
    found = []
    for cuts in (ONE, EACH):
        x = leaves_that_require(tensors(case), ("hidden", *case.leaves))
        out = flow(family, cuts, block_fn=case.block_fn)(x["hidden"], **given(case, x))
        loss(out).backward()
        found.append({"out": out, **{name: value.grad for name, value in x.items()}})
    for name, value in found[0].items():
        # the layers' shares of a kwarg's gradient are summed in another order
        (assert_bits if name in ("out", "hidden") else assert_close)(found[1][name], value, name)


def test_llama_in_bfloat16() -> None:
    case = together("llama")
    x = tensors(case, torch.bfloat16)
    local = {"attention_mask": MASK, **case.local(x)}
    model = huggingface("llama", torch.bfloat16, torch.bfloat16)
    reference = residual(model, x["hidden"], **local)
    for cuts in (ONE, THREE):
        remote = flow("llama", cuts, torch.bfloat16, gained)
        assert_bits(remote(x["hidden"], **given(case, x)), reference, f"spans {cuts}")
    names = ("hidden", *case.leaves)
    ours, theirs = leaves_that_require(x, names), leaves_that_require(x, names)
    loss(remote(ours["hidden"], **given(case, ours))).backward()
    loss(residual(model, theirs["hidden"], **{"attention_mask": MASK, **case.local(theirs)})).backward()
    for name in names:
        assert_close(ours[name].grad, theirs[name].grad, name)


def test_kwargs_of_another_precision_are_cast_where_they_act() -> None:
    """The gradient comes back in the caller's dtype."""
    hidden, model = random(B, S, D).bfloat16(), huggingface("llama", torch.bfloat16, torch.bfloat16)
    for dtype in (torch.float64, torch.float32, torch.float16):
        v = random(D, dtype=dtype, seed=1).requires_grad_()
        p = random(L, 1, 3, D, dtype=dtype, seed=2).requires_grad_()
        out = flow("llama", TWO, torch.bfloat16)(hidden, steer={2: v}, prompts=p)
        local = residual(model, hidden, steer={2: v.detach()[None, None]}, prompts=dict(enumerate(p.detach())))
        assert_bits(out, local, str(dtype))
        out.float().sum().backward()
        for leaf in (v, p):
            assert leaf.grad is not None and leaf.grad.dtype == dtype


# ---- gradients


@few_rows
def test_gradients_alone_and_together(family: str, case: Case) -> None:
    names, base = ("hidden", *case.leaves), tensors(case)
    whole, split = (flow(family, cuts, block_fn=case.block_fn) for cuts in (ONE, THREE))
    wanted = leaves_that_require(base, names)
    loss(expected(family, case, wanted)).backward()

    def backward(remote: Flow, subset: tuple[str, ...], *, again: bool = False) -> None:
        x = leaves_that_require(base, subset)
        out = loss(remote(x["hidden"], **given(case, x)))
        first = torch.autograd.grad(out, [x[name] for name in subset], retain_graph=again)
        for name, value in zip(subset, first, strict=True):
            assert_close(value, wanted[name].grad, f"{name} of {subset}")  # type: ignore[arg-type]
        if again:
            second = torch.autograd.grad(out, [x[name] for name in subset])
            for name, value, other in zip(subset, first, second, strict=True):
                assert_bits(other, value, f"{name}, again")

    backward(whole, names)
    backward(split.options(batch_tokens=3 * S), names, again=True)
    for name in names if len(names) > 2 else ():
        backward(split, (name,))


def test_the_same_gradients_are_none() -> None:
    """No path is None under plain autograd, not zeros, as it is locally; torch.func gives zeros."""

    def picky(
        params, hidden, /, *, block, near: kf.Axes["[seq] hidden"] = None, unused: kf.Axes["[seq] hidden"] = None, **kw
    ):
        out = block(params, hidden, **kw)
        return out if near is None or block.layer != 1 else out + near

    x = {name: random(D, seed=i).requires_grad_() for i, name in enumerate(["near", "unused", "v"])}
    hidden = random(2, 3, D).requires_grad_()
    spec = with_block_fn(span("gpt2", 0, L), picky, "picky")
    for cuts in (ONE, TWO, EACH):
        remote = flow("gpt2", cuts, block_fn=picky)

        def outputs(fn: Any) -> Tensor:
            return fn(hidden, near=x["near"], unused=x["unused"], steer={2: x["v"]})

        ours = torch.autograd.grad(outputs(remote).sum(), [hidden, *x.values()], allow_unused=True)
        theirs = torch.autograd.grad(
            outputs(lambda h, **kw: chain(spec.blocks)(spec.params, h, **kw)).sum(),
            [hidden, *x.values()],
            allow_unused=True,
        )
        assert [g is None for g in ours] == [g is None for g in theirs] == [False, False, True, False]
        for a, b in zip(ours, theirs, strict=True):
            if a is not None and b is not None:
                assert_close(a, b)
        # a kwarg that nothing depends on, alone
        (none,) = torch.autograd.grad(
            remote(hidden.detach(), unused=x["unused"]).sum() + x["unused"].sum() * 0, [x["unused"]], allow_unused=True
        )
        assert none is not None and not none.any()
        alone = remote(hidden.detach(), unused=x["unused"])
        assert torch.autograd.grad(alone.sum(), [x["unused"]], allow_unused=True) == (None,)
    zeros = grad(lambda u: remote(hidden.detach(), unused=u).sum())(x["unused"].detach())
    assert_bits(zeros, torch.zeros(D))


def test_only_what_is_listed_is_sent_back() -> None:
    remote = flow("llama", THREE)
    hidden, v = random(2, 3, D), random(D, seed=1).requires_grad_()
    with Requests(remote) as requests:
        remote(hidden)
        assert len(requests) == 3
        remote(hidden, steer={3: v}).sum().backward()
        # only the last worker is asked; it returns the gradient of the vector, and none of hidden
        ((_, request, reply),) = requests.seen[6:]
        assert request.meta["span"] == [3, 4] and [t.shape for t in reply.tree] == [(D,)]
        del requests.seen[:]
        remote(hidden, steer={1: v}).sum().backward()
        sent = [[None if t is None else tuple(t.shape) for t in reply.tree] for _, _, reply in requests.seen[3:]]
        assert sent == [
            [(2, 3, D)],
            [(D,)],
        ]  # the last worker hands the cotangent on, the middle one answers, the first is not asked
        del requests.seen[:]
        remote(
            hidden.requires_grad_(), attention_mask=torch.ones(2, 3)[:, :].long(), steer={3: v.detach()}
        ).sum().backward()
        assert [len(reply.tree) for _, _, reply in requests.seen[3:]] == [1, 1, 1]
        with torch.no_grad():
            del requests.seen[:]
            remote(hidden, steer={1: v})
        assert all("ops" not in request.meta for _, request, _ in requests.seen) and len(requests) == 3


# ---- torch.func, against the Hugging Face model under the same transforms, in float64


def functions(family: str, case: Case, rows: int = B) -> tuple[Any, Any, dict[str, Tensor]]:
    """The remote and the local function of (hidden, *leaves), and their inputs."""
    x, _ = tensors(case, torch.float64), derivable(family)  # loaded here: not under vmap
    remote = flow(family, TWO, torch.float64, case.block_fn).options(batch_tokens=rows * S)

    def ours(*values: Tensor) -> Tensor:
        named = dict(zip(x, values, strict=True))
        return remote(named["hidden"], **given(case, named))

    def local(*values: Tensor) -> Tensor:
        with LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
            return expected(family, case, dict(zip(x, values, strict=True)), dtype=torch.float64)

    return ours, local, x


def compare(transform: Callable[[Any], Any], ours: Any, local: Any) -> None:
    """The same transform of both."""
    found, wanted = transform(ours), transform(local)
    found, wanted = (v if isinstance(v, tuple) else (v,) for v in (found, wanted))
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_close(a, b, f"output {number}", small=True)
    assert max(b.abs().max() for b in wanted) > 1e-3


@all_at_once
def test_first_order_transforms(family: str, case: Case) -> None:
    ours, local, x = functions(family, case, rows=3)
    values = tuple(x.values())
    every = tuple(range(len(values)))
    tangents = tuple(random(*v.shape, seed=50 + i, dtype=torch.float64) for i, v in enumerate(values))
    compare(lambda fn: fn(*values), ours, local)
    compare(lambda fn: grad(lambda *v: loss(fn(*v)), every)(*values), ours, local)
    compare(lambda fn: vjp(fn, *values)[1](random(B, S, D, seed=7, dtype=torch.float64)), ours, local)
    compare(lambda fn: jvp(fn, values, tangents), ours, local)
    compare(lambda fn: jvp(lambda last: fn(*values[:-1], last), values[-1:], tangents[-1:]), ours, local)


@all_at_once
def test_nested_transforms(family: str, case: Case) -> None:
    ours, local, x = functions(family, case)
    *first, last = x.values()
    several = torch.stack([last, 2 * last, -last])

    def of_last(fn: Any) -> Any:
        return lambda v: loss(fn(*first, v))

    compare(lambda fn: vmap(lambda v: fn(*first, v))(several), ours, local)
    compare(lambda fn: vmap(fn, in_dims=(*[None] * len(first), 0))(*first, several), ours, local)
    compare(lambda fn: vmap(grad(of_last(fn)))(several), ours, local)
    compare(lambda fn: grad(lambda v: vmap(of_last(fn))(v).square().sum())(several), ours, local)
    # forward over reverse: a hessian-vector product
    compare(lambda fn: jvp(grad(of_last(fn)), (last,), (torch.sin(last),)), ours, local)
    # reverse over reverse
    compare(lambda fn: grad(lambda v: (grad(of_last(fn))(v) * torch.sin(last)).sum())(last), ours, local)
    # reverse over forward; without pads, whose fully masked rows torch itself derives to NaN, locally too
    ours, local, _ = functions(family, replace(case, mask=None))
    compare(lambda fn: grad(lambda v: jvp(of_last(fn), (v,), (torch.cos(last),))[1])(last), ours, local)


@pytest.mark.slow
@families(["llama", "gpt2"])
def test_jacobians(family: str) -> None:
    """With respect to three numbers that scale vectors."""
    case = together(family)
    ours, local, x = functions(family, case)
    hidden, p, v, g = x.values()

    def few(fn: Any) -> Any:
        return lambda a: fn(hidden, a[0] * p, a[1] * v, a[2] * g)[:, -1, :2]

    at = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    compare(lambda fn: jacrev(few(fn))(at), ours, local)
    compare(lambda fn: jacfwd(few(fn))(at), ours, local)
    compare(lambda fn: hessian(lambda a: few(fn)(a).square().sum())(at), ours, local)


@all_at_once
def test_plain_double_backward(family: str, case: Case) -> None:
    ours, local, x = functions(family, case, rows=3)

    def twice(fn: Any) -> tuple[Tensor, ...]:
        leaves = [value.clone().requires_grad_() for value in x.values()]
        first = torch.autograd.grad(loss(fn(*leaves)), leaves, create_graph=True, allow_unused=True)
        some = sum((g * torch.sin(v)).sum() for g, v in zip(first, leaves, strict=True) if g is not None)
        second = torch.autograd.grad(some, leaves, allow_unused=True)
        return tuple(g if g is not None else torch.zeros(()).double() for g in (*first, *second))

    compare(twice, ours, local)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.rest), "llama"])
def test_gradcheck(family: str) -> None:
    """Finite differences, first and second order; llama's norms are lifted to float64 by its workers.

    Not with check_forward_ad: a dual level of torch.autograd.forward_ad is the whole process's, and these workers' too.
    """
    remote = flow(family, TWO, torch.float64).options(batch_tokens=3)
    hidden = random(2, 3, D, dtype=torch.float64).requires_grad_()
    v, p = random(1, D, seed=1, dtype=torch.float64), random(L, 1, 2, D, seed=2, dtype=torch.float64)

    def fn(hidden: Tensor, v: Tensor, p: Tensor) -> Tensor:
        return remote(hidden, steer={1: kf.axes(v, "batch hidden")}, prompts=p, attention_mask=left_padded([0, 1], 3))[
            :, 1:
        ]

    inputs = (hidden, v.requires_grad_(), p.requires_grad_())
    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, inputs, fast_mode=True)


# ---- nothing is guessed, nothing is silent


@every_family
def test_batch_seq_heads_layers_and_ranks_of_one_size(family: str) -> None:
    """Batch, seq, heads, layers and a free axis are 4: an axis that is guessed by its size is guessed wrong."""
    assert HEADS == LAYERS == 4
    mask, hidden = left_padded([0, 1, 2, 3], 4), random(4, 4, D)

    def ranked(params, hidden, /, *, block, a: kf.Axes["rank batch"], b: kf.Axes["seq rank hidden"], **kw):
        return block(params, hidden, **kw) + torch.einsum("rb,srh->bsh", a, b)

    v, w, a, b = random(4, 4, D, seed=1), random(4, 4, D, seed=2), random(4, 4, seed=3), random(4, 4, D, seed=4)
    kwargs = {"attention_mask": mask, "steer": kf.axes(v, "layer seq hidden"), "prompts": w[:, :, None], "a": a, "b": b}
    plus = torch.einsum("rb,srh->bsh", a, b)
    steer = {n: v[n][None] + plus for n in range(4)}
    for rows in (1, 3, 4):
        remote = flow(family, TWO, block_fn=ranked).options(batch_tokens=rows * 4)
        reference = residual(
            huggingface(family), hidden, attention_mask=mask, steer=steer, prompts=dict(enumerate(w[:, :, None]))
        )
        real = mask.bool()
        assert_near(remote(hidden, **kwargs)[real], reference[real], f"{rows} rows")
    headed = random(4, 4, 4, 4, seed=5)  # a mask by head: batch, head, seq and key are 4
    out = flow(family, TWO).options(batch_tokens=4)(hidden, attention_mask=headed)
    assert_near(out, residual(huggingface(family), hidden, attention_mask=headed))


@families(["llama", "gpt2"], quick=("llama", "gpt2"))
def test_what_is_wrong_is_refused_before_anything_is_sent(family: str) -> None:
    remote, hidden, v = flow(family, TWO), random(2, 3, D), random(D)
    refused: list[tuple[dict[str, Any], type[KwflowError], str]] = [
        ({"stear": v}, UnknownKwarg, "Did you mean 'steer'"),
        ({"use_cache": True}, UnknownKwarg, "use_cache"),
        ({"steer": v}, AxesError, "kf.axes"),
        ({"steer": {9: v}}, SpanError, "layer 9"),
        ({"steer": {-1: v}}, SpanError, "layer -1"),
        ({"steer": {"2": v}}, SpanError, "'2'"),
        ({"steer": {2: v[:-1]}}, ShapeError, "hidden = 31, expected 32"),
        ({"steer": {2: v.long()}}, KwargError, "float"),
        ({"steer": {2: [0.0] * D}}, KwargError, "list"),
        ({"steer": kf.axes(random(3, D), "batch hidden")}, ShapeError, "batch = 3, expected 2 or 1"),
        ({"steer": kf.axes(random(3, D), "layer hidden")}, ShapeError, "layer = 3, expected 4 or 1"),
        ({"steer": kf.axes(random(2, D), "rows hidden")}, AxesError, "rows hidden"),
        ({"prompts": random(L, 2, D)}, ShapeError, "rank 3"),
        ({"prompts": random(L, 3, 2, D)}, ShapeError, "batch = 3"),
        ({"prompts": random(L, 2, 2, D).int()}, KwargError, "int32"),
        ({"attention_mask": torch.ones(2, 4).long()}, ShapeError, "key = 4, expected 3"),
        ({"attention_mask": torch.ones(2, 3)}, KwargError, "float32"),
        ({"attention_mask": torch.full((2, 3), 2)}, KwargError, "0 and 1"),
        ({"attention_mask": torch.ones(3, 3, dtype=torch.bool)}, ShapeError, "batch = 3"),
        ({"attention_mask": torch.ones(2, 1, 3, 3), "prompts": random(L, 1, 2, D)}, KwargError, "4-D"),
        (kf.per_layer([{"steer": v}] * 3), ShapeError, "list of 3"),
        (kf.per_layer({7: {"steer": v}}), SpanError, "layer 7"),
        (kf.per_layer({1: {"stear": v}}), UnknownKwarg, "steer"),
        (kf.per_layer({1: {"steer": kf.axes(random(L, D), "layer hidden")}}), AxesError, "layer"),
    ]
    if family == "llama":
        refused += [
            ({"position_ids": torch.zeros(2, 4).long()}, ShapeError, "seq = 4"),
            ({"position_ids": torch.zeros(2, 3)}, KwargError, "int"),
        ]
    else:
        refused.append(({"position_ids": torch.zeros(2, 3).long()}, KwargError, "position_ids"))
    with Requests(remote) as requests:
        for kwargs, error, says in refused:
            with pytest.raises(error, match=says):
                remote(hidden, **kwargs)
            with pytest.raises(error, match=says):
                remote(hidden.clone().requires_grad_(), **kwargs)
        for bad in (random(2, D), random(2, 3, D + 1), torch.ones(2, 3, D).long(), [1.0], None):
            with pytest.raises((ShapeError, KwargError), match="hidden"):
                remote(bad)
        assert len(requests) == 0
        remote(hidden)
        assert len(requests) == 2


@every_family
@pytest.mark.parametrize("pads", [1, 8])
def test_left_padding_changes_nothing(family: str, pads: int) -> None:
    """A 6-token prompt alone, and with pads in a batch: logits of the real tokens are equal, whatever the pad ids."""
    remote = flow(family, TWO)
    tokens = torch.arange(2, 8)[None]
    alone = remote.head(remote(**remote.inputs(tokens)))
    found = []
    for pad in (0, 63):
        padded = torch.cat([torch.full((1, pads), pad), tokens], 1)
        batch = {
            "input_ids": torch.cat([padded, padded.flip(1)]),
            "attention_mask": torch.cat([left_padded([pads], 6 + pads), torch.ones(1, 6 + pads).long()]),
        }
        x = remote.inputs(batch)
        logits = remote.head(remote(**x, prompts=torch.zeros(L, 1, 2, D)))
        assert not logits.isnan().any()
        assert_near(logits[:1, pads:], alone)
        found.append(logits[0, pads:])
    assert_bits(found[0], found[1])
