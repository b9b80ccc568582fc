"""A session's positions and masks: how columns go on where nobody says, and what is refused before it is sent."""

# B batch, S seq, D hidden

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kwflow.errors import (
    KwargError,
    KwflowError,
    SessionError,
    ShapeError,
    UnknownKwarg,
)
from tests.families.marks import every_family
from tests.oracle import assert_bits
from tests.oracle.cached import Local
from tests.oracle.tiny import (
    HIDDEN,
    TWO,
    Requests,
    flow,
    ids,
    left_padded,
    random,
)

B, D = 3, HIDDEN
MASK = left_padded([0, 2, 5], 8)


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
