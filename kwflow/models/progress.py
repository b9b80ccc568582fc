"""A progress bar for what may take long. Imports nothing of kwflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

AFTER_SECONDS = 2.0

T = TypeVar("T")


def progress(items: Iterable[T], what: str, total: int, unit: str = "layer") -> Iterator[T]:
    """Go through items; if that takes longer than 2 s, with a bar on stderr, for people only.

    A terminal or a notebook shows it, a log file does not; TQDM_DISABLE in the environment turns it off.
    """
    from tqdm.auto import tqdm

    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    hidden = not seen or bool(os.environ.get("TQDM_DISABLE"))  # which tqdm's bar for notebooks would not ask
    return iter(tqdm(items, desc=what, total=total, delay=AFTER_SECONDS, leave=False, unit=unit, disable=hidden))
