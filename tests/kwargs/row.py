"""What a row of the kwargs' suite is made of: values as a caller gives them, and plain hooks at a layer's places.

The rows are in ``tests/kwargs/rows.py``, the checks of every row in ``tests/kwargs/suite.py``.
"""

# B batch, S seq, D hidden, L layers; B == L == heads == 4

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.models.families import Family, family_of
from tests.families.configs import HIDDEN, LAYERS, config
from tests.oracle import Hook
from tests.oracle.tiny import left_padded

PADS = (0, 1, 3, 8)
NEW = 3  # columns that follow the prompt, one a step
B, S, D, L = len(PADS), 6 + max(PADS), HIDDEN, LAYERS
MASK = left_padded(PADS, S + NEW)
EVERY = tuple(range(L))


@dataclass(frozen=True)
class Given:
    """A row's random values: each leaf (layers, rows or 1, …), for some of the layers."""

    family: str
    leaves: Mapping[str, Tensor]
    layers: tuple[int, ...] = EVERY
    own_rows: bool = False  # a batch axis is declared; else the values are shared by all rows
    by_layer: bool = False  # each layer is given its own, also where all have one

    def tensor(self, name: str, inner: str, layer: int | None = None) -> Any:
        """A leaf as a caller gives it, of all layers or of one, its axes declared."""
        value = self.leaves[name] if layer is None else self.leaves[name][self.layers.index(layer)]
        batch = 1 if layer is None else 0
        axes = [*(["layer"] if layer is None else []), *(["batch"] if self.own_rows else []), *inner.split()]
        value = value if self.own_rows else value.squeeze(batch)
        return kf.axes(value, " ".join(axes)) if axes else value

    def kwarg(self, name: str, value: Callable[[int | None], Any]) -> dict[str, Any]:
        """One kwarg for all layers at once, or for each of some layers its own."""
        if self.layers == EVERY and not self.by_layer:
            return {name: value(None)}
        return kf.per_layer({layer: {name: value(layer)} for layer in self.layers})


@dataclass(frozen=True)
class Place:
    """One layer of the Hugging Face model, and a row's values there: each (rows or 1, …)."""

    family: str
    block: nn.Module
    layer: int
    x: Mapping[str, Tensor]
    mask: Tensor  # (batch, seq), of the columns that are computed
    prompt: Tensor  # (batch,): tokens of each row's prompt
    seen: dict[tuple[str, int], Tensor]  # what hooks keep for ``Row.result``

    @property
    def row(self) -> Family:
        return family_of(config(self.family))

    def module(self, point: str) -> nn.Module:
        return self.block.get_submodule(self.row.points[point]) if point in self.row.points else self.block

    def features(self, point: str, width: int) -> Tensor:
        """Which of its projection's output are queries ("q"), keys or values, head by head."""
        return qkv(self.family, self.block, width)["qkv".index(point)]

    def where(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(batch, seq) bool: the tokens that ``chosen(position, tokens of the prompt)`` says."""
        position = torch.where(self.mask.bool(), self.mask.cumsum(-1) - 1, -1)
        return self.mask.bool() & chosen(position, self.prompt[:, None])


def qkv(family: str, block: nn.Module, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of features of the projections that give queries, keys and values: as each attention splits them."""
    numbers, sizes = torch.arange(width), config(family)
    heads = sizes.num_attention_heads
    if hasattr(block, "self_attention") and hasattr(block.self_attention, "_split_heads"):  # falcon's
        parts = block.self_attention._split_heads(numbers[None, None])
    elif sizes.model_type in ("bloom", "persimmon", "gpt_neox") or getattr(sizes, "multi_query", None) is False:
        parts = numbers.view(heads, 3, -1).unbind(1)
    elif sizes.model_type == "codegen":
        query, value, key = numbers.view(4, -1).chunk(3, -1)
        parts = query, key, value
    elif sizes.model_type in ("phi3", "gpt_bigcode"):
        kv = sizes.num_key_value_heads * HIDDEN // heads
        parts = numbers.split((width - 2 * kv, kv, kv))
    elif sizes.model_type in ("gpt2", "mpt"):
        parts = numbers.chunk(3)
    else:
        parts = numbers, numbers, numbers
    return tuple(part.flatten() for part in parts)


def on_rows(change: Callable[[Tensor], Tensor], shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """``change`` of (batch, seq, features): opt flattens rows before its feed-forward."""
    return lambda value: change(value.reshape(*shape, value.shape[-1])).reshape(value.shape)


def before(place: Place, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Hook:
    changed = on_rows(change, place.mask.shape)
    return module, "pre", lambda _, args: (changed(args[0]), *args[1:])


def behind(place: Place, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Hook:
    changed = on_rows(change, place.mask.shape)

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)

    return module, "post", hook


Call = Mapping[str, tuple[Tensor, str]]  # what holds for a call, with its axes
PADDED: Call = {"attention_mask": (MASK, "batch key")}


def hidden_of(family: str, flow: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    return flow(hidden, **kwargs)


@dataclass(frozen=True)
class Row:
    """One kwarg. What acts at layers has leaves and hooks; what holds for a call has ``call``."""

    name: str
    kwarg: str
    misspelt: str
    wrong: Callable[[str], dict[str, Any]]  # a value of a wrong shape
    sizes: Callable[[str], Mapping[str, tuple[int, ...]]] = lambda family: {}  # of each leaf, for one layer and row
    given: Callable[[Given], dict[str, Any]] = lambda given: {}
    hooks: Callable[[Place], list[Hook]] = lambda place: []
    call: Callable[[Mapping[str, Tensor]], Call] = lambda x: PADDED
    call_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the leaves that hold for a call
    spread: float = 1.0  # of the leaves' values
    run: Callable[[str, Any, Tensor, Mapping[str, Any]], Tensor] = hidden_of  # what is compared, of a flow's call
    result: Callable[[Tensor, Place], Tensor] = lambda out, place: out  # the same, of the oracle's
    kept: Callable[[Tensor], Tensor] = lambda mask: mask.bool()  # where it is compared
    cache: Callable[[list[Mapping[str, Tensor]], int], Any] | None = (
        None  # what stands before, from each layer's values
    )
    ahead: int = 0  # columns that it stands for; a session is given it with its first step only
    exact: bool = True  # to the bit where law 1 says so: the oracle's arithmetic is the same
    in_generate: bool = True
