"""Between workers: in a session each hands its output to the next one directly, and the client hears of it later.

The client sends every worker its kwargs for the step at once; ``Inbox`` is where a step without hidden waits for it,
whoever brings it, by the step's number: a second one, or one that comes late, is not taken. ``Neighbours`` are links to
the other workers, of those only that the directory names.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from torch import Tensor

from kwflow.errors import WorkerFailed
from kwflow.wire.message import Message

LONGEST_WAIT = 600.0  # seconds for a step's hidden, at most; the client says how long, and is gone before


class Inbox:
    """Hidden for the steps of one session, by their numbers, which only grow."""

    def __init__(self) -> None:
        self._done = 0  # the last step that was taken
        self._latest: tuple[int, Tensor | None] | None = None  # the latest one that is not taken yet
        self._news = asyncio.Event()

    def put(self, number: int, hidden: Tensor | None) -> bool:
        """Bring a step's hidden (batch, seq, hidden), or word that it is given up; False if it is not needed."""
        if number <= self._done or (self._latest is not None and number <= self._latest[0]):
            return False
        self._latest = number, hidden
        self._news.set()
        return True

    async def take(self, number: int, seconds: float) -> Tensor:
        """Wait for a step's hidden. Raises WorkerFailed."""
        try:
            async with asyncio.timeout(min(seconds, LONGEST_WAIT)):
                while self._latest is None or self._latest[0] < number:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise WorkerFailed(f"nobody has handed on step {number} in {seconds:g} s") from None
        number_of_last, hidden = self._latest
        self._done = max(self._done, number)
        if number_of_last != number or hidden is None:
            raise WorkerFailed(f"step {number} was given up")
        self._latest = None
        return hidden


class Neighbour(Protocol):
    """Sends a message to another worker, which serves ``layer``."""

    async def __call__(self, peer: str, layer: int, message: Message) -> Message: ...
