"""Adapters side by side: each row of a batch takes its own, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kwflow.errors import KwargError, UnsupportedError
from kwflow.kwargs.axes import Axed, axes
from kwflow.kwargs.bind import PerLayer, per_layer
from kwflow.research.adapter_kinds import Adapter as Adapter
from kwflow.research.adapter_kinds import Projected


def rows(adapters: Sequence[Adapter | None]) -> Rows:
    """Join adapters, one for each row of a batch, None for none: ``flow(**x, **kf.adapters.rows([a, b, None, a]))``.

    LoRA and IA3; of different projections, layers and ranks (smaller ones are filled up with zeros). Each adapter is
    sent once, however many rows take it. Differentiable with respect to the adapters' tensors, which it shares.
    """
    return Rows(adapters)


class Rows(Mapping[str, Any]):
    """Adapters by row, as the kwargs ``lora`` and ``ia3``; made by :func:`rows`."""

    def __init__(self, adapters: Sequence[Adapter | None]):
        self.adapters = tuple(adapters)
        for number, one in enumerate(self.adapters):
            if isinstance(one, Adapter) and not isinstance(one, Projected):
                raise UnsupportedError(f"row {number} has {one!r}; rows join LoRA and IA3, which act at projections")
            if one is not None and not isinstance(one, Projected):
                raise KwargError(f"row {number} is a {type(one).__name__}; give adapters that kf.adapters.read made")
        self._taken = dict.fromkeys(one for one in self.adapters if isinstance(one, Projected))

    __eq__ = object.__eq__  # Mapping would compare tensors
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getitem__(self, name: str) -> PerLayer:
        if name not in list(self):
            raise KeyError(name)
        mine = {one: one.by_layer() for one in self._taken if one.kwarg == name}
        layers = sorted({layer for own in mine.values() for layer in own})
        join = _join_lora if name == "lora" else _join_ia3
        found = {}
        for layer in layers:
            names = dict.fromkeys(projection for own in mine.values() for projection in own.get(layer, ()))
            found[layer] = {name: {}}
            for projection in names:
                having = {one: own[layer][projection] for one, own in mine.items() if projection in own.get(layer, ())}
                number = {one: i for i, one in enumerate(having)}
                whose = torch.tensor([number.get(one, -1) for one in self.adapters])  # type: ignore[call-overload]
                what = f"{projection} of layer {layer}"
                found[layer][name][projection] = {**join(list(having.values()), what), "rows": whose}
        return per_layer(found)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(one.kwarg for one in self._taken))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        number = {one: i for i, one in enumerate(self._taken)}
        said = ", ".join("none" if one is None else str(number[one]) for one in self.adapters)  # type: ignore[index]
        return "\n".join([f"Rows({said})", *(f"  {i}: {one!r}" for one, i in number.items())])


def _join_lora(parts: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Adapters of one projection side by side, filled up with zeros to the largest rank."""
    rank = max(len(part["A"]) for part in parts)
    A_NRI = _stack([pad(part["A"], (0, 0, 0, rank - len(part["A"]))) for part in parts])
    B_NOR = _stack([pad(part["B"], (0, rank - len(part["A"]))) for part in parts])
    scale_N = torch.tensor([part["scale"] for part in parts], dtype=torch.float64)
    return {"A": axes(A_NRI, "adapter rank in"), "B": axes(B_NOR, "adapter out rank"), "scale": scale_N}


def _join_ia3(parts: Sequence[Axed], what: str) -> dict[str, Any]:
    sides = sorted({part.axes[-1] for part in parts})
    if len(sides) > 1:
        raise UnsupportedError(f"{what}: one adapter multiplies what it gives, another what it gets; rows do one")
    return {"scale": axes(_stack([part.tensor for part in parts]), f"adapter {sides[0]}")}


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """In the widest of their dtypes."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.stack([tensor.to(dtype) for tensor in tensors])
