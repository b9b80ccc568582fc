"""Captures: what is at a point of a layer, at chosen token positions, brought back; only what was asked travels.

    out, acts = flow.capture({"resid": [3, 8], "attn": [3]}, at="prompt[-1]", **x)
    acts["resid", 3]                                                       # (batch, pos, hidden)

    model.generate(**inputs, capture=(acts := kf.Capture(resid=[8])))      # or s.step(…, capture=acts)

A capture at a point sees what the edits there have left. In calls it is one more output, differentiable as the others.
"""

# B batch, S seq (columns of this call), P pos

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, SessionError, SpanError
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.kwarg import Act, Features, LayerCall, Place
from kwflow.kwargs.points import (
    EMBED,
    PATTERN,
    POINTS,
    captured_features,
    find_point,
    no_point,
    numbers,
    point_at,
    within,
)
from kwflow.kwargs.positions import Columns, is_mask, select
from kwflow.kwargs.schema import Schema, Span, Spec
from kwflow.kwargs.signatures import check_sizes
from kwflow.kwargs.tree import as_int
from kwflow.show import html

Key = tuple[str, int]
Taken = tuple[Tensor, Tensor, dict[Key, Tensor]]  # of one call or step: numbers and columns (batch, pos), values


class Capture:
    """What to capture, and then what was: ``acts[point, layer]`` is (batch, pos, hidden), ``acts.mask`` (batch, pos).

    Rows are left-aligned in the order of ``at`` and filled with zeros; at the point ``head`` the features are
    (head, head_dim). At ``pattern`` they are (head, key): the attention of each query over all columns so far, zero
    for later ones; the layers asked for it run transformers' eager attention in that call, and their numbers are
    eager's. In a session every step that is given it adds its positions. In ``generate`` a row has the positions before
    its end (eos, or what else stopped it), and what was captured is complete with the call. ``mean``: over the
    positions, made on the worker, with pos = 1; in calls only.
    """

    def __init__(
        self, points: Mapping[str, Any] | None = None, *, at: Any = "all", mean: bool = False, **by_point: Any
    ):
        first = points if points is not None else {}
        if not isinstance(first, Mapping) or first.keys() & by_point or type(mean) is not bool:
            raise KwargError(
                f"kf.Capture: points={points!r:.60}, mean={mean!r:.20}; give {{point: layers}}, each point once, a bool"
            )
        by_point = {**first, **by_point}
        if not by_point:
            raise KwargError("kf.Capture: say what: kf.Capture(resid=[3, 8], attn=[3])")
        for point in by_point:
            if find_point(point) is None:
                raise no_point("kf.Capture", point, POINTS)
        layers = {point: numbers(value, "layers", "kf.Capture") for point, value in by_point.items()}
        if layers.get(EMBED, (0,)) != (0,):
            raise SpanError("kf.Capture: the point 'embed' is the input of layer 0: embed=[0]")
        self.at, self.mean = at, mean
        self._keys: tuple[Key, ...] = tuple(
            (point, layer) for layer in sorted(set().union(*layers.values()))
            for point in layers if layer in layers[point]
        )  # fmt: skip
        self._taken: list[Taken] = []
        self._session: Any = None

    def __repr__(self) -> str:
        held = f"{tuple(self.mask.shape)} (batch, pos)" if self._taken else "nothing yet"
        points = ", ".join(f"{point}={_short(layers)}" for point, layers in self._layers().items())
        return f"Capture({points}, at={self.at!r:.40}; {held})"

    def _repr_html_(self) -> str:
        if not self._taken:
            return html.page(repr(self))
        mask = self.mask
        rows = [self._row(point, layers, tuple(mask.shape)) for point, layers in self._layers().items()]
        counts = sorted({int(count) for count in mask.sum(1)})
        held = f"{counts[0]} in each row" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} in a row"
        footer = html.line(f"positions: {held}; {self.nbytes:,} bytes in all", dim=True)
        return html.page(repr(self), html.table(["point", "layers", "each", "dtype", "bytes"], rows), footer)

    def _row(self, point: str, layers: list[int], size: tuple[int, ...]) -> list[str]:
        """What is held of a point: its layers have one shape."""
        steps = [values[point, layer] for _, _, values in self._taken for layer in layers]
        features = max(tuple(step.shape[2:]) for step in steps)  # a pattern's keys grow from step to step
        names = " ".join(("batch", "pos", *point_at(point).features))
        each = f"{'×'.join(map(str, (*size, *features)))} ({names})"
        dtype = str(steps[0].dtype).removeprefix("torch.")
        return [point, _short(layers).strip("[]"), each, dtype, f"{sum(step.nbytes for step in steps):,}"]

    def _layers(self) -> dict[str, list[int]]:
        """By point."""
        layers: dict[str, list[int]] = {}
        for point, layer in self._keys:
            layers.setdefault(point, []).append(layer)
        return layers

    @property
    def nbytes(self) -> int:
        """Bytes of all that was captured, as it came from the workers."""
        return sum(step.nbytes for _, _, values in self._taken for step in values.values())

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> tuple[Key, ...]:
        """Each (point, layer), by layers: with it ``dict(acts)`` is a dict of tensors."""
        return self._keys

    def __getitem__(self, key: Key) -> Tensor:
        """(batch, pos, hidden) of one point and layer."""
        if isinstance(key, tuple) and len(key) == 2 and (layer := as_int(key[1])) is not None:
            key = (key[0], layer)
        if key not in self._keys:
            raise KeyError(f"{key!r} was not captured; acts[point, layer] has {', '.join(map(str, self._keys))}")
        order, _ = self._order()
        steps = [values[key] for _, _, values in self._taken]
        widest = max(step.shape[-1] for step in steps)  # a pattern's keys grow from step to step
        values = torch.cat([torch.constant_pad_nd(step, (0, widest - step.shape[-1])) for step in steps], 1)
        index = order.view(*order.shape, *[1] * (values.dim() - 2)).expand(*order.shape, *values.shape[2:])
        mask = self.mask.view(*order.shape, *[1] * (values.dim() - 2)).to(values.device)
        picked = torch.gather(values, 1, index.to(values.device))
        return picked if bool(mask.all()) else torch.where(mask, picked, torch.zeros_like(picked))

    def stack(self, point: str) -> Tensor:
        """(layer, batch, pos, hidden): what was captured at a point, its layers in order."""
        layers = [layer for name, layer in self._keys if name == point]
        if not layers:
            raise KeyError(f"{point!r} was not captured; there are {', '.join(self._layers())}")
        return torch.stack([self[point, layer] for layer in layers])

    @property
    def mask(self) -> Tensor:
        """(batch, pos): whether a row has such a position."""
        order, number = self._order()
        return torch.gather(number, 1, order) >= 0

    def _order(self) -> tuple[Tensor, Tensor]:
        """Where each row's positions are among all steps', in their order; and the number of each."""
        if not self._taken:
            raise SessionError(f"{self!r} has captured nothing: give it to flow.capture, session.step or generate")
        number = torch.cat([numbers for numbers, _, _ in self._taken], 1)
        count = int((number >= 0).sum(1).max()) if number.numel() else 0
        last = torch.iinfo(torch.long).max
        return torch.argsort(torch.where(number >= 0, number, last), dim=1, stable=True)[:, :count], number

    # ---- what the flow and the session do

    def belong(self, session: Any) -> None:
        """Keep one session's steps together."""
        if self._taken and self._session is not session:
            raise SessionError("this Capture holds what another session or call captured; make a new one")
        if self.mean:
            raise SessionError("kf.Capture(mean=True) is for calls: a session's steps have no common mean")
        self._session = session

    def nothing(self, hidden: Tensor, schemas: Sequence[tuple[Span, Schema]], keys: int) -> list[Tensor]:
        """The values of a step that has no such position, (batch, 0, …); ``keys``: all columns so far."""
        of = {layer: schema for (start, stop), schema in schemas for layer in range(start, stop)}
        features = [captured_features(p, of[layer], keys) for p, layer in self._keys]
        shapes = [(len(hidden), 0, *sizes) for sizes in features]
        return [torch.empty(shape, dtype=hidden.dtype) for shape in shapes]

    def take(self, picked: Picked, values: Sequence[Tensor], batch: int) -> None:
        """Add the values of one call or step, in the order of ``keys``."""
        number, column = picked.number_BP, picked.column_BP
        if self.mean:
            number = column = torch.where((number >= 0).any(1, keepdim=True), 0, -1)
        rows = batch // len(number) if len(number) > 1 else batch
        spread = [t.repeat_interleave(rows, 0) for t in (number, column)]
        self._taken.append((spread[0], spread[1], dict(zip(self._keys, values, strict=True))))

    @property
    def empty(self) -> bool:
        """Whether nothing was captured yet."""
        return self._session is None and not self._taken

    @property
    def steps(self) -> Sequence[Taken]:
        """What each call or step brought."""
        return self._taken

    def replace(self, steps: Sequence[Taken]) -> None:
        """Hold other steps, which are of no session."""
        self._taken, self._session = list(steps), None

    def reorder(self, rows: Tensor) -> None:
        """Follow a session's rows into another order."""
        self._taken = [
            (number[rows], column[rows], {key: value[rows] for key, value in values.items()})
            for number, column, values in self._taken
        ]

    def rollback(self, position: int | Tensor) -> None:
        """Forget the columns from ``position`` on; (batch, 1): from each row's own."""
        self._taken = [
            (torch.where(column < position, number, -1), column, values) for number, column, values in self._taken
        ]


