"""The one network thread of a process: an asyncio loop, and how other threads give it work.

Imports no network library.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kwflow import background
from kwflow.background import start_thread
from kwflow.errors import CallerError
from kwflow.wire.channel import _Network, _network

T = TypeVar("T")

_lock = threading.RLock()  # also taken by finalizers, which may run anywhere


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


def on_network_thread() -> bool:
    """Whether the caller runs on the network thread, where nothing may wait for it."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return _network is not None and running is _network.loop


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the network thread; its result is awaited there or elsewhere."""
    try:
        loop = network_loop()
    except CallerError:
        work.close()
        raise
    return asyncio.run_coroutine_threadsafe(work, loop)


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

    start_thread(run, "kwflow-composed")
    return await future
