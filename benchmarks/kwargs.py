"""``python -m benchmarks.kwargs``: every kwarg and check, in small random models of every family; a Markdown table.

The checks are those of ``tests/kwargs/test_every_kwarg.py``. A cell is the worst of the families: "bitwise", or the
largest gap relative to the largest magnitude; "refused" where the wrong call was; "–" where the check does not apply.
``--write`` puts them into the table of ``docs/kwargs.md``; ``--kwargs ROW …`` and ``--checks CHECK …`` measure some,
and the page keeps the others. ``--only NAME …`` runs some families. Progress, and what these refuse, goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch

from benchmarks.families import BFLOAT16
from benchmarks.page import Table, render
from tests.families.configs import CONFIGS
from tests.families.table import NOT_IN_FLOAT64, Compared
from tests.kwargs.row import Row
from tests.kwargs.rows import ROWS
from tests.kwargs.suite import CHECKS, COMPARISONS, DERIVATIVES, REFUSALS, applies, refusing

COLUMNS = [
    ("value", "fp32"),
    ("value", "bf16"),
    *((check, "fp64" if check in DERIVATIVES else "fp32") for check in COMPARISONS if check != "value"),
    *((check, "") for check in REFUSALS),
]
FAMILIES = "families"  # how many of them take the kwarg
TABLE = Table("kwargs.md", "benchmarks.kwargs")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def has(row: Row, family: str, check: str, dtype: str) -> bool:
    """Whether a family has the cell."""
    outside = (dtype == "bf16" and family not in BFLOAT16) or (dtype == "fp64" and family in NOT_IN_FLOAT64)
    return not outside and applies(row, family, check)


def gap(found: Compared) -> float:
    """The largest gap relative to the largest magnitude; 0.0 is bitwise."""
    if all(torch.equal(ours, expected) for _, ours, expected in found):
        return 0.0
    gaps = [(a.double() - b.double()).abs().max() / b.double().abs().max() for _, a, b in found]
    return torch.stack(gaps).max().item()  # NaN if one is


def cell(row: Row, families: list[str], check: str, dtype: str) -> str:
    """The worst of the families, in a word."""
    mine = [family for family in families if has(row, family, check, dtype)]
    if not mine:
        return "–"
    if check in REFUSALS:
        for family in mine:
            REFUSALS[check](row, family)
        return "refused"
    worst = torch.tensor([gap(COMPARISONS[check](row, family, DTYPES[dtype])) for family in mine]).max().item()
    return f"{worst:.0e}" if worst else "bitwise"


def headings() -> list[str]:
    return ["kwarg", *map(heading, *zip(*COLUMNS, strict=True)), FAMILIES]


def heading(check: str, dtype: str) -> str:
    return f"{check}, {dtype}" if dtype else check


def measured(row: Row, families: list[str], columns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """A row's cells by their headings."""
    taking = [family for family in families if not refusing(row, family)]
    for family in sorted(set(families) - set(taking)):
        print(f"{family} takes no {row.name}: {refusing(row, family)}", file=sys.stderr)
    for check, dtype in columns:
        print(f"{row.name}: {check} {dtype}", file=sys.stderr, flush=True)
        yield heading(check, dtype), cell(row, taking, check, dtype)
    yield FAMILIES, f"{len(taking)} of {len(families)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kwargs", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS), metavar="NAME", help="only these families")
    parser.add_argument("--kwargs", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="only these")
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), metavar="CHECK", help="only these")
    parser.add_argument("--write", action="store_true", help=f"into docs/{TABLE.page}, which keeps the other cells")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write: the page's cells are the worst of all families, not of --only some")
    return args


def main() -> None:
    """Run the checks row by row and print them, or write them into the page."""
    args = arguments()
    families = args.only or list(CONFIGS)
    columns = [column for column in COLUMNS if column[0] in (args.checks or CHECKS)]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for row in ROWS:
        if row.name in (args.kwargs or (row.name,)):
            found[row.name] = dict(measured(row, families, columns))
            if args.write:  # a row at a time: the whole takes long
                TABLE.write(headings(), [row.name for row in ROWS], found)
    if not args.write:
        print(render(["kwarg", *map(heading, *zip(*columns, strict=True)), FAMILIES], found))


if __name__ == "__main__":
    main()
