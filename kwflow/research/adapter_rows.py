"""Adapters side by side: each row of a batch takes its own, or none. See ``kwflow.research.adapters``."""

# N adapters, R rank, I in, O out

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kwflow.errors import KwargError, ModelError, UnsupportedError
from kwflow.kwargs.axes import Axed, axes
from kwflow.kwargs.bind import PerLayer, per_layer
from kwflow.kwargs.tree import as_int
from kwflow.research.adapter_kinds import Adapter as Adapter
from kwflow.research.adapter_kinds import Projected
from kwflow.research.adapter_reading import read
from kwflow.research.peft_files import numbered


def rows(adapters: Sequence[Adapter | None]) -> Rows:
    """Join adapters, one for each row of a batch, None for none: ``flow(**x, **kf.adapters.rows([a, b, None, a]))``.

    LoRA, what acts as LoRA, and IA3; of different projections, layers and ranks (smaller ones are filled up with
    zeros). Each adapter is sent once, however many rows take it. Differentiable with respect to the adapters' tensors,
    which it shares.
    """
    return Rows(adapters)


def read_rows(folder: str | os.PathLike[str]) -> Rows:
    """Read the adapters that ``Rows.save`` wrote, a row each: ``.take`` says which rows of a batch have which."""
    found = numbered(folder)
    if not found:
        raise ModelError(f"{os.fspath(folder)!r} has no adapters in subfolders 0, 1, …; kf.adapters.read reads one")
    return Rows([read(each) for each in found])


class Rows(Mapping[str, Any]):
    """Adapters by row, as the kwargs ``lora`` and ``ia3``; made by :func:`rows`, or anew for several tasks."""

    def __init__(self, adapters: Sequence[Adapter | None]):
        self.adapters = tuple(adapters)
        for number, adapter in enumerate(self.adapters):
            if isinstance(adapter, Adapter) and adapter.kwarg not in ("lora", "ia3"):
                raise UnsupportedError(
                    f"row {number} has {adapter!r}; rows join LoRA and IA3, and what acts as they do"
                )
            if adapter is not None and not isinstance(adapter, Projected):
                raise KwargError(
                    f"row {number} is a {type(adapter).__name__}; give adapters that kf.adapters.read made"
                )
        self._distinct = dict.fromkeys(adapter for adapter in self.adapters if isinstance(adapter, Projected))

    def take(self, numbers: Iterable[int | None]) -> Rows:
        """These adapters for another batch: ``tasks.take([0, 2, None, 0])`` by number, None for none."""
        distinct, taken = list(self._distinct), list[Adapter | None]()
        for given in numbers:
            number = as_int(given)
            if given is not None and (number is None or not 0 <= number < len(distinct)):
                raise KwargError(f"take got {given!r:.40}; there are adapters 0:{len(distinct)}, and None for none")
            taken.append(None if number is None else distinct[number])
        return Rows(taken)

    def parameters(self) -> list[Tensor]:
        """The tensors that are trained, of every adapter once, for an optimizer."""
        return [tensor for adapter in self._distinct for tensor in adapter.parameters()]

    def requires_grad_(self, requires_grad: bool = True) -> Rows:
        """Train the adapters, or no longer."""
        for adapter in self._distinct:
            adapter.requires_grad_(requires_grad)
        return self

    def save(self, folder: str | os.PathLike[str], base_model: str | None = None) -> None:
        """Write every adapter once, into the subfolders ``0``, ``1``, …, each as PEFT has it.

        Raises KwargError where a folder holds more such adapters than these: they would be read with them.
        """
        if len(found := numbered(folder)) > len(self._distinct):
            raise KwargError(f"{os.fspath(folder)!r} holds {len(found)} adapters, these are {len(self._distinct)}")
        for number, adapter in enumerate(self._distinct):
            adapter.save(Path(folder) / str(number), base_model)

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
