"""A Markdown table that a command measures and a page of ``docs/`` holds, between two comments that name the command.

    <!-- python -m benchmarks.kwargs --write -->
    | kwarg | value, fp32 | …
    <!-- end -->

A run may be of some rows and columns only: the page keeps the others, so that a new row costs its own time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
UNKNOWN = "?"  # a cell that nobody has measured yet
Cells = Mapping[str, Mapping[str, str]]  # by row, which is named in the first column, and by heading


@dataclass(frozen=True)
class Table:
    """``command``: the module whose ``--write`` makes the table in ``docs/{page}``."""

    page: str
    command: str

    @property
    def path(self) -> Path:
        return DOCS / self.page

    def read(self) -> dict[str, dict[str, str]]:
        """The table that the page holds, by row and heading."""
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in self._parts()[1].strip().splitlines()]
        if not lines:
            return {}
        headings = lines[0]
        return {line[0]: dict(zip(headings, line, strict=True)) for line in lines[2:]}

    def write(self, headings: Sequence[str], rows: Iterable[str], measured: Cells) -> None:
        """Put what was measured into the page's table; other cells of these rows and headings stay as they are."""
        held = self.read()
        table = {name: {**held.get(name, {}), **measured.get(name, {})} for name in rows}
        before, _, after = self._parts()
        self.path.write_text(f"{before}\n{render(headings, table)}\n{after}")

    def _parts(self) -> tuple[str, str, str]:
        opening = f"<!-- python -m {self.command} --write -->"
        found = re.fullmatch(rf"(.*{re.escape(opening)})(.*)(<!-- end -->.*)", self.path.read_text(), re.DOTALL)
        if found is None:
            raise SystemExit(f"{self.path} has no place for the table: {opening} and <!-- end -->")
        before, table, after = found.groups()
        return before, table, after


def render(headings: Sequence[str], table: Cells) -> str:
    """The table as Markdown; its first column is the rows' names."""
    first, *others = headings
    lines = [list(headings), *([name, *(cells.get(h, UNKNOWN) for h in others)] for name, cells in table.items())]
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(headings) + "|", *body])
