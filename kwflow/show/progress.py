"""A progress bar for what may take long. Imports nothing of kwflow, and tqdm when there is something to show."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

AFTER_SECONDS = 2.0

T = TypeVar("T")


def progress(items: Iterable[T], what: str, total: int, unit: str = "layer") -> Iterator[T]:
    """Go through items; if that takes longer than 2 s, with a bar on stderr, for people only.

    A terminal or a notebook shows it, a log file does not; TQDM_DISABLE in the environment turns it off.
    """
    began, shown = time.monotonic(), None
    try:
        for number, item in enumerate(items):
            if shown is None and time.monotonic() - began > AFTER_SECONDS and is_seen():
                shown = bar(what, total, unit, delay=0, initial=number)
            yield item
            if shown is not None:
                shown.update()
    finally:
        if shown is not None:
            shown.close()


def bar(what: str, total: int | None, unit: str = "layer", **more: Any) -> Any:
    """tqdm's bar, shown by its first ``update`` after 2 s, where somebody sees it; for what is waited for."""
    from tqdm.auto import tqdm

    options = {"delay": AFTER_SECONDS, "leave": False, "disable": not is_seen(), **more}
    return tqdm(desc=what, total=total, unit=unit, **options)


def is_seen() -> bool:
    """Whether somebody looks at a bar: in a terminal or a notebook, and it is not turned off."""
    hidden = bool(os.environ.get("TQDM_DISABLE"))  # which tqdm's bar for notebooks would not ask
    return not hidden and (sys.stderr.isatty() or "ipykernel" in sys.modules)
