"""Keys, values and mask of one client's session on a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kwflow.blocks.kv import KV
from kwflow.kwargs.bound import Bound
from kwflow.worker.inbox import Inbox


@dataclass
class SessionState:
    """Keys, values and mask of one client's session on this worker."""

    kv: KV
    batch: int
    bytes: int
    length: int = 0
    reordered: int = 0  # the last beam reorder that was applied
    mask: Tensor | None = None  # (batch, columns that there is room for) bool, once a column was masked
    kwargs: Bound | None = None  # the last step's, on the blocks' device: the next one need not bring them again
    kwargs_bytes: int = 0  # of those
    name: str = ""  # by which other workers bring hidden; "": they may not
    inbox: Inbox = field(default_factory=Inbox)
    next: tuple[str, str] | None = None  # the worker that outputs are handed on to, and the session's name there

    def column_mask(self, step_mask: Tensor | None, start: int, seq: int) -> Tensor | None:
        """Remember this step's columns of the 2-D mask and return it up to their end; None while nothing is masked.

        It stays on the CPU, where it came from and where its values are looked at.
        """
        if step_mask is not None and self.mask is None and not bool(step_mask.all()):
            self.mask = torch.ones(self.batch, self.kv.room, dtype=torch.bool)
        if self.mask is None:
            return None
        if (lacking := self.kv.room - self.mask.shape[1]) > 0:
            self.mask = torch.cat([self.mask, torch.ones(self.batch, lacking, dtype=torch.bool)], 1)
        self.mask[:, start : start + seq] = True if step_mask is None else step_mask.bool().cpu()
        return self.mask[:, : start + seq]

    def reorder(self, rows: list[int], length: int) -> None:
        """Take the rows of the first ``length`` columns in another order."""
        index = torch.tensor(rows, dtype=torch.long)
        self.kv.reorder(index, length)
        self.mask = None if self.mask is None else self.mask.index_select(0, index)
