"""What a family's own layer does that torch.func cannot take, in the same arithmetic: ``Family.patch``."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kwflow.autograd.transforms import in_transform


class TanhGelu(nn.Module):
    """Bloom's gelu, in the arithmetic of transformers' BloomGelu, whose autograd.Function torch.func cannot take."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def plain_gelu(layer: nn.Module) -> None:
    layer.mlp.gelu_impl = TanhGelu()  # type: ignore[union-attr]


class SumsApart(TorchFunctionMode):
    """``a += b`` makes a new tensor: in place, vmap cannot add what it maps over to what it does not map over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.add(*args) if func is Tensor.add_ else func(*args, **(kwargs or {}))


def sums_apart(layer: nn.Module) -> None:
    """Falcon adds what its attention gives to what its feed-forward gives, in place and nothing else."""
    layer.__class__ = _summing_apart(type(layer))


@functools.cache
def _summing_apart(kind: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(kind.forward)
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with SumsApart() if in_transform() else nullcontext():
            return kind.forward(self, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})
