"""The pages: what they name exists, their code runs, their tables have every row, their picture is the table's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from setuptools import PEP420PackageFinder

import kwflow as kf
from benchmarks import adapters, families, kwargs, page
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.builtin import BUILTIN, schema
from kwflow.kwargs.kwarg import Features, LayerCall
from kwflow.kwargs.points import EDITED
from kwflow.models.families import FAMILIES
from tests.families.configs import CONFIGS
from tests.kwargs.rows import ROWS
from tests.whole.packages import PICTURE, picture
from tests.whole.test_house import MAY, MODULES, ROOT

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
KWARGS = kwargs.TABLE.path.read_text()
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(page.DOCS.glob("*.md"))
EXAMPLE = "kwflow/kwargs/mlp_scale.py"  # which is there to be added


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text()
    for name in set(re.findall(r"`((?:kwflow|tests|docs|papers|benchmarks|notebooks|\.ci)/[\w./]*)`", text)) - {
        EXAMPLE
    }:
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (path.parent / link).exists(), link
    for module in re.findall(r"python -m ((?:benchmarks|tests)(?:\.\w+)+)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for name in re.findall(r"`kf\.(\w+)", text):
        assert hasattr(kf, name), name
    wide = [line for line in text.splitlines() if len(line) > 122 and "|" not in line]
    assert not wide


@pytest.mark.parametrize(("name", "lines"), [("ARCHITECTURE.md", 130), ("CONTRIBUTING.md", 65)])
def test_it_is_of_two_pages_or_one(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= lines


def test_the_picture_is_drawn_from_the_table_of_arrows() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in ARCHITECTURE
    assert PICTURE.read_text() == picture(), "packages or their docstrings changed: python -m tests.whole.packages"


def test_the_kwarg_that_it_adds_as_an_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", ARCHITECTURE, re.DOTALL)
    made: dict[str, Any] = {}
    exec(compile(code, EXAMPLE, "exec"), made)
    assert f"`{EXAMPLE}`" in ARCHITECTURE
    assert made["spec"](Features(("resid",))) is None
    assert made["spec"](Features(("mlp",))).signatures == ("[layer] hidden",)
    (acts,) = [made["at_points"](Axed(torch.tensor([2.0, 3.0]), ("hidden",)), LayerCall(0, (1, 1), {}, None))]
    assert acts["mlp"](torch.ones(1, 1, 2, dtype=torch.float64)).tolist() == [[[2.0, 3.0]]]


def test_every_builtin_kwarg_stands_there_with_its_axes() -> None:
    specs = schema({}, positions=True, refused={}, points=EDITED, projections={"any": (1, 1)}).kwargs
    assert specs.keys() == BUILTIN.keys()
    for name, spec in specs.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", KWARGS, re.MULTILINE)
        assert all(f'"{signature}"' in row for signature in spec.signatures), row


def test_the_table_of_kwargs_has_every_row_and_check() -> None:
    """As ``python -m benchmarks.kwargs --write`` writes it."""
    table = kwargs.TABLE.read()
    assert list(table) == [row.name for row in ROWS]
    assert page.render(kwargs.headings(), table) in KWARGS
    assert not {"", page.UNKNOWN} & {cell for cells in table.values() for cell in cells.values()}


def test_the_table_of_families_has_every_row_and_check() -> None:
    table = families.TABLE.read()
    assert list(table) == sorted(CONFIGS) and FAMILIES.keys() <= table.keys()
    assert page.render(families.HEADINGS, table) in families.TABLE.path.read_text()
    for name, cells in table.items():
        assert cells["positions"] == families.positions(name)
        empty = {heading for heading, cell in cells.items() if not cell}
        assert empty == (set() if name in families.BFLOAT16 else {"forward, bf16", "gradient, bf16"})
        assert page.UNKNOWN not in cells.values()


def test_the_table_of_adapters_is_made_of_the_codes() -> None:
    """As ``python -m benchmarks.adapters --write`` writes it."""
    assert page.render(adapters.HEADINGS, adapters.rows()) in adapters.TABLE.path.read_text()


def test_a_run_of_some_rows_and_columns_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    table = page.Table("some.md", "benchmarks.some")
    table.path.write_text("# Some\n\n<!-- python -m benchmarks.some --write -->\n<!-- end -->\n\nBehind.\n")
    table.write(["who", "a", "b"], ["x", "y"], {"x": {"a": "1", "b": "2"}})
    table.write(["who", "b", "c"], ["y", "x"], {"y": {"c": "3"}})
    assert table.read() == {"y": {"who": "y", "b": "?", "c": "3"}, "x": {"who": "x", "b": "2", "c": "?"}}
    assert table.path.read_text().startswith("# Some\n\n<!--") and table.path.read_text().endswith("-->\n\nBehind.\n")
    table.path.write_text("# Some\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        table.write(["who"], [], {})


def test_pages_are_no_part_of_the_package() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.partition(".")[0] for name in PEP420PackageFinder.find(str(ROOT), **find)} == {"kwflow"}


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_a_module_speaks_of_exist(module: str) -> None:
    """``kwflow.client.flow``, or from the package on: ``wire.channel.Cut``."""
    for name in re.findall(rf"``((?:kwflow|{'|'.join(MAY)})(?:\.\w+)+)``", MODULES[module].read_text()):
        full = name if name.startswith("kwflow.") else f"kwflow.{name}"
        owner, _, last = full.rpartition(".")
        assert full in MODULES or (owner in MODULES and last in MODULES[owner].read_text()), f"{module}: {name}"
