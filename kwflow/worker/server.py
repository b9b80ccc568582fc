"""The worker's side of every request: hello, run (value and derivatives), session steps.

Handed a SpanSpec; imports no models and no network. One compute thread runs tensors, the caller's asyncio thread does
the rest; a priority queue between them lets a decode step pass a long backward.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.derive import evaluate
from kwflow.background import disown_in_forks
from kwflow.blocks.block import of_the_machine, run
from kwflow.blocks.kv import KV
from kwflow.blocks.precision import precision, upcast
from kwflow.blocks.span import SpanSpec
from kwflow.errors import (
    BlockError,
    BudgetError,
    KwargError,
    KwflowError,
    SessionError,
    SpanError,
    UnsupportedError,
    WorkerFailed,
    WorkerFull,
    to_wire,
)
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.bind import check_bound
from kwflow.kwargs.bound import Bound, Span
from kwflow.kwargs.hidden import check_hidden
from kwflow.version import __version__
from kwflow.wire.hello import Hello, WorkerLimits
from kwflow.wire.message import Message
from kwflow.worker.compute import BACKWARD, DECODE, FORWARD, PREFILL, Compute
from kwflow.worker.hello import features, hello
from kwflow.worker.inbox import Inbox, Neighbour
from kwflow.worker.kept import DEFAULT_KEEP_BYTES, DEFAULT_KEEP_CLIENT_BYTES, Keeping, Kept
from kwflow.worker.requests import (
    MAX_ORDER,
    copy_to,
    key_size,
    read_count,
    read_operations,
    read_reorders,
    read_request,
    sizes_of,
    take_mask,
    unmapped,
)
from kwflow.worker.sessions import SessionState

MAX_NAME = 64

DEFAULT_KV_BYTES = 2 << 30
FIRST_ROOM = 64  # columns of a session whose length nobody said, at least; doubled when they are full

log = logging.getLogger(__name__)


class Served:
    """A span that is served: makes a Connection for each channel that a client opens."""

    def __init__(
        self,
        spec: SpanSpec,
        *,
        model: str = "",
        kv_bytes: int = DEFAULT_KV_BYTES,
        batch_tokens: int = 1 << 16,
        keep_bytes: int = DEFAULT_KEEP_BYTES,
        keep_client_bytes: int = DEFAULT_KEEP_CLIENT_BYTES,
    ):
        self.spec, self.model = spec, model
        self.kv_bytes, self.batch_tokens = kv_bytes, batch_tokens
        self.compute = Compute()
        self.kv_used = 0
        self.kept = Kept(spec.device, keep_bytes, keep_client_bytes)
        self.neighbours: Neighbour | None = None  # how other workers are reached, if they are
        self.inboxes: dict[str, Inbox] = {}  # of sessions, by name
        self._handing: set[asyncio.Task[None]] = set()
        disown_in_forks(self)

    def forked(self) -> None:
        """In a forked child: the parent's sessions are not here."""
        self.kv_used = 0
        self.kept.clear()
        self.inboxes.clear()
        self._handing.clear()
        disown_in_forks(self)

    def hello(self) -> Hello:
        """What a client learns before its first call."""
        limits = WorkerLimits(kv_bytes=self.kv_bytes, batch_tokens=self.batch_tokens, order=MAX_ORDER)
        push = self.neighbours is not None
        return hello(self.spec, self.model, limits, self.compute.threads, push=push)

    def hand_on(self, session: SessionState, number: int, hidden: Tensor) -> None:
        """Bring the next worker a step's hidden; the client does it where this fails."""
        neighbours = self.neighbours
        if session.next is None or neighbours is None:
            raise SessionError("the step is to be handed on: nobody said to whom, or this worker reaches no other")
        (peer, name), layer = session.next, session.kv.span[1]
        if name in self.inboxes:  # the next layers are this worker's too
            self.inboxes[name].put(number, hidden)
            return

        async def hand() -> None:
            try:
                message = Message({"op": "push", "session": name, "step": number}, hidden)
                await neighbours(peer, layer, message)
            except (KwflowError, OSError) as error:
                log.info("could not hand a step on to %s: %s", peer[-8:], error)
            except Exception:
                log.exception("could not hand a step on to %s", peer[-8:])

        task = asyncio.create_task(hand(), name="kwflow hand on")
        self._handing.add(task)
        task.add_done_callback(self._handing.discard)

    def accept(self, remote: str) -> ClientConnection:
        return ClientConnection(self, remote)

    def close(self) -> None:
        self.compute.stop()

    def kv_size(self, batch: int, columns: int, layers: int) -> int:
        sizes, item = self.spec.schema.sizes, self.spec.dtype.itemsize
        key_and_value = sum(sizes.get(name, sizes["head_dim"]) for name in ("key_dim", "value_dim"))
        return batch * columns * layers * sizes["kv_head"] * key_and_value * item


