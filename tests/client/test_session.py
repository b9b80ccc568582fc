"""Sessions: every step has the values of Hugging Face's own cached decoding, whatever the kwargs are at each."""

# B batch, S seq, D hidden

from __future__ import annotations

import random as python_random
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
    SessionError,
    ShapeError,
    WorkerFailed,
)
from kwflow.wire import in_process, loop
from kwflow.wire.channel import call
from kwflow.wire.message import Message
from kwflow.worker.server import Served
from tests.doubles.workers import workers_of
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_near, cache_name
from tests.oracle.cached import Local, positions
from tests.oracle.tiny import (
    HEADS,
    HIDDEN,
    LAYERS,
    ONE,
    THREE,
    TWO,
    flow,
    huggingface,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
    span,
)

B, D = 3, HIDDEN
MASK = left_padded([0, 2, 5], 8)


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
            assert_near(out[real[:, columns]], whole[:, columns][real[:, columns]])
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
            assert_near(out[:, -1], remote(**again)[:, -1], f"step {step}, recomputed")
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
    assert_near(torch.cat(outs, 1)[real], whole[real])


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
        assert_near(torch.cat([first, last], 1), whole)
        session.rollback(0)  # nothing 4-D is left
        assert_bits(session.step(hidden), flow(family, TWO)(hidden))
    booleans = flow(family, TWO)(hidden, attention_mask=causal)
    with flow(family, TWO).session(4) as session:
        outs = [session.step(hidden[:, a:b], attention_mask=causal[:, :, a:b, :b]) for a, b in ((0, 1), (1, 4))]
    assert_near(torch.cat(outs, 1), booleans)


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
        assert_near(session.step(nexts[:, :1])[:, -1], expected[:, 8], "after a reorder")
        session.rollback(8)
        session.step(nexts[:, :1], attention_mask=mask[:, :9])
        # twice between two steps, and the identity
        session.reorder([1, 2, 0])
        session.reorder([2, 0, 1])
        session.reorder([0, 1, 2])
        assert_near(session.step(nexts[:, 1:2])[:, -1], expected[:, 9])
        # a reorder and a rollback, in both orders
        session.reorder([0, 0, 0])
        session.rollback(9)
        out = session.step(nexts[:1, 1:2].expand(B, 1, D).contiguous())
        assert_near(out, expected[:1, 9:10].expand(B, 1, D))
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
                assert_near(session.step(new), local(history)[:, start:], f"turn {turn}")


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
    assert_near(out, flow("gpt2", ONE)(torch.cat([hidden[order, :4], hidden[:, 4:]], 1))[:, 4:])


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
