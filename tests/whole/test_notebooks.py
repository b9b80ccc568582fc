"""Hygiene of the committed notebooks; `make check-notebooks` executes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.whole.pictures import SHOWN, file, picture

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean_and_comes_from_one_run(path: Path) -> None:
    assert re.fullmatch(r"\d\d_[a-z]+(_[a-z]+)+", path.stem)
    said = path.read_text()
    cells: list[dict[str, Any]] = json.loads(said)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in code)
    first = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and "**Question.**" in first
    assert re.search(r"\bminute", first), "the first cell says how long it takes"
    assert len(cells) <= 35 and len(text.splitlines()) <= 160 and "class " not in text
    assert "assert " in text and "pip install" not in text
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "outputs of one clean run"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    # a viewer that has no kernel says of a widget that it has no model; panels have a page for it
    assert "widgets" not in json.loads(said)["metadata"] and "widget-view" not in said
    assert not re.search(r"/home/|/root/|/tmp/|/work/|0x[0-9a-f]{8}|127\.0\.0\.1", said)
    assert path.stat().st_size < 500_000


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("name", SHOWN)
def test_the_readme_shows_pictures_of_the_notebooks(name: str) -> None:
    assert file(name).read_bytes() == picture(name), "the notebook ran again: python tests/whole/pictures.py"
    assert f"](notebooks/pictures/{name}.png)" in (FOLDER.parent / "README.md").read_text()