def _short(layers: list[int]) -> str:
    """``[3, 8]``, or ``0..29`` for many in a row."""
    row = len(layers) > 2 and layers == [*range(layers[0], layers[-1] + 1)]
    return f"{layers[0]}..{layers[-1]}" if row else str(layers)


# ---- from what a caller gives to what a block gets ---------------------------------------------------------------


def spec(features: Features) -> Spec:
    return Spec(points=(*features.points, *features.captured_only))


@dataclass(frozen=True)
class Picked:
    """What a selector picks of one call or step: a place for each column, and what is at each place."""

    place_BS: Tensor  # -1: not picked
    number_BP: Tensor  # the selector's own count (a token position, a place in its list); -1: nothing here
    column_BP: Tensor
    count: int  # places: the most that a row has
    stop: int  # the column behind the call's or step's last


def pick(at: Any, columns: Columns) -> Picked:
    """Look a selector up among the columns of one call or step."""
    index = select(at, columns, what="capture")
    index = columns.position_BS if index is None else index
    there = index >= 0
    place = torch.where(there, there.long().cumsum(1) - 1, -1)
    count = int(place.max()) + 1 if place.numel() else 0
    column = torch.arange(columns.start, columns.start + index.shape[1]).expand_as(index)
    if is_mask(at):  # which begins at 0 in every step
        index = torch.where(there, column, -1)
    number, column = (_lay_out(t, place, count, fill=-1) for t in (index, column))
    return Picked(place, number, column, count, columns.start + index.shape[1])


