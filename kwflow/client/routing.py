"""Which workers a call goes through: pure functions of a view of the swarm. No network, no clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from kwflow.errors import NoRoute
from kwflow.kwargs.schema import Span


class Serves(Protocol):
    """What routing needs to know of a worker."""

    @property
    def peer(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def checkpoint(self) -> str: ...


def plan(view: Sequence[Serves], start: int, stop: int, *, blocked: Collection[str] = ()) -> list[tuple[str, int, int]]:
    """The shortest chain of ``(peer, start, stop)`` that covers layers ``[start, stop)`` and none beyond.

    At each layer the live worker that reaches furthest is taken, which is optimal for intervals; ties go to the lowest
    peer id, so that equal views give equal routes. Raises NoRoute naming the first layer that nobody serves.
    """
    hops: list[tuple[str, int, int]] = []
    at = start
    while at < stop:
        covering = [worker for worker in view if worker.start <= at < worker.stop and worker.peer not in blocked]
        if not covering:
            known = ", ".join(f"{w.start}:{w.stop} on {w.peer[-8:]}" for w in sorted(view, key=lambda w: w.start))
            also = f"; blocked or failed just now: {', '.join(peer[-8:] for peer in blocked)}" if blocked else ""
            known = known or "no workers at all: were peers of the right swarm given?"
            raise NoRoute(f"no live worker serves layer {at} of {start}:{stop}; known: {known}{also}")
        best = min(covering, key=lambda w: (-w.stop, w.peer))
        end = min(best.stop, stop)
        hops.append((best.peer, at, end))
        at = end
    return hops


def covers(view: Sequence[Serves], start: int, stop: int) -> bool:
    """Whether every layer of ``[start, stop)`` is served by somebody."""
    return all(any(worker.start <= layer < worker.stop for worker in view) for layer in range(start, stop))


def gaps(spans: Sequence[Span], layers: int) -> list[Span]:
    """The runs of layers of ``0:layers`` that no span covers.

    >>> gaps([(0, 3), (2, 5), (8, 9)], 10)
    [(5, 8), (9, 10)]
    """
    missing, at = [], 0
    for start, stop in [*sorted(spans), (layers, layers)]:
        if start > at:
            missing.append((at, start))
        at = max(at, stop)
    return missing
