"""What a call does about workers that fail: others in their place, until its deadline. The one place that retries.

A worker that failed is told of to ``Peers``, which keeps it out of everybody's routes for a while; a ``Retry`` belongs
to one call or one step, remembers what was tried, and says so when no route is left.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from kwflow.client.peers import Hop, Peers
from kwflow.errors import DeadlineError, NoRoute, WorkerFailed, WorkerFull
from kwflow.kwargs.bound import Bound, Span
from kwflow.wire import loop

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0  # seconds until a worker that failed in this call is asked again; doubled
MOST_ANSWERS = 3  # failures of one worker that lives and answers, in one call
DOUBT_SECONDS = 10.0  # for another worker to be had that says whether NaN is the answer
LOOK_SECONDS = 0.1  # between two looks for a route
QUIET_SECONDS = 1.0  # a wait longer than this is said
MARGIN = 0.03  # of the time of a call, kept to say why it failed

log = logging.getLogger(__name__)


Misfit = Callable[[Hop], str | None]  # why a worker cannot take another's place, if so


class Retry:
    """The routes of one call, within ``timeout`` seconds from now."""

    def __init__(self, peers: Peers, timeout: float, blocked: Collection[str] = ()):
        self.peers, self.timeout, self.failures = peers, timeout, list[WorkerFailed]()
        self.over = False  # the call has ended: a derivative that is taken later is a call of its own
        self.doubted = self._said = False  # NaN was tried on another worker, which said the same; a long wait was said
        self.doubting = asyncio.Lock()  # sub-batches try theirs one after the other
        self._blocked = frozenset(blocked)
        self._began = time.monotonic()
        self._until = self._began + timeout * (1 - MARGIN)
        self._out: dict[str, tuple[float, int]] = {}  # peer -> until when, failures in this call

    @property
    def left(self) -> float:
        """Seconds until this call gives up."""
        return max(0.0, self._until - time.monotonic())

    @property
    def patience(self) -> float:
        """Seconds until whoever waits for this call gives up: a little more, to be told why."""
        return max(0.0, self._began + self.timeout - time.monotonic())

    def __enter__(self) -> Retry:
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True

    def without_doubt(self) -> Retry:
        """The same, for what is asked because of NaN: what is answered then is taken as it is."""
        other = copy.copy(self)
        other.doubted = True
        return other

    def failed(self, error: WorkerFailed) -> None:
        """Take note of a worker's failure; it is asked again later than others."""
        self.failures.append(error)
        self.peers.failed(error)
        if error.peer:
            _, failures = self._out.get(error.peer, (0.0, 0))
            wait = min(FIRST_WAIT * 2**failures, LONGEST_WAIT)
            self._out[error.peer] = (time.monotonic() + wait, failures + 1)

    def avoids(self, peer: str) -> bool:
        """Whether a worker failed lately, in this call or another."""
        return peer in self._out or self.peers.avoided(peer)

    async def route(self, start: int, stop: int, *, like: Hop | None = None, misfit: Misfit | None = None) -> list[Hop]:
        """Hops that cover ``[start, stop)``; where a gap may close, waits for it until the deadline.

        ``like``: whose place they take: those whose values are equal to the last bit come first, and none runs another
        block_fn. ``misfit``: what else speaks against a worker. Raises NoRoute with all that was tried, from the last
        WorkerFailed.
        """
        why: dict[str, str] = {}
        gap: float | None = None  # since when there is none
        while True:
            try:
                return await self._in_time(self._route_now(start, stop, like, misfit, why))
            except NoRoute as error:
                gap = time.monotonic() if gap is None else gap
                all_seen = self.peers.looked() >= gap  # who came before is known
                last = self.failures[-1] if self.failures else None
                if last is not None and all_seen and self._all_full(start, stop, why):
                    raise last from error
                if last is None and not self.peers.had(start, stop, self._blocked):
                    raise
                if not self.left or (all_seen and self._all_answered(start, stop, why)):
                    raise self._report(start, stop, why, error) from last or error.__cause__
                waited = time.monotonic() - self._began
                if waited > QUIET_SECONDS and not self._said:
                    self._said = True
                    log.warning("waiting up to %.0f s for a worker: %s", self.left, error)
            await asyncio.sleep(min(LOOK_SECONDS, self.left))

    async def route_at_once(self, start: int, stop: int) -> list[Hop]:
        """Hops that cover ``[start, stop)`` now. Raises NoRoute where a gap would have to be waited for."""
        return await self._in_time(self._route_now(start, stop, None, None, {}))

    async def _in_time(self, work: Coroutine[Any, Any, list[Hop]]) -> list[Hop]:
        """A worker that is stopped takes seconds to be dialled."""
        try:
            async with asyncio.timeout(self.left):
                return await work
        except TimeoutError as error:
            raise NoRoute("the last worker to be dialled has not answered") from error

    async def others(self, hop: Hop, misfit: Misfit) -> list[Hop] | None:
        """Other workers that could answer in a hop's place; None where there are none, or none that answers soon."""
        why, until = {hop.peer: "asked already"}, min(self._until, time.monotonic() + DOUBT_SECONDS)
        while True:
            try:
                return await self._route_now(*hop.span, hop, misfit, why)
            except NoRoute:
                if time.monotonic() > until or not self.peers.named(*hop.span, {*self._blocked, *why}):
                    return None
            await asyncio.sleep(LOOK_SECONDS)

    async def _route_now(
        self, start: int, stop: int, like: Hop | None, misfit: Misfit | None, why: dict[str, str]
    ) -> list[Hop]:
        others: dict[str, str] = {}  # whose values may differ in the last bit, or more
        exact = like is not None
        while True:
            now = time.monotonic()
            out = {peer for peer, (until, _) in self._out.items() if until > now}
            try:
                hops = await self.peers.route(start, stop, {*self._blocked, *out, *why, *(others if exact else ())})
            except NoRoute:
                if not (exact and others):
                    raise
                exact = False
                continue
            unfit = {hop.peer: said for hop in hops if (said := _unfit(hop, like, misfit))}
            other = {hop.peer: said for hop in hops if exact and like is not None and (said := differs(hop, like))}
            if not unfit and not other:
                if not exact and like is not None:
                    said = [f"{hop.peer[-8:]} has {differs(hop, like) or 'the same'}" for hop in hops]
                    log.warning("layers %d:%d go on with other numerics: %s", start, stop, "; ".join(said))
                return hops
            why.update(unfit)
            others.update(other)

    def _all_full(self, start: int, stop: int, why: Mapping[str, str]) -> bool:
        """Whether there is no room anywhere, which may last; nobody is merely avoided."""
        full = all(isinstance(failure, WorkerFull) for failure in self.failures)
        return full and not self.peers.named(start, stop, {*self._blocked, *self._out, *why})

    def _all_answered(self, start: int, stop: int, why: dict[str, str]) -> bool:
        """Whether whoever failed lives, and said so often enough: there is no gap that could close."""
        said = Counter(error.peer for error in self.failures if error.answered)
        why.update({peer: "it failed again and again" for peer, n in said.items() if peer and n >= MOST_ANSWERS})
        if not said or said.total() < len(self.failures) or not set(self._out) <= set(why):
            return False
        return not self.peers.named(start, stop, {*self._blocked, *why})

    def _report(self, start: int, stop: int, why: Mapping[str, str], error: NoRoute) -> NoRoute:
        tried = [f"{failure}" for failure in self.failures[-5:]]
        tried += [f"{peer[-8:]} does not fit: {reason}" for peer, reason in why.items()]
        tried += [str(error.__cause__)] if error.__cause__ is not None and not self.failures else []
        seconds = time.monotonic() - self._began
        return NoRoute(
            f"layers {start}:{stop}: no route after {seconds:.1f} s, failures: {len(self.failures)}. {error}. "
            f"Tried: {'; '.join(dict.fromkeys(tried)) or 'nobody'}"
        )


