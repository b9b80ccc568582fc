"""Workers of this process that die, or answer nonsense, at a moment that a test chooses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from kwflow.client.flow import Flow
from kwflow.client.peers import Ban
from kwflow.wire import loop
from kwflow.wire.message import Message
from kwflow.worker.server import Served
from tests.doubles.workers import Answer, Workers
from tests.oracle import tiny


class Swarm(Workers):
    """Workers with these spans, and a flow over them."""

    def __init__(self, family: str, *spans: tuple[int, int], dtype: torch.dtype = torch.float32, **limits: Any):
        super().__init__([Served(tiny.span(family, *span, dtype), model=family, **limits) for span in spans])
        self.flow = Flow(tiny.ends(family, dtype), self.peers(), (0, tiny.LAYERS))

    def kill(self, worker: int, after: int = 0) -> None:
        """Let it die: now, or as soon as it has answered so many more requests (but hello)."""
        self.left[worker] = after

    def revive(self, worker: int) -> None:
        self.left.pop(worker, None)

    def answers(self, worker: int, answer: Answer) -> None:
        """Let it change its replies (but hello)."""
        self.changes[worker] = answer

    def asked(self, worker: int) -> int:
        return sum(number == worker and op in ("run", "step") for number, op in self.seen)

    def interrupt(
        self, step: Callable[[], object], worker: int = 0, then: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Interrupt the caller of a step, as Jupyter does, once a worker has its part, which goes on after ``then``."""

        async def before(number: int) -> None:
            if number == worker:
                self.before = None
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if then is not None:
                    await then()

        self.before, handler = before, signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                step()
        finally:
            signal.signal(signal.SIGINT, handler)

    @property
    def bans(self) -> dict[str, Ban]:
        """Whom routes avoid, by name."""
        known: Any = self.flow.peers
        return known.bans

    def forgive(self) -> None:
        """Let whoever failed say how it is, so that routes take it again."""
        known: Any = self.flow.peers
        for peer, ban in self.bans.items():
            loop.run(known.ask_again(peer, ban))
        assert not self.bans


def nonsense(change: Callable[[list[Any]], Sequence[Any]]) -> Answer:
    """Replies whose tensors are changed."""
    return lambda reply: Message(reply.meta, list(change(list(reply.tree))))
