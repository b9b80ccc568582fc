"""Mixtures of experts whose derivatives exist.

transformers multiplies all experts by one grouped kernel, which has no float64, no forward mode and no second order.
Values and plain gradients keep it, and its bits; the rest takes another of transformers' own ways to the same sums.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.autograd.transforms import is_mapped, is_wrapped


class DerivableExperts:
    """Mixed in before transformers' experts: chooses the implementation by what the tensors are."""

    def forward(self, hidden: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """hidden (token, hidden), expert (token, chosen) the chosen experts' numbers, weight (token, chosen)."""
        args = (hidden, expert, weight)
        if any(is_mapped(tensor) for tensor in args):
            # without control flow, at the price of each token's weights side by side
            return _experts_interface()["batched_mm"](self, *args)
        if hidden.dtype is torch.float64 or any(is_wrapped(tensor) for tensor in args):
            return type(self).__mro__[2].forward.__wrapped__(self, *args)  # type: ignore[attr-defined]  # a loop over experts
        return super().forward(*args)  # type: ignore[misc]


def derivable_experts(layer: nn.Module) -> None:
    """Let every mixture in a layer choose its implementation by what it is called with."""
    for module in layer.modules():
        if hasattr(module, "_is_expert_parallel") and not isinstance(module, DerivableExperts):  # transformers' mark
            module.__class__ = _derivable(type(module))


@functools.cache
def _derivable(experts_class: type) -> type:
    return type(experts_class.__name__, (DerivableExperts, experts_class), {})


def _experts_interface() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS
