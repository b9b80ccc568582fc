"""A call's kwargs once they are checked: flat tensors, the axes of each, and the structure around them.

    Bound --part(rows, span)--> a worker's Bound on the wire --for_layer--> one block's kwargs

Flat, so that autograd sees plain tensors and the wire plain JSON. No torch.nn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import plain
from kwflow.errors import KwargError
from kwflow.kwargs import tree
from kwflow.kwargs.axes import Axed, describe, part, pick_layer, repeat_rows
from kwflow.kwargs.points import ENTRIES, captured_features
from kwflow.kwargs.schema import Schema
from kwflow.kwargs.schema import Span as Span

Rows = tuple[int, int]  # [start, stop) of a batch
Layers = str | tuple[int, ...]  # "call": once per call; "layers": shared by the layers; numbers: of those layers alone


@dataclass(frozen=True)
class Section:
    """Kwargs that go to the same layers: the skeleton of ``{name: tree}``."""

    layers: Layers
    skeleton: Any

    @functools.cached_property
    def key(self) -> tuple[Layers, str]:
        """What two sections of the same kwargs share but for their tensors; 1, 1.0 and True differ."""
        return self.layers, repr(self.skeleton)

    def within(self, span: Span) -> Section | None:
        """The same for the layers of ``span``; None when there are none."""
        if isinstance(self.layers, str):
            return self
        layers = tuple(layer for layer in self.layers if span[0] <= layer < span[1])
        return replace(self, layers=layers) if layers else None


@dataclass(frozen=True)
class Leaf:
    """Where a tensor of a Bound belongs: its axes, the number of its section, its kwarg, and that for messages."""

    axes: tuple[str, ...]
    section: int
    name: str
    what: str


@dataclass(frozen=True)
class Bound:
    """Checked kwargs of layers ``[start, stop)``; ``tensors`` are those of the sections, in order."""

    start: int
    stop: int
    sections: tuple[Section, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, span: Span, sections: Sequence[tuple[Layers, dict[str, Any]]]) -> Bound:
        """Flatten ``(layers, {name: tree})`` pairs whose tensors all have axes. Raises KwargError for other trees."""
        flat, leaves, tensors = list[Section](), list[Leaf](), list[Tensor]()
        for layers, kwargs in sections:
            for name, value in kwargs.items():
                axed, _ = tree.flatten(value)
                if not all(isinstance(leaf, Axed) for leaf in axed):
                    raise KwargError(f"kwarg {name!r:.40} has a tensor without axes")
                what = name_in(name, layers)
                leaves += [Leaf(leaf.axes, len(flat), name, what) for leaf in axed if isinstance(leaf, Axed)]
            axed, skeleton = tree.flatten(kwargs)
            tensors += [leaf.tensor for leaf in axed if isinstance(leaf, Axed)]
            flat.append(Section(layers, skeleton))
        return cls(*span, tuple(flat), tuple(leaves), tuple(tensors))

    @property
    def span(self) -> Span:
        return self.start, self.stop

    def axed(self, index: int) -> Axed:
        return Axed(self.tensors[index], self.leaves[index].axes)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Bound:
        return replace(self, tensors=tuple(tensors))

    def plain(self) -> Bound:
        """The values alone, for another thread."""
        return self.with_tensors([*map(plain, self.tensors)])

    def part(self, rows: Rows | None, span: Span) -> tuple[Bound, list[int]]:
        """The part for some rows and layers, and which of the leaves it has."""
        within = [section.within(span) for section in self.sections]
        numbers = [number for number, section in enumerate(within) if section is not None]
        keep = [i for i, leaf in enumerate(self.leaves) if leaf.section in numbers]
        leaves = tuple(replace(self.leaves[i], section=numbers.index(self.leaves[i].section)) for i in keep)
        sections = tuple(section for section in within if section is not None)
        tensors = tuple(self.cut(self.tensors[i], i, rows, span) for i in keep)
        return Bound(*span, sections, leaves, tensors), keep

    def cut(self, tensor: Tensor, index: int, rows: Rows | None, span: Span) -> Tensor:
        """Cut one tensor as :meth:`part` does."""
        leaf = Axed(tensor, self.leaves[index].axes)
        if rows is not None:
            leaf = part(leaf, "batch", *rows)
        return part(leaf, "layer", span[0] - self.start, span[1] - self.start).tensor

    def first_layer(self, index: int) -> int:
        """The first layer that a tensor acts on."""
        layers = self.sections[self.leaves[index].section].layers
        return self.start if isinstance(layers, str) else min(layers)

    def section(self, number: int, layer: int | None = None) -> dict[str, Any]:
        """One section's kwargs as ``{name: tree}``, each tensor with its axes; ``layer`` picks that layer's part."""
        leaves = [self.axed(i) for i in self._by_section[number]]
        if layer is not None:
            leaves = [pick_layer(leaf, layer - self.start) for leaf in leaves]
        return tree.unflatten(leaves, self.sections[number].skeleton)

    def names(self) -> set[str]:
        """The kwargs that are given."""
        return {name for section in self.sections for name in section.skeleton}

    def call(self) -> dict[str, Any]:
        """What holds for the whole call: ``{name: Axed}``."""
        sections = [self.section(i) for i, section in enumerate(self.sections) if section.layers == "call"]
        return {name: value for kwargs in sections for name, value in kwargs.items()}

    @property
    def fixed(self) -> bool:
        """Whether all fits any step of a session that it fits once: nothing goes by columns."""
        return not any(axis in leaf.axes for leaf in self.leaves for axis in ("seq", "key"))

    def for_layer(self, layer: int) -> dict[str, Any]:
        """The kwargs of one block."""
        if torch.is_grad_enabled():
            return self._for_layer(layer)
        if layer not in self._layers:  # a session's kwargs are the same at every step
            self._layers[layer] = self._for_layer(layer)
        return dict(self._layers[layer])

    @functools.cached_property
    def _layers(self) -> dict[int, dict[str, Any]]:
        """Without gradients only: a view that was made without them must not stand in for one with."""
        return {}

    def _for_layer(self, layer: int) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        for number, section in enumerate(self.sections):
            if section.layers != "layers" and (isinstance(section.layers, str) or layer not in section.layers):
                continue
            for name, value in self.section(number, layer).items():
                kwargs[name] = [*kwargs.get(name, ()), *value] if name in ENTRIES else value
        return kwargs

    def captures(self, span: Span | None = None) -> int:
        """How many outputs these layers have beside hidden."""
        return len(self._captures(span))

    def captured_shapes(self, span: Span, schema: Schema, keys: int) -> list[tuple[int, ...]]:
        """Of what each of these layers' captures brings back, without its rows; ``keys``: all columns so far."""
        return [
            (
                1 if entry["mean"] else entry["count"],
                *captured_features(entry["point"], schema, keys),
            )
            for entry in self._captures(span)
        ]

    def _captures(self, span: Span | None) -> list[dict[str, Any]]:
        first, last = span or (self.start, self.stop)
        within = [s for s in self.sections if not isinstance(s.layers, str) and first <= s.layers[0] < last]
        return [entry for section in within for entry in section.skeleton.get("capture", ())]

    def repeat_rows(self, repeats: int) -> Bound:
        """Each row ``repeats`` times: what beams do to kwargs, on ``batch`` axes only."""
        return self.with_tensors([repeat_rows(self.axed(i), repeats).tensor for i in range(len(self.tensors))])

    def joined(self, other: Bound) -> Bound:
        """Together with kwargs of other sections."""
        moved = tuple(replace(leaf, section=leaf.section + len(self.sections)) for leaf in other.leaves)
        sections = self.sections + other.sections
        return Bound(self.start, self.stop, sections, self.leaves + moved, self.tensors + other.tensors)

    def without(self, name: str) -> Bound:
        """The same without one kwarg of the call."""
        if name not in self.call():
            return self
        kept = [(section.layers, self.section(number)) for number, section in enumerate(self.sections)]
        for layers, kwargs in kept:
            if layers == "call":
                kwargs.pop(name, None)
        return Bound.of((self.start, self.stop), [(layers, kwargs) for layers, kwargs in kept if kwargs])

    def leaving_out(self, *names: str) -> Bound:
        """The same without some kwargs, of the call and of layers."""
        return self._filtered(lambda name: name not in names)

    def only(self, *names: str) -> Bound:
        """The same with some kwargs only."""
        return self._filtered(lambda name: name in names)

    def _filtered(self, keep: Callable[[str], bool]) -> Bound:
        kept = []
        for number, section in enumerate(self.sections):
            kwargs = {name: value for name, value in self.section(number).items() if keep(name)}
            kept += [(section.layers, kwargs)] if kwargs else []
        return Bound.of((self.start, self.stop), kept)

    def describe(self) -> str:
        """``steer[12]: float32(576,), prompts: …`` for error messages."""
        return ", ".join(f"{leaf.what}: {describe(t)}" for leaf, t in zip(self.leaves, self.tensors, strict=True))

    def to_tree(self, same: Mapping[int, int] | None = None) -> list[Any]:
        """As it goes over the wire: ``[[layers, {name: tree}], …]``, each tensor with its axes.

        ``same``: the sections that the other side holds already, and their numbers there, which are sent instead.
        """
        numbers = same or {}
        return [
            numbers[number] if number in numbers else [_layers_to_json(section.layers), self.section(number)]
            for number, section in enumerate(self.sections)
        ]

    @classmethod
    def from_tree(cls, span: Span, data: Any, held: Bound | None = None) -> Bound:
        """Rebuild what a peer sent. Raises KwargError for what :meth:`to_tree` cannot have made from ``held``."""
        pairs = data if isinstance(data, list) else [data]
        if pairs and held is not None and pairs == [*range(len(held.sections))] and all(type(n) is int for n in pairs):
            return held
        return cls.of(span, [_read_section(pair, held) for pair in pairs])

    def same_as(self, other: Bound) -> dict[int, int]:
        """The sections that ``other`` has too, to the last bit, and their numbers there."""
        candidates: dict[tuple[Layers, str], list[int]] = {}
        for number, section in enumerate(other.sections):
            candidates.setdefault(section.key, []).append(number)
        same: dict[int, int] = {}
        for number, section in enumerate(self.sections):
            tensors = [self.tensors[i] for i in self._by_section[number]]
            for candidate in candidates.get(section.key, ()):
                if _equal(tensors, [other.tensors[i] for i in other._by_section[candidate]]):
                    same[number] = candidate
        return same

    def copied(self, same: Mapping[int, int], other: Bound, fixed: Collection[int] = ()) -> Bound:
        """With memory of its own, so that nobody changes it: of sections that are ``same``, what ``other`` has.

        ``fixed``: the numbers of tensors that nobody changes as they are.
        """
        tensors: list[Tensor] = []
        for number, indices in enumerate(self._by_section):
            if number in same:
                tensors += [other.tensors[i] for i in other._by_section[same[number]]]
            else:
                own = [(i in fixed, self.tensors[i].detach()) for i in indices]
                tensors += [tensor if as_it_is else tensor.clone() for as_it_is, tensor in own]
        return self.with_tensors(tensors)

    @functools.cached_property
    def _by_section(self) -> list[list[int]]:
        """The numbers of each section's tensors; they stand in the sections' order."""
        indices: list[list[int]] = [[] for _ in self.sections]
        for i, leaf in enumerate(self.leaves):
            indices[leaf.section].append(i)
        return indices


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def _equal(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """To the bit: -0.0 is another number than 0.0."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and (_same_memory(a, b) or _equal_bits(a, b))
        for a, b in zip(tensors, others, strict=True)
    )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.is_neg() == b.is_neg()


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.detach().resolve_neg().view(_BITS[t.itemsize]) for t in (a, b)))


def _layers_to_json(layers: Layers) -> str | list[int]:
    return layers if isinstance(layers, str) else list(layers)


def _read_section(pair: Any, held: Bound | None) -> tuple[Layers, dict[str, Any]]:
    if type(pair) is int and held is not None and 0 <= pair < len(held.sections):
        return held.sections[pair].layers, held.section(pair)
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise KwargError(f"a request's kwargs are [[layers, {{name: value}}], …], got {pair!r:.80}")
    return _read_layers(pair[0]), _read_names(pair[1])


def _read_layers(layers: Any) -> Layers:
    if layers in ("call", "layers"):
        return layers
    if not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        raise KwargError(f"a request's kwargs belong to the call, its layers or some layers, not to {layers!r:.40}")
    return tuple(layers)


def _read_names(kwargs: dict[Any, Any]) -> dict[str, Any]:
    for name in kwargs:
        if type(name) is not str:
            raise KwargError(f"a request's kwarg is named {name!r:.40}")
    return kwargs


def name_in(name: str, layers: Layers) -> str:
    """``steer[12]``: a kwarg and its layers, for messages."""
    return name if isinstance(layers, str) else f"{name}[{', '.join(map(str, layers))}]"
