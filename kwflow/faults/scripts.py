"""Fault scripts from seeds: what happens to which worker when, such that a route is left, or not. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kwflow.client.routing import covers
from kwflow.faults.kinds import Corrupt, Die, Drop, Event, Expire, Fault, Freeze, Hang, Raise, Refuse, Slow
from kwflow.kwargs.schema import Span

FOR_EVER = 1 << 30
REFUSED = 3  # a worker that lives and refuses so many requests in a row is taken at its word


def draw(seed: int, spans: Sequence[Span], *, faults: int, moments: int, spares: bool, deaths: int) -> list[Event]:
    """Draw ``faults`` faults of workers with these spans at moments ``[0, moments)``: ``kf.faults.Script.random``."""
    drawn = _Draw(random.Random(seed), list(spans), moments, spares)
    for moment in sorted(drawn.random.randrange(moments) for _ in range(faults)):
        drawn.fault(moment, deaths)
    return drawn.events


@dataclass(frozen=True)
class _Serving:
    """A worker as routing sees it."""

    peer: str
    start: int
    stop: int
    checkpoint: str = ""


class _Draw:
    """What a random script has drawn so far: its events, and from when to when each worker cannot be counted on."""

    def __init__(self, source: random.Random, spans: list[Span], moments: int, spares: bool):
        self.random, self.spans, self.moments, self.spares = source, spans, moments, spares
        self.layers = max(stop for _, stop in spans)
        self.events: list[Event] = []
        self.away: list[list[tuple[int, int]]] = [[] for _ in spans]
        self.dead = self.added = 0  # how many have died; when the last one was added
        self.refused = [0] * len(spans)
        self.lone = False  # whether a NaN was drawn, or something that cannot be in a script with it
        self.blinking = -1

    def fault(self, moment: int, deaths: int) -> None:
        """Draw one fault at a moment: of requests, or one that takes a worker away for a while or for good."""
        kinds = [self._requests, self._requests, self._not_alone, self._blink, self._absence]
        if self.dead < deaths:
            kinds.append(self._death)
        workers = [n for n in range(len(self.spans)) if n != self.blinking and not self._is_away(n, moment)]
        self.random.shuffle(kinds)
        self.random.shuffle(workers)
        for kind in kinds:
            if any(kind(moment, worker) for worker in workers):
                return

    def _requests(self, moment: int, worker: int) -> bool:
        """A fault of some requests, after which the worker serves on."""
        choice = self.random.choice
        where: dict[str, Any] = {"after": choice([0, 0, 1, 3]), "count": choice([1, 1, 2])}
        faults: list[Fault] = [
            Slow(choice([0.05, 0.3]), **where),
            Drop(choice([0.0, 0.5]), **where),
            Corrupt(choice(["frame", "bytes", "missing", "shape", "dtype"]), **where),
        ]
        if not self.spares:
            faults.append(Hang(**where))
        if self.refused[worker] + where["count"] < REFUSED:
            faults += [Refuse(**where), Raise(**where)]
        fault = choice(faults)
        self.refused[worker] += where["count"] if isinstance(fault, Refuse | Raise) else 0
        self.events.append(Event(moment, worker, fault))
        return True

    def _not_alone(self, moment: int, worker: int) -> bool:
        """A reply that is believed if nobody else can be asked: no room, or NaN. A second worker with NaN is believed,
        too, so one may, no more."""
        if not self.spares or not self._may_leave(worker, moment, FOR_EVER):
            return False
        self._leave(worker, moment, FOR_EVER)
        after = self.random.choice([0, 2])
        if self.lone or self.random.choice([False, True]):
            self.events.append(Event(moment, worker, Refuse(full=True, after=after)))
        else:
            self.lone = True
            self.events.append(Event(moment, worker, Corrupt("nan", after=after)))
        return True

    def _blink(self, moment: int, worker: int) -> bool:
        """A worker that is stopped for some seconds, and perhaps the last one: whatever is run must wait for it."""
        if self.lone:
            return False
        self.lone, self.blinking = True, worker  # which is told nothing more: one that is stopped does not hear
        back = self.random.choice([0.5, 7.0])  # before and after its silence is taken for death
        self.events += [Event(moment, worker, "pause"), Event(moment, worker, "resume", later=back)]
        return True

    def _absence(self, moment: int, worker: int) -> bool:
        """A worker that is stopped, or cannot be found, or refuses everything, until some moments later."""
        until = moment + self.random.choice([1, 2, 5, 10])
        if not self._may_leave(worker, moment, until):
            return False
        ways: list[tuple[Fault | str, str]] = [
            ("pause", "resume"),
            (Freeze(after=self.random.choice([0, 2])), "clear"),
            (Expire(), "clear"),
            (Refuse(count=None), "clear"),
        ]
        begin, end = self.random.choice(ways)
        self._leave(worker, moment, until)
        self.events += [Event(moment, worker, begin), Event(until, worker, end)]
        return True

    def _death(self, moment: int, worker: int) -> bool:
        """A worker that ends; some moments later another comes that serves its layers and perhaps more."""
        if not self._may_leave(worker, moment, FOR_EVER):
            return False
        after = self.random.choice([0, 1, 3])
        self._leave(worker, moment, FOR_EVER)
        self.dead += 1
        ways: list[Fault | str] = ["kill", Die(after=after), Die(computed=True, after=after)]
        self.events.append(Event(moment, worker, self.random.choice(ways)))
        back = max(self.added, moment + self.random.choice([0, 2, 6]))  # in order: workers are numbered as they come
        if back < self.moments:
            start, stop = self.spans[worker]
            span = (self.random.randint(0, start), self.random.randint(stop, self.layers))
            self.events.append(Event(back, len(self.spans), "add", span))
            self.spans.append(span)
            self.refused.append(0)
            self.away.append([(-1, back)])
            self.added = back
        return True

    def _may_leave(self, worker: int, since: int, until: int) -> bool:
        """Whether every layer is still served when the worker is away from one moment to another."""
        if not self.spares:
            return True
        edges = {edge for away in self.away for pair in away for edge in pair}
        turns = {since, *(edge for edge in edges if since <= edge <= until)}
        return all(covers(self._serving(moment, without=worker), 0, self.layers) for moment in turns)

    def _serving(self, moment: int, without: int) -> list[_Serving]:
        there = [n for n in range(len(self.spans)) if n != without and not self._is_away(n, moment)]
        return [_Serving(str(n), *self.spans[n]) for n in there]

    def _is_away(self, worker: int, moment: int) -> bool:
        """Whoever comes back at a moment is still away then: it may not be found yet."""
        return any(since <= moment <= until for since, until in self.away[worker])

    def _leave(self, worker: int, since: int, until: int) -> None:
        self.away[worker].append((since, until))
