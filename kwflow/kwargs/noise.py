"""Gaussian noise that is known by its place: what ``kf.edits.noise`` adds, drawn by the client.

The numbers at a token are a pure function of the seed, the point, the layer, the row and the token position, from a
counter-based generator (Philox; Salmon et al. 2011). So they are the same to the bit however a batch is cut, in a
session step by step, and when a worker is replaced. They are drawn where the rows are numbered, and sent as what
``kf.add`` adds: workers of other processors would round logarithms in other ways.
"""

# B batch (or 1), S seq (columns of this call), P pos (the most that a row selects)

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kwflow.autograd.transforms import plain
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.points import point_at

SEEDS = 1 << 64  # a word of the generator's key


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise of one layer, not drawn yet: the sizes of its point are known where kwargs are bound."""

    seed: int
    layer: int
    position_BP: Tensor  # token positions; -1 behind a row's last

    def drawn(self, point: str, sizes: Mapping[str, int], chosen: Mapping[str, Sequence[int]]) -> Axed:
        """Standard normal float32 "batch pos" and the point's features; of the ``heads`` and ``dims`` chosen.

        ``sizes`` are the whole point's: what is not chosen is drawn too, so that a head or dim has its own numbers.
        """
        features = point_at(point).features
        shape, rows = tuple(sizes[axis] for axis in features), sizes["batch"]
        positions = plain(self.position_BP).cpu().expand(rows, -1).tolist()
        out = np.zeros((rows, self.position_BP.shape[1], *shape), np.float32)
        for row, in_row in enumerate(positions):
            for number, position in enumerate(in_row):
                if position >= 0:
                    key = np.array([self.seed, zlib.crc32(point.encode())], np.uint64)
                    counter = np.array([0, position, row, self.layer], np.uint64)  # the first counts what is drawn
                    token = np.random.Generator(np.random.Philox(key=key, counter=counter))
                    out[row, number] = token.standard_normal(shape, np.float32)
        value = torch.from_numpy(out)
        for key, dim in (("heads", 2), ("dims", value.dim() - 1)):
            if key in chosen:
                value = value.index_select(dim, torch.tensor(chosen[key]))
        return Axed(value, ("batch", "pos", *features))


def selected(index_BS: Tensor | None, position_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The selected columns numbered within each row, -1 where not (B, S), and their token positions (B, P).

    ``index_BS``: as ``positions.select`` gives it. P is at least 1, where nothing is selected.
    """
    index, position = torch.broadcast_tensors(position_BS if index_BS is None else index_BS, position_BS)
    chosen = index >= 0
    at = torch.where(chosen, chosen.long().cumsum(1) - 1, -1)
    most = max(1, int(chosen.sum(1).max())) if chosen.numel() else 1
    position_BP = position.new_full((len(chosen), most), -1)
    rows = chosen.nonzero()[:, 0]
    position_BP[rows, at[chosen]] = position[chosen]
    return at, position_BP
