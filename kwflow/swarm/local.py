"""A swarm on this machine: real worker processes, real libp2p on loopback, all of which end with this process.

One of the few modules that put the parts together. It starts ``python -m kwflow worker … --supervised`` and talks to it
over inherited pipes; a notebook's own function reaches the workers there, and only there. No torch, no hivemind.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

from kwflow.background import disown_in_forks
from kwflow.errors import KwargError, SpanError, WorkerFailed, from_wire
from kwflow.kwargs.schema import Span
from kwflow.kwargs.tree import as_int
from kwflow.show.progress import bar
from kwflow.swarm.lifetime import Child, ChildFailed, same_imports

# NOTE [template] each worker imports for itself (10 s of CPU with its weights, all workers at once). Forks of a process
# that has imported everything would start in a fraction, but not safely: numpy's and scipy's BLAS start threads when
# they are imported, and macOS's frameworks do not survive a fork.
READY_SECONDS = 120.0
TELL_SECONDS = 10.0
LOOK_SECONDS = 0.5  # between two looks at who is ready, for the bar


class Client(Protocol):
    """Who may be connected to a local swarm: the peers of a flow."""

    def known(self) -> Sequence[Any]: ...
    def close(self) -> None: ...


_swarms: weakref.WeakSet[LocalSwarm] = weakref.WeakSet()  # of this process


class LocalWorker:
    """One worker process of a local swarm: ``span``, ``peer`` (its id), ``addrs``, ``pid``."""

    def __init__(self, child: Child, span: Span):
        self.child, self.span = child, span
        self.peer, self.addrs = "", []
        self.pid = child.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists, paused or not."""
        return self.child.alive

    @property
    def paused(self) -> bool:
        return self.child.paused

    def log(self) -> str:
        """What it has printed, to stdout or stderr."""
        return self.child.log()

    def __repr__(self) -> str:
        state = "paused" if self.paused else "alive" if self.alive else "dead"
        return f"<worker of layers {self.span[0]}:{self.span[1]}, pid {self.pid}, {state}>"


