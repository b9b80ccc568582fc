"""The network thread."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar

from kwflow.wire import loop

_held: ContextVar[object] = ContextVar("held")


class Held:
    pass


async def _wait_a_little() -> None:
    """As requests do: a timeout that is not needed."""
    async with asyncio.timeout(60):
        await asyncio.sleep(0)


def test_what_stands_in_a_callers_context_is_freed_when_the_caller_lets_go() -> None:
    """A timer keeps its context until its time, a cancelled one too where another stands before it."""
    network = loop.network_loop()
    first = loop.run(_later(network), 5)
    try:
        value = Held()
        token = _held.set(value)
        loop.run(_wait_a_little(), 5)
        _held.reset(token)
        ref = weakref.ref(value)
        del value, token
        gc.collect()
        assert ref() is None
    finally:
        network.call_soon_threadsafe(first.cancel)


async def _later(network: asyncio.AbstractEventLoop) -> asyncio.TimerHandle:
    return network.call_later(30, lambda: None)
