"""One call: routed, bound to its kwargs, cut into sub-batches, sent to the workers, joined; and its gradient.

``Peers`` says where workers come from; nothing here knows libp2p or transformers. ``Plan.forward`` and ``backward``
are the fast way for first-order autograd; ``by_spans`` gives every derivative (``kwflow.autograd.derive``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.derive import remote_call
from kwflow.autograd.transforms import plain
from kwflow.client.options import Options
from kwflow.client.peers import Hop, Peers
from kwflow.client.request import Dispatcher
from kwflow.client.retry import Retry, wait
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.axes import part, part_adjoint
from kwflow.kwargs.bind import Schemas
from kwflow.kwargs.bound import Bound, Rows, Span

IN_FLIGHT = 8  # sub-batches on their way at once


@dataclass(frozen=True)
class Estimate:
    """What a call would send and get back, tensors only; the headers around them are some 200 bytes each way."""

    hops: tuple[Span, ...]  # the layers that each worker runs
    sub_batches: int
    bytes_sent: tuple[int, ...]  # to each worker
    bytes_received: tuple[int, ...]
    here: tuple[int, ...] = ()  # before which layers the call comes back for functions that run here

    def __str__(self) -> str:
        cuts = f", functions here before layers {', '.join(map(str, self.here))}" if self.here else ""
        what = "requests one after the other" if self.here else "workers"
        lines = [f"{what}: {len(self.hops)}, sub-batches: {self.sub_batches}{cuts}"]
        for span, sent, received in zip(self.hops, self.bytes_sent, self.bytes_received, strict=True):
            lines.append(f"  layers {span[0]}:{span[1]}  {sent:,} bytes there, {received:,} back")
        return "\n".join(lines)

    __repr__ = __str__


Gradient = tuple[int, Tensor, Span]  # of which tensor (hidden is 0), a part of it, and the layers that it is from


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Some rows of a call: their hidden, and of each hop the part of the kwargs and which of the leaves it has."""

    rows: Rows
    hidden: Tensor
    parts: tuple[tuple[Bound, list[int]], ...]
    entering: list[Tensor] = field(default_factory=list)  # hidden before each hop, once it has run


