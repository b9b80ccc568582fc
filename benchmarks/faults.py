"""``python -m benchmarks.faults --scripts 200``: seeded fault scripts on real worker processes; a line for each.

Each run must end with the values of the same run undisturbed in one process; or, where the script leaves no route, with
NoRoute or DeadlineError inside its deadline. Exit status 1 when one does not, or when a process is left.
``--here``: workers of this process, in seconds. ``--only SEED …`` repeats some.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import DeadlineError, KwflowError, NoRoute
from tests.doubles.here import HereSwarm
from tests.faults.jobs import JOBS, Draw, Sizes, differences

Span = tuple[int, int]
LAYERS = 8
SECONDS, SECONDS_WITHOUT_ROUTE, GRACE = 60.0, 12.0, 2.0  # a call's deadline; and how late its error may be
GOOD = ("same", "no route")


def layout(layers: int) -> list[Span]:
    """Four workers, of which any one may be missing."""
    half, quarter = layers // 2, layers // 4
    return [(0, half), (quarter, layers), (0, layers - quarter), (half, layers)]


@dataclass(frozen=True)
class Outcome:
    """How one script went."""

    seed: int
    job: str
    script: kf.faults.Script
    verdict: str  # "same", "no route", or what is wrong
    seconds: float
    struck: int = 0  # requests that faults befell, of workers that live
    replays: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.verdict in GOOD

    def __str__(self) -> str:
        told = f"{self.seed:4d} {self.job:10s} {self.verdict:8s} {self.seconds:5.1f} s"
        return f"{told} {self.struck} struck {len(self.replays)} replays  {self.script}"


class Stage:
    """A swarm with the same workers at the start of every script, and the undisturbed flow beside it."""

    def __init__(self, folder: Path, *, here: bool):
        self.folder, self.here = folder, here
        self.reference = kf.connect(folder)
        self.sizes = Sizes.of(self.reference)
        self.spans = layout(self.sizes.layers)
        self.groups: set[int] = set()
        self.swarm: Any = HereSwarm(folder, self.spans) if here else kf.local_swarm(folder, self.spans)
        self._note()

    def restore(self) -> None:
        """End every fault, and start anew who died; numbers are as at first."""
        kf.faults.heal(self.swarm)
        living = [worker for worker in self.swarm.workers if worker.alive]
        kept = []
        for span in self.spans:
            found = next((worker for worker in living if worker.span == span and worker not in kept), None)
            kept.append(found)
        for number, worker in enumerate(self.swarm.workers):
            if worker not in kept:
                self.swarm.kill(number)
        self.swarm.workers[:] = [worker for worker in kept if worker is not None]
        lost = [span for span, worker in zip(self.spans, kept, strict=True) if worker is None]
        if lost:
            self.swarm.start(lost)
        self.swarm.workers.sort(key=lambda worker: self.spans.index(worker.span))
        self._note()

    def _note(self) -> None:
        if not self.here:
            self.groups |= {worker.pid for worker in self.swarm.workers}

    def flow(self) -> Flow:
        if self.here:
            return self.swarm.flow()
        deadline = time.monotonic() + 60.0
        while True:  # workers that were started just now are found a moment later
            flow = kf.connect(self.folder, peers=self.swarm.peers)
            if len(flow.peers._view()) == len(self.spans) or time.monotonic() > deadline:  # type: ignore[attr-defined]
                return flow
            flow.close()
            time.sleep(0.5)

    def hits(self) -> dict[str, int]:
        """Requests that faults have befallen, by worker that lives."""
        workers = enumerate(self.swarm.workers)
        return {worker.peer: kf.faults.hits(self.swarm, number) for number, worker in workers if worker.alive}

    def close(self) -> None:
        self._note()
        self.swarm.close()
        self.reference.close()

    def left(self) -> list[str]:
        """Processes of the workers that run still."""
        listing = subprocess.run(["ps", "-e", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True)
        rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
        return [row[2] for row in rows if int(row[0]) in self.groups and not row[1].startswith("Z")]


def script_of(seed: int, spans: Sequence[Span], moments: int, faults: int | None) -> tuple[kf.faults.Script, bool]:
    """The script of a seed, and whether it leaves a route: four of five do. In every other one nobody dies for good:
    to start a worker takes longer than all the rest."""
    spares, deaths = seed % 5 != 4, 1 - seed % 2
    count = random.Random(seed).randint(2, 5) if faults is None else faults
    script = kf.faults.Script.random(seed, spans, faults=count, moments=moments, spares=spares, deaths=deaths)
    return script, spares


def run(stage: Stage, seed: int, faults: int | None = None) -> Outcome:
    """Run the job of a seed under the script of the seed."""
    stage.restore()
    name = list(JOBS)[seed % 3]
    work, moments = JOBS[name]
    script, spares = script_of(seed, stage.spans, moments, faults)
    expected = work(stage.reference, Draw(seed, stage.sizes), lambda moment: None, [])
    seconds = SECONDS if spares else SECONDS_WITHOUT_ROUTE
    replays: list[str] = []
    hits = stage.hits()
    since = began = time.monotonic()

    def before(moment: int) -> None:
        nonlocal since
        script.at(moment, stage.swarm)
        since = time.monotonic()

    with stage.flow() as flow:
        began = time.monotonic()
        try:
            with hang_after(moments * seconds):
                results = work(flow.options(timeout=seconds), Draw(seed, stage.sizes), before, replays)
            wrong = differences(results, expected)
            verdict = f"WRONG: {len(wrong)} values, first {wrong[0]}" if wrong else "same"
        except (NoRoute, DeadlineError) as error:
            verdict = _typed(error, spares, time.monotonic() - since - seconds)
        except (KwflowError, Hung) as error:
            verdict = f"WRONG: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  it is the verdict
            verdict = f"WRONG: untyped {type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    script.wait()
    kf.faults.heal(stage.swarm)
    struck = sum(count - hits.get(peer, 0) for peer, count in stage.hits().items())
    return Outcome(seed, name, script, verdict, seconds, struck, replays)


def _typed(error: KwflowError, spares: bool, late: float) -> str:
    if spares:
        return f"WRONG: {type(error).__name__} though there was a route: {error}"
    return "no route" if late < GRACE else f"WRONG: {type(error).__name__} came {late:.1f} s late"


class Hung(Exception):
    """Something waited beyond all deadlines."""


@contextmanager
def hang_after(seconds: float) -> Iterator[None]:
    """Raise Hung in the main thread when the block takes longer."""

    def ring(*_: Any) -> None:
        raise Hung(f"nothing came of it in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tiny_model(where: str, layers: int = LAYERS) -> Path:
    """A small random llama."""
    from transformers import AutoModelForCausalLM

    from tests.families.configs import config

    settings = config("llama")
    settings.num_hidden_layers = layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(where)
    return Path(where)


def main() -> int:
    """Run the scripts, print a line for each and a summary, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--scripts", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these seeds")
    parser.add_argument("--faults", type=int, help="faults in each script; 2 to 5 by default")
    parser.add_argument("--model", default="tiny", help="tiny, or a folder, a hub id, or smollm2-135m")
    parser.add_argument("--here", action="store_true", help="workers of this process")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = args.only or range(args.seed, args.seed + args.scripts)
    with tempfile.TemporaryDirectory(prefix="kwflow-faults-") as made:
        stage = Stage(tiny_model(made) if args.model == "tiny" else kf.model_path(args.model), here=args.here)
        try:
            outcomes = []
            for seed in seeds:
                outcomes.append(run(stage, seed, args.faults))
                print(outcomes[-1], flush=True)
        finally:
            stage.close()
    return summary(outcomes, stage.left())


def summary(outcomes: Sequence[Outcome], left: Sequence[str]) -> int:
    """Print what came of all, and return the exit status."""
    verdicts = Counter(outcome.verdict if outcome.good else "WRONG" for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())), end="; ")
    print(f"{sum(outcome.seconds for outcome in outcomes):.0f} s; {len(left)} processes left")
    for outcome in outcomes:
        if not outcome.good:
            print(f"seed {outcome.seed}: {outcome.verdict}")
    for process in left:
        print(f"left: {process}")
    return int(bool(left) or not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
