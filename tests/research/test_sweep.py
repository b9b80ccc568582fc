"""kf.sweep against calls one by one and the Hugging Face model with hooks: values, gradients, requests, labels."""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import AxesError, KwargError, ShapeError, SpanError, UnknownKwarg
from tests.kwargs.rows import prefix_sizes
from tests.oracle import assert_bits, assert_near, residual
from tests.oracle.tiny import (
    EACH,
    HEADS,
    HIDDEN,
    LAYERS,
    TWO,
    Requests,
    ends,
    flow,
    huggingface,
    left_padded,
    make_flow,
    random,
)

PADS = (0, 3, 1, 2)
B, S, D, L = len(PADS), 8, HIDDEN, LAYERS
MASK = left_padded(PADS, S)
V, W = random(D, seed=1), random(D, seed=2)
ROWS, COLUMNS = kf.axes(random(B, D, seed=3), "batch hidden"), kf.axes(random(S, D, seed=4), "seq hidden")
HEAD = random(HEADS, D // HEADS, seed=5)
BASIS = torch.linalg.qr(random(D, 4, seed=12))[0]


def places(count: int, seed: int) -> Any:
    return kf.axes(random(count, D, seed=seed), "pos hidden")


def inputs(family: str) -> dict[str, Any]:
    x = {"hidden": random(B, S, D, seed=6), "attention_mask": MASK}
    return x if family != "llama" else {**x, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}


VARIANTS: dict[Any, dict[str, Any]] = {
    "as it is": {},
    "steer 1": {"steer": {1: V}},
    "steer 1 twice": {"steer": {1: 2 * V}},
    "nothing at 1": {"steer": {1: V * 0}},
    "steer 1 by row": {"steer": {1: ROWS}},
    "steer 1 by column": {"steer": {1: COLUMNS}},
    "steer 2 layers": {"steer": {1: V, 3: W}},
    "steer all": {"steer": kf.axes(random(L, D, seed=7), "layer hidden")},
    "steer all again": {"steer": kf.axes(random(L, D, seed=8), "layer hidden")},
    "steer last": {"steer": {L - 1: V}},
    "add 1": {"edit": [kf.add(V, 1)]},
    "add 1, stronger": {"edit": [kf.add(V, 1, scale=-3)]},
    "add 1 at the end": {"edit": [kf.add(V, 1, at="prompt[-1]", scale=0.5)]},
    "add 1 at places": {"edit": [kf.add(V, 1, at=[4, 0])]},
    "put 1": {"edit": [kf.put(places(2, 9), 1, at=[4, 0])]},
    "put 1, others": {"edit": [kf.put(places(2, 10), 1, at=[1, 3])]},
    "put 1, each": {"edit": [kf.put(random(B, 1, D, seed=11), 1, at=torch.tensor([[4], [1], [0], [2]]))]},
    "put 1, three": {"edit": [kf.put(places(3, 12), 1, at="prompt[0:3]")]},
    "scale 1": {"edit": [kf.scale(0.0, 1, at=[2])]},
    "scale 1, number": {"edit": [kf.scale(2.0, 1, at=[3])]},
    "two": {"edit": [kf.project_out(V, [1, 2]), kf.add(W, 1)]},
    "two again": {"edit": [kf.project_out(W, [1, 2]), kf.add(V, 1)]},
    "both": {"steer": {2: V}, "edit": [kf.scale(0.5, 2)]},
    "attn": {"edit": [kf.add(V, 2, point="attn")]},
    "attn and resid": {"edit": [kf.add(V, 2), kf.add(W, 2, point="attn")]},
    "heads": {"edit": [kf.put(HEAD[:2], 1, point="head", heads=[0, 2])]},
    "heads, others": {"edit": [kf.put(HEAD[1:3], 1, point="head", heads=[0, 2])]},
    "neurons": {"edit": [kf.scale(0.0, 2, point="neuron", dims=[3, 7])]},
    "neurons, stronger": {"edit": [kf.scale(2.0, 2, point="neuron", dims=[3, 7])]},
    "dims": {"edit": [kf.add(V[:2], 1, dims=[0, 9])]},
    "dims, others": {"edit": [kf.add(V[:2], 1, dims=[1, 9])]},
    "rotate": {"edit": [kf.edits.rotate(V, 1, basis=BASIS[:, :2])]},
    "rotate, others": {"edit": [kf.edits.rotate(W, 1, basis=BASIS[:, 2:])]},
    "component": {"edit": [kf.edits.set_component(V, 1, to=1.0)]},
    "component, others": {"edit": [kf.edits.set_component(W, 1, to=-2.0)]},
    "clamp": {"edit": [kf.edits.clamp_min(0.0, 1), kf.edits.clamp_max(0.5, 1)]},
    "embed": {"edit": [kf.add(V, point="embed")]},
    "resid_pre": {"edit": [kf.scale(0.7, 2, point="resid_pre")]},
    "head mask": {"head_mask": {2: torch.tensor([1.0, 0, 1, 0])}},
    "positions": {"head_mask": {2: torch.tensor([0.0, 0, 1, 0])}, "steer": {1: V}},
}


def one_by_one(flow: Any, x: Mapping[str, Any], variants: Mapping[Any, Any]) -> dict[Any, Tensor]:
    return {label: flow(**x, **kwargs) for label, kwargs in variants.items()}


@pytest.mark.parametrize(
    ("family", "common"),
    [
        ("llama", "kwargs"),
        pytest.param("gpt2", "none", marks=pytest.mark.rest),
        pytest.param("bloom", "kwargs", marks=pytest.mark.rest),
    ],
)
def test_every_variant_is_its_own_call(family: str, common: str) -> None:
    """Whatever ``x`` does before, at and after the layers that the variants change."""
    whole, x = flow(family, TWO), inputs(family)
    if common == "kwargs":
        x |= {"prompts": random(L, B, 3, D, seed=13), "ia3": {_projection(whole): random(L, B, _out(whole), seed=14)}}
    found = kf.sweep(whole, x, VARIANTS)
    assert list(found) == list(VARIANTS)
    for label, expected in one_by_one(whole, x, VARIANTS).items():
        assert_near(found[label], expected, str(label))


def _projection(whole: Any) -> str:
    return next(iter(whole.plan(inputs(whole.ends.name)["hidden"], {}).route[0].schema.projections))


def _out(whole: Any) -> int:
    return whole.plan(inputs(whole.ends.name)["hidden"], {}).route[0].schema.projections[_projection(whole)][1]


@pytest.mark.parametrize("given", ["steer", "edit"])
def test_what_x_does_at_the_same_layer_comes_first_or_is_kept_in_order(given: str) -> None:
    whole = flow("llama", TWO)
    own = {"steer": {1: W}} if given == "steer" else {"edit": [kf.scale(0.5, 1), kf.put(W, 2, at=[0])]}
    variants = {n: v for n, v in VARIANTS.items() if given not in v}
    x = {**inputs("llama"), **own}
    found = kf.sweep(whole, x, variants)
    for label, expected in one_by_one(whole, x, variants).items():
        assert_near(found[label], expected, str(label))


def test_the_hugging_face_model_gives_the_same() -> None:
    x = inputs("gpt2")
    found = kf.sweep(flow("gpt2", TWO), x, [{"steer": {layer: V}} for layer in range(L)])
    assert found.shape == (L, B, S, D)
    for layer in range(L):
        expected = residual(huggingface("gpt2"), x["hidden"], steer={layer: V}, attention_mask=MASK)
        assert_near(found[layer], expected, str(layer))


def test_a_grid_has_its_shape_and_runs_together() -> None:
    """64 vectors at one layer: what is before it once, and one request; only the layers after it."""
    vectors, x = random(64, D, seed=15), {"hidden": random(1, 4, D, seed=16)}
    whole = make_flow("llama", (L,))
    with Requests(whole) as requests:
        found = kf.sweep(whole, x, kf.grid(kf.add, value=vectors, layers=[1]), reduce=lambda out: out[0, -1])
    assert found.shape == (64, 1, D)
    assert [request.meta["span"] for _, request, _ in requests.seen] == [[0, 2], [2, L]]
    for i in (0, 17, 63):
        assert_near(found[i, 0], whole(**x, steer={1: vectors[i]})[0, -1])

    grid = kf.grid(kf.add, value=vectors[:2], layers=[0, 3], at=["prompt[-1]", "all", [1]], scale=range(2))
    found = kf.sweep(whole, x, grid, reduce=lambda out: out.norm())
    assert found.shape == (2, 2, 3, 2)
    expected = whole(**x, edit=[kf.add(vectors[1], 3, at=[1], scale=1.0)]).norm()
    assert_near(found[1, 1, 2, 1], expected)


def test_a_patching_map() -> None:
    """Activation patching, layer by position, one request for each layer."""
    whole, clean, x = make_flow("llama", (L,)), inputs("llama"), inputs("llama")
    x["hidden"] = random(B, S, D, seed=17)
    _, acts = whole.capture({"resid": range(L)}, **clean)
    grid = kf.grid(
        lambda layer, pos: kf.put(acts["resid", layer][:, [pos]], layer, at=[pos]), layer=range(L), pos=range(5)
    )
    with Requests(whole) as requests:
        found = kf.sweep(whole, x, grid, reduce=lambda out: out[:, -1])
    assert len(requests) == L + L - 1  # each layer once, and what is after it once
    for layer in range(L):
        for pos in range(5):
            edit = kf.put(acts["resid", layer][:, [pos]], layer, at=[pos])
            assert_near(found[layer, pos], whole(**x, edit=[edit])[:, -1], f"{layer} {pos}")


def test_pieces_hold_what_the_options_allow() -> None:
    whole, x = make_flow("llama", (L,)).options(batch_tokens=S * B * 2), inputs("llama")
    with Requests(whole) as requests:
        found = kf.sweep(whole, x, [{"steer": {0: i * V}} for i in range(20)])
    rows = [request.tree["hidden"].shape[0] for _, request, _ in requests.seen]
    assert rows == [B, *[2 * B] * 10]
    assert_near(found[19], whole(**x, steer={0: 19 * V}))


@pytest.mark.parametrize("cuts", [TWO, pytest.param(EACH, marks=pytest.mark.slow)])
def test_gradients_go_through_a_sweep(cuts: tuple[int, ...]) -> None:
    whole, x, hidden = flow("gpt2", cuts), inputs("gpt2"), inputs("gpt2")["hidden"]
    weights = random(6, B, S, D, seed=18)

    def variants(v: Tensor, rows: Tensor, s: Tensor) -> list[dict[str, Any]]:
        edits = [
            kf.add(v, 1, scale=s),
            kf.add(kf.axes(rows, "pos hidden"), 1, at=[2, 0]),
            kf.put(v, 3, point="mlp"),
            kf.project_out(v, 0),
        ]
        return [*({"edit": [edit]} for edit in edits), {"steer": {1: v}}, {}]

    def loss(run: Any, h: Tensor, v: Tensor, rows: Tensor, s: Tensor) -> Tensor:
        return (run({**x, "hidden": h}, variants(v, rows, s)) * weights).sum()

    def by_hand(x: Any, variants: Any) -> Tensor:
        return torch.stack([whole(**x, **kwargs) for kwargs in variants])

    values = (hidden, V, random(2, D, seed=19), torch.tensor(1.5))
    own, expected = (
        torch.autograd.grad(loss(run, *leaves), leaves)
        for run in (lambda *a: kf.sweep(whole, *a), by_hand)
        for leaves in [[t.clone().requires_grad_() for t in values]]
    )
    for mine, theirs in zip(own, expected, strict=True):
        assert_near(mine, theirs)
    transformed = grad(lambda v: loss(lambda *a: kf.sweep(whole, *a), hidden, v, *values[2:]))(V)
    assert_near(transformed, expected[1])


def test_a_sweep_within_vmap() -> None:
    whole, x, many = flow("llama", TWO), inputs("llama"), random(3, D, seed=20)
    found = vmap(lambda v: kf.sweep(whole, x, [{"steer": {1: v}}, {"steer": {1: 2 * v}}]))(many)
    for i, v in enumerate(many):
        assert_near(found[i, 1], whole(**x, steer={1: 2 * v}))


def gained(params, hidden, /, *, block, gain: kf.Axes["[layer] hidden"] = None, **kw):
    out = block(params, hidden * 0.5, **kw)
    return out if gain is None else out * gain


def test_a_workers_own_block_fn_acts_after_the_block() -> None:
    whole, x = make_flow("llama", TWO, block_fn=gained), inputs("llama")
    x["gain"] = kf.axes(random(D, seed=21), "hidden")
    variants = {label: VARIANTS[label] for label in ("as it is", "steer 1", "steer 1 twice", "attn", "steer last")}
    found = kf.sweep(whole, x, variants)
    for label, expected in one_by_one(whole, x, variants).items():
        assert_near(found[label], expected, str(label))
    variants = {name: {"gain": kf.axes(v, "hidden")} for name, v in (("a", V), ("b", W))}
    del x["gain"]
    found = kf.sweep(whole, x, variants)
    for label, expected in one_by_one(whole, x, variants).items():
        assert_near(found[label], expected, label)


@pytest.mark.parametrize("client", [torch.bfloat16, torch.float32])
def test_in_half_precision_each_variant_is_its_own_call_to_the_bit(client: torch.dtype) -> None:
    """A row's own strength is no less exact than a number; the client does at a layer's output what a worker does."""
    workers, v = flow("llama", TWO, torch.bfloat16), random(D, seed=23)
    whole, x = Flow(ends("llama", client), workers.peers, (0, L)), {**inputs("llama")}
    x["hidden"] = x["hidden"].to(client)
    makes = {"add": kf.add, "project_out": kf.project_out, "scale": lambda _, n, *, scale: kf.scale(scale, n)}
    for name, make in makes.items():
        grid = kf.grid(lambda n, scale, make=make: make(v, n, scale=scale), n=[1, L - 1], scale=[0.3, 1.7])
        found = kf.sweep(whole, x, grid).flatten(0, 1)
        for out, (label, kwargs) in zip(found, grid, strict=True):
            assert_bits(out, whole(**x, **kwargs), f"{name} {label}")


def test_reduce_and_its_results() -> None:
    whole, x = flow("llama", TWO), inputs("llama")
    steered = [{"steer": {1: V}}, {}]
    assert_near(kf.sweep(whole, x, steered, lambda out: float(out.norm()))[1], whole(**x).norm().detach())
    assert kf.sweep(whole, x, {"a": {}}, lambda out: "any thing") == {"a": "any thing"}
    shapes = iter((1, 2))
    with pytest.raises(KwargError, match=r"reduce gave a tuple.*\{label: kwargs\}"):
        kf.sweep(whole, x, [{}], lambda out: (out, out.norm()))
    with pytest.raises(KwargError, match=r"variant 0: a Edit; give a call's kwargs, such as \{'edit'"):
        kf.sweep(whole, x, [kf.add(V, 1)])
    with pytest.raises(ShapeError, match=r"variant 1: reduce gave \(2,\), and \(1,\) for 0"):
        kf.sweep(whole, x, steered, lambda out: torch.zeros(next(shapes)))
    with pytest.raises(ZeroDivisionError) as error:
        kf.sweep(whole, x, {"a": {}}, lambda out: 1 / 0)
    assert error.value.__notes__ == ["in kf.sweep, variant 'a'"]


@pytest.mark.parametrize(
    ("variants", "error", "said"),
    [
        ({"v": {"stear": {1: V}}}, UnknownKwarg, "variant 'v': .*'stear'.*Did you mean 'steer'"),
        ([{}, {"steer": {9: V}}], SpanError, "variant 1: .*layer 9"),
        ([{"steer": {1: V[:3]}}], ShapeError, "variant 0: steer"),
        ([{"attention_mask": MASK}], KwargError, "variant 0: 'attention_mask' is in x too"),
        ([{"capture": kf.Capture(resid=[1])}], KwargError, "variant 0: a sweep brings back hidden alone"),
        ([[kf.add(V, 1)]], KwargError, "variant 0: a list"),
        ([], KwargError, "variants is empty"),
        ("abc", KwargError, "variants is a str"),
        (kf.grid(kf.add, value=[V], layers=[1, 7]), SpanError, r"variant 'value\[0\], layers=7'"),
        (kf.grid(lambda s: s, s=[1.0]), KwargError, r"variant 's=1.0': the function of kf.grid gave a float"),
        (kf.grid(kf.add, value=[V], layers=[1], at=["prompt[9]"]), KwargError, r"variant .*prompt\[9\]"),
    ],
)
def test_errors_name_the_variant_and_nothing_is_sent(variants: Any, error: type[Exception], said: str) -> None:
    whole = make_flow("llama", TWO)
    with Requests(whole) as requests, pytest.raises(error, match=said):
        kf.sweep(whole, inputs("llama"), variants)
    assert not len(requests)


def test_a_grid_says_what_an_axis_is() -> None:
    for axis in ("all", 3, [], torch.tensor(1.0)):
        with pytest.raises(KwargError, match=r"kf.grid: at=.* is no axis"):
            kf.grid(kf.add, value=[V], at=axis)
    with pytest.raises(KwargError, match="takes a function"):
        kf.grid(kf.add)
    with pytest.raises(AxesError, match="variant 0"):
        kf.sweep(flow("llama", TWO), inputs("llama"), [{"steer": V}])


def test_behind_a_prefix_and_over_prefixes() -> None:
    remote, x = flow("llama", TWO), {"hidden": random(B, S, D, seed=6), "attention_mask": MASK}
    kv = {name: random(L, 1, *size, seed=i) for i, (name, size) in enumerate(prefix_sizes("llama").items())}
    found = kf.sweep(remote, {**x, "prefix_kv": kv}, kf.grid(kf.add, value=torch.stack([V, W]), layers=[1, 3]))
    for i, value in enumerate((V, W)):
        for j, layer in enumerate((1, 3)):
            assert_near(found[i, j], remote(**x, prefix_kv=kv, edit=[kf.add(value, layer)]), f"{i} at {layer}")
    several = [{"prefix_kv": {name: tensor * scale for name, tensor in kv.items()}} for scale in (1.0, 2.0)]
    assert_near(kf.sweep(remote, x, several), torch.stack([remote(**x, **one) for one in several]))
