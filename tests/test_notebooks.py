"""Hygiene of the committed notebooks; `make check-notebooks` executes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean_and_comes_from_one_run(path: Path) -> None:
    assert re.fullmatch(r"\d\d_[a-z]+(_[a-z]+)+", path.stem)
    notebook: Any = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in code)
    assert notebook.cells[0].cell_type == "markdown" and "**Question.**" in notebook.cells[0].source
    assert re.search(r"\bminute", notebook.cells[0].source), "the first cell says how long it takes"
    assert len(notebook.cells) <= 35 and len(text.splitlines()) <= 160 and "class " not in text
    assert "assert " in text and "pip install" not in text
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "outputs of one clean run"
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    said = str(notebook)
    assert not re.search(r"/home/|/root/|/tmp/|/work/|0x[0-9a-f]{8}|127\.0\.0\.1", said)
    assert path.stat().st_size < 500_000


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2
