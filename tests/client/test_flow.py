"""A flow in use: ends, slices, options, threads and loops, and tensors of every kind and size on their way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import (
    BlockError,
    BudgetError,
    CallerError,
    DeadlineError,
    KwargError,
    NoRoute,
    ShapeError,
    SpanError,
    UnknownKwarg,
    UnsupportedError,
)
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.tree import flatten
from kwflow.wire import loop
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_close, assert_near, layers_of, residual
from tests.oracle.tiny import (
    EACH,
    HIDDEN,
    LAYERS,
    ONE,
    THREE,
    TWO,
    VOCAB,
    Requests,
    flow,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
)

# ---- the client's own part of the model


@every_family
@pytest.mark.parametrize("batch", [1, 2])
def test_inputs_embed_and_head_are_the_model_s(family: str, batch: int) -> None:
    remote, model, tokens = flow(family, TWO), huggingface(family), ids(batch, 6)
    mask = left_padded([0, 2][:batch], 6)
    positions = positions_of(mask)
    x = remote.inputs({"input_ids": tokens, "attention_mask": mask})
    assert list(x) == ["hidden", "attention_mask"] + (["position_ids"] if family == "llama" else [])
    assert x["hidden"].shape == (batch, 6, HIDDEN)
    given = {} if family == "bloom" else {"position_ids": positions}
    seen: list[Tensor] = []
    hook = layers_of(model)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model(tokens, attention_mask=mask, **given, use_cache=True).logits
    hook.remove()
    assert_bits(x["hidden"], seen[0], "what enters layer 0")
    assert_bits(remote.head(remote(**x)), logits, "logits")
    assert logits.shape == (batch, 6, VOCAB)


@every_family
def test_texts_are_padded_on_the_left(family: str) -> None:
    remote = flow(family, TWO)
    x = remote.inputs(["w1 w2 w3", "w4"])
    assert x["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    same = remote.inputs({"input_ids": torch.tensor([[3, 4, 5], [0, 0, 6]]), "attention_mask": x["attention_mask"]})
    for name, value in x.items():
        assert_bits(value, same[name], name)
    assert_near(remote(**x)[1, 2:], remote(**remote.inputs("w4"))[0])
    for bad in (["w1", 3], [], 3, torch.ones(2, 2), torch.ones(3).long()):
        with pytest.raises((KwargError, ShapeError)):
            remote.inputs(bad)  # type: ignore[arg-type]


def test_a_flow_has_the_model_s_tokenizer() -> None:
    remote = flow("llama", TWO)
    assert remote.tokenizer is remote[1:3].tokenizer is remote.ends.tokenizer
    assert remote.tokenizer.padding_side == "left"


def test_gradients_reach_the_client_s_own_embeddings() -> None:
    remote = flow("llama", TWO)
    hidden = remote.embed(ids(1, 4)).requires_grad_()
    remote.head(remote(hidden)).sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert not any(p.requires_grad for p in remote.ends.shell.parameters())  # type: ignore[attr-defined]


# ---- slices and options


@every_family
def test_a_slice_is_a_flow(family: str) -> None:
    remote, hidden, v = flow(family, TWO), random(2, 3, HIDDEN), random(LAYERS, HIDDEN, seed=1)
    middle = remote[1:3]
    assert (
        (middle.start, middle.stop, len(middle)) == (1, 3, 2) and middle[1:].span == (1, 3) and remote[:].span == (0, 4)
    )
    parts = remote[3:](remote[1:3](remote[:1](hidden, steer={0: v[0]}), steer=kf.axes(v[1:3], "layer hidden")))
    reference = residual(huggingface(family), hidden, steer={n: v[n][None, None] for n in range(3)})
    assert_bits(parts, reference)
    with pytest.raises(SpanError, match="layer 0; this flow has layers 1:3"):
        middle(hidden, steer={0: v[0]})
    with pytest.raises(ShapeError, match="layer = 4, expected 2"):  # a layer axis is relative to the slice
        middle(hidden, steer=kf.axes(v, "layer hidden"))
    for bad in (slice(0, 2), slice(2, 5), slice(2, 2), slice(-1, 3), slice(1, 3, 2), slice(True, 3), 1):
        with pytest.raises(SpanError):
            middle[bad]  # type: ignore[index]
    with pytest.raises(SpanError, match=r"flow\[2\]: .* such as flow\[2:3\]"):
        middle[2]  # type: ignore[index]


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_a_number_of_numpy_or_torch_is_a_number(number: Any) -> None:
    """Layers and columns come from an argmax as often as from a keyboard."""
    remote, hidden, v = flow("llama", TWO), random(2, 5, HIDDEN), random(HIDDEN)
    assert_bits(remote(hidden, steer={number(1): v}), remote(hidden, steer={1: v}))
    assert_bits(remote[number(1) : number(3)](hidden), remote[1:3](hidden))
    edits = [[kf.add(v, layers=layer, at=[at])] for layer, at in ((number(1), number(2)), (1, 2))]
    assert_bits(remote(hidden, edit=edits[0]), remote(hidden, edit=edits[1]))
    _, acts = remote.capture({"resid": number(2)}, hidden=hidden)
    assert_bits(acts["resid", number(2)], acts["resid", 2])
    assert remote.options(timeout=number(9), batch_tokens=number(7)).dispatcher.options.batch_tokens == 7
    with remote.session(max_length=number(9)) as session:
        session.step(hidden)
        session.rollback(number(3))
        session.reorder([number(1), number(0)])
        assert_near(session.step(hidden[:, :1]), remote(torch.cat([hidden.flip(0)[:, :3], hidden[:, :1]], 1))[:, 3:])


def test_a_bool_is_no_number() -> None:
    remote, hidden, v = flow("llama", TWO), random(2, 5, HIDDEN), random(HIDDEN)
    with remote.session(max_length=9) as session:
        session.step(hidden)
        for wrong in (
            lambda: session.rollback(True),
            lambda: session.reorder([True, False]),
            lambda: session.reorder(torch.tensor([[1], [0]])),
            lambda: remote[True:],
            lambda: remote(hidden, steer={True: v}),
            lambda: remote.options(timeout=True),
            lambda: remote.session(max_length=True),
        ):
            with pytest.raises(CallerError):
                wrong()
    with pytest.raises(SpanError, match=r"flow\[9:\] does not lie"):
        remote[9:]
    with pytest.raises(KwargError, match="steer names layer 1 twice"):
        remote(hidden, steer={1: v, torch.tensor(1): v})


def test_what_is_no_hidden_says_what_to_give() -> None:
    remote, x = flow("llama"), {"hidden": random(1, 2, HIDDEN)}
    with pytest.raises(KwargError, match=r"hidden is a dict; give flow\(\*\*x\)"):
        remote(x)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"hidden is float32\(1, 2, 8\); these blocks take"):
        remote.head(x["hidden"][..., :8])


def test_a_route_never_runs_layers_beyond_those_asked_for() -> None:
    remote = flow("gpt2", TWO)
    with Requests(remote) as requests:
        remote[1:3](random(1, 2, HIDDEN))
        assert [request.meta["span"] for _, request, _ in requests.seen] == [[1, 2], [2, 3]]
        del requests.seen[:]
        remote[2:3](random(1, 2, HIDDEN))
        assert [request.meta["span"] for _, request, _ in requests.seen] == [[2, 3]]


def test_each_worker_gets_its_layers_part_only() -> None:
    remote, v = flow("gpt2", TWO), random(LAYERS, HIDDEN)
    with Requests(remote) as requests:
        remote(
            random(4, 2, HIDDEN),
            steer=kf.axes(v, "layer hidden"),
            **kf.per_layer({3: {"prompts": random(1, 2, HIDDEN)}}),
        )
        carried = [flatten(request.tree)[0] for _, request, _ in requests.seen]
    shapes = [[tuple(leaf.tensor.shape) for leaf in leaves if isinstance(leaf, Axed)] for leaves in carried]
    assert shapes == [[(2, HIDDEN)], [(2, HIDDEN), (1, 2, HIDDEN)]]


def test_options_make_another_flow() -> None:
    remote = flow("gpt2", TWO)
    hidden = random(3, 4, HIDDEN)
    small = remote.options(batch_tokens=4)
    with Requests(remote) as requests:
        small(hidden)
        assert len(requests) == 6
        remote(hidden)
        assert len(requests) == 8  # the flow itself is as it was
    with pytest.raises(NoRoute, match="no live worker serves layer 0"):
        remote.options(peers_blocked=["here-000"])(hidden)
    for bad in ({"tiemout": 1}, {"timeout": 0}, {"batch_tokens": 0}, {"dtype": "int8"}):
        with pytest.raises(KwargError):
            remote.options(**bad)
    assert "layers 0:4" in repr(remote)


@every_family
def test_a_call_in_float64_is_float64_throughout(family: str) -> None:
    """The workers' own weights, each upcast for the call; the gap to a float64 model is float64's own."""
    hidden, v = random(2, 4, HIDDEN, dtype=torch.float64), random(HIDDEN, seed=1, dtype=torch.float64)
    remote = flow(family, TWO).options(dtype="float64")
    wide = flow(family, ONE, torch.float64)
    assert_close(remote(hidden, steer={1: v}), wide(hidden, steer={1: v}))


def test_a_hidden_of_another_precision_comes_back_in_it() -> None:
    remote, hidden = flow("gpt2", TWO), random(1, 3, HIDDEN)
    assert remote(hidden.double()).dtype is torch.float64
    assert remote(hidden.bfloat16()).dtype is torch.bfloat16


def test_a_call_in_float64_answers_in_the_dtype_of_its_hidden() -> None:
    remote, hidden = flow("llama", TWO), random(1, 3, HIDDEN)
    wide, first = remote.options(dtype="float64"), remote[:2].options(dtype="float64")
    assert_bits(first(hidden), first(hidden.double()).float())
    v = random(HIDDEN, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(wide(hidden, steer={1: v}).sum(), v)
    assert grad.dtype is torch.float32 and wide.capture({"resid": [0]}, hidden)[1]["resid", 0].dtype is torch.float32


# ---- loops, threads, modes


def test_inside_a_running_loop() -> None:
    remote, hidden = flow("gpt2", TWO), random(1, 3, HIDDEN)
    expected = remote(hidden)

    async def cell() -> tuple[Tensor, Tensor]:
        return remote(hidden), await remote.acall(hidden)  # as in a notebook

    for out in asyncio.run(cell()):
        assert_bits(out, expected)


def test_acall() -> None:
    remote, hidden, v = flow("gpt2", TWO), random(3, 4, HIDDEN), random(HIDDEN, seed=1)

    async def many() -> list[Tensor]:
        return await asyncio.gather(*(remote.acall(hidden, steer={1: scale * v}) for scale in range(4)))

    for scale, out in enumerate(asyncio.run(many())):
        assert_bits(out, remote(hidden, steer={1: scale * v}))

    async def wrong(**kwargs: Any) -> None:
        await remote.acall(hidden, **kwargs)

    with pytest.raises(UnknownKwarg, match="steer"):
        asyncio.run(wrong(stear=v))
    for kwargs in (
        {"prompts": random(LAYERS, 1, 1, HIDDEN).requires_grad_()},
        {"steer": {1: v.clone().requires_grad_()}},
        {"steer": kf.axes(v.clone().requires_grad_(), "hidden")},
    ):
        with pytest.raises(UnsupportedError, match="not differentiable"):
            asyncio.run(wrong(**kwargs))
        with torch.no_grad():
            asyncio.run(wrong(**kwargs))


def test_the_network_thread_may_not_wait_for_itself() -> None:
    remote, hidden = flow("gpt2", TWO), random(1, 3, HIDDEN)

    async def there() -> Tensor:
        with pytest.raises(RuntimeError, match="await flow.acall"):
            remote(hidden)
        return await remote.acall(hidden)

    assert_bits(loop.run(there(), 20), remote(hidden))


def test_under_inference_mode_and_no_grad() -> None:
    remote, hidden = flow("llama", TWO), random(2, 3, HIDDEN)
    expected = remote(hidden)
    with torch.inference_mode():
        inside = remote(random(2, 3, HIDDEN), steer={1: torch.zeros(HIDDEN)})
        assert_bits(inside, expected)
        with remote.session(8) as session:
            assert_bits(session.step(random(2, 3, HIDDEN)), expected)
    with torch.no_grad():
        assert not remote(hidden.clone().requires_grad_()).requires_grad
    # what came out of inference mode is used under grad
    p = torch.zeros(LAYERS, 1, 2, HIDDEN, requires_grad=True)
    remote(inside.clone(), prompts=p).sum().backward()
    assert p.grad is not None and p.grad.any()
    q = torch.zeros(LAYERS, 1, 2, HIDDEN, requires_grad=True)
    remote(inside, prompts=q).sum().backward()  # and as it is
    assert_bits(q.grad, p.grad)  # type: ignore[arg-type]


def test_an_inference_tensor_that_changes_before_backward() -> None:
    """Autograd counts no changes of such a tensor, so the gradient is that of the call as it was."""
    remote, hidden = flow("llama", TWO), random(2, 3, HIDDEN).requires_grad_()
    with torch.inference_mode():
        v = random(HIDDEN, seed=1)
    out = remote(hidden, steer={0: v}).square().sum()
    (expected,) = torch.autograd.grad(out, hidden, retain_graph=True)
    with torch.inference_mode():
        v.zero_()
    assert_bits(torch.autograd.grad(out, hidden)[0], expected)


@pytest.mark.slow
def test_from_two_threads_at_once() -> None:
    remote = flow("llama", THREE).options(batch_tokens=4)
    hidden, barrier = random(3, 4, HIDDEN), threading.Barrier(2, timeout=20)

    def work(seed: int) -> list[tuple[Tensor, Tensor]]:
        barrier.wait()
        found = []
        for i in range(4):
            v = random(HIDDEN, seed=seed + i).requires_grad_()
            out = remote(hidden, steer={1: v})
            out.square().sum().backward()
            assert v.grad is not None
            found.append((out.detach(), v.grad))
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (0, 100)))
    barrier = threading.Barrier(1)
    for seed, results in zip((0, 100), found, strict=True):
        for (out, gradient), (alone, its) in zip(results, work(seed), strict=True):
            assert_bits(out, alone)
            assert_bits(gradient, its)


def test_an_error_leaves_the_next_call_at_baseline() -> None:
    remote, hidden = make_flow("gpt2", TWO), random(2, 3, HIDDEN)
    expected = remote(hidden)
    for bad in ({"stear": 1}, {"steer": {9: torch.ones(HIDDEN)}}, {"prompts": torch.ones(1)}):
        with pytest.raises((ValueError, TypeError)):
            remote(hidden, **bad)
        assert_bits(remote(hidden), expected)
    remote(hidden, steer={1: random(HIDDEN)})
    assert_bits(remote(hidden), expected)
    assert remote.peers.bans == {}  # type: ignore[attr-defined]


def test_nan_is_an_answer() -> None:
    remote, hidden = make_flow("gpt2", TWO), random(2, 3, HIDDEN)
    hidden[0, 1] = float("nan")
    out = remote(hidden)
    assert out[0, 1:].isnan().all() and not out[1].isnan().any()
    assert remote.peers.bans == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    remote = flow("llama", TWO)
    hidden = torch.zeros(*shape, HIDDEN, requires_grad=True)
    out = remote(hidden, steer={1: torch.ones(HIDDEN)})
    assert out.shape == (*shape, HIDDEN)
    out.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    with pytest.raises(UnknownKwarg):
        remote(hidden, stear=1)


def test_a_request_that_is_too_large_is_the_caller_s() -> None:
    remote = make_flow("gpt2", TWO, batch_tokens=16)
    with pytest.raises(BudgetError, match="17 tokens in one request; this worker takes 16"):
        remote(random(1, 17, HIDDEN))
    assert remote.peers.bans == {}  # type: ignore[attr-defined]
    with Requests(remote) as requests:
        remote(random(4, 8, HIDDEN))  # sub-batches fit what the workers say that they take
        assert len(requests) == 4


def test_torchs_older_vmap_is_refused_in_words() -> None:
    """autograd.grad(is_grads_batched=True) and functional.jacobian(vectorize=True), in both modes."""
    remote, x, v = flow("llama", TWO), random(1, 3, HIDDEN), random(HIDDEN).requires_grad_()

    def some(v: Tensor) -> Tensor:
        return remote(x, steer={1: v})[0, -1, :3]

    batched = functools.partial(torch.autograd.grad, some(v), v, torch.eye(3), is_grads_batched=True)
    jacobian = functools.partial(torch.autograd.functional.jacobian, some, v, vectorize=True)
    for call in (batched, jacobian, functools.partial(jacobian, strategy="forward-mode")):
        with pytest.raises(UnsupportedError, match=r"older vmap.*use torch.func.jacrev"):
            call()
    assert_close(torch.func.jacrev(some)(v), torch.autograd.functional.jacobian(some, v))


def test_a_deadline_is_kept() -> None:
    go = threading.Event()

    def slow(params, hidden, /, *, block, **kw):
        go.wait(20)
        return block(params, hidden, **kw)

    remote, hidden = make_flow("gpt2", ONE, block_fn=slow), random(1, 2, HIDDEN)
    remote.kwargs()
    with pytest.raises(DeadlineError, match="layers 0:4 did not end in 0.1 s"):
        remote.options(timeout=0.1)(hidden)
    go.set()
    assert_bits(remote(hidden), flow("gpt2", ONE)(hidden))  # when the worker is done with it, all is as before


# ---- tensors on their way


def echo(params, hidden, /, *, block, one: kf.Axes["free"] = None, tree: dict = None, **kw):  # noqa: F821, UP037
    """Adds a known function of what arrived, so that a change on the way changes the output."""
    total = torch.zeros((), dtype=torch.float64)
    stack = [one, tree]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += [*part.values()]
        elif isinstance(part, list | tuple):
            stack += [*part]
        elif isinstance(part, Tensor) and part.numel():
            flat = part.reshape(-1)
            total = total + (flat.double() * torch.arange(1, flat.numel() + 1)).sum()
    return hidden + total.to(hidden.dtype)


def meant(*tensors: Tensor) -> Tensor:
    return echo(None, torch.zeros(1, 1, HIDDEN), block=None, tree=list(tensors))


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype: torch.dtype) -> None:
    base = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    layouts = {
        "dense": (base, "a b c"),
        "transposed": (base.permute(1, 2, 0), "a b c"),
        "strided": (base[:, ::2, 1:], "a b c"),
        "expanded": (base[:1].expand(5, 3, 4), "a b c"),
        "0-dim": (base[1, 2, 3], ""),
        "empty": (base[:, :0], "a b c"),
        "empty and 0": (torch.zeros(0, dtype=dtype), "a"),
    }
    zero = torch.zeros(1, 1, HIDDEN)
    remote = flow("gpt2", (1,), block_fn=echo)
    for name, (tensor, names) in layouts.items():
        leaf = kf.axes(tensor, names)
        assert_bits(remote(zero, tree={"x": [leaf, None, {"deep": (leaf, 3, "text")}]}), meant(tensor, tensor), name)
        if tensor.is_floating_point():
            moving = tensor.detach().clone().requires_grad_()
            remote(zero, tree={"x": kf.axes(moving, names)}).sum().backward()
            if not moving.numel():
                assert moving.grad is None, name
                continue
            local = tensor.detach().clone().requires_grad_()
            meant(local).sum().backward()
            assert_bits(moving.grad, local.grad, name)  # type: ignore[arg-type]


def test_nested_and_structured_kwargs_change_between_calls() -> None:
    remote, zero = flow("gpt2", (1,), block_fn=echo), torch.zeros(1, 1, HIDDEN)
    a, b = random(3), random(2, 2)
    assert_bits(remote(zero, tree={"a": kf.axes(a, "x")}), meant(a))
    assert_bits(remote(zero, tree={"l": [kf.axes(b, "y z"), None], 3: {"t": (kf.axes(a, "x"),)}}), meant(a, b))
    assert_bits(remote(zero), zero)
    assert_bits(remote(zero, tree=None), zero)


@pytest.mark.parametrize("megabytes", [3.9, 4.1, pytest.param(64, marks=pytest.mark.slow)])
def test_large_kwargs_both_ways(megabytes: float) -> None:
    remote = flow("gpt2", (1,), block_fn=echo)
    large = random(int(megabytes * 1e6 / 4), scale=1e-9).requires_grad_()
    out = remote(torch.zeros(1, 1, HIDDEN), one=large)
    assert_bits(out, meant(large))
    out.sum().backward()
    assert large.grad is not None
    expected = (torch.arange(1, large.numel() + 1).double() * HIDDEN).float()
    assert_close(large.grad, expected)


def test_what_cannot_be_sent_is_refused() -> None:
    remote, zero = flow("gpt2", (1,), block_fn=echo), torch.zeros(1, 1, HIDDEN)
    for bad in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()):
        with pytest.raises((KwargError, BlockError)):
            remote(zero, one=kf.axes(bad, "free"))
    with pytest.raises(KwargError):
        remote(zero, tree={"x": object()})


# ---- the end


LAST_WORDS = """
    import sys, time
    import torch
    import kwflow as kf

    def busy(params, hidden, /, *, block, large: kf.Axes["some numbers"], **kw):
        print("busy", flush=True)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            large = large.clone()
        return hidden

    flow = kf.connect(sys.argv[1], block_fn=busy)[:1]
    from kwflow.wire import loop

    hidden, large = torch.zeros(1, 1, 32), torch.zeros(1000, 1000)
    loop.submit(flow.acall(hidden, large=large))
    time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_a_worker_computes_ends_in_peace() -> None:
    """A thread that comes back to an interpreter that has ended aborts the process."""
    script = [sys.executable, "-c", textwrap.dedent(LAST_WORDS), str(folder("gpt2"))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "busy\n"), done.stderr


