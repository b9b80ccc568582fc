"""Settings for every test: one torch thread, no network, a hypothesis profile. Fixtures that several files share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach the network

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Programs, not modules: to collect doctests, pytest would run the one, and import half of Jupyter (5 s) for the other.
collect_ignore = ["doubles/echo_worker.py", "whole/execute_notebooks.py"]

# Runs are the same everywhere: a failing example is found again by running the test again. deadline: CPUs are shared.
hypothesis.settings.register_profile("kwflow", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kwflow"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes come first: with --dist worksteal one process has them all, one after the other."""
    items.sort(key=lambda item: item.get_closest_marker("swarm") is None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Bitwise tests compare with workers that run one thread (law 1)."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's folder; the first use on a machine converts it (half a minute)."""
    from kwflow.models.files.checkpoint import model_path

    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_swarm(smollm2: Path) -> Iterator[Any]:
    """The embedded model on two workers; started once, so no test may stop one."""
    from kwflow.swarm.local import local_swarm

    with local_swarm("smollm2-135m", workers=2) as swarm:
        yield swarm
