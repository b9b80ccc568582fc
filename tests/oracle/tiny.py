"""Tiny random models of every family, saved once per test session, and flows over workers of this process.

Every size that could be mistaken for another is the same: 4 layers, 4 heads; tests take batches and texts of 4.
"""

# B batch, S seq, P prefix, D hidden

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks.span import SpanSpec, with_block_fn
from kwflow.client.flow import Flow
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span
from kwflow.swarm.connect import in_process
from kwflow.worker.server import Served
from tests.families.configs import CONFIGS, VOCAB
from tests.families.configs import HEADS as HEADS
from tests.families.configs import HIDDEN as HIDDEN
from tests.families.configs import KV_HEADS as KV_HEADS
from tests.families.configs import LAYERS as LAYERS
from tests.families.configs import MAX_LENGTH as MAX_LENGTH
from tests.families.configs import config as config

FAMILIES = ("llama", "gpt2", "bloom")  # tested in depth; every family: tests/families/test_every_family.py
ONE, TWO, THREE, EACH = (4,), (2, 4), (1, 3, 4), (1, 2, 3, 4)  # where workers' spans end
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCAB - 2))]


@functools.cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="kwflow-tiny-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@functools.cache
def folder(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a random model with a tokenizer of words; every tensor is random, biases and norms too."""
    from transformers import AutoModelForCausalLM

    where = _root() / f"{family}-{str(dtype).removeprefix('torch.')}"
    made = torch.Generator().manual_seed(list(CONFIGS).index(family))
    model = AutoModelForCausalLM.from_config(config(family))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.1 if tensor.dim() == 1 else 0.2
            tensor.normal_(0, scale, generator=made)
            if tensor.dim() == 1 and name.endswith("weight"):  # a norm
                tensor.add_(1)
    model.to(dtype).save_pretrained(where)
    _save_tokenizer(where)
    return where


def _save_tokenizer(where: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(where)


@functools.cache
def huggingface(family: str, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.float32) -> nn.Module:
    """The local reference. Loaded from the folder: a model made from its config may differ in the last bit, since
    weights that are mapped from a file are aligned otherwise."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(family, stored), dtype=dtype).eval().requires_grad_(False)


@functools.cache
def derivable(family: str) -> nn.Module:
    """The reference in float64 and in plain torch ops: torch.func cannot take bloom's gelu, grouped experts, or a
    longrope that writes down what it chose."""
    model: Any = copy.deepcopy(huggingface(family, torch.float64))
    model.config._experts_implementation = "batched_mm"
    for parameter in model.parameters():
        parameter.data = parameter.data.double()  # deepseek's router is float32 in every dtype
    base = getattr(model, model.base_model_prefix)
    if "longrope" in str(getattr(getattr(base, "rotary_emb", None), "rope_type", "")):
        kept = copy.deepcopy(base.rotary_emb)
        base.rotary_emb.forward = lambda *args, **kwargs: copy.deepcopy(kept)(*args, **kwargs)
    if family == "bloom":
        from transformers.models.bloom import modeling_bloom

        for layer in model.transformer.h:
            layer.mlp.gelu_impl.forward = modeling_bloom.bloom_gelu_forward
    return model


@functools.cache
def span(family: str, start: int, stop: int, dtype: torch.dtype = torch.float32) -> SpanSpec:
    return load_span(folder(family, stored(dtype)), start, stop, dtype=dtype)


@functools.cache
def ends(family: str, dtype: torch.dtype = torch.float32) -> ModelEnds:
    return ModelEnds(folder(family, stored(dtype)), dtype)


def stored(dtype: torch.dtype) -> torch.dtype:
    """Weights are stored in float32 or bfloat16; float64 is computed from the float32 ones."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def make_flow(
    family: str,
    cuts: Sequence[int] = ONE,
    dtype: torch.dtype = torch.float32,
    block_fn: Callable[..., Tensor] | Mapping[int, Callable[..., Tensor]] | None = None,
    *,
    own_ends: bool = False,
    **limits: int,
) -> Flow:
    """A flow over new workers of this process, whose spans end at ``cuts``; ``block_fn``: of all, or by worker.

    ``own_ends``: not the ends that other tests have too, for what trains embeddings or a head.
    """
    peers = []
    for number, (start, stop) in enumerate(zip((0, *cuts), cuts, strict=False)):
        spec = span(family, start, stop, dtype)
        fn = block_fn.get(number) if isinstance(block_fn, Mapping) else block_fn
        peers.append(Served(spec if fn is None else with_block_fn(spec, fn, fn.__name__), model=family, **limits))
    mine = ModelEnds(folder(family, stored(dtype)), dtype) if own_ends else ends(family, dtype)
    return Flow(mine, in_process(peers), (0, cuts[-1]))


@functools.cache
def flow(
    family: str,
    cuts: tuple[int, ...] = ONE,
    dtype: torch.dtype = torch.float32,
    block_fn: Callable[..., Tensor] | None = None,
) -> Flow:
    """The same, shared by tests that do not break it."""
    return make_flow(family, cuts, dtype, block_fn)


class Requests:
    """Counts and keeps the requests that a flow sends while the ``with`` block runs."""

    def __init__(self, flow: Flow):
        self.pool, self.seen = flow.peers.pool, []
        flow.kwargs()  # hello goes first

    def __enter__(self) -> Requests:
        transport, seen = self.pool.transport, self.seen
        self._open, self._idle = transport.open, dict(self.pool._idle)
        self.pool._idle.clear()

        async def opened(peer: str, **more: Any) -> Any:
            channel = await self._open(peer, **more)
            handle = channel._connection.handle

            async def spy(request: Any) -> Any:
                reply = await handle(request)
                if request.meta["op"] != "push":  # between workers
                    seen.append((peer, request, reply))
                return reply

            channel._connection.handle = spy
            return channel

        transport.open = opened
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.transport.open = self._open
        self.pool._idle.clear()
        self.pool._idle.update(self._idle)

    def __len__(self) -> int:
        return len(self.seen)


def kv_used(flow: Flow) -> list[int]:
    """Bytes that each worker keeps for sessions."""
    return [accept.__self__.kv_used for accept in flow.peers.pool.transport._accept.values()]  # type: ignore[attr-defined]


def settle(flow: Flow, want: list[int]) -> None:
    """Wait until the workers have freed what closed sessions held."""
    deadline = time.monotonic() + 5
    while kv_used(flow) != want:
        assert time.monotonic() < deadline, f"{kv_used(flow)} in use, expected {want}"
        time.sleep(0.005)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    made = torch.Generator().manual_seed(1000 + seed)
    return (torch.randn(*shape, generator=made, dtype=torch.float64) * scale).to(dtype)


def ids(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def left_padded(pads: Sequence[int], seq: int) -> Tensor:
    """The attention mask (batch, seq) of texts with ``pads[i]`` pads on the left."""
    return (torch.arange(seq)[None] >= torch.tensor(list(pads))[:, None]).long()


def positions_of(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
