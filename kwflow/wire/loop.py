"""The one network thread of a process: an asyncio loop, and how other threads give it work.

Imports no network library.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.RLock()  # also taken by finalizers, which may run anywhere
_loop: asyncio.AbstractEventLoop | None = None
_pid: int | None = None


def network_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's one network thread, started at first use (again in a forked child)."""
    global _loop, _pid
    with _lock:
        if _loop is None or _loop.is_closed() or _pid != os.getpid():
            loop, ready = asyncio.new_event_loop(), threading.Event()

            def serve() -> None:
                asyncio.set_event_loop(loop)
                loop.call_soon(ready.set)
                loop.run_forever()

            threading.Thread(target=serve, name="kwflow-network", daemon=True).start()
            ready.wait()
            if _pid is None:
                atexit.register(_wind_up)
            _loop, _pid = loop, os.getpid()
        return _loop


def _wind_up() -> None:
    """At exit: cancel what still runs on the network thread, so that nothing is destroyed while it is pending."""

    async def cancel_others() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)

    if _loop is not None and _pid == os.getpid() and _loop.is_running():
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(cancel_others(), _loop).result(2.0)


def on_network_thread() -> bool:
    """Whether the caller runs on the network thread, where nothing may wait for it."""
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the network thread; its result is awaited there or elsewhere."""
    return asyncio.run_coroutine_threadsafe(work, network_loop())


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

    threading.Thread(target=run, name="kwflow-composed", daemon=True).start()
    return await future
