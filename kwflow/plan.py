"""One call: routed, bound to its kwargs, cut into sub-batches, sent to the workers, joined; and its gradient.

``Peers`` says where workers come from; nothing here knows libp2p or transformers. ``Plan.forward`` and ``backward``
are the fast way for first-order autograd; ``by_spans`` gives every derivative (``kwflow.derive``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kwflow import link
from kwflow.axes import describe, part, part_adjoint
from kwflow.bound import Bound, Span, is_wrapped
from kwflow.derive import Operations, Perform, evaluate, remote_call
from kwflow.errors import DeadlineError, KwargError, WorkerFailed
from kwflow.kwargs import bind_kwargs
from kwflow.positions import Columns
from kwflow.retry import Hop, Misfit, Peers, Retry, lacks
from kwflow.wire import Message

T = TypeVar("T")

IN_FLIGHT = 8  # sub-batches on their way at once
GRACE = 1.0  # seconds for a call to say why it gave up


@dataclass(frozen=True)
class Options:
    """How a flow is run: never a kwarg."""

    timeout: float = 300.0  # seconds for one call in all
    batch_tokens: int = 1024  # tokens in one sub-batch: rows are cut, never columns
    peers_blocked: tuple[str, ...] = ()
    dtype: str | None = None  # "float64": each worker upcasts its span for the call
    push: bool = True  # in a session each worker hands its output to the next one directly


@dataclass(frozen=True)
class Estimate:
    """What a call would send and get back, tensors only; the headers around them are some 200 bytes each way."""

    hops: tuple[Span, ...]  # the layers that each worker runs
    sub_batches: int
    bytes_sent: tuple[int, ...]  # to each worker
    bytes_received: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.hops)} workers, {self.sub_batches} sub-batches"]
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
        rows_in_all, keys, width = hidden.shape
        for hop in self.route:
            parts = [self.bound.part(rows, hop.span)[0] for rows in self.cuts]
            sent.append(hidden.nbytes + sum(t.nbytes for bound in parts for t in bound.tensors))
            numbers = self.bound.captured_numbers(hop.span, width, hop.schema.sizes["head"] * keys)
            received.append(hidden.nbytes + rows_in_all * numbers * hidden.element_size())
        return Estimate(tuple(hop.span for hop in self.route), len(self.cuts), tuple(sent), tuple(received))

    def run(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        what = f"a call of layers {self.bound.start}:{self.bound.stop}"
        return wait(work, self.options.timeout if timeout is None else timeout, what)

    def retry(self) -> Retry:
        return Retry(self.peers, self.options.timeout, self.options.peers_blocked)

    async def send(
        self, hop: Hop, bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """One request to one worker. ``tensors``: hidden, the kwargs', then what the operations add."""
        meta = {"op": "run", "span": [hop.start, hop.stop]}
        if operations:
            meta["ops"] = list(operations)
        if self.options.dtype:
            meta["dtype"] = self.options.dtype
        count = 1 + len(bound.leaves)
        tree = request_tree(tensors[0], bound.with_tensors(tensors[1:count]), tensors[count:])
        try:
            reply = await self.peers.pool(hop.peer, Message(meta, tree))
        except WorkerFailed as error:
            error.span = error.span or hop.span
            raise
        return check_reply(reply.tree, hop, bound, operations, tensors)

    async def ask(
        self, retry: Retry, hop: Hop, bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What a hop's worker answers; if it fails, what others answer in its place, one or several."""
        tokens = tensors[0].numel() // tensors[0].shape[-1]

        def misfit(other: Hop) -> str | None:
            return lacks(other, hop, bound, tokens)

        hops = [] if retry.avoids(hop.peer) else [hop]
        while True:
            hops = hops or await retry.route(*hop.span, like=hop, misfit=misfit)
            try:
                found = await self._answer(retry, hops, bound, operations, tensors)
            except WorkerFailed as error:
                retry.failed(error)
                hops = []
                continue
            if not retry.doubted and any_nan(found) and not any_nan(tensors):
                found = await self._doubt(retry, hops[0], misfit, found, bound, operations, tensors)
            return to_devices(found, operations, tensors)

    async def _answer(
        self, retry: Retry, hops: Sequence[Hop], bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        if len(hops) == 1:
            return await self.send(hops[0], bound, operations, tensors)
        return await in_thread(functools.partial(self._composed, retry, hops, bound, operations, tensors))

    async def _doubt(
        self,
        retry: Retry,
        hop: Hop,
        misfit: Misfit,
        found: list[Tensor | None],
        bound: Bound,
        operations: Operations,
        tensors: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """NaN from input without any: what others say, once in a call. The same again is the answer."""
        retry.doubted = True
        while others := await retry.others(replace(hop, start=bound.start, stop=bound.stop), misfit):
            try:
                theirs = await self._answer(retry, others, bound, operations, tensors)
            except WorkerFailed as error:
                retry.failed(error)
                continue
            if any_nan(theirs):
                break
            said = ", ".join(other.peer[-8:] for other in others)
            retry.failed(WorkerFailed(f"NaN where {said} has none", peer=hop.peer, span=hop.span))
            return theirs
        return found

    def _composed(
        self, retry: Retry, hops: Sequence[Hop], bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Operations on a span that several workers have taken over: derived here, each worker's own part there."""

        def fn(hidden: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            given, captured = bound.with_tensors(leaves), list[Tensor]()
            for hop in hops:
                part, _ = given.part(None, hop.span)
                hidden, *more = remote_call(self._perform(hop, part, retry), [hidden, *part.tensors])
                captured += more
            return (hidden, *captured)

        return list(evaluate(fn, operations, tensors, attention=contextlib.nullcontext))

    async def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The outputs (hidden, then what is captured), and each sub-batch's hidden before every hop.

        Sub-batches run through the pipeline at once.
        """
        turn, retry = asyncio.Semaphore(IN_FLIGHT), self.retry()

        async def one(rows: Span) -> tuple[list[Tensor], list[Tensor]]:
            async with turn:
                seen, captured = [tensors[0].detach()[rows[0] : rows[1]]], list[Tensor]()
                for hop in self.route:
                    bound, _ = self.bound.part(rows, hop.span)
                    out, *more = _all(await self.ask(retry, hop, bound, (), [seen[-1], *bound.tensors]))
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
        turn, retry = asyncio.Semaphore(IN_FLIGHT), self.retry()

        async def one(number: int) -> list[tuple[int, Tensor]]:
            async with turn:
                rows = self.cuts[number]
                mine = [None if c is None else c[rows[0] : rows[1]] for c in cotangents]
                return await self._pull(retry, rows, mine, needed, boundaries[number])

        found = await all_or_first_error([one(number) for number in range(len(self.cuts))])
        totals: list[Tensor | None] = [None] * len(needed)
        for index, grad in (pair for gradients in found for pair in gradients):
            held = totals[index]
            totals[index] = grad if held is None else held + grad
        return totals

    async def _pull(
        self,
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
            found = await self.ask(retry, hop, bound, (operation,), [entering, *bound.tensors, *given.values()])
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
                hidden, *more = remote_call(self._perform(hop, bound), [hidden, *bound.tensors])
                captured += more
            runs.append([hidden, *captured])
        return _join_rows(runs)

    def _perform(self, hop: Hop, bound: Bound, within: Retry | None = None) -> Perform:
        def perform(operations: Operations, tensors: Sequence[Tensor]) -> list[Tensor | None]:
            retry = within or self.retry()
            work = self.ask(retry, hop, bound, operations, [t.detach() for t in tensors])
            return self.run(work, None if within is None else retry.left + GRACE)

        return perform


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


def request_tree(
    hidden: Tensor, bound: Bound, given: Sequence[Tensor] = (), same: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """What a request carries: hidden, kwargs, and the cotangents and tangents that its operations are given.

    ``same``: the sections of the kwargs that the worker holds from the step before, and their numbers there.
    """
    tree: dict[str, Any] = {"hidden": hidden}
    if bound.sections:
        tree["kwargs"] = bound.to_tree(same)
    if given:
        tree["given"] = list(given)
    return tree


def to_devices(
    results: Sequence[Tensor | None], operations: Operations, tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Results go where the caller's tensors are: a gradient to its input's device, a value to hidden's."""
    pulled = next((operation["vjp"] for operation in reversed(operations) if "vjp" in operation), None)
    like = [tensors[0]] * len(results) if pulled is None else [tensors[i] for i in pulled]
    if len(like) != len(results):
        return list(results)  # whoever asked says what is missing
    return [None if r is None else r.to(tensor.device) for r, tensor in zip(results, like, strict=True)]


def check_reply(
    found: Any, hop: Hop, bound: Bound, operations: Operations, tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """A reply must be what was asked for. Raises WorkerFailed."""
    if not isinstance(found, list) or not all(result is None or isinstance(result, Tensor) for result in found):
        raise WorkerFailed("the reply carries no list of tensors", peer=hop.peer, span=hop.span)
    if not operations:
        return [*check_outputs(found, tensors[0], hop, bound)]
    if "vjp" in operations[-1]:
        inputs = [tensors[i] for i in operations[-1]["vjp"]]
        if len(found) != len(inputs):
            raise WorkerFailed(f"{len(found)} gradients for {len(inputs)} inputs", peer=hop.peer, span=hop.span)
        for grad, tensor in zip(found, inputs, strict=True):
            if grad is not None and (grad.shape != tensor.shape or grad.dtype != tensor.dtype):
                said = f"answered {describe(grad)} for the gradient of {describe(tensor)}"
                raise WorkerFailed(said, peer=hop.peer, span=hop.span)
    return found


def check_outputs(outputs: Any, hidden: Tensor, hop: Hop, bound: Bound) -> list[Tensor]:
    """A reply must be what was asked for: the hidden's shape and dtype, then each capture's rows and dtype."""
    found = outputs if isinstance(outputs, list) else []
    out = found[0] if found else None
    if not isinstance(out, Tensor) or out.shape != hidden.shape or out.dtype != hidden.dtype:
        got = describe(out) if isinstance(out, Tensor) else type(out).__name__
        raise WorkerFailed(f"answered {got} for a hidden {describe(hidden)}", peer=hop.peer, span=hop.span)
    good = [isinstance(t, Tensor) and t.dim() > 2 and (len(t), t.dtype) == (len(out), out.dtype) for t in found]
    if len(found) != 1 + bound.captures(hop.span) or not all(good):
        said = f"{len(found) - 1} captures for {bound.captures(hop.span)}"
        raise WorkerFailed(f"answered {said}, or others than were asked for", peer=hop.peer, span=hop.span)
    return found


def _all(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Values, which are all there: ``check_outputs`` has seen to it."""
    return [result for result in found if result is not None]


def any_nan(tensors: Sequence[Tensor | None]) -> bool:
    return any(t is not None and t.is_floating_point() and bool(t.isnan().any()) for t in tensors)


def _join_rows(runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each output of all sub-batches."""
    return list(runs[0]) if len(runs) == 1 else [torch.cat(parts) for parts in zip(*runs, strict=True)]


def wait(work: Coroutine[Any, Any, Any], timeout: float, what: str) -> Any:
    """Run on the network thread and wait here. Raises DeadlineError."""
    try:
        return link.run(work, timeout)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not end in {timeout:g} s (flow.options(timeout=…))") from error


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


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread of its own: asyncio's pool could fill up with calls that wait for each other."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=run, name="kwflow-composed", daemon=True).start()
    return await future
