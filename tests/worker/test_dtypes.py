"""Workers in another dtype than the client's, on other devices, out of memory: what is computed, and what is said."""

# B batch, S seq, D hidden

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kwflow as kf
from benchmarks import gpu
from kwflow.blocks.span import SpanSpec, with_block_fn
from kwflow.client.flow import Flow
from kwflow.client.request import to_devices
from kwflow.errors import BlockError, DeadlineError, KwargError, ModelError, NoRoute, WorkerFailed
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span, resolve_device
from kwflow.swarm.connect import in_process
from kwflow.swarm.local import local_swarm
from kwflow.worker import server as worker
from kwflow.worker.server import Served
from tests import oracle
from tests.families.marks import every_family, families
from tests.oracle import assert_bits, assert_close, tiny

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BATCH, SEQ = 3, 5
MASK = tiny.left_padded([0, 1, 3], SEQ)


def make(family: str, *workers: tuple[int, int, torch.dtype], client: torch.dtype = F32) -> Flow:
    """A client of one dtype over workers of others, all from the same float32 files."""
    served = [Served(load_span(tiny.folder(family), start, stop, dtype=dtype)) for start, stop, dtype in workers]
    return Flow(ModelEnds(tiny.folder(family), client), in_process(served), (0, tiny.LAYERS))


def local(family: str, dtype: torch.dtype) -> nn.Module:
    return tiny.huggingface(family, dtype)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tiny.random(BATCH, SEQ, tiny.HIDDEN, seed=1).to(dtype), tiny.random(tiny.HIDDEN, seed=3)


# ---------------------------------------------------------------- the client's dtype is not the worker's


@every_family
@pytest.mark.parametrize(("client", "workers"), [(F32, BF16), (F32, F16), (BF16, F32), (BF16, F16)], ids=str)
def test_hidden_is_cast_at_the_worker_and_answered_in_the_callers_dtype(
    family: str, client: torch.dtype, workers: torch.dtype
) -> None:
    hidden, vector = inputs(client)
    with make(family, (0, tiny.LAYERS, workers), client=client) as flow, torch.no_grad():
        ours = flow(hidden, attention_mask=MASK, steer={1: vector})
        want = oracle.residual(local(family, workers), hidden.to(workers), steer={1: vector}, attention_mask=MASK)
        assert_bits(ours, want.to(client))
        with flow.session(max_length=SEQ) as session:
            first = session.step(hidden[:, :4], attention_mask=MASK[:, :4], steer={1: vector})
            last = session.step(hidden[:, 4:], steer={1: vector})
        assert (first.dtype, last.dtype) == (client, client)
        tokens = MASK.bool()  # what stands at a pad means nothing
        assert_close(torch.cat([first, last], 1)[tokens].to(BF16), ours[tokens].to(BF16))


@every_family
def test_gradients_come_back_in_each_inputs_own_dtype(family: str) -> None:
    hidden, vector = inputs(BF16)
    prompts = tiny.random(tiny.LAYERS, 1, 2, tiny.HIDDEN, seed=2)
    given = [tensor.requires_grad_() for tensor in (hidden, vector, prompts)]
    weight = tiny.random(BATCH, SEQ, tiny.HIDDEN, seed=4).to(BF16)
    with make(family, (0, 2, F32), (2, 4, BF16), client=BF16) as flow:
        out = flow(hidden, attention_mask=MASK, steer={1: vector}, prompts=prompts)
        ours = torch.autograd.grad(out, given, weight)
    middle = oracle.residual(  # the first two layers in float32, rounded, the others in bfloat16
        _part(family, F32, 0, 2), hidden.float(), steer={1: vector}, prompts=dict(enumerate(prompts[:2])), **_mask()
    )
    want = oracle.residual(_part(family, BF16, 2, 4), middle.to(BF16), prompts=dict(enumerate(prompts[2:])), **_mask())
    assert_bits(out, want)
    for mine, theirs, tensor in zip(ours, torch.autograd.grad(want, given, weight), given, strict=True):
        assert mine.dtype == tensor.dtype == theirs.dtype
        assert_close(mine.to(BF16), theirs.to(BF16))


