"""Where a flow's workers come from: hops, the ``Peers`` contract, and the workers that a client knows and avoids."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kwflow.background import disown_in_forks, finalize
from kwflow.client.routing import Serves, covers, plan
from kwflow.errors import CallerError, KwflowError, ModelError, NoRoute, WorkerFailed, WorkerFull
from kwflow.kwargs.schema import Schema, Span
from kwflow.wire import channel, loop
from kwflow.wire.hello import Hello
from kwflow.wire.message import Message

log = logging.getLogger(__name__)

CLOSED = "the flow is closed; kf.connect gives another"

BAN_SECONDS = 5.0  # until a worker that failed is asked how it is; doubled at each failure in a row
LONGEST_BAN = 60.0
HELLO_SECONDS = 10.0  # for a worker to say what it serves
PROBE_SECONDS = 0.25  # before it is asked again where there is no other; doubled likewise


@dataclass(frozen=True)
class Ban:
    """A worker that failed: how often in a row, when it is asked how it is, and until when nobody asks it at all."""

    failures: int
    until: float
    silent_until: float

    @classmethod
    def after(cls, failures: int) -> Ban:
        now, doubled = time.monotonic(), 2.0 ** min(failures - 1, 16)
        until = now + min(BAN_SECONDS * doubled, LONGEST_BAN)
        return cls(failures, until, now + min(PROBE_SECONDS * doubled, BAN_SECONDS))


@dataclass(frozen=True)
class Links:
    """How workers are reached, and how it is known who they are."""

    transport: channel.Transport
    view: Callable[[], Sequence[Serves]]
    refreshed_at: Callable[[], float] = time.monotonic  # from when on the view is
    others: Callable[[], Awaitable[str]] | None = None  # what to say where the view is empty
    stop: Callable[[], Awaitable[None]] | None = None


class _Forked:
    """The transport of a flow in a forked child, until its first call."""

    def __init__(self, peers: KnownPeers):
        self._peers = weakref.ref(peers)

    async def open(self, peer: str, *, timeout: float = channel.DIAL_SECONDS) -> channel.Channel:
        if (peers := self._peers()) is None:
            raise CallerError(CLOSED)
        return await (await peers.connected()).open(peer, timeout=timeout)


class KnownPeers:
    """Workers by a view that someone refreshes; what they said in hello; who failed. They are ``Peers``.

    Routes avoid a worker that failed until it has answered again. It is asked in the background, off the call path: to
    dial it may take seconds. ``again`` makes the links of a forked child, at its first call; the parent's are not its.
    """

    def __init__(
        self,
        transport: channel.Transport,
        view: Callable[[], Sequence[Serves]],
        *,
        checkpoint: str = "",
        refreshed_at: Callable[[], float] = time.monotonic,
        others: Callable[[], Awaitable[str]] | None = None,
        stop: Callable[[], Awaitable[None]] | None = None,
        again: Callable[[], Awaitable[Links]] | None = None,
    ):
        self.pool = channel.Pool(transport)
        self.checkpoint = checkpoint
        self.last_failure: WorkerFailed | None = None
        self._again, self._connecting = again, asyncio.Lock()
        self._take(Links(transport, view, refreshed_at, others, stop))
        self._hellos: dict[str, Hello] = {}
        self._bans: dict[str, Ban] = {}
        self._served: dict[int, set[str]] = {}  # layer -> the workers that a route was given with
        self._schemas: dict[int, Schema] = {}  # layer -> what the last one of these takes

    def _take(self, links: Links) -> None:
        self.pool.transport, self._view, self._others = links.transport, links.view, links.others
        self.refreshed_at, self._forked = links.refreshed_at, False
        self._ended = finalize(self, _end, self.pool, links.stop)  # at exit too
        disown_in_forks(self)

    def forked(self) -> None:
        """In a forked child: leave all links to the parent; the first call connects anew."""
        closed = not self._ended.alive
        self._hellos.clear()
        self._bans.clear()
        self._served.clear()
        self._schemas.clear()
        self.last_failure, self._connecting = None, asyncio.Lock()
        self.pool.forget()
        self._take(Links(_Forked(self), tuple))
        self._forked = True
        if closed:
            self._ended.detach()

    async def connected(self) -> channel.Transport:
        """The transport; in a forked child, connect first. Raises what ``kf.connect`` does."""
        if not self._forked:
            return self.pool.transport
        async with self._connecting:
            if self._forked:
                if self._again is None:
                    raise CallerError("this flow was made before the process was forked; connect again in the child")
                links = await self._again()
                if not self._ended.alive:  # closed in the meantime
                    if links.stop is not None:
                        await links.stop()
                    raise CallerError(CLOSED)
                self._ended.detach()
                self._take(links)
        return self.pool.transport

    async def route(self, start: int, stop: int, blocked: Collection[str]) -> list[Hop]:
        """Hops that cover ``[start, stop)``; a worker that does not answer hello, or serves other weights, is left out.

        Raises NoRoute; ModelError when only workers with other weights are left; CallerError once it is closed.
        """
        tried: set[str] = set()
        while True:
            self._refuse_closed()
            await self.connected()
            now = time.monotonic()
            silent = {peer for peer, ban in self._bans.items() if ban.silent_until > now}
            view = self._matching()
            try:
                hops = plan(view, start, stop, blocked={*blocked, *tried, *self._bans})
            except NoRoute:
                try:  # better a worker that failed lately than none
                    hops = plan(view, start, stop, blocked={*blocked, *tried, *silent})
                except NoRoute as error:
                    self._refuse_others(start, stop)
                    if self._others is not None and not self._view():
                        raise NoRoute(f"layers {start}:{stop}: {await self._others()}") from self.last_failure
                    raise error from self.last_failure
            try:
                route = [_hop(peer, a, b, await self._hello(peer)) for peer, a, b in hops]
            except WorkerFailed as error:
                self.failed(error)
                tried.add(error.peer or "")
                continue
            if all(hop.hello.fingerprint.checkpoint == self.checkpoint for hop in route) or not self.checkpoint:
                self._note_served(route)
                return route

    def snapshot(self, start: int, stop: int, blocked: Collection[str]) -> list[Hop] | None:
        """The route as far as it is known, so that a call need not ask for it on the network thread.

        None where a worker must be asked first, or none is left that has not failed lately.
        """
        self._refuse_closed()
        hellos, avoided = dict(self._hellos), list(self._bans)  # the network thread goes on meanwhile
        try:
            hops = plan(self._matching(), start, stop, blocked={*blocked, *avoided})
            route = [_hop(peer, a, b, hellos[peer]) for peer, a, b in hops]
        except (NoRoute, KeyError, WorkerFailed):
            return None
        self._note_served(route)
        return route

    def last_known(self, start: int, stop: int) -> list[tuple[Span, Schema]] | None:
        """What the layers' workers took when they were met last, layer by layer; None where one was never met."""
        schemas = [(layer, self._schemas.get(layer)) for layer in range(start, stop)]
        known = [((layer, layer + 1), schema) for layer, schema in schemas if schema is not None]
        return known if len(known) == len(schemas) else None

    def _refuse_closed(self) -> None:
        if not self._ended.alive:  # else a call would wait for workers until its deadline
            raise CallerError(CLOSED)

    def _matching(self) -> list[Serves]:
        """The workers that serve this client's weights, as far as is known."""
        return [worker for worker in self._view() if self._weights(worker) in ("", self.checkpoint)]

    def _note_served(self, route: Sequence[Hop]) -> None:
        for hop in route:
            for layer in range(*hop.span):
                self._served.setdefault(layer, set()).add(hop.peer)
                self._schemas[layer] = hop.schema

    def _weights(self, worker: Serves) -> str:
        """The checkpoint that a worker serves, by its own word or else the directory's; "" where it does not matter."""
        if not self.checkpoint:
            return ""
        hello = self._hellos.get(worker.peer)
        return worker.checkpoint if hello is None else hello.fingerprint.checkpoint or "unknown"

    def _refuse_others(self, start: int, stop: int) -> None:
        """Raise ModelError if the layers could be had, but for the weights."""
        view = self._view()
        checkpoints = {worker.peer: self._weights(worker) for worker in view}
        matching = [worker for worker in view if checkpoints[worker.peer] in ("", self.checkpoint)]
        if not covers(matching, start, stop) and covers(view, start, stop):
            others = [
                f"{checkpoint[:16]} on {peer[-8:]}"
                for peer, checkpoint in sorted(checkpoints.items())
                if checkpoint != self.checkpoint
            ]
            raise ModelError(
                f"layers {start}:{stop} are served with other weights: this client's checkpoint is "
                f"{self.checkpoint[:16]}, the swarm's {', '.join(others)}; both must come from the same files "
                f"(a hub id can name a commit, user/name@commit)"
            )

    async def _hello(self, peer: str) -> Hello:
        if peer not in self._hellos:
            try:
                async with asyncio.timeout(HELLO_SECONDS):
                    reply = await self.pool(peer, Message({"op": "hello"}))
                hello = Hello.from_json(reply.meta.get("hello"))
            except TimeoutError:
                raise WorkerFailed(f"did not answer hello in {HELLO_SECONDS:g} s", peer=peer) from None
            except CallerError as error:  # it has no such operation, or what it announces does not read
                raise WorkerFailed(f"answered hello with something else: {error!r:.80}", peer=peer) from error
            self._hellos[peer] = hello
            self._bans.pop(peer, None)
        return self._hellos[peer]

    def hellos(self) -> list[Hello]:
        """What the workers that this client has met say of themselves."""
        return list(self._hellos.values())

    @property
    def bans(self) -> dict[str, Ban]:
        """The workers that routes avoid, by name, as of now."""
        return dict(self._bans)

    def known(self) -> list[KnownWorker]:
        """The workers that serve some layers now, as far as this client knows; nobody is asked."""
        return [
            KnownWorker(
                worker.peer, worker.start, worker.stop, self._hellos.get(worker.peer), self.avoided(worker.peer)
            )
            for worker in self._view()
        ]

    def failed(self, error: WorkerFailed) -> None:
        """Keep a worker that failed out of the next routes, until it answers again."""
        self.last_failure = copy.copy(error)  # without the traceback, which holds the call's tensors
        if error.peer and not isinstance(error, WorkerFull):
            self._hellos.pop(error.peer, None)
            ban = self._bans.get(error.peer)
            if ban is None or ban.silent_until < time.monotonic():  # else it was under way when the worker failed
                ban = self._bans[error.peer] = Ban.after(1 if ban is None else ban.failures + 1)
                ask = functools.partial(_ask_again, weakref.ref(self), error.peer, ban)
                loop.begin(ask, f"asking worker {error.peer[-8:]} again")

    async def ask_again(self, peer: str, ban: Ban) -> None:
        """Ask a worker how it is, unless it answered or failed meanwhile; one that left the directory is forgotten."""
        if self._bans.get(peer) is not ban or not self._ended.alive:
            return
        if all(worker.peer != peer for worker in self._view()):
            del self._bans[peer]
            return
        try:
            await self._hello(peer)
        except WorkerFailed as error:
            self.failed(error)
        except Exception as error:  # whatever it is, it will be asked again
            if not isinstance(error, KwflowError):
                log.exception("asking worker %s again", peer[-8:])
            self.failed(WorkerFailed(f"answered hello with {type(error).__name__}: {error}", peer=peer))

    def avoided(self, peer: str) -> bool:
        """Whether routes avoid a worker, because it failed and has not answered since."""
        return peer in self._bans

    def served_before(self, start: int, stop: int, blocked: Collection[str]) -> bool:
        """Whether workers other than those served these layers to this client before."""
        return all(self._served.get(layer, set()) - set(blocked) for layer in range(start, stop))

    def listed(self, start: int, stop: int, blocked: Collection[str]) -> bool:
        """Whether workers other than those are named for these layers, avoided ones too."""
        return covers([worker for worker in self._matching() if worker.peer not in blocked], start, stop)

    def close(self) -> None:
        """Close every link; calling it again does nothing."""
        self._ended()


