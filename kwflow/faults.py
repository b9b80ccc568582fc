"""Faults of a local swarm's workers, for tests and notebooks: injected at exact requests, and scripted from a seed.

    kf.faults.inject(swarm, 1, kf.faults.Slow(0.5, count=3, op="step", after=6))
    script = kf.faults.Script.random(seed=17, spans=[(0, 2), (2, 4), (0, 4)])
    for moment, token in enumerate(tokens):
        script.at(moment, swarm)                            # carries out what is due
        session.step(...)

Only workers that this process started can be told to fail, over the pipe that they inherited.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kwflow.errors import KwargError, WorkerFailed
from kwflow.swarm.faults import Corrupt as Corrupt
from kwflow.swarm.faults import Die as Die
from kwflow.swarm.faults import Drop as Drop
from kwflow.swarm.faults import Expire as Expire
from kwflow.swarm.faults import Fault as Fault
from kwflow.swarm.faults import Freeze as Freeze
from kwflow.swarm.faults import Hang as Hang
from kwflow.swarm.faults import Latency as Latency
from kwflow.swarm.faults import OfRequests as OfRequests
from kwflow.swarm.faults import Raise as Raise
from kwflow.swarm.faults import Refuse as Refuse
from kwflow.swarm.faults import Slow as Slow
from kwflow.swarm.routing import covers

Span = tuple[int, int]


class Worker(Protocol):
    """What a script needs to know of a worker."""

    @property
    def span(self) -> Span: ...
    @property
    def alive(self) -> bool: ...
    @property
    def paused(self) -> bool: ...


class Swarm(Protocol):
    """What faults are carried out on: ``kf.local_swarm``, or a test's workers of its own process."""

    @property
    def workers(self) -> Sequence[Worker]: ...
    def kill(self, index: int) -> None: ...
    def pause(self, index: int) -> None: ...
    def resume(self, index: int) -> None: ...
    def add(self, start: int, stop: int) -> Any: ...
    def tell(self, index: int, what: Mapping[str, Any]) -> Mapping[str, Any]: ...


def inject(swarm: Swarm, worker: int, fault: Fault) -> None:
    """Make a worker of the swarm, by its number, fail; in force on return. Several may be in force at once.

    Raises WorkerFailed when it is dead or paused.
    """
    if not isinstance(fault, Fault):
        raise KwargError(f"kf.faults.inject takes a fault such as kf.faults.Slow(0.5), got {fault!r:.80}")
    swarm.tell(worker, fault.to_json())


def clear(swarm: Swarm, worker: int | None = None) -> None:
    """End every fault that was injected into a worker; None: into any that lives. What was frozen goes on."""
    for number in _reachable(swarm) if worker is None else [worker]:
        swarm.tell(number, {"do": "clear"})


def hits(swarm: Swarm, worker: int) -> int:
    """How many requests to a worker have been befallen by faults."""
    return int(swarm.tell(worker, {"do": "count"})["hits"])


def heal(swarm: Swarm) -> None:
    """Resume every paused worker and clear every fault; the dead stay dead."""
    for number, one in enumerate(swarm.workers):
        if one.alive and one.paused:
            swarm.resume(number)
    clear(swarm)


def _reachable(swarm: Swarm) -> list[int]:
    return [number for number, one in enumerate(swarm.workers) if one.alive and not one.paused]


# ---- scripts ---------------------------------------------------------------------------------------------------------


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

    def carry_out(self, swarm: Swarm) -> None:
        """Do it. Nothing is done to a worker that has died in the meantime; a paused one can be killed and resumed."""
        if self.what == "add":
            assert self.span is not None
            swarm.add(*self.span)
            return
        one = swarm.workers[self.worker]
        if not one.alive:
            return
        if isinstance(self.what, str) and self.what != "clear":
            {"kill": swarm.kill, "pause": swarm.pause, "resume": swarm.resume}[self.what](self.worker)
        elif not one.paused:
            try:
                clear(swarm, self.worker) if self.what == "clear" else inject(swarm, self.worker, self.what)
            except WorkerFailed:  # it may be dying of the fault before
                if one.alive:
                    raise

    def __str__(self) -> str:
        who = "" if self.what == "add" else f" worker {self.worker}"
        where = "" if self.span is None else f" {self.span[0]}:{self.span[1]}"
        when = f" after {self.later:g} s" if self.later else ""
        return f"{self.moment}:{who} {self.what}{where}{when}"


