"""The workers of one session: a step goes through all of them, and others take the place of those that fail.

    Session --Step--> Stages.step --> Stage.take (one worker) ...

A step goes from worker to worker directly where they can hand it on, else through this client. On failure a worker's
steps are repeated on others (``kwflow.client.replay``), as ``mode`` says. Runs on the network thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kwflow.client.peers import Hop
from kwflow.client.replay import merged, replay, uncaptured
from kwflow.client.request import any_nan
from kwflow.client.retry import Reject, Retry, differs, lacks
from kwflow.client.stage import Handoff, Reorder, Replay, Stage, Step
from kwflow.errors import CallerError, SessionError, WorkerFailed, WorkerFull
from kwflow.wire import channel, loop

LATE_SECONDS = 1.0  # after a worker's reply, until its output must have reached the next one
MAX_WRONG_HANDOFFS = 2  # steps that one worker hands on wrongly, until it is asked for no more
FREED_SECONDS = 0.05, 0.2, 0.8  # for a worker to free what it held for a channel that this side closed

log = logging.getLogger(__name__)


class Stages:
    """``stages``: one worker each, in the order of their layers; ``replays``: what took whose place."""

    def __init__(self, hops: Sequence[Hop], max_length: int | None, mode: str, pool: channel.Pool):
        self.stages = [Stage(hop, max_length) for hop in hops]
        self.max_length, self.mode, self.pool = max_length, mode, pool
        self.replays: list[Replay] = []
        self.carried = set[str]()  # workers that cannot reach the next one, or hand on what it cannot take
        self._pushes = 0  # steps that were to be handed on
        self._suspect: tuple[str, str] | None = None  # who may have handed this step on wrongly, and what came of it
        self._wrong_handoffs = Counter[str]()  # such steps that were right when the client brought them, of each worker
        self._nan = False  # NaN was tried on other workers, which said the same
        self._closed = False
        self._turn = asyncio.Lock()  # one step at a time: what is cancelled takes a while to end
        self._running: asyncio.Task[Any] | None = None

    @property
    def hops(self) -> list[Hop]:
        return [stage.hop for stage in self.stages]

    def forget(self, position: int) -> list[Reorder]:
        """Forget the columns from one on; the reorders that came after it, which stay."""
        # of merged steps none are known
        gone = dict(reorder for stage in self.stages for reorder in stage.forget(position))
        return sorted(gone.items())

    @property
    def reordered(self) -> set[int]:
        """The last reorders that workers have in the rows of merged steps."""
        return {stage.reordered for stage in self.stages}

    async def step(self, step: Step, pushes: bool, retry: Retry) -> list[Tensor]:
        """Take a step through all workers, others in the place of those that fail: its output, what it captured.

        ``pushes``: workers hand their outputs on where they can.
        """
        async with self._turn:
            if self._closed:
                raise SessionError("the session is closed")
            self._running = asyncio.current_task()
            try:
                workers, self._suspect = list(self.stages), None
                outputs = await self._push(step, retry) if pushes and self._may_push() else None
                if outputs is None:
                    outputs = await self._carry(step, retry)
                    self._count_wrong_handoff(workers, outputs)
                return outputs
            finally:
                self._running = None

    async def aclose(self) -> None:
        """End the step that runs, and close the channels, which frees keys and values there."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
        async with self._turn:
            while self.stages:
                await self.stages.pop().aclose()

    async def _carry(self, step: Step, retry: Retry) -> list[Tensor]:
        """Take a step from worker to worker through this client."""
        pool = self.pool
        hidden = step.hidden
        captured, taken = list[Tensor](), list[Step]()
        while len(taken) < len(self.stages):
            number = len(taken)
            stage = self.stages[number]
            stage_step = stage.part(step, hidden)
            try:
                outputs = await stage.take(stage_step, pool)
            except WorkerFailed as error:
                await self._replace(number, error, retry, stage_step)
                continue
            if not self._nan and any_nan(outputs) and not any_nan([hidden, *stage_step.bound.tensors]):
                if await self._confirm_nan(number, retry, stage_step):
                    continue
            hidden, *more = outputs
            captured += more
            taken.append(stage_step)
        for stage, stage_step in zip(self.stages, taken, strict=True):
            stage.keep(stage_step)
        return [hidden, *captured]

    def _may_push(self) -> bool:
        """Whether workers can hand this step on: all know the session, and none was lost."""
        if all(stage.hop.peer in self.carried for stage in self.stages[:-1]):
            return False
        return all(stage.steps and not stage.closed and "push" in stage.hop.hello.features for stage in self.stages)

    async def _push(self, step: Step, retry: Retry) -> list[Tensor] | None:
        """Take a step that each worker hands on to the next. None if a worker failed: then it is taken again, as usual.

        Every worker gets its kwargs at once; each output comes here too, for what would have to be repeated. What a
        worker cannot hand on, this client brings.
        """
        self._pushes += 1
        stages = self.stages
        steps = [stage.part(step, step.hidden) for stage in stages]
        tasks: list[asyncio.Task[list[Tensor]]] = []
        for number, (stage, stage_step) in enumerate(zip(stages, steps, strict=True)):
            to = stages[number + 1] if number + 1 < len(stages) and stage.hop.peer not in self.carried else None
            handoff = Handoff(self._pushes, number == 0, to, retry.left)
            tasks.append(asyncio.create_task(stage.take(stage_step, self.pool, handoff)))
        outputs: list[list[Tensor]] = []
        try:
            for number, task in enumerate(tasks):
                if number:
                    await self._bring_if_late(stages[number - 1], stages[number], task, outputs[-1][0])
                outputs.append(await task)
        except BaseException as error:
            await self._give_up(tasks)
            refused = isinstance(error, CallerError) and bool(outputs)  # maybe of what a worker handed on
            if isinstance(error, WorkerFailed) or refused:
                self._suspect_handoff(len(outputs), str(error))
                return None
            raise
        nan = None if self._nan else next((i for i, tensors in enumerate(outputs) if any_nan(tensors)), None)
        if nan is not None and not any_nan([step.hidden, *step.bound.tensors]):
            self._suspect_handoff(nan, "NaN")
            return None
        entering = [step.hidden, *(stage_outputs[0] for stage_outputs in outputs)]
        for stage, stage_step, hidden in zip(stages, steps, entering, strict=False):
            stage.keep(replace(stage_step, hidden=hidden))
        return [outputs[-1][0], *(capture for stage_outputs in outputs for capture in stage_outputs[1:])]

    def _suspect_handoff(self, number: int, why: str) -> None:
        """Take note of a step that went wrong at a worker to which another handed it on."""
        if number and self.stages[number - 1].hop.peer not in self.carried:
            self._suspect = self.stages[number - 1].hop.peer, why

    def _count_wrong_handoff(self, workers: Sequence[Stage], outputs: Sequence[Tensor]) -> None:
        """The same workers took the step from this client: what was handed on was wrong, and costs each step twice."""
        if self._suspect is None or self.stages != workers or any_nan(outputs):
            return
        peer, why = self._suspect
        self._wrong_handoffs[peer] += 1
        if self._wrong_handoffs[peer] >= MAX_WRONG_HANDOFFS:
            self.carried.add(peer)
            log.warning("worker %s hands steps on wrongly (%s): they go through this client", peer[-8:], why)

    async def _bring_if_late(
        self, before: Stage, stage: Stage, task: asyncio.Task[list[Tensor]], hidden: Tensor
    ) -> None:
        """Bring a worker what the one before should have handed on; where it was lost, it is to hand no more on.

        Raises WorkerFailed if that fails too.
        """
        carried = before.hop.peer in self.carried
        done, _ = await asyncio.wait([task], timeout=0 if carried else LATE_SECONDS)
        if done:
            return
        bringing = asyncio.create_task(stage.bring(self._pushes, hidden, self.pool))
        try:
            await asyncio.wait([task, bringing], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and bringing.result() and not carried:
                self.carried.add(before.hop.peer)
                names = before.hop.peer[-8:], stage.hop.peer[-8:]
                log.warning("worker %s cannot hand steps on to %s: they go through this client", *names)
        finally:
            bringing.cancel()
            await asyncio.gather(bringing, return_exceptions=True)

    async def _give_up(self, tasks: Sequence[asyncio.Task[list[Tensor]]]) -> None:
        """Tell workers that wait for a step that it will not come; leave nothing running."""
        waiting = [stage for stage, task in zip(self.stages, tasks, strict=True) if not task.done()]
        telling = [asyncio.create_task(stage.bring(self._pushes, None, self.pool)) for stage in waiting]
        try:
            await asyncio.wait([*tasks, *telling], timeout=LATE_SECONDS)
        finally:  # a deadline may end the step here
            for task in (*tasks, *telling):
                task.cancel()
            await asyncio.gather(*tasks, *telling, return_exceptions=True)

    async def take_over(self, other: Stages, position: int, retry: Retry) -> None:
        """Hold the columns before ``position`` that another session's workers hold: their steps again, one by one.

        On the same workers; on others where one has failed, or is full.
        """
        async with self._turn, other._turn:
            if self._closed or other._closed:
                raise SessionError("the session is closed")
            self._running = asyncio.current_task()
            self._nan, self.replays, self.carried = other._nan, list(other.replays), set(other.carried)
            try:
                for stage in other.stages:
                    began, steps = time.monotonic(), [uncaptured(s) for s in stage.steps if s.start < position]
                    old = Stage(stage.hop, self.max_length, steps=steps, reordered=stage.reordered)
                    new = await self._in_place_of(old, (steps, old.reordered), retry, _reject(old), again=True)
                    self.stages += new
                    if new[0].hop != old.hop:
                        self._note(old, position, str(retry.failures[-1]), new, len(steps), began, "stepwise")
            finally:
                self._running = None

    async def _replace(self, number: int, error: WorkerFailed, retry: Retry, step: Step) -> None:
        """Rebuild one worker's keys and values on others, or on itself if this side closed its channel."""
        old, began = self.stages[number], time.monotonic()
        if not old.given_up:
            retry.failed(error)
        await old.aclose()
        again = old.given_up
        # should this step end here: who was full may have room for the next one
        old.given_up = again or isinstance(error, WorkerFull)
        history = self._history(old, step.start)
        new = await self._in_place_of(old, history, retry, _reject(old, step), again=again, freeing=FREED_SECONDS)
        self.stages[number : number + 1] = new
        if new[0].hop != old.hop:
            self._note(old, step.start, str(error), new, len(history[0]), began, self.mode)

    async def _in_place_of(
        self,
        old: Stage,
        history: tuple[Sequence[Step], int],
        retry: Retry,
        reject: Reject,
        *,
        again: bool,
        freeing: Sequence[float] = (),
    ) -> list[Stage]:
        """Workers that hold a history: ``again`` the old one, if it can, else others.

        ``freeing``: seconds for the old one to free what it holds for the channel before, one wait after the other.
        """
        waits = list(freeing)
        while True:
            hops = [old.hop]
            if not again:
                hops = await retry.route(*old.hop.span, like=old.hop, reject=reject)
            try:
                return await self._rebuilt(*history, hops, self._nan)
            except WorkerFailed as failure:
                if isinstance(failure, WorkerFull) and failure.peer == old.hop.peer and waits:
                    await asyncio.sleep(waits.pop(0))
                    continue
                again = old.given_up = False
                retry.failed(failure)

    async def _rebuilt(self, steps: Sequence[Step], reordered: int, hops: Sequence[Hop], nan: bool) -> list[Stage]:
        new = [Stage(hop, self.max_length, reordered=reordered) for hop in hops]
        try:
            await replay(steps, new, self.pool, nan=nan)
        except BaseException:
            await close(new)
            raise
        return new

    async def _confirm_nan(self, number: int, retry: Retry, step: Step) -> bool:
        """NaN from input without any: whether another worker says otherwise, and then takes this one's place."""
        old, began = self.stages[number], time.monotonic()
        steps, reordered = self._history(old, step.start)
        while others := await retry.others(old.hop, _reject(old, step)):
            new = list[Stage]()
            try:
                new = await self._rebuilt(steps, reordered, others, nan=False)
                outputs = await replay([step], new, self.pool, keep=False, nan=True)
            except WorkerFailed as error:
                retry.failed(error)
                await close(new)
                continue
            except BaseException:
                await close(new)
                raise
            if any_nan(outputs):
                await close(new)
                break
            by = ", ".join(other.peer[-8:] for other in others)
            failure = WorkerFailed(f"NaN where {by} has none", peer=old.hop.peer, span=old.hop.span)
            retry.failed(failure)
            await old.aclose()
            self.stages[number : number + 1] = new
            self._note(old, step.start, str(failure), new, len(steps), began, self.mode)
            return True
        self._nan = True
        return False

    def _history(self, stage: Stage, position: int) -> tuple[list[Step], int]:
        """The steps that would bring another worker to where this one is, and the last reorder that their rows have."""
        if self.mode == "merged" and (joined := merged(stage.steps, position, stage.hop.schema.scaling)) is not None:
            done = (number for step in stage.steps for number, _ in step.reorders)
            return joined, max([stage.reordered, *done])
        steps = [step for step in stage.steps if step.start < position]  # one behind it ended after a rollback
        return steps, stage.reordered

    def _note(
        self, old: Stage, position: int, reason: str, new: Sequence[Stage], steps: int, began: float, mode: str
    ) -> None:
        hops = [stage.hop for stage in new]
        exact = all(replacement.bitwise for replacement in self.replays)  # what is rounded otherwise once stays so
        bitwise = exact and (mode == "stepwise" or not steps) and not any(differs(hop, old.hop) for hop in hops)
        by, seconds = tuple((hop.peer, hop.start, hop.stop) for hop in hops), time.monotonic() - began
        replacement = Replay(old.hop.span, position, old.hop.peer, reason, by, steps, mode, bitwise, seconds)
        self.replays.append(replacement)
        log.info("session: %s", replacement)


def _reject(old: Stage, *more: Step) -> Reject:
    """What speaks against a worker that would have to repeat another's steps, and then take more."""

    def reject(hop: Hop) -> str | None:
        reasons = (lacks(hop, old.hop, past_step.bound, 0) for past_step in (*old.steps, *more))
        return next(filter(None, reasons), None)

    return reject


async def close(stages: Sequence[Stage]) -> None:
    for stage in stages:
        await stage.aclose()


def free(stages: Stages) -> None:
    """Close the channels of a session that nobody has any more."""
    loop.submit(stages.aclose())
