"""What tests of real processes wait for: a condition, and the end of a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], seconds: float = 20.0) -> float:
    """Wait for a condition; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the condition did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - began


def lives(process: psutil.Process) -> bool:
    """Whether a process runs, is stopped, or is ending.

    A zombie is gone once its threads are: until then they hold its files, and its ports listen.
    """
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def living(*, group: int | None = None, pid: int | None = None) -> list[int]:
    """The processes of a group, or the one process, that live."""

    def asked(process: psutil.Process) -> bool:
        try:
            return process.pid == pid or os.getpgid(process.pid) == group
        except ProcessLookupError:
            return False

    return [process.pid for process in psutil.process_iter() if asked(process) and lives(process)]
