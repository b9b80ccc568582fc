"""Activations kept in a folder, read as a torch Dataset. What is in the folder: ``kwflow.client.activation_files``."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kwflow.client.activation_files import ABOUT, opened, read_index, read_tensors, shard_file
from kwflow.errors import KwargError
from kwflow.kwargs.tree import as_int

Key = str | tuple[str, int]
MAPPED = 64  # shards at once; a mapped one takes a file handle, and no memory of its own


class Activations(Dataset[dict[Key, Tensor]]):
    """What ``flow.harvest`` kept, token by token: a torch Dataset, for ``DataLoader`` too, with workers as well.

        acts = kf.activations.read("acts/")
        len(acts), acts.points                     # tokens; [("resid", 8)]
        acts[5]["resid", 8]                        # (hidden,); beside it "row", "position" and "token", each ()
        acts["resid", 8]                           # (tokens, hidden), of all shards at once
        for shard in acts.shards(): …              # {("resid", 8): (tokens, hidden), "row": (tokens,), …}

    Bitwise what was captured, in its dtype. ``complete``: whether the run that made it has ended; one that was
    interrupted has the shards that were whole. Raises ModelError for a folder that is damaged or none.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._index = read_index(self.folder)
        points: Mapping[str, Sequence[int]] = self._index.recipe["points"]
        self.points = [(point, layer) for point, layers in points.items() for layer in layers]
        self._stops = list(itertools.accumulate(shard.tokens for shard in self._index.shards))
        self._open: dict[int, Any] = {}  # shards that are mapped, the oldest first

    @property
    def complete(self) -> bool:
        return self._index.complete

    @property
    def recipe(self) -> Mapping[str, Any]:
        """What it was made of: model, checkpoint, points, at …"""
        return self._index.recipe

    @property
    def rows(self) -> int:
        """How many texts."""
        return self._index.rows

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __repr__(self) -> str:
        points = ", ".join(f"{point} {layers}" for point, layers in self.recipe["points"].items())
        state = "" if self.complete else ", not complete"
        return f"Activations({len(self)} tokens of {self.rows} texts, {points}; {len(self._stops)} shards{state})"

    def __getitem__(self, which: Any) -> Any:
        """One token's, by its number; or all tokens' of a (point, layer), or of "row", "position" or "token"."""
        if name := self._names().get(which) if isinstance(which, str | tuple) else None:
            parts = [read_tensors(shard_file(self.folder, n), [name])[name] for n in range(len(self._stops))]
            if not parts:
                raise KwargError(f"{self!r} has no shard yet")
            return torch.cat(parts)
        number = as_int(which)
        if number is None:
            raise KeyError(f"{which!r}; acts[number], acts[point, layer] of {self.points}, or acts of {ABOUT}")
        if not -len(self) <= number < len(self):
            raise IndexError(f"token {number} of {len(self)}")
        number %= len(self)
        shard = bisect.bisect_right(self._stops, number)
        place = number - (self._stops[shard - 1] if shard else 0)
        file = self._file(shard)
        return {key: file.get_slice(name)[place : place + 1][0] for key, name in self._names().items()}

    def shards(self) -> Iterator[dict[Key, Tensor]]:
        """One whole shard after the other."""
        names = self._names()
        for number in range(len(self._stops)):
            tensors = read_tensors(shard_file(self.folder, number), names.values())
            yield {key: tensors[name] for key, name in names.items()}

    def _names(self) -> dict[Key, str]:
        """What each is called in a shard."""
        return {**{name: name for name in ABOUT}, **{(p, n): f"{p}.{n}" for p, n in self.points}}

    def _file(self, shard: int) -> Any:
        if shard not in self._open:
            if len(self._open) == MAPPED:
                del self._open[next(iter(self._open))]
            self._open[shard] = opened(shard_file(self.folder, shard))
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # another process opens the files anew
