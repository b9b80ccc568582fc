"""What the README shows and claims: its code runs, what it names exists, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kwflow as kf

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.swarm
@pytest.mark.slow
def test_its_code_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, own_kwarg = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 12
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert "BITWISE: all bits are equal" in capsys.readouterr().out
    names["flow"].close()
    exec(compile(own_kwarg, "README.md", "exec"), names)
    assert names["out"].shape == (1, 1, 576)
    names["flow"].close()


def test_it_is_short() -> None:
    """What takes more room stands in docs/."""
    assert len(README.splitlines()) <= 250


def test_every_public_name_that_it_uses_exists() -> None:
    for name in set(re.findall(r"\bkf\.([A-Za-z_]+)", README)):
        assert hasattr(kf, name), name
