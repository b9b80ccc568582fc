"""Every error that kwflow raises, in three kinds: the caller's, the worker's, the swarm's.

The kind decides what happens next: a caller's error is raised at once and nobody is blamed; a worker's is tried
elsewhere; the swarm's says that no worker is left. Errors cross the wire by name. Imports nothing of kwflow, but how a
notebook shows one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class KwflowError(Exception):
    """The root of kwflow's errors."""

    kind: ClassVar[str] = "worker"

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows, which asks for it."""
        from kwflow.show import traces

        return traces.lines(self)


class CallerError(KwflowError):
    """What was asked cannot be done by any worker; it is raised at once and never retried."""

    kind = "caller"


class UnknownKwarg(CallerError, TypeError):
    """A keyword argument that no addressed block takes, or that this family's blocks would ignore."""


class KwargError(CallerError, ValueError):
    """A keyword argument of the wrong type, dtype or structure, or one that cannot be used here."""


class ShapeError(CallerError, ValueError):
    """A tensor whose sizes do not fit the call."""


class AxesError(CallerError, ValueError):
    """An axis signature that does not parse, does not fit its tensor, or is not taken by the kwarg."""


class SpanError(CallerError, ValueError):
    """Layers out of range, or a slice outside its flow."""


class SessionError(CallerError, ValueError):
    """A step that a session cannot take: too long, out of order, differentiable, or closed."""


class BudgetError(CallerError, ValueError):
    """A request larger than the worker's published limits."""


class UnsupportedError(CallerError, ValueError):
    """A feature that the other side, this family or this version does not have; the message names it."""


class BlockError(CallerError, RuntimeError):
    """A block raised while it computed, which it would on every worker; the message has the layer and the shapes."""


class ModelError(CallerError, ValueError):
    """A model that cannot be found, read or served."""


class WorkerFailed(KwflowError):
    """A worker died, fell silent, refused or answered nonsense. ``peer`` and ``span`` say which.

    ``answered``: it lives, and said so itself.
    """

    kind = "worker"
    answered = False

    def __init__(self, message: str, *, peer: str | None = None, span: tuple[int, int] | None = None):
        super().__init__(message)
        self.peer, self.span = peer, span


class WorkerFull(WorkerFailed):
    """A worker has no room for a session now. Another may have; this one goes on serving, and is not avoided."""


class NotKept(WorkerFailed):
    """A worker does not keep what a request names: the client brings it again, and nobody failed."""


class ProtocolError(WorkerFailed):
    """Bytes that are not a kwflow message, or a message of a version that is not spoken here."""


class NoRoute(KwflowError):
    """No live worker covers the layers before the deadline; caused by the last ``WorkerFailed``."""

    kind = "swarm"


class DeadlineError(KwflowError, TimeoutError):
    """A call that did not end within its deadline (``flow.options(timeout=)``, 300 s by default)."""

    kind = "swarm"


_BY_NAME: dict[str, type[KwflowError]] = {}


def _register(cls: type[KwflowError]) -> None:
    _BY_NAME[cls.__name__] = cls
    for sub in cls.__subclasses__():
        _register(sub)


_register(KwflowError)


def to_wire(error: BaseException, **where: Any) -> dict[str, Any]:
    """Describe an error for the other side: kind, type, message and where it arose (``layer``, ``span``…)."""
    kind = error.kind if isinstance(error, KwflowError) else "worker"
    return {"kind": kind, "type": type(error).__name__, "message": str(error), **where}


def from_wire(said: Mapping[str, Any], *, peer: str) -> KwflowError:
    """Rebuild a remote error: the same kwflow type where there is one, else ``WorkerFailed`` with its name."""
    kind, name, message = str(said.get("kind")), str(said.get("type")), str(said.get("message"))
    span = said.get("span")
    layers = f" on layers {span[0]}:{span[1]}" if isinstance(span, list) and len(span) == 2 else ""
    where = f"worker {peer[-8:]}{layers}"
    cls = _BY_NAME.get(name)
    if kind == "caller":
        if cls is None or not issubclass(cls, CallerError):
            cls = KwargError
            message = f"{name}: {message}"
        return cls(f"{message} (said by {where})")
    text = message if cls is not None else f"{name}: {message}"
    failed = cls if cls is not None and issubclass(cls, WorkerFailed) else WorkerFailed
    error = failed(f"{text} (on {where})", peer=peer)
    error.answered = True
    return error


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'steer'?`` for the nearest allowed name, or an empty string."""
    near = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
