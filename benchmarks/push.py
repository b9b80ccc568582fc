"""``python -m benchmarks.push``: time per step of a session, by workers, link latency, and who carries the hidden.

Each worker delays every byte that comes and goes by the latency (``kf.faults.Latency``), so a round trip of the client
takes twice as long. With push the workers hand their outputs on to each other. A Markdown table on stdout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see NOTE [passive] in benchmarks/__main__.py

import torch

import kwflow as kf
from benchmarks.report import cpu

PROMPT = 16  # tokens


def measure(flow: kf.Flow, steps: int) -> dict[bool, float]:
    """Median milliseconds per step through the client (False) and handed on (True), taken in turn."""
    width = flow.ends.hidden_size
    vector, token = torch.randn(width) * 0.01, torch.randn(1, 1, width)
    each: dict[bool, list[float]] = {False: [], True: []}
    with torch.no_grad(), flow.session(PROMPT + steps + 1) as one, flow.session(PROMPT + steps + 1) as other:
        one.flow, other.flow = flow.options(push=False), flow.options(push=True)
        sessions = {False: one, True: other}
        for session in sessions.values():
            session.step(torch.randn(1, PROMPT, width), steer={0: vector})
        for _ in range(steps):
            for push, session in sessions.items():
                began = time.perf_counter()
                session.step(token, steer={0: vector})
                each[push].append(1000 * (time.perf_counter() - began))
    return {push: statistics.median(times) for push, times in each.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 10.0, 50.0], help="milliseconds, one way")
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Milliseconds per step, median of {args.steps}; {args.model}, {cpu()}.\n")
    print("| workers | latency, one way | through the client | handed on | ratio |\n|---|---|---|---|---|")
    for count in args.workers:
        with kf.local_swarm(args.model, workers=count) as swarm:
            with kf.connect(swarm.model, peers=swarm.peers) as flow:
                flow.kwargs()
                for latency in args.latency:
                    kf.faults.clear(swarm)
                    for number in range(count if latency else 0):
                        kf.faults.inject(swarm, number, kf.faults.Latency(latency / 1000))
                    found = measure(flow, args.steps)
                    ratio = found[True] / found[False]
                    print(
                        f"| {count} | {latency:g} ms | {found[False]:.0f} | {found[True]:.0f} | {ratio:.2f} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
