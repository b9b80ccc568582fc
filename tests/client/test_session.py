"""Sessions: every step has the values of Hugging Face's own cached decoding, whatever the kwargs are at each."""

# B batch, S seq, D hidden

from __future__ import annotations

import copy
import random as python_random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kwflow as kf
from kwflow.blocks.span import with_block_fn
from kwflow.errors import (
    CallerError,
    KwargError,
    KwflowError,
    SessionError,
    ShapeError,
    SpanError,
    UnknownKwarg,
    UnsupportedError,
    WorkerFailed,
    WorkerFull,
)
from kwflow.wire import in_process, loop
from kwflow.wire.channel import call
from kwflow.wire.message import Message
from kwflow.worker.hello import FEATURES
from kwflow.worker.server import Served
from tests.doubles.workers import workers_of
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_close, cache_name, residual, tiny
from tests.oracle.tiny import (
    HEADS,
    HIDDEN,
    LAYERS,
    ONE,
    THREE,
    TWO,
    Requests,
    flow,
    huggingface,
    ids,
    kv_used,
    left_padded,
    make_flow,
    positions_of,
    random,
    settle,
    span,
)

B, D = 3, HIDDEN
MASK = left_padded([0, 2, 5], 8)


class Local:
    """Hugging Face's own cache, step by step."""

    def __init__(self, family: str):
        self.model, self.cache = huggingface(family), DynamicCache(config=huggingface(family).config)

    def step(self, hidden: Tensor, **local: Any) -> Tensor:
        return residual(self.model, hidden, cache=self.cache, **local)


def positions(family: str, value: Tensor) -> dict[str, Tensor]:
    return {"position_ids": value} if family == "llama" else {}


# ---- values


@every_family
@pytest.mark.parametrize("chunks", [(8,), (3, 1, 4), (1, 1, 6), (1, 7)], ids=str)
def test_uneven_chunks_are_the_same_chunks_locally(family: str, chunks: tuple[int, ...]) -> None:
    hidden, v, at = random(B, 8, D), random(D, seed=1), 0
    whole = flow(family, THREE)(hidden, attention_mask=MASK, steer={1: v}, **positions(family, positions_of(MASK)))
    local, real = Local(family), MASK.bool()
    with flow(family, THREE).session(8) as session:
        for size in chunks:
            columns, mask = slice(at, at + size), MASK[:, : at + size]
            own = positions(family, positions_of(MASK)[:, columns])
            out = session.step(hidden[:, columns], attention_mask=mask, steer={1: v}, **own)
            assert_bits(out, local.step(hidden[:, columns], attention_mask=mask, steer={1: v[None, None]}, **own))
            assert_close(out[real[:, columns]], whole[:, columns][real[:, columns]])
            at += size
            assert session.position == at


@every_family
def test_greedy_decoding_of_a_left_padded_batch(family: str) -> None:
    """12 steps, each equal to a full recompute, and to the bit to Hugging Face's cached decoding."""
    remote, model, cache = flow(family, TWO), huggingface(family), DynamicCache(config=huggingface(family).config)
    tokens, mask = ids(B, 8), MASK
    with remote.session(8 + 12) as session:
        x = remote.inputs({"input_ids": tokens, "attention_mask": mask})
        new = tokens
        for step in range(13):
            out = session.step(**x)
            logits = remote.head(out)
            given = {} if family == "bloom" else {"position_ids": positions_of(mask)[:, -new.shape[1] :]}
            local = model(new, attention_mask=mask, use_cache=True, **{cache_name(model): cache}, **given).logits
            assert_bits(logits, local, f"step {step}")
            again = remote.inputs({"input_ids": tokens, "attention_mask": mask})
            assert_close(out[:, -1], remote(**again)[:, -1], f"step {step}, recomputed")
            new = logits[:, -1:].argmax(-1)
            tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones(B, 1).long()], 1)
            x = session.inputs(new) if step < 12 else {}
        assert session.position == 20


