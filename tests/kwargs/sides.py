"""A row of the kwargs' suite done twice: by a flow, and by the local Hugging Face model with the row's plain hooks."""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kwflow.blocks.precision import LiftFloat32
from kwflow.kwargs.builtin import schema
from kwflow.kwargs.points import PATTERN, captured_in, edited_in
from kwflow.kwargs.schema import Schema
from kwflow.models.families import family_of
from tests.families.configs import config
from tests.families.table import reference
from tests.kwargs.row import EVERY, MASK, NEW, B, D, Given, Place, Row, S
from tests.oracle import cache_name, layers_of, residual
from tests.oracle.tiny import derivable, random

PROMPT, ALL = slice(0, S), slice(0, S + NEW)  # columns


@functools.cache
def schema_of(family: str) -> Schema:
    """What a family's layers announce, without a model of it: no names of projections, no sizes."""
    own = family_of(config(family))
    refused = {"position_ids": own.positions} if own.positions else {}
    return schema(
        {},
        positions=not own.positions,
        refused=refused,
        points=edited_in(own.points),
        captured_only=captured_in({**own.points, PATTERN: ""}),
        projections={"any": (1, 1)},
    )


def leaves(
    row: Row, family: str, dtype: torch.dtype, layers: tuple[int, ...] = EVERY, rows: int = 1
) -> dict[str, Tensor]:
    """A row's random values, for some layers, of all rows (1) or of each, where the kwarg may have a batch axis."""
    spec = schema_of(family).kwargs[row.kwarg]
    rows = rows if not spec.forms or any("batch" in signature for signature in spec.signatures) else 1
    shapes = {name: (len(layers), rows, *own) for name, own in row.sizes(family).items()} | {**row.call_sizes}
    return {
        name: random(*shape, seed=i + 1, dtype=dtype, scale=row.spread)
        for i, (name, shape) in enumerate(shapes.items())
    }


def of_call(row: Row, x: Mapping[str, Tensor], rows: slice, seq: slice, key: slice) -> dict[str, Tensor]:
    """What holds for the call, of some rows and columns."""
    cut = {"batch": rows, "seq": seq, "key": key, "head": slice(None)}
    return {name: value[tuple(cut[axis] for axis in axes.split())] for name, (value, axes) in row.call(x).items()}


def ours(
    row: Row,
    family: str,
    remote: Any,
    hidden: Tensor,
    x: Mapping[str, Tensor],
    layers: tuple[int, ...] = EVERY,
    by_layer: bool = False,
) -> Tensor:
    """A call of a flow."""
    kwargs = row.given(given(row, family, x, layers, by_layer))
    return row.run(family, remote, hidden, {**of_call(row, x, slice(None), PROMPT, PROMPT), **kwargs})


def given(
    row: Row, family: str, x: Mapping[str, Tensor], layers: tuple[int, ...] = EVERY, by_layer: bool = False
) -> Given:
    mine = {name: value for name, value in x.items() if name not in row.call_sizes}
    return Given(family, mine, layers, any(value.shape[1] > 1 for value in mine.values()), by_layer)


def places(
    row: Row,
    family: str,
    model: Any,
    x: Mapping[str, Tensor],
    rows: slice = slice(None),
    seq: slice = PROMPT,
    layers: tuple[int, ...] = EVERY,
) -> list[Place]:
    """Where a row's hooks go, with the values of some rows."""
    blocks, seen = layers_of(model), {}
    mask, prompt = MASK[rows, seq], MASK[rows, PROMPT].sum(1)
    own = [
        {name: x[name][i] if x[name].shape[1] == 1 else x[name][i, rows] for name in row.sizes(family)}
        for i in range(len(layers))
    ]
    return [Place(family, blocks[n], n, own[i], mask, prompt, seen) for i, n in enumerate(layers)]


def behind(row: Row, model: Any, where: list[Place]) -> dict[str, Any]:
    """The cache that a row begins with, by its name in the model; empty where there is none."""
    if row.cache is None:
        return {}
    return {cache_name(model): row.cache([place.x for place in where], len(where[0].mask))}


def longer(row: Row, mask: Tensor) -> Tensor:
    """The mask with the columns that stand before."""
    return torch.cat([torch.ones(len(mask), row.ahead, dtype=mask.dtype), mask], 1)


def local(
    row: Row,
    family: str,
    hidden: Tensor,
    x: Mapping[str, Tensor],
    rows: slice = slice(None),
    seq: slice = PROMPT,
    layers: tuple[int, ...] = EVERY,
) -> Tensor:
    """The Hugging Face model's run of the same rows and columns, with hooks."""
    wide = hidden.dtype is torch.float64
    model = derivable(family) if wide else reference(family, hidden.dtype)
    where = places(row, family, model, x, rows, seq, layers)
    hooks = [hook for place in where for hook in row.hooks(place)]
    with ExitStack() as stack:
        if wide:
            stack.enter_context(LiftFloat32())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        call: dict[str, Any] = {**of_call(row, x, rows, seq, seq)} | behind(row, model, where)
        if row.ahead:
            call["attention_mask"] = longer(row, call["attention_mask"])
        if seq.start and "position_ids" in inspect.signature(model.forward).parameters:
            # as in the batch, by columns: not every family's attention is of differences of positions (hunyuan's norms)
            call.setdefault("position_ids", row.ahead + torch.arange(seq.start, seq.stop)[None])
        out = residual(model, hidden, extra=hooks, **call)
    return row.result(out, where[0])


def inputs(dtype: torch.dtype, seq: slice = PROMPT) -> Tensor:
    return random(B, S + NEW, D, dtype=dtype)[:, seq]
