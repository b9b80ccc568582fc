"""One worker's part of a session, and what another needs to take its place: the steps that it took.

    Stage.take(step) -> outputs, Stage.keep(step);  replay(steps, stages): the same steps again, elsewhere

Steps are repeated one by one (bitwise the same where the workers' numerics are), or ``merged`` into as few as axes and
rotary scaling allow (faster, equal within the usual tolerances).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kwflow import link
from kwflow.ask import any_nan, check_outputs, request_tree
from kwflow.axes import Axed, index_rows, join_steps, part
from kwflow.bound import Bound
from kwflow.errors import CallerError, WorkerFailed
from kwflow.prefix import NAME as PREFIX
from kwflow.prefix import length as prefix_length
from kwflow.progress import progress
from kwflow.retry import Hop
from kwflow.schema import Scaling
from kwflow.wire import Message

# columns behind the first step's of a session whose length nobody said, on workers of older versions, which cannot grow
FIXED_ROOM = 2048
CONTROL = ("attention_mask", "position_ids")  # joined by columns

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

    layers: tuple[int, int]
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
class Handed:
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
    channel: link.Channel | None = None
    held: Bound | None = None  # the kwargs of its last step, unless nobody knows
    steps: list[Step] = field(default_factory=list)
    reordered: int = 0  # the last reorder that merged steps have in their rows
    given_up: bool = False  # its channel was closed by this side, in the middle of a step
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # of the session there, for other workers
    next: str | None = None  # the name of the session to which the worker knows to hand its outputs on

    async def take(self, step: Step, pool: link.Pool, handed: Handed | None = None) -> list[Tensor]:
        """Send one step; its output, then what it captures. Raises WorkerFailed, and what the worker says.

        ``handed``: hidden comes from another worker, or goes to one; then only the shape of the step's own counts.
        """
        hop, held = self.hop, self.held
        if self.channel is None:
            self.channel = await pool.transport.open(hop.peer)
        self.held = None  # unless the step succeeds
        once = held is not None and "sent once" in hop.hello.get("features", ())
        same = step.bound.same_as(held) if once and held is not None else {}
        bound = step.bound.copied(same, held or Bound(*hop.span))  # what is sent is what is remembered
        meta: dict[str, Any] = {"op": "step", "span": [hop.start, hop.stop], "start": step.start}
        if step.start == 0:
            meta["session"] = self.name
            if (columns := self._room(step)) is not None:
                meta["max_length"] = columns
        if step.reorders:
            meta["reorder"] = [[number, rows] for number, rows in step.reorders]
        try:
            tree = request_tree(step.hidden, bound, same=same)
            if handed is not None:
                meta |= self._handing(handed)
            if handed is not None and not handed.first:
                del tree["hidden"]
            reply = await pool.exchange(self.channel, Message(meta, tree))
        except WorkerFailed as error:
            error.span = error.span or hop.span
            raise
        except BaseException:
            self.given_up = self.channel.closed  # by this side: the worker is not to blame
            raise
        ahead = prefix_length(self.steps[0].bound) if step.start and self.steps else 0
        outputs = check_outputs(reply.tree, step.hidden, hop, step.bound, ahead + step.start)
        self.held = bound
        if handed is not None:
            self.next = handed.to and handed.to.name
        return outputs

    def _room(self, step: Step) -> int | None:
        """How many columns the worker is to keep room for, from the first step on; None: as many as come."""
        if self.max_length is None and "grows" not in self.hop.hello.get("features", ()):
            return prefix_length(step.bound) + step.stop + FIXED_ROOM
        return self.max_length

    def _handing(self, handed: Handed) -> dict[str, Any]:
        meta: dict[str, Any] = {} if handed.first else {"from": handed.number, "wait": round(handed.wait, 1)}
        if handed.to is not None:
            meta["hand"] = handed.number
            if handed.to.name != self.next:
                meta["next"] = [handed.to.hop.peer, handed.to.name]
        return meta

    async def bring(self, number: int, hidden: Tensor | None, pool: link.Pool) -> bool:
        """Bring hidden as another worker would, or word that the step is given up; False if it was there already."""
        reply = await pool(self.hop.peer, Message({"op": "push", "session": self.name, "step": number}, hidden))
        return reply.meta.get("taken") is True

    def own(self, step: Step, hidden: Tensor) -> Step:
        """This worker's part of a step, or of another worker's."""
        reorders = tuple(one for one in step.reorders if one[0] > self.reordered)
        return replace(step, hidden=hidden, bound=step.bound.part(None, self.hop.span)[0], reorders=reorders)

    def keep(self, step: Step) -> None:
        """Remember a step that was taken; one at the same column before it was interrupted, and taken again."""
        while self.steps and self.steps[-1].start >= step.start:
            self.steps.pop()
        self.steps.append(replace(step, bound=self.held or step.bound))

    def forget(self, start: int) -> list[Reorder]:
        """Forget the steps from a column on; returns their reorders, which were of all columns and stay."""
        gone = [step for step in self.steps if step.start >= start]
        self.steps = [step for step in self.steps if step.start < start]
        return [one for step in gone for one in step.reorders]

    @property
    def closed(self) -> bool:
        return self.channel is not None and self.channel.closed

    async def aclose(self) -> None:
        if self.channel is not None:
            await self.channel.aclose()


async def replay(
    steps: Sequence[Step], stages: Sequence[Stage], pool: link.Pool, *, keep: bool = True, nan: bool = False
) -> list[Tensor]:
    """Take steps again on the workers that serve their span now: the last one's output, then what it captured.

    ``nan``: these steps may give NaN from input without any; else a worker that does so failed, for they did not.
    """
    hidden, captured = torch.empty(0), list[Tensor]()
    for step in progress(steps, "repeating a session's steps", len(steps), unit="step"):
        hidden, captured = step.hidden, list[Tensor]()
        for stage in stages:
            own = stage.own(step, hidden)
            try:
                hidden, *more = await stage.take(own, pool)
            except CallerError as error:  # the worker before took this step: it is not the caller's fault
                failed = WorkerFailed(f"cannot repeat the session's steps: {error}", peer=stage.hop.peer)
                failed.answered = True
                raise failed from error
            if not nan and any_nan([hidden]) and not any_nan([own.hidden, *own.bound.tensors]):
                raise WorkerFailed("NaN in a repeated step that had none", peer=stage.hop.peer, span=stage.hop.span)
            captured += more
            if keep:
                stage.keep(own)
    return [hidden, *captured]


def folded(reorders: Sequence[Reorder], ends: Collection[int]) -> list[Reorder]:
    """Reorders in a row as one, which has the last one's number.

    ``ends``: the numbers up to which a worker may have some of them; none is folded into another across these.
    """
    found = list[Reorder]()
    for number, rows in sorted(reorders):
        if found and not any(found[-1][0] <= end < number for end in ends):
            _, before = found.pop()
            rows = [before[row] for row in rows]
        found.append((number, rows))
    return found


# ---- steps joined into fewer -------------------------------------------------------------------------------------


def merged(steps: Sequence[Step], position: int, scaling: Scaling) -> list[Step] | None:
    """The first ``position`` columns of a history in as few steps as axes and ``scaling`` allow, without captures and
    reorders. None where a step's rest, after a rollback or a reorder, would have another scale than the step had."""
    ahead = prefix_length(steps[0].bound) if steps else 0
    found = list[Step]()
    for step, rest in _settled(steps, position):
        if _scale(scaling, step, ahead) != _scale(scaling, rest, ahead):
            return None
        found.append(rest)
    before = 0
    while len(found) != before:  # pairs, then pairs of those: what was joined is copied a few times only
        before, found = len(found), _in_pairs(found, ahead, scaling)
    return found


