"""Adapters side by side: each row of a batch takes its own, or none. See ``kwflow.adapters``."""

# N adapters, R rank, I in, O out

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        for number, adapter in enumerate(self.adapters):
            if isinstance(adapter, Adapter) and not isinstance(adapter, Projected):
                raise UnsupportedError(
                    f"row {number} has {adapter!r}; rows join LoRA and IA3, which act at projections"
                )
            if adapter is not None and not isinstance(adapter, Projected):
                raise KwargError(
                    f"row {number} is a {type(adapter).__name__}; give adapters that kf.adapters.read made"
                )
        self._distinct = dict.fromkeys(adapter for adapter in self.adapters if isinstance(adapter, Projected))

    __eq__ = object.__eq__  # Mapping would compare tensors
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getitem__(self, name: str) -> PerLayer:
        if name not in list(self):
            raise KeyError(name)
        parts: dict[int, dict[str, dict[Projected, Any]]] = {}  # by layer, projection and adapter
        for adapter in (adapter for adapter in self._distinct if adapter.kwarg == name):
            for layer, projections in adapter.by_layer().items():
                for projection, part in projections.items():
                    parts.setdefault(layer, {}).setdefault(projection, {})[adapter] = part
        join = _join_lora if name == "lora" else _join_ia3
        layer_kwargs: dict[int, Any] = {}
        for layer, projections in sorted(parts.items()):
            layer_kwargs[layer] = {name: {}}
            for projection, by_adapter in projections.items():
                joined = join(list(by_adapter.values()), f"{projection} of layer {layer}")
                layer_kwargs[layer][name][projection] = {**joined, "rows": self._indices(by_adapter)}
        return per_layer(layer_kwargs)[name]

    def _indices(self, adapters: Iterable[Projected]) -> Tensor:
        """Each row's number (batch,) among ``adapters``; -1 where it takes none of them."""
        index: dict[Any, int] = {adapter: number for number, adapter in enumerate(adapters)}
        return torch.tensor([index.get(adapter, -1) for adapter in self.adapters])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(adapter.kwarg for adapter in self._distinct))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        indices = [str(index) if index >= 0 else "none" for index in self._indices(self._distinct).tolist()]
        adapters = [f"  {index}: {adapter!r}" for index, adapter in enumerate(self._distinct)]
        return "\n".join([f"Rows({', '.join(indices)})", *adapters])


def _join_lora(parts: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Adapters of one projection side by side, filled up with zeros to the largest rank."""
    rank = max(len(part["A"]) for part in parts)
    A_NRI = _stack([pad(part["A"], (0, 0, 0, rank - len(part["A"]))) for part in parts])
    B_NOR = _stack([pad(part["B"], (0, rank - len(part["A"]))) for part in parts])
    scale_N = torch.tensor([part["scale"] for part in parts], dtype=torch.float64)
    return {"A": axes(A_NRI, "adapter rank in"), "B": axes(B_NOR, "adapter out rank"), "scale": scale_N}


def _join_ia3(parts: Sequence[Axed], where: str) -> dict[str, Any]:
    sides = sorted({part.axes[-1] for part in parts})
    if len(sides) > 1:
        raise UnsupportedError(f"{where}: one adapter multiplies what it gives, another what it gets; rows do one")
    return {"scale": axes(_stack([part.tensor for part in parts]), f"adapter {sides[0]}")}


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """In the widest of their dtypes."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.stack([tensor.to(dtype) for tensor in tensors])
