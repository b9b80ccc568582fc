"""How ``lora`` and ``ia3`` act at a projection: one layer's adapters, bound by ``kwargs.lora``. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kwflow.kwargs.axes import Axed, spread

Adapter = Mapping[str, Any]  # of a projection: "lora": {A, B, scale[, rows]}, "ia3": Axed or {scale, rows}


def by_projection(kwargs: Mapping[str, Any]) -> Mapping[str, Adapter]:
    """The adapters among one layer's kwargs, by projection."""
    adapters: dict[str, dict[str, Any]] = {}
    for kwarg in ("lora", "ia3"):
        for name, value in (kwargs.get(kwarg) or {}).items():
            adapters.setdefault(name, {})[kwarg] = value
    return adapters


def adapt(module: Callable[[Tensor], Tensor], x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """A projection with its adapter on x (batch, seq, in), or the same flattened."""
    x = before(x, adapter, batch_seq)
    return after(module(x), x, adapter, batch_seq)


def before(x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """What goes into the projection: ia3 of axes ``in`` acts here."""
    factor = _factor(adapter)
    return _times(x, factor, batch_seq) if factor is not None and "in" in factor.axes else x


def after(y: Tensor, x: Tensor, adapter: Adapter, batch_seq: tuple[int, int]) -> Tensor:
    """What comes out of it: ia3 of axes ``out``, then the low-rank product of what went in."""
    factor, lora = _factor(adapter), adapter.get("lora")
    if factor is not None and "out" in factor.axes:
        y = _times(y, factor, batch_seq)
    if lora is None:
        return y
    rows, scale = lora.get("rows"), lora["scale"]
    x_BSI = x.reshape(*batch_seq, x.shape[-1])
    # or with a batch in front
    A_RI, B_OR = (_of_rows(lora[key], rows, 0).tensor.to(x.device, x.dtype) for key in "AB")
    added_BSO = x_BSI @ A_RI.mT @ B_OR.mT
    if isinstance(scale, Axed):  # in float32 where x has less, as a number of Python acts
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = spread(_of_rows(scale, rows, 0), ("batch", "seq", "features")).to(x.device, wide)
    added_BSO = added_BSO if isinstance(scale, float) and scale == 1.0 else (added_BSO * scale).to(x.dtype)
    sum_BSO = y.reshape(*batch_seq, y.shape[-1]) + added_BSO.to(y.dtype)
    if rows is not None:  # adding zeros is not quite nothing: it takes the sign of -0.0
        sum_BSO = torch.where(_has_adapter(rows, 3).to(y.device), sum_BSO, y.reshape(sum_BSO.shape))
    return sum_BSO.reshape(y.shape)


def _factor(adapter: Adapter) -> Axed | None:
    """ia3 as a tensor with a factor for each row, or for all rows."""
    ia3 = adapter.get("ia3")
    return _of_rows(ia3["scale"], ia3["rows"], 1) if isinstance(ia3, Mapping) else ia3


def _of_rows(leaf: Axed, rows: Axed | None, default: float) -> Axed:
    """Each row's part of what has an ``adapter`` axis; ``default`` for a row without one, also in derivatives."""
    if rows is None:
        return leaf
    assert leaf.axes[0] == "adapter"
    picked = leaf.tensor.index_select(0, rows.tensor.clamp(min=0).to(leaf.tensor.device))
    picked = torch.where(_has_adapter(rows, picked.dim()).to(picked.device), picked, default)
    return Axed(picked, ("batch", *leaf.axes[1:]))


def _has_adapter(rows: Axed, dims: int) -> Tensor:
    return (rows.tensor >= 0).reshape(-1, *[1] * (dims - 1))


def _times(activation: Tensor, ia3: Axed, batch_seq: tuple[int, int]) -> Tensor:
    x = activation.reshape(*batch_seq, activation.shape[-1])  # opt flattens rows before its feed-forward
    factor = Axed(ia3.tensor.to(x.device, x.dtype), (*ia3.axes[:-1], "features"))
    return (x * spread(factor, ("batch", "seq", "features"))).reshape(activation.shape)
