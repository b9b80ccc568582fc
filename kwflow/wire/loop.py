"""The one network thread of a process: an asyncio loop, and how other threads give it work.

Imports no network library.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from kwflow import background
from kwflow.errors import CallerError

T = TypeVar("T")

log = logging.getLogger(__name__)

_lock = threading.RLock()  # also taken by finalizers, which may run anywhere


_network: _Network | None = None
_parents: list[_Network] = []  # in a forked child: nothing of it may be finalized here


class _Network:
    """An event loop and its thread. Nothing but the end of the process ends it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._over = False
        background.start_thread(self._serve, "kwflow-network", stop=self._stop)
        background.disown_in_forks(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._over:
            error = None
            try:
                self.loop.run_forever()
            except BaseException as raised:  # noqa: BLE001  SystemExit in a task, say
                error = raised
            if not self._over:
                log.warning("the network thread was ended (%r); it goes on", error, exc_info=error)
        self.loop.close()

    def _stop(self) -> None:
        self._over = True
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    async def _end(self) -> None:
        """Cancel what still runs, so that nothing is destroyed while it is pending."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)
        self.loop.stop()

    def forked(self) -> None:
        """In a forked child: keep the parent's loop as it stands, and out of what it shares with the parent's."""
        global _network
        _network = None
        _parents.append(self)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        own = [self._selector.fileno()] if hasattr(self._selector, "fileno") else []
        background.blind([*own, *(key.fd for key in self._selector.get_map().values())])


def network_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's one network thread, started at first use (again in a forked child).

    Raises CallerError at the process's end.
    """
    global _network
    with _lock:
        if background.ending():
            raise CallerError("Python is ending, and kwflow's network thread has ended")
        if _network is None:
            background.hold_in_forks(_lock)
            _network = _Network()
        return _network.loop


def begin(work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Start ``background.Background`` on the network thread, from any thread."""
    network_loop().call_soon_threadsafe(background.Background, work, what, context=Context())


def on_network_thread() -> bool:
    """Whether the caller runs on the network thread, where nothing may wait for it."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return _network is not None and running is _network.loop


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the network thread; its result is awaited there or elsewhere.

    Without the caller's context: asyncio keeps it in every timer, cancelled ones too, until the timer's time has come,
    and a session that stands there would keep its keys and values on the workers so long.
    """
    try:
        loop = network_loop()
    except CallerError:
        work.close()
        raise
    return Context().run(asyncio.run_coroutine_threadsafe, work, loop)


def run(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine on the network thread and wait for it here; an interrupt cancels it.

    Raises RuntimeError when called from the network thread itself, where it would wait for itself for ever.
    """
    if on_network_thread():
        work.close()
        raise RuntimeError("a blocking kwflow call on kwflow's own network thread; use `await flow.acall(...)` there")
    future = submit(work)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread of its own: asyncio's pool could fill up with calls that wait for each other."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    background.start_thread(run, "kwflow-composed")
    return await future