@dataclass(frozen=True)
class Script:
    """Events in the order of their moments; whoever runs something calls ``at`` before each of its moments.

    ``seed``: what a random one was made from.
    """

    events: tuple[Event, ...]
    seed: int | None = None
    _timers: list[threading.Timer] = field(default_factory=list, repr=False, compare=False)

    def at(self, moment: int, swarm: Swarm) -> tuple[Event, ...]:
        """Carry out what is due at a moment, and return it; what comes ``later`` does so in a thread."""
        due = tuple(event for event in self.events if event.moment == moment)
        for event in due:
            if not event.later:
                event.carry_out(swarm)
                continue
            timer = threading.Timer(event.later, event.carry_out, [swarm])
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        return due

    def wait(self) -> None:
        """Wait until everything that was to come later has come."""
        while self._timers:
            self._timers.pop().join()

    def __str__(self) -> str:
        return "; ".join(map(str, self.events)) or "nothing"

    @classmethod
    def random(
        cls,
        seed: int,
        spans: Sequence[Span],
        *,
        faults: int = 4,
        moments: int = 40,
        spares: bool = True,
        deaths: int = 1,
    ) -> Script:
        """Draw ``faults`` faults at moments ``[0, moments)`` of workers with these ``spans``; the same for equal seeds.

        ``spares``: at each moment every layer has a worker that lives, can be found and answers, so that whatever runs
        must come to its end. ``deaths``: how many may end for good; another then comes with other layers, later.
        """
        draw = _Draw(random.Random(seed), list(spans), moments, spares)
        for moment in sorted(draw.random.randrange(moments) for _ in range(faults)):
            draw.fault(moment, deaths)
        return cls(tuple(sorted(draw.events, key=lambda event: event.moment)), seed)


@dataclass(frozen=True)
class _Serving:
    """A worker as routing sees it."""

    peer: str
    start: int
    stop: int
    checkpoint: str = ""


FOR_EVER = 1 << 30


class _Draw:
    """What a random script has drawn so far: its events, and from when to when each worker cannot be counted on."""

    def __init__(self, source: random.Random, spans: list[Span], moments: int, spares: bool):
        self.random, self.spans, self.moments, self.spares = source, spans, moments, spares
        self.layers = max(stop for _, stop in spans)
        self.events: list[Event] = []
        self.away: list[list[tuple[int, int]]] = [[] for _ in spans]
        self.dead = self.added = 0  # how many have died; when the last one was added
        self.alone = False  # whether something was drawn that a NaN cannot stand beside, or a NaN
        self.blinking = -1

    def fault(self, moment: int, deaths: int) -> None:
        """Draw one fault at a moment: of requests, or one that takes a worker away for a while or for good."""
        kinds = [self._requests, self._requests, self._not_a_number, self._blink, self._absence]
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
        fault = choice(
            ([] if self.spares else [Hang(**where)])
            + [
                Slow(choice([0.05, 0.3]), **where),
                Drop(choice([0.0, 0.5]), **where),
                Corrupt(choice(["frame", "bytes", "missing", "shape", "dtype"]), **where),
                Refuse(choice([False, True]), **where),
                Raise(**where),
            ]
        )
        self.events.append(Event(moment, worker, fault))
        return True

    def _not_a_number(self, moment: int, worker: int) -> bool:
        """A reply with NaN. It is believed if a second worker says it too, or if there is none: so one may, no more."""
        if not self.spares or self.alone or not self._may_leave(worker, moment, FOR_EVER):
            return False
        self.alone = True
        self._leave(worker, moment, FOR_EVER)
        self.events.append(Event(moment, worker, Corrupt("nan", after=self.random.choice([0, 2]))))
        return True

    def _blink(self, moment: int, worker: int) -> bool:
        """A worker that is stopped for some seconds, and perhaps the last one: whatever is run must wait for it."""
        if self.alone:
            return False
        self.alone, self.blinking = True, worker  # which is told nothing more: one that is stopped does not hear
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
