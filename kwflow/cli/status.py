"""``kwflow status``: who serves which layers of which model, as a table in the terminal.

What the directory holds, and from each worker that answers in time what it says of itself. No torch.nn, no models.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kwflow.client.routing import gaps
from kwflow.errors import CallerError, DeadlineError, KwflowError
from kwflow.swarm.directory import ModelRecord, WorkerRecord, models, workers
from kwflow.wire import loop
from kwflow.wire.channel import call
from kwflow.wire.hello import Hello
from kwflow.wire.message import Message

HELLO_SECONDS = 2.0
BAR_CHARACTERS = 20


@dataclass(frozen=True)
class Seen:
    """A worker's record, and its hello; without one, whether it answered in ``HELLO_SECONDS`` all the same."""

    record: WorkerRecord
    hello: Hello | None
    answered: bool = False


View = Sequence[tuple[ModelRecord, Sequence[Seen]]]


def print_status(join: Sequence[str], timeout: float) -> None:
    """Print a table of workers × layers for each model of the swarm. Raises NoRoute, DeadlineError, KwargError."""
    try:
        view = loop.run(_look(join, timeout), timeout + 5.0)
    except TimeoutError as error:
        raise DeadlineError(f"the swarm's directory did not answer in {timeout:g} s (--timeout)") from error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    show(view, Console(highlight=False))


async def _look(join: Sequence[str], timeout: float) -> View:
    from kwflow.swarm.hivemind import Node

    async with asyncio.timeout(timeout):
        node = await Node.start(initial_peers=join, client=True, own_session=True)
        try:
            return [
                (model, await asyncio.gather(*(_ask(node, w) for w in await workers(node, model.model, model.layers))))
                for model in await models(node)
            ]
        finally:
            await node.stop()


async def _ask(node: Any, record: WorkerRecord) -> Seen:
    """A worker's record and its hello, where it is neither slow nor gone, nor speaks another protocol."""
    node.learn(record.peer, record.addrs)
    channel = None
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            channel = await node.open(record.peer, timeout=HELLO_SECONDS)
            reply = await call(channel, Message({"op": "hello"}))
            return Seen(record, Hello.from_json(reply.meta.get("hello")))
    except CallerError:  # it has no such operation, or what it announces does not read
        return Seen(record, None, answered=True)
    except (KwflowError, TimeoutError):
        return Seen(record, None)
    finally:
        if channel is not None:
            await channel.aclose()


# ---- the terminal ----------------------------------------------------------------------------------------------------


def show(view: View, console: Console) -> None:
    """Print what was found: per model one row per worker, then what is covered."""
    if not any(seen for _, seen in view):
        console.print("The swarm answers, but nobody serves a model in it.")
        console.print("Start a worker:  kwflow worker MODEL --blocks 0:15 --join ADDRESS", markup=False)
        return
    for model, seen in view:
        console.print(_table(model, seen, plain=console.encoding.lower().replace("-", "") != "utf8"))
        for line in remarks(model, seen):
            console.print(f"  {_safe(line)}", markup=False)
        console.print()


def _table(model: ModelRecord, seen: Sequence[Seen], *, plain: bool) -> Table:
    title = f"{_safe(model.model)}: {model.layers} layers, {len(seen)} worker{'s' if len(seen) != 1 else ''}"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("worker", f"0 to {model.layers}", "layers", "version", "dtype", "on"):
        table.add_column(name, no_wrap=True)
    for worker in seen:
        record, hello = worker.record, worker.hello
        spans = [(record.start, record.stop)]
        facts = [record.version, "unreadable" if worker.answered else "no answer", ""]
        if hello is not None:
            facts = [hello.version, f"{hello.quantization} {hello.dtype}".strip(), _where(hello)]
        cells = [record.peer[-8:], bar(spans, model.layers, plain), f"{record.start}:{record.stop}", *facts]
        table.add_row(*(Text(_safe(cell)) for cell in cells))
    all_spans = [(worker.record.start, worker.record.stop) for worker in seen]
    missing = gaps(all_spans, model.layers)
    covered = "all" if not missing else f"{model.layers - sum(b - a for a, b in missing)} of {model.layers}"
    table.add_section()
    table.add_row("together", bar(all_spans, model.layers, plain), covered)
    return table


def _where(hello: Hello) -> str:
    """On what: a device, or the CPU's threads."""
    threads = hello.fingerprint.threads
    if hello.device != "cpu" or threads is None:
        return hello.device
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _safe(text: str) -> str:
    """What a stranger wrote, without what a terminal would act on."""
    return "".join(c if c.isprintable() else "?" for c in text[:400])


def remarks(model: ModelRecord, seen: Sequence[Seen]) -> list[str]:
    """What a reader should know: layers that nobody serves, workers that do not answer, weights that differ."""
    lines = []
    missing = gaps([(worker.record.start, worker.record.stop) for worker in seen], model.layers)
    if missing:
        lines.append(f"nobody serves layers {', '.join(f'{start}:{stop}' for start, stop in missing)}")
    silent = [worker.record.peer[-8:] for worker in seen if worker.hello is None and not worker.answered]
    if silent:
        lines.append(f"no answer in {HELLO_SECONDS:g} s from {', '.join(silent)}")
    if unreadable := [worker.record.peer[-8:] for worker in seen if worker.answered and worker.hello is None]:
        lines.append(f"an answer that does not read, of another version perhaps, from {', '.join(unreadable)}")
    weights = {worker.record.checkpoint for worker in seen if worker.record.checkpoint}
    if len(weights) > 1:
        lines.append("the workers hold different weights, which a client never mixes:")
        for checkpoint in sorted(weights):
            holders = [worker.record.peer[-8:] for worker in seen if worker.record.checkpoint == checkpoint]
            lines.append(f"  {checkpoint[:12]} on {', '.join(holders)}")
    return lines


def bar(spans: Sequence[tuple[int, int]], layers: int, plain: bool = False) -> str:
    """Covered layers as a bar; where a character stands for several, it is full when all of them are covered.

    >>> bar([(0, 3), (4, 6)], 8, plain=True)
    '###.##..'
    """
    full, part, none = "#+." if plain else "█▒·"
    covered = [any(start <= layer < stop for start, stop in spans) for layer in range(layers)]
    width = min(layers, BAR_CHARACTERS)
    cells = [covered[layers * i // width : layers * (i + 1) // width] for i in range(width)]
    return "".join(full if all(cell) else part if any(cell) else none for cell in cells)