async def _ask_again(peers: weakref.ref[KnownPeers], peer: str, ban: Ban) -> None:
    await asyncio.sleep(ban.until - time.monotonic())
    if (known := peers()) is not None:
        await known.ask_again(peer, ban)


def _end(pool: channel.Pool, stop: Callable[[], Awaitable[None]] | None) -> None:
    if stop is None and not pool.idle:
        return  # in a forked child: no network thread for nothing

    async def end() -> None:
        await pool.aclose()
        if stop is not None:
            await stop()

    if loop.on_network_thread():  # whoever had it last asked a worker there
        loop.submit(end())
        return
    try:
        loop.run(end(), 5.0)
    except (TimeoutError, KwflowError, OSError, RuntimeError) as error:
        log.info("closing links: %s", error)


def _hop(peer: str, start: int, stop: int, hello: Hello) -> Hop:
    """Raises WorkerFailed where a worker has other layers than the directory says."""
    first, last = hello.span
    if not first <= start < stop <= last:
        raise WorkerFailed(f"serves layers {first}:{last}, by its own word, not {start}:{stop}", peer=peer)
    return Hop(peer, start, stop, hello)


@dataclass(frozen=True)
class Hop:
    """One worker on a route and the layers it runs for this flow."""

    peer: str
    start: int
    stop: int
    hello: Hello

    @property
    def span(self) -> Span:
        return self.start, self.stop

    @property
    def schema(self) -> Schema:
        return self.hello.schema


