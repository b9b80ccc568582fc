"""Captures under beam search: each final sequence gets what was at its own tokens, whichever row they ran in."""

# B rows of a step (batch x beams), N final sequences, T generated tokens, P pos

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import UnsupportedError
from kwflow.kwargs.capture import Capture, Picked, Taken


class AtEachStep(Capture):
    """Captures of a beam search as they come: rows stay as they were when their step ran.

    NOTE [beams] A session's captures follow its rows, which are the beams that still run; a beam that has ended is no
    row any more. So rows are kept as they are, and at the end transformers' ``beam_indices`` (N, T) says in which row
    each sequence's token was chosen: there its token before ran.
    """

    def __init__(self, like: Capture):
        points: dict[str, list[int]] = {}
        for point, layer in like:
            points.setdefault(point, []).append(layer)
        super().__init__(points, at=like.at, mean=like.mean)
        self.like = like
        self._stops: list[int] = []  # of each step

    def take(self, picked: Picked, values: Sequence[Tensor], batch: int) -> None:
        super().take(picked, values, batch)
        self._stops.append(picked.stop)

    def reorder(self, rows: Tensor) -> None:
        """Nothing: see NOTE [beams]."""

    def rollback(self, position: int | Tensor) -> None:
        """Nothing: what is taken again counts where the sequence still ran, and what was before where it had ended."""

    def give(self, beam_indices: Tensor, prompt: int) -> None:
        """Hand each final sequence's part to the caller's Capture; ``prompt``: columns of the prompt."""
        rows_NT = beam_indices.cpu()
        steps = zip(self.steps, self._stops, strict=True)
        # the prompt's columns choose token 0, the next ones token 1, …
        self.like.replace(_latest([_gathered(taken, rows_NT, max(0, stop - prompt)) for taken, stop in steps]))


def _gathered(taken: Taken, rows_NT: Tensor, step: int) -> Taken:
    """One step's captures by final sequence; nothing where a sequence had ended before. ``step``: its token's number"""
    number_BP, column_BP, values = taken
    rows = rows_NT[:, step] if step < rows_NT.shape[1] else torch.full_like(rows_NT[:, 0], -1)
    there, rows = (rows >= 0)[:, None], rows.clamp(min=0)
    number, column = (torch.where(there, t[rows], -1) for t in (number_BP, column_BP))
    return number, column, {key: value[rows.to(value.device)] for key, value in values.items()}


def _latest(steps: Sequence[Taken]) -> list[Taken]:
    """Each column of a sequence once, as it was taken last."""
    found = list[Taken]()
    width = 1 + max((int(column.max()) for _, column, _ in steps if column.numel()), default=0)
    seen_NS = torch.zeros(len(steps[0][0]) if steps else 0, width, dtype=torch.bool)
    for number, column, values in reversed(steps):
        there = (number >= 0) & ~seen_NS.gather(1, column.clamp(min=0))
        found.append((torch.where(there, number, -1), column, values))
        row, place = there.nonzero(as_tuple=True)
        seen_NS[row, column[row, place]] = True
    return found[::-1]


def returning_beams(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of generate that make it say which beam each token is from."""
    if call.get("custom_generate") is not None:
        raise UnsupportedError("generate(custom_generate=…, num_beams=…, capture=…): which beams it keeps is not known")
    config = call.get("generation_config")
    if config is None:
        return {**call, "return_dict_in_generate": True}
    config = copy.deepcopy(config)
    config.return_dict_in_generate = True
    return {**{k: v for k, v in call.items() if k != "return_dict_in_generate"}, "generation_config": config}
