"""Jobs under seeded fault scripts come out as undisturbed ones, or say in time that no route is left.

``python -m benchmarks.faults`` runs more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import Stage, run, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(str(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Stage]:
    stage = Stage(folder, here=True)
    yield stage
    stage.close()


QUICK = (1, 3, 4)  # the others wait for silent workers, some seconds each


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in range(10)])
def test_in_this_process(here: Stage, seed: int) -> None:
    outcome = run(here, seed)
    assert outcome.good, f"{outcome}\n{outcome.verdict}"


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_on_workers_of_their_own(folder: Path) -> None:
    stage = Stage(folder, here=False)
    try:
        outcomes = [run(stage, seed) for seed in range(20)]
    finally:
        stage.close()
    assert all(outcome.good for outcome in outcomes), "\n".join(map(str, outcomes))
    assert not stage.left()