@dataclass(frozen=True)
class KnownWorker:
    """A worker as a client knows it; ``hello``: what it said of itself, None if it was not asked since it failed."""

    peer: str
    start: int
    stop: int
    hello: Hello | None
    avoided: bool  # by routes, because it failed


class Peers(Protocol):
    """Where a flow's workers come from; shared by its slices."""

    pool: channel.Pool

    async def route(self, start: int, stop: int, blocked: Collection[str]) -> list[Hop]:
        """Hops that cover ``[start, stop)`` now. Raises NoRoute."""
        ...

    def snapshot(self, start: int, stop: int, blocked: Collection[str]) -> list[Hop] | None:
        """The same from what is known already, from any thread; None where somebody must be asked."""
        ...

    def last_known(self, start: int, stop: int) -> list[tuple[Span, Schema]] | None:
        """What the workers of these layers took when they were met last; None where some were never met."""
        ...

    def hellos(self) -> Sequence[Hello]:
        """What the workers that were met say of themselves."""
        ...

    def known(self) -> Sequence[KnownWorker]:
        """The workers that serve some layers now, as far as this client knows; nobody is asked."""
        ...

    def failed(self, error: WorkerFailed) -> None:
        """Take note that a worker failed, so that the next routes avoid it."""
        ...

    def avoided(self, peer: str) -> bool:
        """Whether routes avoid a worker, because it failed and has not answered since."""
        ...

    def served_before(self, start: int, stop: int, blocked: Collection[str]) -> bool:
        """Whether workers other than those served these layers to this client before: a gap that may close again."""
        ...

    def listed(self, start: int, stop: int, blocked: Collection[str]) -> bool:
        """Whether workers other than those are named for these layers, avoided ones too."""
        ...

    def refreshed_at(self) -> float:
        """From when on, by time.monotonic(), it is known which workers there are: newer ones may have come."""
        ...

    def close(self) -> None: ...