def lower(capture: Any, span: tuple[int, int], columns: Columns) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The entries of ``capture=``, each with its layer; none where nothing is selected."""
    if not isinstance(capture, Capture):
        raise KwargError(f"capture is a {type(capture).__name__}; give a kf.Capture(resid=[8])")
    if outside := [layer for _, layer in capture if not span[0] <= layer < span[1]]:
        raise SpanError(f"capture names layer {outside[0]}; this flow has layers {span[0]}:{span[1]} (absolute)")
    picked = pick(capture.at, columns)
    if not picked.count and not columns.session:
        raise KwargError(f"capture: at={capture.at!r:.60} selects no token of any row")
    if not picked.count:
        return []
    whole = picked.count == picked.place_BS.shape[1] and bool((picked.place_BS >= 0).all())
    columns_kept: dict[str, Any] = {"count": picked.count, "mean": capture.mean}
    if not whole:
        columns_kept["at"] = Axed(picked.place_BS, ("batch", "seq"))
    return [((layer,), {"point": point, **columns_kept}) for point, layer in capture]


def bind(value: Any, place: Place) -> list[dict[str, Any]]:
    """The entries that :func:`lower` made, or a peer sent."""
    if not isinstance(value, list):
        raise KwargError(f"{place.what} is a {type(value).__name__}; it takes {place.spec.says()}")
    return [check(entry, place) for entry in value]


def check(entry: Any, place: Place) -> dict[str, Any]:
    """One entry, as a client or a peer gives it."""
    what, sizes, given = place.what, place.sizes, entry.get("point") if isinstance(entry, dict) else entry
    name = within(given, place.spec.points, place.projections, what)
    if unknown := [key for key in entry if key not in ("point", "count", "mean", "at")]:
        raise KwargError(f"{what} carries {unknown[0]!r:.40}, which no capture has")
    count, at = entry.get("count"), entry.get("at")
    if type(count) is not int or not 1 <= count <= sizes["seq"] or type(entry.get("mean")) is not bool:
        raise KwargError(f"{what}: count={count!r:.20}, mean={entry.get('mean')!r:.20}: not what a client sends")
    if at is not None:
        if not isinstance(at, Axed) or at.axes != ("batch", "seq") or at.tensor.dtype != torch.long:
            raise KwargError(f"{what}: at is a tensor of int64, 'batch seq', on the wire")
        check_sizes(at, sizes, {}, what=f"{what}, at")
        if at.tensor.numel() and int(at.tensor.max()) >= count:
            raise KwargError(f"{what}: at has place {int(at.tensor.max())} of {count}")
    return {**entry, "point": name}


# ---- how they act ------------------------------------------------------------------------------------------------


def at_points(entries: Sequence[Mapping[str, Any]], call: LayerCall) -> Mapping[str, Act]:
    """What keeps a layer's activations as it comes by; edits of the same point have acted before."""
    by_point: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
    for number, entry in enumerate(entries):
        by_point.setdefault(entry["point"], {})[call.layer, number] = entry
    return {point: functools.partial(_keep, call=call, entries=numbered) for point, numbered in by_point.items()}


