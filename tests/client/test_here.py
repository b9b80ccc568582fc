"""A caller's own function at a layer: the call comes back for it, and goes on with what it gives."""

# B batch, S seq, D hidden

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.errors import KwargError, ShapeError, SpanError, UnsupportedError
from tests.oracle import assert_bits, assert_close, layers_of, residual
from tests.oracle.tiny import HIDDEN, LAYERS, TWO, Requests, derivable, huggingface, left_padded, make_flow, random

MASK = left_padded((0, 2), 5)
H = random(2, 5, HIDDEN)
W = random(HIDDEN, HIDDEN, seed=1, scale=0.2)
V = random(HIDDEN, seed=2)
X: dict[str, Any] = {"hidden": H, "attention_mask": MASK}


def turned(hidden: Tensor) -> Tensor:
    return hidden + torch.tanh(hidden @ W.to(hidden.dtype))


def behind(model: Any, layer: int, fn: Any = turned) -> Any:
    """A plain hook that does the same to a layer's output."""

    def hook(_: Any, __: Any, out: Any) -> Any:
        return (fn(out[0]), *out[1:]) if isinstance(out, tuple) else fn(out)

    return layers_of(model)[layer], "post", hook


def before(model: Any, layer: int, fn: Any = turned) -> Any:
    return layers_of(model)[layer], "pre", lambda _, args: (fn(args[0]), *args[1:])


def oracle(model: Any, x: dict[str, Any], hooks: list[Any]) -> Tensor:
    others = {name: value for name, value in x.items() if name != "hidden"}
    return residual(model, x["hidden"], extra=hooks, **others)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_it_acts_as_a_plain_hook_does_to_the_bit(family: str, layer: int) -> None:
    flow, local = make_flow(family, TWO), huggingface(family)
    x = {**X, **({"position_ids": (MASK.cumsum(-1) - 1).clamp(min=0)} if flow.ends.takes_positions else {})}
    cases: dict[str, tuple[Any, Any]] = {
        "resid": ([kf.here(turned, layer)], [behind(local, layer)]),
        "resid_pre": ([kf.here(turned, layer, point="resid_pre")], [before(local, layer)]),
        "behind an edit, and a steered layer": (
            [kf.add(V, layer), kf.here(turned, layer)],
            [behind(local, layer, lambda h: h + V), behind(local, layer)],
        ),
        "before an edit": (
            [kf.here(turned, layer, point="resid_pre"), kf.scale(2.0, layer, point="resid_pre")],
            [before(local, layer), before(local, layer, lambda h: torch.where(MASK.bool()[..., None], h * 2, h))],
        ),
    }
    for what, (edits, hooks) in cases.items():
        if what.startswith("behind"):
            hooks[0] = behind(local, layer, lambda h: torch.where(MASK.bool()[..., None], h + V, h))
        assert_bits(flow(**x, edit=edits), oracle(local, x, hooks), what)
    if layer == 0:
        assert_bits(flow(**x, edit=kf.here(turned, point="embed")), oracle(local, x, [before(local, 0)]))


def test_two_in_a_row_run_as_they_are_given() -> None:
    flow, seen = make_flow("llama", TWO), list[str]()

    def say(what: str) -> Any:
        return lambda hidden: (seen.append(what), hidden)[1]

    edits = [
        kf.here(say("b"), 2, point="resid_pre"),
        kf.here(say("a"), 1),
        kf.here(say("c"), range(LAYERS)),
        kf.here(say("d"), 3),
    ]
    assert_bits(flow(**X, edit=edits), flow(**X))
    assert "".join(seen) == "cac" + "b" + "c" + "cd"


def test_sub_batches_and_slices() -> None:
    flow = make_flow("llama", TWO)
    whole = flow(**X, edit=[kf.here(turned, 1)])
    assert_close(flow.options(batch_tokens=5)(**X, edit=[kf.here(turned, 1)]), whole)  # rows of other shapes
    half = flow[:2](**X, edit=[kf.here(turned, 1)])
    assert_bits(flow[2:](half, attention_mask=MASK), whole)
    with pytest.raises(SpanError, match=r"this flow has layers 2:4 \(absolute\), not 1"):
        flow[2:](**X, edit=[kf.here(turned, 1)])


def test_gradients_reach_what_it_closes_over() -> None:
    flow, local = make_flow("llama", TWO, dtype=torch.float64), derivable("llama")
    hidden, w, v = H.double(), W.double().requires_grad_(), V.double().requires_grad_()

    def of(w: Tensor, v: Tensor) -> Tensor:
        edits = [kf.add(v, 0), kf.here(lambda h: h + torch.tanh(h @ w), 1)]
        return flow(hidden, attention_mask=MASK, edit=edits)[:, -1].square().sum()

    def expected(w: Tensor, v: Tensor) -> Tensor:
        real = MASK.bool()[..., None]
        hooks = [
            behind(local, 0, lambda h: torch.where(real, h + v, h)),
            behind(local, 1, lambda h: h + torch.tanh(h @ w)),
        ]
        return oracle(local, {"hidden": hidden, "attention_mask": MASK}, hooks)[:, -1].square().sum()

    with LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
        theirs = torch.autograd.grad(expected(w, v), (w, v), create_graph=True)
        twice = torch.autograd.grad(theirs[0].square().sum(), v, retain_graph=True)[0]
        moving = torch.stack([expected(w, one).detach() for one in (v, -v)])
    for ours in (torch.autograd.grad(of(w, v), (w, v)), torch.func.grad(of, (0, 1))(w.detach(), v.detach())):
        for mine, right in zip(ours, theirs, strict=True):
            assert_close(mine, right.detach())
    again = torch.autograd.grad(of(w, v), w, create_graph=True)[0].square().sum()
    assert_close(torch.autograd.grad(again, v)[0], twice)
    _, moved = torch.func.jvp(lambda v: of(w.detach(), v), (v.detach(),), (torch.ones_like(v),))
    assert_close(moved, theirs[1].detach().sum())
    many = torch.stack([v.detach(), -v.detach()])
    mapped = torch.func.vmap(lambda v: of(w.detach(), v))(many)
    assert_close(mapped, moving)


