"""``python -m benchmarks``: workers against the same Hugging Face model, interleaved; a Markdown table on stdout.

Progress goes to stderr. ``--quick`` shows in a few minutes that everything runs; its numbers are rough.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings

# NOTE [passive] before torch is imported, and for the workers too: threads of OpenMP that spin while they wait make two
# threads 4 to 15 times slower than one as soon as anything else runs on the cores (measured on 2 cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.measure import FULL, QUICK, Setting, measure
from benchmarks.report import report
from kwflow.errors import KwflowError


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="kwflow beside the local model.")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a hub id, or smollm2-135m")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads of each process")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="how many workers share the layers")
    parser.add_argument("--only", choices=["decode", "forward", "backward"], nargs="+", help="only these")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sizes = QUICK if args.quick else FULL
    only = args.only or ["decode", "forward", "backward"]
    setting = Setting(args.model, tuple(args.threads), tuple(args.workers), tuple(only), sizes)
    try:
        print(report(setting, measure(setting, lambda line: print(line, file=sys.stderr, flush=True))))
    except KwflowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
