"""A live map of a local swarm: workers × layers, with buttons that kill, pause, resume and add. Needs ipywidgets.

A thread looks at the processes every second, also while a cell runs, until the panel or the swarm is closed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kwflow.background import start_thread
from kwflow.errors import KwflowError, NoRoute
from kwflow.notebook.panels import WIDE, at_once, descendants, mimebundle, status_line, widgets_for
from kwflow.show import html

if TYPE_CHECKING:
    from kwflow.client.flow import Flow
    from kwflow.swarm.local import LocalSwarm, LocalWorker

LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


def swarm_view(swarm: LocalSwarm, *, flow: Flow | None = None) -> SwarmView:
    """A map of a ``kf.local_swarm`` that follows what happens to it, with buttons: kill, pause, resume, add.

        view = kf.notebook.swarm_view(swarm, flow=flow)
        view                                              # shown by the cell that ends with it
        view.rows[1].kill.click()                         # what swarm.kill(1) does

    ``flow``: also say which layers each worker would run in that flow's next call, as far as the client knows: it
    learns of a worker's end when it asks it. The map is new every second, also while a cell runs; buttons act at once,
    while a cell runs in JupyterLab 4.4 or newer, elsewhere after it. The panel does not keep the swarm: without another
    name for it, its workers end. Raises UnsupportedError without ipywidgets.
    """
    return SwarmView(swarm, flow, widgets_for("swarm_view"))


class Row:
    """One worker: ``map`` (HTML), and its buttons ``kill``, ``pause``, ``resume``."""

    def __init__(self, view: SwarmView, number: int, widgets: Any):
        self.map = widgets.HTML(layout=widgets.Layout(flex="1 1 0", min_width="0"))
        narrow = widgets.Layout(width="5.5em")
        self.pause, self.resume, self.kill = (
            widgets.Button(description=name, layout=narrow) for name in ("pause", "resume", "kill")
        )
        for name in ("pause", "resume", "kill"):
            getattr(self, name).on_click(lambda _, name=name: view._act(name, number))
        layout = widgets.Layout(width="100%", align_items="center")
        self.box = widgets.HBox([self.map, self.pause, self.resume, self.kill], layout=layout)
        at_once(self.box)


class SwarmView:
    """The panel; made by ``swarm_view``.

    ``rows``: one for each worker, with buttons; ``start``, ``stop``, ``add``: layers of a worker to start, and the
    button; ``status``; ``look()`` looks at the workers now; ``wait(seconds)`` until one that was asked for serves;
    ``close()``.
    """

    def __init__(self, swarm: LocalSwarm, flow: Flow | None, widgets: Any):
        self.flow, self.rows, self._widgets = flow, list[Row](), widgets
        self._swarm, self._name = weakref.ref(swarm), swarm.model
        self._layers = _layers(swarm) if flow is None else flow.ends.layers
        self._closed, self._turn = threading.Event(), threading.Lock()
        self._bars = list[html.Bar]()
        self._adding: threading.Thread | None = None
        short, style = widgets.Layout(width="10em", flex="0 0 auto"), {"description_width": "5em"}
        limits = {"min": 0, "max": self._layers, "layout": short, "style": style}
        self.start = widgets.BoundedIntText(0, description="layers", **limits)
        self.stop = widgets.BoundedIntText(self._layers, description="to before", **limits)
        self.add = widgets.Button(description="add a worker", layout=widgets.Layout(width="9em", flex="0 0 auto"))
        self.add.on_click(self._add)
        self.status = widgets.HTML(status_line("buttons act at once, in JupyterLab also while a cell runs"))
        self.lines, self.workers = widgets.HTML(), widgets.VBox(layout=widgets.Layout(width="100%"))
        row = widgets.Layout(width="100%", align_items="center", grid_gap="0 .5em")
        below = widgets.HBox([self.start, self.stop, self.add, self.status], layout=row)
        whole = widgets.Layout(width="100%", max_width=WIDE)
        self.box = widgets.VBox([self.workers, self.lines, below], layout=whole)
        at_once(self.box)
        self.look()
        start_thread(self._follow, "kwflow-swarm-view", stop=self._closed.set)

    def look(self) -> None:
        """Look at the workers now, and show what is there."""
        with self._turn:
            swarm = self._swarm()
            over = swarm is None or swarm.closed
            if over:
                self.flow = None  # it has a process of its own, which ends with its last holder
            route, lines = ({}, ["the swarm is closed"]) if over else self._route()
            if swarm is not None:
                self._bars = [_bar(worker, route.get(worker.peer, "")) for worker in swarm.workers]
            else:
                self._bars = [replace(bar, how="dead", wrong="", gone=True) for bar in self._bars]
            if gaps := _gaps(self._bars, self._layers):
                lines.append(f"nobody serves layers {', '.join(gaps)}")
            self.lines.value = "".join(map(html.line, lines))
            while len(self.rows) < len(self._bars):
                self.rows.append(Row(self, len(self.rows), self._widgets))
            if len(self.workers.children) < len(self.rows):
                self.workers.children = [row.box for row in self.rows]
            for row, bar in zip(self.rows, self._bars, strict=True):
                row.map.value = html.one_row(bar, self._layers)
                row.kill.disabled = bar.gone or over
                row.pause.disabled = bar.gone or over or bool(bar.wrong)
                row.resume.disabled = bar.gone or over or not bar.wrong
            self.add.disabled = over or self._adding is not None

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until the worker that was asked for serves, or failed to. Raises TimeoutError."""
        adding = self._adding
        if adding is not None:
            adding.join(seconds)
            if adding.is_alive():
                raise TimeoutError(f"the worker is not ready after {seconds:g} s")

    def close(self) -> None:
        """Take the panel away; the swarm stays."""
        self._closed.set()
        with self._turn:
            for widget in (*descendants(self.box), self.box):
                widget.close()

    def __repr__(self) -> str:
        return f"SwarmView({self._name}, {len(self.rows)} workers)"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        note = html.line("a live map with buttons, where a kernel runs", dim=True)
        workers = html.layers_map(self._layers, (0, self._layers), self._bars, first="all layers")
        return mimebundle(self.box, repr(self), html.page("swarm_view", workers, self.lines.value, note), **kwargs)

    # ---- what it does

    def _act(self, what: str, number: int) -> None:
        """Kill, pause or resume a worker; what goes wrong is written in the panel."""
        swarm = self._swarm()
        if swarm is not None:
            self._report_errors(lambda: getattr(swarm, what)(number))
        self.look()

    def _add(self, _: Any) -> None:
        start, stop = self.start.value, self.stop.value

        def work() -> None:
            swarm = self._swarm()
            try:
                if swarm is not None and self._report_errors(lambda: swarm.add(start, stop)):
                    self.status.value = status_line(f"the worker of layers {start}:{stop} serves")
            finally:
                self._adding = None
                self.look()

        if self._adding is None:
            self.status.value = status_line(f"starting a worker of layers {start}:{stop} …")
            self._adding = threading.Thread(target=work, name="kwflow-swarm-add", daemon=True)
            self.add.disabled = True
            self._adding.start()

    def _report_errors(self, work: Callable[[], Any]) -> bool:
        """Do something; write in the panel what went wrong, where nobody awaits it. Whether it was done."""
        try:
            work()
        except (KwflowError, OSError, RuntimeError, ValueError) as error:
            self.status.value = status_line((str(error) or repr(error)).splitlines()[0], wrong=True)
            return False
        return True

    def _follow(self) -> None:
        """The thread: ends with the panel, and after the swarm."""
        while not self._closed.wait(LOOK_SECONDS) and self.box.comm is not None:  # None: somebody closed the widget
            swarm = self._swarm()
            over = swarm is None or swarm.closed
            del swarm
            try:
                self.look()
            except Exception:  # else the map would stand still from now on
                log.exception("the map of the swarm was not made anew; it is tried again")
            if over:
                return

    # ---- what it sees

    def _route(self) -> tuple[dict[str, str], list[str]]:
        """Which layers each worker would run in the flow's next call; nobody is asked."""
        if self.flow is None:
            return {}, []
        from kwflow.client.routing import plan

        known: Any = self.flow.peers.known()
        out = {worker.peer for worker in known if worker.avoided} | set(self.flow.settings.peers_blocked)
        try:
            hops = plan(known, *self.flow.span, blocked=out)
        except NoRoute as error:
            return {}, [f"no route for the flow's next call: {str(error).partition(';')[0]}"]
        parts: dict[str, list[str]] = {}
        for peer, start, stop in hops:
            parts.setdefault(peer, []).append(f"{start}:{stop}")
        return {peer: f"{' and '.join(spans)} of the next call" for peer, spans in parts.items()}, []


def _layers(swarm: LocalSwarm) -> int:
    from kwflow.models.files.checkpoint import layer_count

    return layer_count(swarm.model)


def _bar(worker: LocalWorker, routed: str) -> html.Bar:
    state = "dead" if not worker.alive else "paused" if worker.paused else "alive"
    text = f"{state}, {routed}" if routed else state
    wrong = text if state == "paused" else ""
    return html.Bar(worker.peer[-8:], *worker.span, text, wrong, gone=state == "dead")


def _gaps(bars: list[html.Bar], layers: int) -> list[str]:
    from kwflow.client.routing import gaps

    return [f"{start}:{stop}" for start, stop in gaps([(b.start, b.stop) for b in bars if not b.gone], layers)]
