"""Which families a test takes: one in the quick set, the others in the slow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.tiny import FAMILIES


def families(names: Sequence[str], quick: Sequence[str] = ("llama",)) -> Any:
    """Parametrize ``family``; those that are not ``quick`` are marked slow."""
    return pytest.mark.parametrize(
        "family", [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]
    )


every_family = families(FAMILIES)
