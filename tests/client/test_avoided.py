"""Whom routes avoid: a worker that failed, until it has answered again; it is asked off the call path."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from kwflow import background
from kwflow.errors import BlockError, NoRoute, WorkerFailed, WorkerFull, to_wire
from kwflow.wire import loop
from kwflow.wire.message import Message
from tests.doubles.mortal import Swarm
from tests.doubles.processes import until
from tests.oracle import tiny

B, S, D = 2, 3, tiny.HIDDEN
X = tiny.random(B, S, D)


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Swarm:
    """Two workers of all layers, of which the first is the one that routes take; a failed one is asked again soon."""
    monkeypatch.setattr(importlib.import_module("kwflow.client.peers"), "BAN_SECONDS", 0.1)
    return Swarm("llama", (0, 4), (0, 4))


def lose(swarm: Swarm) -> None:
    """The first one dies at once; from now on dials are listed."""
    swarm.flow(X)
    swarm.kill(0)
    swarm.dialled.clear()


def test_one_that_failed_is_dialled_by_no_call_while_there_are_others(swarm: Swarm) -> None:
    expected = swarm.flow(X)
    lose(swarm)
    assert torch.equal(swarm.flow(X), expected)
    first = swarm.bans[swarm.names[0]]
    until(lambda: swarm.bans[swarm.names[0]].failures == 2)  # asked by nobody's call
    assert swarm.bans[swarm.names[0]].until > first.until
    before = swarm.dialled.count(0)
    for _ in range(5):
        assert torch.equal(swarm.flow(X), expected)
    assert swarm.dialled.count(0) <= before + 1, "at most the next question of how it is"
    assert swarm.flow.peers.avoided(swarm.names[0])


def test_it_is_used_again_once_it_has_answered(swarm: Swarm) -> None:
    lose(swarm)
    swarm.flow(X)
    swarm.revive(0)
    until(lambda: not swarm.bans)
    asked = swarm.asked(0)
    swarm.flow(X)
    assert swarm.asked(0) == asked + 1


def test_it_is_used_again_at_once_where_there_is_no_other(swarm: Swarm) -> None:
    expected = swarm.flow(X)
    lose(swarm)
    swarm.flow(X)
    swarm.revive(0)
    swarm.kill(1)
    assert torch.equal(swarm.flow.options(timeout=3)(X), expected)


def test_it_is_asked_again_whatever_its_hello_was(swarm: Swarm) -> None:
    lose(swarm)
    swarm.flow(X)
    served: Any = swarm.served[0]
    hello, asked = served.hello, list[int]()

    def broken_once() -> Any:
        asked.append(0)
        if len(asked) == 1:
            raise BlockError("hello failed")
        return hello()

    served.hello = broken_once
    swarm.revive(0)
    until(lambda: not swarm.bans)
    assert len(asked) == 2


def test_it_is_asked_again_whatever_ended_the_asking(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "AGAIN_SECONDS", 0.01)
    peers: Any = swarm.flow.peers
    ask, broken = peers.ask_again, list[int]()

    async def breaks(*args: Any) -> None:
        if not broken:
            broken.append(1)
            raise ZeroDivisionError("nobody expects this")
        await ask(*args)

    monkeypatch.setattr(peers, "ask_again", breaks)
    lose(swarm)
    swarm.flow(X)
    swarm.revive(0)
    until(lambda: not swarm.bans)
    assert "begun again" in caplog.text


def test_one_that_left_the_directory_is_forgotten(swarm: Swarm) -> None:
    lose(swarm)
    swarm.flow(X)
    swarm.hidden = {0}
    until(lambda: not swarm.bans)


def test_a_flow_that_is_closed_asks_nobody(swarm: Swarm) -> None:
    lose(swarm)
    swarm.flow(X)
    swarm.flow.close()
    count = len(swarm.dialled)
    time.sleep(0.3)  # longer than it would take
    assert len(swarm.dialled) == count


def test_who_is_full_is_not_avoided(swarm: Swarm) -> None:
    swarm.flow.peers.failed(WorkerFull("no room", peer=swarm.names[0]))
    assert not swarm.bans
    swarm.flow.peers.failed(WorkerFailed("silent", peer=swarm.names[0]))
    assert swarm.flow.peers.avoided(swarm.names[0])


def test_a_flow_that_is_dropped_while_a_worker_is_asked_closes_its_links(swarm: Swarm) -> None:
    """The network thread, which asks, then has it last: it cannot wait there for itself."""
    swarm.flow(X)
    peers, asked, closed = swarm.flow.peers, threading.Event(), threading.Event()
    pool, close, go_on = peers.pool, peers.pool.aclose, asyncio.Event()

    async def slowly(number: int) -> None:
        asked.set()
        await go_on.wait()

    async def closing() -> None:
        await close()
        closed.set()

    swarm.before_dial, pool.aclose = slowly, closing  # type: ignore[method-assign]
    loop.run(pool.aclose())
    closed.clear()
    loop.submit(_failed(peers, swarm.names[0])).result(5)
    assert asked.wait(5)
    gone = weakref.ref(peers)
    swarm.flow = None  # type: ignore[assignment]
    del peers
    gc.collect()
    assert gone() is not None, "it is being asked for"
    loop.network_loop().call_soon_threadsafe(go_on.set)
    assert closed.wait(5)
    until(lambda: gone() is None)


async def _failed(peers: Any, peer: str) -> None:
    peers.failed(WorkerFailed("closed the stream (EOF)", peer=peer))


@pytest.mark.parametrize("error", [WorkerFailed("refuses"), WorkerFull("no room")], ids=["refuses", "full"])
def test_who_refuses_is_taken_at_its_word_once_it_is_known_who_else_came(swarm: Swarm, error: WorkerFailed) -> None:
    """A worker that appeared a moment ago is not in what was last read of the directory."""
    expected, peers = swarm.flow(X), swarm.flow.peers
    refusal = Message({"error": to_wire(error)})
    swarm.answers(0, lambda reply: refusal)
    swarm.hidden = {1}
    began = time.monotonic()
    peers.refreshed_at = lambda: began if swarm.hidden else time.monotonic()  # type: ignore[method-assign]
    threading.Timer(1.5, swarm.hidden.clear).start()
    assert torch.equal(swarm.flow.options(timeout=20)(X), expected)

    swarm.hidden = {1}
    peers.refreshed_at = time.monotonic  # type: ignore[method-assign]
    with pytest.raises((NoRoute, WorkerFull), match="refuses|no room"):
        swarm.flow.options(timeout=60)(X)
    assert time.monotonic() - began < 20, "not at the deadline"
