"""Proof that a flow gives the local model's values: bit for bit, or why not, and whether the gap is noise or a bug.

    print(kf.verify.exact_match(flow, reference, **x))      # the first line is the verdict and why

Noise falls when precision rises, a bug does not: when the bits differ, both sides run again in float64.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.blocks.numerics import numerics
from kwflow.client.call import Plan
from kwflow.client.flow import Flow
from kwflow.client.peers import Hop
from kwflow.errors import KwargError, KwflowError, SpanError, UnsupportedError
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.bound import Span
from kwflow.show import html
from kwflow.show.progress import progress

NOISE_FALLS_BY = 1e4  # fp32 to fp64 lowers rounding by 2^29; a bug stays

# NOTE [other shapes] By what the same rows or columns may differ when they are computed beside others: batches of 2, 4
# and 8 against rows alone, texts in pieces against whole; hidden, logits, gradients of hidden and of a steering vector.
# As a share of the tensor's largest magnitude. Twice the largest gap found by `python -m benchmarks.rounding`:
#
#     kernels of torch, MKL and oneDNN for     AVX-512   AVX2      SSE4.2    AVX-512, MKL's for AMD
#     float32    SmolLM2-135M                  6.6e-06   2.3e-05   8.5e-06   1.2e-05
#                a small model of each family  4.4e-06   4.9e-06   2.1e-05   3.6e-06
#     bfloat16   SmolLM2-135M                  -         3.4e-02   -         3.3e-02
#                a small model of each family  -         2.0e-02   -         1.5e-02
#     float64    SmolLM2-135M                  6.6e-14   1.3e-14   1.9e-14   1.6e-14
#                a small model of each family  1.2e-14   6.3e-15   1.8e-14   1.2e-14
#
# (MKL's for Intel's were taken on one of AMD's.) Not bounded: a mixture that rounding sends to another expert
# (bfloat16: 4e-1 was seen), and a gradient of a loss whose terms cancel (a LoRA's, the head on one column or on all:
# 6e-4 in float32). There float64 decides: exact_match.
OTHER_SHAPES = {torch.float64: 1.4e-13, torch.float32: 5e-5, torch.bfloat16: 7e-2}


@dataclass(frozen=True)
class Comparison:
    """One output beside its reference."""

    name: str
    bitwise: bool
    max_abs: float
    max_rel: float  # against the reference's largest magnitude
    ulp: tuple[float, float]  # units in the last place: median, most (numbers near zero have small units)
    top1: float | None = None  # share of positions whose most likely token agrees (logits only)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Match:
    """What :func:`exact_match` found. ``bool(match)``: bitwise equal, or shown to be rounding noise."""

    verdict: str  # "bitwise", "noise", "different" or "no fp64 verdict"
    why: str
    outputs: tuple[Comparison, ...]
    reasons: tuple[str, ...] = ()
    fp64_gap: float | None = None
    sides: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = field(default=())

    @property
    def bitwise(self) -> bool:
        return self.verdict == "bitwise"

    def __bool__(self) -> bool:
        return self.verdict in ("bitwise", "noise")

    def _rows(self) -> list[list[str]]:
        rows = [["output", "shape", "bitwise", "max abs", "max rel", "ulp median/max", "top-1"]]
        for c in self.outputs:
            top = "" if c.top1 is None else f"{c.top1:.1%}"
            numbers = [f"{c.max_abs:.3g}", f"{c.max_rel:.3g}", f"{c.ulp[0]:.3g}/{c.ulp[1]:.3g}"]
            rows.append([c.name, "×".join(map(str, c.shape)), "yes" if c.bitwise else "no", *numbers, top])
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines = [f"{self.verdict.upper()}: {self.why}", f"  {self.sides[0]}  against  {self.sides[1]}"]
        lines += [f"  {line}" for line in table]
        lines += [f"  cannot be bitwise: {reason}" for reason in self.reasons]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        below = [html.line(f"cannot be bitwise: {reason}") for reason in self.reasons]
        below += [html.line(note) for note in self.notes]
        sides = html.line(f"{self.sides[0]} against {self.sides[1]}", dim=True)
        colour = html.BLUE if self else html.ORANGE
        return html.page(self.verdict.upper(), sides, html.table(header, rows), *below, text=self.why, colour=colour)


def exact_match(
    flow: Flow,
    reference: Any,
    hidden: Tensor,
    *,
    layers: Sequence[int] | None = None,
    threads: int | None = None,
    **kwargs: Any,
) -> Match:
    """Compare a flow with a local reference on ``hidden`` (batch, seq, hidden) and kwargs.

    ``reference``: a Hugging Face model, or ``kf.stream(path)``. ``layers``: check each of these alone, with its part of
    the kwargs, instead of the whole flow. ``threads``: torch threads of the reference; by default the workers'. The
    reference runs the flow's own cuts of the batch, since other shapes round otherwise, and each worker's layers in
    that worker's dtype. Where the bits differ, pads are left out of the comparison: attention implementations fill them
    differently, and nothing reads them.
    """
    from kwflow.research.reference import as_reference

    local = as_reference(reference)
    if layers is not None and not (layers and all(flow.start <= layer < flow.stop for layer in layers)):
        raise SpanError(f"layers={list(layers)}: give some, all in this flow's {flow.start}:{flow.stop}")
    parts = [("hidden", flow)] if layers is None else [(f"layer {n}", flow[n : n + 1]) for n in layers]
    if kwargs.get("capture") is not None:
        raise KwargError("exact_match compares hidden; capture on both sides, and compare with torch.equal")
    outputs, reasons = [], list[str]()
    with torch.no_grad():
        bound = flow.plan(hidden, kwargs).bound
        plans = [part.plan_bound(hidden, bound.part(None, part.span)[0]) for _, part in parts]
        if threads is None:
            announced = [hop.hello.fingerprint.threads for plan in plans for hop in plan.route]
            threads = min(filter(None, announced), default=torch.get_num_threads())
        with threads_set(threads):
            reasons, notes = differences(plans, local, hidden), casts(plans, local, hidden)
            pairs = zip(parts, plans, strict=True)
            for (name, part), plan in progress(pairs, "comparing", len(parts)):
                ours, expected = part.run_bound(hidden, plan.bound)[0], _by_cuts(plan, local, hidden)
                outputs.append(compare(name, *_at_tokens(ours, expected, kwargs)))
                if layers is None and (flow.start, flow.stop) == (0, flow.ends.layers):
                    logits = _at_tokens(flow.head(ours), flow.head(expected), kwargs)
                    outputs.append(compare("logits", *logits, top1=True))
    sides = (repr(flow), f"{local.name}, {threads} thread{'s' if threads != 1 else ''}")
    if all(c.bitwise for c in outputs):
        why = f"all bits are equal ({hidden.numel():,} numbers per hidden)"
        return Match("bitwise", why, tuple(outputs), (), None, sides, notes)
    gap = max(c.max_rel for c in outputs if c.name != "logits")
    if quantized := quantized_otherwise(plans, local):
        why = f"{quantized}, so the sides have other weights (max rel {gap:.2g})"
        return Match("different", why, tuple(outputs), tuple(reasons), None, sides, notes)
    match = _judge(parts, plans, local, hidden, kwargs, tuple(outputs), tuple(reasons), gap, sides)
    return replace(match, notes=(*match.notes, *notes))


def _judge(
    parts: Sequence[tuple[str, Flow]],
    plans: Sequence[Plan],
    local: Any,
    hidden: Tensor,
    kwargs: dict[str, Any],
    outputs: tuple[Comparison, ...],
    reasons: tuple[str, ...],
    gap: float,
    sides: tuple[str, str],
) -> Match:
    """Run both sides in float64: noise when the gap falls by 10^4 or more."""
    hidden64, gaps = hidden.double(), []
    reason = f"; {reasons[0]}" if reasons else ""
    try:
        pairs = zip(parts, plans, strict=True)
        for (name, part), plan in progress(pairs, "comparing in float64", len(parts)):
            ours = part.options(dtype="float64").run_bound(hidden64, plan.bound)[0]
            expected = _by_cuts(plan, local, hidden64, torch.float64)
            gaps.append(compare(name, *_at_tokens(ours, expected, kwargs)).max_rel)
    except (KwflowError, RuntimeError) as error:
        why = f"not bitwise (max rel {gap:.2g}){reason}; a side refused float64: {str(error)[:120]}"
        return Match("no fp64 verdict", why, outputs, reasons, None, sides)
    fell = gap / max(gaps) if max(gaps) else float("inf")
    note = (f"max rel {gap:.3g} in {_short(_dtype(plans[0].route[0]))}, {max(gaps):.3g} in float64",)
    if fell >= NOISE_FALLS_BY:
        why = f"rounding: in float64 the gap falls by {fell:.1e}{reason}"
        return Match("noise", why, outputs, reasons, max(gaps), sides, note)
    why = f"the gap stays in float64 (max rel {gap:.2g} to {max(gaps):.2g}), so the sides compute other things{reason}"
    return Match("different", why, outputs, reasons, max(gaps), sides, note)


def _by_cuts(plan: Plan, local: Any, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The reference as the flow runs: the same rows together, and each worker's layers in that worker's dtype."""
    outs = []
    spans = [(local.cast(span_dtype), span) for span_dtype, span in _spans(plan, hidden.dtype)]
    for rows in plan.cuts:
        out = hidden[rows[0] : rows[1]]
        for reference, span in spans:
            bound, _ = plan.bound.part(rows, span)
            run_dtype = dtype or reference.dtype
            out = reference.run(out.to(run_dtype), bound, run_dtype).to(hidden.device, hidden.dtype)
        outs.append(out)
    return torch.cat(outs)


