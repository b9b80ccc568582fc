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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.blocks.span import SpanSpec, with_block_fn
from kwflow.client.flow import Flow
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span
from kwflow.worker.server import Served
from tests.doubles.workers import Requests as Requests
from tests.doubles.workers import Workers
from tests.doubles.workers import kv_used as kv_used
from tests.doubles.workers import settle as settle
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
def root() -> Path:
    root = tempfile.mkdtemp(prefix="kwflow-tiny-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@functools.cache
def folder(family: str, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a random model with a tokenizer of words; every tensor is random, biases and norms too."""
    from transformers import AutoModelForCausalLM

    where = root() / f"{family}-{str(dtype).removeprefix('torch.')}"
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
    return Flow(mine, Workers(peers).peers(), (0, cuts[-1]))


@functools.cache
def flow(
    family: str,
    cuts: tuple[int, ...] = ONE,
    dtype: torch.dtype = torch.float32,
    block_fn: Callable[..., Tensor] | None = None,
) -> Flow:
    """The same, shared by tests that do not break it."""
    return make_flow(family, cuts, dtype, block_fn)


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