@every_family
def test_kwargs_may_change_at_every_step(family: str) -> None:
    hidden, v, p = random(B, 8, D), random(B, D, seed=1), random(LAYERS, 1, 6, D, seed=2)
    steps: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (3, {"prompts": p}, {"prompts": dict(enumerate(p))}),
        (1, {}, {}),
        (1, {"steer": {2: v[0]}}, {"steer": {2: v[0][None, None]}}),
        (1, {"steer": kf.axes(v, "batch hidden")}, {"steer": dict.fromkeys(range(LAYERS), v[:, None])}),
        (2, {"steer": {3: kf.axes(hidden[0, :2], "seq hidden")}}, {"steer": {3: hidden[0, :2][None]}}),
    ]
    local, at = Local(family), 0
    with flow(family, TWO).session(8) as session:
        for size, given, means in steps:
            columns = slice(at, at + size)
            assert_bits(
                session.step(hidden[:, columns], **given), local.step(hidden[:, columns], **means), f"column {at}"
            )
            at += size


@every_family
@pytest.mark.parametrize("mask", [MASK, None], ids=["padded", "no mask"])
def test_prompts_act_at_token_positions_across_steps(family: str, mask: Tensor | None) -> None:
    """A prefix of 5 over a prefill in chunks: each row's first 5 tokens, wherever its chunk ends."""
    hidden, p, outs = random(B, 8, D), random(LAYERS, B, 5, D, seed=1), []
    whole = flow(family, TWO)(hidden, attention_mask=mask, prompts=p)
    with flow(family, TWO).session(8) as session:
        for a, b in ((0, 3), (3, 4), (4, 8)):
            seen = None if mask is None else mask[:, :b]
            outs.append(session.step(hidden[:, a:b], attention_mask=seen, prompts=p))
    real = MASK.bool() if mask is not None else torch.ones(B, 8, dtype=torch.bool)
    assert_close(torch.cat(outs, 1)[real], whole[real])


@every_family
def test_a_4d_mask_in_steps(family: str) -> None:
    hidden = random(B, 4, D)
    causal = torch.ones(4, 4, dtype=torch.bool).tril().expand(B, 1, 4, 4).clone()
    causal[1, :, 2:, 0] = False
    floats = torch.where(causal.expand(B, HEADS, 4, 4), random(B, HEADS, 4, 4, seed=1), -1e9)
    whole = flow(family, TWO)(hidden, attention_mask=floats)
    with flow(family, TWO).session(4) as session:
        first = session.step(hidden[:, :3], attention_mask=floats[:, :, :3, :3])
        with pytest.raises(SessionError, match="4-D"):
            session.step(hidden[:, 3:])
        with pytest.raises(ShapeError, match="key = 3, expected 4"):
            session.step(hidden[:, 3:], attention_mask=floats[:, :, 3:, :3])
        with pytest.raises(KwargError, match="4-D"):
            session.step(hidden[:, 3:], attention_mask=floats[:, :, 3:], prompts=random(LAYERS, 1, 1, D))
        last = session.step(hidden[:, 3:], attention_mask=floats[:, :, 3:])
        assert_close(torch.cat([first, last], 1), whole)
        session.rollback(0)  # nothing 4-D is left
        assert_bits(session.step(hidden), flow(family, TWO)(hidden))
    booleans = flow(family, TWO)(hidden, attention_mask=causal)
    with flow(family, TWO).session(4) as session:
        outs = [session.step(hidden[:, a:b], attention_mask=causal[:, :, a:b, :b]) for a, b in ((0, 1), (1, 4))]
    assert_close(torch.cat(outs, 1), booleans)


# ---- going back


@every_family
@pytest.mark.parametrize("to", [0, 1, 3, 5])
def test_rollback(family: str, to: int) -> None:
    hidden, other = random(B, 5, D), random(B, 3, D, seed=1)
    mask = left_padded([0, 1, 2], 8)
    with flow(family, THREE).session(8) as session:
        session.step(hidden[:, :3], attention_mask=mask[:, :3])
        session.step(hidden[:, 3:], steer={1: random(D, seed=2)})
        session.rollback(to)
        assert session.position == to
        session.step(hidden[:, to:], attention_mask=mask[:, :5]) if to < 5 else None
        got = session.step(other)
    reference = Local(family)
    with flow(family, THREE).session(8) as session:
        if to == 5:
            session.step(hidden[:, :3], attention_mask=mask[:, :3])
            session.step(hidden[:, 3:], steer={1: random(D, seed=2)})
        elif to < 4 and to:
            session.step(hidden[:, :3], attention_mask=mask[:, :3])
            session.rollback(to)
            session.step(hidden[:, to:], attention_mask=mask[:, :5])
        else:
            session.step(hidden, attention_mask=mask[:, :5])
        assert_bits(got, session.step(other))
    if to == 0:  # nothing of the past is left
        reference.step(hidden, attention_mask=mask[:, :5])
        assert_bits(got, reference.step(other, attention_mask=mask))