def _keep(activation: Tensor, *, call: LayerCall, entries: Mapping[tuple[int, int], Mapping[str, Any]]) -> Tensor:
    for key, entry in entries.items():
        # weights come as (batch, head, seq, key)
        seen = activation.transpose(1, 2) if entry["point"] == PATTERN else activation
        call.captured[key] = take(seen, entry, call.heads_at(entry["point"]))
    return activation


def take(activation: Tensor, entry: Mapping[str, Any], heads: int) -> Tensor:
    """What a capture brings back of an activation (batch, seq, features): (batch, pos, features)."""
    x = activation.unflatten(-1, (heads, -1)) if point_at(entry["point"]).by_head else activation
    at = entry.get("at")
    place = None if at is None else at.tensor.to(x.device)
    if entry["mean"]:
        if place is None:
            return x.mean(1, keepdim=True)
        there = (place >= 0).view(*place.shape, *[1] * (x.dim() - 2))
        wide = torch.promote_types(x.dtype, torch.float32)  # a sum in float16 would overflow
        total = torch.where(there, x, torch.zeros_like(x)).sum(1, keepdim=True, dtype=wide)
        return (total / there.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
    x = x.clone()  # falcon adds to its feed-forward's output in place, and gather keeps its input for the gradient
    return x if place is None else _lay_out(x, place, entry["count"], fill=0)


def _lay_out(x: Tensor, place_BS: Tensor, count: int, *, fill: int) -> Tensor:
    """Move columns (batch, seq, …) to their places (batch, pos, …)."""
    rows = max(len(x), len(place_BS))
    place = place_BS.expand(rows, -1)
    columns = torch.arange(place.shape[1], device=place.device).expand_as(place)
    slots = torch.full((rows, count + 1), -1, dtype=torch.long, device=place.device)
    source = slots.scatter(1, torch.where(place < 0, count, place), columns)[:, :count]
    shape = (*source.shape, *[1] * (x.dim() - 2))
    index = source.clamp(min=0).view(shape).expand(*source.shape, *x.shape[2:])
    gathered = torch.gather(x.expand(rows, *x.shape[1:]), 1, index)
    return torch.where((source >= 0).view(shape), gathered, torch.full_like(gathered, fill))
