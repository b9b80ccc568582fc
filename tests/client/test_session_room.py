"""What a session holds on its workers: kwargs that are sent once, keys and values, their room and their end."""

# B batch, S seq, D hidden

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import (
    KwargError,
    SessionError,
    SpanError,
    UnsupportedError,
    WorkerFull,
)
from kwflow.wire import loop
from kwflow.wire.message import Message
from kwflow.worker.hello import FEATURES
from tests.oracle import assert_bits, assert_near, tiny
from tests.oracle.cached import Local
from tests.oracle.tiny import (
    HEADS,
    HIDDEN,
    LAYERS,
    ONE,
    TWO,
    Requests,
    flow,
    ids,
    kv_used,
    left_padded,
    make_flow,
    random,
    settle,
)

B, D = 3, HIDDEN
MASK = left_padded([0, 2, 5], 8)


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
    assert_near(out, remote[1:3](hidden))
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
    assert_near(torch.cat(outs, 1)[mask.bool()], remote(x, attention_mask=mask, gain=gain)[mask.bool()])
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=remote)
    ids, hf = tiny.ids(1, 4), copy.deepcopy(tiny.huggingface("llama"))

    def twice(_: Any, args: Any, out: Any) -> Any:
        return args[0] + gain * (out - args[0])

    for layer in hf.model.layers:
        layer.register_forward_hook(twice)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, gain=gain, **call), hf.generate(ids, **call))