@dataclass(frozen=True)
class Plan:
    """One call, routed and bound: which rows go through which hops with which part of the kwargs."""

    peers: Peers
    route: tuple[Hop, ...]
    bound: Bound
    cuts: tuple[Rows, ...]
    options: Options

    def estimate(self, hidden: Tensor) -> Estimate:
        """Count the bytes of a forward pass."""
        sent, received = list[int](), list[int]()
        keys = hidden.shape[1] + prefix_kv.length(self.bound)
        for hop in self.route:
            parts = [self.bound.part(rows, hop.span)[0] for rows in self.cuts]
            sent.append(hidden.nbytes + sum(t.nbytes for bound in parts for t in bound.tensors))
            numbers = sum(map(math.prod, self.bound.captured_shapes(hop.span, hop.schema, keys)))
            received.append(hidden.nbytes + len(hidden) * numbers * hidden.element_size())
        return Estimate(tuple(hop.span for hop in self.route), len(self.cuts), tuple(sent), tuple(received))

    @property
    def dispatcher(self) -> Dispatcher:
        return Dispatcher(self.peers, self.options)

    def retry(self) -> Retry:
        """For one call, forward or backward, from now on."""
        return self.dispatcher.retry()

    def split(self, tensors: Sequence[Tensor]) -> list[SubBatch]:
        """The call's rows by sub-batch, each with its part of the kwargs by hop: plain values, for any thread."""
        hidden, bound = tensors[0], self.bound.with_tensors(tensors[1:])
        batches = []
        for rows in self.cuts:
            parts = [bound.part(rows, hop.span) for hop in self.route]
            kwargs_by_hop = tuple((kwargs.plain(), keep) for kwargs, keep in parts)
            batches.append(SubBatch(rows, plain(hidden[rows[0] : rows[1]]), kwargs_by_hop))
        return batches

    def forward(self, tensors: Sequence[Tensor], retry: Retry) -> tuple[list[Tensor], list[SubBatch]]:
        """The outputs (hidden, then what is captured), and the sub-batches, for :meth:`backward`."""
        batches = self.split(tensors)
        return join_rows(wait(retry, self.run(batches, retry), self.bound.span)), batches

    async def run(self, batches: Sequence[SubBatch], retry: Retry) -> list[list[Tensor]]:
        """The outputs of each sub-batch, which run through the pipeline at once; on the network thread."""
        turn = asyncio.Semaphore(IN_FLIGHT)

        async def run_batch(batch: SubBatch) -> list[Tensor]:
            async with turn:
                batch.entering[:] = [batch.hidden]
                captured = list[Tensor]()
                for hop, (bound, _) in zip(self.route, batch.parts, strict=True):
                    tensors = [batch.entering[-1], *bound.tensors]
                    out, *more = _all(await self.dispatcher.dispatch(retry, hop, bound, (), tensors))
                    batch.entering.append(out)
                    captured += more
                return [batch.entering.pop(), *captured]

        return await all_or_first_error([run_batch(batch) for batch in batches])

    def backward(
        self, cotangents: Sequence[Tensor | None], needed: Sequence[bool], batches: Sequence[SubBatch], retry: Retry
    ) -> list[Tensor | None]:
        """Gradients of hidden and every kwarg tensor; each worker recomputes its span, asked for what is needed.

        ``cotangents``: of hidden and of what was captured; None where the loss does not depend on it.
        """
        cotangents_by_batch = [
            [None if c is None else plain(c[rows[0] : rows[1]]) for c in cotangents] for rows in self.cuts
        ]
        gradients_by_batch = wait(retry, self._pull_all(batches, cotangents_by_batch, needed, retry), self.bound.span)
        totals: list[Tensor | None] = [None] * len(needed)
        # in the order of the rows, whichever ended first
        for batch, gradients in zip(batches, gradients_by_batch, strict=True):
            for number, grad, span in gradients:
                grad, total = self._whole(grad, number, batch.rows, span), totals[number]
                totals[number] = grad if total is None else total + grad
        return totals

    async def _pull_all(
        self,
        batches: Sequence[SubBatch],
        cotangents: Sequence[Sequence[Tensor | None]],
        needed: Sequence[bool],
        retry: Retry,
    ) -> list[list[Gradient]]:
        turn = asyncio.Semaphore(IN_FLIGHT)

        async def pull_batch(batch: SubBatch, cotangents_of_batch: Sequence[Tensor | None]) -> list[Gradient]:
            async with turn:
                return await self._pull(batch, cotangents_of_batch, needed, retry)

        return await all_or_first_error([pull_batch(*pair) for pair in zip(batches, cotangents, strict=True)])

    async def _pull(
        self, batch: SubBatch, cotangents: Sequence[Tensor | None], needed: Sequence[bool], retry: Retry
    ) -> list[Gradient]:
        """One sub-batch's gradients, hop by hop from the last, each with the number of its tensor."""
        gradients, back, captured = list[Gradient](), cotangents[0], list(cotangents[1:])
        hops = zip(self.route, batch.parts, batch.entering, strict=True)
        for hop, (bound, keep), entering in reversed(list(hops)):
            first = len(captured) - bound.captures()
            of_captures, captured = captured[first:], captured[:first]
            inputs = {i: c for i, c in enumerate([back, *of_captures]) if c is not None}
            leaves = [i for i, index in enumerate(keep) if needed[1 + index]]
            upstream = needed[0] or any(self._acts_before(hop, i) for i, need in enumerate(needed[1:]) if need)
            wanted = ([0] if upstream else []) + [1 + i for i in leaves]
            if not inputs or not wanted:  # nothing of the loss is from here on, or nothing that is needed before here
                back = None
                continue
            operation = {"vjp": wanted, "given": list(inputs)}
            tensors = [entering, *bound.tensors, *inputs.values()]
            results = await self.dispatcher.dispatch(retry, hop, bound, (operation,), tensors)
            answer = dict(zip(wanted, results, strict=True))
            grads = [(1 + keep[i], answer[1 + i], hop.span) for i in leaves]
            gradients += [(number, grad, span) for number, grad, span in grads if grad is not None]
            back = answer.get(0)
        if back is not None and needed[0]:
            gradients.append((0, back, self.bound.span))
        return gradients

    def _acts_before(self, hop: Hop, leaf: int) -> bool:
        """Whether a kwarg acts on layers before this hop, so that the cotangent must go on."""
        return self.bound.first_layer(leaf) < hop.start

    def _whole(self, grad: Tensor, number: int, rows: Rows, span: Span) -> Tensor:
        """Carry the gradient of a part back to the shape of the whole: of hidden (0), or of a kwarg."""
        if number == 0:
            whole = grad.new_zeros((self.cuts[-1][1], *grad.shape[1:]))
            whole[rows[0] : rows[1]] = grad
            return whole
        kwarg = self.bound.axed(number - 1)
        of_rows = part(kwarg, "batch", *rows)
        grad = part_adjoint(grad, of_rows, "layer", span[0] - self.bound.start, span[1] - self.bound.start)
        return part_adjoint(grad, kwarg, "batch", *rows)

    def by_spans(self, tensors: Sequence[Tensor], retry: Retry) -> list[Tensor]:
        """The same outputs with every derivative: one Function per worker span, ordinary torch ops around it."""
        runs = []
        for rows in self.cuts:
            hidden, captured = tensors[0] if len(self.cuts) == 1 else tensors[0][rows[0] : rows[1]], list[Tensor]()
            for hop in self.route:
                bound, _ = self.bound.with_tensors(tensors[1:]).part(rows, hop.span)
                hidden, *more = remote_call(self.dispatcher.perform(hop, bound, retry), [hidden, *bound.tensors])
                captured += more
            runs.append([hidden, *captured])
        return join_rows(runs)