@every_family
def test_reorder(family: str) -> None:
    """Rows become what other rows were; their masks and kwargs-made values go with them."""
    hidden, nexts = random(B, 8, D), random(B, 3, D, seed=1)
    order = torch.tensor([2, 0, 0])
    whole = torch.cat([hidden[order], nexts], 1)
    mask = torch.cat([MASK[order], torch.ones(B, 3).long()], 1)
    expected = flow(family, TWO)(whole, attention_mask=mask, **positions(family, positions_of(mask)))
    with flow(family, TWO).session(12) as session:
        session.step(hidden, attention_mask=MASK, **positions(family, positions_of(MASK)))
        session.reorder(order)
        assert_close(session.step(nexts[:, :1])[:, -1], expected[:, 8], "after a reorder")
        session.rollback(8)
        session.step(nexts[:, :1], attention_mask=mask[:, :9])
        # twice between two steps, and the identity
        session.reorder([1, 2, 0])
        session.reorder([2, 0, 1])
        session.reorder([0, 1, 2])
        assert_close(session.step(nexts[:, 1:2])[:, -1], expected[:, 9])
        # a reorder and a rollback, in both orders
        session.reorder([0, 0, 0])
        session.rollback(9)
        out = session.step(nexts[:1, 1:2].expand(B, 1, D).contiguous())
        assert_close(out, expected[:1, 9:10].expand(B, 1, D))
    for bad in ([0, 1], [0, 1, 3], [0, 1, -1], [0.0, 1.0, 2.0]):
        with flow(family, TWO).session(12) as session:
            session.step(hidden)
            with pytest.raises(SessionError, match="reorder takes 3 row numbers"):
                session.reorder(bad)
    with pytest.raises(SessionError, match="before the first step"):
        flow(family, TWO).session(12).reorder([0])


@pytest.mark.parametrize("seed", range(6))
def test_steps_reorders_and_rollbacks_in_any_order(seed: int) -> None:
    """After each step a row is what a call over that row's whole history gives. Reorders are of all columns."""
    source = python_random.Random(seed)
    history, local = random(B, 2, D, seed=seed), flow("llama", ONE)
    with flow("llama", TWO).session(40) as session:
        session.step(history)
        for turn in range(24):
            what = source.choice(["step", "reorder", "rollback"])
            if what == "reorder":
                rows = [source.randrange(B) for _ in range(B)]
                session.reorder(rows)
                history = history[rows]
            elif what == "rollback":
                history = history[:, : source.randint(max(1, session.position - 3), session.position)]
                session.rollback(history.shape[1])
            else:
                new = random(B, source.choice([1, 1, 3]), D, seed=100 * seed + turn)
                start, history = history.shape[1], torch.cat([history, new], 1)
                if history.shape[1] > 40:
                    break
                assert_close(session.step(new), local(history)[:, start:], f"turn {turn}")


def test_a_step_taken_again_is_the_same_step() -> None:
    """An interrupted step did not happen here, and may have happened there: its start column says so."""
    hidden, remote = random(B, 6, D), flow("llama", TWO)
    with remote.session(6) as session, remote.session(6) as other, remote.session(6) as third:
        for one in (session, other, third):
            one.step(hidden[:, :4])
        masked = torch.tensor([[1, 1, 1, 1, 0]]).repeat(B, 1)
        wrong = {"hidden": hidden[:, 4:5] * 3, "attention_mask": masked, "steer": {0: random(D)}}
        lost = third.step(**wrong)
        workers_of(remote).interrupt(lambda: session.step(**wrong))  # the worker is ahead of the client
        again = session.step(hidden[:, 4:])
        assert_bits(again, other.step(hidden[:, 4:]))
        assert not torch.equal(lost, again[:, :1])