def _spans(plan: Plan, between: torch.dtype) -> list[tuple[torch.dtype, Span]]:
    """The route's spans by dtype; neighbours are one where the hidden between them loses nothing."""
    spans: list[tuple[torch.dtype, Span]] = []
    for hop in plan.route:
        dtype = _dtype(hop)
        if spans and spans[-1][0] == dtype and _holds(between, dtype):
            spans[-1] = dtype, (spans[-1][1][0], hop.stop)
        else:
            spans.append((dtype, hop.span))
    return spans


def _at_tokens(ours: Tensor, expected: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Both sides whole when all bits are equal, else at the tokens only: what stands at a pad means nothing."""
    mask = kwargs.get("attention_mask")
    mask = mask.tensor if isinstance(mask, Axed) else mask
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 2
        or (ours.dtype == expected.dtype and torch.equal(ours, expected))
    ):
        return ours, expected
    at = mask.bool().expand(ours.shape[0], -1)
    return ours[at], expected[at]


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Within, torch computes with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stream(model: str | os.PathLike[str], dtype: Any = None, quantize: str | None = None) -> Any:
    """A reference that reads a model's files and holds one layer at a time, for models larger than memory."""
    from kwflow.research.reference import Stream

    return Stream(model, dtype, quantize)


def compare(name: str, ours: Tensor, expected: Tensor, *, top1: bool = False) -> Comparison:
    """Bits, absolute and relative gap, units in the last place; NaN at the same places is equal."""
    bitwise = ours.dtype == expected.dtype and torch.equal(_bits(ours), _bits(expected))
    gap = (ours.double() - expected.double()).abs().nan_to_num(nan=0.0)
    largest = expected.double().abs().nan_to_num(nan=0.0).max().item() if expected.numel() else 0.0
    worst = gap.max().item() if gap.numel() else 0.0
    if not torch.equal(ours.isnan(), expected.isnan()):
        worst = float("inf")
    agree = (ours.argmax(-1) == expected.argmax(-1)).double().mean().item() if top1 else None
    relative = worst / largest if largest else worst
    return Comparison(name, bitwise, worst, relative, _ulp(ours, expected), agree, tuple(ours.shape))


def _bits(tensor: Tensor) -> Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ulp(ours: Tensor, expected: Tensor) -> tuple[float, float]:
    """The distance in representable numbers: median and largest."""
    if not ours.numel() or ours.dtype != expected.dtype or not ours.is_floating_point():
        return 0.0, 0.0
    ordered = []
    for tensor in (ours, expected):
        bits = _bits(tensor).to(torch.int64)
        lowest = -(1 << (8 * tensor.element_size() - 1))
        ordered.append(torch.where(bits < 0, lowest - bits, bits))
    distance = (ordered[0].double() - ordered[1].double()).abs()
    return distance.median().item(), distance.max().item()


def differences(plans: Sequence[Plan], local: Any, hidden: Tensor) -> list[str]:
    """Why the bits may differ: every part of the workers' fingerprints that is not the reference's."""
    here: dict[str, Any] = {**numerics(), "threads": torch.get_num_threads(), "attention": local.attention}
    reasons = [quantized] if (quantized := quantized_otherwise(plans, local)) else []
    for hop in _workers(plans):
        fingerprint, worker = hop.hello.fingerprint, f"worker {hop.peer[-8:]}"
        other = replace(fingerprint, **here).differences(fingerprint)
        reasons += [f"{name} {value} on {worker}, {local_value} here" for name, local_value, value in other]
        device = (fingerprint.device or "cpu").partition(" ")[0]
        if device != local.device.type:
            reasons.append(f"device {device} on {worker}, {local.device.type} here")
        if _dtype(hop) != local.dtype and (local.quantization or not _holds(local.dtype, _dtype(hop))):
            reasons.append(f"dtype {hop.hello.dtype} on {worker}, here weights were read in {_short(local.dtype)}")
        if fingerprint.block_fn:
            reasons.append(f"{worker} runs its own block_fn {fingerprint.block_fn}")
    if getattr(local, "repacked", False):
        reasons.append("on this CPU bitsandbytes computes the reference's nf4 in bfloat16, whatever its dtype")
    if not hidden.is_contiguous():
        reasons.append("hidden is not contiguous here; it arrives contiguous")
    return reasons


def quantized_otherwise(plans: Sequence[Plan], local: Any) -> str:
    """Which worker's weights are quantized as the reference's are not; empty when all are alike."""
    for hop in _workers(plans):
        quantization = hop.hello.quantization
        if quantization != local.quantization:
            runs = f"runs {quantization}" if quantization else "is not quantized"
            return f"worker {hop.peer[-8:]} {runs}, the reference {local.quantization or 'is not quantized'}"
    return ""


def casts(plans: Sequence[Plan], local: Any, hidden: Tensor) -> tuple[str, ...]:
    """What is said of workers whose dtype is not hidden's or the reference's: both sides cast alike."""
    notes = []
    for hop in _workers(plans):
        dtype = _dtype(hop)
        if dtype != hidden.dtype:
            notes.append(
                f"worker {hop.peer[-8:]} computes in {_short(dtype)} and answers in hidden's {_short(hidden.dtype)}"
            )
        if dtype != local.dtype and not local.quantization:
            notes.append(f"the reference's {_short(local.dtype)} weights were cast to {_short(dtype)} for its layers")
    return tuple(dict.fromkeys(notes))


def _workers(plans: Sequence[Plan]) -> list[Hop]:
    return list({hop.peer: hop for plan in plans for hop in plan.route}.values())


def _dtype(hop: Hop) -> torch.dtype:
    dtype = getattr(torch, hop.hello.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"worker {hop.peer[-8:]} computes in {hop.hello.dtype!r:.40}, which torch here has not")
    return dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of ``narrow`` is one of ``wide``."""
    return torch.promote_types(wide, narrow) == wide
