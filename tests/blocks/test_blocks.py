"""Blocks by hand: pure functions that equal the model, and what a worker's own block_fn may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.blocks.kv import KV, StepCache
from kwflow.blocks.precision import LiftFloat32, upcast
from kwflow.blocks.span import chain, declared_kwargs, with_block_fn
from kwflow.errors import AxesError, BlockError, KwargError, KwflowError, ShapeError, SpanError, UnknownKwarg
from kwflow.models.spans import load_span
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_close, residual
from tests.oracle.tiny import (
    HEADS,
    HIDDEN,
    LAYERS,
    MAX_LENGTH,
    TWO,
    flow,
    folder,
    huggingface,
    left_padded,
    make_flow,
    random,
    span,
)

MASK = left_padded([0, 2], 5)


@every_family
def test_blocks_by_hand_are_the_model(family: str) -> None:
    """The whole of a notebook without a swarm."""
    hidden = x = random(2, 5, HIDDEN)
    v, p = random(HIDDEN, seed=1), random(1, 2, HIDDEN, seed=2)
    for layer, (block_fn, params) in enumerate(kf.load_blocks(folder(family))):
        own: dict[str, Any] = {"steer": v} if layer == 1 else {"prompts": p} if layer == 2 else {}
        x = block_fn(params, x, attention_mask=MASK, **own)
    reference = residual(huggingface(family), hidden, attention_mask=MASK, steer={1: v[None, None]}, prompts={2: p})
    assert_bits(x, reference)


@every_family
def test_a_chain_splits_kwargs_by_layer(family: str) -> None:
    hidden, v = random(2, 5, HIDDEN), random(LAYERS, HIDDEN, seed=1)
    blocks = kf.load_blocks(folder(family))
    out = kf.chain([fn for fn, _ in blocks])([params for _, params in blocks], hidden, steer=kf.axes(v, "layer hidden"))
    assert_bits(out, residual(huggingface(family), hidden, steer={n: v[n][None, None] for n in range(LAYERS)}))
    part = kf.load_blocks(folder(family), 1, 3)
    out = chain([fn for fn, _ in part])([params for _, params in part], hidden, steer={2: v[2]})
    with pytest.raises(SpanError, match="layer 3; this flow has layers 1:3"):
        chain([fn for fn, _ in part])([params for _, params in part], hidden, steer={3: v[2]})


def test_a_chain_says_what_it_takes() -> None:
    blocks = kf.load_blocks(folder("llama"))
    fns, params = [fn for fn, _ in blocks], [own for _, own in blocks]
    for wrong in (blocks, []):
        with pytest.raises(KwargError, match="takes blocks: kf.chain.*load_blocks"):
            kf.chain(wrong)  # type: ignore[arg-type]
    with pytest.raises(SpanError, match="layers in a row, got 0, 2;"):  # a kwarg for layer 1 would go nowhere
        kf.chain([fns[0], fns[2]])
    for few, got in ((params[:3], "3"), (params[0], "a dict")):
        with pytest.raises(KwargError, match=f"layers 0:4 takes a list of 4 params, got {got}"):
            kf.chain(fns)(few, random(1, 2, HIDDEN))  # type: ignore[arg-type]
    with pytest.raises(SpanError, match=r"start, stop; got range\(0, 2\), 4"):
        kf.load_blocks(folder("llama"), range(0, 2))  # type: ignore[arg-type]


@every_family
def test_a_block_is_pure(family: str) -> None:
    spec = load_span(folder(family), 0, LAYERS)
    before = [{k: t.clone() for k, t in params.items()} for params in spec.params]
    inputs = {
        "hidden": random(2, 5, HIDDEN),
        "steer": random(2, HIDDEN, seed=1),
        "prompts": random(LAYERS, 2, 2, HIDDEN, seed=2),
        "mask": MASK.clone(),
    }
    copies = {k: t.clone() for k, t in inputs.items()}

    def call() -> Tensor:
        return chain(spec.blocks)(
            spec.params,
            inputs["hidden"],
            attention_mask=inputs["mask"],
            steer=kf.axes(inputs["steer"], "batch hidden"),
            prompts=inputs["prompts"],
        )

    assert_bits(call(), call(), "twice")
    for name, value in copies.items():
        assert_bits(inputs[name], value, name)
    for params, kept in zip(spec.params, before, strict=True):
        assert not any(t.requires_grad for t in params.values())
        for name, value in kept.items():
            assert_bits(params[name], value, name)
    assert not any(block.module.training for block in spec.blocks)


@every_family
def test_params_are_an_argument(family: str) -> None:
    """Other params give other values, and gradients reach them."""
    block_fn, params = kf.load_blocks(folder(family), 1, 2)[0]
    hidden = random(2, 5, HIDDEN)
    copied = {k: t.clone().requires_grad_() for k, t in params.items()}
    out = block_fn(copied, hidden)
    assert_bits(out, block_fn(params, hidden))
    out.square().sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in copied.values())
    name = next(k for k in copied if k.endswith("weight"))
    assert not torch.equal(block_fn({**params, name: params[name] * 2}, hidden), out)
    with pytest.raises((BlockError, KwflowError), match=r"layer 1|missing"):
        block_fn({name: params[name]}, hidden)


@every_family
def test_a_block_refuses_what_it_would_ignore(family: str) -> None:
    block_fn, params = kf.load_blocks(folder(family), 1, 2)[0]
    hidden = random(2, 5, HIDDEN)
    with pytest.raises(UnknownKwarg, match="Did you mean 'steer'"):
        block_fn(params, hidden, stear=hidden)
    for ignored in (
        "use_cache",
        "output_attentions",
        "cache_position",
        "kwargs",
    ):  # a layer's **kwargs would swallow them
        with pytest.raises(UnknownKwarg, match=ignored):
            block_fn(params, hidden, **{ignored: True})
    with pytest.raises(ShapeError, match="hidden = 3"):
        block_fn(params, hidden, steer=torch.ones(3))
    assert "takes attention_mask, " in repr(block_fn) and ", prompts, " in repr(block_fn)


@every_family
def test_a_span_reads_its_own_layers_only(family: str) -> None:
    whole, part = load_span(folder(family), 0, LAYERS), load_span(folder(family), 1, 3)
    assert [block.layer for block in part.blocks] == [1, 2]
    assert part.identity["layers"] == whole.identity["layers"][1:3]
    assert part.identity["checkpoint"] == whole.identity["checkpoint"]
    assert part.identity["bytes_read"] < whole.identity["bytes_read"]
    for start, stop in ((2, 2), (-1, 2), (0, 5), (3, 1)):
        with pytest.raises(SpanError, match="layers 0:4"):
            load_span(folder(family), start, stop)


def test_float64_is_float64_throughout() -> None:
    """RMSNorm and softmax cast to float32; lifted, a run differs from a float32 one by more than its own rounding."""
    spec = span("llama", 0, LAYERS)
    wide, hidden = upcast(spec.params, torch.float64), random(1, 4, HIDDEN, dtype=torch.float64)
    assert all(t.dtype is torch.float64 for params in wide for t in params.values())
    with LiftFloat32():
        lifted = chain(spec.blocks)(wide, hidden)
        nudged = chain(spec.blocks)(wide, hidden * (1 + 1e-12))
    plain = chain(spec.blocks)(wide, hidden)
    assert 0 < (lifted - nudged).abs().max() < 1e-8  # a float32 step on the way would hide or magnify it
    assert 1e-9 < (lifted - plain).abs().max() < 1e-3
    assert_close(lifted.float(), chain(spec.blocks)(spec.params, hidden.float()))


# ---- a worker's own block_fn


def test_own_kwargs_are_typed_by_axes() -> None:
    def fn(
        params,
        hidden,
        /,
        *,
        block,
        gain: kf.Axes["layer hidden | hidden"],
        scale: float = 1.0,
        tree: dict = None,
        n: int = 1,
        **kw,
    ):
        return block(params, hidden, **kw)

    specs, through = declared_kwargs(fn)
    assert through and specs["gain"].required and not specs["scale"].required
    assert specs["gain"].signatures == ("layer hidden", "hidden") and specs["scale"].scalars == ("float",)
    assert specs["tree"].tree and specs["n"].scalars == ("int",)


def _bad() -> list[tuple[Callable[..., Any], type[Exception], str]]:
    def no_block(params, hidden, /, **kw): ...
    def three(params, hidden, gain, /, *, block): ...
    def starred(params, hidden, *rest, block): ...
    def untyped(params, hidden, /, *, block, gain, **kw): ...
    def wrongly(params, hidden, /, *, block, gain: Tensor, **kw): ...
    def inside(params, hidden, /, *, block, attention_mask: kf.Axes["batch key"], **kw): ...

    return [
        (no_block, KwargError, "must take `block`"),
        (three, KwargError, "by keyword only"),
        (starred, KwargError, "by keyword only"),
        (untyped, AxesError, "'gain' of block_fn 'untyped' is not typed"),
        (wrongly, AxesError, "not typed"),
        (inside, KwargError, "inside `block` already"),
    ]


@pytest.mark.parametrize(("fn", "error", "says"), _bad(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_block_fn_is_checked_when_it_is_built(fn: Callable[..., Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        with_block_fn(span("gpt2", 0, 1), fn, "x")


def test_a_block_fn_without_kw_takes_its_own_only() -> None:
    def only(params, hidden, /, *, block, scale: float = 1.0):
        return block(params, hidden) * scale

    remote = make_flow("gpt2", (4,), block_fn=only)
    hidden = random(1, 3, HIDDEN)
    remote(hidden, scale=2.0, attention_mask=torch.ones(1, 3).long())
    with pytest.raises(UnknownKwarg, match="take attention_mask, prefix_kv, scale"):
        remote(hidden, steer={1: torch.ones(HIDDEN)})


def test_the_bound_block_knows_its_layer_and_takes_prompts_and_steer() -> None:
    seen = []

    def own(params, hidden, /, *, block, v: kf.Axes["hidden"] = None, **kw):  # noqa: UP037
        seen.append(block.layer)
        if block.layer == 2:
            return block(params, hidden, steer=v)
        return block(params, hidden)

    hidden, v = random(1, 3, HIDDEN), random(HIDDEN, seed=1)
    remote = make_flow("llama", (1, 4), block_fn=own)
    assert_bits(remote(hidden, v=v), residual(huggingface("llama"), hidden, steer={2: v[None, None]}))
    assert seen == [0, 1, 2, 3]

    def wrong(params, hidden, /, *, block, **kw):
        return block(params, hidden, stear=1)

    with pytest.raises(UnknownKwarg, match="the normal block takes .*steer, edit, .* got stear"):
        make_flow("llama", block_fn=wrong)(hidden)


def dropped_kwargs() -> dict[str, Any]:
    return {
        "steer": {1: random(HIDDEN)},
        "prompts": random(LAYERS, 1, 2, HIDDEN),
        "edit": kf.add(random(HIDDEN), layers=1),
        "lora": {"v_proj": {"A": random(LAYERS, 2, HIDDEN), "B": random(LAYERS, HIDDEN // 2, 2)}},
        "ia3": {"v_proj": random(LAYERS, HIDDEN // 2)},
        "head_mask": random(LAYERS, HEADS),
        "capture": kf.Capture(resid=[1]),
    }


@pytest.mark.parametrize("name", dropped_kwargs())
def test_a_block_fn_that_swallows_kwargs_is_told(name: str) -> None:
    def swallows(params, hidden, /, *, block, **kw):
        return block(params, hidden)

    def passes(params, hidden, /, *, block, **kw):
        return block(params, hidden, **kw)

    hidden, given = random(2, 3, HIDDEN), {name: dropped_kwargs()[name]}
    with (
        pytest.raises(BlockError, match=f"block_fn of layer [01] did not hand {name} on; .*call block"),
        make_flow("llama", TWO, block_fn=swallows).session(3) as session,
    ):
        session.step(hidden, **given)
    with make_flow("llama", TWO, block_fn=passes).session(3) as session, flow("llama", TWO).session(3) as plain:
        assert_bits(session.step(hidden, **given), plain.step(hidden, **{name: dropped_kwargs()[name]}))


def test_what_a_block_fn_raises_or_returns_is_explained() -> None:
    hidden = random(1, 3, HIDDEN)

    def broken(params, hidden, /, *, block, gain: kf.Axes["free"] = None, **kw):  # noqa: F821, UP037
        return hidden @ gain

    def odd(params, hidden, /, *, block, kind: str = "", **kw):
        return {"shape": hidden[:, :1], "dtype": hidden.double(), "none": None}[kind]

    remote = make_flow("gpt2", (2, 4), block_fn=broken)
    said = r"(?s)block_fn 'broken' of layer 0 raised RuntimeError in its line 2: .*gain: float32\(3,\)"
    with pytest.raises(BlockError, match=said):
        remote(hidden, gain=torch.ones(3))
    remote = make_flow("gpt2", (2, 4), block_fn=odd)
    for kind, says in (("shape", r"\(1, 1, 32\)"), ("dtype", "float64"), ("none", "NoneType")):
        with pytest.raises(BlockError, match=says):
            remote(hidden, kind=kind)
    # a caller's mistake: nobody is blamed, the workers serve on
    with pytest.raises(BlockError, match="KeyError"):
        remote(hidden, kind="other")
    assert remote.peers.bans == {}


def test_a_derivative_that_torch_lacks_is_nobody_s_fault() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no derivative here")

    def opaque(params, hidden, /, *, block, **kw):
        return Opaque.apply(hidden)

    remote = make_flow("gpt2", (4,), block_fn=opaque)
    hidden = random(1, 3, HIDDEN).requires_grad_()
    with pytest.raises(BlockError, match=r"(?s)deriving layers 0:4.*no derivative here"):
        remote(hidden).sum().backward()
    assert remote.peers.bans == {}
    remote(hidden.detach())


# ---- keys and values


def test_writing_crops_what_stood_behind() -> None:
    kv = KV(3, 5, 8)
    one = random(2, 1, 4, 2), random(2, 1, 4, 2, seed=1)
    keys, values = kv.write(3, 0, *one)
    assert_bits(keys, one[0])
    assert_bits(values, one[1])
    two = random(2, 1, 1, 2, seed=2), random(2, 1, 1, 2, seed=3)
    keys, _ = kv.write(3, 2, *two)  # a rollback to column 2
    assert_bits(keys, torch.cat([one[0][:, :, :2], two[0]], 2))
    keys, _ = kv.write(4, 0, *two)  # layers are apart
    assert keys.shape[2] == 1


def test_reordering_rows_keeps_columns() -> None:
    kv = KV(0, 1, 6)
    keys, values = random(3, 1, 4, 2), random(3, 1, 4, 2, seed=1)
    kv.write(0, 0, keys, values)
    kv.reorder(torch.tensor([2, 0, 2]), 4)
    seen, _ = kv.write(0, 4, keys[:, :, :1], values[:, :, :1])
    assert_bits(seen[:, :, :4].contiguous(), keys[[2, 0, 2]])


def test_a_step_s_cache_starts_where_the_step_does() -> None:
    cache = StepCache(KV(0, 1, MAX_LENGTH), 0)
    cache.update(random(1, 1, 3, 2), random(1, 1, 3, 2), 0)
    assert cache.get_seq_length() == 0
