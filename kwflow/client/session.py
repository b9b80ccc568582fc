"""A session: keys and values kept on the workers, step after step, with kwargs that may change at each.

Every step carries its start column; a worker crops to it and appends. So a step that was interrupted is simply taken
again, and a rollback is a smaller start column. Kwargs are sent once: what equals the step before's, a worker has.
What each worker was given is kept here, so that others can take its place (``replay``). Not differentiable.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import is_wrapped, plain
from kwflow.background import disown_in_forks, finalize
from kwflow.client.call import schemas_of
from kwflow.client.here import without
from kwflow.client.inputs import Ends, token_ids
from kwflow.client.page import session_page
from kwflow.client.peers import Hop
from kwflow.client.replay import folded
from kwflow.client.request import Dispatcher
from kwflow.client.retry import Retry
from kwflow.client.stage import Reorder, Replay, Stage, Step
from kwflow.client.stages import Stages, free
from kwflow.errors import DeadlineError, KwargError, SessionError, ShapeError
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.axes import Axed, describe
from kwflow.kwargs.bind import Schemas, bind_kwargs
from kwflow.kwargs.bound import Bound, Span
from kwflow.kwargs.capture import Capture, pick
from kwflow.kwargs.hidden import check_hidden
from kwflow.kwargs.positions import Columns, from_the_end, token_position
from kwflow.kwargs.tree import as_int
from kwflow.wire import loop

MODES = ("stepwise", "merged")
# what a session knows of its columns and rows: tensors that are never changed, numbers, and two collections
_KNOWN = ("position", "prefix", "batch", "token_ids", "_mask", "_positions", "_prompt_columns", "_end_was", "_four_d")
_KNOWN += ("_reorders", "_reorder_count", "_reorders_sent")


@dataclass(frozen=True, eq=False)
class Binding:
    """A step's kwargs as they are sent, and what the session remembers of them when it succeeds."""

    kwargs: Bound
    mask: Tensor | None  # (batch, stop) bool, of all columns
    positions: Tensor | None  # (batch, stop), of all columns; None: each column's own number
    columns: Columns


