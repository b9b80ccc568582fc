"""One worker's part of a session: its channel, the kwargs that it holds, and the steps that it took."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kwflow.client.peers import Hop
from kwflow.client.request import check_outputs, request_tree
from kwflow.errors import WorkerFailed
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.schema import Span
from kwflow.wire import channel
from kwflow.wire.message import Message

# columns behind the first step's of a session whose length nobody said, on workers of older versions, which cannot grow
FIXED_ROOM = 2048

Reorder = tuple[int, list[int]]  # its number, and which row each row was


@dataclass(frozen=True, eq=False)
class Step:
    """What one worker is given at a step: ``hidden`` (batch, seq, hidden) from column ``start`` on, and its kwargs.

    ``reorders``: of rows, before it.
    """

    start: int
    hidden: Tensor
    bound: Bound
    reorders: tuple[Reorder, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.hidden.shape[1]


@dataclass(frozen=True)
class Replay:
    """A worker that was replaced in the middle of a session: what ``session.replays`` holds."""

    layers: Span
    position: int  # columns of the session when it happened
    peer: str  # the worker that was replaced
    reason: str
    by: tuple[tuple[str, int, int], ...]  # the workers in its place, each with its layers
    steps: int  # that were repeated, after those that could were merged
    mode: str  # stepwise or merged
    bitwise: bool  # the values are those that there would have been, to the last bit
    seconds: float

    def __str__(self) -> str:
        start, stop = self.layers
        by = ", ".join(f"{peer[-8:]} ({a}:{b})" for peer, a, b in self.by)
        how = f"{self.steps} steps repeated {self.mode}" + (", bitwise" if self.bitwise else "")
        return (
            f"column {self.position}: layers {start}:{stop} of {self.peer[-8:]} ({self.reason}) went to {by}; "
            f"{how}, {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class Handoff:
    """How a step goes from worker to worker: its number, whether it begins here, to whom its output goes."""

    number: int
    first: bool
    to: Stage | None
    wait: float  # seconds for the hidden to come


@dataclass(eq=False)
class Stage:
    """One worker of a session: its channel, the kwargs that it holds, and the steps that it took."""

    hop: Hop
    max_length: int | None
    channel: channel.Channel | None = None
    last_kwargs: Bound | None = None  # the kwargs of its last step, unless nobody knows
    steps: list[Step] = field(default_factory=list)
    reordered: int = 0  # the last reorder that merged steps have in their rows
    given_up: bool = False  # its channel was closed by this side, in the middle of a step
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # of the session there, for other workers
    next: str | None = None  # the name of the session to which the worker knows to hand its outputs on

    async def take(self, step: Step, pool: channel.Pool, handoff: Handoff | None = None) -> list[Tensor]:
        """Send one step; its output, then what it captures. Raises WorkerFailed, and what the worker says.

        ``handoff``: hidden comes from another worker, or goes to one; then only the shape of the step's own counts.
        """
        hop, last_kwargs = self.hop, self.last_kwargs
        if self.channel is None:
            self.channel = await pool.transport.open(hop.peer)
        self.last_kwargs = None  # unless the step succeeds
        uploaded = {i for i, tensor in enumerate(step.bound.tensors) if pool.uploads.find(tensor) is not None}
        once = last_kwargs is not None and "sent once" in hop.hello.features
        same = step.bound.same_as(last_kwargs) if once and last_kwargs is not None else {}
        bound = step.bound.copied(same, last_kwargs or Bound(*hop.span), uploaded)  # what is sent is what is remembered
        meta: dict[str, Any] = {"op": "step", "span": [hop.start, hop.stop], "start": step.start}
        if step.start == 0:
            meta["session"] = self.name
            if (columns := self._room(step)) is not None:
                meta["max_length"] = columns
        if step.reorders:
            meta["reorder"] = [[number, rows] for number, rows in step.reorders]
        try:
            tree = request_tree(step.hidden, bound, same=same)
            if handoff is not None:
                meta |= self._handoff_meta(handoff)
            if handoff is not None and not handoff.first:
                del tree["hidden"]
            reply = await pool.exchange(self.channel, Message(meta, tree))
        except WorkerFailed as error:
            error.span = error.span or hop.span
            raise
        except BaseException:
            self.given_up = self.channel.closed  # by this side: the worker is not to blame
            raise
        prefix_length = prefix_kv.length(self.steps[0].bound) if step.start and self.steps else 0
        outputs = check_outputs(reply.tree, step.hidden, hop, step.bound, prefix_length + step.start)
        self.last_kwargs = bound
        if handoff is not None:
            self.next = handoff.to and handoff.to.name
        return outputs

    def _room(self, step: Step) -> int | None:
        """How many columns the worker is to keep room for, from the first step on; None: as many as come."""
        if self.max_length is None and "grows" not in self.hop.hello.features:
            return prefix_kv.length(step.bound) + step.stop + FIXED_ROOM
        return self.max_length

    def _handoff_meta(self, handoff: Handoff) -> dict[str, Any]:
        meta: dict[str, Any] = {} if handoff.first else {"from": handoff.number, "wait": round(handoff.wait, 1)}
        if handoff.to is not None:
            meta["hand"] = handoff.number
            if handoff.to.name != self.next:
                meta["next"] = [handoff.to.hop.peer, handoff.to.name]
        return meta

    async def bring(self, number: int, hidden: Tensor | None, pool: channel.Pool) -> bool:
        """Bring hidden as another worker would, or word that the step is given up; False if it was there already."""
        reply = await pool(self.hop.peer, Message({"op": "push", "session": self.name, "step": number}, hidden))
        return reply.meta.get("taken") is True

    def part(self, step: Step, hidden: Tensor) -> Step:
        """This worker's part of a step, or of another worker's."""
        reorders = tuple(reorder for reorder in step.reorders if reorder[0] > self.reordered)
        return replace(step, hidden=hidden, bound=step.bound.part(None, self.hop.span)[0], reorders=reorders)

    def keep(self, step: Step) -> None:
        """Remember a step that was taken; one at the same column before it was interrupted, and taken again."""
        while self.steps and self.steps[-1].start >= step.start:
            self.steps.pop()
        self.steps.append(replace(step, bound=self.last_kwargs or step.bound))

    def forget(self, start: int) -> list[Reorder]:
        """Forget the steps from a column on; returns their reorders, which were of all columns and stay."""
        gone = [step for step in self.steps if step.start >= start]
        self.steps = [step for step in self.steps if step.start < start]
        return [reorder for step in gone for reorder in step.reorders]

    @property
    def closed(self) -> bool:
        return self.channel is not None and self.channel.closed

    async def aclose(self) -> None:
        if self.channel is not None:
            await self.channel.aclose()
