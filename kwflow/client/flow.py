"""The client: a Flow is a function of hidden and kwargs over layers of the model, wherever they run.

    flow(hidden, **kwargs): bind -> route -> cut rows and layers -> requests -> join

Links and routing are injected (``Peers``): nothing here knows libp2p or transformers. Control is never a kwarg: it
is set by ``flow.options(...)``.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import in_forward_mode, is_wrapped
from kwflow.client import here, probing
from kwflow.client.activations import Activations
from kwflow.client.call import Estimate, Plan, PlanCall, join_rows, schemas_of
from kwflow.client.harvest import harvest
from kwflow.client.inputs import Ends, _no_capture, token_ids
from kwflow.client.options import Options
from kwflow.client.page import Kwargs, flow_page
from kwflow.client.peers import Hop, Peers
from kwflow.client.probing import Probed
from kwflow.client.request import Dispatcher
from kwflow.client.retry import Retry
from kwflow.client.session import Session
from kwflow.client.upload import upload_all
from kwflow.errors import DeadlineError, KwargError, SpanError, UnsupportedError
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.bind import Schemas, bind_kwargs, in_all
from kwflow.kwargs.bound import Bound, Span
from kwflow.kwargs.capture import Capture, Picked, pick
from kwflow.kwargs.hidden import check_hidden
from kwflow.kwargs.points import with_layers
from kwflow.kwargs.positions import Columns
from kwflow.kwargs.tree import as_int
from kwflow.wire import channel, loop
from kwflow.wire.hello import Hello


class Flow:
    """Layers ``[start, stop)`` of a model as one function; ``flow[a:b]`` is a Flow too.

        out = flow(hidden, attention_mask=mask, steer={12: v})       # (batch, seq, hidden), before the final norm

    Differentiable with respect to hidden and every float kwarg, by plain autograd and by torch.func.
    """

    def __init__(self, ends: Ends, peers: Peers, span: Span, options: Options | None = None):
        self.ends, self.peers, self.span, self.settings = ends, peers, span, options or Options()

    @property
    def start(self) -> int:
        return self.span[0]

    @property
    def stop(self) -> int:
        return self.span[1]

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokenizer(self) -> Any:
        """The model's own (transformers'), padding on the left. Raises ModelError where its folder has none."""
        return self.ends.tokenizer

    @property
    def config(self) -> Any:
        """The model's config, transformers' own; to be read: what is changed in it changes nothing on the workers."""
        return self.ends.config

    def __getitem__(self, layers: slice) -> Flow:
        """A slice by absolute layer numbers, within this flow's span."""
        if not isinstance(layers, slice) or layers.step not in (None, 1):
            number = as_int(layers)
            first = self.start if number is None or not self.start <= number < self.stop else number
            raise SpanError(f"flow[{layers!r}]: give a slice of layers such as flow[{first}:{first + 1}]")
        start = self.start if layers.start is None else as_int(layers.start)
        stop = self.stop if layers.stop is None else as_int(layers.stop)
        if start is None or stop is None or not self.start <= start < stop <= self.stop:
            bounds = ":".join("" if end is None else repr(end) for end in (layers.start, layers.stop))
            raise SpanError(f"flow[{bounds}] does not lie in this flow's layers {self.start}:{self.stop} (absolute)")
        return Flow(self.ends, self.peers, (start, stop), self.settings)

    def options(self, **changes: Any) -> Flow:
        """A Flow that runs otherwise: ``timeout`` seconds, ``batch_tokens``, ``peers_blocked``, ``dtype="float64"``,
        ``push`` (in sessions, workers hand outputs on to each other)."""
        return Flow(self.ends, self.peers, self.span, self.settings.changed(changes))

    def __repr__(self) -> str:
        dtype = str(self.ends.dtype).removeprefix("torch.")
        workers = workers_run(self.peers.hellos(), self.span)
        also = "" if workers in ("", dtype) else f", workers {workers}"
        return f"Flow({self.ends.name}, layers {self.start}:{self.stop}, {dtype}{also})"

    def _repr_html_(self) -> str:
        return flow_page(repr(self), self.ends.layers, self.span, self.peers, self.settings.peers_blocked)

    # ---- calls

    @torch.compiler.disable(reason="the layers run on workers")
    def __call__(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run the layers on ``hidden`` (batch, seq, hidden) with kwargs; returns the residual before the final norm.

        Raises UnknownKwarg, KwargError, ShapeError, AxesError, SpanError before anything is sent; WorkerFailed,
        NoRoute or DeadlineError by ``options(timeout=)``.
        """
        _no_capture(kwargs)
        return self._outputs(hidden, kwargs)[0]

    @torch.compiler.disable(reason="the layers run on workers")
    def capture(
        self, points: Mapping[str, Any], hidden: Tensor, *, at: Any = "all", mean: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Capture]:
        """A call that also brings back what is at points of layers.

            out, acts = flow.capture({"resid": [3, 8], "attn": [3]}, at="prompt[-1]", **x)
            acts["resid", 3]                                             # (batch, pos, hidden), acts.mask (batch, pos)

        Layers may be "all", a slice, or counted from the end, -1. Only what is asked for travels. Differentiable, as
        the output is. See ``kf.Capture``; at=: ``kwargs.positions``.
        """
        acts = Capture(with_layers(points, self.span), at=at, mean=mean)
        picked = self._picked(at, hidden, kwargs)
        out, *values = self._outputs(hidden, {**kwargs, "capture": acts})
        acts.take(picked, values, hidden.shape[0])
        return out, acts

    @torch.compiler.disable(reason="the layers run on workers")
    def probe(
        self, points: Mapping[str, Any], hidden: Tensor, *, at: Any = "all", **kwargs: Any
    ) -> tuple[Tensor, Probed]:
        """A call whose activations have gradients: of anything made from the output, at any number of points.

            out, acts = flow.probe({"resid": "all", "head": [3, 8]}, **x)
            loss(flow.head(out)).backward()
            acts["resid", 8].grad                                        # (batch, pos, hidden), as acts["resid", 8] is

        Or ``torch.autograd.grad(loss, acts["resid", 8])``. Attribution patching (Nanda 2023) is ``(clean - acts) *
        grad``. The activations travel both ways, and the gradients back. Points as :meth:`capture`'s, but for
        ``pattern``; edits of the same call have acted before. For torch.func, add zeros with ``kf.add`` instead.
        """
        wanted, picked = Capture(with_layers(points, self.span), at=at), self._picked(at, hidden, kwargs)
        if not torch.is_grad_enabled():
            raise KwargError("flow.probe brings activations for gradients, and torch.no_grad() is on; use flow.capture")
        acts = probing.leaves(wanted, picked, hidden, schemas_of(self._route()))
        edits = kwargs.get("edit") or []
        edits = [*(edits if isinstance(edits, Sequence) else [edits]), *probing.adding(acts, at)]
        out, *values = self._outputs(hidden, {**kwargs, "edit": edits, "capture": wanted})
        wanted.take(picked, [value.detach() for value in values], hidden.shape[0])
        probing.fill(acts, wanted)
        return out, acts

    def _picked(self, at: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Picked:
        """The tokens that ``at`` means in a call."""
        check_hidden(hidden, self.ends.hidden_size)
        if kwargs.get("capture") is not None or hidden.numel() == 0:
            raise KwargError("flow.capture takes points, and a hidden with at least one row and column")
        mask = kwargs.get("attention_mask")
        return pick(at, Columns.of_call(mask.tensor if isinstance(mask, Axed) else mask, hidden.shape[1]))

    def _outputs(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """Hidden, then what is captured."""
        cuts, kwargs = here.taken(kwargs, self.span)
        if cuts:
            return cuts.run(hidden, self.plan(hidden, kwargs).bound, self._run_span)
        with self.dispatcher.retry() as retry:
            return self._run(self._plan(hidden, kwargs, retry), hidden, retry)

    def _run_span(self, span: Span, hidden: Tensor, bound: Bound) -> Sequence[Tensor]:
        return self[span[0] : span[1]].run_bound(hidden, bound)

    def run_bound(self, hidden: Tensor, bound: Bound) -> Sequence[Tensor]:
        """Run the layers with kwargs that are bound to them already: hidden, then what is captured."""
        with self.dispatcher.retry() as retry:
            return self._run(self._cut(self.dispatcher.route(self.span, retry), bound, hidden), hidden, retry)

    def _run(self, plan: Plan, hidden: Tensor, retry: Retry) -> Sequence[Tensor]:
        tensors = (hidden, *plan.bound.tensors)
        if hidden.numel() == 0:
            reached = [t.sum().to(hidden.dtype) * 0 for t in plan.bound.tensors if t.requires_grad]
            return [sum(reached, hidden.clone())]
        if any(is_wrapped(t) for t in tensors) or in_forward_mode(tensors):
            return plan.by_spans(tensors, retry)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            # of inference tensors nobody can tell in backward whether they were changed since, nor save them for it
            tensors = tuple(t.clone() if t.is_inference() else t for t in tensors)
            plan_of_clones = replace(plan, bound=plan.bound.with_tensors(tensors[1:]))
            return PlanCall.apply(plan_of_clones, retry, *tensors)  # type: ignore[no-any-return]
        return plan.forward(tensors, retry)[0]

    async def acall(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """The async form of a call, from any event loop; without gradients."""
        _no_capture(kwargs)
        here.without(kwargs, "flow.acall")
        retry = self.dispatcher.retry()
        try:
            async with asyncio.timeout(retry.timeout):
                plan = await self._planned(hidden, kwargs, retry)
                tensors = (hidden, *plan.bound.tensors)
                if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                    raise UnsupportedError("flow.acall is not differentiable; call flow(...) or use torch.no_grad()")
                if hidden.numel() == 0:
                    return hidden.clone()
                runs = await asyncio.wrap_future(loop.submit(plan.run(plan.split(tensors), retry)))
                return join_rows(runs)[0]
        except TimeoutError as error:
            what = f"a call of layers {self.start}:{self.stop}"
            raise DeadlineError(f"{what} did not end in {retry.timeout:g} s (flow.options(timeout=…))") from error

    def check(self, hidden: Tensor, **kwargs: Any) -> None:
        """Check a call as it is checked before it is sent, and send nothing. hidden and values may be on "meta"."""
        self.plan(hidden, here.taken(kwargs, self.span)[1])

    def estimate(self, hidden: Tensor, **kwargs: Any) -> Estimate:
        """Which workers a call would go through, in how many sub-batches, and how many bytes; nothing is sent.

        print(flow.estimate(**x, capture=kf.Capture(resid=range(30))))
        """
        cuts, kwargs = here.taken(kwargs, self.span)
        plan = self.plan(hidden, kwargs)
        if not cuts:
            return plan.estimate(hidden)
        parts = [(self[start:stop], plan.bound.part(None, (start, stop))[0]) for start, stop in cuts.spans()]
        return cuts.estimate([flow.plan_bound(hidden, bound).estimate(hidden) for flow, bound in parts])

    def plan(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Plan:
        """Route and bind one call, without running it."""
        return self._plan(hidden, kwargs, self.dispatcher.retry())

    def plan_bound(self, hidden: Tensor, bound: Bound) -> Plan:
        """The same with kwargs that are bound to these layers already."""
        return self._cut(self.dispatcher.route(self.span, self.dispatcher.retry()), bound, hidden)

    @property
    def dispatcher(self) -> Dispatcher:
        """What brings this flow's requests to workers."""
        return Dispatcher(self.peers, self.settings)

    def _route(self) -> Sequence[Hop]:
        return self.dispatcher.route(self.span, self.dispatcher.retry())

    def _bind(self, hidden: Tensor, kwargs: Mapping[str, Any], schemas: Schemas) -> Bound:
        """A caller's tensors are computed with on the caller's thread only: torch.func's state is of a thread."""
        batch, seq, _ = hidden.shape
        return bind_kwargs(schemas, self.span, kwargs, {"batch": batch, "seq": seq, "key": seq})

    async def _planned(self, hidden: Tensor, kwargs: Mapping[str, Any], retry: Retry) -> Plan:
        """The async form of :meth:`_plan`."""
        check_hidden(hidden, self.ends.hidden_size)
        route = await self.dispatcher.aroute(self.span, retry, functools.partial(self._bind, hidden, kwargs))
        return self._cut(route, self._bind(hidden, kwargs, schemas_of(route)), hidden)

    def _plan(self, hidden: Tensor, kwargs: Mapping[str, Any], retry: Retry) -> Plan:
        check_hidden(hidden, self.ends.hidden_size)
        route = self.dispatcher.route(self.span, retry, functools.partial(self._bind, hidden, kwargs))
        return self._cut(route, self._bind(hidden, kwargs, schemas_of(route)), hidden)

    def _cut(self, route: Sequence[Hop], bound: Bound, hidden: Tensor) -> Plan:
        """Cut a call's rows by what the workers take at once."""
        batch, seq, _ = hidden.shape
        limits = [hop.hello.limits.batch_tokens for hop in route]  # what each worker takes at once
        tokens = min([self.settings.batch_tokens, *(limit for limit in limits if limit)])
        rows = max(1, tokens // max(1, seq))
        cuts = tuple((at, min(at + rows, batch)) for at in range(0, batch, rows))
        return Plan(self.peers, tuple(route), bound, cuts, self.settings)

    # ---- the client's own part of the model

    def inputs(
        self, texts: str | Sequence[str] | Mapping[str, Tensor] | Tensor, *, prefix: int = 0
    ) -> dict[str, Tensor]:
        """Embed texts, token ids or a tokenizer's output: the arguments of a call, ``flow(**flow.inputs("Hello"))``.

        ``hidden``, ``attention_mask`` and, where the family's blocks take them, ``position_ids``. Texts of different
        lengths are padded on the left. Positions count unmasked tokens, as ``generate`` does, from ``prefix`` on: the
        columns of a ``prefix_kv=``.
        """
        before = as_int(prefix)
        if before is None or before < 0:
            raise KwargError(f"prefix is {prefix!r:.40}; give the number of columns of the prefix_kv that is to come")
        ids, mask = token_ids(self.ends, texts)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0) + before
        out = {"hidden": self.embed(ids, position_ids=positions), "attention_mask": mask}
        return {**out, "position_ids": positions} if self.ends.takes_positions else out

    def kwargs(self) -> Kwargs:
        """The kwargs that some of this flow's layers take beside attention_mask and position_ids: a dict of Specs."""
        return Kwargs(
            {n: spec for hop in self._route() for n, spec in hop.schema.kwargs.items() if spec.group != "call"}
        )

    def projections(self) -> dict[str, tuple[int, int]]:
        """What ``lora`` and ``ia3`` may name in all of this flow's layers: features in and out, by dotted name."""
        return in_all([hop.schema.projections for hop in self._route()])

    def embed(self, input_ids: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        """Token ids (batch, seq) to hidden (batch, seq, hidden), with learned positions where the family has them."""
        return self.ends.embed(input_ids, position_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """The final norm and language-model head: hidden (batch, seq, hidden) to logits (batch, seq, vocab)."""
        check_hidden(hidden, self.ends.hidden_size)
        return self.ends.head(hidden)

    def session(self, max_length: int | None = None, *, replay: str = "stepwise") -> Session:
        """Keys and values kept on the workers over steps; a context manager.

        ``max_length``: columns that the workers keep room for from the first step on, and refuse at once where they
        have too little (WorkerFull). None: room grows as it is needed, and a worker that is full then is replaced by
        one that is not; workers of older versions keep room for 2048 columns behind the first step's.
        ``replay``: how the steps of a worker that failed are repeated on others: "stepwise", one by one, bitwise the
        same where the workers' numerics are; "merged", joined where axes and rotary scaling allow, faster and equal but
        for rounding.
        """
        if self.settings.dtype:
            raise UnsupportedError("a session runs in the workers' dtype; options(dtype=) is for calls")

        return Session(self.ends, self.dispatcher, self.span, max_length, replay)

    def timed(self) -> AbstractContextManager[list[channel.Timing]]:
        """Collect where the time of the calls, gradients and steps inside goes: one Timing for each request.

            with flow.timed() as timings:
                out = flow(**x)
            print(*timings, sep="\\n")               # by worker: network, queue and compute seconds, bytes both ways
            kf.notebook.latency(timings)

        Of all that goes over this flow's links: its slices, sessions and models too, from any thread. A call makes one
        request for each worker and sub-batch. Requests that failed are left out.
        """
        return self.peers.pool.timed()

    def harvest(
        self,
        texts: Iterable[Any],
        points: Mapping[str, Any],
        folder: str | os.PathLike[str],
        *,
        at: Any = "all",
        max_tokens: int | None = None,
        batch_size: int = 32,
        shard_mb: float = 256,
    ) -> Activations:
        """Keep the activations of texts in a folder; called again with the same, it goes on where it stopped.

            flow.harvest(texts, {"resid": [8], "mlp": [8]}, "acts/", max_tokens=128)

        ``texts``: texts, or each one's token ids (seq,); a list, or an iterator, which a run that goes on goes through
        again. ``points``, ``at``: as flow.capture's, ``at`` the same for every text; pads are left out.
        ``max_tokens``: of each text only so many. ``batch_size``: texts of one call. ``shard_mb``: a shard's most
        megabytes (10⁶ bytes), if not one text alone has more; some four times that is held in memory at most.

        Values are those of ``flow.capture``, in its dtype, without gradients; a run that was interrupted, or was given
        more texts later, gives the same files where batch_size and shard_mb are the same (the last shard before may be
        shorter). Raises KwargError, naming what differs, for a folder that was begun with other points, weights or
        texts; ModelError for a damaged one. See docs/activations.md.
        """
        return harvest(
            self, texts, points, folder, at=at, max_tokens=max_tokens, batch_size=batch_size, shard_mb=shard_mb
        )

    # ---- what workers keep

    def upload(self, tensor: Any, *, idle: float = 600.0) -> Any:
        """Keep a tensor on the workers: it is sent to each that needs it once, and named from then on.

            with flow.upload(prompts) as D:                     # (pre, hidden)
                for x in batches:
                    out = flow(**x, prompts=D)                  # D stands wherever a tensor may: kf.add(D, 12), …

        What it gives is a tensor with the values that ``tensor`` has now; gradients reach ``tensor``. A tree of tensors
        (a call's kwargs) comes back as a tree of these. It goes out at its first use, and again by itself to a worker
        that comes new or dropped it: after ``idle`` seconds without use, or at ``close()``. See docs/uploads.md.

        Raises KwargError, UnsupportedError (in a torch.func transform); a call raises WorkerFull where nobody has room.
        """
        return upload_all(self.peers.pool, tensor, idle)

    # ---- lifetime

    def close(self) -> None:
        """Close the links of this flow and of its slices."""
        self.peers.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def workers_run(hellos: Sequence[Hello], span: Span) -> str:
    """How the workers that were met compute these layers: ``nf4 bfloat16``, or each by its layers where they differ."""
    spans: dict[str, list[str]] = {}
    for hello in hellos:
        start, stop = hello.span
        if max(start, span[0]) < min(stop, span[1]):
            spans.setdefault(hello.computes_in, []).append(f"{start}:{stop}")
    if len(spans) < 2:
        return "".join(spans)
    return ", ".join(f"{how} {' '.join(sorted(set(layers)))}" for how, layers in spans.items())
