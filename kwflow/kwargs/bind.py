"""What a caller's keyword arguments become: named, checked against the blocks' Schema, bound to axes.

    raw kwargs --bind_kwargs--> Bound (``kwflow.kwargs.bound``)

Nothing is sent before everything here has passed. No torch.nn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import AxesError, KwargError, ShapeError, SpanError, UnknownKwarg, did_you_mean
from kwflow.kwargs import lora, prefix_kv, tree
from kwflow.kwargs.axes import Axed, check_dense, describe
from kwflow.kwargs.bound import Bound, Layers, Span, name_in
from kwflow.kwargs.builtin import BUILTIN, row_of
from kwflow.kwargs.kwarg import Place, Projections
from kwflow.kwargs.positions import Columns
from kwflow.kwargs.schema import SCALARS, Schema, Spec
from kwflow.kwargs.signatures import bind_tensor, check_sizes, dtype_kind, expansions, without_layer
from kwflow.kwargs.tree import as_int

Schemas = Sequence[tuple[Span, Schema]]  # what the workers of some layers take, in the order of their layers
_CAPTURE = "out, acts = flow.capture({'resid': [3]}, **x) brings back what layers give"
_KEPT = "flow.session(max_length=) keeps keys and values"
_ELSEWHERE = {  # what stands in other places than a call's kwargs, and where
    **dict.fromkeys(("adapter", "adapters", "peft"), "kf.adapters.read(folder) is kwargs: flow(**x, **adapter)"),
    **{"output_hidden_states": _CAPTURE, "output_attentions": _CAPTURE.replace("resid", "pattern")},
    **{"past_key_values": _KEPT, "use_cache": _KEPT},
    **{"input_ids": "flow.inputs embeds token ids: flow(**flow.inputs(ids))"},
    **{name: f"flow.options({name}=…) is a flow that runs so" for name in ("timeout", "peers_blocked", "batch_tokens")},
}


@dataclass(frozen=True)
class PerLayer:
    """One kwarg's value for each layer; made by :func:`per_layer`."""

    values: Mapping[int, Any]
    count: int | None  # of a list, relative to the flow; None: keys are absolute layers


def per_layer(entries: Sequence[Mapping[str, Any] | None] | Mapping[int, Mapping[str, Any]]) -> dict[str, PerLayer]:
    """Give each layer kwargs of its own: ``flow(**x, **kf.per_layer({10: {"gain": 2.0}}))``.

    A list has one entry per layer of the flow (None for none); a dict is keyed by absolute layers.
    """
    count = None if isinstance(entries, Mapping) else len(entries)
    items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
    by_name: dict[str, dict[int, Any]] = {}
    for layer, kwargs in items:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise KwargError(
                f"kf.per_layer takes a dict of kwargs for each layer, got {type(kwargs).__name__} for {layer}"
            )
        for name, value in (kwargs or {}).items():
            by_name.setdefault(name, {})[layer] = value
    return {name: PerLayer(values, count) for name, values in by_name.items()}


def bind_kwargs(
    schemas: Schemas,
    span: Span,
    kwargs: Mapping[str, Any],
    sizes: Mapping[str, int],
    columns: Columns | None = None,
    *,
    complete: bool = True,
) -> Bound:
    """Check a caller's kwargs against what the layers take and bind them to axes.

    ``schemas`` covers ``span`` (one entry per worker); ``sizes`` are those of this call: batch, seq, key; ``columns``
    those of a session's step, in token positions. ``complete``: these are all of the call's kwargs, so that one which a
    block_fn needs must be among them. Nothing is sent when this raises UnknownKwarg, KwargError,
    AxesError, ShapeError or SpanError.
    """
    grouped, at_points = _group(prefix_kv.named(kwargs, span[1] - span[0]), schemas, span)
    if complete:
        _refuse_missing(schemas, span, grouped)
    sections = [
        (layers, _bind_section(layers, {name: value}, schemas, span, sizes))
        for layers, values in grouped.items()
        for name, value in values.items()
    ]
    if at_points and columns is None:
        mask = next((values["attention_mask"].tensor for _, values in sections if "attention_mask" in values), None)
        columns = Columns.of_call(mask, sizes["seq"])
    for name, value in at_points.items():
        assert columns is not None
        lower = BUILTIN[name].lower
        for number, (layers, entry) in enumerate(lower(value, span, columns) if lower is not None else ()):
            what = f"{name}[{number}]"
            sections.append((layers, _bind_section(layers, {name: [entry]}, schemas, span, sizes, what)))
    bound = Bound.of(span, sections)
    for name in bound.names() & BUILTIN.keys():
        if (check := BUILTIN[name].check) is not None:
            check(bound)
    return bound


