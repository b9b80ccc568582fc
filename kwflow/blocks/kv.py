"""Keys and values of one session on one worker: explicit, allocated ahead, written in place.

A step names its start column; writing there crops whatever stood behind it, so that interrupt, retry and rollback are
one mechanism. Imports no transformers: the Hugging Face ``Cache`` around a layer's keys is duck-typed and thrown away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KV:
    """Keys and values of layers ``[start, stop)``: per layer two tensors (batch, kv_head, room, head_dim).

    ``room``: columns to allocate, max_length where that was said. Where it was not, room may become more: a layer's
    tensors are then copied, bit by bit the same, when it next needs them longer.
    """

    def __init__(self, start: int, stop: int, max_length: int | None = None):
        self.span, self.max_length, self.room = (start, stop), max_length, max_length or 0
        self.prefix = 0  # columns that stand before the session's first, of its first step's prefix_kv
        self._layers: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(range(start, stop))

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new columns at ``start`` and return views of all columns up to their end."""
        stop = start + keys.shape[2]
        held = self._layers[layer]
        if held is None or held[0].shape[2] < stop:
            fresh = self._empty(keys), self._empty(values)
            if held is not None:
                for new, old in zip(fresh, held, strict=True):
                    new[:, :, :start] = old[:, :, :start]
            held = self._layers[layer] = fresh
        for store, new in zip(held, (keys, values), strict=True):
            store[:, :, start:stop] = new
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_empty(*like.shape[:2], self.room, like.shape[3])

    def reorder(self, rows: Tensor, length: int) -> None:
        """Take rows in another order (a beam reorder); the prefix and the first ``length`` columns are kept."""
        length += self.prefix
        for layer, held in self._layers.items():
            if held is not None:
                rows = rows.to(held[0].device)
                fresh = self._empty(held[0][rows, :, :0]), self._empty(held[1][rows, :, :0])
                for new, old in zip(fresh, held, strict=True):
                    new[:, :, :length] = old[:, :, :length].index_select(0, rows)
                self._layers[layer] = fresh


class StepCache:
    """What a Hugging Face attention layer sees as its cache during one call or step.

    ``start``: columns that stand before these, a prefix's too. ``prefix``: keys and values of the first columns, which
    come with this call. Without a KV nothing is kept and nothing written in place, so that derivatives can be taken.
    """

    is_compileable = False

    def __init__(self, kv: KV | None, start: int, prefix: tuple[Tensor, Tensor] | None = None):
        self._kv, self._start, self._prefix = kv, start, prefix

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start = self._start
        if self._prefix is not None:  # a layer may keep other dtypes than hidden's
            start -= self._prefix[0].shape[2]
            joined = zip(self._prefix, (keys, values), strict=True)
            keys, values = (torch.cat([first.to(new.dtype), new], 2) for first, new in joined)
        return (keys, values) if self._kv is None else self._kv.write(layer_idx, start, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start