class ClientConnection:
    """One client's channel: requests in order, one session at most, freed when the channel closes."""

    def __init__(self, served: Served, remote: str):
        self.served, self.remote = served, remote
        self.session: SessionState | None = None
        self.keeping = Keeping(served.kept)
        self.closed = False

    async def handle(self, request: Message) -> Message:
        """Answer one request; every error becomes a reply that says whose it is."""
        operations = {"hello": self._hello, "run": self._run, "step": self._step, "push": self._push}
        operations |= {"keep": self.keeping.keep, "drop": self.keeping.drop}
        name = request.meta.get("op")
        try:
            if not isinstance(name, str) or name not in operations:
                raise UnsupportedError(f"this worker (kwflow {__version__}) has no operation {name!r}")
            return await operations[name](self.served.kept.resolved(request))
        except KwflowError as error:
            return Message({"error": to_wire(error, span=request.meta.get("span"))})
        except Exception as error:  # noqa: BLE001  reported to the client, whatever it is
            return Message({"error": to_wire(error, span=request.meta.get("span"))})

    def close(self) -> None:
        self.closed = True
        self.keeping.close()
        self._release()

    def _release(self) -> None:
        if self.session is not None:
            self.served.kv_used -= self.session.bytes + self.session.kwargs_bytes
            self.served.inboxes.pop(self.session.name, None)
            self.session = None

    async def _hello(self, request: Message) -> Message:
        return Message({"hello": self.served.hello().to_json()})

    # ---- values and derivatives

    async def _run(self, request: Message) -> Message:
        spec, meta = self.served.spec, request.meta
        start, stop = self._span(meta)
        operations = read_operations(meta.get("ops", []))
        hidden, bound, arguments = read_request(request.tree, (start, stop))
        tensors = [hidden, *bound.tensors, *arguments]
        hidden_of_call, *leaves = unmapped(operations, tensors, bound)
        check_hidden(hidden_of_call, spec.schema.sizes["hidden"])
        check_bound(bound.with_tensors(leaves), spec.schema, sizes_of(hidden_of_call))
        self._limit(hidden)
        dtype = self._dtype(meta)
        blocks = spec.part(start, stop)

        def work() -> list[Tensor | None]:
            params = [block.params for block in blocks]
            if dtype != spec.dtype:
                params = upcast(params, dtype)

            def fn(hidden: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
                captured: list[Tensor] = []
                out = run(blocks, params, hidden.to(dtype), bound.with_tensors(leaves), captured=captured)
                # not .to(hidden.dtype): what precision lifts in the layers would leave float64 here too
                return tuple(output.to(hidden) for output in (out, *captured))

            with precision(dtype):
                try:
                    moved = [tensor.to(spec.device) for tensor in tensors]
                    return [_home(result) for result in evaluate(fn, operations, moved)]
                except Exception as error:
                    if isinstance(error, KwflowError) or of_the_machine(error):
                        raise
                    # what torch cannot derive here, it cannot on another worker
                    message = f"deriving layers {start}:{stop} ({operations}) raised {type(error).__name__}: {error}"
                    raise BlockError(message) from error

        backward = bool(operations)
        results, queued, computed = await self.served.compute(BACKWARD if backward else FORWARD, work)
        return Message({"queue": round(queued, 6), "compute": round(computed, 6)}, results)

    # ---- sessions

    async def _step(self, request: Message) -> Message:
        spec, meta = self.served.spec, request.meta
        start, stop = self._span(meta)
        started, tree, spent = time.perf_counter(), request.tree, dict[str, float]()
        if meta.get("from") is not None:
            tree = await self._await_hidden(request)
            spent["waited"] = round(time.perf_counter() - started, 6)
        previous = self.session and self.session.kwargs
        hidden, bound, _ = read_request(tree, (start, stop), previous)
        check_hidden(hidden, spec.schema.sizes["hidden"])
        past, seq = read_count(meta, "start"), hidden.shape[1]
        reorders = read_reorders(meta.get("reorder", []), hidden.shape[0])
        unchanged = (
            bound is previous and bound.fixed and self.session is not None and hidden.shape[0] == self.session.batch
        )
        if not unchanged:
            check_bound(bound, spec.schema, {**sizes_of(hidden), "key": key_size(bound, past, seq)})
        prefix_length = prefix_kv.length(bound)
        if prefix_length and past:
            raise SessionError(f"prefix_kv stands before column 0, the step starts at {past}")
        session = self._opened(meta, hidden.shape[0], start, stop)
        prefix_length = session.kv.prefix if past else prefix_length
        if past > session.length:
            raise WorkerFailed(f"this worker holds {session.length} columns of the session, the step starts at {past}")
        self._make_room(session, prefix_length, past, past + seq)
        blocks = spec.part(start, stop)
        self._reserve_kwargs(session, bound)

        def work() -> list[Tensor]:
            captured: list[Tensor] = []
            with torch.no_grad(), precision(spec.dtype):
                for number, rows in reorders:
                    if number > session.reordered:
                        session.reorder(rows, past)
                        session.reordered = number
                kwargs = session.kwargs
                if kwargs is None or bound is not kwargs:
                    kwargs = bound.with_tensors([copy_to(tensor, spec.device) for tensor in bound.tensors])
                session.kwargs = kwargs
                step_mask, layer_kwargs = take_mask(kwargs)
                mask = session.column_mask(step_mask, past, seq)
                mask = None if mask is None else mask.to(spec.device)
                session.length = past  # what stands behind is cropped, also when this step fails
                params = [block.params for block in blocks]
                entering = hidden.to(spec.device, spec.dtype)
                out = run(
                    blocks,
                    params,
                    entering,
                    layer_kwargs,
                    past=past,
                    attention_mask=mask,
                    kv=session.kv,
                    captured=captured,
                )
                session.length = past + seq
                return [output.to(hidden.dtype).cpu() for output in (out, *captured)]

        outputs, queued, computed = await self.served.compute(DECODE if seq == 1 else PREFILL, work)
        if "hand" in meta:
            self.served.hand_on(session, read_count(meta, "hand"), outputs[0])
        return Message({**spent, "queue": round(queued, 6), "compute": round(computed, 6)}, outputs)

    async def _await_hidden(self, request: Message) -> dict[str, Any]:
        """A step's tree with the hidden that another worker brings."""
        session, meta, wait = self.session, request.meta, request.meta.get("wait")
        if session is None or not session.name:
            raise WorkerFailed("this worker holds no session that a step could be handed on to")
        if not isinstance(wait, int | float) or not 0 <= wait:
            raise KwargError(f"a step that is handed on says how many seconds to wait, got {wait!r:.40}")
        hidden = await session.inbox.take(read_count(meta, "from"), wait)
        return {**(request.tree if isinstance(request.tree, dict) else {}), "hidden": hidden}

    async def _push(self, request: Message) -> Message:
        """Hidden for a step of somebody's session, by its name, which only its client and its workers know."""
        inbox, hidden = self.served.inboxes.get(str(request.meta.get("session"))), request.tree
        if hidden is not None and not isinstance(hidden, Tensor):
            raise KwargError("what is handed on is one tensor")
        return Message({"taken": inbox is not None and inbox.put(read_count(request.meta, "step"), hidden)})

    def _reserve_kwargs(self, session: SessionState, bound: Bound) -> None:
        """Count a step's kwargs, which stay until the next one, in the room for keys and values."""
        size, limit = sum(tensor.nbytes for tensor in bound.tensors), self.served.kv_bytes
        used = self.served.kv_used - session.kwargs_bytes
        if used + size > limit:
            raise WorkerFull(
                f"no room for a step's kwargs: they hold {size / 1e6:.1f} MB, {(limit - used) / 1e6:.1f} MB are free "
                f"(workers with more: kwflow worker --kv-mb)"
            )
        self.served.kv_used, session.kwargs_bytes = used + size, size

    def _make_room(self, session: SessionState, prefix_length: int, start: int, stop: int) -> None:
        """See that a step of columns ``[start, stop)`` has room. Raises SessionError, WorkerFull.

        A session whose length nobody said gets twice its room, or half of what is free, or what it needs.
        """
        served, kv, columns = self.served, session.kv, prefix_length + stop
        if columns <= kv.room:
            return
        if kv.max_length is not None:
            also = f" behind a prefix of {prefix_length}" if prefix_length else ""
            raise SessionError(f"columns {start}:{stop}{also} do not fit max_length {kv.max_length}")
        layers = kv.span[1] - kv.span[0]
        free = served.kv_bytes - served.kv_used
        most = kv.room + free // served.kv_size(session.batch, 1, layers)
        if columns > most:
            raise WorkerFull(
                f"no room for {columns} columns of a session of {session.batch} rows × {layers} layers, which has "
                f"{kv.room}: {free / 1e6:.1f} MB are free for more keys and values (fewer rows, or workers with more: "
                f"kwflow worker --kv-mb)"
            )
        room = max(columns, min(max(FIRST_ROOM, 2 * kv.room), (kv.room + most) // 2))
        more = served.kv_size(session.batch, room - kv.room, layers)
        served.kv_used, session.bytes, kv.room = served.kv_used + more, session.bytes + more, room

    def _opened(self, meta: Mapping[str, Any], batch: int, start: int, stop: int) -> SessionState:
        if self.session is not None and meta["start"] == 0 and batch != self.session.batch:
            self._release()  # a session that begins again, with other rows
        if self.session is None:
            if self.closed:  # while the step waited for what is handed on: nobody would free its room
                raise WorkerFailed("the channel is closed")
            if meta["start"] > 0:
                raise WorkerFailed(f"this worker holds no columns of the session, the step starts at {meta['start']}")
            served = self.served
            max_length = read_count(meta, "max_length") if "max_length" in meta else None
            if batch < 1 or max_length == 0:
                raise SessionError(f"a session of {batch} rows and {max_length} columns")
            size = served.kv_size(batch, max_length or 0, stop - start)
            free = served.kv_bytes - served.kv_used
            if size > free:
                raise WorkerFull(
                    f"no room for a session of {batch} rows × {max_length} columns × {stop - start} layers: it needs "
                    f"{size / 1e6:.1f} MB of keys and values, {free / 1e6:.1f} MB are free (a shorter max_length or "
                    f"max_new_tokens, fewer rows, or workers with more: kwflow worker --kv-mb)"
                )
            name = meta.get("session", "")
            if not isinstance(name, str) or len(name) > MAX_NAME or name in served.inboxes:
                raise SessionError(f"a session's name is up to {MAX_NAME} letters, and its own, got {name!r:.80}")
            served.kv_used += size
            self.session = SessionState(KV(start, stop, max_length), batch, size, name=name)
            if name:
                served.inboxes[name] = self.session.inbox
        if (start, stop) != self.session.kv.span:
            raise SessionError(f"the session is of layers {self.session.kv.span}, the step of {start}:{stop}")
        if (to := meta.get("next")) is not None:
            if not (isinstance(to, list) and len(to) == 2 and all(isinstance(part, str) for part in to)):
                raise SessionError(f"outputs are handed on to [peer, session], got {to!r:.80}")
            self.session.next = to[0], to[1]
        if batch != self.session.batch:
            raise SessionError(
                f"the session has {self.session.batch} rows, the step {batch}; reorder(ids) changes rows"
            )
        return self.session

    def _dtype(self, meta: Mapping[str, Any]) -> torch.dtype:
        """The precision of this call: the worker's, or a wider one that the client asks for."""
        if meta.get("dtype") not in ("float32", "float64"):
            return self.served.spec.dtype
        if meta["dtype"] == "float64" and "float64" not in features(self.served.spec):
            kind = self.served.spec.identity.get("quantization") or self.served.spec.device
            raise UnsupportedError(f"this worker runs {kind}, which has no float64: there is no fp64 verdict")
        return getattr(torch, meta["dtype"])

    def _span(self, meta: Mapping[str, Any]) -> Span:
        value = meta.get("span")
        if not (isinstance(value, list) and len(value) == 2 and all(type(layer) is int for layer in value)):
            raise SpanError(f"a request names its span, [start, stop], got {value!r:.80}")
        start, stop = value
        if not self.served.spec.start <= start < stop <= self.served.spec.stop:
            raise SpanError(
                f"layers {start}:{stop} are not all on this worker, which serves "
                f"{self.served.spec.start}:{self.served.spec.stop}"
            )
        return start, stop

    def _limit(self, hidden: Tensor) -> None:
        tokens = hidden.numel() // max(1, self.served.spec.schema.sizes["hidden"])
        if tokens > self.served.batch_tokens:
            raise BudgetError(f"{tokens} tokens in one request; this worker takes {self.served.batch_tokens}")


def _home(result: Tensor | None) -> Tensor | None:
    """A result on the CPU, on its way into bytes: here, so that the copy is the compute thread's and is timed."""
    return None if result is None else result.cpu()
