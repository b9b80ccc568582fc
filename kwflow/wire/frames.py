"""Frames: how a message is cut for a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from kwflow.errors import ProtocolError
from kwflow.wire.message import LIMITS

FRAME_BYTES = 1 << 20  # of payload; a heartbeat never waits behind more than this
_FRAME = struct.Struct(">BI")


class Kind(IntEnum):
    """The first byte of a frame."""

    DATA = 0
    LAST = 1
    BEAT = 2


def frame(kind: Kind, payload: bytes | memoryview = b"") -> bytes:
    """One frame; ``frame(Kind.BEAT)`` is a heartbeat."""
    return b"".join((_FRAME.pack(kind, len(payload)), payload))


def frames(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """Cut one message into frames, each to be written with one call: DATA* LAST.

    >>> [len(part) for part in frames(bytes(3 << 19))]
    [1048581, 524293]
    """
    view = memoryview(data).cast("B")
    last = max(len(view) - 1, 0) // FRAME_BYTES * FRAME_BYTES
    for at in range(0, last, FRAME_BYTES):
        yield frame(Kind.DATA, view[at : at + FRAME_BYTES])
    yield frame(Kind.LAST, view[last:])


class Frames:
    """Decode one direction of a stream; it reads no stream itself.

    >>> decoder = Frames()
    >>> [event for part in (*frames(b"message"), frame(Kind.BEAT)) for event in decoder.feed(part)]
    [(<Kind.LAST: 1>, bytearray(b'message')), (<Kind.BEAT: 2>, bytearray(b''))]

    It holds at most one message of ``limit`` bytes. After a ``ProtocolError`` it only raises: close the stream.
    """

    def __init__(self, limit: int = LIMITS.message_bytes):
        self._limit = limit
        self._head = bytearray()
        self._kind = Kind.DATA
        self._left = 0  # bytes of payload still to come in this frame
        self._message = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[Kind, bytearray]]:
        """Take the next bytes, cut anywhere; return (LAST, message) and (BEAT, empty) for what they complete.

        Each message is handed over and not kept. Raises ``ProtocolError`` on a frame that is malformed or too long.
        """
        events: list[tuple[Kind, bytearray]] = []
        view = memoryview(data).cast("B")
        while view:
            if self._left == 0:
                need = _FRAME.size - len(self._head)
                self._head += view[:need]
                view = view[need:]
                if len(self._head) < _FRAME.size:
                    break
                self._kind, self._left = self._read_head()
                self._head.clear()
            part, view = view[: self._left], view[self._left :]
            self._message += part
            self._left -= len(part)
            if self._left == 0 and self._kind is Kind.LAST:
                events.append((Kind.LAST, self._message))
                self._message = bytearray()
            elif self._kind is Kind.BEAT:
                events.append((Kind.BEAT, bytearray()))
        return events

    def _read_head(self) -> tuple[Kind, int]:
        kind, length = _FRAME.unpack(self._head)
        if kind not in (Kind.DATA, Kind.LAST, Kind.BEAT):
            raise ProtocolError(f"a frame of the unknown kind {kind}")
        if length > FRAME_BYTES or (kind == Kind.DATA and not length) or (kind == Kind.BEAT and length):
            raise ProtocolError(f"a {Kind(kind).name} frame of {length} bytes")
        if len(self._message) + length > self._limit:
            raise ProtocolError(f"a message of more than {self._limit} bytes")
        return Kind(kind), length