def test_a_step_that_raises_on_a_worker_did_not_happen() -> None:
    def fussy(params, hidden, /, *, block, fail: bool = False, **kw):
        if fail and block.layer == 2:
            raise ValueError("as asked")
        return block(params, hidden, **kw)

    hidden, remote, order = random(B, 6, D), make_flow("gpt2", THREE, block_fn=fussy), [2, 0, 1]
    with remote.session(6) as session:
        session.step(hidden[:, :4])
        session.reorder(order)
        with pytest.raises(CallerError, match="as asked"):  # after some workers have reordered and appended
            session.step(hidden[:, 4:5] * 2, fail=True)
        assert session.position == 4
        out = session.step(hidden[:, 4:])
    assert_close(out, flow("gpt2", ONE)(torch.cat([hidden[order, :4], hidden[:, 4:]], 1))[:, 4:])


def test_a_worker_refuses_columns_that_it_does_not_hold() -> None:
    """After a step that failed half-way it holds what stood before that step, and no more."""

    def fussy(params, hidden, /, *, block, fail: bool = False, **kw):
        if fail:
            raise ValueError("as asked")
        return block(params, hidden, **kw)

    served = Served(with_block_fn(span("gpt2", 0, LAYERS), fussy, "fussy"))
    channel = loop.run(in_process.InProcess({"w": served.accept}).open("w"), 5)

    def step(start: int, columns: int, **kwargs: Any) -> Message:
        meta = {"op": "step", "span": [0, LAYERS], "start": start, "max_length": 8}
        tree = {"hidden": random(1, columns, D), "kwargs": [["layers", kwargs]] if kwargs else []}
        return loop.run(call(channel, Message(meta, tree)), 5)

    with pytest.raises(WorkerFailed, match="holds no columns of the session, the step starts at 1"):
        step(1, 1)
    step(0, 6)
    step(6, 1)
    with pytest.raises(CallerError, match="as asked"):
        step(2, 2, fail=True)
    with pytest.raises(WorkerFailed, match="holds 2 columns of the session, the step starts at 6"):
        step(6, 1)
    step(2, 1)
    with pytest.raises(SessionError, match="columns 3:9 do not fit max_length 8"):
        step(3, 6)
    loop.run(channel.aclose(), 5)
    served.close()


# ---- positions


def test_positions_go_on_from_the_last_given() -> None:
    hidden, local = random(B, 9, D), Local("llama")
    given = torch.tensor([[5, 9, 2], [0, 1, 2], [7, 7, 7]])
    with flow("llama", TWO).session(10) as session:
        session.step(hidden[:, :2])  # none were given: columns 0, 1
        local.step(hidden[:, :2], position_ids=torch.arange(2)[None])
        assert_bits(session.step(hidden[:, 2:5], position_ids=given), local.step(hidden[:, 2:5], position_ids=given))
        for at, size in ((5, 1), (6, 2)):
            meant = given[:, -1:] + torch.arange(at - 4, at - 4 + size)
            columns = slice(at, at + size)
            assert_bits(session.step(hidden[:, columns]), local.step(hidden[:, columns], position_ids=meant))
        one = torch.tensor([[40]])  # one row for all
        assert_bits(session.step(hidden[:, 8:], position_ids=one), local.step(hidden[:, 8:], position_ids=one))


@pytest.mark.parametrize(("to", "last"), [(4, 9), (3, 5), (2, 1), (1, 0), (5, 2)])
def test_positions_after_a_rollback_into_a_step(to: int, last: int) -> None:
    hidden, nexts = random(1, 5, D), random(1, 2, D, seed=1)
    given = torch.tensor([[5, 9, 2]])
    with flow("llama", TWO).session(8) as session, flow("llama", TWO).session(8) as other:
        for s in (session, other):
            s.step(hidden[:, :2])
            s.step(hidden[:, 2:], position_ids=given)
            s.rollback(to)
        assert_bits(session.step(nexts), other.step(nexts, position_ids=last + torch.tensor([[1, 2]])))


def test_positions_follow_a_reorder() -> None:
    hidden, nexts = random(2, 3, D), random(2, 1, D, seed=1)
    given = torch.tensor([[5, 6, 7], [0, 1, 2]])
    with flow("llama", TWO).session(8) as session, flow("llama", TWO).session(8) as other:
        for s in (session, other):
            s.step(hidden, position_ids=given)
            s.reorder([1, 0])
        assert_bits(session.step(nexts), other.step(nexts, position_ids=torch.tensor([[3], [8]])))


