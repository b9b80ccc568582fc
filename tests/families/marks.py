"""What a test takes in the quick set, and what in the slow one only: where several go the same way through the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.oracle.tiny import FAMILIES


def quickly(quick: Sequence[str], every: Iterable[str]) -> list[Any]:
    """The values of a parameter; those that are not ``quick`` are marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in every]


def families(names: Sequence[str], quick: Sequence[str] = ("llama",)) -> Any:
    """Parametrize ``family``."""
    return pytest.mark.parametrize("family", quickly(quick, names))


every_family = families(FAMILIES)
