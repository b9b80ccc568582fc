"""What a notebook shows of an error of kwflow: the caller's own lines, the function they called, and the message, last.

IPython asks an exception for it; ``%debug`` and everything outside notebooks still have every frame. Imports nothing of
kwflow.
"""

from __future__ import annotations

import copy
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

PACKAGE = os.path.join(Path(__file__).parents[1], "")
PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = (PACKAGE, *(os.path.join(path, "") for path in PATHS))


def lines(error: BaseException) -> list[str]:
    """The traceback for IPython, without the frames below the function of kwflow that the caller's code came to."""
    import IPython

    shell = IPython.get_ipython()
    if shell is None:
        return traceback.format_exception(error)
    frames = list(_frames(error.__traceback__))
    files = [tb.tb_frame.f_code.co_filename for tb in frames]
    callers = [number for number, file in enumerate(files) if not file.startswith(LIBRARIES)]
    last = callers[-1] if callers else len(files)
    called = [
        frame for frame, file in zip(frames[last + 1 :], files[last + 1 :], strict=True) if file.startswith(PACKAGE)
    ]
    frames = [*frames[: last + 1], called[0]] if called else frames
    kept = None
    for tb in reversed(frames):
        kept = TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    alone = copy.copy(error)  # without the errors that it came from, of which its message says what matters
    shown = shell.InteractiveTB.structured_traceback(type(error), alone, kept)
    if out := len(files) - len(frames):
        shown.insert(-1, f"[{out} frames left out; %debug has them]\n")
    return shown


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
