"""docs/compare.md: the points in its tables exist and do what they say, its code is code, its counts are right."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import KwargError
from tests.oracle.tiny import flow
from tests.whole.test_house import ROOT

PAGE = (ROOT / "docs" / "compare.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
NAMES = {"kf": kf, "flow": Flow}


def rows(title: str) -> list[list[str]]:
    """The cells of a section's tables, without their heads."""
    (section,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(title)]
    tables = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


HOOKS = [row for row in rows("TransformerLens") if len(row) == 4]
CALLS = [row[1] for title in ("TransformerLens", "nnsight", "pyvene") for row in rows(title) if len(row) == 2]
POINTS = [
    (name, edit, capture)
    for _, point, edit, capture in HOOKS
    if not point.startswith("none")
    for name in re.findall(r"`([\w.]+)`", point)
]


@pytest.mark.parametrize(("name", "edit", "capture"), POINTS, ids=[name for name, *_ in POINTS])
def test_a_point_is_there(name: str, edit: str, capture: str) -> None:
    model = flow("gpt2" if ".c_" in f".{name}" else "llama", (2, 4))
    x: dict[str, Any] = model.inputs(["w1 w2 w3"])
    layer = 0 if name == "embed" else 1
    assert capture == "yes" and edit in ("yes", "no")
    _, acts = model.capture({name: [layer]}, **x)
    assert acts[name, layer].shape[:2] == (1, 3)
    if edit == "yes":
        assert not (model(**x, edit=[kf.scale(0.5, layer, point=name)]) == model(**x)).all()
    else:
        with pytest.raises(KwargError):
            kf.scale(0.5, layer, point=name)


def test_every_other_hook_says_why_not() -> None:
    assert len(POINTS) >= 15
    for _, point, edit, capture in HOOKS:
        assert point.startswith("none, because ") == (edit == capture == "–"), point
    with pytest.raises(KwargError, match="head"):
        kf.scale(0.0, 1, point="hook_z")


def test_its_code_is_code_and_its_names_exist() -> None:
    pieces = [piece for cell in CALLS for piece in re.findall(r"`([^`]+)`", cell)]
    assert len(pieces) > 40
    for piece in pieces:
        if re.fullmatch(r"\w+=|[\w.]+\.(in|out)", piece):  # an argument's name, or a point's
            continue
        for node in ast.walk(ast.parse(piece.replace(", …", "").replace("…", "..."))):
            if isinstance(node, ast.Attribute):
                names, inner = [node.attr], node.value
                while isinstance(inner, ast.Attribute):
                    names, inner = [inner.attr, *names], inner.value
                if isinstance(inner, ast.Name) and inner.id in NAMES:
                    owner: Any = NAMES[inner.id]
                    for name in names:
                        assert hasattr(owner, name), piece
                        owner = getattr(owner, name)


def test_the_counts_are_the_recipes_and_have_sources() -> None:
    counts = {row[0]: row[1] for row in rows("Lines of code")}
    code = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(def .*?)```", RECIPES, re.MULTILINE | re.DOTALL))
    lines = {title: str(len([line for line in text.splitlines() if line.strip()])) for title, text in code.items()}
    assert counts == {title: lines[title] for title in counts} and counts.keys() == lines.keys()
    table, _, sources = PAGE.partition("## Lines of code")[2].partition("## Sources")
    used = re.findall(r"\[([tnp]\d)\]", table)
    assert set(used) == set(re.findall(r"\[([tnp]\d)\]", sources))
    for cell in (cell for row in rows("Lines of code") for cell in row[2:]):
        assert cell == "–" or re.fullmatch(r"\d+.*\[[tnp]\d\]", cell), cell
