"""Trees of any shape, and what it means that two are the same."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from hypothesis import strategies as st

from kwflow.kwargs.axes import Axed, axes

KEYS = st.text(max_size=4) | st.sampled_from(["$", "$tuple", "axes", "v"]) | st.integers()
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.just(math.nan)
    | st.text(max_size=6)
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda part: (
            st.lists(part, max_size=3)
            | st.lists(part, max_size=3).map(tuple)
            | st.dictionaries(KEYS, part, max_size=3)
            | st.dictionaries(st.integers(0, 30), part, max_size=3)
        ),
        max_leaves=12,
    )


def assert_same(a: Any, b: Any) -> None:
    """Raise unless two trees are the same to the bit: types, order of keys, axes, and NaN payloads of tensors."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Axed):
        assert a.axes == b.axes
        assert_same(a.tensor, b.tensor)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        dense = [t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b)]
        one, other = (t.view(torch.uint8) for t in dense)
        assert torch.equal(one, other), (a, b)
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    else:
        assert a == b


TENSOR = torch.arange(6.0).view(2, 3)
LEAVES = st.sampled_from([TENSOR, TENSOR.T, axes(TENSOR, "layer hidden"), axes(torch.tensor(1), "")])
