"""``python -m benchmarks.families``: every family against transformers on small random models, a Markdown table.

The checks are those of ``tests/families/test_every_family.py``. A cell is "bitwise", or the largest gap relative to
the largest magnitude. ``--only NAME …`` runs some rows; ``--write`` puts them into the table of ``docs/families.md``.
Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from benchmarks.page import Table, render
from kwflow.errors import KwflowError
from kwflow.models.families import family_of
from tests.families.configs import CONFIGS, config
from tests.families.table import CHECKS, NOT_IN_FLOAT64, Compared, higher_order

BFLOAT16 = ("llama", "gpt2", "gemma2", "qwen2")


def cell(check: Callable[[], Compared]) -> str:
    """What a check found, in a word."""
    try:
        found = check()
    except KwflowError as error:
        return f"refused: {str(error).splitlines()[0][:120]}"
    if all(torch.equal(ours, expected) for _, ours, expected in found):
        return "bitwise"
    gaps = [(a.double() - b.double()).abs().max() / b.double().abs().max() for _, a, b in found]
    return f"{max(gaps).item():.0e}"


def row(name: str) -> Iterator[str]:
    """The cells of one line behind its name, in the order of HEADINGS."""
    for check in CHECKS.values():
        yield cell(lambda check=check: check(name, torch.float32))
    for check in (CHECKS["forward"], CHECKS["gradient"]):
        yield cell(lambda check=check: check(name, torch.bfloat16)) if name in BFLOAT16 else ""
    yield cell(lambda: higher_order(name)) if name not in NOT_IN_FLOAT64 else "not in transformers"
    yield positions(name)


def positions(name: str) -> str:
    """Where the family's positions act."""
    family = family_of(config(name))
    if not family.positions:
        return "rotary"
    return "learned" if family.learned else "ALiBi"


HEADINGS = ["family", *CHECKS, "forward, bf16", "gradient, bf16", "higher order, fp64", "positions"]
TABLE = Table("families.md", "benchmarks.families")


def main() -> int:
    """Run the checks row by row, print or write them, and return the exit status: 1 if a row was refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS), metavar="NAME", help="only these rows")
    parser.add_argument("--write", action="store_true", help=f"into docs/{TABLE.page}, which keeps the other rows")
    args = parser.parse_args()
    names = args.only or sorted(CONFIGS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for number, name in enumerate(names, 1):
        print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
        found[name] = dict(zip(HEADINGS[1:], row(name), strict=True))
        if args.write:  # a row at a time: the whole takes long
            TABLE.write(HEADINGS, sorted(CONFIGS), found)
    if not args.write:
        print(render(HEADINGS, found))
    return int(any(text.startswith("refused") for cells in found.values() for text in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
