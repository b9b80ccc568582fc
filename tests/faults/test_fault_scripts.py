"""Jobs under seeded fault scripts come out as undisturbed ones, or say in time that no route is left.

``python -m benchmarks.faults`` runs more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.faults import Stage, run, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(str(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Stage]:
    stage = Stage(folder, here=True)
    yield stage
    stage.close()


QUICK = (1, 3, 4)  # the others wait for silent workers, some seconds each


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.rest] * (n not in QUICK)) for n in range(10)])
def test_in_this_process(here: Stage, seed: int) -> None:
    outcome = run(here, seed)
    assert outcome.good, f"{outcome}\n{outcome.verdict}"


@pytest.mark.swarm
@pytest.mark.rest
@pytest.mark.timeout(900)
def test_twenty_on_workers_of_their_own() -> None:
    """By the command, twice side by side: most of a script is waiting for somebody who is silent."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def ten(seed: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.faults", "--scripts", "10", "--seed", str(seed)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as both:
        for ran in both.map(ten, (0, 10)):
            print(ran.stdout)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            assert ran.stdout.count("\n") >= 11 and "0 processes left" in ran.stdout
