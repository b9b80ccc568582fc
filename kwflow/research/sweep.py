"""Many variants of one call: vectors x layers x positions x strengths, each re-running only the layers that differ.

    grid = kf.grid(kf.add, value=vectors, layers=range(8, 20), scale=[1.0, 4.0])       # vectors: (64, hidden)
    loss = kf.sweep(flow, x, grid, reduce=lambda out: loss_of(flow.head(out)))        # (64, 12, 2)

Layers before the first one that a variant changes run once for all. Variants that change the same layer in the same
way run together, as rows of one batch.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.client.call import IN_FLIGHT, Plan
from kwflow.client.flow import Flow
from kwflow.client.here import Here, taken
from kwflow.errors import CallerError, KwargError, ShapeError
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import FOLDS
from kwflow.kwargs.edit import Edit
from kwflow.research.folding import act_after, fold, signature

Reduce = Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False)
class Grid:
    """Every combination of some axes' values, as a call's kwargs; made by :func:`grid`."""

    make: Callable[..., Any]
    axes: Mapping[str, Sequence[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many values each axis has, in their order."""
        return tuple(len(values) for values in self.axes.values())

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{name}: {len(values)}' for name, values in self.axes.items())})"

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Label and kwargs of every variant; the last axis changes fastest."""
        for indices in itertools.product(*map(range, self.shape)):
            chosen = {name: values[i] for (name, values), i in zip(self.axes.items(), indices, strict=True)}
            label = ", ".join(_axis_label(name, i, chosen[name]) for name, i in zip(chosen, indices, strict=True))
            with _about(label):
                result = self.make(**chosen)
                kwargs = result if isinstance(result, Mapping) else {"edit": _edits(result)}
            yield label, kwargs


def grid(make: Callable[..., Any], /, **axes: Any) -> Grid:
    """Every combination of the axes' values, for :func:`sweep`.

        kf.grid(kf.add, value=vectors, layers=[8, 12], at=["prompt[-1]", "all"], scale=[1.0, 4.0])
        kf.grid(lambda layer, pos: kf.put(clean["resid", layer][:, [pos]], layer, at=[pos]), layer=[3, 8], pos=range(6))

    ``make`` is called with one value of each axis and gives an edit, a list of edits, or a call's kwargs. An axis is
    a sequence, or a tensor of one value for each entry along its first dimension. Raises KwargError.
    """
    checked = {}
    for name, values in axes.items():
        if hasattr(values, "__array__") and not isinstance(values, Tensor):
            values = torch.as_tensor(values)
        if isinstance(values, Tensor) and values.dim():
            values = values.unbind(0)
        if isinstance(values, str | Tensor) or not isinstance(values, Sequence) or not len(values):
            raise KwargError(
                f"kf.grid: {name}={values!r:.60} is no axis; give a list, a range or a tensor of values "
                f"(what is the same for all goes into functools.partial or a lambda)"
            )
        checked[name] = values
    if not callable(make) or not checked:
        raise KwargError(
            f"kf.grid takes a function and its axes: kf.grid(kf.add, value=[v, w], layers=[8]), got {make!r:.60}"
        )
    return Grid(make, checked)


def sweep(flow: Flow, x: Mapping[str, Any], variants: Any, reduce: Reduce | None = None) -> Any:
    """Run variants of one call and give what ``reduce`` makes of each one's output.

        kf.sweep(flow, x, {"none": {}, "love": {"steer": {12: v}}}, reduce)       # {"none": …, "love": …}
        kf.sweep(flow, x, [{"steer": {12: v}} for v in vectors])                  # (variants, batch, seq, hidden)
        kf.sweep(flow, x, kf.grid(kf.add, value=vectors, layers=[8, 12]), reduce) # (vectors, 2, …)

    ``x``: what ``flow.inputs`` makes, and other kwargs that hold for all. ``variants``: {label: kwargs}, a sequence of
    kwargs, or a :func:`grid`. Each output equals ``flow(**x, **kwargs)``: the residual before the final norm, (batch,
    seq, hidden); ``reduce`` gives a tensor or a number. Of a mapping a dict comes back, else one tensor.

    Variants that differ by ``edit`` or ``steer`` run together, up to 8 sub-batches of ``options(batch_tokens=)`` at
    once; those that differ by other kwargs, or have a ``kf.here``, run one by one. Differentiable with respect to every
    value. Raises as a call does, before anything is sent, and names the variant.
    """
    from kwflow.show.progress import progress

    named = _named(variants)
    runs = [_Run.of(flow, x, label, kwargs) for label, kwargs in named]
    outputs = progress(_outputs(flow, x, runs), "sweeping", len(runs), unit="variant")
    by_number: dict[int, Any] = {}
    for number, out in outputs:
        with _about(named[number][0]):
            by_number[number] = out if reduce is None else reduce(out)
    results = [by_number[number] for number in range(len(runs))]
    if isinstance(variants, Mapping):
        return dict(zip(variants, results, strict=True))
    whole = _stack(results, [label for label, _ in named])
    return whole.unflatten(0, variants.shape) if isinstance(variants, Grid) else whole


# ---- what a caller gives and gets --------------------------------------------------------------------------------


def _named(variants: Any) -> list[tuple[Any, Any]]:
    """Each variant with its label."""
    if isinstance(variants, Grid):
        named: list[tuple[Any, Any]] = list(variants)
    elif isinstance(variants, Mapping):
        named = list(variants.items())
    elif isinstance(variants, Sequence) and not isinstance(variants, str):
        named = list(enumerate(variants))
    else:
        raise KwargError(
            f"variants is a {type(variants).__name__}; give {{label: kwargs}}, a list of kwargs, or kf.grid"
        )
    if not named:
        raise KwargError("variants is empty; give at least one, {} for the call as it is")
    return named


def _stack(results: Sequence[Any], labels: Sequence[Any]) -> Tensor:
    try:
        tensors = [torch.as_tensor(result) for result in results]
    except (TypeError, ValueError, RuntimeError) as error:
        raise KwargError(
            f"reduce gave a {type(results[0]).__name__}, which is no tensor and no number ({error}); variants as "
            "{label: kwargs} come back as reduce gives them"
        ) from error
    for label, tensor in zip(labels, tensors, strict=True):
        if tensor.shape != tensors[0].shape:
            raise ShapeError(
                f"variant {label!r}: reduce gave {tuple(tensor.shape)}, and {tuple(tensors[0].shape)} for "
                f"{labels[0]!r}; give variants as {{label: kwargs}} where shapes differ"
            )
    return torch.stack(tensors)


def _edits(result: Any) -> list[Any]:
    edits = [result] if isinstance(result, Edit | Here) else result
    if not isinstance(edits, Sequence) or not all(isinstance(edit, Edit | Here) for edit in edits):
        raise KwargError(f"the function of kf.grid gave a {type(result).__name__}; it gives an edit, edits or kwargs")
    return list(edits)


def _axis_label(name: str, number: int, value: Any) -> str:
    return f"{name}[{number}]" if isinstance(value, Tensor) else f"{name}={value!r:.40}"


@contextmanager
def _about(first: Any, *others: Any) -> Iterator[None]:
    """Errors name the variant, or the first and last of those that ran together."""
    which = f"variants {first!r} … {others[-1]!r}" if others else f"variant {first!r}"
    try:
        yield
    except CallerError as error:
        raise type(error)(f"{which}: {error}") from error
    except Exception as error:
        error.add_note(f"in kf.sweep, {which}")
        raise


# ---- what differs, and from which layer on -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Run:
    """One variant: its kwargs bound, and from which layer on it differs from the others' common call."""

    label: Any
    bound: Bound
    varying: frozenset[str]  # names of the kwargs that are this variant's alone
    start: int  # the first layer that runs for this variant
    after: int | None  # its steer and edits at this layer's output are done before
    call: Mapping[str, Any] | None = None  # the whole call, of one that a caller's function cuts: it runs by itself

    @classmethod
    def of(cls, flow: Flow, x: Mapping[str, Any], label: Any, kwargs: Any) -> _Run:
        with _about(label):
            if not isinstance(kwargs, Mapping):
                raise KwargError(
                    f"a {type(kwargs).__name__}; give a call's kwargs, such as {{'edit': [kf.add(v, 12)]}}"
                )
            if both := sorted(kwargs.keys() & x.keys()):
                raise KwargError(f"{both[0]!r} is in x too; x has what holds for all variants")
            if "capture" in (x.keys() | kwargs.keys()):
                raise KwargError("a sweep brings back hidden alone; reduce= sees each variant's")
            if "hidden" not in x:
                raise KwargError("x has no hidden; give what flow.inputs makes")
            call = {**x, **kwargs}
            cuts, rest = taken(call, flow.span)
            plan = flow.plan(rest.pop("hidden"), rest)
        varying = frozenset(kwargs)
        if cuts:
            return cls(label, plan.bound, varying, flow.start, None, call)
        first = _first_layer(plan.bound, varying)
        if (
            first < flow.stop
            and _acts_after(plan.bound, first, varying, x)
            and _same_on_worker(plan, first, x["hidden"])
        ):
            return cls(label, plan.bound, varying, first + 1, first)
        return cls(label, plan.bound, varying, first, None)


