"""``python -m benchmarks.overhead``: what a kwarg costs in decode, against the plain call in the same run.

One session for each kwarg on the same workers, stepped in turn, so that a change of the machine's mood meets all. A
Markdown table on stdout: the median of the ratios to the plain step of the same turn, and the middle half of them.
"""

# L layers, D hidden, R rank

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see NOTE [passive] in benchmarks/__main__.py

import torch

import kwflow as kf
from benchmarks.report import cpu

PROMPT = 16  # tokens


def kinds(flow: Any, rank: int) -> dict[str, dict[str, Any]]:
    """The kwargs that are measured; every number is small, so that none leads the model astray."""
    layers, width = len(flow), flow.ends.hidden_size
    generator = torch.Generator().manual_seed(0)

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.01

    sizes = flow.projections()
    lora = {
        name: {"A": small(layers, rank, features), "B": small(layers, out, rank)}
        for name, (features, out) in sizes.items()
        if name.endswith(("q_proj", "v_proj"))
    }
    middle, heads = layers // 2, flow.peers.hellos()[0]["schema"].sizes["head"]
    return {
        "nothing": {},
        "a vector": {"steer": {middle: small(width)}},
        "a vector at every layer": {"steer": kf.axes(small(layers, width), "layer hidden")},
        "kf.add at one point": {"edit": kf.add(small(width), layers=middle, point="attn")},
        f"LoRA of rank {rank} on q_proj and v_proj": {"lora": lora},
        "the same, as kf.adapters gives it (by layer)": kf.per_layer([{"lora": _of(lora, n)} for n in range(layers)]),
        "IA3 on k_proj and v_proj": {
            "ia3": {n: 1 + small(layers, out) for n, (_, out) in sizes.items() if n.endswith(("k_proj", "v_proj"))}
        },
        "deep prompts of 8": {"prompts": small(layers, 1, 8, width)},
        "a head mask": {"head_mask": torch.ones(layers, heads)},
    }


def _of(lora: dict[str, dict[str, torch.Tensor]], layer: int) -> dict[str, dict[str, torch.Tensor]]:
    """One layer's part."""
    return {name: {side: tensor[layer] for side, tensor in own.items()} for name, own in lora.items()}


def measure(model: str, workers: int, threads: int, tokens: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each step by kind; those of one index ran one after the other."""
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        swarm = stack.enter_context(kf.local_swarm(model, workers=workers, threads=threads))
        flow = stack.enter_context(kf.connect(swarm.model, peers=swarm.peers))
        given = kinds(flow, rank)
        seconds: dict[str, list[float]] = {name: [] for name in given}
        x, hidden = torch.randn(1, PROMPT, flow.ends.hidden_size), torch.randn(1, 1, flow.ends.hidden_size)
        sessions = {name: stack.enter_context(flow.session(PROMPT + tokens)) for name in given}
        with torch.no_grad():
            for name, session in sessions.items():
                session.step(x, **given[name])
            for number in range(tokens):
                order = list(given)[number % len(given) :] + list(given)[: number % len(given)]
                for name in order:
                    began = time.perf_counter()
                    sessions[name].step(hidden, **given[name])
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: dict[str, list[float]]) -> str:
    """The Markdown table."""
    plain, *_ = seconds.values()
    lines = ["| kwarg | of a plain step [middle half] |", "|---|---|"]
    for name, own in list(seconds.items())[1:]:
        low, middle, high = statistics.quantiles([a / b for a, b in zip(own, plain, strict=True)], n=4)
        lines.append(f"| {name} | {middle:.3f} [{low:.3f}, {high:.3f}] |")
    lines.append(f"\nA plain step took {1e3 * statistics.median(plain):.1f} ms.")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="What a kwarg costs in decode.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{cpu()}; {args.workers} workers with {args.threads} thread(s), {args.tokens} tokens\n")
    print(table(measure(args.model, args.workers, args.threads, args.tokens, args.rank)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
