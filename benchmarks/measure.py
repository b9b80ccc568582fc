"""The measurements: each task runs on the local model and through every swarm in turn, over and over.

What is compared runs in one process a few seconds apart, so a change of the machine's mood meets all sides; ratios are
taken within a repetition.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kwflow as kf
from benchmarks.memory import peak, reset_peak

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is run: tokens, rows × columns, repetitions of decode and of the others."""

    prompt: int
    tokens: int
    rows: int
    columns: int
    decode_repeats: int
    repeats: int


FULL = Sizes(prompt=32, tokens=64, rows=8, columns=128, decode_repeats=7, repeats=3)
QUICK = Sizes(prompt=8, tokens=16, rows=2, columns=32, decode_repeats=3, repeats=2)


@dataclass(frozen=True)
class Setting:
    """What a run measures."""

    model: str
    threads: tuple[int, ...]
    workers: tuple[int, ...]
    only: tuple[str, ...]
    sizes: Sizes


@dataclass
class Split:
    """Where one decoded token's seconds go, on average over a run."""

    total: float
    layers: float  # local: in the layers; remote: computing on the workers
    queue: float = 0.0
    network: float = 0.0  # a request's round trip less what the worker queued and computed: bytes, codec, streams


@dataclass
class Side:
    """One side of a task: the local model (0 workers) or a swarm."""

    workers: int
    run: Callable[[], float]  # seconds: per token for decode
    traffic: Callable[[], int]  # bytes sent and received so far
    pids: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)
    moved: int = 0  # bytes of the last run
    peak_bytes: int | None = None  # of the process that computes most
    splits: list[Split] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One task with some threads: the local side, then the swarms."""

    task: str
    threads: int
    sides: tuple[Side, ...]
    tensors: Callable[[int], int]  # bytes of the tensors that so many workers must get from here and give, in a run
    tokens: int  # bytes are shown per new token of decode, prompt included; else 1


def measure(setting: Setting, say: Say) -> list[Row]:
    """Start the swarms of each thread count, run every task on all sides in turn."""
    local = _load_local(setting.model)
    rows = []
    for threads in setting.threads:
        torch.set_num_threads(threads)
        with ExitStack() as stack:
            remotes: dict[int, Any] = {}
            pids: dict[int, list[int]] = {}
            for count in setting.workers:
                say(f"{threads} thread(s): starting {count} worker(s)")
                swarm = stack.enter_context(kf.local_swarm(setting.model, workers=count, threads=threads))
                remotes[count] = kf.AutoDistributedModelForCausalLM.from_pretrained(
                    setting.model, initial_peers=swarm.peers
                )
                stack.enter_context(remotes[count].flow)
                pids[count] = [worker.pid for worker in swarm.workers]
            for task in setting.only:
                row = _TASKS[task](setting.sizes, threads, local, remotes, pids)
                repeats = setting.sizes.decode_repeats if task == "decode" else setting.sizes.repeats
                _interleave(row, repeats, say)
                rows.append(row)
    return rows


def _interleave(row: Row, repeats: int, say: Say) -> None:
    """All sides once to warm up, then in turn; each repetition begins with another side."""
    for side in row.sides:
        side.run()
        side.splits.clear()
    for number in range(repeats):
        turn = number % len(row.sides)
        for side in [*row.sides[turn:], *row.sides[:turn]]:
            for pid in side.pids:
                reset_peak(pid)
            before = side.traffic()
            side.seconds.append(side.run())
            side.moved = side.traffic() - before
            peaks = [found for pid in side.pids if (found := peak(pid)) is not None]
            side.peak_bytes = max([*peaks, side.peak_bytes or 0]) or None
        say(f"{row.threads} thread(s), {row.task}: {number + 1} of {repeats}")


def _load_local(model: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(kf.model_path(model), dtype="auto").eval().requires_grad_(False)


def _sides(
    remotes: dict[int, Any], pids: dict[int, list[int]], make: Callable[[Any, int], Callable[[], float]], local: Any
) -> tuple[Side, ...]:
    import os

    def traffic(remote: Any) -> Callable[[], int]:
        pool = remote.flow.peers.pool
        return lambda: pool.bytes_sent + pool.bytes_received

    sides = [Side(0, make(local, 0), lambda: 0, [os.getpid()])]
    sides += [Side(n, make(remote, n), traffic(remote), pids[n]) for n, remote in remotes.items()]
    return tuple(sides)


# ---- the tasks -------------------------------------------------------------------------------------------------------


def decode(sizes: Sizes, threads: int, local: Any, remotes: dict[int, Any], pids: dict[int, list[int]]) -> Row:
    """Seconds per token of Hugging Face's generate, from the first new token to the last: without the prefill."""
    from transformers import StoppingCriteriaList

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, local.config.vocab_size - 1000, (1, sizes.prompt), generator=generator)
    settings = {"max_new_tokens": sizes.tokens + 1, "min_new_tokens": sizes.tokens + 1, "do_sample": False}
    mask = torch.ones_like(ids)
    sides: list[Side] = []

    def make(model: Any, workers: int) -> Callable[[], float]:
        def run() -> float:
            at: list[float] = []

            def tick(ids: Tensor, scores: Any, **_: Any) -> Tensor:
                at.append(time.perf_counter())
                return torch.zeros(ids.shape[0], dtype=torch.bool)

            watch = _layer_seconds(local) if workers == 0 else _call_seconds(model.flow)
            with watch as spent:
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    pad_token_id=0,
                    stopping_criteria=StoppingCriteriaList([tick]),
                    **settings,
                )
            per_token = (at[-1] - at[0]) / sizes.tokens
            sides[[side.workers for side in sides].index(workers)].splits.append(_split(per_token, spent, at))
            return per_token

        return run

    sides.extend(_sides(remotes, pids, make, local))
    hidden = local.config.hidden_size * next(local.parameters()).element_size()

    def tensors(workers: int) -> int:
        """After the prompt the hidden goes to the first worker only, which hands on; all give their output."""
        return hidden * (2 * workers * sizes.prompt + (1 + workers) * sizes.tokens)

    return Row("decode", threads, tuple(sides), tensors, sizes.tokens + 1)


