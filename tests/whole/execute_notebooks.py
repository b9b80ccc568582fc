"""Execute every notebook of a folder from a fresh kernel, in order; exit non-zero at the first error in each.

    python tests/whole/execute_notebooks.py notebooks [NAME ...]

Nothing is written back: committed outputs come from one deliberate run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_SECONDS = 300


def execute(path: Path) -> str | None:
    """Run one notebook in its folder; return what went wrong, or None."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=where)
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return str(error)
    return None


def main(folder: str, *names: str) -> int:
    """Execute the notebooks whose file name contains one of ``names`` (all, if none are given)."""
    paths = [path for path in sorted(Path(folder).glob("*.ipynb")) if not names or any(n in path.name for n in names)]
    failed = 0
    for path in paths:
        print(f"{path} ...", end=" ", flush=True)
        start = time.monotonic()
        wrong = execute(path)
        print(f"{'FAILED' if wrong else 'ok'} in {time.monotonic() - start:.0f} s", flush=True)
        if wrong:
            failed += 1
            print(wrong, file=sys.stderr, flush=True)
    print(f"notebooks: {len(paths) - failed} passed, {failed} failed")
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