def _group(
    kwargs: Mapping[str, Any], schemas: Schemas, span: Span
) -> tuple[dict[Layers, dict[str, Any]], dict[str, Any]]:
    """A caller's kwargs by the layers that they go to, and those that act at points, which say it themselves."""
    grouped: dict[Layers, dict[str, Any]] = {"call": {}, "layers": {}}
    at_points: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is None and any(name in schema.refused for _, schema in schemas):
            continue
        _refuse_unknown(name, schemas, span)
        if value is None:
            continue
        spec = next(schema.kwargs[name] for _, schema in schemas if name in schema.kwargs)
        if spec.points:
            if isinstance(value, PerLayer):
                raise KwargError(f"{name} cannot stand in kf.per_layer: it says its layers itself, kf.add(…, layers=)")
            at_points[name] = value
        elif isinstance(value, PerLayer) or (spec.by_layer and _of_layers(value, spec)):
            if spec.group == "call":
                raise KwargError(f"{name} holds for the whole call: it cannot differ by layer")
            by_layer = {layer: v for layer, v in _by_layer(name, value, span).items() if v is not None}
            if spec.projections and (whole := lora.stacked(by_layer, span)) is not None:
                grouped["layers"][name] = whole
                continue
            for layer, layer_value in by_layer.items():
                grouped.setdefault((layer,), {})[name] = layer_value
        else:
            grouped[spec.group][name] = value
    return grouped, at_points


def _of_layers(value: Any, spec: Spec) -> bool:
    """Whether a value is ``{layer: value}``."""
    return isinstance(value, Mapping) and not (spec.prefix and prefix_kv.is_pair(value))


def _by_layer(name: str, value: PerLayer | Mapping[int, Any], span: Span) -> dict[int, Any]:
    start, stop = span
    per_layer = value if isinstance(value, PerLayer) else PerLayer(value, None)
    if per_layer.count is not None:
        if per_layer.count != stop - start:
            raise ShapeError(
                f"kf.per_layer got a list of {per_layer.count} for the {stop - start} layers {start}:{stop}; "
                f"give one entry per layer, or a dict keyed by layer"
            )
        return {start + i: value for i, value in per_layer.values.items()}
    by_layer: dict[int, Any] = {}
    for layer, layer_value in per_layer.values.items():
        number = as_int(layer)
        if number is None or not start <= number < stop:
            raise SpanError(f"{name} names layer {layer!r}; this flow has layers {start}:{stop} (numbers are absolute)")
        if number in by_layer:
            raise KwargError(f"{name} names layer {number} twice")
        by_layer[number] = layer_value
    return by_layer


def check_bound(bound: Bound, schema: Schema, sizes: Mapping[str, int]) -> None:
    """What a worker checks again of a Bound from the wire: a client's mistake must not look like the worker's."""
    span = (bound.start, bound.stop)
    for number, section in enumerate(bound.sections):
        for layer in () if isinstance(section.layers, str) else section.layers:
            if not span[0] <= layer < span[1]:
                raise SpanError(f"kwargs for layer {layer}, which is not in {_layers([span])}")
        kwargs = bound.section(number)
        for name in kwargs:
            _refuse_unknown(name, [(span, schema)], span)
            if (section.layers == "call") != (schema.kwargs[name].group == "call"):
                raise KwargError(f"{name} does not belong to {section.layers!r}")
        _bind_section(section.layers, kwargs, [(span, schema)], span, sizes)


def _bind_section(
    layers: Layers,
    kwargs: Mapping[str, Any],
    schemas: Schemas,
    span: Span,
    sizes: Mapping[str, int],
    what: str = "",
) -> dict[str, Any]:
    """Check the kwargs that go to the same layers, each against every worker of one of them."""
    spans = [span] if isinstance(layers, str) else [(layer, layer + 1) for layer in layers]
    bound = {}
    for name, value in kwargs.items():
        for addressed in spans:
            _need(name, schemas, addressed, span)
        schema = next(
            s for (a, b), s in schemas if name in s.kwargs and any(a < stop and start < b for start, stop in spans)
        )
        place = Place(
            what or name_in(name, layers),
            schema.kwargs[name],
            {**schema.sizes, **sizes, "layer": span[1] - span[0]},
            _projections(schemas, spans),
            single_layer=not isinstance(layers, str),
        )
        bound[name] = bind_value(name, value, place)
    return bound


def bind_value(name: str, value: Any, place: Place) -> Any:
    """Bind every tensor of one kwarg: as its row does it, or by the signatures of its spec."""
    row = row_of(name, place.spec)
    if row is not None and row.bind is not None:
        return row.bind(value, place)
    return _by_signatures(name, value, place)


