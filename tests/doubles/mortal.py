"""Workers of this process that die, or answer nonsense, at a moment that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