def _mask() -> dict[str, Tensor]:
    return {"attention_mask": MASK}


def _part(family: str, dtype: torch.dtype, start: int, stop: int) -> nn.Module:
    """A model of some of the reference's layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.folder(family), dtype=dtype).eval().requires_grad_(False)
    layers = oracle.layers_of(model)
    del layers[stop:]
    del layers[:start]
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    model.config.num_hidden_layers = stop - start
    return model


def test_every_derivative_works_across_dtypes() -> None:
    hidden, vector = inputs(F32)
    with make("gpt2", (0, 4, BF16)) as flow:
        loss = lambda v: flow(hidden, steer={1: v}).sin().sum()  # noqa: E731
        gradient = torch.func.grad(loss)(vector)
        assert gradient.dtype is F32
        plain = vector.clone().requires_grad_()
        assert_close(gradient.to(BF16), torch.autograd.grad(loss(plain), plain)[0].to(BF16))
        value = lambda v: flow(hidden, steer={1: v})  # noqa: E731
        batched = torch.func.vmap(value)(torch.stack([vector, 2 * vector]))
        assert_close(batched.to(BF16), torch.stack([value(vector), value(2 * vector)]).to(BF16))
        hessian = torch.func.jvp(torch.func.grad(loss), (vector,), (vector.cos(),))[1]
        assert hessian.dtype is F32 and hessian.isfinite().all()


@pytest.mark.parametrize("client", [F32, BF16], ids=str)
def test_generate_runs_across_dtypes(client: torch.dtype) -> None:
    ids = tiny.ids(2, 4)
    with make("llama", (0, 4, BF16), client=client) as flow:
        model = kf.AutoDistributedModelForCausalLM.from_pretrained(tiny.folder("llama"), flow=flow)
        ours = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
        if client is BF16:
            assert torch.equal(ours, local("llama", BF16).generate(ids, max_new_tokens=4, do_sample=False))
    assert ours.shape == (2, 8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_hidden_that_is_not_floating_is_refused(dtype: torch.dtype) -> None:
    with tiny.make_flow("llama") as flow, pytest.raises(KwargError, match="blocks take floating point"):
        flow(torch.ones(1, 2, tiny.HIDDEN, dtype=dtype))


# ---------------------------------------------------------------- what is said of it


def test_the_repr_says_what_the_workers_run() -> None:
    hidden, _ = inputs(F32)
    with make("llama", (0, 2, BF16), (2, 4, F32)) as flow:
        name = flow.ends.name
        assert repr(flow) == f"Flow({name}, layers 0:4, float32)", "no worker was met yet"
        flow(hidden)
        assert repr(flow) == f"Flow({name}, layers 0:4, float32, workers bfloat16 0:2, float32 2:4)"
        assert repr(flow[0:2]) == f"Flow({name}, layers 0:2, float32, workers bfloat16)"
        assert repr(flow[2:4]) == f"Flow({name}, layers 2:4, float32)"


@pytest.mark.parametrize(
    ("client", "workers", "reference"),
    [
        (F32, [(0, 4, BF16)], F32),  # the reference is cast as the worker cast its weights
        (F32, [(0, 4, BF16)], BF16),
        (BF16, [(0, 2, F32), (2, 4, F32)], F32),  # rounded to bfloat16 between the workers
        (F32, [(0, 1, F32), (1, 3, BF16), (3, 4, F32)], F32),
        (BF16, [(0, 4, F16)], F32),
    ],
)
@families(["llama", "gpt2"])
def test_exact_match_casts_the_reference_as_the_workers_do(
    family: str, client: torch.dtype, workers: list[tuple[int, int, torch.dtype]], reference: torch.dtype
) -> None:
    hidden, vector = inputs(client)
    with make(family, *workers, client=client) as flow:
        match = kf.verify.exact_match(flow, local(family, reference), hidden, attention_mask=MASK, steer={1: vector})
        assert match.bitwise, match
        said = str(match)
        for _, _, dtype in workers:
            name, mine = (str(d).removeprefix("torch.") for d in (dtype, client))
            if dtype is not client:
                assert f"computes in {name} and answers in hidden's {mine}" in said
            if dtype is not reference:
                assert f"weights were cast to {name} for its layers" in said
        assert kf.verify.exact_match(flow, kf.stream(tiny.folder(family)), hidden).bitwise


def test_exact_match_names_a_reference_whose_weights_are_narrower() -> None:
    hidden, _ = inputs(F32)
    with make("llama", (0, 4, F32)) as flow:
        match = kf.verify.exact_match(flow, local("llama", BF16), hidden)
    assert match.verdict == "different"
    assert "here weights were read in bfloat16" in match.why


def test_exact_match_still_tells_noise_in_bfloat16() -> None:
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(tiny.folder("llama"), dtype=BF16, attn_implementation="eager").eval()
    hidden, _ = inputs(F32)
    with make("llama", (0, 4, BF16)) as flow:
        match = kf.verify.exact_match(flow, eager, hidden)
    assert match.verdict == "noise", match
    assert "attention sdpa" in match.why


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", BF16], ids=str)
def test_every_way_in_takes_a_dtype(dtype: Any) -> None:
    want = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    where = tiny.folder("llama")
    ((_, params),) = kf.load_blocks(where, 0, 1, dtype=dtype)
    assert {tensor.dtype for tensor in params.values()} == {want}
    with kf.connect(where, dtype=dtype) as flow:
        assert (flow.ends.dtype, flow.inputs(["w1 w2"])["hidden"].dtype) == (want, want)
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(where, dtype=dtype)
    assert model.dtype == want
    model.flow.close()


def test_auto_is_the_checkpoints_own_dtype() -> None:
    for stored in (F32, BF16):
        assert load_span(tiny.folder("llama", stored), 0, 1, dtype="auto").dtype == stored


def test_dtypes_and_devices_that_are_not_there_are_refused() -> None:
    where = tiny.folder("llama")
    with pytest.raises(ModelError, match="dtype 'int8'; give auto, float32, bfloat16, float16"):
        kf.load_blocks(where, 0, 1, dtype="int8")
    with pytest.raises(ModelError, match="quantize='nf4' with dtype float64; bitsandbytes takes float32"):
        load_span(where, dtype="float64", quantize="nf4")
    with pytest.raises(ModelError, match="device 'gpu'; give auto, cpu, cuda"):
        kf.load_blocks(where, 0, 1, device="gpu")
    with pytest.raises(ModelError, match="device 'meta'; give auto"):
        kf.load_blocks(where, 0, 1, device="meta")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ModelError, match=f"device '{missing}': torch sees {torch.cuda.device_count()} CUDA devices"):
        kf.load_blocks(where, 0, 1, device=missing)
    with pytest.raises(KwargError, match="device belongs to the workers"):
        kf.connect(where, peers=["/ip4/127.0.0.1/tcp/1/p2p/Qm"], device="cpu")


def test_auto_takes_the_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ModelError, match="device 0"):  # an accelerator's index, not "none was given"
        resolve_device(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.swarm
def test_workers_of_a_local_swarm_run_in_their_own_dtype() -> None:
    hidden, vector = inputs(F32)
    with (
        local_swarm(str(tiny.folder("llama")), workers=1, dtype="bfloat16", device="auto") as swarm,
        kf.connect(swarm.model, peers=swarm.peers, dtype="float32") as flow,
    ):
        match = kf.verify.exact_match(flow, local("llama", F32), hidden, steer={1: vector})
        assert torch.cuda.is_available() or torch.backends.mps.is_available() or match.bitwise, match
        assert "workers bfloat16" in repr(flow)


@pytest.mark.swarm
@pytest.mark.rest
def test_a_swarm_says_what_it_serves_instead_and_when_it_cannot_be_joined() -> None:
    where = tiny.folder("llama")
    with local_swarm(where, workers=1, name="chosen") as swarm:
        peers = swarm.peers
        said = rf"nobody serves '{where.name}' in this swarm, which serves 'chosen'; name="
        with kf.connect(where, peers=peers) as flow, pytest.raises(NoRoute, match=said):
            flow(tiny.random(1, 2, tiny.HIDDEN))
        swarm.pause(0)
        with pytest.raises(DeadlineError, match=r"could not be joined in 0\.5 s"):
            kf.connect(where, peers=peers, timeout=0.5)


def test_connecting_to_nobody_is_refused() -> None:
    with pytest.raises(KwargError, match="peers=\\[\\] names nobody"):
        kf.connect(tiny.folder("llama"), peers=[])
    with pytest.raises(KwargError, match="threads=0; give 1 or more"):
        local_swarm(tiny.folder("llama"), threads=0)


# ---------------------------------------------------------------- devices: a worker whose params are elsewhere

META = torch.device("meta")


class Elsewhere(TorchDispatchMode):
    """The meta device as a stand-in for an accelerator: what mixes it with the CPU raises, as CUDA would.

    It has no numbers: copies to the CPU give zeros, and questions about values are answered with no.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default) and args[0].is_meta:
            return False
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        there = [tensor.is_meta for tensor in tensors if tensor.is_meta or tensor.dim()]  # CUDA takes CPU scalars
        if any(there) and not all(there):
            raise RuntimeError(f"{func} mixes devices: {[(str(t.device), tuple(t.shape)) for t in tensors]}")
        return func(*args, **kwargs)


