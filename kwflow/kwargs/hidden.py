"""Hidden, the one argument of every call: what it must be. No torch.nn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kwflow.errors import KwargError, ShapeError
from kwflow.kwargs.axes import check_dense, describe


def check_hidden(hidden: Any, width: int) -> None:
    """Raise ShapeError or KwargError unless hidden is a float tensor (batch, seq, width)."""
    if not isinstance(hidden, Tensor):
        how = "flow(**x)" if isinstance(hidden, Mapping) else f"a tensor (batch, seq, {width}), as flow.inputs makes"
        raise KwargError(f"hidden is a {type(hidden).__name__}; give {how}")
    check_dense(hidden, "hidden")
    if not hidden.is_floating_point():
        raise KwargError(f"hidden is {describe(hidden)}; blocks take floating point (token ids go through flow.inputs)")
    if hidden.dim() != 3 or hidden.shape[2] != width:
        raise ShapeError(f"hidden is {describe(hidden)}; these blocks take (batch, seq, {width})")
