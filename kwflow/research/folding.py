"""Variants of one call side by side in its batch: each row keeps the kwargs of its own variant, by the ``batch`` axis.

    Bound of variant 0, Bound of variant 1, … --fold--> Bound of variants x rows

Only edits and steer fold: what differs gets a ``batch`` axis, what is the same for all keeps its form. No network.
"""

# B batch, S seq, V variants

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.kwargs import tree
from kwflow.kwargs.axes import Axed, expand, is_cut, join
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import at_points
from kwflow.kwargs.kwarg import LayerCall
from kwflow.kwargs.points import LEAVING

FOLDED = ("value", "strength", "basis")  # what of an edit may differ between the rows of one


def signature(bound: Bound, varying: Collection[str]) -> Hashable:
    """What two calls must have in common to fold. ``varying``: the names of the kwargs that differ, all of FOLDS."""
    return tuple(
        (section.layers, name, tuple(map(_entry_signature, value)) if name == "edit" else _leaf_signature(value))
        for section, name, value in _varying_kwargs(bound, varying)
    )


def fold(bounds: Sequence[Bound], varying: Collection[str], batch: int, seq: int) -> Bound:
    """Calls of one signature as one call of ``len(bounds) * batch`` rows, the first call's first.

    Differentiable with respect to every call's tensors.
    """
    first = bounds[0]
    if len(bounds) == 1:
        return first
    sections = []
    for number, section in enumerate(first.sections):
        all_kwargs = [bound.section(number) for bound in bounds]
        folded = {
            name: _fold_values([kwargs[name] for kwargs in all_kwargs], batch, seq)
            if name in varying
            else tree.map_leaves(lambda leaf: _tile(leaf, len(bounds)), value)
            for name, value in all_kwargs[0].items()
        }
        sections.append((section.layers, folded))
    return Bound.of((first.start, first.stop), sections)


def act_after(hidden_BSD: Tensor, bound: Bound, layer: int, varying: Collection[str]) -> Tensor:
    """What kwargs that fold do to the output of ``layer``, as the block would."""
    kwargs = {name: value for name, value in bound.for_layer(layer).items() if name in varying}
    batch, seq, _ = hidden_BSD.shape
    acts = at_points(kwargs, LayerCall(layer, (batch, seq), sizes={}, token_position=None))
    return acts[LEAVING](hidden_BSD) if LEAVING in acts else hidden_BSD


def _varying_kwargs(bound: Bound, varying: Collection[str]) -> Iterator[tuple[Any, str, Any]]:
    """The sections' kwargs that differ between variants: section, name, value."""
    for number, section in enumerate(bound.sections):
        for name, value in bound.section(number).items():
            if name in varying:
                yield section, name, value


def _entry_signature(entry: dict[str, Any]) -> Hashable:
    leaves = [_leaf_signature(entry[key]) for key in FOLDED if key in entry]
    chosen = tuple(entry.get("heads", ())), tuple(entry.get("dims", ()))
    return entry["kind"], entry["point"], chosen, *leaves


def _leaf_signature(leaf: Axed | float) -> Hashable:
    if not isinstance(leaf, Axed):
        return "number"
    sizes = tuple((axis, leaf.size(axis)) for axis in leaf.axes if axis != "batch")
    return sizes, leaf.tensor.dtype, leaf.tensor.device


def _fold_values(values: Sequence[Any], batch: int, seq: int) -> Any:
    if isinstance(values[0], list):  # edits, in order
        return [_fold_entries(entries, batch, seq) for entries in zip(*values, strict=True)]
    return _side_by_side(values, batch)


def _fold_entries(entries: Sequence[dict[str, Any]], batch: int, seq: int) -> dict[str, Any]:
    """One entry of each variant as one: where an entry says no columns, it acts at all of them."""
    folded = dict(entries[0])
    for key in folded.keys() & set(FOLDED):
        folded[key] = _side_by_side([entry[key] for entry in entries], batch)
    if any(entry.get("at") is not None for entry in entries):
        all_columns = Axed(torch.arange(seq)[None], ("batch", "seq"))
        folded["at"] = _side_by_side([entry.get("at") or all_columns for entry in entries], batch)
    return folded


def _side_by_side(leaves: Sequence[Axed | float], batch: int) -> Axed | float:
    """One value of each variant as one with a row for each variant's rows."""
    numbers = [leaf for leaf in leaves if not isinstance(leaf, Axed)]
    if numbers and len(set(numbers)) == 1:
        return numbers[0]
    if numbers:
        return Axed(torch.tensor(numbers, dtype=torch.float64).repeat_interleave(batch), ("batch",))
    return join([_with_rows(leaf, batch) for leaf in leaves if isinstance(leaf, Axed)], "batch", cut=True)


def _with_rows(leaf: Axed, batch: int) -> Axed:
    if "batch" not in leaf.axes:
        dim = 1 if "layer" in leaf.axes else 0
        leaf = Axed(leaf.tensor.unsqueeze(dim), (*leaf.axes[:dim], "batch", *leaf.axes[dim:]))
    return expand(leaf, "batch", batch)


def _tile(leaf: Axed, variants: int) -> Axed:
    """What all variants have: its rows once for each of them; one row stands for all as it is."""
    if not is_cut(leaf, "batch"):
        return leaf
    return Axed(torch.cat([leaf.tensor] * variants, leaf.axes.index("batch")), leaf.axes)
