"""Every kwarg, check by check, in families that differ; ``python -m benchmarks.kwargs`` runs them in all families."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import assert_bits, assert_close
from tests.row import Row
from tests.rows import ROWS
from tests.suite import BITWISE, CHECKS, COMPARISONS, DERIVATIVES, REFUSALS, applies

FAMILIES = ("llama", "gpt2", "bloom", "gemma2", "mixtral")  # rotary, learned, ALiBi; sliding windows; experts
CASES = [
    pytest.param(
        family, row, check, id=f"{family}-{row.name}-{check}", marks=() if family == "llama" else pytest.mark.slow
    )
    for family in FAMILIES
    for row in ROWS
    for check in CHECKS
    if applies(row, family, check)
]


@pytest.mark.parametrize(("family", "row", "check"), CASES)
def test_a_kwarg(family: str, row: Row, check: str) -> None:
    if check in REFUSALS:
        return REFUSALS[check](row, family)
    found = COMPARISONS[check](row, family, torch.float64 if check in DERIVATIVES else torch.float32)
    assert found
    for what, ours, expected in found:
        (assert_bits if row.exact and check in BITWISE else assert_close)(ours, expected, what)