class LocalSwarm:
    """Workers on this machine; made by ``local_swarm``. Also a context manager."""

    def __init__(self, model: str, command: Sequence[str], *, threads: int, function: bytes, timeout: float):
        self.model, self.workers = model, list[LocalWorker]()
        self._command, self._function, self._timeout = list(command), function, timeout
        # PASSIVE: idle OpenMP threads sleep; where processes share cores, spinning ones cost 3 to 10 times (measured)
        self._env = {**same_imports(), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._close = weakref.finalize(self, _close, self.workers, self._clients)  # at exit too
        _swarms.add(self)
        disown_in_forks(self)

    @property
    def peers(self) -> list[str]:
        """Addresses of the workers that run now."""
        return [addr for worker in self.workers if worker.alive and not worker.paused for addr in worker.addrs]

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def add(self, start: int, stop: int) -> LocalWorker:
        """Start one more worker for layers ``[start, stop)`` and wait until it serves."""
        return self.start([(start, stop)])[0]

    def start(self, spans: Sequence[Span]) -> list[LocalWorker]:
        """Start workers at once and wait until all serve; if one fails, none of them stays.

        Raises WorkerFailed, also for a swarm that is closed, or is closed while they start.
        """
        if self.closed:
            raise WorkerFailed("the swarm is closed; kf.local_swarm starts another")
        deadline = time.monotonic() + self._timeout
        new: list[LocalWorker] = []
        try:
            for span in spans:
                new.append(self._spawn(span))
            for worker in new:
                worker.child.send(self._function, deadline)
            with bar("starting workers", len(new), unit="worker") as shown:
                self._introduce(new, deadline, shown)
            self.workers += new
            if self.closed:  # in the meantime, by another thread
                raise WorkerFailed("the swarm was closed while its workers started")
        except BaseException:
            for worker in new:
                worker.child.end()
            raise
        return new

    def _spawn(self, span: Span) -> LocalWorker:
        command = [*self._command, "--blocks", f"{span[0]}:{span[1]}", "--supervised"]
        return LocalWorker(Child(command, env=self._env), span)

    def _introduce(self, new: Sequence[LocalWorker], deadline: float, shown: Any) -> None:
        """Let all load at once; the first in the swarm gets no addresses to join, the others get its."""
        peers, waiting = self.peers, list(new)
        introduced = new if peers else new[:1]
        for worker in introduced:
            worker.child.send(json.dumps(peers).encode(), deadline)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            select.select([worker.child for worker in waiting], [], [], min(left, LOOK_SECONDS))
            for worker in tuple(waiting):
                try:
                    report = worker.child.report()
                except ChildFailed as error:
                    raise _explain(worker, error) from error
                if report is None:
                    continue
                worker.peer, worker.addrs = report["peer"], report["addrs"]
                waiting.remove(worker)
                if worker is introduced[0] and introduced is not new:
                    introduced = new
                    for other in new[1:]:
                        other.child.send(json.dumps(worker.addrs).encode(), deadline)
            shown.update(len(new) - len(waiting) - shown.n)  # to its end: a notebook keeps one that fell short, in red
            if waiting and time.monotonic() > deadline:
                raise WorkerFailed(
                    f"{waiting[0]!r} was not ready in {self._timeout:g} s\n{waiting[0].child.last_words()}",
                    span=waiting[0].span,
                )

    def kill(self, index: int) -> None:
        """End a worker and its p2pd at once, as ``kill -9`` does."""
        self._worker(index).child.end()

    def pause(self, index: int) -> None:
        """Stop a worker and its p2pd (SIGSTOP): its connections stay open and say nothing."""
        self._worker(index).child.pause()

    def resume(self, index: int) -> None:
        """Let a paused worker go on."""
        self._worker(index).child.resume()

    def tell(self, index: int, what: Mapping[str, Any]) -> dict[str, Any]:
        """Ask a worker for something over its own pipe, and wait until it is done (``kf.faults``).

        Raises WorkerFailed when it is dead, paused, or does not answer; what it says when it cannot.
        """
        worker = self._worker(index)
        if worker.paused or not worker.alive:
            raise WorkerFailed(f"{worker!r} cannot be told anything now", peer=worker.peer, span=worker.span)
        try:
            return worker.child.ask(what, time.monotonic() + TELL_SECONDS)
        except ChildFailed as error:
            raise _explain(worker, error) from error
        except TimeoutError as error:
            raise WorkerFailed(f"{worker!r}: {error}", peer=worker.peer, span=worker.span) from error

    def _worker(self, index: int) -> LocalWorker:
        number, count = as_int(index), len(self.workers)
        if number is None or not -count <= number < count:
            raise KwargError(f"no worker {index!r:.60}; swarm.workers are numbered 0 to {count - 1}, dead ones too")
        return self.workers[number]

    def close(self) -> None:
        """End every worker, and close the flows that were connected to them and know no others; again does nothing."""
        self._close()

    def forked(self) -> None:
        self._close.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<local swarm of {self.model}: {', '.join(map(repr, self.workers)) or 'no workers'}>"


def local_swarm(
    model: str | os.PathLike[str],
    workers: int | Sequence[Span] = 2,
    *,
    dtype: Any = None,
    quantize: str | None = None,
    device: Any = None,
    threads: int = 1,
    block_fn: Callable[..., Any] | str | None = None,
    name: str | None = None,
    timeout: float = READY_SECONDS,
) -> LocalSwarm:
    """Start real worker processes on this machine and wait until they serve.

        with kf.local_swarm("smollm2-135m", workers=[(0, 10), (10, 30)]) as swarm:
            flow = kf.connect(swarm.model, peers=swarm.peers)

    ``workers``: how many (they split the layers evenly), or their spans. ``threads``: torch threads of each. ``dtype``:
    auto (the checkpoint's, the default), float32, bfloat16 or float16. ``quantize``: int8 or nf4. ``device``: cpu (the
    default), auto, cuda, cuda:1 or mps.
    ``block_fn``: the workers' own block function, as ``"pkg.mod:fn"`` or a function of this process (a notebook's),
    which travels over their pipes. ``name``: what the swarm calls the model, if not the last part of its path or id;
    ``kf.connect`` takes it too. ``timeout``: seconds until all must serve. They end with this process, however it ends;
    an interrupt leaves them alone.

    Raises SpanError, KwargError; what a worker says when it cannot serve, with the end of its log; else WorkerFailed.
    """
    from kwflow.models.files.checkpoint import as_text

    where = as_text(model)
    if threads < 1:
        raise KwargError(f"threads={threads}; give 1 or more")
    command = [sys.executable, "-m", "kwflow", "worker", where, "--threads", str(threads)]
    if name is not None:
        command += ["--name", name]
    if dtype is not None:
        command += ["--dtype", str(dtype).removeprefix("torch.")]
    if quantize:
        command += ["--quantize", quantize]
    command += ["--device", str("cpu" if device is None else device)]
    if isinstance(block_fn, str):
        command += ["--block-fn", block_fn]
    function = b"" if block_fn is None or isinstance(block_fn, str) else _pickled(block_fn)
    spans = spans_of(where, workers)
    swarm = LocalSwarm(where, command, threads=threads, function=function, timeout=timeout)
    try:
        swarm.start(spans)
    except BaseException:
        swarm.close()
        raise
    return swarm


def spans_of(model: str, workers: int | Sequence[Span]) -> list[Span]:
    """The spans of so many workers, as long as can be alike, or those that are given. Raises SpanError."""
    count = as_int(workers)
    if count is None:
        try:
            spans = [(int(start), int(stop)) for start, stop in workers]  # type: ignore[union-attr]
        except (TypeError, ValueError):
            spans = []
        if not spans or any(start < 0 or stop <= start for start, stop in spans):
            raise SpanError(f"workers takes a number or spans (start, stop) with 0 <= start < stop, got {workers!r}")
        return spans
    from kwflow.models.files.checkpoint import layer_count

    layers = layer_count(model)
    if not 1 <= count <= layers:
        raise SpanError(f"{count} workers cannot split the {layers} layers of {model}; 1 to {layers} can")
    bounds = [layers * index // count for index in range(count + 1)]
    return list(pairwise(bounds))


def _pickled(function: Callable[..., Any]) -> bytes:
    if not callable(function):
        raise KwargError(f"block_fn takes a function or 'pkg.mod:fn', got {function!r:.80}")
    import cloudpickle

    return cloudpickle.dumps(function)


def _explain(worker: LocalWorker, error: ChildFailed) -> Exception:
    message = f"{error}\n{worker.child.last_words()}"
    if error.report is None:
        return WorkerFailed(f"{worker!r} cannot serve: {message}", span=worker.span)
    return from_wire({**error.report, "message": message, "span": list(worker.span)}, peer=str(worker.pid))


def end_with_swarm(client: Client, peers: Sequence[str]) -> None:
    """Close a client with the local swarm that these are addresses of, if any: it keeps a p2pd, and nobody answers."""
    for swarm in list(_swarms):
        if not swarm.closed and any(addr in peers for worker in swarm.workers for addr in worker.addrs):
            swarm._clients.add(client)


def _close(workers: list[LocalWorker], clients: weakref.WeakSet[Client]) -> None:
    for worker in workers:
        worker.child.end()
    peers = {worker.peer for worker in workers}
    for client in list(clients):
        if all(known.peer in peers for known in client.known()):
            client.close()