def _scale(scaling: Scaling, step: Step, ahead: int) -> tuple[int, ...]:
    """Which rotary scale a step's keys have."""
    given = step.bound.call().get("position_ids")
    return scaling.of(ahead + step.stop if given is None else int(given.tensor.max()) + 1)


def _in_pairs(steps: Sequence[Step], ahead: int, scaling: Scaling) -> list[Step]:
    found: list[Step] = []
    number = 0
    while number < len(steps):
        pair = steps[number : number + 2]
        alike = len({_scale(scaling, step, ahead) for step in pair}) == 1  # so is the longer one's, which is the pair's
        joined = _join(*pair, ahead) if len(pair) == 2 and alike else None
        found.append(steps[number] if joined is None else joined)
        number += 1 if joined is None else 2
    return found


def _settled(steps: Sequence[Step], position: int) -> list[tuple[Step, Step]]:
    """Each step, and its columns that were not rolled back, in the order that the rows have now."""
    found: list[tuple[Step, Step]] = []
    stop, rows = position, None  # which row of the step each row is now
    for step in reversed(steps):
        kept = min(stop, step.stop) - step.start
        if kept > 0:
            found.append((step, _cut(step, kept, rows)))
        for _, order in reversed(step.reorders):
            index = torch.tensor(order)
            rows = index if rows is None else index[rows]
        stop = min(stop, step.start)
    return found[::-1]


