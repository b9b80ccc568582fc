"""One thread that runs a worker's tensors, by priority: a decode step passes a long backward that waits."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from kwflow.background import disown_in_forks, start_thread
from kwflow.errors import WorkerFailed

DECODE, PREFILL, FORWARD, BACKWARD = range(4)  # priorities: the lowest number goes first


class Compute:
    """One thread that runs tensor work by priority, first come first served within one."""

    def __init__(self) -> None:
        # OpenMP keeps the number of threads by thread: this one's is fixed here, whatever others set later
        self.threads = torch.get_num_threads()
        self._stopped = False
        self._start()
        disown_in_forks(self)

    def _start(self) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._thread: threading.Thread | None = start_thread(self._serve, "kwflow-compute", stop=self.stop)

    def forked(self) -> None:
        """In a forked child: the thread is the parent's, and so is what waits for it; the first work starts another."""
        self._thread = None
        disown_in_forks(self)

    async def __call__(self, priority: int, work: Callable[[], Any]) -> tuple[Any, float, float]:
        """Run ``work`` on the compute thread: its result, seconds queued, seconds computing. Raises WorkerFailed."""
        if self._stopped:
            raise WorkerFailed("the worker is closed")
        if self._thread is None:
            self._start()
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
        if self._thread is not None:
            self._queue.put((-1, next(self._number), None))