def test_captures_see_what_was_given_on() -> None:
    flow = make_flow("llama", TWO)
    out, acts = flow.capture({"resid": [0, 2], "resid_pre": [1, 2]}, **X, edit=[kf.here(turned, 1)])
    assert_bits(out, flow(**X, edit=[kf.here(turned, 1)]))
    assert_bits(acts["resid_pre", 1], acts["resid", 0])
    assert_bits(acts["resid_pre", 2][acts.mask], turned(flow[:2](**X))[MASK.bool()])
    with pytest.raises(KwargError, match="capture 'resid_pre' of layer 2 to see what it gave"):
        flow.capture({"resid": [1]}, **X, edit=[kf.here(turned, 1)])


def test_a_sweep_runs_it_by_itself() -> None:
    flow = make_flow("llama", TWO)
    cells = kf.grid(lambda layer: kf.here(turned, layer), layer=range(LAYERS))
    swept = kf.sweep(flow, X, cells)
    for layer, out in enumerate(swept):
        assert_bits(out, flow(**X, edit=[kf.here(turned, layer)]))
    found = kf.sweep(flow, X, {"none": {}, "here": {"edit": kf.here(turned, 2)}, "add": {"edit": kf.add(V, 2)}})
    assert_bits(found["none"], flow(**X))
    assert_bits(found["here"], swept[2])
    assert_bits(found["add"], flow(**X, edit=kf.add(V, 2)))
    both = kf.sweep(flow, {**X, "edit": [kf.here(turned, 1)]}, [{}, {"steer": {3: V}}])
    assert_bits(both[0], swept[1])
    assert_bits(both[1], flow(**X, edit=[kf.here(turned, 1)], steer={3: V}))


def test_an_estimate_says_what_it_costs_and_sends_nothing() -> None:
    flow = make_flow("llama", TWO)
    edits = [kf.here(turned, 0), kf.here(turned, 3)]
    with Requests(flow) as requests:
        plain, cut = flow.estimate(**X), flow.estimate(**X, edit=edits)
        flow.check(**X, edit=edits)
    assert not requests.seen
    assert plain.hops == ((0, 2), (2, 4)) and cut.hops == ((0, 1), (1, 2), (2, 4))
    assert cut.here == (1, 4) and "functions here before layers 1, 4" in str(cut)
    assert sum(cut.bytes_sent) == sum(plain.bytes_sent) + H.nbytes + MASK.nbytes


def test_what_is_wrong_is_the_callers_and_said_before_anything_is_sent() -> None:
    flow = make_flow("llama", TWO)
    with pytest.raises(KwargError, match="a worker would have to stop within a layer"):
        kf.here(turned, 1, point="mlp")
    with pytest.raises(KwargError, match="say where: layers=12"):
        kf.here(turned)
    with pytest.raises(KwargError, match="takes a function of hidden, got a int"):
        kf.here(3, 1)  # type: ignore[arg-type]
    with pytest.raises(SpanError, match="'embed' is the input of layer 0"):
        kf.here(turned, 2, point="embed")
    wrong: dict[str, tuple[Any, type[Exception], str]] = {
        "an edit behind": ([kf.here(turned, 1), kf.add(V, 1)], KwargError, "give it last"),
        "an edit before": (
            [kf.add(V, 1, point="resid_pre"), kf.here(turned, 1, point="resid_pre")],
            KwargError,
            "first",
        ),
        "another flow's layer": ([kf.here(turned, 9)], SpanError, r"edit\[0\]"),
        "another edit": ([kf.here(turned, 1), kf.add(V[:3], 2)], ShapeError, "hidden"),
    }
    with Requests(flow) as requests:
        for edits, error, words in wrong.values():
            with pytest.raises(error, match=words):
                flow(**X, edit=edits)
        with flow.session() as session, pytest.raises(UnsupportedError, match="a session takes no kf.here"):
            session.step(**X, edit=[kf.here(turned, 1)])
    assert not requests.seen


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda h: h[:, 1:], r"gave float32\(2, 4, 32\)"),
        (lambda h: h.double(), "gave .*float64"),
        (lambda h: None, "gave a NoneType"),
    ],
)
def test_what_it_gives_must_be_hidden_again(fn: Any, words: str) -> None:
    flow = make_flow("llama", TWO)
    with pytest.raises(ShapeError, match=words):
        flow(**X, edit=[kf.here(fn, 1)])

    def fails(hidden: Tensor) -> Tensor:
        raise ZeroDivisionError("my own")

    with pytest.raises(ZeroDivisionError, match="my own"):
        flow(**X, edit=[kf.here(fails, 1)])
    assert not [worker for worker in flow.peers.known() if worker.avoided]
    assert_bits(flow(**X), make_flow("llama", TWO)(**X))
