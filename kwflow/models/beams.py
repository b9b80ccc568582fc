"""Captures under beam search: each final sequence gets what was at its own tokens, whichever row they ran in."""

# B rows of a step (batch x beams), N final sequences, T generated tokens, P pos

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kwflow.captures import Capture
from kwflow.errors import SessionError, UnsupportedError


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
        if not like.empty:
            raise SessionError("this Capture holds what another session or call captured; make a new one")

    def reorder(self, rows: Tensor) -> None:
        """Nothing: see NOTE [beams]."""

    def give(self, beam_indices: Tensor, prompt: int) -> None:
        """Hand each final sequence's part to the caller's Capture; ``prompt``: columns of the prompt."""
        rows_NT = beam_indices.cpu()
        self.like.replace([_gathered(taken, rows_NT, prompt) for taken in self.steps])


def _gathered(taken: Any, rows_NT: Tensor, prompt: int) -> Any:
    """One step's captures by final sequence; nothing where a sequence had ended before."""
    number_BP, column_BP, values = taken
    step = max(0, int(column_BP.max()) - prompt + 1)  # the prompt's columns choose token 0, the next ones token 1, …
    rows = rows_NT[:, step] if step < rows_NT.shape[1] else torch.full_like(rows_NT[:, 0], -1)
    there, rows = (rows >= 0)[:, None], rows.clamp(min=0)
    number, column = (torch.where(there, t[rows], -1) for t in (number_BP, column_BP))
    return number, column, {key: value[rows.to(value.device)] for key, value in values.items()}


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
