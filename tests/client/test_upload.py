"""What is uploaded is sent once, named from then on, and acts as the tensor that it was made of."""

# B batch, S seq, D hidden, P prefix

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import KwargError, UnsupportedError, WorkerFull
from kwflow.wire import loop
from kwflow.worker.server import Served
from tests.doubles.workers import Workers, workers_of
from tests.oracle import assert_bits, tiny
from tests.oracle.tiny import HIDDEN, LAYERS, TWO, ids, make_flow, random

D = HIDDEN
P = 40
HEAD = 1500  # bytes of a request without tensors


@pytest.fixture
def flow() -> Iterator[Flow]:
    with make_flow("llama", TWO) as made:
        yield made


def prompts(seed: int = 3) -> Tensor:
    return random(LAYERS, 1, P, D, seed=seed)


def sent(flow: Flow) -> int:
    return flow.peers.pool.bytes_sent


def kept(flow: Flow) -> list[int]:
    """The bytes that each worker keeps."""
    return [served.kept.bytes() for served in workers_of(flow).served]


def wait_until_freed(flow: Flow) -> None:
    deadline = time.monotonic() + 5
    while kept(flow) != [0, 0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def x(batch: int = 2, seq: int = 3) -> dict[str, Tensor]:
    return {"hidden": random(batch, seq, D)}


def lora(A: Tensor, B: Tensor) -> dict[str, Any]:
    return {"q_proj": {"A": A, "B": B, "scale": 0.5}}


USES: dict[str, Any] = {
    "prompts": (prompts, lambda t: {"prompts": t}),
    "axes": (prompts, lambda t: {"prompts": kf.axes(t, "layer batch prefix hidden")}),
    "add": (lambda: random(1, 300, D)[0], lambda t: {"edit": [kf.add(t.mean(0), 1), kf.add(t[7], 2)]}),
    "steer": (lambda: random(1, 16, D), lambda t: {"steer": {0: t[0, 0], 3: t[0, 1]}}),
    "by layer": (lambda: random(1, 16, D), lambda t: kf.per_layer({0: {"prompts": t}, 3: {"prompts": t}})),
    "lora": (lambda: random(LAYERS, 8, D), lambda t: {"lora": lora(t, kf.axes(t.mT, "layer out rank"))}),
    "lora by layer": (
        lambda: random(8, D),
        lambda t: kf.per_layer([{"lora": lora(t, kf.axes(t.mT, "out rank"))}] * LAYERS),
    ),
    "rows": (lambda: random(LAYERS, 2, P, D), lambda t: {"prompts": t}),
}


@pytest.mark.parametrize("use", USES)
def test_it_stands_wherever_a_tensor_may(flow: Flow, use: str) -> None:
    make, kwargs = USES[use]
    tensor = make()
    want = flow(**x(), **kwargs(tensor))
    handle = flow.upload(tensor)
    assert_bits(flow(**x(), **kwargs(handle)), want)
    before = sent(flow)
    assert_bits(flow(**x(), **kwargs(handle)), want)
    if use not in ("steer", "add"):  # pieces too small to be named
        assert sent(flow) - before < 4 * HEAD + 2 * x()["hidden"].nbytes


def test_ten_calls_bring_it_once_and_only_where_it_is_needed(flow: Flow) -> None:
    tensor = prompts()
    handle, before = flow.upload(tensor), sent(flow)
    for _ in range(10):
        flow(**x(), prompts=handle)
    assert sent(flow) - before < tensor.nbytes + 20 * (HEAD + x()["hidden"].nbytes)
    assert kept(flow) == [tensor.nbytes // 2] * 2  # each its own layers


def test_close_frees_it(flow: Flow) -> None:
    tensor = prompts()
    with flow.upload(tensor) as handle:
        want = flow(**x(), prompts=handle)
        assert sum(kept(flow)) == tensor.nbytes and not handle.closed
    assert kept(flow) == [0, 0] and handle.closed
    handle.close()
    before = sent(flow)
    assert_bits(flow(**x(), prompts=handle), want)  # a tensor like any other
    assert sent(flow) - before > tensor.nbytes and kept(flow) == [0, 0]
    one, other = flow.upload(tensor), flow.upload(tensor.clone())
    flow(**x(), prompts=one), flow(**x(), prompts=other)
    assert sum(kept(flow)) == tensor.nbytes  # by content
    one.close()
    assert sum(kept(flow)) == tensor.nbytes  # the other needs it


def test_its_gradient_reaches_the_tensor(flow: Flow) -> None:
    tensor = prompts().requires_grad_()
    (want,) = torch.autograd.grad(flow(**x(), prompts=tensor).square().sum(), tensor)
    handle, before = flow.upload(tensor), sent(flow)
    for _ in range(2):
        flow(**x(), prompts=handle).square().sum().backward()
    assert tensor.grad is not None
    assert_bits(tensor.grad, want + want)
    assert sent(flow) - before < tensor.nbytes + 8 * (HEAD + 3 * x()["hidden"].nbytes)
    double = flow.upload(tensor)
    (first,) = torch.autograd.grad(flow(**x(), prompts=double).square().sum(), tensor, create_graph=True)
    torch.autograd.grad(first.square().sum(), tensor)


def test_under_transforms_it_is_used_and_not_made(flow: Flow) -> None:
    tensor, hidden = prompts(), x()["hidden"]
    handle = flow.upload(tensor)

    def loss(h: Tensor, p: Tensor) -> Tensor:
        return flow(h, prompts=p).square().sum()

    want, before = torch.func.grad(loss)(hidden, tensor), sent(flow)
    assert_bits(torch.func.grad(loss)(hidden, handle), want)
    per_row = torch.func.vmap(torch.func.grad(lambda h: loss(h[None], handle)))(hidden)
    assert per_row.shape == hidden.shape
    assert sent(flow) - before < tensor.nbytes + 20 * (HEAD + 3 * hidden.nbytes)
    torch.func.grad(loss, argnums=1)(hidden, handle)
    with pytest.raises(UnsupportedError, match=r"upload inside a torch.func transform"):
        torch.func.grad(lambda p: loss(hidden, flow.upload(p)))(tensor)


def test_in_a_session_and_when_it_is_lost_it_comes_again_by_itself() -> None:
    tensor, hidden = prompts(), random(2, 6, D)
    with make_flow("llama", TWO) as plain, make_flow("llama", TWO) as flow:
        with plain.session(max_length=8 + P) as session:
            want = [session.step(hidden[:, :3], prompts=tensor), session.step(hidden[:, 3:4], prompts=tensor)]
        handle, before = flow.upload(tensor), sent(flow)
        for again in range(2):
            with flow.session(max_length=8 + P) as session:
                got = [session.step(hidden[:, :3], prompts=handle), session.step(hidden[:, 3:4], prompts=handle)]
            for one, other in zip(got, want, strict=True):
                assert_bits(one, other)
            assert sent(flow) - before < (1 + again) * tensor.nbytes + 8 * (HEAD + hidden.nbytes)
            for served in workers_of(flow).served:  # as workers that came anew under their names
                loop.run(cleared(served))
        assert not flow.peers.bans


async def cleared(served: Any) -> None:
    served.kept.clear()


@pytest.mark.parametrize("how", ["calls", "a gradient", "a session"])
def test_after_a_failover_the_other_worker_gets_it(how: str) -> None:
    tensor, hidden = prompts().requires_grad_(how == "a gradient"), random(2, 6, D)
    workers = Workers([Served(tiny.span("llama", *layers)) for layers in ((0, 4), (0, 2), (2, 4))])
    workers.hidden = {1, 2}
    with Flow(tiny.ends("llama"), workers.peers(), (0, 4)) as flow:
        handle = flow.upload(tensor)

        def lose() -> None:
            workers.hidden = set()
            workers.kill(0)

        def results(prompts: Tensor, between: Callable[[], None]) -> list[Tensor]:
            if how == "a session":
                with flow.session(max_length=8 + P) as session:
                    first = session.step(hidden[:, :3], prompts=prompts)
                    between()
                    return [first, session.step(hidden[:, 3:4], prompts=prompts)]
            first = flow(hidden, prompts=prompts)
            between()
            if how == "a gradient":
                return [first, *torch.autograd.grad(first.square().sum(), tensor)]
            return [first, flow(hidden, prompts=prompts)]

        want = results(tensor, lambda: None)
        before = sent(flow)
        for one, other in zip(results(handle, lose), want, strict=True):
            assert_bits(one, other)
        assert sent(flow) - before < 2 * tensor.nbytes + 12 * (HEAD + 3 * hidden.nbytes)
        assert kept(flow)[1:] == [tensor.nbytes // 2] * 2


def test_workers_drop_what_nobody_uses(flow: Flow) -> None:
    handle = flow.upload(prompts(), idle=0.05)
    want = flow(**x(), prompts=handle)
    wait_until_freed(flow)
    assert_bits(flow(**x(), prompts=handle), want)


def test_the_budget_of_a_worker() -> None:
    tensor = prompts()
    with make_flow("llama", TWO, keep_bytes=tensor.nbytes, keep_client_bytes=tensor.nbytes // 2) as flow:
        first, second = flow.upload(tensor), flow.upload(prompts(4))
        flow(**x(), prompts=first)
        with pytest.raises(WorkerFull, match=r"no room to keep .* MB: 0.0 MB are free; .*--keep-mb, --keep-client-mb"):
            flow(**x(), prompts=second)
        first.close()
        flow(**x(), prompts=second)


def test_what_was_sent_for_it_is_timed(flow: Flow) -> None:
    tensor = prompts()
    handle = flow.upload(tensor)
    with flow.timed() as timings:
        flow(**x(), prompts=handle)
        flow(**x(), prompts=handle)
    uploads = [timing for timing in timings if timing.op == "upload"]
    assert [timing.layers for timing in uploads] == [(0, 2), (2, 4)] and len(timings) == 6
    assert all(tensor.nbytes / 2 < timing.bytes_sent < tensor.nbytes / 2 + HEAD for timing in uploads)


def generated(flow: Flow, tokens: Tensor, prompts: Tensor) -> Tensor:
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=flow)
    return model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, prompts=prompts)


def test_sweeps_sub_batches_and_generate(flow: Flow) -> None:
    tensor = prompts()
    handle, before = flow.upload(tensor), sent(flow)
    variants = [{"steer": {layer: random(D, seed=layer)}} for layer in range(LAYERS)]
    want = kf.sweep(make_flow("llama", TWO), {**x(), "prompts": tensor}, variants)
    assert_bits(kf.sweep(flow, {**x(), "prompts": handle}, variants), want)
    small = flow.options(batch_tokens=3)
    assert_bits(small(**x(4), prompts=handle), make_flow("llama", TWO).options(batch_tokens=3)(**x(4), prompts=tensor))
    tokens, want = ids(2, 3), generated(make_flow("llama", TWO), ids(2, 3), tensor)
    assert torch.equal(generated(flow, tokens, handle), want)
    assert sent(flow) - before < tensor.nbytes + 100 * HEAD


def test_what_is_refused(flow: Flow) -> None:
    with pytest.raises(KwargError, match="takes a tensor"):
        flow.upload(3)
    with pytest.raises(KwargError, match="idle"):
        flow.upload(prompts(), idle=0)
    with pytest.raises(KwargError, match="sparse"):
        flow.upload(prompts().to_sparse())
    handle = flow.upload(prompts())
    with torch.no_grad():
        handle.add_(1)
    with pytest.raises(KwargError, match="changed in place after flow.upload"):
        flow(**x(), prompts=handle)


def test_a_tree_and_copies(flow: Flow) -> None:
    A, B = random(LAYERS, 8, D), random(LAYERS, D, 8)
    kwargs = {"lora": lora(A, B)}
    uploaded = flow.upload(kwargs)
    assert_bits(flow(**x(), **uploaded), flow(**x(), **kwargs))
    handle = uploaded["lora"]["q_proj"]["A"]
    for other in (
        copy.deepcopy(handle),
        pickle.loads(pickle.dumps(handle)),  # noqa: S301
        handle * 1,
    ):
        assert type(other) is Tensor
        assert_bits(other, A)
    (axed,) = flow.upload([kf.axes(B, "layer out rank")])
    assert_bits(flow(**x(), lora=lora(handle, axed)), flow(**x(), lora=lora(A, kf.axes(B, "layer out rank"))))
    assert repr(handle) == "Uploaded(float32(4, 8, 32))"


def test_a_part_of_what_is_there_is_named(flow: Flow) -> None:
    tensor = prompts()
    handle = flow.upload(tensor)
    flow(**x(), prompts=handle)
    before = sent(flow)
    for some, t in (flow[1:4], slice(1, 4)), (flow[1:2], slice(1, 2)), (flow, slice(None)):
        for columns in (slice(0, 20), slice(3, 40)):
            want = make_flow("llama", TWO)[some.start : some.stop](**x(), prompts=tensor[t, :, columns])
            assert_bits(some(**x(), prompts=handle[t, :, columns]), want)
    assert sent(flow) - before < 10 * (HEAD + x()["hidden"].nbytes)
    assert sum(kept(flow)) == tensor.nbytes


def test_workers_of_versions_that_keep_nothing(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(self: Any, request: Any) -> Any:
        raise UnsupportedError("this worker has no operation 'keep'")

    monkeypatch.setattr("kwflow.worker.kept.Keeping.keep", unknown)
    tensor = prompts()
    assert_bits(flow(**x(), prompts=flow.upload(tensor)), flow(**x(), prompts=tensor))
    assert kept(flow) == [0, 0]


def test_another_clients_is_not_used_and_not_told_of() -> None:
    tensor = prompts()
    with make_flow("llama", TWO) as flow:
        workers = workers_of(flow)
        other = Flow(flow.ends, type(workers)(workers.served).peers(), flow.span)
        handle, mine = flow.upload(tensor), sent(other)
        flow(**x(), prompts=handle)
        with other:
            theirs = other.upload(tensor)
            other(**x(), prompts=theirs)
            assert sent(other) - mine > tensor.nbytes
            assert sum(kept(flow)) == 2 * tensor.nbytes
        assert sum(kept(flow)) == tensor.nbytes  # what is closed frees its own
        del handle  # and so does what nobody has any more
        wait_until_freed(flow)


@pytest.mark.rest
@pytest.mark.slow
def test_a_hundred_megabytes() -> None:
    tensor = random(1, 1, 1, D).expand(LAYERS, 1, (100 << 20) // 4 // LAYERS // D, D) * 1.0
    with make_flow("llama", TWO) as flow:
        handle, before = flow.upload(tensor), sent(flow)
        for _ in range(10):
            flow(**x(1, 1), prompts=handle)
        assert sent(flow) - before < 101 << 20
        kf.sweep(flow, {**x(1, 1), "prompts": handle}, [{"steer": {n: random(D)}} for n in range(LAYERS)])
        generated(flow, ids(1, 2), handle)
        assert tensor.nbytes == 100 << 20 and sent(flow) - before < 101 << 20


@pytest.mark.parametrize("value", [[1, 2], {}, 3.0, "text"])
def test_where_there_is_no_tensor_it_says_so(value: Any) -> None:
    with pytest.raises(KwargError, match="takes a tensor, or a tree of tensors"):
        make_flow("llama", TWO).upload(value)
