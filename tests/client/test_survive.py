"""Laws 4, 6 and 7: where workers fail, calls and sessions go on with the same values, or end with a clear error."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.blocks.span import with_block_fn
from kwflow.client.replay import folded
from kwflow.errors import (
    BlockError,
    KwargError,
    NoRoute,
    SessionError,
    ShapeError,
    UnsupportedError,
    WorkerFailed,
    WorkerFull,
)
from kwflow.wire import loop
from kwflow.wire.message import Message
from tests.doubles.here import HereSwarm
from tests.doubles.mortal import Swarm, nonsense
from tests.oracle import assert_near, tiny
from tests.oracle.tiny import random

B, S, D, LAYERS = 4, 4, tiny.HIDDEN, tiny.LAYERS
SPLITS = {
    "another like it": [(0, 1), (1, 3), (3, 4), (1, 3)],
    "two": [(0, 1), (1, 3), (3, 4), (1, 2), (2, 3)],
    "a larger one": [(0, 1), (1, 3), (3, 4), (0, 4)],
}
splits = pytest.mark.parametrize(
    "spans", [pytest.param(s, id=n, marks=[pytest.mark.rest] * (n != "two")) for n, s in SPLITS.items()]
)


def swarm_of(spans: list[tuple[int, int]], family: str = "llama", **more: Any) -> Swarm:
    """The route goes over the first three: the others are not in the directory until they are needed."""
    swarm = Swarm(family, *spans, **more)
    swarm.hidden = set(range(3, len(spans)))
    swarm.flow.kwargs()
    return swarm


def lose(swarm: Swarm, after: int = 0) -> None:
    """Worker 1, of layers 1:3, dies in the middle of what comes; the others appear."""
    swarm.kill(1, after)
    swarm.hidden.clear()
    swarm.hidden.add(1)


# ---------------------------------------------------------------- calls


@splits
def test_a_call_goes_on_with_the_same_values_and_gradients(spans: list[tuple[int, int]]) -> None:
    swarm = swarm_of(spans)
    x, mask, v = random(B, S, D), tiny.left_padded([0, 1, 3, 2], S), random(D, seed=1)

    def run(flow: kf.Flow) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), v.clone().requires_grad_()]
        out = flow(leaves[0], attention_mask=mask, steer={0: leaves[1], 2: leaves[1]})
        return [out.detach(), *torch.autograd.grad((out * random(B, S, D, seed=2)).sum(), leaves)]

    expected = run(swarm.flow)
    for sub_batches, moments in ((4 * S, (0, 1, 2)), (S, (2, 5))):
        for after in moments:
            swarm = swarm_of(spans)
            lose(swarm, after)
            for got, want in zip(run(swarm.flow.options(batch_tokens=sub_batches)), expected, strict=True):
                assert_near(got, want)
                if sub_batches == 4 * S and len(spans) == 4:
                    assert torch.equal(got, want), "one worker in another's place: to the last bit"


@splits
def test_every_derivative_goes_on(spans: list[tuple[int, int]]) -> None:
    x, v = random(2, 3, D, dtype=torch.float64), random(D, seed=1, dtype=torch.float64)

    def loss(flow: kf.Flow) -> Callable[[Tensor], Tensor]:
        return lambda v: (flow(x, steer={0: v, 1: v, 2: v}) ** 2).mean()

    def derived(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hvp = torch.func.jvp(torch.func.grad(f), (v,), (v,))
        mapped = torch.func.vmap(torch.func.grad(f))(torch.stack([v, 2 * v]))
        return [*torch.func.jvp(f, (v,), (v,)), *hvp, mapped]

    local = swarm_of(spans, "gpt2", dtype=torch.float64)
    expected = derived(loss(local.flow))
    for after in (0, 3):
        swarm = swarm_of(spans, "gpt2", dtype=torch.float64)
        lose(swarm, after)
        for got, want in zip(derived(loss(swarm.flow)), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def test_captures_come_in_order_from_those_in_its_place() -> None:
    swarm = swarm_of(SPLITS["two"])
    points = {"resid": range(LAYERS), "attn": [1, 2]}
    expected, acts = swarm.flow.capture(points, random(B, S, D))
    lose(swarm)
    got, mine = swarm.flow.capture(points, random(B, S, D))
    assert torch.equal(got, expected)
    assert all(torch.equal(mine[key], acts[key]) for key in acts)


NONSENSE = {
    "a shape": nonsense(lambda t: [t[0][:, :1]]),
    "a dtype": nonsense(lambda t: [t[0].double()]),
    "one more": nonsense(lambda t: [*t, t[0]]),
    "nothing": nonsense(lambda t: []),
    "no list": lambda reply: Message(reply.meta, {"hidden": None}),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_a_failure(answer: Any) -> None:
    swarm = swarm_of(SPLITS["another like it"])
    x = random(B, S, D).requires_grad_()
    expected = swarm.flow(x)
    want = torch.autograd.grad(expected.sum(), x)[0]
    swarm.hidden.clear()
    out = swarm.flow(x)
    swarm.answers(1, answer)
    assert torch.equal(swarm.flow(x), expected)
    swarm.forgive()
    value = x.detach()
    assert torch.func.jvp(swarm.flow, (value,), (value,))[1].shape == x.shape, "tangents too"
    swarm.forgive()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want), "gradients too"
    swarm.forgive()
    mapped = torch.func.vmap(swarm.flow)(torch.stack([value, value]))
    assert_near(mapped, torch.stack([expected, expected]).detach())
    assert swarm.flow.peers.avoided(swarm.names[1]), "what is mapped over too"
    with swarm.flow.session(8) as session:
        swarm.forgive()
        assert torch.equal(session.step(x.detach()), swarm.flow(x.detach()))


MAPPED = {
    "calls": lambda t: [t[0][:1], *t[1:]],
    "rows": lambda t: [t[0][:, :1], *t[1:]],
    "a number": lambda t: [t[0].sum()],
    "dtype": lambda t: [t[0].double(), *t[1:]],
}


@pytest.mark.parametrize("change", MAPPED.values(), ids=MAPPED)
def test_nonsense_for_what_is_mapped_over_is_a_failure(change: Any) -> None:
    x, v = random(B, S, D), torch.stack([random(D), random(D, seed=1)])

    def one(flow: kf.Flow, v: Tensor) -> Tensor:
        return flow(x, steer={1: v}).square().mean()

    def capturing(flow: kf.Flow, v: Tensor) -> Tensor:
        return flow.capture({"resid": [2]}, x, steer={1: v})[1]["resid", 2]

    derivatives: list[Callable[[Callable[[Tensor], Tensor]], Callable[..., Tensor]]] = [
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(torch.func.grad(f)),
        lambda f: lambda v: torch.func.jvp(torch.func.vmap(f), (v,), (v,))[1],
        lambda f: lambda v: torch.func.grad(lambda v: torch.func.vmap(f)(v).sum())(v),
        lambda f: torch.func.vmap(lambda v: torch.func.jvp(torch.func.grad(f), (v,), (v,))[1]),
    ]
    for number, derived in enumerate([*derivatives, lambda f: torch.func.vmap(f)]):
        f = one if number < len(derivatives) else capturing
        swarm = swarm_of(SPLITS["another like it"])
        swarm.hidden.clear()
        expected = derived(lambda v, f=f, swarm=swarm: f(swarm.flow, v))(v)
        swarm.answers(1, nonsense(change))
        got = derived(lambda v, f=f, swarm=swarm: f(swarm.flow, v))(v)
        assert_near(got, expected)
        assert swarm.flow.peers.avoided(swarm.names[1])


def test_captures_of_other_columns_or_widths_are_a_failure() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    swarm.hidden.clear()
    x = random(B, S, D)
    answers = [
        ("all", lambda t: [t[0], t[1][:, :1]]),
        ("prompt[-1]", lambda t: [t[0], t[0]]),
        ("all", lambda t: [t[0], t[1][..., :1]]),
    ]
    for at, answer in answers:
        expected = swarm.flow.capture({"resid": [2]}, x, at=at)[1]["resid", 2]
        swarm.answers(1, nonsense(answer))
        assert torch.equal(swarm.flow.capture({"resid": [2]}, x, at=at)[1]["resid", 2], expected)
        swarm.forgive()
        swarm.answers(1, nonsense(lambda t: t))


def test_captured_heads_and_patterns_of_other_sizes_are_a_failure() -> None:
    kv = {n: random(LAYERS, 1, tiny.KV_HEADS, 3, D // tiny.HEADS, seed=i) for i, n in enumerate(("k", "v"), 7)}
    x, more = random(B, S, D), random(B, 1, D, seed=1)
    for point, lacking in (("head", 3), ("pattern", 3), ("pattern", 2), ("head", 2)):
        swarm, acts = swarm_of(SPLITS["another like it"]), list[kf.Capture]()
        swarm.hidden.clear()
        for wrong in (False, True):
            if wrong:
                swarm.answers(1, nonsense(lambda t, i=lacking: [t[0], t[1].narrow(i, 0, t[1].shape[i] - 1)]))
            acts.append(swarm.flow.capture({point: [2]}, x, prefix_kv=kv)[1])
            assert swarm.flow.peers.avoided(swarm.names[1]) == wrong
            swarm.forgive()
            with swarm.flow.session(16) as session:
                acts.append(kf.Capture({point: [2]}))
                session.step(x, prefix_kv=kv, capture=acts[-1])
                session.step(more, capture=acts[-1])
            swarm.forgive()
        for got, want in zip(acts[2:], acts[:2], strict=True):
            assert torch.equal(got[point, 2], want[point, 2])


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {},
        lambda said: None,
        lambda said: {**said, "schema": {}},
        lambda said: {**said, "schema": {"kwargs": 1}},
        lambda said: {**said, "schema": {**said["schema"], "sizes": {"hidden": D}}},
        lambda said: {**said, "schema": {**said["schema"], "scaling": {"borders": ["8"]}}},
        lambda said: {**said, "schema": {**said["schema"], "kwargs": {"steer": {"points": "resid"}}}},
        lambda said: {**said, "limits": None},
        lambda said: {**said, "limits": {"batch_tokens": "many"}},
        lambda said: {**said, "fingerprint": [1]},
        lambda said: {**said, "features": 3},
        lambda said: {**said, "schema": {**said["schema"], "projections": {"q_proj": [1, 1e999]}}},
        lambda said: {name: value for name, value in said.items() if name != "span"},
        lambda said: {**said, "span": [0, 3]},  # it came back with other layers
        lambda said: {**said, "dtype": None},
        UnsupportedError("no operation 'hello'"),
        BlockError("hello failed"),
        RuntimeError("a bug"),
    ],
)
def test_a_hello_that_says_nonsense_is_a_failure(change: Any) -> None:
    swarm = Swarm("llama", (0, 4), (0, 4))
    served = swarm.served[0]
    said = served.hello().to_json()

    def hello() -> Any:
        if isinstance(change, Exception):
            raise change
        return SimpleNamespace(to_json=lambda: change(said))

    served.hello = hello
    assert swarm.flow(random(B, S, D)).shape == (B, S, D)
    assert repr(swarm.flow) and list(swarm.bans) == [swarm.names[0]]
    with pytest.raises(NoRoute) as caught:
        swarm.flow.options(peers_blocked=swarm.names[1], timeout=0.3)(random(B, S, D))
    assert isinstance(caught.value.__cause__, WorkerFailed)


def test_a_gap_closes_before_the_deadline() -> None:
    swarm = swarm_of(SPLITS["two"][:3])
    x = random(B, S, D)
    expected = swarm.flow(x)
    swarm.kill(1)
    threading.Timer(0.6, swarm.revive, [1]).start()
    assert torch.equal(swarm.flow(x), expected)


def test_no_route_says_what_was_tried_inside_the_deadline() -> None:
    swarm = swarm_of(SPLITS["two"][:3])
    flow = swarm.flow.options(timeout=0.8)
    x = random(B, S, D).requires_grad_()
    out = flow(x)
    swarm.kill(1)
    for call in (lambda: flow(x), lambda: out.sum().backward(), lambda: flow.session(8).step(x.detach())):
        began = time.monotonic()
        with pytest.raises(NoRoute, match=r"layers 1:3: no route after 0\.\d s.*EOF|refused") as caught:
            call()
        assert 0.5 < time.monotonic() - began < 1.2
        assert isinstance(caught.value.__cause__, WorkerFailed)
    began = time.monotonic()
    with pytest.raises(NoRoute):
        flow.options(peers_blocked=swarm.names[0])(x)
    assert time.monotonic() - began < 0.5, "no wait for a worker that the caller blocks himself"


@pytest.mark.parametrize("in_session", [False, True], ids=["call", "step"])
def test_the_wait_for_a_route_and_the_run_have_one_deadline(in_session: bool) -> None:
    swarm, go = swarm_of([(0, 4)]), threading.Event()

    def busy(params: Any, hidden: Tensor, /, *, block: Any, **kw: Any) -> Tensor:
        go.wait(20)
        return block(params, hidden, **kw)

    served = swarm.served[0]
    x, flow = random(B, S, D), swarm.flow.options(timeout=1.0)
    flow(x)
    served.spec = with_block_fn(served.spec, busy, "busy")
    swarm.kill(0)
    with pytest.raises((NoRoute, kf.errors.DeadlineError)):
        flow.options(timeout=0.3)(x)
    threading.Timer(0.7, swarm.revive, [0]).start()
    began = time.monotonic()
    with pytest.raises((kf.errors.DeadlineError, NoRoute)):
        flow.session(8).step(x) if in_session else flow(x)
    assert 0.9 < time.monotonic() - began < 1.5
    go.set()


def test_a_callers_mistake_is_raised_at_once_without_a_route() -> None:
    """By what the layers took when they were met last; what would be right waits for a worker."""
    swarm = swarm_of(SPLITS["two"][:3])
    x, flow = random(B, S, D), swarm.flow.options(timeout=20)
    flow(x)
    swarm.kill(1)
    with pytest.raises((NoRoute, kf.errors.DeadlineError)):
        swarm.flow.options(timeout=0.2)(x)
    began = time.monotonic()
    for wrong, error in ({"steer": {40: x[0, 0]}}, kf.errors.SpanError), ({"stear": x}, kf.errors.UnknownKwarg):
        for call in (
            flow,
            lambda x, **kw: flow.capture({"resid": [1]}, x, **kw),
            lambda x, **kw: flow.session(8).step(x, **kw),
            lambda x, **kw: asyncio.run(flow.acall(x, **kw)),
            flow.check,
        ):
            with pytest.raises(error):
                call(x, **wrong)
    assert time.monotonic() - began < 5
    threading.Timer(0.3, swarm.revive, [1]).start()
    assert flow(x, steer={1: x[0, 0]}).shape == x.shape


def test_a_callers_error_is_not_tried_again() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    swarm.hidden.clear()
    x = random(B, S, D)
    swarm.answers(1, lambda reply: Message({"error": {"kind": "caller", "type": "ShapeError", "message": "no"}}))
    asked = len(swarm.seen)
    for call in (lambda: swarm.flow(x), lambda: swarm.flow.session(8).step(x)):
        with pytest.raises(ShapeError):
            call()
    assert [number for number, op in swarm.seen[asked:] if op != "hello"] == [0, 1, 0, 1]
    assert not swarm.bans


def test_a_full_worker_is_passed_over_and_said_where_there_is_no_other() -> None:
    swarm = Swarm("llama", (0, 4), (0, 4), kv_bytes=20_000)
    with swarm.flow.session(8) as first, swarm.flow.session(8) as second:
        one, other = first.step(random(B, S, D)), second.step(random(B, S, D))
        assert torch.equal(one, other) and {number for number, op in swarm.seen if op == "step"} == {0, 1}
        with pytest.raises(WorkerFull, match="no room"), swarm.flow.session(8) as third:
            third.step(random(B, S, D))
    assert not swarm.bans


def test_a_worker_that_is_full_hands_a_session_that_grows_to_one_that_is_not() -> None:
    """Nobody said how long it becomes: what it had is repeated elsewhere, and where there is nowhere, it is said."""
    column = 2 * 4 * tiny.KV_HEADS * D // tiny.HEADS * 4  # keys and values of a row, 4 layers, floats
    x, outs = random(1, 24, D), list[Tensor]()
    for limits in ({}, {"kv_bytes": 20 * column}):
        swarm = Swarm("llama", (0, 4), (0, 4), **limits)
        with swarm.flow.session() as session, swarm.flow.session(8) as other:
            out = [session.step(x[:, :6])]
            (worker,) = session.workers
            if limits:
                other.dispatcher = swarm.flow.options(peers_blocked={*swarm.names} - {worker.hop.peer}).dispatcher
                other.step(x[:, :8])
            out += [session.step(x[:, at : at + 1]) for at in range(6, 20)]
            outs.append(torch.cat(out, 1))
            if limits:
                (told,) = session.replays
                assert "no room for 13 columns" in told.reason and told.bitwise and told.position == 12
                assert sum(tiny.kv_used(swarm.flow)) == (8 + 20) * column
                with pytest.raises(WorkerFull, match="no room for .* columns of a session of 1 rows × 4 layers"):
                    session.step(x[:, 20:21])
                other.close()
                assert session.rollback(8) is None and session.step(x[:, 8:9]).shape == (1, 1, D)
        tiny.settle(swarm.flow, [0, 0])
    assert torch.equal(*outs)


# ---------------------------------------------------------------- NaN


def some_nan(tensors: list[Any]) -> list[Any]:
    return [torch.where(torch.arange(t.shape[-1]) == 1, torch.nan, t) if t is not None else None for t in tensors]


def test_nan_is_tried_once_elsewhere() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    swarm.hidden.clear()
    x = random(B, S, D)
    expected = swarm.flow(x)
    swarm.answers(1, nonsense(some_nan))
    assert torch.equal(swarm.flow(x), expected), "the other one has none"
    assert list(swarm.bans) == [swarm.names[1]]
    swarm.forgive()
    with swarm.flow.session(8) as session:
        assert torch.equal(session.step(x), expected)
        assert [told.peer for told in session.replays] == [swarm.names[1]]


def test_nan_from_both_is_the_answer_and_nobody_is_to_blame() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    swarm.hidden.clear()
    swarm.answers(1, nonsense(some_nan))
    swarm.answers(3, nonsense(some_nan))
    x = random(B, S, D)
    assert swarm.flow(x).isnan().any()
    assert (swarm.asked(1), swarm.asked(3)) == (1, 1)
    with swarm.flow.session(8) as session:
        assert session.step(x).isnan().any() and session.step(x).isnan().any()
        assert not session.replays
    assert (swarm.asked(1), swarm.asked(3)) == (3, 2), "once in a session"
    assert not swarm.bans


def test_nan_that_is_only_captured_is_nobodys_fault() -> None:
    """Later layers of the same worker overwrite it: the output has none, here and elsewhere."""
    swarm = Swarm("llama", (0, 4), (0, 4), (0, 4))
    nan = [kf.scale(factor, layers=1) for factor in (1e38, 1e38, 0.0)]
    with swarm.flow.session(8) as session:
        acts = kf.Capture(resid=[1])
        out = session.step(random(B, S, D), edit=[*nan, kf.put(V, layers=2)], capture=acts)
        assert acts["resid", 1].isnan().all() and not out.isnan().any() and not session.replays
    assert (swarm.asked(0), swarm.asked(1)) == (1, 1) and not swarm.bans


def test_a_deadline_is_no_answer_to_whether_nan_is_right() -> None:
    swarm = Swarm("llama", (0, 4), (0, 4))
    x, busy = random(B, S, D), [True]
    expected = swarm.flow(x)

    async def slowly(number: int) -> None:
        await asyncio.sleep(60 * (busy[0] and number == 1))

    swarm.before_dial = slowly
    swarm.answers(0, nonsense(some_nan))
    with swarm.flow.options(timeout=0.5).session(8) as session:
        with pytest.raises(kf.errors.DeadlineError):
            session.step(x)
        busy[0] = False
        assert torch.equal(session.step(x), expected)


def once(answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
    left = [answer]
    return lambda reply: left.pop()(reply) if left else reply


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_nan_in_repeated_steps_is_that_workers_failure(mode: str) -> None:
    swarm = Swarm("llama", (0, 1), (1, 3), (3, 4), (1, 2), (2, 3), (1, 2))
    swarm.hidden = {3, 4, 5}
    x, y = random(B, S, D), random(B, 1, D, seed=1)
    with swarm.flow.session(8) as session:
        expected = [session.step(x), session.step(y)]
    for worker in (3, 5):  # either may be asked first
        swarm.answers(worker, once(nonsense(some_nan)))
    with swarm.flow.session(8, replay=mode) as session:
        assert torch.equal(session.step(x), expected[0])
        lose(swarm)
        assert_near(session.step(y), expected[1])
    assert {swarm.names[3], swarm.names[5]} & set(swarm.bans)


def test_nan_of_a_second_worker_is_tried_elsewhere_too() -> None:
    swarm = Swarm("llama", (0, 2), (2, 4), (0, 2), (2, 4))
    swarm.hidden = {2, 3}
    x = random(B, S, D)
    expected = swarm.flow(x)
    swarm.hidden.clear()
    swarm.answers(0, nonsense(some_nan))
    swarm.answers(1, nonsense(some_nan))
    assert torch.equal(swarm.flow(x), expected)
    assert set(swarm.bans) == {swarm.names[0], swarm.names[1]}


def test_nan_of_a_worker_in_several_sub_batches_is_tried_elsewhere_for_each() -> None:
    """They are on their way at once: none takes the doubt of another for its own."""
    swarm = Swarm("llama", (0, 4), (0, 4))
    flow, x = swarm.flow.options(batch_tokens=S), random(B, S, D)
    expected = flow(x)
    swarm.answers(0, nonsense(some_nan))
    assert torch.equal(flow(x), expected)
    swarm.answers(1, nonsense(some_nan))
    assert flow(x).isnan().any(), "both say so"


# ---------------------------------------------------------------- sessions

V, P, MASK = random(D, seed=1), random(LAYERS, 1, 2, D, seed=2), tiny.left_padded([0, 1, 3, 2], S)
LORA = {"q_proj": {"A": random(LAYERS, 2, D, seed=3), "B": random(LAYERS, D, 2, seed=4), "scale": 0.5}}


def changing(session: Any, lose_at: int, lost: Callable[[], None]) -> list[Tensor]:
    """Steps whose kwargs appear, change and vanish, with reorders and rollbacks between; a worker dies before one."""
    acts = kf.Capture(resid=[1, 2])
    outs: list[Tensor] = []

    def step(seq: int, **kwargs: Any) -> None:
        if len(outs) == lose_at:
            lost()
        outs.append(session.step(random(B, seq, D, seed=10 + len(outs)), **kwargs))

    step(S, attention_mask=MASK, prompts=P, steer={1: V}, phase="prompt")  # 0
    step(1, steer={1: V}, lora=LORA, phase="generated")
    step(1, lora=LORA, capture=acts, phase="generated", edit=[kf.scale(0.5, layers=2, at="generated")])
    session.reorder([1, 1, 0, 3])
    step(1, steer={2: kf.axes(random(B, 1, D, seed=5), "batch seq hidden")})  # 3
    step(2, capture=acts, edit=kf.add(V, layers=[1, 2], at="all"))
    session.reorder([3, 2, 1, 0])
    session.rollback(7)
    step(1)  # 5
    session.rollback(6)
    step(2, steer={1: V * 2})
    past = [MASK[[3, 0, 1, 1]], torch.ones(B, 8 - S, dtype=torch.long)]  # as its rows stand by now
    step(1, attention_mask=torch.cat([*past, torch.tensor([[0], [1], [1], [0]])], 1))  # 7
    step(1)
    return [*outs, acts["resid", 1], acts["resid", 2], acts.mask.float()]


@splits
@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_a_session_goes_on_with_the_same_values(spans: list[tuple[int, int]], mode: str) -> None:
    with swarm_of(spans).flow.session(16) as session:
        expected = changing(session, -1, lambda: None)
    for lose_at in range(1, 9):
        swarm = swarm_of(spans)
        with swarm.flow.session(16, replay=mode) as session:
            got = changing(session, lose_at, lambda swarm=swarm: lose(swarm))
            (told,) = session.replays
            assert told.layers == (1, 3) and told.mode == mode and told.peer == swarm.names[1], told
            assert told.bitwise == (mode == "stepwise")
            assert {peer for peer, _, _ in told.by} == set(swarm.names[3:])
        for number, (mine, want) in enumerate(zip(got, expected, strict=True)):
            if mode == "stepwise":
                assert torch.equal(mine, want), f"lost at {lose_at}, output {number}"
            else:
                assert_near(mine, want)


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_reorder_that_was_rolled_back_acts_once(mode: str, interrupted: bool) -> None:
    """Merged steps have their rows in the new order already; other workers of the session keep the old steps."""

    def run(lost: list[int]) -> list[Tensor]:
        swarm = Swarm("llama", (0, 1), (1, 3), (3, 4), (0, 1), (1, 3))
        swarm.hidden = {3, 4}
        outs: list[Tensor] = []
        with swarm.flow.session(16, replay=mode) as session:
            session.step(random(B, S, D))
            session.reorder([1, 1, 0, 3])
            if lost and interrupted:  # the step goes on to its end, and is taken again
                swarm.interrupt(lambda session=session: session.step(random(B, 1, D, seed=9)))
            for at in range(5):
                if lost and at in (1, 3):
                    swarm.kill(lost[at // 2])
                    swarm.hidden = {lost[at // 2]}
                outs.append(session.step(random(B, 1, D, seed=at)))
                if at in (1, 3):
                    session.rollback(S)
            assert len(session.replays) == len(lost)
        return outs

    expected = run([])
    for lost in ([0, 1], [1, 0]):
        for mine, want in zip(run(lost), expected, strict=True):
            assert_near(mine, want)


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_a_reorder_after_one_that_was_rolled_back_comes_on_top_of_it(mode: str) -> None:
    """Workers have the first one already: the two cannot be given to them as one."""
    expected = None
    for lose_at in (-1, 0, 1):
        swarm = swarm_of(SPLITS["two"])
        with swarm.flow.session(16, replay=mode) as session:
            session.step(random(B, S, D))
            session.reorder([1, 2, 3, 0])
            session.step(random(B, 1, D, seed=1))
            if lose_at == 0:
                lose(swarm)
            session.rollback(S)
            session.reorder([1, 2, 3, 0])
            if lose_at == 1:
                lose(swarm)
            out = session.step(random(B, 1, D, seed=2))
            assert len(session.replays) == (lose_at >= 0)
        if expected is None:
            with swarm.flow.session(16) as other:
                other.step(random(B, S, D))
                other.reorder([2, 3, 0, 1])
                expected = other.step(random(B, 1, D, seed=2))
        assert_near(out, expected)
        assert mode == "merged" or torch.equal(out, expected)


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_an_interrupted_step_that_ends_after_a_rollback_is_not_repeated(mode: str) -> None:
    swarm = Swarm("llama", (0, 4), (0, 4))
    x, more = random(B, S, D), random(B, 1, D, seed=1)
    with swarm.flow.session(16) as session:
        session.step(x)
        expected = session.step(more)
    with swarm.flow.session(16, replay=mode) as session:
        session.step(x)
        session.step(random(B, 2, D, seed=2))
        go_on = asyncio.Event()
        swarm.interrupt(lambda: session.step(random(B, 1, D, seed=3)), then=go_on.wait)
        session.rollback(S)
        swarm.kill(0)  # once it has answered that step
        loop.network_loop().call_soon_threadsafe(go_on.set)
        assert_near(session.step(more), expected)
        assert len(session.replays) == 1 and session.replays[0].steps == 1


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_many_reorders_at_once_are_as_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a step may carry: without a step between, taken back, or both; workers had none, some, or all."""
    orders = [[(row + 1 + n % 3) % B if n % 2 else row // 2 for row in range(B)] for n in range(9)]
    monkeypatch.setattr("kwflow.worker.requests.MAX_REORDERS", 4)

    def run(lose_at: int) -> list[Tensor]:
        swarm, outs = swarm_of(SPLITS["two"]), list[Tensor]()
        with swarm.flow.session(16, replay=mode) as session:
            session.step(random(B, S, D))
            for n, order in enumerate(orders):
                session.reorder(order)
                session.step(random(B, 1, D, seed=n))
            if lose_at == 0:  # merged: its rows have those already
                lose(swarm)
            outs.append(session.step(random(B, 1, D, seed=1)))
            session.rollback(S + 7)
            session.rollback(S + 2)
            for order in orders:
                session.reorder(order[::-1])
            if lose_at == 1:
                lose(swarm)
            outs.append(session.step(random(B, 1, D, seed=2)))
            session.rollback(S + 1)
            if lose_at == 2:
                lose(swarm)
            outs.append(session.step(random(B, 1, D, seed=3)))
            session.reorder(orders[1])
            outs.append(session.step(random(B, 1, D, seed=4)))
            assert len(session.replays) == (lose_at >= 0)
        return outs

    expected = run(-1)
    for lose_at in range(3):
        for mine, want in zip(run(lose_at), expected, strict=True):
            assert_near(mine, want)
            assert mode == "merged" or torch.equal(mine, want)


def test_reorders_fold_but_not_across_what_a_worker_may_have() -> None:
    first, second, third = (1, [1, 2, 0]), (2, [0, 0, 1]), (3, [2, 1, 0])
    assert folded([third, first, second], ()) == [(3, [2, 1, 1])]
    assert folded([first, second, third], {1}) == [first, (3, [1, 0, 0])]
    assert folded([first, second, third], {2, 3}) == [(2, [1, 1, 2]), third]
    assert folded([first, second, third], {1, 2}) == [first, second, third]
    assert folded([], {1}) == []


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_a_prefix_comes_back(mode: str) -> None:
    kv = {n: random(LAYERS, 1, tiny.KV_HEADS, 3, D // tiny.HEADS, seed=i) for i, n in enumerate(("k", "v"), 7)}

    def run(swarm: Swarm, lose_at: int) -> list[Tensor]:
        with swarm.flow.session(16, replay=mode) as session:
            outs = []
            for at in range(4):
                if at == lose_at:
                    lose(swarm)
                first = {"prefix_kv": kv, "attention_mask": MASK} if at == 0 else {}
                outs.append(session.step(random(B, S if at == 0 else 1, D, seed=at), **first))
            assert len(session.replays) == (lose_at >= 0)
            return outs

    expected = run(swarm_of(SPLITS["two"]), -1)
    for got, want in zip(run(swarm_of(SPLITS["two"]), 3), expected, strict=True):
        assert_near(got, want)
        assert mode == "merged" or torch.equal(got, want)


def test_merged_joins_what_can_be_joined() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    with swarm.flow.session(32, replay="merged") as session:
        session.step(random(B, S, D), attention_mask=MASK, steer={1: V})
        for at in range(8):
            session.reorder([at % 4, 1, 2, 0])
            session.step(random(B, 1, D, seed=at), steer={1: V} if at < 4 else {})
        lose(swarm)
        session.step(random(B, 1, D))
        assert session.replays[0].steps == 2
        assert swarm.asked(3) == 3, "steered, plain, and the one at hand"


@functools.cache
def rescaled(kind: str) -> Path:
    """A model whose rotary scale is another one beyond 8 columns; dynamic: at each length another."""
    import transformers

    longrope = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope = {**longrope, "original_max_position_embeddings": 8} if kind == "longrope" else {"factor": 4.0}
    config = tiny.config("llama")
    config.num_hidden_layers, config.max_position_embeddings = 2, 64 if kind == "longrope" else 8
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, **rope}
    torch.manual_seed(0)
    model, where = transformers.AutoModelForCausalLM.from_config(config), tiny.root() / f"llama-{kind}"
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(where)
    return where


@pytest.mark.parametrize(
    ("what", "joined"),  # how many steps are repeated of longrope's, and of dynamic's
    [
        ("columns", (2, 7)),
        ("positions", (2, 9)),
        ("prefix", (2, 10)),
        ("a rollback into a step", (11, 11)),
        ("a row with other positions is lost", (12, 12)),
    ],
)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_merged_joins_no_steps_of_other_rotary_scales(kind: str, what: str, joined: tuple[int, int]) -> None:
    """Keys have the scale of the length that they were made at, and a joined step has one."""
    swarm, x = HereSwarm(rescaled(kind), [(0, 1), (1, 2), (1, 2)]), random(2, 20, D)
    kv = {n: random(2, 1, tiny.KV_HEADS, 3, D // 4, seed=i) for i, n in enumerate(("k", "v"), 7)}

    def run(lost: bool) -> tuple[Tensor, Any]:
        with swarm.flow().session(20 + 3, replay="merged") as s:
            first: dict[str, Any] = {"prefix_kv": kv} if what == "prefix" else {}
            if what == "positions":
                first["position_ids"] = torch.arange(2, 5)[None]
            if what.startswith("a row"):
                first["position_ids"] = torch.stack([torch.arange(3), torch.arange(3) + 6])
            s.step(x[:, :3], **first)
            if what.startswith("a rollback"):
                s.step(x[:, 3:11])
                s.rollback(5)
            for at in range(s.position, 14):
                if what.startswith("a row") and at == 13:
                    s.reorder([0, 0])
                s.step(x[:, at : at + 1])
            if lost:
                swarm.kill([one.peer for one in swarm.workers].index(s.workers[-1].hop.peer))
            return torch.cat([s.step(x[:, at : at + 1]) for at in range(14, 18)], 1), s.replays

    (want, _), (got, (told,)) = run(False), run(True)
    assert told.steps == joined[kind == "dynamic"]
    torch.testing.assert_close(got, want, atol=5e-6, rtol=5e-5)
    swarm.close()


@pytest.mark.slow
def test_the_replacement_may_fail_too() -> None:
    spans = [*SPLITS["two"], (1, 3)]
    expected = changing(swarm_of(spans).flow.session(16), -1, lambda: None)
    for after in (0, 1, 3, 5):
        swarm = swarm_of(spans)

        def lost(swarm: Swarm = swarm, after: int = after) -> None:
            lose(swarm)
            swarm.kill(5, after)

        with swarm.flow.session(16) as session:
            for mine, want in zip(changing(session, 5, lost), expected, strict=True):
                assert torch.equal(mine, want)


def test_workers_that_differ_come_last_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    swarm = swarm_of(SPLITS["another like it"])
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        session.step(x)
        lose(swarm)
        served = swarm.served[3]
        served.compute.threads += 1
        session.step(x)
        assert not session.replays[0].bitwise
    assert "other numerics" in caplog.text and "threads" in caplog.text


def test_another_block_fn_does_not_take_its_place() -> None:
    def louder(params: Any, hidden: Tensor, /, *, block: Any, **kw: Any) -> Tensor:
        return block(params, hidden, **kw) * 2

    swarm = swarm_of(SPLITS["another like it"])
    flow = swarm.flow.options(timeout=0.7)
    x = random(B, S, D).requires_grad_()
    served = swarm.served[3]
    served.spec = with_block_fn(served.spec, louder, "louder")
    with flow.session(16) as session:
        session.step(x.detach())
        out = flow(x).sum()
        lose(swarm)
        for call in (lambda: session.step(x.detach()), out.backward):
            with pytest.raises(NoRoute, match="another block_fn"):
                call()


def test_an_interrupt_blames_nobody_and_the_step_can_be_taken_again() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        expected = [session.step(x), session.step(x)]
    swarm = swarm_of(SPLITS["another like it"])
    with swarm.flow.session(16) as session:
        got = [session.step(x)]
        stage = session.workers[1]
        assert stage.channel is not None
        stage.channel.closed = stage.given_up = True  # as a cancelled request leaves a stream
        got.append(session.step(x))
        assert not session.replays and not swarm.bans
    assert all(torch.equal(mine, want) for mine, want in zip(got, expected, strict=True))


def test_an_interrupted_step_that_does_not_end_is_given_up() -> None:
    """As one is that waits for a worker which lives and never answers."""
    swarm = Swarm("llama", (0, 2), (2, 4))
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        expected = [session.step(x), session.step(x)]
    flow = swarm.flow.options(timeout=0.5, push=False)
    with flow.session(16) as session:
        session.step(x)
        session.dispatcher = flow.options(timeout=60).dispatcher
        swarm.interrupt(lambda: session.step(x), worker=1, then=asyncio.Event().wait)
        session.dispatcher = flow.dispatcher
        with pytest.raises(kf.errors.DeadlineError, match="the step that was interrupted"):
            session.step(x)
        assert torch.equal(session.step(x), expected[1])
        assert not session.replays and not swarm.bans


def test_a_worker_without_room_for_a_kwarg_goes_on_without_it() -> None:
    swarm = Swarm("llama", (0, 4), kv_bytes=24_000)
    with swarm.flow.session(8) as session:
        expected = [session.step(random(B, S, D)), session.step(random(B, 1, D))]
    tiny.settle(swarm.flow, [0])
    with swarm.flow.session(8) as session:
        session.step(random(B, S, D))
        with pytest.raises(WorkerFull, match="no room for a step's kwargs"):
            session.step(random(B, 1, D), prompts=random(LAYERS, 1, 40, D))
        failed, blamed = swarm.flow.peers.failed, list[WorkerFailed]()
        swarm.flow.peers.failed = lambda error: (blamed.append(error), failed(error))[1]  # type: ignore[method-assign]
        assert torch.equal(session.step(random(B, 1, D)), expected[1])
        assert not blamed and not session.replays


def test_what_a_session_keeps_is_its_own() -> None:
    """A caller may change his tensors in place between steps."""
    outs = []
    for lost in (False, True):
        swarm = swarm_of([(0, 4), (0, 4)])
        swarm.hidden = {1}
        x, v = random(B, S, D), V.clone()
        with swarm.flow.session(16) as session:
            session.step(x, steer={1: v})
            x.mul_(2), v.add_(1)
            session.step(x, steer={1: v})
            x.mul_(2), v.add_(1)
            if lost:
                swarm.kill(0)
                swarm.hidden = {0}
            outs.append(session.step(x, steer={1: v}))
            assert len(session.replays) == lost
    assert torch.equal(*outs)


def test_a_kwarg_that_changes_after_an_interrupted_step_is_sent_again() -> None:
    """The step that was given up goes on running there, with the value that it was sent."""
    may_go_on = threading.Event()
    may_go_on.set()

    def fn(params: Any, hidden: Tensor, /, *, block: Any, **kw: Any) -> Tensor:
        assert may_go_on.wait(60)
        return block(params, hidden, **kw)

    flow, x, v = tiny.make_flow("llama", (2, 4), block_fn={0: fn}).options(timeout=2), random(B, S, D), V.clone()
    with flow.session(16) as session:
        session.step(x)
        may_go_on.clear()
        with pytest.raises(kf.errors.DeadlineError):
            session.step(x, steer={0: v})
        may_go_on.set()
        got = session.step(x, steer={0: v.mul_(-3)})
    with flow.session(16) as session:
        session.step(x)
        assert torch.equal(got, session.step(x, steer={0: v}))


@pytest.mark.slow
def test_generate_goes_on() -> None:
    from kwflow.huggingface.auto import AutoDistributedModelForCausalLM

    def run(swarm: Swarm, **how: Any) -> Tensor:
        model = AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=swarm.flow)
        ids = tiny.ids(2, 4)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, steer={1: V}, **how)

    for how in ({"do_sample": False}, {"num_beams": 3, "num_return_sequences": 2}):
        expected = run(swarm_of(SPLITS["two"]), **how)
        for after in (0, 1, 5):
            swarm = swarm_of(SPLITS["two"])
            lose(swarm, after)
            assert torch.equal(run(swarm, **how), expected)


def test_replay_is_one_of_two() -> None:
    with pytest.raises(KwargError, match="'stepwise' or 'merged'"):
        tiny.flow("llama").session(8, replay="fast")


def test_an_async_call_goes_on() -> None:
    swarm = swarm_of(SPLITS["two"])
    x = random(B, S, D)
    expected = swarm.flow(x)
    lose(swarm)
    assert torch.equal(asyncio.run(swarm.flow.acall(x)), expected)


# ---------------------------------------------------------------- handed on from worker to worker


def pushed(swarm: Swarm) -> int:
    return sum(op == "push" for _, op in swarm.seen)


def test_workers_hand_on_what_the_client_would_carry() -> None:
    swarm = swarm_of(SPLITS["two"][:3])
    with swarm.flow.options(push=False).session(16) as session:
        expected = changing(session, -1, lambda: None)
    assert not pushed(swarm)
    with swarm.flow.session(16) as session:
        got = changing(session, -1, lambda: None)
    assert all(torch.equal(mine, want) for mine, want in zip(got, expected, strict=True))
    assert pushed(swarm) == 2 * 8, "two hand on, all steps but the first"


def test_a_worker_says_how_long_it_waited_for_the_one_before() -> None:
    swarm = Swarm("llama", (0, 2), (2, LAYERS))
    with swarm.flow.session(16) as session, swarm.flow.timed() as timings:
        for _ in range(3):
            session.step(random(B, 1, D))
    assert [one.layers for one in timings].count((2, LAYERS)) == 3 and {one.op for one in timings} == {"step"}
    first, *handed = [one for one in timings if one.layers == (2, LAYERS)]
    assert first.waited == 0 and all(one.waited > 0 for one in handed)
    assert all(one.waited == 0 for one in timings if one.layers == (0, 2))
    hidden = 4 * B * D
    assert first.bytes_sent > hidden > max(one.bytes_sent for one in handed), "another worker brings it"
    assert all(one.network > 0 for one in timings)


@pytest.mark.parametrize("said", [10**400, 1e300, -5.0, [1], "much"])
def test_no_time_is_longer_than_the_request_took_or_negative(said: Any) -> None:
    swarm = Swarm("llama", (0, 4))
    swarm.answers(0, lambda reply: Message({"compute": said, "queue": said}, reply.tree))
    with swarm.flow.timed() as timings:
        swarm.flow(random(B, S, D))
    (timing,) = timings
    assert (timing.queue, timing.compute, timing.network) == (0, 0, timing.seconds)


def test_a_worker_that_says_nonsense_of_its_time_is_used_all_the_same() -> None:
    swarm = Swarm("llama", (0, 2), (2, LAYERS))
    x = random(B, S, D)
    expected = swarm.flow(x)
    swarm.answers(0, lambda reply: Message({"compute": "much", "queue": None, "waited": True}, reply.tree))
    with swarm.flow.timed() as timings:
        assert torch.equal(swarm.flow(x), expected)
    assert (timings[0].waited, timings[0].queue, timings[0].compute) == (0, 0, 0) and timings[1].compute > 0


def test_what_is_lost_between_workers_goes_through_the_client(caplog: pytest.LogCaptureFixture) -> None:
    swarm = swarm_of(SPLITS["two"][:3])
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        expected = [session.step(x) for _ in range(3)]
    served = swarm.served

    async def nowhere(peer: str, layer: int, message: Message) -> Message:
        raise WorkerFailed("no way there", peer=peer)

    served[0].neighbours = nowhere
    with swarm.flow.session(16) as session:
        for want in expected:
            assert torch.equal(session.step(x), want)
        assert session.carried == {swarm.names[0]} and not session.replays
    assert "cannot hand steps on" in caplog.text


def test_an_error_in_the_middle_leaves_nobody_waiting() -> None:
    def odd(params: Any, hidden: Tensor, /, *, block: Any, fail: bool = False, **kw: Any) -> Tensor:
        if fail:
            raise ValueError("on purpose")
        return block(params, hidden, **kw)

    flow = tiny.make_flow("llama", (1, 2, 4), block_fn=odd)
    x = random(B, S, D)
    with flow.session(16) as session:
        expected = [session.step(x), session.step(x)]
    with flow.session(16) as session:
        session.step(x)
        began = time.monotonic()
        with pytest.raises(kf.errors.BlockError, match="on purpose"):
            session.step(x, fail=True)
        assert time.monotonic() - began < 1
        assert torch.equal(session.step(x), expected[1])
        assert not session.replays


def test_one_worker_in_two_places_hands_on_to_itself() -> None:
    """Layers 0:1 and, once worker 1 is lost, 1:3 on the worker that serves all."""
    swarm = swarm_of([(0, 1), (1, 3), (3, 4), (1, 4)])
    x = random(B, S, D)
    with swarm.flow.session(32) as session:
        expected = [session.step(x) for _ in range(5)]
    swarm = swarm_of([(0, 1), (1, 3), (3, 4), (1, 4)])
    with swarm.flow.session(32) as session:
        got = [session.step(x)]
        swarm.kill(2)
        swarm.hidden = {2}
        got.append(session.step(x))
        lose(swarm)
        swarm.hidden |= {2}
        got += [session.step(x) for _ in range(3)]
        assert [told.by[0][0] for told in session.replays] == [swarm.names[3]] * 2
        assert not session.carried
    assert all(torch.equal(mine, want) for mine, want in zip(got, expected, strict=True))


# ---------------------------------------------------------------- what a session leaves behind


def test_a_session_that_is_closed_in_the_middle_of_a_step_leaves_nothing() -> None:
    swarm = swarm_of(SPLITS["two"])
    session, errors = swarm.flow.session(16), list[BaseException]()
    session.step(random(B, S, D))
    swarm.kill(1)

    def step() -> None:
        try:
            session.step(random(B, 1, D))  # waits for somebody to take worker 1's place
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    time.sleep(0.3)
    session.close()
    thread.join(2)
    assert [type(error) for error in errors] == [SessionError]
    swarm.hidden = {1}
    time.sleep(0.4)
    left = [one for number, one in enumerate(swarm.served) if number != 1]  # which is dead
    assert not any(one.kv_used or one.inboxes for one in left)


WRONG = {
    "columns": (lambda t: t[:, :1], "answered float32"),
    "rows": (lambda t: t[:1], "rows"),
    "no batch": (lambda t: t[0], "hidden is float32"),
    "whole numbers": (lambda t: t.long(), "floating point"),
    "width": (lambda t: t[..., :5], "hidden is float32"),
    "NaN": (lambda t: t * torch.nan, "NaN"),
}


@pytest.mark.parametrize(("wrong", "why"), WRONG.values(), ids=WRONG)
def test_what_a_worker_hands_on_wrongly_is_asked_of_it_twice(
    wrong: Callable[[Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not the caller's fault, nor that of the worker which could not take it; the values are right."""
    swarm = swarm_of(SPLITS["two"][:3])
    x = random(B, S, D)
    with swarm.flow.options(push=False).session(32) as session:
        expected = [session.step(x) for _ in range(6)]
    bring = swarm.served[0].neighbours

    async def odd(peer: str, layer: int, message: Message) -> Message:
        return await bring(peer, layer, message if message.tree is None else Message(message.meta, wrong(message.tree)))

    swarm.served[0].neighbours = odd
    with swarm.flow.session(32) as session:
        asked, handed = list[int](), list[int]()
        for want in expected:
            before, pushes = swarm.asked(1), pushed(swarm)
            assert torch.equal(session.step(x), want)
            asked.append(swarm.asked(1) - before)
            handed.append(pushed(swarm) - pushes)
        assert asked == [1, 2, 2, 1, 1, 1] and not session.replays
        assert session.carried == {swarm.names[0]} and handed[-3:] == [2, 2, 2], "the other one hands on"
    (said,) = [record.getMessage() for record in caplog.records if "hands steps on wrongly" in record.getMessage()]
    assert swarm.names[0][-8:] in said and why in said
    assert not swarm.bans


def test_a_worker_that_dies_handed_nothing_on_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is NaN that comes again wrong; steps go on from worker to worker."""
    monkeypatch.setattr("kwflow.client.stages.MAX_WRONG_HANDOFFS", 1)  # the first one would show
    swarm = swarm_of([(0, 1), (1, 3), (3, 4), (1, 3), (1, 3), (1, 3)])
    with swarm.flow.session(32) as session:
        session.step(random(B, S, D))
        for number in (1, 3, 4):
            swarm.kill(number)
            swarm.hidden = set(range(6)) - {0, 2, number + 1 + (number == 1)}
            session.step(random(B, 1, D))
        session.step(random(B, 1, D), steer={0: torch.full((D,), 1e38)})
        session.step(random(B, 1, D), edit=kf.scale(1e38, layers=1))
        assert len(session.replays) == 3 and not session.carried


def test_a_worker_that_was_replaced_is_let_go_of() -> None:
    swarm = swarm_of(SPLITS["another like it"])
    with swarm.flow.session(32) as session:
        for _ in range(3):
            session.step(random(B, 1, D))
        old = weakref.ref(session.workers[1])
        lose(swarm)
        session.dispatcher = swarm.flow.options(
            push=False
        ).dispatcher  # a step that is handed on would say anew to whom
        session.step(random(B, 1, D))
        gc.collect()
        assert len(session.replays) == 1 and old() is None


def test_a_refusal_to_repeat_steps_is_an_answer() -> None:
    """Nobody died, and nobody else is there: the step ends with the reason, not at its deadline."""
    swarm = Swarm("llama", (0, 4))
    with swarm.flow.options(timeout=60).session(16) as session:
        session.step(random(B, S, D))
        (stage,) = session.workers
        loop.run(stage.channel.aclose())  # type: ignore[union-attr]
        stage.given_up = True
        swarm.answers(0, lambda reply: Message({"error": {"kind": "caller", "type": "ShapeError", "message": "no"}}))
        began = time.monotonic()
        with pytest.raises(NoRoute, match="cannot repeat the session's steps: no") as caught:
            session.step(random(B, 1, D))
        assert time.monotonic() - began < 30
        assert isinstance(caught.value.__cause__, WorkerFailed)
        assert isinstance(caught.value.__cause__.__cause__, ShapeError)


def test_a_worker_may_be_late_to_free_what_it_held_before() -> None:
    """A step that was given up is taken again by the same worker, which has room for one session."""
    swarm = Swarm("llama", (0, 4), kv_bytes=20_000)
    with swarm.flow.session(8) as session:
        expected = [session.step(random(B, S, D)), session.step(random(B, 1, D))]
    tiny.settle(swarm.flow, [0])
    with swarm.flow.session(8) as session:
        got = [session.step(random(B, S, D))]
        (stage,) = session.workers
        swarm.frees_after[0] = 0.15
        loop.run(stage.channel.aclose())  # type: ignore[union-attr]
        stage.given_up = True
        got.append(session.step(random(B, 1, D)))
        assert not session.replays
    assert all(torch.equal(mine, want) for mine, want in zip(got, expected, strict=True))


@pytest.mark.parametrize("push", [True, False])
def test_deadlines_that_pass_change_nothing(push: bool) -> None:
    """Steps that are given up at any moment, and taken again: the same values, and nobody is to blame."""
    swarm = swarm_of(SPLITS["two"][:3])

    def run(*seconds: float) -> list[Tensor]:
        outs = list[Tensor]()
        with swarm.flow.session(16) as session:
            for at in range(6):
                for timeout in (*seconds, 60.0):
                    session.dispatcher = swarm.flow.options(timeout=timeout, push=push).dispatcher
                    try:
                        outs.append(session.step(random(B, 1, D, seed=at), steer={1: V * at}))
                        break
                    except (kf.errors.DeadlineError, NoRoute):
                        pass
            assert not session.replays
        return outs

    for mine, want in zip(run(0.0005, 0.002, 0.004, 0.006), run(), strict=True):
        assert torch.equal(mine, want)
    assert not swarm.bans


def test_a_stranger_cannot_bring_a_step() -> None:
    """Who does not know a session's name reaches nobody's; who brings nonsense, a second time or late, is not heard."""
    swarm = swarm_of(SPLITS["two"][:3])
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        expected = [session.step(x), session.step(x)]
    pool = swarm.flow.peers.pool

    def bring(name: str, number: int, hidden: Any) -> Any:
        message = Message({"op": "push", "session": name, "step": number}, hidden)
        return loop.run(pool(swarm.names[1], message)).meta["taken"]

    with swarm.flow.session(16) as session:
        got = [session.step(x)]
        name = session.workers[1].name
        assert not bring("guessed", 1, x)
        for nonsense in ({"hidden": x}, 3):
            with pytest.raises(KwargError, match="one tensor"):
                bring(name, 1, nonsense)
        got.append(session.step(x))
        assert not bring(name, 1, x), "that step was taken"
    assert not bring(name, 2, x), "the session is over"
    assert all(torch.equal(mine, want) for mine, want in zip(got, expected, strict=True))


def test_what_was_rounded_otherwise_once_is_not_bitwise_later() -> None:
    swarm = swarm_of([(0, 1), (1, 3), (3, 4), (1, 3), (3, 4)])
    served = swarm.served
    served[3].compute.threads += 1
    x = random(B, S, D)
    with swarm.flow.session(16) as session:
        session.step(x)
        lose(swarm)
        session.step(x)
        swarm.kill(2)
        swarm.hidden.add(2)
        session.step(x)
        assert [told.bitwise for told in session.replays] == [False, False]
