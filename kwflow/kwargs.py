"""What a caller's keyword arguments become: named, checked, bound to axes, and cut for each worker.

    raw kwargs --bind--> Bound --part(rows, span)--> Bound on the wire --for_layer--> one block's kwargs

A ``Schema`` says what blocks take; workers announce theirs in ``hello``. A ``Bound`` is flat: tensors, the axes of
each, and the structure around them, so that autograd sees plain tensors and the wire plain JSON. No torch.nn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kwflow import tree as trees
from kwflow.axes import Axed, bind, check_sizes, describe, expansions, part, pick_layer, repeat_rows, without_layer
from kwflow.errors import AxesError, KwargError, ShapeError, SpanError, UnknownKwarg, did_you_mean

Span = tuple[int, int]
Group = str | int  # "call": once per call; "layers": shared by the layers; a number: that layer's own
SCALARS: dict[str, type | tuple[type, ...]] = {"float": (float, int), "int": int, "bool": bool, "str": str}


@dataclass(frozen=True)
class Spec:
    """What one kwarg may be: signatures with the kinds of dtype each takes, or scalars, or a free tree."""

    forms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    scalars: tuple[str, ...] = ()
    tree: bool = False  # nested; its tensors are declared by the caller with kf.axes
    bare: bool = True  # a tensor without declared axes is taken when its rank says which form it is
    by_layer: bool = False  # {layer: value} is taken
    required: bool = False
    group: str = "layers"

    @property
    def signatures(self) -> tuple[str, ...]:
        return tuple(signature for signature, _ in self.forms)

    def says(self) -> str:
        """What the kwarg takes, for an error message."""
        forms = [repr(signature) for signature in self.signatures] + list(self.scalars)
        return " | ".join(forms) or "a tree whose tensors are declared with kf.axes"


@dataclass(frozen=True)
class Schema:
    """The kwargs that a span's blocks take, the model's sizes, and names refused with the reason."""

    kwargs: Mapping[str, Spec]
    sizes: Mapping[str, int]
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        kwargs = {
            name: {**vars(spec), "forms": [[s, list(k)] for s, k in spec.forms]} for name, spec in self.kwargs.items()
        }
        return {"kwargs": kwargs, "sizes": dict(self.sizes), "refused": dict(self.refused)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Schema:
        known = Spec.__dataclass_fields__  # a newer worker may say more; what is not known here is left out
        kwargs = {}
        for name, spec in said["kwargs"].items():
            spec = {
                key: tuple(value) if isinstance(value, list) else value for key, value in spec.items() if key in known
            }
            forms = tuple((signature, tuple(kinds)) for signature, kinds in spec.pop("forms", ()))
            kwargs[name] = replace(Spec(forms=forms), **spec)
        return cls(kwargs, said["sizes"], said["refused"])


@dataclass(frozen=True)
class PerLayer:
    """One kwarg's value for each layer; made by :func:`per_layer`."""

    values: Mapping[int, Any]
    count: int | None  # given as a list of this many, relative to the flow; None: keys are absolute layers


def per_layer(entries: Sequence[Mapping[str, Any] | None] | Mapping[int, Mapping[str, Any]]) -> dict[str, PerLayer]:
    """Give each layer kwargs of its own: ``flow(**x, **kf.per_layer({10: {"gain": 2.0}}))``.

    A list has one entry per layer of the flow (None for none); a dict is keyed by absolute layers.
    """
    count = None if isinstance(entries, Mapping) else len(entries)
    items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
    out: dict[str, dict[int, Any]] = {}
    for layer, kwargs in items:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise KwargError(
                f"kf.per_layer takes a dict of kwargs for each layer, got {type(kwargs).__name__} for {layer}"
            )
        for name, value in (kwargs or {}).items():
            out.setdefault(name, {})[layer] = value
    return {name: PerLayer(values, count) for name, values in out.items()}


@dataclass(frozen=True)
class Leaf:
    """Where a tensor of a Bound belongs: its axes, its group, its path for messages."""

    axes: tuple[str, ...]
    group: Group
    what: str


