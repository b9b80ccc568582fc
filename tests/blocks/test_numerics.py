"""What the last bits depend on, beside the model: said by every worker, compared by exact_match and by replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kwflow as kf
from kwflow.blocks.numerics import INSTRUCTIONS, VARIABLES, kernels
from kwflow.client.retry import differs
from kwflow.research.reference import as_reference
from tests.oracle import tiny
from tests.oracle.tiny import random


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_kernels_name_the_processor_and_the_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, has = kernels(), torch.cpu.get_capabilities()
    assert set(plain.split()) >= {name for name in INSTRUCTIONS if has.get(name) is True}
    for number, name in enumerate(VARIABLES):
        monkeypatch.setenv(name, "AVX2")
        assert kernels() == " ".join([plain, *(f"{one}=AVX2" for one in VARIABLES[: number + 1])])
    monkeypatch.setenv(VARIABLES[0], "")
    assert VARIABLES[0] not in kernels(), "empty is as not set"


def test_workers_with_other_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the verdict, and where one takes another's place; of one that does not know the word it is said."""
    hidden = random(1, 2, tiny.HIDDEN)
    flow, local = tiny.make_flow("llama"), as_reference(tiny.huggingface("llama"))
    (hop,) = flow.plan(hidden, {}).route
    before = [flow.plan(hidden, {})]
    assert not kf.verify.differences(before, local, hidden)
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    (told,) = kf.verify.differences(before, local, hidden)
    assert told.startswith("kernels ") and told.endswith("MKL_ENABLE_INSTRUCTIONS=AVX2 here")
    (other,) = tiny.make_flow("llama").plan(hidden, {}).route
    assert "kernels" in str(differs(other, hop)) and "=AVX2" in str(differs(other, hop))
    older = replace(hop, hello=replace(hop.hello, fingerprint=replace(hop.hello.fingerprint, kernels=None)))
    assert differs(older, hop) == "kernels not announced" and differs(hop, older) is None