def test_inputs_of_the_next_tokens() -> None:
    """Learned positions count each row's unmasked tokens; a pad among the next ones is remembered."""
    remote, tokens = flow("gpt2", TWO), ids(2, 4)
    mask = left_padded([0, 2], 4)
    with remote.session(10) as session:
        session.step(**remote.inputs({"input_ids": tokens, "attention_mask": mask}))
        x = session.inputs(ids(2, 2, seed=1))
        expected = remote.embed(ids(2, 2, seed=1), position_ids=torch.tensor([[4, 5], [2, 3]]))
        assert_bits(x["hidden"], expected)
        assert x["attention_mask"].tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]
        session.step(**x)
        x = session.inputs({"input_ids": ids(2, 1), "attention_mask": torch.tensor([[0], [1]])})
        session.step(**x)
        x = session.inputs(ids(2, 1))
        assert_bits(x["hidden"], remote.embed(ids(2, 1), position_ids=torch.tensor([[6], [5]])))
        with pytest.raises(ShapeError, match="the session has 2 rows"):
            session.inputs(ids(3, 1))


# ---- refusals


def refused(session: Any, error: type[KwflowError], says: str, hidden: Tensor, **kwargs: Any) -> None:
    before = session.position
    with pytest.raises(error, match=says):
        session.step(hidden, **kwargs)
    assert session.position == before


def test_what_a_session_cannot_take_is_refused_before_anything_is_sent() -> None:
    remote, hidden = flow("llama", TWO), random(2, 8, D)
    mask = left_padded([0, 1], 4)
    with remote.session(5) as session, Requests(remote) as requests:
        session.step(hidden[:, :3], attention_mask=mask[:, :3])
        sent, one = len(requests), hidden[:, 3:4]
        refused(session, SessionError, r"columns 3:8 do not fit max_length 5", hidden[:, 3:])
        refused(session, SessionError, "the session has 2 rows", hidden[:1, 3:4])
        refused(session, ShapeError, "hidden is", one[..., :-1])
        refused(session, ShapeError, "hidden is", one[0, 0])
        refused(session, KwargError, "hidden is a dict", {"hidden": one})  # type: ignore[arg-type]
        refused(session, KwargError, "attention_mask is .* meta", one, attention_mask=mask.to("meta"))
        refused(
            session,
            SessionError,
            "differs from the session's in its first 3 columns",
            one,
            attention_mask=torch.ones(2, 4).long(),
        )
        refused(session, ShapeError, "key = 1, expected 4", one, attention_mask=torch.ones(2, 1).long())
        refused(session, UnknownKwarg, "Did you mean 'steer'", one, stear={1: one})
        refused(session, ShapeError, "seq = 2, expected 1", one, position_ids=torch.zeros(2, 2).long())
        refused(session, SessionError, "not differentiable", one.clone().requires_grad_())
        refused(session, SessionError, "not differentiable", one, steer={1: torch.ones(D, requires_grad=True)})
        for bad in (-1, 4, 1.0):
            with pytest.raises(SessionError, match="rollback"):
                session.rollback(bad)  # type: ignore[arg-type]
        with pytest.raises(SessionError, match="not differentiable"):
            torch.func.grad(lambda h: session.step(h).sum())(one)
        assert len(requests) == sent
        with torch.no_grad():
            session.step(
                one.clone().requires_grad_(), attention_mask=mask, steer={1: torch.ones(D, requires_grad=True)}
            )
        assert len(requests) > sent
    refused(session, SessionError, "closed", hidden[:, 4:5])
    session.close()  # again does nothing
    for bad in (0, -1, 2.5):
        with pytest.raises(SessionError, match="max_length"):
            remote.session(bad)  # type: ignore[arg-type]


@every_family
def test_an_omitted_mask_goes_on_with_ones(family: str) -> None:
    hidden, local = random(B, 8, D), Local(family)
    mask = left_padded([0, 1, 2], 8)
    with flow(family, TWO).session(8) as session:
        for a, b in ((0, 3), (3, 5), (5, 8)):
            given = {"attention_mask": mask[:, :b]} if b == 3 else {}
            assert_bits(session.step(hidden[:, a:b], **given), local.step(hidden[:, a:b], attention_mask=mask[:, :b]))


@every_family
def test_a_mask_that_begins_late(family: str) -> None:
    """Columns without a mask, then one with a hole in the middle: the past is ones."""
    hidden, local = random(2, 6, D), Local(family)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]])
    with flow(family, TWO).session(6) as session:
        session.step(hidden[:, :3])
        local.step(hidden[:, :3], attention_mask=mask[:, :3])
        out = session.step(hidden[:, 3:], attention_mask=mask)
        assert_bits(out, local.step(hidden[:, 3:], attention_mask=mask))


