"""Faults of a local swarm's workers, for tests and notebooks: injected at exact requests, and scripted from a seed.

    kf.faults.inject(swarm, 1, kf.faults.Slow(0.5, count=3, op="step", after=6))
    script = kf.faults.Script.random(seed=17, spans=[(0, 2), (2, 4), (0, 4)])
    for moment, token in enumerate(tokens):
        script.at(moment, swarm)                            # carries out what is due
        session.step(...)

Only workers that this process started can be told to fail, over the pipe that they inherited.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kwflow.errors import KwargError, WorkerFailed
from kwflow.faults.kinds import Corrupt as Corrupt
from kwflow.faults.kinds import Die as Die
from kwflow.faults.kinds import Drop as Drop
from kwflow.faults.kinds import Event as Event
from kwflow.faults.kinds import Expire as Expire
from kwflow.faults.kinds import Fault as Fault
from kwflow.faults.kinds import Freeze as Freeze
from kwflow.faults.kinds import Hang as Hang
from kwflow.faults.kinds import Latency as Latency
from kwflow.faults.kinds import OfRequests as OfRequests
from kwflow.faults.kinds import Raise as Raise
from kwflow.faults.kinds import Refuse as Refuse
from kwflow.faults.kinds import Slow as Slow
from kwflow.faults.scripts import draw
from kwflow.kwargs.schema import Span


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
    for number, worker in enumerate(swarm.workers):
        if worker.alive and worker.paused:
            swarm.resume(number)
    clear(swarm)


def _reachable(swarm: Swarm) -> list[int]:
    return [number for number, worker in enumerate(swarm.workers) if worker.alive and not worker.paused]


# ---- scripts ---------------------------------------------------------------------------------------------------------


def carry_out(event: Event, swarm: Swarm) -> None:
    """Do it. Nothing is done to a worker that has died in the meantime; a paused one can be killed and resumed."""
    if event.span is not None:
        swarm.add(*event.span)
        return
    worker = swarm.workers[event.worker]
    if not worker.alive:
        return
    if isinstance(event.what, str) and event.what != "clear":
        {"kill": swarm.kill, "pause": swarm.pause, "resume": swarm.resume}[event.what](event.worker)
    elif not worker.paused:
        try:
            clear(swarm, event.worker) if event.what == "clear" else inject(swarm, event.worker, event.what)
        except WorkerFailed:  # it may be dying of the fault before
            if worker.alive:
                raise


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
                carry_out(event, swarm)
                continue
            timer = threading.Timer(event.later, carry_out, [event, swarm])
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
        events = draw(seed, spans, faults=faults, moments=moments, spares=spares, deaths=deaths)
        return cls(tuple(sorted(events, key=lambda event: event.moment)), seed)
