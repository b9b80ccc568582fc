"""Every check of every kwarg: lists of (what, ours, expected). Tests assert them, ``benchmarks.kwargs`` shows them.

``expected`` is the local Hugging Face model, whole and uncached, with a row's plain hooks (``rows.py``). Whether
a check applies is said by the schema that workers announce, and by the row of the family.
"""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from kwflow.errors import KwflowError, ShapeError, UnknownKwarg
from kwflow.models.families import family_of
from tests.families.configs import config
from tests.families.table import Compared, distributed, positions, reference
from tests.kwargs.row import MASK, NEW, B, Row, S
from tests.kwargs.rows import flat
from tests.kwargs.sides import (
    ALL,
    PROMPT,
    behind,
    given,
    inputs,
    leaves,
    local,
    longer,
    of_call,
    ours,
    places,
    schema_of,
)
from tests.oracle import assert_bits, hooked, residual
from tests.oracle.tiny import TWO, Requests, derivable, flow, ids, random

SOME = (1, 3)  # layers: one of each worker
IDS = ids(B, S)


# ---- values


@torch.no_grad()
def value(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Shared by all rows, another in each layer."""
    hidden, x, remote = inputs(dtype), leaves(row, family, dtype), flow(family, TWO, dtype)
    out, keep = ours(row, family, remote, hidden, x), row.kept(MASK[:, PROMPT])
    if x and dtype is not torch.bfloat16:
        plain = remote(hidden, attention_mask=MASK[:, PROMPT])
        assert out.shape != plain.shape or (out - plain)[keep].abs().max() > 1e-3, f"{row.name} changes nothing"
    return [("residual", out[keep], local(row, family, hidden, x)[keep])]


@torch.no_grad()
def sub_batch(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Each row its own, computed three and one at a time: as the same rows are computed locally."""
    hidden, x = inputs(dtype), leaves(row, family, dtype, rows=B)
    cuts = [slice(0, 3), slice(3, 4)]
    expected = [local(row, family, hidden[rows], x, rows) for rows in cuts]
    out = ours(row, family, flow(family, TWO, dtype).options(batch_tokens=3 * S), hidden, x)
    keep = row.kept(MASK[:, PROMPT])
    return [("rows", out[keep], torch.cat(expected)[keep])]


@torch.no_grad()
def per_layer(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """One layer of each worker has it, each row its own, and the other layers nothing."""
    hidden, x, keep = inputs(dtype), leaves(row, family, dtype, SOME, B), row.kept(MASK[:, PROMPT])
    out = ours(row, family, flow(family, TWO, dtype), hidden, x, SOME)
    return [("residual", out[keep], local(row, family, hidden, x, layers=SOME)[keep])]


@torch.no_grad()
def per_row(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Each row its own: as that row computed locally alone, without pads."""
    hidden, x = inputs(dtype), leaves(row, family, dtype, rows=B)
    out, keep, found = ours(row, family, flow(family, TWO, dtype), hidden, x), row.kept(MASK[:, PROMPT]), []
    for number, pads in enumerate((S - MASK[:, PROMPT].sum(1)).tolist()):
        # sliding windows count pads: they push a prefix away, in transformers too
        one, seq = slice(number, number + 1), PROMPT if row.ahead else slice(pads, S)
        expected = local(row, family, hidden[one, seq], x, one, seq)[row.kept(MASK[one, seq])]
        found.append((f"row {number}", out[one][keep[one]], expected))
    return found


@torch.no_grad()
def session(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """A prefill and steps: as an uncached run of all columns."""
    hidden, x, outs = inputs(dtype, ALL), leaves(row, family, dtype, rows=B), []
    kwargs = row.given(given(row, family, x))
    with flow(family, TWO, dtype).session(S + NEW + row.ahead) as opened:
        for start, stop in ((0, S), *((n, n + 1) for n in range(S, S + NEW))):
            own = of_call(row, x, slice(None), slice(start, stop), slice(0, stop))
            phase: Any = "generated" if start else "prompt"
            static = {} if start and row.ahead else kwargs
            outs.append(opened.step(hidden[:, start:stop], phase=phase, **own, **static))
    out = flat(kwargs["capture"]) if "capture" in kwargs else torch.cat(outs, 1)
    keep = row.kept(MASK)
    return [("every column", out[keep], local(row, family, hidden, x, seq=ALL)[keep])]


@torch.no_grad()
def generate(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Greedy, from texts with left pads: ids, and the logits of every step, as an uncached run of the whole text."""
    x, model = leaves(row, family, dtype, rows=B), reference(family, dtype)
    kwargs = row.given(given(row, family, x))
    call = {"input_ids": IDS, "attention_mask": MASK[:, PROMPT], "do_sample": False, "max_new_tokens": NEW + 1}
    made = distributed(family, dtype).generate(**call, output_logits=True, return_dict_in_generate=True, **kwargs)
    where = places(row, family, model, x, seq=ALL)
    with hooked([hook for place in where for hook in row.hooks(place)]):
        text, mask = made.sequences[:, : S + NEW], longer(row, MASK)
        more = {**positions(model, mask, S + NEW), **behind(row, model, where)}
        logits = model(input_ids=text, attention_mask=mask, use_cache=True, **more).logits
    logits = logits[:, S - 1 :]
    assert torch.equal(made.sequences[:, S:], logits.argmax(-1)), "other ids"
    found = [("logits", torch.stack(made.logits, 1), logits)]
    if "capture" in kwargs:
        keep = row.kept(MASK)
        found.append(("captured", flat(kwargs["capture"])[keep], row.result(logits, where[0])[keep]))
    return found


# ---- derivatives


def functions(
    row: Row, family: str, dtype: torch.dtype, rows: int, cut: int = B, by_layer: bool = False
) -> tuple[Any, Any, dict[str, Tensor]]:
    """A weighted sum of the result as ours and as the oracle's, a function of hidden and the leaves; and these."""
    x = {"hidden": inputs(dtype), **leaves(row, family, dtype, rows=rows)}
    remote = flow(family, TWO, dtype).options(batch_tokens=cut * S)
    keep = row.kept(MASK[:, PROMPT])
    derivable(family)  # loaded here: not under a transform

    def summed(out: Tensor) -> Tensor:
        weights = torch.arange(out.numel(), dtype=dtype).reshape(out.shape).sin()
        return (out * weights * keep[..., None]).sum()

    def remotely(*values: Tensor) -> Tensor:
        named = dict(zip(x, values, strict=True))
        return summed(ours(row, family, remote, named.pop("hidden"), named, by_layer=by_layer))

    def locally(*values: Tensor) -> Tensor:
        named = dict(zip(x, values, strict=True))
        return summed(local(row, family, named.pop("hidden"), named))

    return remotely, locally, x


def gradient(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Of hidden and every leaf together. Shared by all rows: the sum; each row its own: through sub-batches, twice."""
    found: Compared = []
    for rows, cut in ((1, B), (B, 3)) if row.sizes(family) else ((1, 3),):
        remotely, locally, x = functions(row, family, dtype, rows, cut)
        sides = [[value.clone().requires_grad_() for value in x.values()] for _ in range(2)]
        total = remotely(*sides[0])
        expected = torch.autograd.grad(locally(*sides[1]), sides[1])
        for again in (False, True) if cut < B else (False,):
            grads = torch.autograd.grad(total, sides[0], retain_graph=not again)
            found += [(f"{name}, {rows} rows", *pair) for name, *pair in zip(x, grads, expected, strict=True)]  # type: ignore[misc]
    return found


def mapped(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """vmap, and vmap of grad, over every input alike."""
    remotely, locally, x = functions(row, family, dtype, B)
    several = tuple(torch.stack([value, -value]) for value in x.values())
    last = len(x) - 1
    transforms = {
        "vmap": lambda fn: vmap(fn)(*several),
        "vmap of grad": lambda fn: vmap(grad(fn, last))(*several),
    }
    return [(what, transform(remotely), transform(locally)) for what, transform in transforms.items()]


def tangent(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """jvp along every input together."""
    remotely, locally, x = functions(row, family, dtype, B)
    values = tuple(x.values())
    along = tuple(random(*v.shape, seed=50 + i, dtype=dtype) for i, v in enumerate(values))
    return [("jvp", jvp(remotely, values, along)[1], jvp(locally, values, along)[1])]


def double_backward(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Plain autograd twice: of hidden and every leaf."""
    remotely, locally, x = functions(row, family, dtype, B)

    def twice(fn: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [value.clone().requires_grad_() for value in x.values()]
        first = torch.autograd.grad(fn(*inputs), inputs, create_graph=True)
        some = sum((g * torch.sin(v)).sum() for g, v in zip(first, inputs, strict=True))
        return list(torch.autograd.grad(some, inputs))  # type: ignore[arg-type]

    return [(name, *pair) for name, *pair in zip(x, twice(remotely), twice(locally), strict=True)]  # type: ignore[misc]


def by_layer(row: Row, family: str, dtype: torch.dtype) -> Compared:
    """Given layer by layer, for every layer: torch.func's derivatives of every leaf, as plain autograd's of the oracle.

    What is computed of such a kwarg before it is sent must be the caller's transform's, too.
    """
    remotely, locally, x = functions(row, family, dtype, B, by_layer=True)
    hidden, *values = x.values()
    along = [random(*v.shape, seed=50 + i, dtype=dtype) for i, v in enumerate(values)]
    leaves = [value.clone().requires_grad_() for value in values]
    expected = torch.autograd.grad(locally(hidden, *leaves), leaves)
    pushed = sum((g * v).sum() for g, v in zip(expected, along, strict=True))

    def of_leaves(*values: Tensor) -> Tensor:
        return remotely(hidden, *values)

    several = [torch.stack([value, tangent]) for value, tangent in zip(values, along, strict=True)]
    each = torch.stack([of_leaves(*values), of_leaves(*along)])
    found = zip(x.keys() - {"hidden"}, grad(of_leaves, tuple(range(len(values))))(*values), expected, strict=True)
    named: Compared = [(f"grad of a leaf, {name}", *pair) for name, *pair in found]  # type: ignore[misc]
    pair = jvp(of_leaves, tuple(values), tuple(along))[1], torch.as_tensor(pushed)
    return [*named, ("jvp", *pair), ("vmap", vmap(of_leaves)(*several), each)]


# ---- what is wrong


def refused(family: str, error: type[KwflowError], words: str, run: Callable[[Any], Any]) -> None:
    """Raise unless the call is refused before anything is sent, and the next plain call is the one before."""
    remote, hidden = flow(family, TWO), inputs(torch.float32)
    with Requests(remote) as requests, pytest.raises(error, match=words):
        run(remote)
    assert len(requests) == 0, "something was sent"
    mask = MASK[:, PROMPT]
    assert_bits(
        remote(hidden, attention_mask=mask), residual(reference(family, hidden.dtype), hidden, attention_mask=mask)
    )


def unknown_name(row: Row, family: str) -> None:
    refused(
        family,
        UnknownKwarg,
        f"Did you mean '{row.kwarg}'",
        lambda remote: remote(inputs(torch.float32), **{row.misspelt: torch.zeros(1)}),
    )


def wrong_shape(row: Row, family: str) -> None:
    """The error names the kwarg."""
    refused(
        family, ShapeError, row.kwarg, lambda remote: row.run(family, remote, inputs(torch.float32), row.wrong(family))
    )


# ---- which check is of which row

VALUES: dict[str, Callable[[Row, str, torch.dtype], Compared]] = {
    "value": value,
    "sub-batch": sub_batch,
    "per-layer": per_layer,
    "per-row": per_row,
    "session": session,
    "generate": generate,
}
DERIVATIVES: dict[str, Callable[[Row, str, torch.dtype], Compared]] = {
    "grad": gradient,
    "vmap": mapped,
    "jvp": tangent,
    "double backward": double_backward,
    "by layer": by_layer,
}
REFUSALS: dict[str, Callable[[Row, str], None]] = {"unknown name": unknown_name, "wrong shape": wrong_shape}
COMPARISONS = VALUES | DERIVATIVES
CHECKS = (*COMPARISONS, *REFUSALS)
BITWISE = ("value", "sub-batch", "per-layer")
OTHERWISE_CUT = ("per-row", "session", "generate")  # ours and what is expected have other shapes


def refusing(row: Row, family: str) -> str:
    """Why a family's blocks do not take the kwarg; empty: they do."""
    if row.kwarg not in schema_of(family).kwargs:
        return schema_of(family).refused.get(row.kwarg, "its layers have no such place")
    return family_of(config(family)).four_d if row.call_sizes else ""


def applies(row: Row, family: str, check: str) -> bool:
    """Whether a check is of a row: an int has no derivative, what holds for the call does not differ by layer."""
    if refusing(row, family):
        return False
    spec = schema_of(family).kwargs[row.kwarg]
    if check == "by layer" and (spec.points or spec.group == "call"):  # edits name their layers always
        return False
    if check in DERIVATIVES:
        x = {name: random(*size) for name, size in row.call_sizes.items()}
        own = {axes for name, (_, axes) in row.call(x).items() if name == row.kwarg}
        kinds = {kind for form, kinds in spec.forms for kind in kinds if not own or form in own}
        return bool(spec.points or spec.projections or spec.prefix) or "float" in kinds
    if check == "per-layer":  # what stands before the columns does so in every layer
        return spec.group == "layers" and not spec.prefix
    return check != "generate" or row.in_generate
