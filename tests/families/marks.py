"""What a test takes in which set, where several values of a parameter go the same way through the code.

`make quick` takes those in ``quick``, `make test` those of a few families too (slow), `make test-rest` all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.oracle.tiny import FAMILIES


def marks(name: str, quick: Collection[str], few: Collection[str] = FAMILIES) -> Any:
    """The marks of one value; ``few``: those of `make test`."""
    return () if name in quick else pytest.mark.slow if name in few else pytest.mark.rest


def quickly(quick: Sequence[str], every: Iterable[str]) -> list[Any]:
    """The values of a parameter."""
    return [pytest.param(value, marks=marks(value, quick)) for value in every]


def families(names: Sequence[str], quick: Sequence[str] = ("llama",)) -> Any:
    """Parametrize ``family``."""
    return pytest.mark.parametrize("family", quickly(quick, names))


every_family = families(FAMILIES)