def elsewhere(family: str) -> SpanSpec:
    spec = load_span(tiny.folder(family))
    modules = [block.module.to(META) for block in spec.blocks]
    blocks = [
        replace(block, params=dict(module.named_parameters()))
        for block, module in zip(spec.blocks, modules, strict=True)
    ]
    return replace(spec, blocks=tuple(blocks), device=META)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every worker of the test computes under Elsewhere."""
    compute = worker.Compute.__call__

    async def call(self: worker.Compute, priority: int, work: Callable[[], Any]) -> Any:
        def within() -> Any:
            with Elsewhere():
                return work()

        return await compute(self, priority, within)

    monkeypatch.setattr(worker.Compute, "__call__", call)
    yield


@pytest.mark.slow
@every_family
def test_nothing_that_a_worker_computes_with_is_left_on_the_cpu(family: str, watched: None) -> None:
    hidden, vector = inputs(BF16)
    prompts = tiny.random(tiny.LAYERS, 1, 2, tiny.HIDDEN, seed=2)
    square = torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool).tril()
    with Flow(tiny.ends(family), in_process([Served(elsewhere(family))]), (0, tiny.LAYERS)) as flow:
        calls: list[dict[str, Any]] = [
            {},
            {"attention_mask": MASK},
            {"attention_mask": square},
            {"attention_mask": torch.zeros(BATCH, 1, SEQ, SEQ)},
            {"attention_mask": MASK, "steer": {1: vector}, "prompts": prompts},
        ]
        if family == "llama":
            calls.append({"position_ids": tiny.positions_of(MASK)})
        for kwargs in calls:
            assert flow(hidden, **kwargs).device.type == "cpu"
        given = [tensor.requires_grad_() for tensor in (hidden, vector, prompts)]
        out = flow(hidden, attention_mask=MASK, steer={1: vector}, prompts=prompts)
        grads = torch.autograd.grad(out.float().sum(), given)
        assert [(g.device.type, g.dtype) for g in grads] == [("cpu", tensor.dtype) for tensor in given]
        loss = lambda v: flow(hidden.detach(), attention_mask=MASK, steer={1: v}).sin().sum()  # noqa: E731
        torch.func.jvp(torch.func.grad(loss), (vector.detach(),), (vector.detach(),))
        torch.func.vmap(loss)(torch.stack([vector.detach()] * 2))


@every_family
def test_a_session_keeps_its_keys_where_the_params_are(family: str, watched: None) -> None:
    hidden, vector = inputs(F32)
    served = Served(elsewhere(family))
    with (
        Flow(tiny.ends(family), in_process([served]), (0, tiny.LAYERS)) as flow,
        flow.session(max_length=SEQ + 1) as session,
    ):
        session.step(hidden[:, :3], attention_mask=MASK[:, :3])
        session.step(hidden[:, 3:4], steer={1: vector})
        session.reorder([1, 0, 2])
        session.step(hidden[:, 4:])
        session.rollback(2)
        assert session.step(hidden[:, 2:4]).device.type == "cpu"
        assert served.kv_used > 0, "it is this worker that has them"


def test_the_stand_in_device_sees_a_tensor_that_was_left_behind(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _ = inputs(F32)
    spec = elsewhere("llama")

    def stays(params: Any, hidden: Tensor, /, *, block: Any) -> Tensor:
        return block(params, hidden) + torch.ones(tiny.HIDDEN)

    served = Served(with_block_fn(spec, stays, "stays"))
    with (
        Flow(tiny.ends("llama"), in_process([served]), (0, tiny.LAYERS)) as flow,
        pytest.raises(BlockError, match="mixes devices"),
    ):
        flow(hidden)


def test_results_go_to_the_devices_of_the_callers_tensors() -> None:
    here, there = torch.ones(2), torch.ones(2, device=META)
    (out,) = to_devices([here], (), [there, here])
    assert out is not None and out.is_meta, "a value goes where hidden is"
    operations = ({"vjp": [1, 0], "given": [0]},)
    first, second = to_devices([here, here], operations, [there, here, here])
    assert first is not None and second is not None
    assert (first.is_meta, second.is_meta) == (False, True), "a gradient goes where its input is"
    nested = (*operations, {"jvp": [0]})
    assert [t is not None and t.is_meta for t in to_devices([here, None], nested, [there, here])] == [False, False]


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        MemoryError(),
        AssertionError("of the block_fn"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["call", "step", "backward"])
def test_a_worker_without_memory_is_to_blame_and_not_the_caller(error: Exception, where: str) -> None:
    """What a block itself raises is the caller's: it would on another worker too."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise error

    def full(params: Any, hidden: Tensor, /, *, block: Any) -> Tensor:
        if where != "backward":
            raise error
        return Fails.apply(block(params, hidden))

    hidden, _ = inputs(F32)
    spec = load_span(tiny.folder("llama"))
    served = [Served(with_block_fn(spec, full, "full")), Served(with_block_fn(spec, full, "full"))]
    with Flow(tiny.ends("llama"), in_process(served), (0, 4)).options(timeout=20) as flow, flow.session(8) as session:
        kind = BlockError if isinstance(error, AssertionError) else NoRoute
        with pytest.raises(kind, match=type(error).__name__) as caught:
            if where == "step":
                session.step(hidden)
            else:
                flow(hidden.requires_grad_(where == "backward")).sum().backward()
        bans = flow.peers.bans  # type: ignore[attr-defined]
        assert len(bans) == (0 if kind is BlockError else 2), "both were tried, and are avoided for a while"
        assert kind is BlockError or isinstance(caught.value.__cause__, WorkerFailed)


# ---------------------------------------------------------------- the script for a GPU


@pytest.mark.slow
def test_the_gpu_script_proves_and_measures_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--small"]) == 0
    said = capsys.readouterr().out
    assert "20 of 20 proofs hold" in said
    assert said.count("| bitwise |") >= 14, said
    assert "forward and backward: through a worker's bytes" in said


def test_the_gpu_script_says_so_without_cuda(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA here" in capsys.readouterr().out


def test_the_gpu_script_fails_when_a_proof_does(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = [gpu.Proof("values", "float32, float32", "different", 1.0, False)]
    monkeypatch.setattr(gpu, "prove", lambda *_: proofs)
    monkeypatch.setattr(gpu, "price", lambda *_: (gpu.SMALL_WIDE, {}, []))
    assert gpu.main(["--device", "cpu", "--small"]) == 1
    assert not gpu.near("values", "", torch.ones(2), torch.tensor([1.0, 1.1]), F32).holds
    assert not gpu.near("values", "", torch.ones(2), torch.ones(2, device=META), F32).holds
