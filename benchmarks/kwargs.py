"""``python -m benchmarks.kwargs``: every kwarg and check, in small random models of every family; a Markdown table.

The checks are those of ``tests/kwargs/test_every_kwarg.py``. A cell is the worst of the families: "bitwise", or the
largest gap relative to the largest magnitude; "refused" where the wrong call was; "–" where the check does not apply.
``--only NAME …`` runs some families. Progress, and what each family refuses, goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator

import torch

from benchmarks.families import BFLOAT16
from tests.families.configs import CONFIGS
from tests.families.table import NOT_IN_FLOAT64, Compared
from tests.kwargs.row import Row
from tests.kwargs.rows import ROWS
from tests.kwargs.suite import COMPARISONS, DERIVATIVES, REFUSALS, applies, refusing

COLUMNS = [
    ("value", "fp32"),
    ("value", "bf16"),
    *((check, "fp64" if check in DERIVATIVES else "fp32") for check in COMPARISONS if check != "value"),
    *((check, "") for check in REFUSALS),
]
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


def cells(row: Row, families: list[str]) -> Iterator[str]:
    for check, dtype in COLUMNS:
        print(f"{row.name}: {check} {dtype}", file=sys.stderr, flush=True)
        yield cell(row, families, check, dtype)


def headings() -> list[str]:
    return ["kwarg", *(f"{check}, {dtype}" if dtype else check for check, dtype in COLUMNS), "families"]


def main() -> None:
    """Run the checks row by row and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kwargs", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS), metavar="NAME", help="only these families")
    families = parser.parse_args().only or list(CONFIGS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| " + " | ".join(headings()) + " |")
    print("|---" * len(headings()) + "|")
    for row in ROWS:
        taking = [family for family in families if not refusing(row, family)]
        for family in sorted(set(families) - set(taking)):
            print(f"{family} takes no {row.name}: {refusing(row, family)}", file=sys.stderr)
        print(
            f"| {row.name} | " + " | ".join(cells(row, taking)) + f" | {len(taking)} of {len(families)} |", flush=True
        )


if __name__ == "__main__":
    main()
