"""Workers of this process that die, or answer nonsense, at a moment that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kwflow.client.flow import Flow
from kwflow.errors import WorkerFailed
from kwflow.swarm.connect import in_process
from kwflow.wire.message import Message
from kwflow.worker.server import Served
from tests.oracle import tiny

Answer = Callable[[Message], Message]


class Swarm:
    """A flow over workers with these spans; ``seen``: who was asked for what."""

    def __init__(self, family: str, *spans: tuple[int, int], dtype: torch.dtype = torch.float32, **limits: Any):
        served = [Served(tiny.span(family, *span, dtype), model=family, **limits) for span in spans]
        peers = in_process(served)
        self.flow = Flow(tiny.ends(family, dtype), peers, (0, tiny.LAYERS))
        self.names = [worker.peer for worker in peers._view()]
        self.seen: list[tuple[int, str]] = []
        self.dead: set[int] = set()
        self.view = peers._view
        peers._view = lambda: [one for i, one in enumerate(self.view()) if i not in self.hidden]
        self.hidden: set[int] = set()  # not in the directory
        self._open, self._left, self._answer = peers.pool.transport.open, dict[int, int](), dict[int, Answer]()
        peers.pool.transport.open = self._opened  # type: ignore[method-assign]

    def kill(self, worker: int, after: int = 0) -> None:
        """Let it die: now, or as soon as it has answered so many more requests (but hello)."""
        self._left[worker] = after

    def revive(self, worker: int) -> None:
        self._left.pop(worker, None)
        self.dead.discard(worker)

    def answers(self, worker: int, answer: Answer) -> None:
        """Let it change its replies (but hello)."""
        self._answer[worker] = answer

    def asked(self, worker: int) -> int:
        return sum(number == worker and op in ("run", "step") for number, op in self.seen)

    async def _opened(self, peer: str, **more: Any) -> Any:
        number = self.names.index(peer)
        if self._left.get(number) == 0:
            raise WorkerFailed("connection refused", peer=peer)
        channel: Any = await self._open(peer, **more)
        handle = channel._connection.handle

        async def watched(request: Message) -> Message:
            op = str(request.meta["op"])
            self.seen.append((number, op))
            if op != "hello" and number in self._left:
                if self._left[number] == 0:
                    channel.closed = True
                    raise WorkerFailed("closed the stream (EOF)", peer=peer)
                self._left[number] -= 1
            reply = await handle(request)
            change = self._answer.get(number) if op != "hello" and "error" not in reply.meta else None
            return reply if change is None else change(reply)

        channel._connection.handle = watched
        return channel


def nonsense(change: Callable[[list[Any]], Sequence[Any]]) -> Answer:
    """Replies whose tensors are changed."""
    return lambda reply: Message(reply.meta, list(change(list(reply.tree))))
