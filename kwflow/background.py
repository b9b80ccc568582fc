"""What runs beside the caller, and how it ends: at exit in order, and in a forked child not at all.

A task (``Background``) that anything but ``stop`` ends is begun again. Threads are stopped and joined before Python
ends. A forked child has none of its parent's threads: what lives on them is told so (``forked``) and never finalized
there. Imports nothing of kwflow.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

AGAIN_SECONDS = 1.0  # from the unexpected end of a task until it is begun again
ASKED_SECONDS = 2.0  # for threads to end by themselves at exit; then what they compute is interrupted
EXIT_SECONDS = 10.0  # for all threads to end at exit

log = logging.getLogger(__name__)


# ---- tasks ---------------------------------------------------------------------------------------------------------


class Background:
    """A coroutine in the running event loop that goes on until it returns or is stopped.

        refreshing = Background(self._refresh_forever, "reading the directory")
        await refreshing.stop()

    Whatever else ends it, an exception of any type or a cancellation by somebody else, is said in the log, and after a
    pause it is begun again.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], what: str):
        self._work, self._what, self._stopped = work, what, False
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        if not self._stopped:
            self._task = self._loop.create_task(self._work(), name=f"kwflow {self._what}")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._stopped or _ending:
            return
        error = asyncio.CancelledError("by somebody else") if task.cancelled() else task.exception()
        if error is not None:
            told = "%s ended unexpectedly (%r); it is begun again in %g s"
            log.warning(told, self._what, error, AGAIN_SECONDS, exc_info=error)
            self._loop.call_later(AGAIN_SECONDS, self._begin)

    async def stop(self) -> None:
        """End it for good, and wait until it has ended."""
        self._stopped = True
        self._task.cancel()
        await asyncio.wait({self._task})


# ---- the end of the process ----------------------------------------------------------------------------------------

_threads: dict[threading.Thread, Callable[[], None]] = {}  # and what asks each of them to end
_finalizers: dict[object, weakref.finalize[..., Any]] = {}
_ending = False


def ending() -> bool:
    """Whether this process is at its end, where no thread may be started any more."""
    return _ending


def start_thread(work: Callable[[], None], name: str, *, stop: Callable[[], None] = lambda: None) -> threading.Thread:
    """Start a thread that has ended before Python does: at exit ``stop`` is called, and the thread is joined.

    NOTE [status 134] Python unwinds the stacks of daemon threads that are left when it ends, at the moment they want
    the interpreter back. In the middle of freeing a tensor, or of an operation on one, that is inside a C++ function
    which may not be unwound, and the process aborts: "terminate called without an active exception".
    """
    _hook()
    for thread in [one for one in list(_threads) if not one.is_alive()]:
        _threads.pop(thread, None)
    thread = threading.Thread(target=work, name=name, daemon=True)  # for others Python waits before it runs atexit
    thread.start()
    _threads[thread] = stop
    return thread


def finalize(owner: Any, end: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """``weakref.finalize`` for what needs threads: at exit it is called while they run, in a forked child never."""
    _hook()
    key = object()

    def once() -> None:
        _finalizers.pop(key, None)
        end(*args)

    made = weakref.finalize(owner, once)
    made.atexit = False
    _finalizers[key] = made
    return made


def _wind_up() -> None:
    """At exit: finalize, the newest first; then end the threads, in at most ``EXIT_SECONDS``."""
    global _ending
    try:
        while _finalizers:
            try:
                _finalizers.popitem()[1]()
            except Exception:
                log.exception("at exit")
    finally:  # after an interrupt too
        _ending = True
        began = time.monotonic()
        for stop in reversed(list(_threads.values())):
            stop()
        for thread in _join(began + ASKED_SECONDS):
            _interrupt(thread)
        _join(began + EXIT_SECONDS)


def _join(deadline: float) -> list[threading.Thread]:
    """The threads that have not ended by then."""
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in list(_threads) if thread.is_alive()]


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, when it next runs Python: between two operations of a long computation."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


# ---- forks ---------------------------------------------------------------------------------------------------------


class Forkable(Protocol):
    """Something that a forked copy of this process must let go of without ending it."""

    def forked(self) -> None: ...


class Lock(Protocol):
    """A lock of ``threading``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


FORK_SECONDS = 10.0  # for other threads to be done with what locks guard
_owners: weakref.WeakSet[Forkable] = weakref.WeakSet()
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_forking = threading.Lock()  # one fork at a time
_held: list[Lock] = []
_hooked = False


def disown_in_forks(owner: Forkable) -> None:
    """Call ``owner.forked()`` in every child that this process forks from now on, for as long as ``owner`` lives."""
    _hook()
    _owners.add(owner)


def hold_in_forks(lock: Lock) -> None:
    """Fork only while no other thread holds this lock: in the child it is free, and what it guards is whole."""
    _hook()
    _locks.add(lock)


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_wind_up)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(before=_before_fork, after_in_parent=_release, after_in_child=_forked)


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_SECONDS
    for lock in (_forking, *_locks):
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _held.append(lock)


def _release() -> None:
    held = list(_held)
    _held.clear()  # first: _forking is released too
    for lock in reversed(held):
        lock.release()


def _forked() -> None:
    """In the child: the threads are not there, and what they served is the parent's."""
    global _ending
    _release()
    _threads.clear()
    _ending = False
    finalizers, owners = list(_finalizers.values()), list(_owners)
    _finalizers.clear()
    _owners.clear()
    for owner in owners:
        owner.forked()
    for finalizer in finalizers:
        finalizer.detach()


def blind(fds: Sequence[int]) -> None:
    """Point file descriptors at /dev/null: the kernel's objects lose this process, ours keep their numbers."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
