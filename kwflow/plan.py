"""One call: routed, bound to its kwargs, cut into sub-batches, sent to the workers, joined; and its gradient.

``Peers`` says where workers come from; nothing here knows libp2p or transformers. ``Plan.forward`` and ``backward``
are the fast way for first-order autograd; ``by_spans`` gives every derivative (``kwflow.derive``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.ask import Asker, Options, wait
from kwflow.axes import describe, part, part_adjoint
from kwflow.bound import Bound, Span, is_wrapped
from kwflow.derive import remote_call
from kwflow.errors import KwargError
from kwflow.kwargs import bind_kwargs
from kwflow.positions import Columns
from kwflow.prefix import length
from kwflow.retry import Hop, Peers, Retry

IN_FLIGHT = 8  # sub-batches on their way at once


@dataclass(frozen=True)
class Estimate:
    """What a call would send and get back, tensors only; the headers around them are some 200 bytes each way."""

    hops: tuple[Span, ...]  # the layers that each worker runs
    sub_batches: int
    bytes_sent: tuple[int, ...]  # to each worker
    bytes_received: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"workers: {len(self.hops)}, sub-batches: {self.sub_batches}"]
        for span, sent, received in zip(self.hops, self.bytes_sent, self.bytes_received, strict=True):
            lines.append(f"  layers {span[0]}:{span[1]}  {sent:,} bytes there, {received:,} back")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Plan:
    """One call, routed and bound: which rows go through which hops with which part of the kwargs."""

    peers: Peers
    route: tuple[Hop, ...]
    bound: Bound
    cuts: tuple[Span, ...]
    options: Options

    def estimate(self, hidden: Tensor) -> Estimate:
        """Count the bytes of a forward pass."""
        sent, received = list[int](), list[int]()
        keys = hidden.shape[1] + length(self.bound)
        for hop in self.route:
            parts = [self.bound.part(rows, hop.span)[0] for rows in self.cuts]
            sent.append(hidden.nbytes + sum(t.nbytes for bound in parts for t in bound.tensors))
            numbers = sum(map(math.prod, self.bound.captured_shapes(hop.span, hop.schema.sizes, keys)))
            received.append(hidden.nbytes + len(hidden) * numbers * hidden.element_size())
        return Estimate(tuple(hop.span for hop in self.route), len(self.cuts), tuple(sent), tuple(received))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return wait(work, self.options.timeout, f"a call of layers {self.bound.start}:{self.bound.stop}")

    @property
    def _asker(self) -> Asker:
        return Asker(self.peers, self.options)

    async def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The outputs (hidden, then what is captured), and each sub-batch's hidden before every hop.

        Sub-batches run through the pipeline at once.
        """
        turn, asker = asyncio.Semaphore(IN_FLIGHT), self._asker
        retry = asker.retry()

        async def one(rows: Span) -> tuple[list[Tensor], list[Tensor]]:
            async with turn:
                seen, captured = [tensors[0].detach()[rows[0] : rows[1]]], list[Tensor]()
                for hop in self.route:
                    bound, _ = self.bound.part(rows, hop.span)
                    out, *more = _all(await asker.ask(retry, hop, bound, (), [seen[-1], *bound.tensors]))
                    seen.append(out)
                    captured += more
                return [seen.pop(), *captured], seen

        runs = await all_or_first_error([one(rows) for rows in self.cuts])
        return _join_rows([outputs for outputs, _ in runs]), [seen for _, seen in runs]

    async def backward(
        self, cotangents: Sequence[Tensor | None], needed: Sequence[bool], boundaries: Sequence[Sequence[Tensor]]
    ) -> list[Tensor | None]:
        """Gradients of hidden and every kwarg tensor; each worker recomputes its span, asked for what is needed.

        ``cotangents``: of hidden and of what was captured; None where the loss does not depend on it.
        """
        turn, asker = asyncio.Semaphore(IN_FLIGHT), self._asker
        retry = asker.retry()

        async def one(number: int) -> list[tuple[int, Tensor]]:
            async with turn:
                rows = self.cuts[number]
                mine = [None if c is None else c[rows[0] : rows[1]] for c in cotangents]
                return await self._pull(asker, retry, rows, mine, needed, boundaries[number])

        found = await all_or_first_error([one(number) for number in range(len(self.cuts))])
        totals: list[Tensor | None] = [None] * len(needed)
        for index, grad in (pair for gradients in found for pair in gradients):
            held = totals[index]
            totals[index] = grad if held is None else held + grad
        return totals

    async def _pull(
        self,
        asker: Asker,
        retry: Retry,
        rows: Span,
        cotangents: Sequence[Tensor | None],
        needed: Sequence[bool],
        boundaries: Sequence[Tensor],
    ) -> list[tuple[int, Tensor]]:
        """One sub-batch's gradients, hop by hop from the last, each with the number of its tensor."""
        gradients, back, captured = list[tuple[int, Tensor]](), cotangents[0], list(cotangents[1:])
        for hop, entering in zip(reversed(self.route), reversed(boundaries), strict=True):
            bound, keep = self.bound.part(rows, hop.span)
            first = len(captured) - bound.captures()
            own, captured = captured[first:], captured[:first]
            given = {i: c for i, c in enumerate([back, *own]) if c is not None}
            leaves = [i for i, index in enumerate(keep) if needed[1 + index]]
            upstream = needed[0] or any(self._acts_before(hop, i) for i, need in enumerate(needed[1:]) if need)
            wanted = ([0] if upstream else []) + [1 + i for i in leaves]
            if not given or not wanted:  # nothing of the loss is from here on, or nothing that is needed before here
                back = None
                continue
            operation = {"vjp": wanted, "given": list(given)}
            found = await asker.ask(retry, hop, bound, (operation,), [entering, *bound.tensors, *given.values()])
            answer = dict(zip(wanted, found, strict=True))
            for i in leaves:
                grad = answer[1 + i]
                if grad is not None:
                    gradients.append((1 + keep[i], self._whole(grad, keep[i], rows, hop.span)))
            back = answer.get(0)
        if back is not None and needed[0]:
            whole = back.new_zeros((self.cuts[-1][1], *back.shape[1:]))
            whole[rows[0] : rows[1]] = back
            gradients.append((0, whole))
        return gradients

    def _acts_before(self, hop: Hop, leaf: int) -> bool:
        """Whether a kwarg acts on layers before this hop, so that the cotangent must go on."""
        return self.bound.first_layer(leaf) < hop.start

    def _whole(self, grad: Tensor, index: int, rows: Span, span: Span) -> Tensor:
        """Carry the gradient of a part back to the shape of the whole kwarg."""
        whole = self.bound.axed(index)
        of_rows = part(whole, "batch", *rows)
        grad = part_adjoint(grad, of_rows, "layer", span[0] - self.bound.start, span[1] - self.bound.start)
        return part_adjoint(grad, whole, "batch", *rows)

    def by_spans(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same outputs with every derivative: one Function per worker span, ordinary torch ops around it."""
        runs = []
        for rows in self.cuts:
            hidden, captured = tensors[0] if len(self.cuts) == 1 else tensors[0][rows[0] : rows[1]], list[Tensor]()
            for hop in self.route:
                bound, _ = self.bound.with_tensors(tensors[1:]).part(rows, hop.span)
                hidden, *more = remote_call(self._asker.perform(hop, bound), [hidden, *bound.tensors])
                captured += more
            runs.append([hidden, *captured])
        return _join_rows(runs)


class PlanCall(torch.autograd.Function):
    """A whole call as one Function: plain first-order autograd, pipelined over sub-batches both ways."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, boundaries = plan.run(plan.forward(tensors))
        ctx.plan, ctx.boundaries = plan, boundaries  # a cache that backward reads and never consumes
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        given = [i for i, cotangent in enumerate(grad_outputs) if cotangent is not None]
        if not given:
            return (None, *(None for _ in tensors))
        if not torch.is_grad_enabled():
            return (None, *ctx.plan.run(ctx.plan.backward(grad_outputs, needed, ctx.boundaries)))
        wanted = [i for i, need in enumerate(needed) if need]
        # views: one tensor given twice, or a kwarg made from hidden, must get its own part of the gradient and no more
        own = [t.view_as(t) for t in tensors]
        outputs, inputs = ctx.plan.by_spans(own), [own[i] for i in wanted]
        pulled, cotangents = [outputs[i] for i in given], [grad_outputs[i] for i in given]
        found = torch.autograd.grad(pulled, inputs, cotangents, create_graph=True, allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
        return (None, *(grads.get(i) for i in range(len(tensors))))


def bind(
    route: Sequence[Hop],
    span: Span,
    kwargs: Mapping[str, Any],
    sizes: Mapping[str, int],
    columns: Columns | None = None,
) -> Bound:
    """Bind a call's kwargs to what its route takes, and look at the values that have limits."""
    bound = bind_kwargs([(hop.span, hop.schema) for hop in route], span, kwargs, sizes, columns)
    for leaf, tensor in zip(bound.leaves, bound.tensors, strict=True):
        if leaf.what != "attention_mask" or is_wrapped(tensor) or tensor.is_meta:
            continue
        if len(leaf.axes) == 2 and not bool(((tensor == 0) | (tensor == 1)).all()):
            raise KwargError(f"attention_mask {describe(tensor)} 'batch key' holds other numbers than 0 and 1")
        if len(leaf.axes) == 4 and any(other.what.startswith("prompts") for other in bound.leaves):
            raise KwargError("prompts act at token positions, which a 4-D attention_mask leaves unsaid; give a 2-D one")
    return bound


def _all(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Values, which are all there: ``check_outputs`` has seen to it."""
    return [result for result in found if result is not None]


def _join_rows(runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output of all sub-batches."""
    return list(runs[0]) if len(runs) == 1 else [torch.cat(parts) for parts in zip(*runs, strict=True)]


async def all_or_first_error(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results in order; the first error cancels the rest and is raised as itself."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
