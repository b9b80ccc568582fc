"""Parts of a projection's output: the queries, keys or values, heads side by side, where one projection gives them all.

    gpt2      [q0 q1 … | k0 k1 … | v0 v1 …]     one group, which has all
    gpt_neox  [q0 k0 v0 | q1 k1 v1 | …]         a group for each head
    falcon    [q0 q1 … k0 v0]                   heads that share keys

Pure functions; which part is where in a family: ``Family.parts``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The heads ``first`` to ``stop`` of each group; a group has ``heads``, and all groups stand side by side."""

    groups: int
    heads: int
    first: int
    stop: int

    def read(self, out: Tensor) -> Tensor:
        """(…, all) to (…, this part): its heads side by side, group by group."""
        return out.unflatten(-1, (self.groups, self.heads, -1))[..., self.first : self.stop, :].flatten(-3)

    def written(self, out: Tensor, part: Tensor) -> Tensor:
        """``out`` with this part instead."""
        whole = out.unflatten(-1, (self.groups, self.heads, -1))
        inside = part.unflatten(-1, (self.groups, self.stop - self.first, -1))
        return torch.cat([whole[..., : self.first, :], inside, whole[..., self.stop :, :]], -2).flatten(-3)


def on_part(part: Part | None, act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What changes a part, as a change of the whole output; None: the part is the whole."""
    if part is None:
        return act

    def change(out: Tensor) -> Tensor:
        seen = part.read(out)
        changed = act(seen)
        return out if changed is seen else part.written(out, changed)

    return change
