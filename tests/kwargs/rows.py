"""A row for each kwarg: how a caller gives it, how plain hooks do the same, what of it is misspelt or of a wrong shape.

A new kwarg is a Row here; ``suite.py`` checks it in every family, ``python -m benchmarks.kwargs`` shows it.
"""

# B batch, S seq, P prefix, D hidden, L layers, R rank; B == L == heads == R == 4

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.blocks.projections import find
from kwflow.kwargs.points import EDITED, ENTERING, QKV
from kwflow.kwargs.points import POINTS as POINTS_OF
from tests.families.configs import HEADS
from tests.kwargs.row import MASK, NEW, PADDED, PADS, B, Call, D, Given, L, Place, Row, S, before, behind
from tests.oracle import Hook, with_prompts
from tests.oracle.tiny import positions_of, random, span

R, P = 4, 3
PLACES = (0, 2)  # token positions that every row has

# ---- what holds for the whole call

JUMPS = positions_of(MASK) + torch.tensor([[5], [0], [1], [2]])
JUMPS = JUMPS + 3 * (JUMPS > 6)  # below longrope's original length, which changes its factors
SEEN = torch.ones(S + NEW, S + NEW, dtype=torch.bool).tril() & MASK.bool()[:, None, None, :]
SEEN = SEEN | torch.eye(S + NEW, dtype=torch.bool)  # a row of -inf has no softmax


def four_d(x: Mapping[str, Tensor]) -> Call:
    """Causal and padded, and each head's bias on what is seen."""
    literal = torch.where(SEEN, x["bias"], torch.finfo(x["bias"].dtype).min)
    return {"attention_mask": (literal, "batch head seq key")}


# ---- at the layers


def prompts(place: Place) -> list[Hook]:
    def add(value: Tensor) -> Tensor:
        return with_prompts(value, place.x["p"], place.mask)

    return [before(place, place.block, add)]


def steered(given: Given) -> dict[str, Any]:
    return given.kwarg("steer", lambda layer: given.tensor("v", "hidden", layer))


def steer(place: Place) -> list[Hook]:
    return [behind(place, place.block, lambda value: value + place.x["v"][:, None].to(value.dtype))]


def added(place: Place) -> list[Hook]:
    there = place.where(lambda position, prompt: position < prompt)[..., None]
    v, a = place.x["v"][:, None], place.x["a"][:, None, None]
    return [behind(place, place.module("resid"), lambda y: torch.where(there, y + a.to(y.dtype) * v.to(y.dtype), y))]


def put(place: Place) -> list[Hook]:
    def replace(value: Tensor) -> Tensor:
        for number, at in enumerate(PLACES):
            there = place.where(lambda position, _, at=at: position == at)[..., None]
            value = torch.where(there, place.x["v"][:, number, None].to(value.dtype), value)
        return value

    return [before(place, place.block, replace)]


def scaled(place: Place) -> list[Hook]:
    there = place.where(lambda position, prompt: (position >= prompt - 2) & (position < prompt))[..., None]
    factor = place.x["a"][:, None, None]
    kept = [1, 3]

    def by_head(value: Tensor) -> Tensor:
        heads = value.unflatten(-1, (HEADS, -1))
        some = torch.tensor([head in kept for head in range(HEADS)])[:, None]
        return torch.where(there[..., None] & some, heads * factor[..., None].to(value.dtype), heads).flatten(-2)

    return [before(place, place.module("head"), by_head)]


def projected_out(place: Place) -> list[Hook]:
    def project(y: Tensor) -> Tensor:
        d = place.x["d"][:, None].to(y.dtype)
        return y - (y * d).sum(-1, keepdim=True) / (d * d).sum(-1, keepdim=True) * d

    real = place.mask.bool()[..., None]
    return [behind(place, place.module("resid"), lambda y: torch.where(real, project(y), y))]


def clamped(place: Place) -> list[Hook]:
    """Some dims of the residual stream from below, all of attention's output from above, at one token and at all."""
    first = place.where(lambda position, _: position == 0)[..., None]
    real = place.mask.bool()[..., None]
    some = torch.zeros(D, dtype=torch.bool)
    some[[1, 5]] = True

    def floor(y: Tensor) -> Tensor:
        low = place.x["l"][:, None, None].to(y.dtype)
        return torch.where(first & some, torch.maximum(y, low), y)

    def ceiling(y: Tensor) -> Tensor:
        return torch.where(real, torch.minimum(y, place.x["h"][:, None, None].to(y.dtype)), y)

    return [behind(place, place.module("resid"), floor), before(place, place.module("head"), ceiling)]


