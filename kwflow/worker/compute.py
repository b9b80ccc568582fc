"""One thread that runs a worker's tensors, by priority: a decode step passes a long backward that waits."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from kwflow.errors import WorkerFailed

DECODE, PREFILL, FORWARD, BACKWARD = range(4)  # priorities: the lowest number goes first


class Compute:
    """One thread that runs tensor work by priority, first come first served within one."""

    def __init__(self) -> None:
        # OpenMP keeps the number of threads by thread: this one's is fixed here, whatever others set later
        self.threads = torch.get_num_threads()
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="kwflow-compute", daemon=True)
        self._thread.start()
        if not _running:
            atexit.register(_finish)
        _running.add(self)

    async def __call__(self, priority: int, work: Callable[[], Any]) -> tuple[Any, float, float]:
        """Run ``work`` on the compute thread: its result, seconds queued, seconds computing. Raises WorkerFailed."""
        if self._stopped:
            raise WorkerFailed("the worker is closed")
        future: Future[tuple[Any, float, float]] = Future()
        self._queue.put((priority, next(self._number), (work, future, time.perf_counter())))
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        torch.set_num_threads(self.threads)
        while True:
            _, _, job = self._queue.get()
            if job is None:
                return self._drop()
            work, future, queued = job
            if not future.set_running_or_notify_cancel():
                continue
            began = time.perf_counter()
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  handed to whoever awaits the future
                if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future cannot carry those
                    error = RuntimeError(f"{type(error).__name__}: {error}")
                future.set_exception(error)
            else:
                future.set_result((result, began - queued, time.perf_counter() - began))
            del work, future, job

    def _drop(self) -> None:
        """What still waits is never run, and its callers are told so."""
        while not self._queue.empty():
            _, _, job = self._queue.get()
            if job is not None and job[1].set_running_or_notify_cancel():
                job[1].set_exception(WorkerFailed("the worker is closed"))

    def stop(self) -> None:
        self._stopped = True
        self._queue.put((-1, next(self._number), None))


_running: weakref.WeakSet[Compute] = weakref.WeakSet()


def _finish() -> None:
    """At exit: a thread that is still freeing tensors when the interpreter ends would abort the process."""
    for compute in list(_running):
        compute.stop()
    for compute in list(_running):
        compute._thread.join(2.0)
