"""Every kwarg, check by check, in families that differ; ``python -m benchmarks.kwargs`` runs them in all families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kwflow.models.spans import load_span
from tests.kwargs.row import Row
from tests.kwargs.rows import ROWS
from tests.kwargs.suite import BITWISE, CHECKS, COMPARISONS, DERIVATIVES, OTHERWISE_CUT, REFUSALS, applies, schema_of
from tests.oracle import assert_bits, assert_close, assert_near
from tests.oracle.tiny import folder, span

FAMILIES = ("llama", "gpt2", "bloom", "mixtral")  # rotary, learned, ALiBi; sliding windows and experts
ADDS_IN_PLACE = [("capture", "grad"), ("edit", "grad")]  # falcon, to what its feed-forward gives
FURTHER = ("vmap", "jvp", "double backward")  # of every kwarg in llama; elsewhere, and quickly, of one at each place
SLOW = [("gpt2", "value"), ("gpt2", "session"), ("bloom", "value"), ("bloom", "grad")]
PLACES = ("prompts", "edit: put", "lora", "prefix_kv")


def of_few(row: Row, check: str) -> bool:
    return check not in FURTHER or row.name in PLACES


def level(family: str, row: Row, check: str) -> Any:
    if family == "llama" and of_few(row, check):
        return ()
    return pytest.mark.slow if (family, check) in SLOW or family == "llama" else pytest.mark.rest


CASES = [
    pytest.param(
        *(family, row, check),
        id=f"{family}-{row.name}-{check}",
        marks=level(family, row, check),
    )
    for family in (*FAMILIES, "falcon")
    for row in ROWS
    for check in CHECKS
    if applies(row, family, check)
    if family == "llama" or of_few(row, check)
    if (family != "falcon" or (row.kwarg, check) in ADDS_IN_PLACE)
]


@pytest.fixture(scope="module", autouse=True)
def base_weights_stay() -> Iterator[None]:
    """After every kwarg, derivative and mistake the workers' weights are those of the files, to the bit."""
    yield
    for start, stop in ((0, 2), (2, 4)):
        served, fresh = span("llama", start, stop), load_span(folder("llama"), start, stop)
        for own, expected in zip(served.params, fresh.params, strict=True):
            assert own.keys() == expected.keys()
            for name, tensor in own.items():
                assert_bits(tensor, expected[name], name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_schema_that_decides_is_the_workers(family: str) -> None:
    assert schema_of(family).kwargs == span(family, 0, 2).schema.kwargs
    assert schema_of(family).refused == span(family, 0, 2).schema.refused


@pytest.mark.parametrize(("family", "row", "check"), CASES)
def test_a_kwarg(family: str, row: Row, check: str) -> None:
    if check in REFUSALS:
        return REFUSALS[check](row, family)
    found = COMPARISONS[check](row, family, torch.float64 if check in DERIVATIVES else torch.float32)
    assert found
    close = assert_near if check in OTHERWISE_CUT else assert_close
    for what, ours, expected in found:
        (assert_bits if row.exact and check in BITWISE else close)(ours, expected, what)
