"""What may go wrong with a worker on purpose, as data: the faults that ``kf.faults`` injects. No torch, no network.

A fault is a few numbers, so that a script of them prints itself, and so that it goes down a worker's pipe as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kwflow.errors import KwargError
from kwflow.kwargs.schema import Span

OPERATIONS = ("step", "forward", "backward", "push", "hello")
CORRUPTIONS = ("frame", "bytes", "missing", "shape", "dtype", "nan")


@dataclass(frozen=True, repr=False)
class Fault:
    """Something that a worker does wrong until it is cleared, or as often as it says."""

    def __repr__(self) -> str:
        values = [
            (field, getattr(self, field.name)) for field in sorted(fields(self), key=lambda field: bool(field.kw_only))
        ]
        changed = [(field, value) for field, value in values if field.default is MISSING or field.default != value]
        named = [field.kw_only or isinstance(value, bool) for field, value in changed]
        words = [
            f"{field.name}={value!r}" if name else repr(value)
            for name, (field, value) in zip(named, changed, strict=True)
        ]
        return f"{type(self).__name__}({', '.join(words)})"

    def to_json(self) -> dict[str, Any]:
        """Plain data, which ``from_json`` reads."""
        return {"fault": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}


@dataclass(frozen=True, repr=False, kw_only=True)
class OfRequests(Fault):
    """A fault that befalls requests: the next ``count`` of them (None: all until it is cleared).

    ``op``: only a session's "step", a call's "forward" or "backward" (any derivative), a "push" (another worker hands
    a step on to it), or "hello"; None: all but hello.
    ``after``: how many of those go well before: ``Drop(op="step", after=6)`` takes the reply of the seventh step.
    """

    op: str | None = None
    after: int = 0
    count: int | None = 1

    def __post_init__(self) -> None:
        if self.op is not None and self.op not in OPERATIONS:
            raise KwargError(f"op={self.op!r}; a fault is of {', '.join(OPERATIONS)}, or None: all but hello")
        if type(self.after) is not int or self.after < 0:
            raise KwargError(f"after={self.after!r}; give the number of requests that go well before")
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise KwargError(f"count={self.count!r}; give the number of requests, or None for all until it is cleared")


@dataclass(frozen=True, repr=False)
class Slow(OfRequests):
    """The reply comes ``seconds`` late."""

    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_seconds(self.seconds)


@dataclass(frozen=True, repr=False)
class Hang(OfRequests):
    """The reply never comes, while heartbeats go on: only the caller's deadline ends it."""


@dataclass(frozen=True, repr=False)
class Drop(OfRequests):
    """The request is computed, then the stream ends: after ``part`` of the reply's bytes, from 0.0 to less than 1.0."""

    part: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.part < 1:
            raise KwargError(f"part={self.part!r}; give how much of the reply gets out, 0.0 to less than 1.0")


@dataclass(frozen=True, repr=False)
class Corrupt(OfRequests):
    """The reply is not what was computed.

    ``how``: "frame" (bytes that are no frame), "bytes" (a frame that is no message), "missing" (a message without
    tensors), "shape", "dtype" (of the first tensor), "nan" (one NaN in each row of it).
    """

    how: str = "bytes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.how not in CORRUPTIONS:
            raise KwargError(f"how={self.how!r}; a reply is corrupted in {', '.join(CORRUPTIONS)}")


@dataclass(frozen=True, repr=False)
class Refuse(OfRequests):
    """The worker refuses the request: WorkerFailed, or with ``full`` WorkerFull."""

    full: bool = False


@dataclass(frozen=True, repr=False)
class Raise(OfRequests):
    """The worker has a bug: a RuntimeError, which is the worker's fault and nobody else's."""


@dataclass(frozen=True, repr=False)
class Die(OfRequests):
    """The process ends at once, as by ``kill -9``: before the request is computed, or with ``computed`` after."""

    computed: bool = False


@dataclass(frozen=True, repr=False)
class Freeze(OfRequests):
    """From the request on nothing goes in or out, heartbeats too, as if the process were stopped; ``clear`` thaws it,
    and what it had to say comes late."""


@dataclass(frozen=True, repr=False)
class Latency(Fault):
    """Every message to the worker and from it is ``seconds`` late, heartbeats too; messages may follow each other."""

    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


@dataclass(frozen=True, repr=False)
class Expire(Fault):
    """The worker is not in the directory any more; who knows it is still served."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a worker at a moment: a fault, or ``kill | pause | resume | clear | add``.

    ``add`` starts one more worker with layers ``span``, as if a worker came back with other blocks. ``later``: seconds
    after the moment, while what is run goes on or waits.
    """

    moment: int
    worker: int
    what: Fault | str
    span: Span | None = None
    later: float = 0.0

    def __post_init__(self) -> None:
        actions = ("kill", "pause", "resume", "clear", "add")
        if not (isinstance(self.what, Fault) or self.what in actions):
            raise KwargError(f"what happens is {self.what!r:.60}; give a fault, or one of {', '.join(actions)}")
        if (self.what == "add") != (self.span is not None):
            raise KwargError(f"'add' starts a worker of a span, (start, stop), and nothing else has one; got {self!r}")

    def __str__(self) -> str:
        worker = "" if self.what == "add" else f" worker {self.worker}"
        where = "" if self.span is None else f" {self.span[0]}:{self.span[1]}"
        when = f" after {self.later:g} s" if self.later else ""
        return f"{self.moment}:{worker} {self.what}{where}{when}"


KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind for kind in (Slow, Hang, Drop, Corrupt, Refuse, Raise, Die, Freeze, Latency, Expire)
}


def from_json(json: Mapping[str, Any]) -> Fault:
    """Read what ``Fault.to_json`` wrote. Raises KwargError."""
    arguments = dict(json)
    kind = KINDS.get(arguments.pop("fault", ""))
    if kind is None:
        raise KwargError(f"a fault is one of {', '.join(KINDS)}, got {json!r:.200}")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise KwargError(f"{kind.__name__} does not take {arguments!r:.200}: {error}") from error


def _check_seconds(seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        raise KwargError(f"seconds={seconds!r}; give 0 or more")
