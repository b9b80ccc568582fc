"""What the README shows and claims: its first lines of code run, its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kwflow as kf
from benchmarks.kwargs import headings
from kwflow.kwargs.builtin import schema
from kwflow.models.families import FAMILIES
from tests.kwargs.rows import ROWS

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.swarm
@pytest.mark.slow
def test_the_first_lines_of_code_run(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "BITWISE: all bits are equal" in capsys.readouterr().out
    names["flow"].close()


def test_every_builtin_kwarg_and_family_stands_there() -> None:
    for name in schema({}, positions=True, refused={}).kwargs:
        assert f"| `{name}` |" in README
    for family in FAMILIES:
        assert re.search(rf"\| {family}\b", README), family


def test_the_table_of_kwargs_has_every_row_and_check() -> None:
    """As ``python -m benchmarks.kwargs`` prints it."""
    table = README.split("| " + " | ".join(headings()) + " |\n")[1].split("\n\n")[0]
    lines = [line.split(" | ") for line in table.splitlines()[1:]]
    assert [line[0].removeprefix("| ") for line in lines] == [row.name for row in ROWS]
    assert all(len(line) == len(headings()) and "" not in line for line in lines)


def test_every_public_name_that_it_uses_exists() -> None:
    for name in set(re.findall(r"\bkf\.([A-Za-z_]+)", README)):
        assert hasattr(kf, name), name
