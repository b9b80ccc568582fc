"""The peak resident memory of a process, from ``/proc`` (Linux; elsewhere unknown). Shared pages count."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def reset_peak(pid: int) -> None:
    """Start the peak anew at what the process holds now."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(pid: int) -> int | None:
    """Bytes at most since the last reset; None where the system does not say."""
    try:
        said = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", said, re.M)
    return int(found[1]) * 1024 if found else None
