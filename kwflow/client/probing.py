"""``flow.probe``: activations that gradients reach, in one call.

At each point a leaf of zeros is added, so the gradient with respect to it is the gradient at the activation; when the
call is back the leaf is given the activation's values, which no one's backward has saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.kwargs.axes import Axed
from kwflow.kwargs.capture import Capture, Key, Picked
from kwflow.kwargs.edit import Edit, make
from kwflow.kwargs.points import captured_features, point_at
from kwflow.kwargs.schema import Schema, Span


class Probed(dict[Key, Tensor]):
    """``acts[point, layer]``: a leaf (batch, pos, hidden) that requires grad; ``acts.mask`` (batch, pos).

    Rows are left-aligned in the order of ``at`` and filled with zeros, as a ``kf.Capture``'s are.
    """

    mask: Tensor

    def stack(self, point: str, *, grad: bool = False) -> Tensor:
        """(layer, batch, pos, hidden): a point's values, or their gradients (zeros where there is none), by layers."""
        own = [self[key] for key in sorted(self, key=lambda key: key[1]) if key[0] == point]
        if not own:
            raise KeyError(f"{point!r} was not probed; there are {', '.join(sorted({name for name, _ in self}))}")
        return torch.stack([torch.zeros_like(t) if t.grad is None else t.grad for t in own] if grad else own).detach()


def leaves(wanted: Capture, picked: Picked, hidden: Tensor, schemas: Sequence[tuple[Span, Schema]]) -> Probed:
    """A leaf of zeros for each activation that a call is to come by."""
    schema_of = {layer: schema for (start, stop), schema in schemas for layer in range(start, stop)}
    acts = Probed()
    for point, layer in wanted:
        shape = len(hidden), picked.count, *captured_features(point, schema_of[layer], 0)
        acts[point, layer] = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device, requires_grad=True)
    return acts


def adding(acts: Mapping[Key, Tensor], at: Any) -> list[Edit]:
    """The edits that add the leaves. Copies go: what is sent again for the backward must stay zero."""
    return [
        make("add", {layer: Axed(leaf.clone(), ("batch", "pos", *point_at(point).features))}, None, point, at)
        for (point, layer), leaf in acts.items()
    ]


@torch.no_grad()
def fill(acts: Probed, captured: Capture) -> None:
    """Put what was captured into the leaves."""
    for key, leaf in acts.items():
        leaf.copy_(captured[key])
    acts.mask = captured.mask