def _cut(step: Step, columns: int, rows: Tensor | None) -> Step:
    """A step's first columns, and its rows in another order."""
    bound, hidden = step.bound.leaving_out("capture"), step.hidden[:, :columns]
    leaves = [bound.axed(i) for i in range(len(bound.tensors))]
    if columns < step.hidden.shape[1]:
        leaves = [part(part(leaf, "seq", 0, columns), "key", 0, _keys(leaf, step, columns)) for leaf in leaves]
    if rows is not None:
        leaves, hidden = [index_rows(leaf, rows) for leaf in leaves], hidden[rows]
    return Step(step.start, hidden, bound.with_tensors([leaf.tensor for leaf in leaves]))


def _keys(leaf: Axed, step: Step, columns: int) -> int:
    """A step's 2-D mask covers its own columns; what else has keys covers all that stand before them too."""
    return columns if leaf.size("key") == step.hidden.shape[1] else step.start + columns


def _join(first: Step, second: Step, ahead: int) -> Step | None:
    """Two steps as one; None when what they were given cannot be joined."""
    lengths = first.hidden.shape[1], second.hidden.shape[1]
    one, other = first.bound.leaving_out(*CONTROL, PREFIX), second.bound.leaving_out(*CONTROL, PREFIX)
    if [section.key for section in one.sections] != [section.key for section in other.sections]:
        return None
    leaves = list[Tensor]()
    for i in range(len(one.tensors)):
        joined = join_steps([one.axed(i), other.axed(i)], lengths)
        if joined is None:
            return None
        leaves.append(joined.tensor)
    call: dict[str, Any] = {}
    for name in CONTROL:
        mine, theirs = first.bound.call().get(name), second.bound.call().get(name)
        if mine is None and theirs is None:
            continue
        if any(given is not None and len(given.axes) == 4 for given in (mine, theirs)):
            return None
        columns = [_columns(name, given, step, ahead) for given, step in ((mine, first), (theirs, second))]
        axes = ("batch", "key" if name == "attention_mask" else "seq")
        call[name] = Axed(torch.cat(columns, 1), axes)
    bound = one.with_tensors(leaves)
    before_them = first.bound.only(PREFIX)
    if before_them.sections:
        bound = bound.joined(before_them)
    if call:
        bound = bound.joined(Bound.of((bound.start, bound.stop), [("call", call)]))
    return Step(first.start, torch.cat([first.hidden, second.hidden], 1), bound)


def _columns(name: str, given: Axed | None, step: Step, ahead: int) -> Tensor:
    """A step's mask or positions (batch, seq), also where a worker knows them by itself."""
    batch, seq, _ = step.hidden.shape
    if given is not None:
        return given.tensor.expand(batch, seq)
    if name == "attention_mask":
        return torch.ones(batch, seq, dtype=torch.bool)
    return torch.arange(ahead + step.start, ahead + step.stop).expand(batch, seq)