# ---- connecting


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo itself
def test_compiled_code_calls_the_workers_between_its_graphs() -> None:
    remote, hidden, v = flow("llama", TWO), random(1, 4, HIDDEN), random(HIDDEN).requires_grad_()

    def loss(v: Tensor) -> Tensor:
        out, acts = remote.capture({"resid": [1]}, hidden=torch.sin(hidden), steer={2: 2 * v})
        return remote(out, steer={1: v}).square().mean() + acts["resid", 1].sum()

    compiled = torch.compile(loss, backend="eager")
    assert_bits(compiled(v), loss(v))
    assert_bits(*(torch.autograd.grad(fn(v), v)[0] for fn in (compiled, loss)))
    with remote.session(6) as session:
        step = torch.compile(lambda part: session.step(2 * part).sin(), backend="eager")
        outs = torch.cat([step(part) for part in hidden.split(1, 1)], 1)
        session.rollback(0)
        assert_bits(outs, torch.cat([session.step(2 * part).sin() for part in hidden.split(1, 1)], 1))


def test_a_trace_has_no_values_to_send() -> None:
    remote = flow("llama", TWO)  # made before: in a trace its weights would be fake, too

    class Traced(torch.nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return remote(hidden)

    with pytest.raises(KwargError, match="hidden is a fake tensor"):
        torch.export.export(Traced(), (random(1, 4, HIDDEN),), strict=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["nested", "jagged", "sparse", "meta", "fake"])
def test_only_dense_tensors_can_be_sent(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = [random(3, HIDDEN)]
    given = {
        "nested": lambda: torch.nested.nested_tensor(rows),
        "jagged": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse": lambda: rows[0][None].to_sparse(),
        "meta": lambda: rows[0][None].to("meta"),
        "fake": lambda: FakeTensorMode().from_tensor(rows[0][None]),
    }[kind]()
    remote, hidden = flow("llama", TWO), random(1, 3, HIDDEN)
    expected = remote(hidden)
    kind = "nested" if kind == "jagged" else kind
    for what, call in (("hidden", lambda: remote(given)), (r"steer", lambda: remote(hidden, steer={1: given}))):
        with pytest.raises(KwargError, match=f"{what}.* is a {kind} tensor"):
            call()
    assert_bits(remote(hidden), expected)


def test_single_layers_are_compared_with_their_part_of_the_kwargs() -> None:
    remote, hidden, v = flow("llama", TWO), random(2, 5, HIDDEN), random(HIDDEN)
    kwargs = {
        "steer": {1: v},
        "prompts": random(LAYERS, 1, 2, HIDDEN),
        "edit": [kf.scale(0.5, layers=[0, 3], at="prompt[-1]")],
        "head_mask": kf.axes(random(LAYERS, 4), "layer head"),
    }
    match = kf.verify.exact_match(remote, huggingface("llama"), hidden, layers=range(LAYERS), **kwargs)
    assert match.bitwise and len(match.outputs) == LAYERS, str(match)

    model = huggingface("llama")
    handle = layers_of(model)[1].mlp.register_forward_hook(lambda _, args, out: 1.5 * out)
    try:
        match = kf.verify.exact_match(remote, model, hidden, layers=range(LAYERS), **kwargs)
    finally:
        handle.remove()
    assert match.verdict == "different" and [one.name for one in match.outputs if not one.bitwise] == ["layer 1"]
    with pytest.raises(KwargError, match="capture on both sides"):
        kf.verify.exact_match(remote, model, hidden, capture=kf.Capture(resid=[1]))


def test_connect_without_peers_is_the_same_flow() -> None:
    hidden = random(2, 3, HIDDEN)
    with kf.connect(folder("llama")) as here:
        assert here.span == (0, LAYERS)
        assert_bits(here(hidden), flow("llama", EACH)(hidden))
    with kf.connect(folder("llama"), dtype="bfloat16") as here:
        assert here(hidden.bfloat16()).dtype is torch.bfloat16 and here.ends.dtype is torch.bfloat16


def test_create_graph_counts_each_path_of_a_shared_input_once() -> None:
    """One vector at two layers and in hidden, and a kwarg made from hidden: create_graph changes no gradient."""
    fn, hidden = flow("llama", TWO, torch.float64), random(2, 3, HIDDEN, dtype=torch.float64)

    def gradient(create_graph: bool) -> Tensor:
        v = random(HIDDEN, seed=1, dtype=torch.float64).requires_grad_()
        moved = hidden * v
        out = fn(moved, steer={0: moved.mean((0, 1)), 1: v, 3: v})
        return torch.autograd.grad(out.pow(2).sum(), v, create_graph=create_graph)[0].detach()

    assert_close(gradient(True), gradient(False))


def test_an_empty_batch_has_a_gradient_too() -> None:
    v = random(HIDDEN).requires_grad_()
    out = flow("gpt2", TWO)(random(0, 3, HIDDEN), steer={1: v})
    out.sum().backward()
    assert out.shape == (0, 3, HIDDEN) and v.grad is not None and not v.grad.any()


@pytest.mark.parametrize("option", [{"timeout": "3"}, {"timeout": float("inf")}, {"timeout": 0}, {"batch_tokens": 2.5}])
def test_options_are_numbers(option: dict[str, Any]) -> None:
    with pytest.raises(KwargError, match="give a"):
        flow("gpt2", TWO).options(**option)


def test_inputs_takes_what_a_tokenizer_gives_and_refuses_nothing_at_all() -> None:
    remote = flow("gpt2", TWO)
    lists = {"input_ids": [[3, 4]], "attention_mask": [[1, 1]]}
    assert_bits(remote.inputs(lists)["hidden"], remote.inputs(torch.tensor([[3, 4]]))["hidden"])
    with pytest.raises(KwargError, match="empty"):
        remote.inputs(torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(KwargError, match=r"flow\.inputs"):
        remote(torch.tensor([[3, 4]]))


def test_a_flow_says_its_projections() -> None:
    remote = flow("llama", THREE)
    assert (
        remote.projections()["self_attn.v_proj"]
        == (HIDDEN, HIDDEN // 2)
        == remote[1:2].projections()["self_attn.v_proj"]
    )


def test_a_call_is_checked_and_estimated_without_being_sent() -> None:
    remote, hidden = flow("llama", THREE), random(4, 3, HIDDEN)
    v = kf.axes(random(4, HIDDEN), "batch hidden")
    with Requests(remote) as requests:
        remote.check(hidden, steer={2: v})
        remote.check(hidden.to("meta"), steer={2: v.tensor[0].to("meta")})
        with pytest.raises(ShapeError, match="hidden = 31"):
            remote.check(hidden, steer={2: random(HIDDEN - 1)})
        estimate = remote.options(batch_tokens=6).estimate(
            hidden, steer={2: v}, capture=kf.Capture(resid=[0, 3], head=[3], at="prompt[-1]")
        )
        assert len(requests) == 0
    assert estimate.hops == ((0, 1), (1, 3), (3, 4)) and estimate.sub_batches == 2
    whole, column = hidden.nbytes, 4 * HIDDEN * 4
    index = 8 * 3 * 2  # where, for each of the two sub-batches
    assert estimate.bytes_received == (whole + column, whole, whole + 2 * column)
    assert estimate.bytes_sent == (whole + index, whole + column, whole + 2 * index)
    assert "layers 1:3" in str(estimate)


def test_the_time_of_each_request_is_collected() -> None:
    remote, hidden = flow("llama", THREE), random(4, 3, HIDDEN).requires_grad_()
    pool, plain = remote.peers.pool, remote(hidden.detach())
    assert plain.shape == hidden.shape, "workers have said who they are"
    with remote.options(batch_tokens=6).timed() as timings, remote[1:3].timed() as others:
        moved = pool.bytes_sent + pool.bytes_received
        remote.options(batch_tokens=6)(hidden).sum().backward()
    spans = [(0, 1), (1, 3), (3, 4)]
    assert sorted((one.op, one.layers) for one in timings) == sorted(
        (op, span) for op in ("forward", "derivative") for span in spans for _ in range(2)
    )
    assert others == timings, "all that goes over the same links"
    assert sum(one.bytes_sent + one.bytes_received for one in timings) == pool.bytes_sent + pool.bytes_received - moved
    for one in timings:
        assert min(one.queue, one.compute, one.network, one.bytes_sent, one.bytes_received) > 0 == one.waited
        assert one.seconds == pytest.approx(one.queue + one.compute + one.network)
    assert f"forward of layers 0:1 on {timings[0].peer[-8:]}: " in str(timings[0])
    with remote.timed() as more:
        with remote.timed():
            pass
        remote(hidden.detach())
    assert len(timings) == 12 and len(more) == 3, "to the end of its own block"


def test_a_closed_flow_says_so_at_once() -> None:
    remote, x = make_flow("llama", TWO), {"hidden": random(1, 4, HIDDEN)}
    remote(**x)
    with remote.session(max_length=8) as session:
        session.step(**x)
        remote.close()
        with pytest.raises(CallerError, match="the flow is closed"):
            remote.options(timeout=20)(**x)
        with pytest.raises(CallerError, match="the flow is closed"):
            session.step(**x)


def test_a_flow_says_what_its_model_is_and_what_its_layers_take() -> None:
    def warmed(params: Any, hidden: Tensor, /, *, block: Any, warmth: kf.Axes[""] = None, times: int = 1, **kw: Any):
        """Takes a tensor without dimensions, and a number."""
        return block(params, hidden, **kw) if warmth is None else block(params, hidden, **kw) * warmth * times

    remote = make_flow("llama", TWO, block_fn=warmed)
    assert remote.config.num_hidden_layers == LAYERS and remote.config.hidden_size == HIDDEN
    taken = remote.kwargs()
    assert {"steer", "edit", "warmth"} <= set(taken) and taken["steer"].by_layer
    lines = repr(taken).splitlines()
    assert max(map(len, lines)) <= 120 and any(line.startswith("  steer ") and "hidden" in line for line in lines)
    assert "kf.edits" in repr(taken) and "<table" in taken._repr_html_()


@pytest.mark.parametrize("number", [0.5, 2, np.float32(0.5), np.array(2.0)])
def test_a_number_stands_for_a_tensor_without_dimensions(number: Any) -> None:
    def warmed(params: Any, hidden: Tensor, /, *, block: Any, warmth: kf.Axes[""], **kw: Any):
        return block(params, hidden, **kw) * warmth

    remote, hidden = make_flow("llama", TWO, block_fn=warmed), random(2, 3, HIDDEN)
    assert_bits(remote(hidden, warmth=number), remote(hidden, warmth=torch.tensor(float(number))))
    with pytest.raises(KwargError, match="warmth takes"):
        remote(hidden, warmth=str(number))