class Session:
    """Steps of one batch through a flow; made by ``flow.session()``.

        with flow.session() as s:
            out = s.step(**flow.inputs(["The weather in Paris is"]))      # (1, 5, hidden)
            out = s.step(**s.inputs(next_ids), steer={12: v})             # (1, 1, hidden)

    ``position``: columns so far; ``prefix``: columns of the first step's prefix_kv before them, for which max_length
    has room too; where that is None, room grows as it is needed. A remembered attention_mask is extended by ones when a
    step gives none. When a worker fails, others take its place and its steps again, as ``mode`` says (``replay=``), and
    the step goes on; ``replays`` tells.
    """

    def __init__(
        self, ends: Ends, dispatcher: Dispatcher, span: Span, max_length: int | None = None, replay: str = "stepwise"
    ):
        columns = as_int(max_length)
        if max_length is not None and (columns is None or columns < 1):
            raise SessionError(
                f"max_length is {max_length!r}; give the number of columns to keep room for, or None: room grows"
            )
        if replay not in MODES:
            raise KwargError(f"replay is {replay!r:.40}; a session repeats its steps {' or '.join(map(repr, MODES))}")
        self.ends, self.dispatcher, self.span = ends, dispatcher, span
        self.max_length, self.mode = columns, replay
        self.position = self.prefix = 0
        self.batch: int | None = None
        self.closed = False
        self._mask: Tensor | None = None  # (batch, position) bool
        self._positions: Tensor | None = None  # (batch, position) of every column, once some were given
        self.token_ids: Tensor | None = None  # (batch, position), -1 at pads and where not known; None: none were given
        self._prompt_columns = 0  # of the columns, how many were said to be of the prompt
        self._end_was: str | None = None  # an at= that was counted from the prompt's end as it was known then
        self._four_d: int | None = None  # the column where the first 4-D mask came
        self._reorders: list[Reorder] = []  # not yet on every worker
        self._reorder_count = 0
        self._reorders_sent: set[int] = set()  # the last one of each step that was sent, from the last success on
        self._stages: Stages | None = None  # its workers, from the first step on
        self._captures: weakref.WeakSet[Capture] = weakref.WeakSet()  # which follow its rows and columns
        self._running: concurrent.futures.Future[list[Tensor]] | None = None
        self._turn = threading.Lock()
        self._freed: Callable[[], object] = lambda: None
        self._forked = False
        disown_in_forks(self)

    def forked(self) -> None:
        """In a forked child: its keys and values are the parent's."""
        self._forked = self.closed = True
        self._turn, self._freed, self._running = threading.Lock(), lambda: None, None

    def step(
        self, hidden: Tensor, *, phase: str | None = None, prompt_length: int | Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Append ``hidden`` (batch, seq, hidden) to the session and return the layers' output for it.

        kwargs as in a call. ``attention_mask`` covers all columns so far, these included. ``phase``: "prompt" or
        "generated", for edits whose ``at=`` names one; ``prompt_length``: tokens of the whole prompt, or of each row's
        (batch,), where it comes in several steps. An interrupted step did not happen: take it again.
        """
        if phase not in (None, "prompt", "generated"):
            raise SessionError(f"phase is {phase!r}; a step is of the 'prompt' or 'generated'")
        check_hidden(hidden, self.ends.hidden_size)
        prompt = {None: None, "prompt": self.position + hidden.shape[1], "generated": self._prompt_columns}[phase]
        return self.step_expanded(hidden, kwargs, repeats=1, prompt=prompt, prompt_length=prompt_length)

    @torch.compiler.disable(reason="the layers run on workers")
    def step_expanded(
        self,
        hidden: Tensor,
        kwargs: Mapping[str, Any],
        *,
        repeats: int,
        prompt: int | None = None,
        prompt_length: int | Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """``repeats``: the rows are that many copies of each row that the kwargs were given for (beams).

        ``prompt``: how many of the session's columns are of the prompt; None: nobody said. ``ids``: the tokens of the
        last columns (batch, up to seq), to remember.
        """
        with self._turn:
            self._ready(hidden)
            without(kwargs, "a session")
            retry = self.dispatcher.retry()
            capture = kwargs.get("capture")
            if isinstance(capture, Capture):
                capture.belong(self)
            bind = functools.partial(self._bind, hidden, kwargs, repeats, prompt, prompt_length)
            stages = self._stages or self._opened(retry, bind)
            binding = bind(schemas_of(stages.hops))
            if hidden.numel() == 0:
                return hidden.clone()
            self._settle(retry)
            step = Step(self.position, plain(hidden).clone(), binding.kwargs.plain(), tuple(self._reorders))
            self._reorders_sent.add(self._reorder_count)
            self._running = loop.submit(stages.step(step, self.dispatcher.options.push, retry))
            try:  # an interrupt leaves it running; the next step waits for it
                out, *captured = self._running.result(retry.patience)
            except TimeoutError as error:
                self._running.cancel()
                raise DeadlineError(f"a step did not end in {retry.timeout:g} s (flow.options(timeout=…))") from error
            except concurrent.futures.CancelledError as error:
                raise SessionError("the session was closed in the middle of a step") from error
            self._running = None
            self.prefix = self.prefix if self.position else prefix_kv.length(binding.kwargs)
            self.token_ids = self._token_ids_with(ids, binding.mask, *hidden.shape[:2])
            self.position += hidden.shape[1]
            self.batch = hidden.shape[0]
            self._mask, self._positions = binding.mask, binding.positions
            if prompt is not None:
                self._prompt_columns = prompt
                self._note_end(kwargs, binding.columns, prompt_length)
            self._reorders.clear()
            self._reorders_sent = {self._reorder_count}  # which every worker has
            if isinstance(capture, Capture):
                self._captures.add(capture)
                nothing = capture.nothing(hidden, schemas_of(self._hops), self.prefix + self.position)
                capture.take(pick(capture.at, binding.columns), captured or nothing, self.batch)
            return out.to(hidden.device)

    @property
    def replays(self) -> list[Replay]:
        """Which workers were replaced in the middle of this session, by whom, and how."""
        return [] if self._stages is None else self._stages.replays

    @property
    def workers(self) -> list[Stage]:
        """The workers that hold its keys and values, in the order of their layers; none before the first step."""
        return [] if self._stages is None else list(self._stages.stages)

    @property
    def carried(self) -> set[str]:
        """The workers whose output goes to the next one through this client: they cannot reach it, or do so wrongly."""
        return set() if self._stages is None else set(self._stages.carried)

    def inputs(self, ids: Tensor | Sequence[str] | str | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embed the next token ids (batch, seq): positions go on from each row's last token."""
        tokens, mask = token_ids(self.ends, ids)
        mask = mask.cpu()
        if self.batch is not None and tokens.shape[0] != self.batch:
            raise ShapeError(f"token ids are {describe(tokens)}; the session has {self.batch} rows")
        past = self._mask if self._mask is not None else torch.ones(tokens.shape[0], self.position, dtype=torch.bool)
        whole = torch.cat([past.to(torch.long), mask.to(torch.long)], 1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)[:, self.position :] + self.prefix
        if self._positions is not None and self.position:
            positions = self._positions[:, -1:] + mask.long().cumsum(-1)
        out = {"hidden": self.ends.embed(tokens, positions.to(tokens.device))}
        if not bool(whole.all()):
            out["attention_mask"] = whole
        return {**out, "position_ids": positions} if self.ends.takes_positions else out

    def reorder(self, ids: Sequence[int] | Tensor) -> None:
        """Give the rows another order, with repeats: row ``i`` becomes what row ``ids[i]`` was (a beam reorder)."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        rows = [row for row in map(as_int, numbers) if row is not None]
        self.check_open()
        if self.batch is None:
            raise SessionError("reorder before the first step: the session has no rows yet")
        if not len(rows) == len(numbers) == self.batch or not all(0 <= row < self.batch for row in rows):
            raise SessionError(f"reorder takes {self.batch} row numbers below {self.batch}, got {ids!r:.80}")
        with self._turn:
            self._reorder_count += 1
            self._to_reorder([(self._reorder_count, rows)])
            index = torch.tensor(rows, dtype=torch.long)
            for capture in self._captures:
                capture.reorder(index)
            self._mask = None if self._mask is None else self._mask[index]
            self._positions = None if self._positions is None else self._positions[index]
            self.token_ids = None if self.token_ids is None else self.token_ids[index]

    def _to_reorder(self, more: Sequence[Reorder]) -> None:
        """Let the next step reorder rows so, too: all that no worker can have a part of as one."""
        ends = self._reorders_sent if self._stages is None else self._reorders_sent | self._stages.reordered
        self._reorders = folded(list({**dict(more), **dict(self._reorders)}.items()), ends)

    def rollback(self, position: int) -> None:
        """Forget the columns from ``position`` on; the next step starts there."""
        self.check_open()
        column = as_int(position)
        if column is None or not 0 <= column <= self.position:
            raise SessionError(f"rollback to {position!r}; the session has columns 0:{self.position}")
        position = column
        with self._turn:
            forgotten = [] if self._stages is None else self._stages.forget(position)
            self._to_reorder(forgotten)
            if not position:
                self._reorders.clear()
            self.position, self.prefix = position, self.prefix if position else 0
            self._prompt_columns = min(self._prompt_columns, position)
            self._end_was = self._end_was if position else None
            for capture in self._captures:
                capture.rollback(position)
            self._mask = None if self._mask is None else self._mask[:, :position]
            self._positions = None if self._positions is None or not position else self._positions[:, :position]
            self.token_ids = None if self.token_ids is None or not position else self.token_ids[:, :position]
            if self._four_d is not None and position <= self._four_d:
                self._four_d = None

    def fork(self) -> Session:
        """Another session that holds the same columns, to the last bit; from here on each goes its own way.

            with flow.session() as s:
                s.step(**flow.inputs(text))
                with s.fork() as steered:
                    steered.step(**steered.inputs(ids), steer={12: v})            # s knows nothing of it

        The workers keep keys and values for both. The fork's are computed again, by the steps that this session took,
        one by one, with the kwargs that were given, on the same workers: it costs their time, and the bytes of their
        hidden states, once more. A worker that has failed or has no room for both is replaced, in the fork alone, whose
        ``replays`` begin with this session's and say so. Captures stay this session's: the fork's steps take new ones.
        Raises SessionError for a closed session, WorkerFull, NoRoute and DeadlineError as a step does; this session is
        as before then.
        """
        self.check_open()
        other = Session(self.ends, self.dispatcher, self.span, self.max_length, self.mode)
        with self._turn:
            retry = self.dispatcher.retry()
            self._settle(retry)
            for name in _KNOWN:
                setattr(other, name, copy.copy(getattr(self, name)))
            if self._stages is not None and self.position:
                other._take_over(self._stages, retry)
        return other

    def _take_over(self, stages: Stages, retry: Retry) -> None:
        mine = self._use(Stages([], self.max_length, self.mode, self.dispatcher.peers.pool))
        taking = loop.submit(mine.take_over(stages, self.position, retry))
        try:
            taking.result(retry.patience)
        except TimeoutError as error:
            self.close()
            raise DeadlineError(f"a fork did not end in {retry.timeout:g} s (flow.options(timeout=…))") from error
        except concurrent.futures.CancelledError as error:
            raise SessionError("the session was closed in the middle of a fork") from error
        except BaseException:
            self.close()
            raise

    def check_open(self) -> None:
        """Raise SessionError for a closed session, and for one of the process that this one was forked from."""
        if self._forked:
            raise SessionError(
                "the session was opened before this process was forked, and its keys and values are the parent's; "
                "open another with flow.session(max_length=)"
            )
        if self.closed:
            raise SessionError("the session is closed; open another with flow.session()")

    def close(self) -> None:
        """Free the keys and values on the workers. A closed session takes no step."""
        self.closed = True
        self._freed()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        of = "" if self.max_length is None else f" of {self.max_length}"
        state = "closed" if self.closed else f"columns {self.prefix + self.position}{of}"
        state += f" with a prefix of {self.prefix}" if self.prefix else ""
        return f"Session({self.ends.name}, layers {self.span[0]}:{self.span[1]}, {state}, batch {self.batch})"

    def _repr_html_(self) -> str:
        return session_page(repr(self), self.workers, self.replays)

    # ---- one step

    def _opened(self, retry: Retry, check: Callable[[Schemas], object]) -> Stages:
        hops = self.dispatcher.route(self.span, retry, check)
        return self._use(Stages(hops, self.max_length, self.mode, self.dispatcher.peers.pool))

    def _use(self, stages: Stages) -> Stages:
        self._stages, self._freed = stages, finalize(self, free, stages)
        return stages

    @property
    def _hops(self) -> list[Hop]:
        return [] if self._stages is None else self._stages.hops

    def _ready(self, hidden: Tensor) -> None:
        self.check_open()
        check_hidden(hidden, self.ends.hidden_size)
        if self.batch is not None and hidden.shape[0] != self.batch:
            raise SessionError(f"the session has {self.batch} rows, hidden is {describe(hidden)}")

    def _prefix_length(self, bound: Bound, start: int, stop: int) -> int:
        """Columns of the prefix: this step's if it is the first, else the one there is. Raises SessionError."""
        step_prefix = prefix_kv.length(bound)
        if step_prefix and start:
            raise SessionError(
                f"prefix_kv stands before column 0, and the session has columns 0:{start}: give it with the first "
                f"step (rollback(0) begins again)"
            )
        prefix_length = self.prefix if start else step_prefix
        if self.max_length is not None and prefix_length + stop > self.max_length:
            also = f" behind a prefix of {prefix_length}" if prefix_length else ""
            raise SessionError(f"columns {start}:{stop}{also} do not fit max_length {self.max_length}")
        return prefix_length

    def _bind(
        self,
        hidden: Tensor,
        kwargs: Mapping[str, Any],
        repeats: int,
        prompt: int | None,
        prompt_length: int | Tensor | None,
        schemas: Schemas,
    ) -> Binding:
        batch, seq, _ = hidden.shape
        start, stop = self.position, self.position + seq
        step_kwargs = dict(kwargs)
        control = {name: _on_cpu(name, step_kwargs.pop(name, None)) for name in ("attention_mask", "position_ids")}
        mask, positions = control["attention_mask"], control["position_ids"]
        if positions is None and self._positions is not None:
            positions = self._positions[:, -1:] + torch.arange(1, seq + 1)
        sizes = {"batch": batch, "seq": seq, "key": stop}
        of_call = {"attention_mask": mask, "position_ids": positions}
        called = bind_kwargs(schemas, self.span, of_call, sizes, complete=False)
        remembered, sent = self._columns_of_mask(called, batch, start, stop)
        columns = self._columns(remembered, start, stop, repeats, prompt, prompt_length)
        if prompt is not None:
            self._check_end(start, prompt)
        bound = bind_kwargs(schemas, self.span, step_kwargs, {**sizes, "batch": batch // repeats}, columns)
        prefix_length = self._prefix_length(bound, start, stop)
        if positions is not None:
            step_mask = None if remembered is None else remembered[:, start:]
            prefix_kv.check_positions(prefix_length, called.call()["position_ids"].tensor, step_mask)
        bound = bound.repeat_rows(repeats)
        tensors = (hidden, *bound.tensors, *called.tensors)
        if any(is_wrapped(t) for t in tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            raise SessionError("a session is not differentiable: use flow(...) for gradients, or torch.no_grad()")
        if positions is not None and self._positions is None and _are_columns(positions, prefix_length + start):
            sent, positions = sent.without("position_ids"), None  # what a worker takes them for anyway
        if positions is not None:
            before = self._positions
            if before is None:
                before = torch.arange(prefix_length, prefix_length + start).expand(batch, start)
            positions = torch.cat([before, called.call()["position_ids"].tensor.expand(batch, seq)], 1)
        return Binding(bound.joined(sent), remembered, positions, columns)

    def _columns(
        self,
        mask: Tensor | None,
        start: int,
        stop: int,
        repeats: int,
        prompt: int | None,
        prompt_length: int | Tensor | None,
    ) -> Columns:
        """This step's columns in token positions, one row for each that kwargs are given for."""
        numbers = torch.arange(start, stop)
        mask = None if mask is None else mask[::repeats]
        position = numbers[None] if mask is None else token_position(mask, stop - start)
        tokens = None
        if prompt_length is not None:
            tokens = _prompt_tokens(prompt_length, len(position) if mask is not None else None)
            if prompt == stop > start and bool((position.max(1).values >= tokens).any()):
                raise SessionError(f"prompt_length={prompt_length!r:.60}, and this prompt has more tokens")
        elif prompt is not None and prompt <= stop:
            tokens = torch.full((1,), prompt) if mask is None else mask[:, :prompt].sum(1)
        is_prompt = None if prompt is None else numbers < prompt
        return Columns(position, is_prompt, tokens, start=start, session=True, counted=self._four_d is None)

    def _check_end(self, start: int, prompt: int) -> None:
        """Refuse a prompt that goes on after something was counted from its end."""
        if self._end_was is not None and prompt > start > 0:
            raise SessionError(
                f"the prompt goes on after at={self._end_was!r} was counted from its end: give prompt_length= at each "
                f"step of a prompt that comes in several"
            )

    def _note_end(self, kwargs: Mapping[str, Any], columns: Columns, prompt_length: Any) -> None:
        """Remember what this step counted from the prompt's end, as it was known then."""
        edits = kwargs.get("edit")
        selectors = [*(edits if isinstance(edits, Sequence) else [edits]), kwargs.get("capture")]
        ends = [selector.at for selector in selectors if from_the_end(getattr(selector, "at", None))]
        if ends and prompt_length is None and columns.prompt_S is not None and bool(columns.prompt_S.any()):
            self._end_was = ends[0]

    def _columns_of_mask(self, called: Bound, batch: int, start: int, stop: int) -> tuple[Tensor | None, Bound]:
        """What to remember of the mask, and the call's kwargs with only this step's columns of it."""
        axed = called.call().get("attention_mask")
        if axed is not None and len(axed.axes) == 4:
            self._four_d = start if self._four_d is None else self._four_d
            return self._mask, called
        if self._four_d is not None:
            raise SessionError("this session was given a 4-D attention_mask; each later step must give one too")
        mask = None if axed is None else axed.tensor.bool().expand(batch, stop)
        if mask is not None and start:
            past = self._mask if self._mask is not None else torch.ones(batch, start, dtype=torch.bool)
            if not torch.equal(mask[:, :start], past):
                raise SessionError(
                    f"attention_mask differs from the session's in its first {start} columns; "
                    f"rollback to change the past"
                )
        if mask is None and self._mask is not None:
            mask = torch.cat([self._mask, torch.ones(batch, stop - start, dtype=torch.bool)], 1)
        if mask is None or bool(mask[:, start:].all()):  # a worker extends by ones by itself
            return mask, called.without("attention_mask")
        at = next(i for i, leaf in enumerate(called.leaves) if leaf.what == "attention_mask")
        columns = [mask[:, start:] if i == at else tensor for i, tensor in enumerate(called.tensors)]
        return mask, called.with_tensors(columns)

    def _token_ids_with(self, ids: Tensor | None, mask: Tensor | None, batch: int, seq: int) -> Tensor | None:
        """The tokens of all columns, those of a step too; before its tokens may stand columns that have none."""
        if ids is None and self.token_ids is None:
            return None
        own = torch.full((batch, seq), -1)
        if ids is not None:
            own[:, seq - ids.shape[1] :] = ids.cpu()
        if mask is not None and mask.shape[1] > self.position:  # a 4-D one is not remembered
            own = torch.where(mask[:, self.position :], own, -1)
        past = torch.full((batch, self.position), -1) if self.token_ids is None else self.token_ids
        return torch.cat([past, own], 1)

    def release(self, capture: Capture) -> None:
        """Let a capture stay as it is, whatever becomes of the rows and columns from now on."""
        self._captures.discard(capture)
        capture.replace(capture.steps)

    def _settle(self, retry: Retry) -> None:
        """Wait for a step that was interrupted; its values are not used, and the next one crops it away.

        Raises DeadlineError, and gives it up, when it does not end.
        """
        if self._running is not None and concurrent.futures.wait([self._running], retry.patience).not_done:
            self._running.cancel()
            raise DeadlineError(
                f"the step that was interrupted did not end in {retry.timeout:g} s more (flow.options(timeout=…)); "
                f"it is given up now: take the next one again"
            )
        self._running = None


def _on_cpu(name: str, value: Any) -> Any:
    """Masks and positions are looked at and remembered on the CPU, wherever hidden is."""
    if isinstance(value, Axed):
        return replace(value, tensor=_on_cpu(name, value.tensor))
    if isinstance(value, Tensor) and value.is_meta:
        raise KwargError(f"{name} is {describe(value)} on the meta device, which holds no values")
    return value.cpu() if isinstance(value, Tensor) else value


def _prompt_tokens(prompt_length: Any, rows: int | None) -> Tensor:
    """``prompt_length`` as a tensor: one number, or one for each row. Raises SessionError."""
    try:
        tokens = torch.as_tensor(prompt_length).cpu().reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(0)
    counts = not tokens.is_floating_point() and tokens.dtype is not torch.bool
    if not counts or len(tokens) != 1 and rows not in (None, 1, len(tokens)) or not bool((tokens >= 0).all()):
        raise SessionError(
            f"prompt_length is {prompt_length!r:.60}; give the number of tokens, or a number for each row"
        )
    return tokens.long()


def _are_columns(positions: Tensor, start: int) -> bool:
    """Whether position_ids are the columns' own numbers, so that nothing need be said of them."""
    return bool((positions == torch.arange(start, start + positions.shape[1])).all())