@dataclass(frozen=True)
class Bound:
    """Checked kwargs of layers ``[start, stop)``: structure, and flat tensors with their axes."""

    start: int
    stop: int
    groups: Mapping[Group, Any]  # group -> skeleton of {name: tree}
    leaves: tuple[Leaf, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    def axed(self, index: int) -> Axed:
        return Axed(self.tensors[index], self.leaves[index].axes)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Bound:
        return replace(self, tensors=tuple(tensors))

    def part(self, rows: Span | None, span: Span) -> tuple[Bound, list[int]]:
        """The part for some rows and layers, and which of the leaves it has."""
        keep = [
            i
            for i, leaf in enumerate(self.leaves)
            if not isinstance(leaf.group, int) or span[0] <= leaf.group < span[1]
        ]
        tensors = [self.cut(self.tensors[i], i, rows, span) for i in keep]
        groups = {g: s for g, s in self.groups.items() if not isinstance(g, int) or span[0] <= g < span[1]}
        return Bound(*span, groups, tuple(self.leaves[i] for i in keep), tuple(tensors)), keep

    def cut(self, tensor: Tensor, index: int, rows: Span | None, span: Span) -> Tensor:
        """Cut one tensor as :meth:`part` does."""
        leaf = Axed(tensor, self.leaves[index].axes)
        if rows is not None:
            leaf = part(leaf, "batch", *rows)
        return part(leaf, "layer", span[0] - self.start, span[1] - self.start).tensor

    def group(self, group: Group, layer: int | None = None) -> dict[str, Any]:
        """One group's kwargs as ``{name: tree}``, each tensor with its axes; ``layer`` picks that layer's part."""
        if group not in self.groups:
            return {}
        mine = [self.axed(i) for i, leaf in enumerate(self.leaves) if leaf.group == group]
        if layer is not None:
            mine = [pick_layer(leaf, layer - self.start) for leaf in mine]
        return trees.unflatten(mine, self.groups[group])

    def repeat_rows(self, repeats: int) -> Bound:
        """Each row ``repeats`` times: what beams do to kwargs, on ``batch`` axes only."""
        return self.with_tensors([repeat_rows(self.axed(i), repeats).tensor for i in range(len(self.tensors))])

    def joined(self, other: Bound) -> Bound:
        """Together with kwargs of another group."""
        groups = {**self.groups, **other.groups}
        return Bound(self.start, self.stop, groups, self.leaves + other.leaves, self.tensors + other.tensors)

    def without(self, name: str) -> Bound:
        """The same without one kwarg of the ``call`` group."""
        call = self.group("call")
        if name not in call:
            return self
        kept, skeleton = _flatten({key: value for key, value in call.items() if key != name})
        others = [i for i, leaf in enumerate(self.leaves) if leaf.group != "call"]
        whats = [leaf.what for leaf in self.leaves if leaf.group == "call" and leaf.what != name]
        leaves = [Leaf(leaf.axes, "call", what) for leaf, what in zip(kept, whats, strict=True)]
        groups = {g: s for g, s in self.groups.items() if g != "call"}
        groups = {"call": skeleton, **groups} if kept else groups
        return Bound(
            self.start,
            self.stop,
            groups,
            (*leaves, *(self.leaves[i] for i in others)),
            (*(leaf.tensor for leaf in kept), *(self.tensors[i] for i in others)),
        )

    def for_layer(self, layer: int) -> dict[str, Any]:
        """The kwargs of one block."""
        return {**self.group("layers", layer), **self.group(layer)}

    def describe(self) -> str:
        """``steer[12]: float32(576,), prompts: …`` for error messages."""
        return ", ".join(f"{leaf.what}: {describe(t)}" for leaf, t in zip(self.leaves, self.tensors, strict=True))

    def to_tree(self) -> dict[Group, dict[str, Any]]:
        """As it goes over the wire: ``{group: {name: tree}}``, each tensor with its axes."""
        return {group: self.group(group) for group in self.groups}

    @classmethod
    def from_tree(cls, span: Span, said: Any) -> Bound:
        """Rebuild what a peer sent. Raises KwargError for what :meth:`to_tree` cannot have made."""
        if not isinstance(said, dict) or not all(isinstance(kwargs, dict) for kwargs in said.values()):
            raise KwargError(f"a request's kwargs are {{group: {{name: value}}}}, got {type(said).__name__}")
        groups, leaves, tensors = {}, list[Leaf](), list[Tensor]()
        for group, kwargs in said.items():
            if type(group) is not int and group not in ("call", "layers"):
                raise KwargError(
                    f"a request's kwargs belong to the call, its layers or one layer, not to {group!r:.40}"
                )
            for name, value in kwargs.items():
                found, _ = trees.flatten(value)
                if type(name) is not str or not all(isinstance(leaf, Axed) for leaf in found):
                    raise KwargError(f"kwarg {name!r:.40} of a request has a tensor without axes")
                leaves += [Leaf(leaf.axes, group, _what(name, group)) for leaf in found if isinstance(leaf, Axed)]
            mine, groups[group] = _flatten(kwargs)
            tensors += [leaf.tensor for leaf in mine]
        return cls(*span, groups, tuple(leaves), tuple(tensors))


def _what(name: str, group: Group) -> str:
    return f"{name}[{group}]" if isinstance(group, int) else name


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a torch.func transform holds this tensor, so that its values cannot be looked at."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _flatten(tree: Any) -> tuple[list[Axed], Any]:
    """Split a tree whose tensors all have axes."""
    leaves, skeleton = trees.flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Axed)], skeleton


