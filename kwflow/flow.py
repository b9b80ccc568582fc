"""The client: a Flow is a function of hidden and kwargs over layers of the model, wherever they run.

    flow(hidden, **kwargs): bind -> route -> cut rows and layers -> requests -> join

Links and routing are injected (``Peers``): nothing here knows libp2p or transformers. Control is never a kwarg: it
is set by ``flow.options(...)``.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kwflow import link
from kwflow.axes import Axed, describe, part, part_adjoint
from kwflow.derive import Operations, Perform, remote_call
from kwflow.errors import DeadlineError, KwargError, ShapeError, SpanError, UnsupportedError, WorkerFailed
from kwflow.kwargs import Bound, Schema, Span, Spec, bind_kwargs, is_wrapped
from kwflow.wire import Message

IN_FLIGHT = 8  # sub-batches on their way at once


@dataclass(frozen=True)
class Hop:
    """One worker on a route and the layers it runs for this flow."""

    peer: str
    start: int
    stop: int
    hello: Mapping[str, Any]

    @property
    def span(self) -> Span:
        return self.start, self.stop

    @property
    def schema(self) -> Schema:
        return self.hello["schema"]


class Peers(Protocol):
    """Where a flow's workers come from; shared by its slices."""

    pool: link.Pool

    async def route(self, start: int, stop: int, blocked: Collection[str]) -> list[Hop]:
        """Hops that cover ``[start, stop)``. Raises NoRoute."""
        ...

    def failed(self, error: WorkerFailed) -> None:
        """Take note that a worker failed, so that the next route avoids it."""
        ...

    def close(self) -> None: ...