class PlanCall(torch.autograd.Function):
    """A whole call as one Function: plain first-order autograd, pipelined over sub-batches both ways."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, retry: Retry, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, batches = plan.forward(tensors, retry)
        ctx.plan, ctx.batches = plan, batches  # a cache that backward reads and never consumes
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        indices = [i for i, cotangent in enumerate(grad_outputs) if cotangent is not None]
        if not indices:
            return (None, None, *(None for _ in tensors))
        with ctx.plan.retry() as retry:
            if not torch.is_grad_enabled():
                return (None, None, *ctx.plan.backward(grad_outputs, needed, ctx.batches, retry))
            wanted = [i for i, need in enumerate(needed) if need]
            # views: one tensor given twice, or a kwarg made from hidden, gets its own part of the gradient and no more
            views = [t.view_as(t) for t in tensors]
            outputs, inputs = ctx.plan.by_spans(views, retry), [views[i] for i in wanted]
            pulled, cotangents = [outputs[i] for i in indices], [grad_outputs[i] for i in indices]
            gradients = torch.autograd.grad(pulled, inputs, cotangents, create_graph=True, allow_unused=True)
        grads = dict(zip(wanted, gradients, strict=True))
        return (None, None, *(grads.get(i) for i in range(len(tensors))))


def schemas_of(route: Sequence[Hop]) -> Schemas:
    """What the workers of a route take."""
    return [(hop.span, hop.schema) for hop in route]


def _all(results: Sequence[Tensor | None]) -> list[Tensor]:
    """Values, which are all there: ``check_outputs`` has seen to it."""
    return [result for result in results if result is not None]


def join_rows(runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output of all sub-batches."""
    return list(runs[0]) if len(runs) == 1 else [torch.cat(parts) for parts in zip(*runs, strict=True)]


async def all_or_first_error(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results in order; the first error cancels the rest and is raised as itself."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