def _first_layer(bound: Bound, varying: frozenset[str]) -> int:
    """The first layer that a variant's varying kwargs reach."""
    reached = [
        section.layers for number, section in enumerate(bound.sections) if varying & bound.section(number).keys()
    ]
    return min([bound.start if isinstance(layers, str) else min(layers) for layers in reached], default=bound.stop)


def _acts_after(bound: Bound, layer: int, varying: frozenset[str], x: Mapping[str, Any]) -> bool:
    """Whether all that a variant does at a layer is done to the layer's output, after whatever x does there."""
    layer_kwargs = {name: value for name, value in bound.for_layer(layer).items() if name in varying}
    if not layer_kwargs.keys() <= FOLDS or varying & bound.call().keys() or ("steer" in layer_kwargs and "edit" in x):
        return False
    return all(entry["point"] == "resid" for entry in layer_kwargs.get("edit", ()))


def _same_on_worker(plan: Plan, layer: int, hidden: Tensor) -> bool:
    """Whether a worker does at this layer's output what ``act_after`` does here: no block_fn of its own, which may do
    more after the block, and no other precision."""
    hellos = [hop.hello for hop in plan.route if hop.start <= layer < hop.stop]
    dtype = str(hidden.dtype).removeprefix("torch.")
    return all(not hello.fingerprint.block_fn and (plan.options.dtype or hello.dtype) == dtype for hello in hellos)