class Ends(Protocol):
    """The client's own part of the model: tokenizer, embeddings, final norm and head."""

    name: str
    layers: int
    hidden_size: int
    dtype: torch.dtype
    takes_positions: bool  # the family's blocks take position_ids

    def tokenize(self, texts: Sequence[str]) -> Mapping[str, Tensor]: ...
    def embed(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Options:
    """How a flow is run: never a kwarg."""

    timeout: float = 300.0  # seconds for one call in all
    batch_tokens: int = 1024  # tokens in one sub-batch: rows are cut, never columns
    peers_blocked: tuple[str, ...] = ()
    dtype: str | None = None  # "float64": each worker upcasts its span for the call


class Flow:
    """Layers ``[start, stop)`` of a model as one function; ``flow[a:b]`` is a Flow too.

        out = flow(hidden, attention_mask=mask, steer={12: v})       # (batch, seq, hidden), before the final norm

    Differentiable with respect to hidden and every float kwarg, by plain autograd and by torch.func.
    """

    def __init__(self, ends: Ends, peers: Peers, span: Span, options: Options = Options()):
        self.ends, self.peers, self.span, self._options = ends, peers, span, options

    @property
    def start(self) -> int:
        return self.span[0]

    @property
    def stop(self) -> int:
        return self.span[1]

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, layers: slice) -> Flow:
        """A slice by absolute layer numbers, within this flow's span."""
        if not isinstance(layers, slice) or layers.step not in (None, 1):
            raise SpanError(f"flow[{layers!r}]: give a slice of layers such as flow[{self.start}:{self.stop}]")
        start = self.start if layers.start is None else layers.start
        stop = self.stop if layers.stop is None else layers.stop
        if not (isinstance(start, int) and isinstance(stop, int) and self.start <= start < stop <= self.stop):
            raise SpanError(
                f"flow[{start}:{stop}] does not lie in this flow's layers {self.start}:{self.stop} (absolute)"
            )
        return Flow(self.ends, self.peers, (start, stop), self._options)

    def options(self, **changes: Any) -> Flow:
        """A Flow that runs otherwise: ``timeout`` seconds, ``batch_tokens``, ``peers_blocked``, ``dtype="float64"``."""
        unknown = set(changes) - set(Options.__dataclass_fields__)
        if unknown:
            raise KwargError(f"no option {sorted(unknown)[0]!r}; options are {', '.join(Options.__dataclass_fields__)}")
        if "peers_blocked" in changes:
            given = changes["peers_blocked"]
            changes["peers_blocked"] = (given,) if isinstance(given, str) else tuple(given)
        if isinstance(changes.get("dtype"), torch.dtype):
            changes["dtype"] = str(changes["dtype"]).removeprefix("torch.")
        options = replace(self._options, **changes)
        if options.dtype not in (None, "float32", "float64"):
            raise KwargError(f"option dtype is {options.dtype!r}; a worker upcasts to 'float32' or 'float64'")
        timeout, tokens = options.timeout, options.batch_tokens
        if type(timeout) not in (int, float) or not 0 < timeout < float("inf"):
            raise KwargError(f"option timeout is {timeout!r}; give a finite number of seconds")
        if type(tokens) is not int or tokens < 1:
            raise KwargError(f"option batch_tokens is {tokens!r}; give a number of tokens")
        return Flow(self.ends, self.peers, self.span, options)

    def __repr__(self) -> str:
        return f"Flow({self.ends.name}, layers {self.start}:{self.stop}, {str(self.ends.dtype).removeprefix('torch.')})"

    # ---- calls

    def __call__(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run the layers on ``hidden`` (batch, seq, hidden) with kwargs; returns the residual before the final norm.

        Raises UnknownKwarg, KwargError, ShapeError, AxesError, SpanError before anything is sent; WorkerFailed,
        NoRoute or DeadlineError by ``options(timeout=)``.
        """
        plan = self.plan(hidden, kwargs)
        tensors = (hidden, *plan.bound.tensors)
        if hidden.numel() == 0:
            reached = [t.sum().to(hidden.dtype) * 0 for t in plan.bound.tensors if t.requires_grad]
            return sum(reached, hidden.clone())
        if any(is_wrapped(t) for t in tensors) or _in_forward_mode(tensors):
            return plan.by_spans(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            tensors = tuple(t.clone() if t.is_inference() else t for t in tensors)  # those cannot be saved for backward
            return _FlowCall.apply(plan, *tensors)  # type: ignore[no-any-return]
        return plan.run(plan.forward(tensors))[0]

    async def acall(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """The async form of a call, from any event loop; without gradients."""
        return await asyncio.wrap_future(link.submit(self._acall(hidden, kwargs, graded=torch.is_grad_enabled())))

    async def _acall(self, hidden: Tensor, kwargs: Mapping[str, Any], *, graded: bool) -> Tensor:
        seconds = self._options.timeout
        try:
            async with asyncio.timeout(seconds):
                plan = await self._plan(hidden, kwargs)
                if graded and any(t.requires_grad for t in (hidden, *plan.bound.tensors)):
                    raise UnsupportedError("flow.acall is not differentiable; call flow(...) or use torch.no_grad()")
                if hidden.numel() == 0:
                    return hidden.clone()
                return (await plan.forward((hidden, *plan.bound.tensors)))[0]
        except TimeoutError as error:
            raise DeadlineError(f"a call of layers {self.start}:{self.stop} did not end in {seconds:g} s") from error

    def plan(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Plan:
        """Route and bind one call, without running it."""
        return self._wait(self._plan(hidden, kwargs))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return wait(work, self._options.timeout, f"a call of layers {self.start}:{self.stop}")

    async def _plan(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Plan:
        check_hidden(hidden, self.ends.hidden_size)
        route = await self.peers.route(*self.span, self._options.peers_blocked)
        batch, seq, _ = hidden.shape
        bound = bind(route, self.span, kwargs, {"batch": batch, "seq": seq, "key": seq})
        limits = [hop.hello.get("limits", {}).get("batch_tokens") for hop in route]  # what each worker takes at once
        tokens = min([self._options.batch_tokens, *(limit for limit in limits if limit)])
        rows = max(1, tokens // max(1, seq))
        cuts = tuple((at, min(at + rows, batch)) for at in range(0, batch, rows))
        return Plan(self.peers, tuple(route), bound, cuts, self._options)

    # ---- the client's own part of the model

    def inputs(self, texts: str | Sequence[str] | Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
        """Embed texts, token ids or a tokenizer's output: the arguments of a call, ``flow(**flow.inputs("Hello"))``.

        ``hidden``, ``attention_mask`` and, where the family's blocks take them, ``position_ids``. Texts of different
        lengths are padded on the left. Positions count unmasked tokens, as ``generate`` does.
        """
        ids, mask = token_ids(self.ends, texts)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        out = {"hidden": self.embed(ids, position_ids=positions), "attention_mask": mask}
        return {**out, "position_ids": positions} if self.ends.takes_positions else out

    def kwargs(self) -> dict[str, Spec]:
        """The kwargs that some of this flow's layers take beside attention_mask and position_ids."""
        route = self._wait(self.peers.route(*self.span, self._options.peers_blocked))
        return {n: spec for hop in route for n, spec in hop.schema.kwargs.items() if spec.group != "call"}

    def embed(self, input_ids: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        """Token ids (batch, seq) to hidden (batch, seq, hidden), with learned positions where the family has them."""
        return self.ends.embed(input_ids, position_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """The final norm and language-model head: hidden (batch, seq, hidden) to logits (batch, seq, vocab)."""
        return self.ends.head(hidden)

    def session(self, max_length: int) -> Any:
        """Keys and values kept on the workers over steps, up to ``max_length`` columns; a context manager."""
        from kwflow.session import Session

        if self._options.dtype:
            raise UnsupportedError("a session runs in the workers' dtype; options(dtype=) is for calls")

        return Session(self, max_length)

    # ---- lifetime

    def close(self) -> None:
        """Close the links of this flow and of its slices."""
        self.peers.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Plan:
    """One call, routed and bound: which rows go through which hops with which part of the kwargs."""

    peers: Peers
    route: tuple[Hop, ...]
    bound: Bound
    cuts: tuple[Span, ...]
    options: Options

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return wait(work, self.options.timeout, f"a call of layers {self.bound.start}:{self.bound.stop}")

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
            self.peers.failed(error)
            raise
        if not isinstance(reply.tree, list):
            raise WorkerFailed("the reply carries no list of tensors", peer=hop.peer, span=hop.span)
        return reply.tree

    async def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
        """Values, and each sub-batch's hidden before every hop; sub-batches run through the pipeline at once."""
        turn = asyncio.Semaphore(IN_FLIGHT)

        async def one(rows: Span) -> list[Tensor]:
            async with turn:
                seen = [tensors[0].detach()[rows[0] : rows[1]]]
                for hop in self.route:
                    bound, keep = self.bound.part(rows, hop.span)
                    (out,) = await self.send(hop, bound, (), [seen[-1], *bound.tensors])
                    seen.append(check_reply(out, seen[-1], hop))
                return seen

        runs = await all_or_first_error([one(rows) for rows in self.cuts])
        last = [run.pop() for run in runs]
        return (last[0] if len(last) == 1 else torch.cat(last)), runs

    async def backward(
        self, cotangent: Tensor, needed: Sequence[bool], boundaries: Sequence[Sequence[Tensor]]
    ) -> list[Tensor | None]:
        """Gradients of hidden and every kwarg tensor; each worker recomputes its span, asked for what is needed."""
        turn = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int) -> list[tuple[int, Tensor]]:
            async with turn:
                rows, gradients = self.cuts[number], []
                back: Tensor | None = cotangent[rows[0] : rows[1]]
                for at in reversed(range(len(self.route))):
                    hop = self.route[at]
                    bound, keep = self.bound.part(rows, hop.span)
                    leaves = [i for i, index in enumerate(keep) if needed[1 + index]]
                    upstream = needed[0] or any(self._acts_before(hop, i) for i, need in enumerate(needed[1:]) if need)
                    wanted = ([0] if upstream else []) + [1 + i for i in leaves]
                    if not wanted:
                        break
                    assert back is not None
                    operation = {"vjp": wanted, "given": [0]}
                    found = await self.send(hop, bound, (operation,), [boundaries[number][at], *bound.tensors, back])
                    if len(found) != len(wanted):
                        raise WorkerFailed(
                            f"{len(found)} gradients for {len(wanted)} inputs", peer=hop.peer, span=hop.span
                        )
                    answer = dict(zip(wanted, found, strict=True))
                    for i in leaves:
                        grad = answer[1 + i]
                        if grad is not None:
                            gradients.append((1 + keep[i], self._whole(grad, keep[i], rows, hop.span)))
                    back = answer.get(0)
                    if back is None:
                        break
                if back is not None and needed[0]:
                    whole = back.new_zeros((self.cuts[-1][1], *back.shape[1:]))
                    whole[rows[0] : rows[1]] = back
                    gradients.append((0, whole))
                return gradients

        found = await all_or_first_error([one(number) for number in range(len(self.cuts))])
        totals: list[Tensor | None] = [None] * len(needed)
        for index, grad in (pair for gradients in found for pair in gradients):
            held = totals[index]
            totals[index] = grad if held is None else held + grad
        return totals

    def _acts_before(self, hop: Hop, leaf: int) -> bool:
        """Whether a kwarg acts on layers before this hop, so that the cotangent must go on."""
        group = self.bound.leaves[leaf].group
        return (group if isinstance(group, int) else self.bound.start) < hop.start

    def _whole(self, grad: Tensor, index: int, rows: Span, span: Span) -> Tensor:
        """Carry the gradient of a part back to the shape of the whole kwarg."""
        whole = self.bound.axed(index)
        of_rows = part(whole, "batch", *rows)
        grad = part_adjoint(grad, of_rows, "layer", span[0] - self.bound.start, span[1] - self.bound.start)
        return part_adjoint(grad, whole, "batch", *rows)

    def by_spans(self, tensors: Sequence[Tensor]) -> Tensor:
        """The same values with every derivative: one Function per worker span, ordinary torch ops around it."""
        outs = []
        for rows in self.cuts:
            hidden = tensors[0] if len(self.cuts) == 1 else tensors[0][rows[0] : rows[1]]
            for hop in self.route:
                bound, keep = self.bound.with_tensors(tensors[1:]).part(rows, hop.span)
                hidden = remote_call(self._perform(hop, bound), [hidden, *bound.tensors])
            outs.append(hidden)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _perform(self, hop: Hop, bound: Bound) -> Perform:
        def perform(operations: Operations, tensors: Sequence[Tensor]) -> list[Tensor | None]:
            return self.run(self.send(hop, bound, operations, [t.detach() for t in tensors]))

        return perform


class _FlowCall(torch.autograd.Function):
    """A whole call as one Function: plain first-order autograd, pipelined over sub-batches both ways."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        out, boundaries = plan.run(plan.forward(tensors))
        ctx.plan, ctx.boundaries = plan, boundaries  # a cache that backward reads and never consumes
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (cotangent,) = grad_outputs
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if cotangent is None:
            return (None, *(None for _ in tensors))
        if not torch.is_grad_enabled():
            return (None, *ctx.plan.run(ctx.plan.backward(cotangent, needed, ctx.boundaries)))
        wanted = [i for i, need in enumerate(needed) if need]
        # views: one tensor given twice, or a kwarg made from hidden, must get its own part of the gradient and no more
        own = [t.view_as(t) for t in tensors]
        out = ctx.plan.by_spans(own)
        found = torch.autograd.grad(out, [own[i] for i in wanted], cotangent, create_graph=True, allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
        return (None, *(grads.get(i) for i in range(len(tensors))))


def bind(route: Sequence[Hop], span: Span, kwargs: Mapping[str, Any], sizes: Mapping[str, int]) -> Bound:
    """Bind a call's kwargs to what its route takes, and look at the values that have limits."""
    bound = bind_kwargs([(hop.span, hop.schema) for hop in route], span, kwargs, sizes)
    for leaf, tensor in zip(bound.leaves, bound.tensors, strict=True):
        if leaf.what != "attention_mask" or is_wrapped(tensor):
            continue
        if len(leaf.axes) == 2 and not bool(((tensor == 0) | (tensor == 1)).all()):
            raise KwargError(f"attention_mask {describe(tensor)} 'batch key' holds other numbers than 0 and 1")
        if len(leaf.axes) == 4 and any(other.what.startswith("prompts") for other in bound.leaves):
            raise KwargError("prompts act at token positions, which a 4-D attention_mask leaves unsaid; give a 2-D one")
    return bound


def request_tree(hidden: Tensor, bound: Bound, given: Sequence[Tensor] = ()) -> dict[str, Any]:
    """What a request carries: hidden, kwargs, and the cotangents and tangents that its operations are given."""
    tree: dict[str, Any] = {"hidden": hidden}
    if bound.groups:
        tree["kwargs"] = bound.to_tree()
    if given:
        tree["given"] = list(given)
    return tree


def check_hidden(hidden: Any, width: int) -> None:
    """Raise ShapeError or KwargError unless hidden is a float tensor (batch, seq, width)."""
    if not isinstance(hidden, Tensor):
        raise KwargError(
            f"hidden is a {type(hidden).__name__}; give a tensor (batch, seq, {width}), as flow.inputs makes"
        )
    if not hidden.is_floating_point():
        raise KwargError(f"hidden is {describe(hidden)}; blocks take floating point (token ids go through flow.inputs)")
    if hidden.dim() != 3 or hidden.shape[2] != width:
        raise ShapeError(f"hidden is {describe(hidden)}; these blocks take (batch, seq, {width})")


def check_reply(out: Tensor | None, hidden: Tensor, hop: Hop) -> Tensor:
    """A reply must be what was asked for: the hidden's shape and dtype."""
    if not isinstance(out, Tensor) or out.shape != hidden.shape or out.dtype != hidden.dtype:
        got = describe(out) if isinstance(out, Tensor) else type(out).__name__
        raise WorkerFailed(f"answered {got} for a hidden {describe(hidden)}", peer=hop.peer, span=hop.span)
    return out


def token_ids(ends: Ends, texts: str | Sequence[str] | Mapping[str, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and mask (batch, seq) of texts, of ids, or of a tokenizer's output."""
    if isinstance(texts, str):
        texts = [texts]
    elif isinstance(texts, Mapping) or hasattr(texts, "input_ids"):  # a tokenizer may give lists
        texts = {name: torch.as_tensor(texts[name]) for name in ("input_ids", "attention_mask") if name in texts}  # type: ignore[index, operator]
    if isinstance(texts, Tensor):
        ids, mask = texts, torch.ones_like(texts)
    elif isinstance(texts, Mapping) or hasattr(texts, "input_ids"):
        ids = texts["input_ids"]  # type: ignore[call-overload]
        mask = texts["attention_mask"] if "attention_mask" in texts else torch.ones_like(ids)  # type: ignore[call-overload]
    elif isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        made = ends.tokenize(list(texts))
        ids, mask = made["input_ids"], made["attention_mask"]
    else:
        raise KwargError("flow.inputs takes a text, a list of texts, token ids (batch, seq) or a tokenizer's output")
    if ids.dim() != 2 or ids.is_floating_point() or mask.shape != ids.shape:
        raise ShapeError(f"token ids are {describe(ids)} and the mask {describe(mask)}; both are int (batch, seq)")
    if ids.shape[1] == 0:
        raise KwargError("there is not one token: the text is empty")
    return ids, mask


def wait(work: Coroutine[Any, Any, Any], timeout: float, what: str) -> Any:
    """Run on the network thread and wait here. Raises DeadlineError."""
    try:
        return link.run(work, timeout)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not end in {timeout:g} s (flow.options(timeout=…))") from error


def _in_forward_mode(tensors: Sequence[Tensor]) -> bool:
    """Whether a dual number of torch.autograd.forward_ad is among the inputs."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if t.is_floating_point())


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


__all__ = ["Axed", "Ends", "Flow", "Hop", "Options", "Peers", "Plan"]