# ---- sent once


def sections(request: Message) -> list[Any]:
    """The kwargs of a request: each with its layers, or the number of what the worker has."""
    return [one if isinstance(one, int) else [one[0], *one[1]] for one in request.tree.get("kwargs", [])]


def older_flow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Workers that hold no kwargs from step to step."""
    with monkeypatch.context() as patched:
        patched.setattr("kwflow.worker.hello.FEATURES", tuple(f for f in FEATURES if f != "sent once"))
        remote = make_flow("llama", TWO)
        remote.kwargs()  # they say hello
    return remote


def test_a_kwarg_that_stays_is_sent_once_and_one_that_changes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What equals the step before's is a number on the wire; the values are those of a session that is told all."""
    remote, told, hidden, v = flow("llama", TWO), older_flow(monkeypatch), random(B, 11, D), random(D, seed=1).clone()
    lora = {"v_proj": {"A": random(LAYERS, 2, D, seed=2), "B": random(LAYERS, D // 2, 2, seed=3)}}
    steps: list[tuple[Callable[[], dict[str, Any]], list[Any], list[Any]]] = [  # kwargs; sent to the one and the other
        (lambda: {"steer": {3: v}, "lora": lora}, [["layers", "lora"]], [["layers", "lora"], [[3], "steer"]]),
        (lambda: {"steer": {3: v}, "lora": lora}, [0], [0, 1]),
        (lambda: {"steer": {3: v}, "lora": lora, "edit": kf.add(v, layers=1)}, [0, [[1], "edit"]], [0, 1]),
        (lambda: {"edit": kf.add(v, layers=1), "lora": lora}, [0, 1], [0]),
        (lambda: {"steer": {3: v}, "lora": lora}, [0], [0, [[3], "steer"]]),
        (lambda: {"steer": {3: v.mul_(2)}, "lora": lora}, [0], [0, [[3], "steer"]]),  # the same tensor, other values
        (lambda: {"steer": {2: v}}, [], [[[2], "steer"]]),
        (lambda: {"steer": {2: v.mul_(0)}}, [], [[[2], "steer"]]),
        (lambda: {"steer": {2: v.neg_()}}, [], [[[2], "steer"]]),  # -0.0 is another number
        (dict, [], []),
        (lambda: {"steer": {2: v}}, [], [[[2], "steer"]]),
    ]
    with Requests(remote) as ours, Requests(told) as theirs, remote.session(11) as session, told.session(11) as other:
        for at, (kwargs, first, second) in enumerate(steps):
            given, columns = kwargs(), slice(at, at + 1)
            assert_bits(
                session.step(hidden[:, columns], **given), other.step(hidden[:, columns], **given), f"step {at}"
            )
            assert [sections(request) for _, request, _ in ours.seen[-2:]] == [first, second], f"step {at}"
        assert not any(isinstance(one, int) for _, request, _ in theirs.seen for one in sections(request))


def test_after_a_step_that_failed_all_is_sent_again() -> None:
    remote, hidden, v = make_flow("llama", TWO), random(B, 3, D), random(D, seed=1)
    with Requests(remote) as requests, remote.session(3) as session:
        session.step(hidden[:, :1], steer={0: v, 3: v})
        second = session.workers[1]
        second.hop = replace(second.hop, start=1)  # the second worker does not serve it
        with pytest.raises(SpanError):
            session.step(hidden[:, 1:2], steer={0: v, 3: v})
        second.hop = replace(second.hop, start=2)
        session.step(hidden[:, 1:2], steer={0: v, 3: v})
        assert [sections(request) for _, request, _ in requests.seen[-2:]] == [[0], [[[3], "steer"]]]


def test_what_a_worker_holds_is_counted_and_freed() -> None:
    remote, hidden, p = make_flow("gpt2", ONE, kv_bytes=100_000), random(1, 2, D), random(LAYERS, 1, 2, D)
    with remote.session(4) as session:
        session.step(hidden)
        keys = kv_used(remote)[0]
        session.step(hidden[:, :1], prompts=p)
        assert kv_used(remote) == [keys + p.nbytes]
        with pytest.raises(WorkerFull, match="no room for a step's kwargs: they hold 0.4 MB"):
            session.step(hidden[:, :1], prompts=random(LAYERS, 1, 100_000 // LAYERS // D, D))
        session.step(hidden[:, :1])
        assert kv_used(remote) == [keys]
    settle(remote, [0])


def test_a_number_that_a_worker_does_not_hold_is_refused() -> None:
    remote = make_flow("gpt2", ONE)
    remote.kwargs()
    request = Message({"op": "run", "span": [0, 4]}, {"hidden": random(1, 2, D), "kwargs": [0]})
    with pytest.raises(KwargError, match="a request's kwargs are"):
        loop.run(remote.peers.pool(remote.peers.known()[0].peer, request))


# ---- room


def test_keys_and_values_have_a_budget() -> None:
    one = 2 * 8 * 2 * 2 * HIDDEN * 4  # rows, columns, layers, keys and values, floats
    remote, hidden = make_flow("gpt2", TWO, kv_bytes=2 * one), random(2, 3, D)
    assert kv_used(remote) == [0, 0]
    first, second = remote.session(8), remote.session(8)
    expected = first.step(hidden)
    second.step(hidden)
    assert kv_used(remote) == [2 * one, 2 * one]
    third = remote.session(8)
    with pytest.raises(WorkerFull, match=r"of 2 rows × 8 columns × 2 layers: .*MB are free .*--kv-mb"):
        third.step(hidden)
    # a worker that is full has not failed: it goes on serving
    assert_bits(remote(hidden), expected)
    first.step(hidden)
    second.close()
    settle(remote, [one, one])
    assert_bits(third.step(hidden), expected)
    first.close()
    third.close()
    settle(remote, [0, 0])


@pytest.mark.parametrize("older", [False, True])
def test_room_grows_where_nobody_said_how_much(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of a session that had it all, to the bit; workers that cannot grow are asked for much."""
    monkeypatch.setattr("kwflow.worker.server.FIRST_ROOM", 4)
    if older:
        monkeypatch.setattr("kwflow.worker.hello.FEATURES", tuple(f for f in FEATURES if f != "grows"))
    x, mask, column = random(B, 24, D), left_padded([0, 2, 5], 6), B * 2 * 2 * (HIDDEN // 2) * 4
    kv = {n: random(LAYERS, 1, 2, 3, D // HEADS, seed=i) for i, n in enumerate(("k", "v"), 7)}
    remote, outs, used = make_flow("llama", TWO), list[Tensor](), list[int]()
    for length in (30, None):
        with torch.no_grad(), remote.session(length) as s, Requests(remote) as requests:
            out, used = [s.step(x[:, :6], attention_mask=mask, prefix_kv=kv)], kv_used(remote)
            for at in range(6, 16):
                if at == 13:
                    s.reorder([1, 1, 0])
                out.append(s.step(x[:, at : at + 1]))
            s.rollback(12)
            out += [s.step(x[:, 12:22]), s.step(x[:, 22:])]
            outs.append(torch.cat(out, 1))
            first = [request.meta.get("max_length") for _, request, _ in requests.seen if request.meta["start"] == 0]
            assert first == [length or (3 + 6 + 2048 if older else None)] * 2
            assert ("of 30" in repr(s)) == bool(length) and "columns 27" in repr(s)
            assert older or length or [n // column for n in kv_used(remote)] == [36, 36]
    held = sum(t.nbytes for t in kv.values()) // 2 + mask.numel()
    assert older or used == [9 * column + held] * 2, "at first, what the step needs"
    assert_bits(*outs)


@pytest.mark.slow
def test_an_abandoned_session_frees_its_room() -> None:
    import gc

    remote = make_flow("gpt2", TWO)
    session = remote.session(8)
    session.step(random(2, 3, D))
    assert all(kv_used(remote))
    del session
    gc.collect()
    settle(remote, [0, 0])


def test_sessions_and_calls_do_not_meet() -> None:
    """Two sessions and plain calls, interleaved, each as if alone."""
    remote, hidden, other = flow("llama", TWO), random(B, 6, D), random(B, 6, D, seed=1)
    v = random(D, seed=2)
    with remote.session(6) as a, remote.session(6) as b:
        outs: list[list[Tensor]] = [[], []]
        for n in range(6):
            outs[0].append(a.step(hidden[:, n : n + 1], steer={1: v}))
            remote(other, steer={0: 9 * v})
            outs[1].append(b.step(other[:, n : n + 1]))
    for x, found, steer in ((hidden, outs[0], {1: v[None, None]}), (other, outs[1], {})):
        local = Local("llama")
        for n, out in enumerate(found):
            assert_bits(out, local.step(x[:, n : n + 1], steer=steer))


def test_a_slice_has_sessions_too() -> None:
    hidden, remote = random(B, 4, D), flow("gpt2", TWO)
    with remote[1:3].session(4) as session:
        out = torch.cat([session.step(hidden[:, :3]), session.step(hidden[:, 3:])], 1)
    assert_close(out, remote[1:3](hidden))
    assert "layers 1:3" in repr(session) and "closed" in repr(session)


def test_inputs_go_on_from_custom_positions() -> None:
    remote, hidden = flow("llama", TWO), random(2, 3, D)
    with remote.session(8) as session:
        session.step(hidden, position_ids=torch.arange(10, 13).expand(2, 3))
        assert session.inputs(ids(2, 2))["position_ids"].tolist() == [[13, 14]] * 2


def test_a_session_does_not_pretend_to_run_in_float64() -> None:
    with pytest.raises(UnsupportedError, match="workers' dtype"):
        flow("llama", TWO).options(dtype="float64").session(8)


def test_a_closed_session_takes_nothing() -> None:
    session = flow("llama", TWO).session(8)
    session.close()
    for refuse in (lambda: session.rollback(0), lambda: session.reorder([0])):
        with pytest.raises(SessionError, match="closed"):
            refuse()


def test_a_session_in_float64_is_the_call_too() -> None:
    """What a family casts to float32 inside (llama's norms) is lifted in both."""
    remote, hidden = flow("llama", TWO, torch.float64), random(B, 4, D, dtype=torch.float64)
    with remote.session(4) as session:
        torch.testing.assert_close(session.step(hidden), remote(hidden), atol=1e-13, rtol=1e-11)


def test_a_view_of_any_kind_may_stay_the_same_from_step_to_step() -> None:
    """What is sent once is compared with what is held: negated, strided, expanded and transposed views too."""
    numbers, hidden = random(D, 2), random(1, 4, D)
    views = {
        "negated": torch.view_as_complex(numbers).conj().imag,
        "strided": numbers[:, 0],
        "expanded": numbers[0, 0].expand(D),
        "reversed": numbers.T[1].flip(0),
    }
    assert views["negated"].is_neg()
    for what, view in views.items():
        outs = []
        for vector in (view, view.resolve_neg().clone()):
            with flow("llama", TWO).session(6) as session:
                outs.append(torch.cat([session.step(part, steer={1: vector}) for part in hidden.split(1, 1)], 1))
        assert_bits(*outs, what)


# ---------------------------------------------------------------- a block_fn's own kwargs


def test_what_a_block_fn_needs_is_needed_in_steps_and_in_generate_too() -> None:
    """A kwarg without a default: given at each step, and missed where it is not."""

    def louder(params, hidden, /, *, block, gain: kf.Axes["layer hidden | hidden"], **kw):
        return hidden + gain * (block(params, hidden, **kw) - hidden)

    remote = tiny.make_flow("llama", tiny.TWO, block_fn=louder, own_ends=True)
    x, gain = tiny.random(2, 4, tiny.HIDDEN), torch.full((tiny.HIDDEN,), 2.0)
    mask = tiny.left_padded([0, 1], 4)
    with remote.session(8) as session:
        with pytest.raises(KwargError, match="need 'gain'"):
            session.step(x[:, :3], attention_mask=mask[:, :3])
        outs = [session.step(x[:, :3], attention_mask=mask[:, :3], gain=gain), session.step(x[:, 3:], gain=gain)]
    assert_close(torch.cat(outs, 1)[mask.bool()], remote(x, attention_mask=mask, gain=gain)[mask.bool()])
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=remote)
    ids, hf = tiny.ids(1, 4), copy.deepcopy(tiny.huggingface("llama"))

    def twice(_: Any, args: Any, out: Any) -> Any:
        return args[0] + gain * (out - args[0])

    for layer in hf.model.layers:
        layer.register_forward_hook(twice)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, gain=gain, **call), hf.generate(ids, **call))
