"""One worker's part of a session, and what another needs to take its place: the steps that it took.

    Stage.take(step) -> outputs, Stage.keep(step);  replay(steps, stages): the same steps again, elsewhere

Steps are repeated one by one (bitwise the same where the workers' numerics are), or ``merged`` into as few as axes and
rotary scaling allow (faster, equal within the usual tolerances).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.client.request import any_nan
from kwflow.client.stage import Reorder, Stage, Step
from kwflow.errors import CallerError, WorkerFailed
from kwflow.kwargs.axes import Axed, index_rows, join_steps, part
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import joined_by
from kwflow.kwargs.prefix_kv import length as prefix_length
from kwflow.kwargs.schema import Scaling
from kwflow.show.progress import progress
from kwflow.wire import channel


async def replay(
    steps: Sequence[Step], stages: Sequence[Stage], pool: channel.Pool, *, keep: bool = True, nan: bool = False
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
    bound, hidden = step.bound.leaving_out(*joined_by("not")), step.hidden[:, :columns]
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
    otherwise = (*joined_by("columns"), *joined_by("first"))
    one, other = first.bound.leaving_out(*otherwise), second.bound.leaving_out(*otherwise)
    if [section.key for section in one.sections] != [section.key for section in other.sections]:
        return None
    leaves = list[Tensor]()
    for i in range(len(one.tensors)):
        joined = join_steps([one.axed(i), other.axed(i)], lengths)
        if joined is None:
            return None
        leaves.append(joined.tensor)
    call: dict[str, Any] = {}
    for name in joined_by("columns"):
        mine, theirs = first.bound.call().get(name), second.bound.call().get(name)
        if mine is None and theirs is None:
            continue
        if any(given is not None and len(given.axes) == 4 for given in (mine, theirs)):
            return None
        columns = [_columns(name, given, step, ahead) for given, step in ((mine, first), (theirs, second))]
        axes = ("batch", "key" if name == "attention_mask" else "seq")
        call[name] = Axed(torch.cat(columns, 1), axes)
    bound = one.with_tensors(leaves)
    before_them = first.bound.only(*joined_by("first"))
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
