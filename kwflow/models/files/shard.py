"""One safetensors file on a disk or elsewhere: its header, checked before anything is believed, and parts of its bytes.

Imports errors only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kwflow.errors import ModelError

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
PREFETCH_BYTES = 128 << 10  # more at once is cut off without a word

ByteRange = tuple[int, int]  # [start, stop) in a file


class Entry(NamedTuple):
    """Where a tensor lies."""

    dtype: str  # as safetensors writes it: "F32", "BF16", …
    shape: tuple[int, ...]
    start: int  # byte offsets in the file
    stop: int


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_parts(path: Path, spans: Sequence[ByteRange]) -> list[bytes]:
    """Read parts of a file and, where the system can be told, nothing around them."""
    try:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return [os.pread(file.fileno(), stop - start, start) for start, stop in spans]
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def prefetch(path: Path, spans: Sequence[ByteRange]) -> None:
    """Have parts of a file read into the system's cache, where the system can be told.

    NOTE [read ahead] who reads a mapped file from its start to its middle has the system read on: 128 KiB as Linux
    comes, 13 MB on a cloud's disk (measured), half as much again as two layers of SmolLM2.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        with path.open("rb", buffering=0) as file:
            for start, stop in spans:
                for at in range(start, stop, PREFETCH_BYTES):
                    os.posix_fadvise(file.fileno(), at, min(PREFETCH_BYTES, stop - at), os.POSIX_FADV_WILLNEED)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_header(path: Path, size: int, read: Callable[[ByteRange], bytes]) -> dict[str, Entry]:
    """A safetensors header, checked against the file's size. Format: 8 bytes length, JSON, data."""
    length = int.from_bytes(read((0, min(8, size))), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise ModelError(f"{path} is cut short or is not a safetensors file: {size} bytes, header {length}")
    base = 8 + length
    text = read((8, base))
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: Entry(said["dtype"], tuple(said["shape"]), *(base + offset for offset in said["data_offsets"]))
            for name, said in header.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} has a broken safetensors header: {type(error).__name__}: {error}") from error
    torn = [name for name, entry in entries.items() if not base <= entry.start <= entry.stop <= size]
    if torn:
        raise ModelError(f"{path} is cut short: {torn[0]!r} should end at byte {entries[torn[0]].stop} of {size}")
    return entries
