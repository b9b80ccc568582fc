"""``python -m benchmarks.stall``: what the step costs that meets a worker's death, with a spare at hand.

A session through layers 0:n/2 and n/2:n has taken a prompt and made ``--tokens`` more when the second worker gets
``kill -9`` or SIGSTOP. The next step finds out, repeats the steps on a spare, and ends; its value is compared with that
of an undisturbed session. A Markdown table on stdout: medians, and the least and the most of the runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see NOTE [passive] in benchmarks/__main__.py

import torch
from torch import Tensor

import kwflow as kf
from benchmarks.report import cpu
from kwflow.swarm.local import LocalSwarm

PROMPT = 5  # tokens
CASES = (("kill -9", "merged"), ("kill -9", "stepwise"), ("SIGSTOP", "merged"), ("SIGSTOP", "stepwise"))


@dataclass(frozen=True)
class Stall:
    """One run: seconds of a plain step, of the step that met the failure and of repeating; the value's relative gap."""

    plain: float
    step: float
    repeating: float
    gap: float


def stall(swarm: LocalSwarm, flow: kf.Flow, text: Tensor, fault: str, replay: str, expected: Tensor) -> Stall:
    """Run one session into one failure; the swarm has its spare again afterwards."""
    half = flow.stop // 2
    with torch.no_grad(), flow.session(text.shape[1], replay=replay) as session:
        session.step(text[:, :PROMPT])
        plain = []
        with flow.timed() as timings:
            for column in range(PROMPT, text.shape[1] - 1):
                began = time.perf_counter()
                session.step(text[:, column : column + 1])
                plain.append(time.perf_counter() - began)
        peer = next(one.peer for one in timings if one.layers[0] == half)
        number = next(i for i, worker in enumerate(swarm.workers) if worker.peer == peer)
        (swarm.kill if fault == "kill -9" else swarm.pause)(number)
        began = time.perf_counter()
        out = session.step(text[:, -1:])
        took = time.perf_counter() - began
        (replaced,) = session.replays
    if fault == "kill -9":
        swarm.add(half, flow.stop)
    else:
        swarm.resume(number)
    gap = ((out - expected).abs().max() / expected.abs().max()).item()
    return Stall(statistics.median(plain), took, replaced.seconds, gap)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64, help="steps after the prompt")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[tuple[str, str], list[Stall]] = {}
    with kf.local_swarm(args.model, workers=2) as swarm, kf.connect(swarm.model, peers=swarm.peers) as flow:
        swarm.add(flow.stop // 2, flow.stop)
        text = flow.embed(torch.randint(0, 1000, (1, PROMPT + args.tokens + 1)))
        with torch.no_grad(), flow.session(text.shape[1]) as undisturbed:
            undisturbed.step(text[:, :PROMPT])
            for column in range(PROMPT, text.shape[1]):
                expected = undisturbed.step(text[:, column : column + 1])
        for run in range(args.runs):
            for case in CASES:
                time.sleep(2.0)  # the spare is in the directory
                found.setdefault(case, []).append(stall(swarm, flow, text, *case, expected))
                print(f"run {run}: {case}: {found[case][-1]}", file=sys.stderr, flush=True)
    plain = statistics.median(one.plain for runs in found.values() for one in runs)
    print(f"{args.model}, {args.tokens} steps after a prompt of {PROMPT}, {args.runs} runs each; {cpu()}.")
    print(f"A plain step took {1000 * plain:.0f} ms.\n")
    print(
        "| the second worker | replay | the step that met it took | of which repeating | value |\n|---|---|---|---|---|"
    )
    for (fault, replay), runs in found.items():
        steps, gap = sorted(one.step for one in runs), max(one.gap for one in runs)
        repeating = statistics.median(one.repeating for one in runs)
        value = "equal to the bit" if gap == 0 else f"largest difference {gap:.0e} of the largest number"
        took = f"{statistics.median(steps):.2f} s [{steps[0]:.2f}, {steps[-1]:.2f}]"
        print(f"| `{fault}` | {replay} | {took} | {repeating:.2f} s | {value} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
