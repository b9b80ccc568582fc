"""Axis signatures: what each dimension of a kwarg means, and every cut and join that follows from it.

>>> axes(torch.zeros(4, 576), "batch hidden").size("hidden")
576

A signature is names in order, ``"layer batch prefix hidden"``; ``[batch]`` may be left out (``signatures``). Axes are
declared, never inferred from a size (law 5 in CONTRIBUTING.md). Words only: imports torch, einops and kwflow.errors.

``layer``   one entry per layer of the flow           ``batch``  rows
``seq``     the columns of this call                  ``key``    all columns so far
``pos``     the selected positions                    ``hidden head kv_head head_dim in out``  sizes of the model

Any other name is free: it is never cut. ``layer batch seq head`` broadcast at size 1; ``key`` and ``hidden`` never do.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from kwflow.errors import AxesError, KwargError

Names = tuple[str, ...]

BROADCAST = frozenset({"layer", "batch", "seq", "head"})
RESERVED = frozenset({"layer", "batch", "seq", "key", "pos"})
MODEL_SIZES = frozenset({"hidden", "head", "kv_head", "head_dim", "in", "out"})

_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, eq=False)
class Axed:
    """A tensor with the name of each of its dimensions; made by :func:`axes`."""

    tensor: Tensor
    axes: Names

    def size(self, axis: str) -> int | None:
        """The size of ``axis``, or None when the tensor does not have it."""
        return self.tensor.shape[self.axes.index(axis)] if axis in self.axes else None

    def __repr__(self) -> str:
        return f"axes({describe(self.tensor)}, {' '.join(self.axes)!r})"


def describe(tensor: Tensor) -> str:
    """``float32(4, 576)``: a tensor in an error message."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def not_dense(tensor: Tensor) -> str:
    """What a tensor is that is not dense, ``nested``, ``meta`` or ``sparse``; an empty string for a dense one."""
    if tensor.is_nested:
        return "nested"
    return "meta" if tensor.is_meta else "" if tensor.layout is torch.strided else "sparse"


def check_dense(tensor: Tensor, what: str) -> None:
    """Raise KwargError for a nested or sparse tensor; a meta one has all that is checked before a call is sent."""
    kind = not_dense(tensor)
    if kind not in ("", "meta"):
        also = "; give one padded tensor and attention_mask=" if kind == "nested" else ""
        raise KwargError(f"{what} is a {kind} tensor of {tensor.dtype}; dense ones can be sent{also}")


@functools.lru_cache(1024)
def parse(text: str, *, optional: bool = False) -> Names:
    """Parse ``"batch hidden"``; with ``optional`` the names may stand in brackets, which are kept.

    >>> parse("layer [batch] head", optional=True)
    ('layer', '[batch]', 'head')
    """
    names = tuple(text.split())
    bare = [name[1:-1] if optional and name[:1] == "[" and name[-1:] == "]" else name for name in names]
    for name in bare:
        if not _NAME.fullmatch(name):
            raise AxesError(
                f"{name!r} in the axes {text!r} is not an axis name: names are lower-case words, such as 'batch hidden'"
            )
    if len(set(bare)) != len(bare):
        raise AxesError(f"the axes {text!r} name an axis twice; each dimension has a name of its own")
    return names


@functools.lru_cache(1024)
def _parse_declared(text: str, *, optional: bool = False) -> Names:
    """Parse what a user declares: a free name that is all but a name with a meaning is a slip, and would be no cut."""
    names = parse(text, optional=optional)
    known = RESERVED | MODEL_SIZES
    for name in {name.strip("[]") for name in names} - known:
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.82):
            raise AxesError(
                f"{name!r} in the axes {text!r}: did you mean {near[0]!r}? A free axis, which is never cut, needs a "
                f"name that is less like it"
            )
    return names


def axes(tensor: Tensor, names: str) -> Axed:
    """Declare what the dimensions of ``tensor`` mean.

    >>> axes(torch.zeros(2, 8), "batch hidden")
    axes(float32(2, 8), 'batch hidden')

    Differentiable: gradients flow to ``tensor``. Raises AxesError when the rank does not fit, and for a slip
    such as ``layr``.
    """
    if not isinstance(tensor, Tensor):
        raise AxesError(f"kf.axes takes a torch.Tensor, got {type(tensor).__name__}")
    parsed = _parse_declared(names)
    if len(parsed) != tensor.dim():
        raise AxesError(
            f"the axes {names!r} name {len(parsed)} dimensions, the tensor {describe(tensor)} has {tensor.dim()}"
        )
    return Axed(tensor, parsed)


class Axes:
    """The type of a block_fn's own kwarg: ``gain: kf.Axes["layer hidden"]``; ``|`` separates several forms."""

    def __init__(self, *signatures: str):
        self.signatures = signatures

    def __class_getitem__(cls, text: str) -> Axes:
        signatures = tuple(part.strip() for part in text.split("|"))
        for signature in signatures:
            _parse_declared(signature, optional=True)
        return cls(*signatures)

    def __repr__(self) -> str:
        return f"kf.Axes[{' | '.join(self.signatures)!r}]"

    def __call__(self) -> None:  # typing.get_type_hints accepts only callables as annotations
        raise TypeError(f"{self!r} is an annotation, not a function")