# ---- runs --------------------------------------------------------------------------------------------------------


def _outputs(flow: Flow, x: Mapping[str, Any], runs: Sequence[_Run]) -> Iterator[tuple[int, Tensor]]:
    """Each run's number and output, those that differ first last: what is before them has run by then."""
    common = {name: value for name, value in taken(x, flow.span)[1].items() if name != "hidden"}
    hidden, reached, base = x["hidden"], flow.start, flow.plan(x["hidden"], common).bound
    for start, pieces in _pieces(runs, hidden.shape, flow).items():
        if start > reached:
            hidden, reached = _layers(flow, hidden, base, (reached, start)), start
        for numbers in pieces:
            together = [runs[number] for number in numbers]
            with _about(*(run.label for run in together)):
                out = _run(flow, hidden, together)
            yield from zip(numbers, out.split(len(hidden)) if len(hidden) else [out] * len(numbers), strict=True)


def _pieces(runs: Sequence[_Run], shape: torch.Size, flow: Flow) -> dict[int, list[list[int]]]:
    """Which runs go together, by the layer where they start: as many at once as keep a route's workers busy."""
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        folds = run.call is None and run.varying <= FOLDS
        fold_key = signature(run.bound, run.varying) if folds else number
        groups.setdefault((run.start, run.after, run.varying, fold_key), []).append(number)
    tokens = IN_FLIGHT * flow.settings.batch_tokens
    size = max(1, tokens // max(1, shape[0] * shape[1]))
    by_start: dict[int, list[list[int]]] = {}
    for (start, *_), numbers in sorted(groups.items(), key=lambda item: item[0][0]):
        by_start.setdefault(start, []).extend(numbers[i : i + size] for i in range(0, len(numbers), size))
    return by_start


def _run(flow: Flow, hidden_BSD: Tensor, runs: Sequence[_Run]) -> Tensor:
    """The outputs of runs that fold, one below the other, from the hidden at the layer where they start."""
    first = runs[0]
    if first.call is not None:
        return flow(**first.call)
    bound = fold([run.bound for run in runs], first.varying, *hidden_BSD.shape[:2])
    wide = hidden_BSD.repeat(len(runs), 1, 1)
    if first.after is not None:
        wide = act_after(wide, bound, first.after, first.varying)
    return wide if first.start == flow.stop else _layers(flow, wide, bound, (first.start, flow.stop))


def _layers(flow: Flow, hidden: Tensor, bound: Bound, span: tuple[int, int]) -> Tensor:
    return flow[span[0] : span[1]].run_bound(hidden, bound.part(None, span)[0])[0]
