"""One worker's part of a session, and what another needs to take its place: the steps that it took.

    Stage.take(step) -> outputs, Stage.keep(step);  replay(steps, stages): the same steps again, elsewhere

Steps are repeated one by one (bitwise the same where the workers' numerics are), or ``merged`` into as few as axes and
rotary scaling allow (faster, equal within the usual tolerances).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kwflow.client.request import any_nan
from kwflow.client.stage import Reorder, Stage, Step
from kwflow.errors import CallerError, WorkerFailed
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.axes import Axed, index_rows, join_steps, part
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import joined_by
from kwflow.kwargs.points import PATTERN
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
            stage_step = stage.part(step, hidden)
            try:
                hidden, *more = await stage.take(stage_step, pool)
            except CallerError as error:  # the worker before took this step: it is not the caller's fault
                failed = WorkerFailed(f"cannot repeat the session's steps: {error}", peer=stage.hop.peer)
                failed.answered = True
                raise failed from error
            if not nan and any_nan([hidden]) and not any_nan([stage_step.hidden, *stage_step.bound.tensors]):
                raise WorkerFailed("NaN in a repeated step that had none", peer=stage.hop.peer, span=stage.hop.span)
            captured += more
            if keep:
                stage.keep(stage_step)
    return [hidden, *captured]


def uncaptured(step: Step) -> Step:
    """A step that brings no activations back, of the same values: where it captures a pattern, attention is eager."""
    entries = [entry for section in step.bound.sections for entry in section.skeleton.get("capture", ())]
    if not entries or any(entry["point"] == PATTERN for entry in entries):
        return step
    return replace(step, bound=step.bound.leaving_out(*joined_by("not")))


def folded(reorders: Sequence[Reorder], ends: Collection[int]) -> list[Reorder]:
    """Reorders in a row as one, which has the last one's number.

    ``ends``: the numbers up to which a worker may have some of them; none is folded into another across these.
    """
    result = list[Reorder]()
    for number, rows in sorted(reorders):
        if result and not any(result[-1][0] <= end < number for end in ends):
            _, before = result.pop()
            rows = [before[row] for row in rows]
        result.append((number, rows))
    return result


# ---- steps joined into fewer -------------------------------------------------------------------------------------


def merged(steps: Sequence[Step], position: int, scaling: Scaling) -> list[Step] | None:
    """The first ``position`` columns of a history in as few steps as axes and ``scaling`` allow, without captures and
    reorders. None where a step's rest, after a rollback or a reorder, would have another scale than the step had."""
    prefix_length = prefix_kv.length(steps[0].bound) if steps else 0
    joined = list[Step]()
    for step, rest in _settled(steps, position):
        if _scale(scaling, step, prefix_length) != _scale(scaling, rest, prefix_length):
            return None
        joined.append(rest)
    before = 0
    while len(joined) != before:  # pairs, then pairs of those: what was joined is copied a few times only
        before, joined = len(joined), _in_pairs(joined, prefix_length, scaling)
    return joined


def _scale(scaling: Scaling, step: Step, prefix_length: int) -> tuple[int, ...]:
    """Which rotary scale a step's keys have."""
    position_ids = step.bound.call().get("position_ids")
    return scaling.of(prefix_length + step.stop if position_ids is None else int(position_ids.tensor.max()) + 1)


def _in_pairs(steps: Sequence[Step], prefix_length: int, scaling: Scaling) -> list[Step]:
    result: list[Step] = []
    number = 0
    while number < len(steps):
        pair = steps[number : number + 2]
        # alike, and so is the longer one's, which is the pair's
        alike = len({_scale(scaling, step, prefix_length) for step in pair}) == 1
        joined = _join(*pair, prefix_length) if len(pair) == 2 and alike else None
        result.append(steps[number] if joined is None else joined)
        number += 1 if joined is None else 2
    return result


def _settled(steps: Sequence[Step], position: int) -> list[tuple[Step, Step]]:
    """Each step, and its columns that were not rolled back, in the order that the rows have now."""
    result: list[tuple[Step, Step]] = []
    stop, rows = position, None  # which row of the step each row is now
    for step in reversed(steps):
        columns = min(stop, step.stop) - step.start
        if columns > 0:
            result.append((step, _cut(step, columns, rows)))
        for _, order in reversed(step.reorders):
            index = torch.tensor(order)
            rows = index if rows is None else index[rows]
        stop = min(stop, step.start)
    return result[::-1]


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


def _join(first: Step, second: Step, prefix_length: int) -> Step | None:
    """Two steps as one; None when what they were given cannot be joined."""
    lengths = first.hidden.shape[1], second.hidden.shape[1]
    otherwise = (*joined_by("columns"), *joined_by("first"))
    left, right = first.bound.leaving_out(*otherwise), second.bound.leaving_out(*otherwise)
    if [section.key for section in left.sections] != [section.key for section in right.sections]:
        return None
    leaves = list[Tensor]()
    for i in range(len(left.tensors)):
        joined = join_steps([left.axed(i), right.axed(i)], lengths)
        if joined is None:
            return None
        leaves.append(joined.tensor)
    call: dict[str, Any] = {}
    for name in joined_by("columns"):
        first_value, second_value = first.bound.call().get(name), second.bound.call().get(name)
        if first_value is None and second_value is None:
            continue
        if any(value is not None and len(value.axes) == 4 for value in (first_value, second_value)):
            return None
        columns = [
            _columns(name, value, step, prefix_length) for value, step in ((first_value, first), (second_value, second))
        ]
        axes = ("batch", "key" if name == "attention_mask" else "seq")
        call[name] = Axed(torch.cat(columns, 1), axes)
    bound = left.with_tensors(leaves)
    before_them = first.bound.only(*joined_by("first"))
    if before_them.sections:
        bound = bound.joined(before_them)
    if call:
        bound = bound.joined(Bound.of((bound.start, bound.stop), [("call", call)]))
    return Step(first.start, torch.cat([first.hidden, second.hidden], 1), bound)


def _columns(name: str, value: Axed | None, step: Step, prefix_length: int) -> Tensor:
    """A step's mask or positions (batch, seq), also where a worker knows them by itself."""
    batch, seq, _ = step.hidden.shape
    if value is not None:
        return value.tensor.expand(batch, seq)
    if name == "attention_mask":
        return torch.ones(batch, seq, dtype=torch.bool)
    return torch.arange(prefix_length + step.start, prefix_length + step.stop).expand(batch, seq)