# ---- cuts and joins, each followed by its adjoint ---------------------------------------------------------------


def is_cut(leaf: Axed, axis: str) -> bool:
    """Whether a cut along ``axis`` changes the leaf: it has the axis, and does not broadcast along it."""
    size = leaf.size(axis)
    return size is not None and not (size == 1 and axis in BROADCAST)


def part(leaf: Axed, axis: str, start: int, stop: int) -> Axed:
    """The part for rows, layers or columns ``[start, stop)``; a leaf that broadcasts or lacks the axis is whole."""
    if not is_cut(leaf, axis):
        return leaf
    return Axed(leaf.tensor.narrow(leaf.axes.index(axis), start, stop - start), leaf.axes)


def part_adjoint(cotangent: Tensor, whole: Axed, axis: str, start: int, stop: int) -> Tensor:
    """Carry a part's cotangent back to the shape of the whole: zero outside the cut."""
    if not is_cut(whole, axis):
        return cotangent
    dim, size = whole.axes.index(axis), whole.size(axis)
    shape = list(cotangent.shape)
    assert size is not None
    shape[dim] = size
    out = cotangent.new_zeros(shape)
    out.narrow(dim, start, stop - start).copy_(cotangent)
    return out


def pick_layer(leaf: Axed, index: int) -> Axed:
    """One layer's part, without the ``layer`` axis (``index`` is relative to the flow)."""
    if "layer" not in leaf.axes:
        return leaf
    dim = leaf.axes.index("layer")
    index = 0 if leaf.tensor.shape[dim] == 1 else index
    return Axed(leaf.tensor.select(dim, index), leaf.axes[:dim] + leaf.axes[dim + 1 :])


def join(parts: Sequence[Axed], axis: str, *, cut: bool) -> Axed:
    """The inverse of cutting: concatenate along ``axis``; parts that were whole are taken once.

    ``cut``: what :func:`is_cut` says of the whole. The parts cannot tell: of two rows or of one that broadcasts, each
    part has one row.
    """
    first = parts[0]
    return Axed(torch.cat([leaf.tensor for leaf in parts], first.axes.index(axis)), first.axes) if cut else first


def expand(leaf: Axed, axis: str, size: int) -> Axed:
    """Repeat a size-1 axis to ``size`` (a view); anything else is returned as it is."""
    if axis not in leaf.axes or is_cut(leaf, axis):
        return leaf
    dim = leaf.axes.index(axis)
    return Axed(leaf.tensor.expand(*leaf.tensor.shape[:dim], size, *leaf.tensor.shape[dim + 1 :]), leaf.axes)


def repeat_rows(leaf: Axed, repeats: int) -> Axed:
    """What beams and ``num_return_sequences`` do to a kwarg: each row ``repeats`` times, on ``batch`` only."""
    if repeats == 1 or not is_cut(leaf, "batch"):
        return leaf
    return Axed(leaf.tensor.repeat_interleave(repeats, leaf.axes.index("batch")), leaf.axes)


def index_rows(leaf: Axed, rows: Tensor) -> Axed:
    """Rows in another order, with repeats: what a beam reorder does to a kwarg."""
    if not is_cut(leaf, "batch"):
        return leaf
    return Axed(leaf.tensor.index_select(leaf.axes.index("batch"), rows), leaf.axes)


def join_steps(steps: Sequence[Axed], lengths: Sequence[int]) -> Axed | None:
    """One kwarg for several steps run as one: None when they cannot be.

    ``seq`` is concatenated, after a size-1 one is expanded to its step's length; ``key`` grows, so the last step's
    stands for all; without either, only identical values join.
    """
    first, last = steps[0], steps[-1]
    if any(leaf.axes != first.axes for leaf in steps):
        return None
    if len(steps) == 1 or "key" in first.axes:
        return last if "seq" not in first.axes or len(steps) == 1 else None
    if "seq" in first.axes:
        dim = first.axes.index("seq")
        others = {leaf.tensor.shape[:dim] + leaf.tensor.shape[dim + 1 :] for leaf in steps}
        if len(others) > 1:
            return None
        wide = [expand(leaf, "seq", length) for leaf, length in zip(steps, lengths, strict=True)]
        return Axed(torch.cat([leaf.tensor for leaf in wide], dim), first.axes)
    same = all(leaf.tensor.dtype == first.tensor.dtype and torch.equal(leaf.tensor, first.tensor) for leaf in steps)
    return first if same else None


def spread(leaf: Axed, order: Names) -> Tensor:
    """View a leaf as a tensor over ``order``: axes it lacks have size 1, so that it broadcasts.

    >>> spread(axes(torch.zeros(2, 8), "batch hidden"), ("batch", "seq", "hidden")).shape
    torch.Size([2, 1, 8])
    """
    present = " ".join(axis if axis in leaf.axes else "1" for axis in order)
    return rearrange(leaf.tensor, f"{' '.join(leaf.axes)} -> {present}")
