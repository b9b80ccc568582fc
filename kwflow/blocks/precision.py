"""A span in another precision than its weights': copies of the params, and float32 casts lifted to float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kwflow.blocks.block import Params


class LiftFloat32(TorchFunctionMode):
    """Keep float64 where a layer casts to float32 (RMSNorm, softmax), so that a float64 run is one throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Tensor) and first.dtype is torch.float64:
            if func is Tensor.float:
                return first
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


def upcast(params: Sequence[Params], dtype: torch.dtype) -> list[Params]:
    """Copies of the params in another precision; what is not floating point stays."""
    return [
        {k: t.to(dtype) if t.is_floating_point() else t for k, t in block_params.items()} for block_params in params
    ]


def precision(dtype: torch.dtype) -> Any:
    """The context that a run in ``dtype`` needs."""
    return LiftFloat32() if dtype is torch.float64 else nullcontext()