def _unfit(hop: Hop, like: Hop | None, misfit: Misfit | None) -> str | None:
    theirs = hop.numerics.get("block_fn")
    if like is not None and theirs != like.numerics.get("block_fn"):
        return f"it runs another block_fn ({theirs or 'none of its own'})"
    return misfit(hop) if misfit is not None else None


def differs(hop: Hop, like: Hop) -> str | None:
    """What makes a worker's values differ from another's, if anything does; what one does not say is not compared."""
    theirs, ours = hop.numerics, like.numerics
    said = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    return ", ".join(f"{name} {theirs[name]!r} for {ours[name]!r}" for name in said) or None


def lacks(hop: Hop, like: Hop, bound: Bound, tokens: int) -> str | None:
    """Why a worker cannot take what another was sent, if it cannot: kwargs that differ, or too much at once."""
    for name in bound.names():
        if hop.schema.kwargs.get(name) != like.schema.kwargs.get(name):
            return f"it takes no {name!r}, or another one"
    limit = hop.hello.get("limits", {}).get("batch_tokens")
    if limit and tokens > limit:
        return f"it takes {limit} tokens at once, not {tokens}"
    return None


def wait(retry: Retry, work: Coroutine[Any, Any, T], span: Span) -> T:
    """Run a call's work on the network thread and wait for it here, until the call's deadline. Raises DeadlineError."""
    try:
        return loop.run(work, retry.patience)
    except TimeoutError as error:
        raise DeadlineError(
            f"a call of layers {span[0]}:{span[1]} did not end in {retry.timeout:g} s (flow.options(timeout=…))"
        ) from error
