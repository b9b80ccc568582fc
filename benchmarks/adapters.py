"""``python -m benchmarks.adapters``: every type of PEFT's, and what kwflow does with it, as a Markdown table.

Made of ``kwflow.research.peft_types``; nothing is measured. ``--write`` puts it into ``docs/adapters.md``.
"""

from __future__ import annotations

import argparse

from benchmarks.page import Table, render
from kwflow.research.peft_types import CARRIED, REFUSED

HEADINGS = ["type", "carried", "how, or why not"]
TABLE = Table("adapters.md", "benchmarks.adapters")


def rows() -> dict[str, dict[str, str]]:
    """A row for every type, those that are carried first."""
    carried = {name: (f"`{row.kwarg}`" if row.kwarg else "columns", row.how) for name, row in CARRIED.items()}
    refused = {name: ("no", why) for name, why in sorted(REFUSED.items())}
    return {name: dict(zip(HEADINGS[1:], cells, strict=True)) for name, cells in {**carried, **refused}.items()}


def main() -> None:
    """Print the table or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into docs/{TABLE.page}")
    if parser.parse_args().write:
        TABLE.write(HEADINGS, rows(), rows())
    else:
        print(render(HEADINGS, rows()))


if __name__ == "__main__":
    main()