def _by_signatures(name: str, value: Any, place: Place) -> Any:
    what, spec, single_layer = place.what, place.spec, place.single_layer
    forms = {(without_layer(s) if single_layer else s): kinds for s, kinds in spec.forms}
    free: dict[str, int] = {}

    def leaf(tensor: Tensor | Axed) -> Axed:
        check_dense(tensor.tensor if isinstance(tensor, Axed) else tensor, what)
        hint = "give {layer: tensor}, or " if spec.by_layer and not single_layer else ""
        bound = bind_tensor(
            tensor, list(forms), what=what, bare=spec.bare or (single_layer and spec.by_layer), hint=hint
        )
        if single_layer and "layer" in bound.axes:
            raise AxesError(f"{what} is one layer's value and cannot have a 'layer' axis")
        kinds = next((k for s, k in forms.items() if bound.axes in expansions(s)), ("float", "int", "bool"))
        if dtype_kind(bound.tensor.dtype) not in kinds:
            axes = " ".join(bound.axes)
            raise KwargError(f"{what} ({axes!r}) is {describe(bound.tensor)}; it takes {' or '.join(kinds)} tensors")
        check_sizes(bound, place.sizes, free, what=what)
        return bound

    if isinstance(value, Tensor | Axed):
        if not spec.forms and not spec.tree:
            raise KwargError(f"{what} takes {spec.says()}, got a tensor")
        return leaf(value)
    if spec.tree:
        return tree.map_leaves(leaf, value)
    if isinstance(value, bool | int | float | str):
        for kind in spec.scalars:
            if isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool)):
                return value
    number = _number(value)
    kinds = next((k for s, k in forms.items() if number is not None and () in expansions(s)), ())
    if number is not None and (not isinstance(number, bool) or "bool" in kinds) and kinds:
        whole = isinstance(number, bool) or (isinstance(number, int) and "int" in kinds)
        return leaf(torch.tensor(number, dtype=None if whole else torch.float64))
    got, takes = type(value).__name__, replace(spec, forms=tuple(forms.items())).says()
    if isinstance(value, bool | int | float | str):
        got += f" {value!r:.80}"
    elif hasattr(value, "edits"):  # kf.steering's Vectors
        got += "; edit=v.edits() adds vectors at their layers"
    elif isinstance(value, Mapping):
        got += (
            ": it is one layer's own, without {layer: …}"
            if single_layer
            else f"; kf.per_layer({{layer: {{{name!r}: …}}}})"
        )
    raise KwargError(f"{what} takes {takes}, got {got}")


def _number(value: Any) -> bool | int | float | None:
    """A number of Python's, or of numpy's, which may be an array without dimensions."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "__array__"):
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def _projections(schemas: Schemas, spans: Sequence[Span]) -> Projections:
    """The projections that every worker of an addressed layer has."""
    return in_all(
        [schema.projections for (a, b), schema in schemas if any(a < stop and start < b for start, stop in spans)]
    )


def in_all(projections: Sequence[Projections]) -> dict[str, tuple[int, int]]:
    """The projections that all have in one size."""
    first, *others = projections
    return {name: sizes for name, sizes in first.items() if all(other.get(name) == sizes for other in others)}


# ---- refusals -----------------------------------------------------------------------------------------------------


def _refuse_unknown(name: str, schemas: Schemas, span: Span) -> None:
    taken = dict.fromkeys(name for _, schema in schemas for name in schema.kwargs)
    if name in taken:
        return
    for _, schema in schemas:
        if name in schema.refused:
            raise KwargError(f"{name} is not taken by layers {_layers([span])}: {schema.refused[name]}")
    hint = f" {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, taken)
    raise UnknownKwarg(f"flow got {name!r}; layers {_layers([span])} take {', '.join(sorted(taken))}.{hint}")


def _need(name: str, schemas: Schemas, addressed: Span, span: Span) -> None:
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


def _refuse_missing(schemas: Schemas, span: Span, grouped: Mapping[Layers, Mapping[str, Any]]) -> None:
    everywhere = {name for layers, values in grouped.items() if isinstance(layers, str) for name in values}
    for (a, b), schema in schemas:
        for name, spec in schema.kwargs.items():
            if not spec.required or name in everywhere:
                continue
            without = [n for n in range(max(a, span[0]), min(b, span[1])) if name not in grouped.get((n,), {})]
            if without:
                starts = [n for n in without if n - 1 not in without]
                stops = [n + 1 for n in without if n + 1 not in without]
                where = _layers(list(zip(starts, stops, strict=True)))
                raise KwargError(f"layers {where} need {name!r} ({spec.says()}): the block_fn has no default")


def _layers(spans: Sequence[Span]) -> str:
    return ", ".join(f"{a}:{b}" for a, b in spans)
