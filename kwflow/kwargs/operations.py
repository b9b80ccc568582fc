"""What each kind of edit does to an activation: a row of ``OPERATIONS``. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.kwargs.points import point_at


@dataclass(frozen=True)
class Operation:
    """What a kind of edit does: one row of ``OPERATIONS``.

    ``change``: of an activation, the value and the strength, which broadcast over it, to the changed activation.
    ``by_factor``: the value is a factor, a number or a tensor without the activation's last axis; else a vector.
    """

    change: Callable[..., Tensor]
    by_factor: bool = False
    in_basis: bool = False  # ``change`` takes a basis of the last axis too

    def signature(self, point: str) -> str:
        """The axes that a value may have at a point."""
        features = point_at(point).features
        if self.by_factor:
            features = tuple(f"[{axis}]" for axis in features[:-1])
        return " ".join(("[batch]", "[pos]", *features))

    def basis_signature(self, point: str) -> str:
        """The axes that a basis may have."""
        return f"[batch] {point_at(point).features[-1]} rank"

    def value_dtype(self, activation: Tensor) -> torch.dtype:
        """Factors act in float32 where an activation has less, as Python's numbers do: a row's own is the same."""
        return widened(activation) if self.by_factor else activation.dtype


def _add(x: Tensor, vector: Tensor, strength: Any) -> Tensor:
    unscaled = isinstance(strength, float) and strength == 1.0
    return x + (vector if unscaled else (strength * vector).to(x.dtype))


def _put(x: Tensor, vector: Tensor, _: Any) -> Tensor:
    return vector.expand(x.shape).clone()  # a model may go on in place


def _scale(x: Tensor, factor: Any, _: Any) -> Tensor:
    return (x * factor).to(x.dtype)


def _project_out(x: Tensor, direction: Tensor, strength: Any) -> Tensor:
    dtype = widened(x)  # sums of half precision would overflow in float16
    wide_x, direction = x.to(dtype), direction.to(dtype)
    square = (direction * direction).sum(-1, keepdim=True)
    along = (wide_x * direction).sum(-1, keepdim=True) / torch.where(square > 0, square, 1)  # along zero is nothing
    return x - (strength * along * direction).to(x.dtype)


def _clamp_min(x: Tensor, bound: Any, _: Any) -> Tensor:
    if isinstance(bound, float):
        return torch.clamp(x, min=bound)
    return torch.maximum(x.to(bound.dtype), bound).to(x.dtype)


def _clamp_max(x: Tensor, bound: Any, _: Any) -> Tensor:
    if isinstance(bound, float):
        return torch.clamp(x, max=bound)
    return torch.minimum(x.to(bound.dtype), bound).to(x.dtype)


def _set_component(x: Tensor, direction: Tensor, to: Any) -> Tensor:
    wide_x, direction = x.to(widened(x)), direction.to(widened(x))
    square = (direction * direction).sum(-1, keepdim=True)
    length = torch.where(square > 0, square, 1).sqrt()
    along = (wide_x * direction).sum(-1, keepdim=True)
    return x + ((to - along / length) * (direction / length)).to(x.dtype)


def _rotate(x: Tensor, source: Tensor, strength: Any, basis: Tensor) -> Tensor:
    wide_x, source, basis = (t.to(widened(x)) for t in (x, source, basis))
    inside = (source - wide_x)[..., None, :] @ basis  # (…, 1, rank)
    return x + (strength * (inside @ basis.mT)[..., 0, :]).to(x.dtype)


def widened(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


OPERATIONS = {
    "add": Operation(_add),
    "put": Operation(_put),
    "scale": Operation(_scale, by_factor=True),
    "project_out": Operation(_project_out),
    "clamp_min": Operation(_clamp_min, by_factor=True),
    "clamp_max": Operation(_clamp_max, by_factor=True),
    "set_component": Operation(_set_component),
    "rotate": Operation(_rotate, in_basis=True),
}
KINDS = tuple(OPERATIONS)