def component(place: Place) -> list[Hook]:
    real = place.mask.bool()[..., None]

    def set_to(y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        d, to = place.x["d"][:, None].to(y.dtype).to(wide), place.x["c"][:, None, None].to(wide)
        unit = d / (d * d).sum(-1, keepdim=True).sqrt()
        return torch.where(real, y + ((to - (y.to(wide) * unit).sum(-1, keepdim=True)) * unit).to(y.dtype), y)

    return [behind(place, place.module("resid"), set_to)]


def rotated(place: Place) -> list[Hook]:
    last = place.where(lambda position, prompt: position == prompt - 1)[..., None]

    def swap_in(y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        source, basis = (place.x[name].to(y.dtype).to(wide) for name in "sR")
        inside = (source[:, None] - y.to(wide)) @ basis
        return torch.where(last, y + (inside @ basis.mT).to(y.dtype), y)

    return [behind(place, place.module("resid"), swap_in)]


def normal(seed: int, point: str, layer: int, row: int, position: int, *shape: int) -> Tensor:
    """The numbers of ``kf.edits.noise`` at one token, before std."""
    key, counter = [seed, zlib.crc32(point.encode())], [0, position, row, layer]
    bits = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape, np.float32))


def noisy(place: Place) -> list[Hook]:
    """A row is known by its prompt's length: alone it has the numbers that it has in the batch."""
    there = place.mask.bool()
    drawn = torch.zeros(*there.shape, D)
    for row, column in there.nonzero().tolist():
        number, position = PADS.index(S - int(place.prompt[row])), int(place.mask[row, :column].sum())
        drawn[row, column] = normal(7, "resid", place.layer, number, position, D)

    def add(y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        more = (place.x["a"][:, None, None].to(wide) * drawn.to(y.dtype)).to(y.dtype)
        return torch.where(there[..., None], y + more, y)

    return [behind(place, place.module("resid"), add)]


def edits(make: Callable[[Given, int], Any]) -> Callable[[Given], dict[str, Any]]:
    return lambda given: {"edit": [make(given, layer) for layer in given.layers]}


@functools.cache
def everywhere(family: str) -> list[str]:
    """The projections that every layer has."""
    spec = span(family, 0, L)
    return [name for name in spec.schema.projections if all(name in find(block.module) for block in spec.blocks)]


def names(family: str) -> tuple[str, ...]:
    """Attention's first projection, and the last."""
    return everywhere(family)[0], everywhere(family)[-1]


def lora_sizes(family: str) -> dict[str, tuple[int, ...]]:
    features = span(family, 0, L).schema.projections
    pairs = [{f"{n} A": (R, features[n][0]), f"{n} B": (features[n][1], R)} for n in names(family)]
    return pairs[0] | pairs[1]


def lora(given: Given) -> dict[str, Any]:
    def of(layer: int | None) -> dict[str, Any]:
        pair = (("A", "rank in"), ("B", "out rank"))
        return {
            n: {**{k: given.tensor(f"{n} {k}", axes, layer) for k, axes in pair}, "scale": 0.75}
            for n in names(given.family)
        }

    return given.kwarg("lora", of)


def low_rank(place: Place) -> list[Hook]:
    hooks: list[Hook] = []
    for name in names(place.family):
        a, b = (place.x[f"{name} {part}"] for part in "AB")

        def add(_: nn.Module, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            x = args[0].reshape(*place.mask.shape, -1)
            more = 0.75 * ((x @ a.to(x.dtype).mT) @ b.to(x.dtype).mT)
            return out + more.reshape(out.shape)

        hooks.append((place.block.get_submodule(name), "post", add))
    return hooks


def ia3_sizes(family: str) -> dict[str, tuple[int, ...]]:
    features = span(family, 0, L).schema.projections
    return {n: (features[n][1],) for n in names(family)}


def ia3(given: Given) -> dict[str, Any]:
    return given.kwarg("ia3", lambda layer: {n: given.tensor(n, "out", layer) for n in names(given.family)})


def factors(place: Place) -> list[Hook]:
    return [
        behind(place, place.block.get_submodule(n), lambda y, v=place.x[n]: y * v[:, None].to(y.dtype))
        for n in names(place.family)
    ]


def edited_ends(family: str) -> tuple[str, str]:
    """Two projections of the call's own tokens: deepseek's kv_b_proj takes all keys so far. Not the first: nothing
    hangs on what is added to all keys alike."""
    own = [name for name in everywhere(family) if not name.endswith("kv_b_proj")]
    return own[-2], own[-1]


def ends_sizes(family: str) -> dict[str, tuple[int, ...]]:
    """Of the last projection's input, and the output of the one before."""
    features, (before_last, last) = span(family, 0, L).schema.projections, edited_ends(family)
    return {"i": (features[last][0],), "o": (features[before_last][1],)}


def ends(given: Given) -> dict[str, Any]:
    before_last, last = edited_ends(given.family)
    edited = [
        (
            kf.add(given.tensor("i", "feature", n), n, point=f"{last}.in", at="prompt"),
            kf.add(given.tensor("o", "feature", n), n, point=f"{before_last}.out"),
        )
        for n in given.layers
    ]
    return {"edit": [edit for pair in edited for edit in pair]}


def at_ends(place: Place) -> list[Hook]:
    before_last, last = (place.block.get_submodule(name) for name in edited_ends(place.family))
    prompt = place.where(lambda position, prompt: position < prompt)[..., None]
    real = place.mask.bool()[..., None]

    def add(name: str, there: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: torch.where(there, y + place.x[name][:, None].to(y.dtype), y)

    return [before(place, last, add("i", prompt)), behind(place, before_last, add("o", real))]


def inner(family: str) -> list[str]:
    """The points within a layer but ``head``, where every layer has them."""
    named = ("norm1", *QKV, "attn", "norm2", "mlp", "neuron")
    return [point for point in named if point in span(family, 0, L).schema.kwargs["edit"].points]


def inner_sizes(family: str) -> dict[str, tuple[int, ...]]:
    sizes = span(family, 0, L).schema.sizes
    return {point: tuple(sizes[axis] for axis in POINTS_OF[point].features) for point in inner(family)}


def at_inner(given: Given) -> dict[str, Any]:
    """At two tokens in queries, keys and values: nothing hangs on what is added to all keys alike."""
    axes = {point: " ".join(POINTS_OF[point].features) for point in inner(given.family)}
    made = [
        kf.add(given.tensor(p, axes[p], n), n, point=p, at=PLACES if p in QKV else "prompt")
        for n in given.layers
        for p in axes
    ]
    return {"edit": made}


def added_within(place: Place) -> list[Hook]:
    prompt = place.where(lambda position, prompt: position < prompt)[..., None]
    two = place.where(lambda position, _: (position == PLACES[0]) | (position == PLACES[1]))[..., None]

    def add(point: str) -> Hook:
        hook = before if point == "neuron" else behind
        more, there = place.x[point], two if point in QKV else prompt

        def change(y: Tensor) -> Tensor:
            wide = more.flatten(1)[:, None].to(y.dtype)
            if point not in QKV:
                return torch.where(there, y + wide, y)
            features = place.features(point, y.shape[-1])
            changed = y.index_copy(-1, features, y[..., features] + wide)
            return torch.where(there, changed, y)

        return hook(place, place.module(point), change)

    return [add(point) for point in inner(place.family)]


def head_factors(place: Place) -> list[Hook]:
    def multiply(value: Tensor) -> Tensor:
        heads = value.unflatten(-1, (HEADS, -1))
        return (heads * place.x["m"][:, None, :, None].to(value.dtype)).flatten(-2)

    return [before(place, place.module("head"), multiply)]


def prefix_sizes(family: str) -> dict[str, tuple[int, ...]]:
    sizes = span(family, 0, L).schema.sizes
    widths = {"k": sizes.get("key_dim", sizes["head_dim"]), "v": sizes.get("value_dim", sizes["head_dim"])}
    return {name: (sizes["kv_head"], P, width) for name, width in widths.items()}


def filled(by_layer: list[Mapping[str, Tensor]], batch: int) -> Any:
    """transformers' own cache, with the prefix in it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, x in enumerate(by_layer):
        cache.update(x["k"].expand(batch, -1, -1, -1), x["v"].expand(batch, -1, -1, -1), layer)
    return cache


# ---- what captures bring back, of steered layers

POINTS = [*(point for point in EDITED if point not in ENTERING), "resid_mid"]


def points_of(family: str) -> list[str]:
    return [point for point in POINTS if point in span(family, 0, L).schema.kwargs["capture"].points]


def flat(acts: kf.Capture) -> Tensor:
    """All that was captured, side by side."""
    return torch.cat([acts[key].flatten(2) for key in sorted(acts)], -1)


def captured(family: str, flow: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """What a plain call captures; sessions and generate take ``capture=`` themselves."""
    others, keys = {**kwargs}, sorted(kwargs["capture"])
    del others["capture"]
    points = {point: [layer for other, layer in keys if other == point] for point, _ in keys}
    return flat(flow.capture(points, hidden, **others)[1])


def keeping(place: Place) -> list[Hook]:
    hooks = steer(place)
    for point in points_of(place.family):

        def keep(value: Tensor, key: tuple[str, int] = (point, place.layer)) -> Tensor:
            seen = value[..., place.features(key[0], value.shape[-1])] if key[0] in QKV else value
            place.seen[key] = seen.clone()  # falcon adds to it in place
            return value

        hooks.append((before if point in ("head", "neuron", "resid_mid") else behind)(place, place.module(point), keep))
    return hooks


def left_aligned(value: Tensor, mask: Tensor) -> Tensor:
    """Rows begin at their first token; zeros behind."""
    rows = [
        torch.cat([row[len(row) - n :], row[: len(row) - n] * 0]) for row, n in zip(value, mask.sum(1), strict=True)
    ]
    return torch.stack(rows)


def all_seen(out: Tensor, place: Place) -> Tensor:
    return left_aligned(torch.cat([place.seen[key] for key in sorted(place.seen)], -1), place.mask)


ROWS = [
    Row("attention_mask", "attention_mask", "atention_mask", lambda f: {"attention_mask": torch.ones(B, S + 1).long()}),
    Row(
        "attention_mask, 4-D",
        "attention_mask",
        "attention_masks",
        lambda f: {"attention_mask": torch.ones(B, 1, S, S - 1)},
        call=four_d,
        call_sizes={"bias": (B, HEADS, S + NEW, S + NEW)},
        in_generate=False,  # transformers' generate makes its own of a 2-D one
    ),
    Row(
        "position_ids",
        "position_ids",
        "position_id",
        lambda f: {"position_ids": torch.zeros(B, S + 1).long()},
        call=lambda x: {**PADDED, "position_ids": (JUMPS, "batch seq")},
        in_generate=False,  # transformers' generate counts them from the mask
    ),
    Row(
        "prompts",
        "prompts",
        "prompt",
        lambda f: {"prompts": random(L, B + 1, P, D)},
        lambda f: {"p": (P, D)},
        lambda g: g.kwarg("prompts", lambda n: g.leaves["p"] if n is None else g.leaves["p"][g.layers.index(n)]),
        prompts,
    ),
    Row(
        "steer",
        "steer",
        "stear",
        lambda f: {"steer": kf.axes(random(L, D + 1), "layer hidden")},
        lambda f: {"v": (D,)},
        steered,
        steer,
    ),
    Row(
        "edit: add",
        "edit",
        "edits",
        lambda f: {"edit": kf.add(random(D + 1), 1)},
        lambda f: {"v": (D,), "a": ()},
        edits(lambda g, n: kf.add(g.tensor("v", "hidden", n), n, at="prompt", scale=g.tensor("a", "", n))),
        added,
    ),
    Row(
        "edit: put",
        "edit",
        "edi",
        lambda f: {"edit": kf.put(kf.axes(random(3, D), "pos hidden"), 1, at=[0, 1])},
        lambda f: {"v": (len(PLACES), D)},
        edits(lambda g, n: kf.put(g.tensor("v", "pos hidden", n), n, point="resid_pre" if n else "embed", at=PLACES)),
        put,
    ),
    Row(
        "edit: scale",
        "edit",
        "editt",
        lambda f: {"edit": kf.scale(kf.axes(random(B + 1), "batch"), 1)},
        lambda f: {"a": ()},
        edits(lambda g, n: kf.scale(g.tensor("a", "", n), n, point="head", heads=[1, 3], at="prompt[-2:]")),
        scaled,
    ),
    Row(
        "edit: project_out",
        "edit",
        "adit",
        lambda f: {"edit": kf.project_out(random(D - 1), 1)},
        lambda f: {"d": (D,)},
        edits(lambda g, n: kf.project_out(g.tensor("d", "hidden", n), n)),
        projected_out,
        exact=False,
    ),
    Row(
        "edit: clamp",
        "edit",
        "edits_c",
        lambda f: {"edit": kf.edits.clamp_min(kf.axes(random(B + 1), "batch"), 1)},
        lambda f: {"l": (), "h": ()},
        lambda g: {
            "edit": [
                edit
                for n in g.layers
                for edit in (
                    kf.edits.clamp_min(g.tensor("l", "", n), n, dims=[5, 1], at=[0]),
                    kf.edits.clamp_max(g.tensor("h", "", n), n, point="head"),
                )
            ]
        },
        clamped,
    ),
    Row(
        "edit: set_component",
        "edit",
        "edits_s",
        lambda f: {"edit": kf.edits.set_component(random(D - 1), 1, to=1.0)},
        lambda f: {"d": (D,), "c": ()},
        edits(lambda g, n: kf.edits.set_component(g.tensor("d", "hidden", n), n, to=g.tensor("c", "", n))),
        component,
        exact=False,
    ),
    Row(
        "edit: rotate",
        "edit",
        "edits_r",
        lambda f: {"edit": kf.edits.rotate(random(D), 1, basis=random(D - 1, 2))},
        lambda f: {"s": (D,), "R": (D, 2)},
        edits(
            lambda g, n: kf.edits.rotate(
                g.tensor("s", "hidden", n), n, basis=g.tensor("R", "hidden rank", n), at="prompt[-1]"
            )
        ),
        rotated,
        spread=0.3,
        exact=False,
    ),
    Row(
        "edit: noise",
        "edit",
        "edits_n",
        lambda f: {"edit": kf.edits.noise(kf.axes(random(B + 1), "batch"), 1, seed=7)},
        lambda f: {"a": ()},
        edits(lambda g, n: kf.edits.noise(g.tensor("a", "", n), n, seed=7)),
        noisy,
    ),
    Row(
        "edit: projections",
        "edit",
        "edits_",
        lambda f: {"edit": kf.add(random(7), 1, point=f"{names(f)[1]}.in")},
        ends_sizes,
        ends,
        at_ends,
    ),
    Row(
        "edit: points",
        "edit",
        "edit_s",
        lambda f: {"edit": kf.add(random(D + 1), 1, point="resid_pre")},
        inner_sizes,
        at_inner,
        added_within,
        spread=0.3,
    ),
    Row(
        "lora",
        "lora",
        "loras",
        lambda f: {"lora": {names(f)[0]: {"A": torch.zeros(L, R, 7), "B": torch.zeros(L, 7, R)}}},
        lora_sizes,
        lora,
        low_rank,
        spread=0.3,
        exact=False,
    ),
    Row("ia3", "ia3", "ia33", lambda f: {"ia3": {names(f)[0]: torch.zeros(L, 7)}}, ia3_sizes, ia3, factors),
    Row(
        "head_mask",
        "head_mask",
        "head_masks",
        lambda f: {"head_mask": torch.zeros(L, HEADS + 1)},
        lambda f: {"m": (HEADS,)},
        lambda g: g.kwarg("head_mask", lambda n: g.tensor("m", "head", n)),
        head_factors,
    ),
    Row(
        "prefix_kv",
        "prefix_kv",
        "prefix_kvs",
        lambda f: {"prefix_kv": {name: random(L, B, *size[:2], 7) for name, size in prefix_sizes(f).items()}},
        prefix_sizes,
        lambda g: g.kwarg("prefix_kv", lambda n: {k: t if n is None else t[n] for k, t in g.leaves.items()}),
        cache=filled,
        ahead=P,
    ),
    Row(
        "capture",
        "capture",
        "captur",
        lambda f: {"capture": kf.Capture(resid=[1]), "at": torch.ones(B, S + 1, dtype=torch.bool)},
        lambda f: {"v": (D,)},
        lambda g: {**steered(g), "capture": kf.Capture(dict.fromkeys(points_of(g.family), g.layers))},
        keeping,
        result=all_seen,
        run=captured,
        kept=lambda mask: left_aligned(mask, mask).bool(),
    ),
]
