"""A tensor of a kwarg against the signatures that the kwarg takes: its axes, its sizes, its dtype.

A signature is axes in order, ``"layer [batch] hidden"``; a name in brackets may be left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import AxesError, KwargError, ShapeError
from kwflow.kwargs.axes import BROADCAST, Axed, Names, describe, parse


@functools.lru_cache(1024)
def expansions(signature: str) -> tuple[Names, ...]:
    """Every concrete form of a signature: each name in brackets present or not.

    >>> expansions("[batch] hidden")
    (('batch', 'hidden'), ('hidden',))
    """
    choices = [((name[1:-1],), ()) if name.startswith("[") else ((name,),) for name in parse(signature, optional=True)]
    return tuple(tuple(itertools.chain(*pick)) for pick in itertools.product(*choices))


def without_layer(signature: str) -> str:
    """The signature of one layer's part."""
    return " ".join(name for name in signature.split() if name.strip("[]") != "layer")


def bind_tensor(
    value: Tensor | Axed, signatures: Sequence[str], *, what: str, bare: bool = True, hint: str = ""
) -> Axed:
    """Give a kwarg's tensor the axes it was declared with, or those of the only signature of its rank.

    Raises AxesError: several signatures of that rank, none, or declared axes that the kwarg does not take.
    """
    forms = list(dict.fromkeys(form for signature in signatures for form in expansions(signature)))
    allowed = " | ".join(repr(signature) for signature in signatures)
    if isinstance(value, Axed):
        if signatures and value.axes not in forms:
            raise AxesError(f"{what} was declared {' '.join(value.axes)!r}; it takes {allowed}")
        if len(value.axes) != value.tensor.dim():
            raise AxesError(f"{what} is {describe(value.tensor)}, its axes are {' '.join(value.axes)!r}")
        return value
    fit = [form for form in forms if len(form) == value.dim()] if bare else []
    if len(fit) == 1:
        return Axed(value, fit[0])
    form = " ".join(fit[0] if fit else forms[0]) if forms else "batch hidden"
    how = f"{hint}declare its axes: kf.axes(tensor, {form!r})"
    if not bare or not forms:
        raise AxesError(f"{what} does not take a tensor without declared axes, got {describe(value)}; {how}")
    if not fit:
        raise ShapeError(f"{what} is {describe(value)}, of rank {value.dim()}; it takes {allowed}")
    several = " or ".join(repr(" ".join(form)) for form in fit)
    raise AxesError(f"{what} is {describe(value)}, which may mean {several}; {how}")


def check_sizes(leaf: Axed, sizes: Mapping[str, int], free: dict[str, int], *, what: str) -> None:
    """Compare a leaf's sizes with the call's and the model's; ``free`` collects the kwarg's own axes.

    Raises ShapeError, which names the axis, the size given and the size expected.
    """
    for axis, size in zip(leaf.axes, leaf.tensor.shape, strict=True):
        expected = sizes.get(axis)
        if expected is None:
            expected = free.setdefault(axis, size)
        if size == expected or (size == 1 and axis in BROADCAST):
            continue
        or_one = " or 1" if axis in BROADCAST and expected != 1 else ""
        raise ShapeError(
            f"{what} has {axis} = {size}, expected {expected}{or_one} "
            f"(axes {' '.join(leaf.axes)!r}, {describe(leaf.tensor)})"
        )


def bind_floats(
    value: Any, signatures: Sequence[str], sizes: Mapping[str, int], free: dict[str, int], *, what: str
) -> Axed:
    """Give a tensor of floats its axes and compare its sizes: :func:`bind_tensor`, then :func:`check_sizes`.

    Raises KwargError for what is no tensor of floats, AxesError or ShapeError.
    """
    if not isinstance(value, Tensor | Axed):
        plain = value is None or isinstance(value, bool | int | float | str)
        shown = f"{value!r:.60}" if plain else f"a {type(value).__name__}"
        raise KwargError(f"{what} is {shown}; it takes a tensor with axes {' | '.join(map(repr, signatures))}")
    leaf = bind_tensor(value, signatures, what=what)
    if not leaf.tensor.is_floating_point():
        raise KwargError(f"{what} is {describe(leaf.tensor)}; it takes float tensors")
    check_sizes(leaf, sizes, free, what=what)
    return leaf


def dtype_kind(dtype: torch.dtype) -> str:
    """``bool``, ``float``, ``complex`` or ``int``: what a signature says of dtypes."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "int"
