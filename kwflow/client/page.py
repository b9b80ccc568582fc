"""How a flow, its kwargs and a session show themselves in a notebook; the kwargs in a terminal too."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kwflow.client.peers import Hop, KnownWorker, Peers
from kwflow.client.retry import Retry, wait
from kwflow.errors import KwflowError
from kwflow.kwargs.schema import Spec
from kwflow.show import html as pages

if TYPE_CHECKING:
    from kwflow.client.stage import Replay, Stage
    from kwflow.kwargs.bound import Span

LINE = 120  # columns of a printed line
LOOK_SECONDS = 2.0  # that workers are given to say who they are


class Kwargs(dict[str, Spec]):
    """Kwargs by name: a dict that reads well when it is printed."""

    def __repr__(self) -> str:
        if not self:
            return "no kwargs"
        width = max(map(len, self))
        indent = " " * (width + 4)
        wrapped = [
            textwrap.wrap(text, LINE, initial_indent=f"  {name:{width}}  ", subsequent_indent=indent)
            for name, text in self._rows()
        ]
        return "\n".join(line for lines in wrapped for line in lines)

    def _repr_html_(self) -> str:
        return pages.page("kwargs", pages.table(["name", "takes"], [list(row) for row in self._rows()]))

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, _takes(spec)) for name, spec in sorted(self.items())]


def _takes(spec: Spec) -> str:
    """What a kwarg takes, in words."""
    more = [f"at {', '.join(spec.points)}"] if spec.points else []
    more += ["or {layer: value}"] if spec.by_layer else []
    more += ["which must be given"] if spec.required else []
    return "; ".join([spec.says(), *more])


def flow_page(title: str, layers: int, span: Span, peers: Peers, blocked: Collection[str]) -> str:
    """A map of workers × layers: who serves which, computes how, and takes part in the next call."""
    route, note = list[Hop](), ""
    try:
        retry = Retry(peers, LOOK_SECONDS, blocked)
        route = peers.snapshot(*span, blocked) or wait(retry, retry.route_at_once(*span), span)
    except KwflowError as error:
        note = f"no route for the next call: {error}"
    bars = [_bar(worker, route, blocked) for worker in peers.known()]
    return pages.page(title, pages.layers_map(layers, span, bars), pages.line(note) if note else "")


def _bar(worker: KnownWorker, route: Sequence[Hop], blocked: Collection[str]) -> pages.Bar:
    wrong = "blocked" if worker.peer in blocked else "failed just now" if worker.avoided else ""
    parts = [f"{hop.start}:{hop.stop} of the next call" for hop in route if hop.peer == worker.peer]
    how = ", ".join([*_computes(worker), *parts])
    return pages.Bar(worker.peer[-8:], worker.start, worker.stop, how, wrong)


def _computes(worker: KnownWorker) -> list[str]:
    if worker.hello is None:
        return ["not asked yet"]
    return [worker.hello.computes_in]


def session_page(title: str, stages: Sequence[Stage], replays: Sequence[Replay]) -> str:
    """The workers that hold its keys and values, the kwargs of its columns, and the workers that it lost."""
    workers = [[f"{s.hop.start}:{s.hop.stop}", s.hop.peer[-8:], f"{len(s.steps)}"] for s in stages]
    parts = [pages.table(["layers", "worker", "steps taken"], workers)] if workers else [pages.line("no step yet")]
    if rows := _kwargs(stages):
        parts.append(pages.table(["columns", "kwargs"], rows))
    if replays:
        header = ["column", "layers", "worker lost", "why", "went to", "steps again", "seconds"]
        parts.append(pages.table(header, [_lost(replay) for replay in replays]))
    else:
        parts.append(pages.line("no worker was lost", dim=True))
    return pages.page(title, *parts)


def _kwargs(stages: Sequence[Stage]) -> list[list[str]]:
    """Which kwargs were given for which columns; neighbours with the same are one row."""
    names: dict[int, set[str]] = {}
    for step in (step for stage in stages for step in stage.steps):
        for column in range(step.start, step.stop):
            names.setdefault(column, set()).update(step.bound.names())
    rows = []
    for kwargs, same in groupby(sorted(names), key=lambda column: sorted(names[column])):
        columns = list(same)
        rows.append([f"{columns[0]}:{columns[-1] + 1}", ", ".join(kwargs) or "none"])
    return rows


def _lost(replay: Replay) -> list[str]:
    by = ", ".join(f"{peer[-8:]} ({start}:{stop})" for peer, start, stop in replay.by)
    again = f"{replay.steps} {replay.mode}" + (", bitwise" if replay.bitwise else "")
    layers = f"{replay.layers[0]}:{replay.layers[1]}"
    return [f"{replay.position}", layers, replay.peer[-8:], replay.reason, by, again, f"{replay.seconds:.2f}"]
