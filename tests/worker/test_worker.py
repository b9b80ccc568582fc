"""A worker by hand-written requests: whatever comes, it answers whose fault it was, and goes on serving."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import BlockError, CallerError, KwflowError, NoRoute, WorkerFailed
from kwflow.kwargs.tree import flatten
from kwflow.wire import in_process, loop
from kwflow.wire.channel import call
from kwflow.wire.message import Message
from kwflow.worker.server import MAX_ORDER, Served
from tests.oracle import assert_bits, assert_near
from tests.oracle.tiny import HIDDEN, LAYERS, TWO, make_flow, random, settle, span

HIDDEN_2 = random(2, 3, HIDDEN)
RUN = {"op": "run", "span": [0, LAYERS]}
STEP = {"op": "step", "span": [0, LAYERS], "start": 0, "max_length": 8}


@pytest.fixture(scope="module")
def served() -> Any:
    one = Served(span("gpt2", 0, LAYERS))
    yield one
    one.close()


def ask(served: Served, meta: dict[str, Any], tree: Any = None) -> Message:
    async def once() -> Message:
        channel = await in_process.InProcess({"w": served.accept}).open("w")
        try:
            return await call(channel, Message(meta, {"hidden": HIDDEN_2} if tree is None else tree))
        finally:
            await channel.aclose()

    return loop.run(once(), 20)


@pytest.mark.parametrize(
    ("meta", "tree"),
    [
        ({}, None),
        ({"op": "format the disk"}, None),
        ({"op": "run"}, None),
        ({"op": "run", "span": 3}, None),
        ({"op": "run", "span": [2, 1]}, None),
        ({"op": "run", "span": [0, LAYERS + 1]}, None),
        ({"op": "run", "span": [0.0, LAYERS]}, None),
        (RUN, [HIDDEN_2]),
        (RUN, {"hidden": HIDDEN_2[0]}),
        (RUN, {"hidden": HIDDEN_2.long()}),
        (RUN, {"hidden": HIDDEN_2, "kwargs": 3}),
        (RUN, {"hidden": HIDDEN_2, "kwargs": {"layers": {"stear": 1}}}),
        (RUN, {"hidden": HIDDEN_2, "kwargs": {"layers": {"attention_mask": 1}}}),
        (RUN, {"hidden": HIDDEN_2, "kwargs": {9: {"steer": 1}}}),
        (RUN, {"hidden": HIDDEN_2, "given": 3}),
        ({**RUN, "ops": 3}, None),
        ({**RUN, "ops": [{"hessian": [0]}]}, None),
        ({**RUN, "ops": [{"jvp": [0]}] * (MAX_ORDER + 1)}, None),
        ({**RUN, "ops": [{"vmap": [0]}] * 50}, None),
        ({**RUN, "ops": [{"vjp": [7], "given": [0]}]}, {"hidden": HIDDEN_2, "given": [HIDDEN_2]}),
        ({**STEP, "start": -1}, None),
        ({**STEP, "start": "0"}, None),
        ({**STEP, "max_length": 0}, None),
        ({**STEP, "max_length": 2}, None),
        ({**STEP, "reorder": [3]}, None),
        ({**STEP, "reorder": [[1, [0, 2]]]}, None),
        ({**STEP, "reorder": [[1, [0.5, 1]]]}, None),
        ({**STEP, "reorder": [[1, [0, 1] * 50_000]]}, None),
        ({**STEP, "reorder": [[1, [0, 1]]] * 1000}, None),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict) else "",
)
def test_what_no_worker_could_do_is_the_callers(served: Served, meta: dict[str, Any], tree: Any) -> None:
    with pytest.raises(CallerError) as caught:
        ask(served, meta, tree)
    assert len(str(caught.value)) < 600
    good = ask(served, RUN)
    assert isinstance(good.tree[0], Tensor) and served.kv_used == 0


ADD = {"kind": "add", "point": "resid", "value": kf.axes(random(HIDDEN), "hidden"), "strength": 1.0}
HEAD = {"kind": "put", "point": "head", "value": kf.axes(random(2, 8), "head head_dim"), "strength": 1.0}
WIDE = {**HEAD, "value": kf.axes(random(4, 1), "head head_dim")}
TAKE = {"point": "resid", "count": 3, "mean": False}


def at(*rows: list[int], dtype: torch.dtype = torch.long) -> Any:
    return kf.axes(torch.tensor(rows, dtype=dtype), "batch seq")


@pytest.mark.parametrize("mapped", [False, True], ids=["run", "vmap"])
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("edit", {name: value for name, value in ADD.items() if name != "value"}),
        ("edit", {name: value for name, value in ADD.items() if name != "strength"}),
        ("edit", {name: value for name, value in ADD.items() if name != "kind"}),
        ("edit", {**ADD, 3: 1, "more": 2}),
        ("edit", {**ADD, "kind": [1]}),
        ("edit", {**ADD, "value": {"a": kf.axes(random(HIDDEN), "hidden")}}),
        ("edit", {**ADD, "value": kf.axes(random(HIDDEN).long(), "hidden")}),
        ("edit", {**ADD, "value": kf.axes(random(3, HIDDEN), "pos hidden")}),
        ("edit", {**ADD, "value": kf.axes(random(3, HIDDEN), "pos hidden"), "at": at([0, 1, 3])}),
        ("edit", {**ADD, "at": at([0, 1, 2], dtype=torch.int32)}),
        ("edit", {**ADD, "at": at([0, 1])}),
        ("edit", {**ADD, "heads": [0]}),
        ("edit", {**HEAD, "heads": [0, 0]}),
        ("edit", {**HEAD, "heads": []}),
        ("edit", {**HEAD, "heads": [0] * 100_000}),
        ("edit", WIDE),
        ("edit", [ADD]),
        ("capture", {"point": "resid", "mean": False}),
        ("capture", {**TAKE, "count": 1 << 40, "at": at([0, 1, 2])}),
        ("capture", {**TAKE, "count": True}),
        ("capture", {**TAKE, "mean": 1}),
        ("capture", {**TAKE, "at": at([0, 1, 3])}),
        ("capture", {**TAKE, "more": 1}),
    ],
)
def test_what_no_client_sends_of_an_edit_or_capture(served: Served, name: str, entry: Any, mapped: bool) -> None:
    kwargs = [[[1], {name: [entry]}]]
    leaves = len(flatten(kwargs)[0])
    meta = {**RUN, "ops": [{"vmap": [0] + [None] * leaves}]} if mapped else RUN
    with pytest.raises(CallerError) as caught:
        ask(served, meta, {"hidden": HIDDEN_2[None] if mapped else HIDDEN_2, "kwargs": kwargs})
    assert len(str(caught.value)) < 600


def test_a_vmap_is_of_what_is_there(served: Served) -> None:
    kwargs = [[[1], {"edit": [{**ADD, "at": kf.axes(torch.zeros(1, 3).long(), "batch seq")}]}]]
    for dims in ([0], [0, None], [3, None, None], [-1, None, None], [0, None, 0], "all"):
        with pytest.raises(CallerError):
            ask(served, {**RUN, "ops": [{"vmap": dims}]}, {"hidden": HIDDEN_2[None], "kwargs": kwargs})
    good = ask(served, {**RUN, "ops": [{"vmap": [0, None, None]}]}, {"hidden": HIDDEN_2[None], "kwargs": kwargs})
    assert_near(good.tree[0][0], ask(served, RUN, {"hidden": HIDDEN_2, "kwargs": kwargs}).tree[0])


def test_more_room_than_there_is(served: Served) -> None:
    with pytest.raises(WorkerFailed, match="no room"):
        ask(served, {**STEP, "max_length": 1 << 40})


class OddError(Exception):
    """One that no list of types has."""


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError, AssertionError, StopIteration, SystemExit, KeyboardInterrupt, WorkerFailed, OddError],
)
def test_what_a_block_fn_raises_comes_back_and_bans_nobody(error: type[BaseException]) -> None:
    def fussy(params: Any, hidden: Tensor, /, *, block: Any, fail: bool = False, **kw: Any) -> Tensor:
        if fail:
            raise error("as asked")
        return block(params, hidden, **kw)

    remote = make_flow("gpt2", TWO, block_fn=fussy).options(timeout=20)
    expected = remote(HIDDEN_2)
    with pytest.raises(KwflowError, match=error.__name__):
        remote(HIDDEN_2, fail=True)
    assert_bits(remote(HIDDEN_2), expected)
    remote.close()


def test_a_session_begins_again_with_other_rows() -> None:
    remote = make_flow("gpt2", TWO)
    with torch.no_grad(), remote.session(8) as session:
        session.step(HIDDEN_2)
        session.rollback(0)
        session.batch = None
        out = session.step(HIDDEN_2[:1])
        assert_bits(out, remote(HIDDEN_2[:1]))
    settle(remote, [0, 0])
    remote.close()


def test_failures_at_once_count_once_and_the_last_worker_is_tried_again() -> None:
    remote = make_flow("gpt2", TWO)
    expected = remote(HIDDEN_2)
    peers: Any = remote.peers
    peer = peers.known()[0].peer
    for _ in range(3):
        peers.failed(WorkerFailed("silent", peer=peer))
    assert peers.bans[peer].failures == 1
    assert_bits(remote(HIDDEN_2), expected)  # it is the only one, and it answers
    with pytest.raises(NoRoute, match="layer 0"):
        remote.options(peers_blocked=peer)(HIDDEN_2)
    remote.close()


def test_the_lock_of_the_network_thread_can_be_taken_in_a_finalizer() -> None:
    assert isinstance(loop._lock, type(threading.RLock()))


def test_block_errors_are_the_callers() -> None:
    assert issubclass(BlockError, CallerError)
