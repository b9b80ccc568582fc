"""What one worker is asked in a call, the check of what it answers, and others in its place where it fails.

Plan --hop, its part of the kwargs, operations--> Dispatcher.dispatch --> one worker, or several in its place
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from kwflow.autograd.derive import Operations, Perform, evaluate, remote_call
from kwflow.autograd.transforms import plain
from kwflow.client.options import Options
from kwflow.client.peers import Hop, Peers
from kwflow.client.retry import Reject, Retry, lacks, wait
from kwflow.errors import NoRoute, WorkerFailed
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.axes import describe
from kwflow.kwargs.bind import Schemas
from kwflow.kwargs.bound import Bound, Span
from kwflow.wire import loop
from kwflow.wire.loop import in_thread
from kwflow.wire.message import Message

T = TypeVar("T")


Check = Callable[[Schemas], object]  # whether a call's kwargs are what some layers take; raises if not


@dataclass(frozen=True)
class Dispatcher:
    """Brings requests to workers, as a flow's options say."""

    peers: Peers
    options: Options

    def retry(self) -> Retry:
        """For one call or step: its routes, until its deadline."""
        return Retry(self.peers, self.options.timeout, self.options.peers_blocked)

    def route(self, span: Span, retry: Retry, check: Check | None = None) -> list[Hop]:
        """The hops of a call: as they are known on this thread, or else as the network thread finds them.

        ``check`` binds the call's kwargs. Where there is no route now, it is asked by what the layers took last, so
        that a caller's mistake is raised at once, and does not wait for workers.
        """
        if (hops := self.peers.snapshot(*span, self.options.peers_blocked)) is not None:
            return hops
        try:
            return wait(retry, retry.route_at_once(*span), span)
        except NoRoute:
            self._check_by_last(span, check)
            return wait(retry, retry.route(*span), span)

    async def aroute(self, span: Span, retry: Retry, check: Check | None = None) -> list[Hop]:
        """The async form of :meth:`route`, from any event loop."""
        if (hops := self.peers.snapshot(*span, self.options.peers_blocked)) is not None:
            return hops
        try:
            return await asyncio.wrap_future(loop.submit(retry.route_at_once(*span)))
        except NoRoute:
            self._check_by_last(span, check)
            return await asyncio.wrap_future(loop.submit(retry.route(*span)))

    def _check_by_last(self, span: Span, check: Check | None) -> None:
        schemas = self.peers.last_known(*span)
        if check is not None and schemas is not None:
            check(schemas)

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

    async def dispatch(
        self, retry: Retry, hop: Hop, bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What a hop's worker answers; if it fails, what others answer in its place, one or several."""
        tokens = tensors[0].numel() // tensors[0].shape[-1]

        def reject(other: Hop) -> str | None:
            return lacks(other, hop, bound, tokens)

        hops = [] if retry.avoids(hop.peer) else [hop]
        while True:
            hops = hops or await retry.route(*hop.span, like=hop, reject=reject)
            try:
                results = await self._answer(retry, hops, bound, operations, tensors)
            except WorkerFailed as error:
                retry.failed(error)
                hops = []
                continue
            if not retry.nan_confirmed and any_nan(results) and not any_nan(tensors):
                results = await self._confirm_nan(retry, hops[0], reject, results, bound, operations, tensors)
            return to_devices(results, operations, tensors)

    async def _answer(
        self, retry: Retry, hops: Sequence[Hop], bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        if len(hops) == 1:
            return await self.send(hops[0], bound, operations, tensors)
        return await in_thread(functools.partial(self._composed, retry, hops, bound, operations, tensors))

    async def _confirm_nan(
        self,
        retry: Retry,
        hop: Hop,
        reject: Reject,
        results: list[Tensor | None],
        bound: Bound,
        operations: Operations,
        tensors: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """NaN from input without any: what others say. The same again is the answer, for the whole call."""
        async with retry.confirming:
            if retry.nan_confirmed:  # by another sub-batch, meanwhile
                return results
            elsewhere = retry.accepting_nan()
            while others := await retry.others(replace(hop, start=bound.start, stop=bound.stop), reject):
                try:
                    other_results = await self._answer(elsewhere, others, bound, operations, tensors)
                except WorkerFailed as error:
                    retry.failed(error)
                    continue
                if any_nan(other_results):
                    break
                names = ", ".join(other.peer[-8:] for other in others)
                retry.failed(WorkerFailed(f"NaN where {names} has none", peer=hop.peer, span=hop.span))
                return other_results
            retry.nan_confirmed = True
            return results

    def _composed(
        self, retry: Retry, hops: Sequence[Hop], bound: Bound, operations: Operations, tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Operations on a span that several workers have taken over: derived here, each worker's own part there."""

        def fn(hidden: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            kwargs, captured = bound.with_tensors(leaves), list[Tensor]()
            for hop in hops:
                part, _ = kwargs.part(None, hop.span)
                hidden, *more = remote_call(self.perform(hop, part, retry), [hidden, *part.tensors])
                captured += more
            return (hidden, *captured)

        return list(evaluate(fn, operations, tensors, attention=contextlib.nullcontext))

    def perform(self, hop: Hop, bound: Bound, within: Retry) -> Perform:
        """For ``derive.remote_call``. ``within``: of the call; a derivative taken after it has a time of its own."""
        structure = bound.with_tensors(())  # each request brings its tensors; these are of the caller's transforms

        def perform(operations: Operations, tensors: Sequence[Tensor]) -> list[Tensor | None]:
            retry = self.retry() if within.over else within
            return wait(retry, self.dispatch(retry, hop, structure, operations, [*map(plain, tensors)]), hop.span)

        return perform


def request_tree(
    hidden: Tensor, bound: Bound, arguments: Sequence[Tensor] = (), same: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """What a request carries: hidden, kwargs, and the cotangents and tangents that its operations are given.

    ``same``: the sections of the kwargs that the worker holds from the step before, and their numbers there.
    """
    tree: dict[str, Any] = {"hidden": hidden}
    if bound.sections:
        tree["kwargs"] = bound.to_tree(same)
    if arguments:
        tree["given"] = list(arguments)
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
    results: Any, hop: Hop, bound: Bound, operations: Operations, tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """A reply must be what was asked for. Raises WorkerFailed."""
    if not isinstance(results, list) or not all(result is None or isinstance(result, Tensor) for result in results):
        raise WorkerFailed("the reply carries no list of tensors", peer=hop.peer, span=hop.span)
    if not operations:
        return [*check_outputs(results, tensors[0], hop, bound.with_tensors(tensors[1 : 1 + len(bound.leaves)]))]
    *before, last = operations
    if "jvp" in last:  # a tangent is as what it is of
        check_reply(results, hop, bound, tuple(before), tensors[: len(tensors) - len(last["jvp"])])
    elif "vmap" in last:
        check_mapped(results, hop, bound, tuple(before), tensors, last["vmap"])
    else:
        inputs = [tensors[i] for i in last["vjp"]]
        if len(results) != len(inputs):
            raise WorkerFailed(f"{len(results)} gradients for {len(inputs)} inputs", peer=hop.peer, span=hop.span)
        for grad, tensor in zip(results, inputs, strict=True):
            if grad is not None and (grad.shape != tensor.shape or grad.dtype != tensor.dtype):
                message = f"answered {describe(grad)} for the gradient of {describe(tensor)}"
                raise WorkerFailed(message, peer=hop.peer, span=hop.span)
    return results


def check_mapped(
    results: Sequence[Tensor | None],
    hop: Hop,
    bound: Bound,
    operations: Operations,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
) -> None:
    """A reply for calls that are mapped over: each result has them in front, and is as one call's."""
    (calls,) = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True) if dim is not None}
    for result in results:
        if result is not None and (result.dim() < 1 or len(result) != calls):
            raise WorkerFailed(f"answered {describe(result)} for {calls} calls", peer=hop.peer, span=hop.span)
    tensors_of_call = [
        tensor if dim is None else tensor.select(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)
    ]
    check_reply([None if r is None else r[0] for r in results], hop, bound, operations, tensors_of_call)


def check_outputs(outputs: Any, hidden: Tensor, hop: Hop, bound: Bound, before: int = 0) -> list[Tensor]:
    """A reply must be what was asked for: the hidden's shape and dtype, then each capture's.

    ``before``: columns of a session before these, a prefix's too.
    """
    tensors = outputs if isinstance(outputs, list) else []
    out = tensors[0] if tensors else None
    if not isinstance(out, Tensor) or out.shape != hidden.shape or out.dtype != hidden.dtype:
        got = describe(out) if isinstance(out, Tensor) else type(out).__name__
        raise WorkerFailed(f"answered {got} for a hidden {describe(hidden)}", peer=hop.peer, span=hop.span)
    keys = before + prefix_kv.length(bound) + hidden.shape[1] if bound.captures() else 0
    shapes = bound.captured_shapes(hop.span, hop.schema, keys)
    captured = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else None for t in tensors[1:]]
    if captured != [((len(out), *shape), out.dtype) for shape in shapes]:
        counts = f"{len(captured)} captures for {len(shapes)}"
        raise WorkerFailed(f"answered {counts}, or others than were asked for", peer=hop.peer, span=hop.span)
    return tensors


def any_nan(tensors: Sequence[Tensor | None]) -> bool:
    return any(t is not None and t.is_floating_point() and bool(t.isnan().any()) for t in tensors)