def bind_kwargs(
    schemas: Sequence[tuple[Span, Schema]], span: Span, kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> Bound:
    """Check a caller's kwargs against what the layers take and bind them to axes.

    ``schemas`` covers ``span`` (one entry per worker); ``sizes`` are those of this call: batch, seq, key. Nothing is
    sent when this raises UnknownKwarg, KwargError, AxesError, ShapeError or SpanError.
    """
    layer_count = span[1] - span[0]
    found: dict[Group, dict[str, Any]] = {}
    for name, value in kwargs.items():
        if value is None and any(name in schema.refused for _, schema in schemas):
            continue
        _refuse_unknown(name, schemas, span)
        if value is None:
            continue
        if isinstance(value, PerLayer):
            if any(schema.kwargs[name].group == "call" for _, schema in schemas if name in schema.kwargs):
                raise KwargError(f"{name} holds for the whole call: it cannot differ by layer")
            for layer, own in _by_layer(name, value, span).items():
                if own is not None:
                    _need(name, schemas, (layer, layer + 1), span)
                    found.setdefault(layer, {})[name] = own
            continue
        spec = next(schema.kwargs[name] for _, schema in schemas if name in schema.kwargs)
        if spec.by_layer and isinstance(value, Mapping):
            _need(name, schemas, span, span)
            for layer, own in _by_layer(name, PerLayer(value, None), span).items():
                found.setdefault(layer, {})[name] = own
        else:
            _need(name, schemas, span, span)
            found.setdefault(spec.group, {})[name] = value
    _refuse_missing(schemas, span, found)

    groups: dict[Group, Any] = {}
    leaves: list[Leaf] = []
    tensors: list[Tensor] = []
    for group, values in found.items():
        bound = {}
        for name, value in values.items():
            schema = next(
                s for (a, b), s in schemas if (not isinstance(group, int) or a <= group < b) and name in s.kwargs
            )
            what = _what(name, group)
            known = {**schema.sizes, **sizes, "layer": layer_count}
            bound[name] = _bind_value(what, value, schema.kwargs[name], known, own_layer=isinstance(group, int))
        for name, value in bound.items():
            mine, _ = _flatten(value)
            what = _what(name, group)
            leaves += [Leaf(leaf.axes, group, what) for leaf in mine]
        mine, groups[group] = _flatten(bound)
        tensors += [leaf.tensor for leaf in mine]
    return Bound(*span, groups, tuple(leaves), tuple(tensors))


def check_bound(bound: Bound, schema: Schema, sizes: Mapping[str, int]) -> None:
    """What a worker checks again of a Bound from the wire: a client's mistake must not look like the worker's."""
    for group in bound.groups:
        if isinstance(group, int) and not bound.start <= group < bound.stop:
            raise SpanError(f"kwargs for layer {group}, which is not in {bound.start}:{bound.stop}")
        for name, value in bound.group(group).items():
            _refuse_unknown(name, [((bound.start, bound.stop), schema)], (bound.start, bound.stop))
            known = {**schema.sizes, **sizes, "layer": bound.stop - bound.start}
            if (group == "call") != (schema.kwargs[name].group == "call"):
                raise KwargError(f"{name} does not belong to {group!r}")
            _bind_value(name, value, schema.kwargs[name], known, own_layer=isinstance(group, int))


def _layers(spans: Sequence[Span]) -> str:
    return ", ".join(f"{a}:{b}" for a, b in spans)


def _refuse_unknown(name: str, schemas: Sequence[tuple[Span, Schema]], span: Span) -> None:
    taken = dict.fromkeys(name for _, schema in schemas for name in schema.kwargs)
    if name in taken:
        return
    for _, schema in schemas:
        if name in schema.refused:
            raise KwargError(f"{name} is not taken by layers {_layers([span])}: {schema.refused[name]}")
    raise UnknownKwarg(
        f"flow got {name!r}; layers {_layers([span])} take {', '.join(sorted(taken))}.{did_you_mean(name, taken)}"
    )


def _need(name: str, schemas: Sequence[tuple[Span, Schema]], addressed: Span, span: Span) -> None:
    lacking = [
        (max(a, addressed[0]), min(b, addressed[1]))
        for (a, b), schema in schemas
        if name not in schema.kwargs and max(a, addressed[0]) < min(b, addressed[1])
    ]
    if lacking:
        having = [s for s, schema in schemas if name in schema.kwargs]
        raise UnknownKwarg(
            f"{name!r} is not taken by layers {_layers(lacking)} (it is by {_layers(having)}); address only those, "
            f"with kf.per_layer({{layer: {{{name!r}: …}}}}) or a slice such as flow[{having[0][0]}:{having[0][1]}]"
        )


def _refuse_missing(
    schemas: Sequence[tuple[Span, Schema]], span: Span, found: Mapping[Group, Mapping[str, Any]]
) -> None:
    everywhere = {name for group, values in found.items() if not isinstance(group, int) for name in values}
    for (a, b), schema in schemas:
        for name, spec in schema.kwargs.items():
            if not spec.required or name in everywhere:
                continue
            without = [n for n in range(max(a, span[0]), min(b, span[1])) if name not in found.get(n, {})]
            if without:
                raise KwargError(
                    f"layers {without} need {name!r} ({spec.says()}): the worker's block_fn has no default"
                )


def _by_layer(name: str, given: PerLayer, span: Span) -> dict[int, Any]:
    start, stop = span
    if given.count is not None:
        if given.count != stop - start:
            raise ShapeError(
                f"kf.per_layer got a list of {given.count} for the {stop - start} layers {start}:{stop}; "
                f"give one entry per layer, or a dict keyed by layer"
            )
        return {start + i: value for i, value in given.values.items()}
    for layer in given.values:
        if isinstance(layer, bool) or not isinstance(layer, int) or not start <= layer < stop:
            raise SpanError(f"{name} names layer {layer!r}; this flow has layers {start}:{stop} (numbers are absolute)")
    return dict(given.values)


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "int"


def _bind_value(what: str, value: Any, spec: Spec, sizes: Mapping[str, int], *, own_layer: bool) -> Any:
    """Bind every tensor of one kwarg; ``own_layer``: it is one layer's value, so it has no ``layer`` axis."""
    forms = {(without_layer(s) if own_layer else s): kinds for s, kinds in spec.forms}
    free: dict[str, int] = {}

    def leaf(tensor: Tensor | Axed) -> Axed:
        hint = "give {layer: tensor}, or " if spec.by_layer and not own_layer else ""
        bound = bind(tensor, list(forms), what=what, bare=spec.bare or (own_layer and spec.by_layer), hint=hint)
        if own_layer and "layer" in bound.axes:
            raise AxesError(f"{what} is one layer's value and cannot have a 'layer' axis")
        kinds = next((k for s, k in forms.items() if _fits(bound.axes, s)), ("float", "int", "bool"))
        if _kind(bound.tensor.dtype) not in kinds:
            axes = " ".join(bound.axes)
            raise KwargError(f"{what} ({axes!r}) is {describe(bound.tensor)}; it takes {' or '.join(kinds)} tensors")
        check_sizes(bound, sizes, free, what=what)
        return bound

    if isinstance(value, Tensor | Axed):
        if not spec.forms and not spec.tree:
            raise KwargError(f"{what} takes {spec.says()}, got a tensor")
        return leaf(value)
    if spec.tree:
        return trees.map_leaves(leaf, value)
    if isinstance(value, bool | int | float | str):
        for kind in spec.scalars:
            if isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool)):
                return value
    raise KwargError(f"{what} takes {spec.says()}, got {type(value).__name__} {str(value)[:80]!r}")


def _fits(names: tuple[str, ...], signature: str) -> bool:
    return names in expansions(signature)