def forward(sizes: Sizes, threads: int, local: Any, remotes: dict[int, Any], pids: dict[int, list[int]]) -> Row:
    """Seconds of a forward pass through all layers, without gradients."""
    hidden = _hidden(sizes, local)
    base = getattr(local, local.base_model_prefix)

    def make(model: Any, workers: int) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            with torch.no_grad():
                _ = base(inputs_embeds=hidden, use_cache=False) if workers == 0 else model.flow(hidden)
            return time.perf_counter() - began

        return run

    name = f"forward {sizes.rows}×{sizes.columns}"
    return Row(name, threads, _sides(remotes, pids, make, local), lambda workers: 2 * workers * hidden.nbytes, 1)


def backward(sizes: Sizes, threads: int, local: Any, remotes: dict[int, Any], pids: dict[int, list[int]]) -> Row:
    """Seconds of forward and backward with respect to hidden; weights are frozen on both sides."""
    hidden = _hidden(sizes, local)
    base = getattr(local, local.base_model_prefix)
    cotangent = torch.ones_like(hidden)

    def make(model: Any, workers: int) -> Callable[[], float]:
        def run() -> float:
            leaf = hidden.clone().requires_grad_()
            began = time.perf_counter()
            out = base(inputs_embeds=leaf, use_cache=False)[0] if workers == 0 else model.flow(leaf)
            out.backward(cotangent)
            return time.perf_counter() - began

        return run

    name = f"forward + backward {sizes.rows}×{sizes.columns}"
    return Row(name, threads, _sides(remotes, pids, make, local), lambda workers: 5 * workers * hidden.nbytes, 1)


_TASKS = {"decode": decode, "forward": forward, "backward": backward}


def _hidden(sizes: Sizes, local: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, local.config.vocab_size - 1000, (sizes.rows, sizes.columns), generator=generator)
    with torch.no_grad():
        return local.get_input_embeddings()(ids)


# ---- where a token's time goes ---------------------------------------------------------------------------------------

Spent = list[tuple[float, float, float, float]]  # when it ended, seconds in all, of these computing, queued


@contextmanager
def _call_seconds(flow: Any) -> Iterator[Spent]:
    """Every request's round trip, and what its reply says of the worker's queue and compute."""
    spent: Spent = []
    with flow.timed() as timings:
        yield spent
    spent += [(one.began + one.seconds, one.seconds, one.compute, one.queue) for one in timings]


@contextmanager
def _layer_seconds(local: Any) -> Iterator[Spent]:
    """The local model's time between the first layer's start and the last layer's end."""
    from kwflow.models.families import family_of
    from kwflow.models.layout import layer_list

    spent: Spent = []
    layers = layer_list(getattr(local, local.base_model_prefix), family_of(local.config))
    began = [0.0]

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        ended = time.perf_counter()
        spent.append((ended, ended - began[0], ended - began[0], 0.0))

    hooks = [layers[0].register_forward_pre_hook(before), layers[-1].register_forward_hook(after)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def _split(per_token: float, spent: Spent, at: list[float]) -> Split:
    tokens = len(at) - 1
    inside = [one for one in spent if at[0] < one[0] <= at[-1]]
    layers, queue = (sum(one[i] for one in inside) / tokens for i in (2, 3))
    return Split(per_token, layers, queue, _covered(inside) / tokens - layers - queue)


def _covered(spent: Spent) -> float:
    """Seconds in which at least one request was on its way: of a step that is handed on, all are at once."""
    seconds, until = 0.0, 0.0
    for began, ended in sorted((ended - took, ended) for ended, took, _, _ in spent):
        seconds += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return seconds
