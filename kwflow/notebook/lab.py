"""A live panel that steers: one text, token by token, without a vector and with it, side by side.

Both are rows of one batch, in one session, through Hugging Face's own generate; the vector acts on the second row. It
runs in a thread of its own, so that the notebook's cells go on. Imports ipywidgets and torch when a panel is made.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from kwflow.background import start_thread
from kwflow.errors import KwargError, KwflowError, SpanError
from kwflow.notebook.panels import WIDE, at_once, descendants, mimebundle, status_line, widgets_for
from kwflow.show import html

if TYPE_CHECKING:
    from torch import Tensor

    from kwflow.client.flow import Flow
    from kwflow.client.session import Session
    from kwflow.research.vectors import Vectors

PLACES = {
    "all tokens": "all",
    "the prompt": "prompt",
    "the prompt's last token": "prompt[-1]",
    "generated tokens": "generated",
}
STRONGEST = 1.0  # of the size of what it is added to; beyond, texts break


def steer_lab(flow: Flow, vectors: Vectors | Mapping[str, Vectors], *, prompt: str = "My new neighbour is") -> SteerLab:
    """A panel with a prompt, a vector, its layer, strength and positions, which writes with and without it, live.

        lab = kf.notebook.steer_lab(flow, {"praise": v, "love": w})
        lab                                          # shown by the cell that ends with it
        lab.strength.value = -0.2; lab.go.click(); lab.wait(); lab.texts

    ``vectors``: ``kf.steering`` vectors, one or several by name. The strength is a share of the size (2-norm) of what
    the vector is added to, at its layer and the prompt's last token, so that layers compare and lengths of vectors do
    not matter. Greedy. Buttons act at once, while a cell runs in JupyterLab 4.4 or newer, elsewhere after it; what was
    begun goes on while cells run. The panel keeps the flow until ``lab.close()``. Needs ipywidgets.

    Raises KwargError for what are no vectors, SpanError for vectors of other layers, UnsupportedError without
    ipywidgets; what fails later is said in the panel.
    """
    return SteerLab(flow, _by_name(vectors), prompt, widgets_for("steer_lab"))


def _by_name(vectors: Any) -> dict[str, Vectors]:
    from kwflow.research.vectors import Vectors

    named = {"the vector": vectors} if isinstance(vectors, Vectors) else vectors
    if not isinstance(named, Mapping) or not named or not all(isinstance(value, Vectors) for value in named.values()):
        raise KwargError(f"steer_lab takes kf.steering vectors, one or {{name: vectors}}, got {vectors!r:.60}")
    return {str(name): value for name, value in named.items()}


@dataclass
class Run:
    """One press on Generate: what was asked for, what came of it."""

    prompt: str
    name: str
    vectors: Vectors
    layer: int
    strength: float
    at: str
    new_tokens: int
    session: Session | None = None
    stopped: bool = False
    tokens: list[Tensor] = field(default_factory=list)  # each (2,)


class SteerLab:
    """The panel; made by ``steer_lab``. Its widgets may be set and clicked from a cell too.

    ``prompt``, ``vector``, ``layer``, ``strength``, ``at``, ``new_tokens``: what is asked for; ``go``, ``stop``: the
    buttons; ``baseline``, ``steered``, ``status``: what is shown; ``texts`` and ``ids``: the two continuations so far;
    ``scale``: by how much the vector was multiplied; ``wait(seconds)``, ``close()``.
    """

    def __init__(self, flow: Flow, vectors: Mapping[str, Vectors], prompt: str, widgets: Any):
        self.flow, self._vectors = flow, vectors
        if flow.start != 0:
            raise SpanError(f"steer_lab writes texts from layer 0 on; this flow has layers {flow.start}:{flow.stop}")
        for name in vectors:
            self._layers(name)
        self.scale, self.ids, self.texts = 0.0, None, ("", "")
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # between the buttons and the thread that writes
        self._sizes: tuple[tuple[str, str], dict[int, float]] | None = None  # of the last prompt and point

        wide, style = widgets.Layout(width="calc(100% - 6px)"), {"description_width": "4.5em"}
        self.prompt = widgets.Textarea(prompt, description="prompt", rows=2, layout=wide, style=style)
        self.vector = widgets.Dropdown(options=list(vectors), description="vector", style=style)
        self.at = widgets.Dropdown(options=list(PLACES.items()), description="acts on", style=style)
        self.new_tokens = widgets.BoundedIntText(40, min=1, max=2000, description="tokens", style=style)
        self.layer = widgets.SelectionSlider(options=[0], description="layer", layout=wide, style=style)
        self.strength = widgets.FloatSlider(
            0.2, min=-STRONGEST, max=STRONGEST, step=0.01, description="strength", layout=wide, style=style
        )
        self.go = widgets.Button(description="Generate", button_style="primary")
        self.stop = widgets.Button(description="Stop", disabled=True)
        self.status = widgets.HTML(status_line("strength: a share of the residual stream's own size at the layer"))
        self.baseline, self.steered = (widgets.HTML(layout=widgets.Layout(flex="1 1 0", min_width="0")) for _ in "ab")
        row = widgets.Layout(width="100%", align_items="center", grid_gap="0 1em")
        self.box = widgets.VBox(
            [
                self.prompt,
                widgets.HBox([self.vector, self.at, self.new_tokens], layout=row),
                widgets.HBox([self.layer, self.strength], layout=row),
                widgets.HBox([self.go, self.stop, self.status], layout=row),
                widgets.HBox([self.baseline, self.steered], layout=widgets.Layout(width="100%", grid_gap="0 1.5em")),
            ],
            layout=widgets.Layout(width="100%", max_width=WIDE),
        )
        self.vector.observe(self._vector_changed, "value")
        self._vector_changed()
        self.go.on_click(self._begin)
        self.stop.on_click(lambda _: self._end("stopped"))
        at_once(self.box)
        self._show()

    def wait(self, seconds: float = 300.0) -> None:
        """Wait until nothing is being written. Raises TimeoutError."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise TimeoutError(f"still writing after {seconds:g} s")

    def close(self) -> None:
        """Stop, and take the panel away."""
        self._end("closed")
        for widget in (*descendants(self.box), self.box):
            widget.close()

    def __repr__(self) -> str:
        return f"SteerLab({self.flow!r}, vectors {', '.join(self._vectors)})"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        about = f"{self.vector.value}, layer {self.layer.value}, strength {self.strength.value:g}, {self.at.label}"
        rows = [[name, self.prompt.value + text] for name, text in zip(("baseline", about), self.texts, strict=True)]
        note = html.line("a panel with sliders, where a kernel runs", dim=True)
        page = html.page("steer_lab", html.table(["", "text"], rows), note)
        return mimebundle(self.box, repr(self), page, **kwargs)

    # ---- what is asked for

    def _layers(self, name: str) -> list[int]:
        vectors = self._vectors[name]
        if not (layers := [n for n in vectors.layers if n < self.flow.stop]):
            raise SpanError(f"steer_lab: {name!r} has layers {list(vectors.layers)}, the flow 0:{self.flow.stop}")
        return layers

    def _vector_changed(self, *_: Any) -> None:
        """Offer the layers that the chosen vector has; of a new panel the middle one, else the nearest."""
        layers, previous = self._layers(self.vector.value), self.layer.value
        first = self.layer.options == (0,)
        nearest = layers[len(layers) // 2] if first else min(layers, key=lambda n: abs(n - previous))
        self.layer.options = layers
        self.layer.value = nearest

    def _begin(self, _: Any) -> None:
        self._end("stopped")
        name, at = self.vector.value, self.at.value
        run = Run(
            *(self.prompt.value, name, self._vectors[name], self.layer.value, self.strength.value, at),
            self.new_tokens.value,
        )
        with self._turn:
            self._run, self.stop.disabled, self.texts, self.ids = run, False, ("", ""), None
            self._set_status(status_line("reading the prompt …"))
            self._show(run)
        self._thread = start_thread(functools.partial(self._write, run), "kwflow-steer-lab")

    def _end(self, why: str) -> None:
        """Stop what is being written: its session is closed, and with it the step under way."""
        with self._turn:
            run, self._run, self.stop.disabled = self._run, None, True
            if run is not None:
                run.stopped = True
                self._set_status(status_line(f"{why} after {len(run.tokens)} tokens"))
                if run.session is not None:
                    run.session.close()

    # ---- the thread that writes

    def _write(self, run: Run) -> None:
        began = time.monotonic()
        try:
            self._generate(run)
            message, wrong = f"{len(run.tokens)} tokens in {time.monotonic() - began:.1f} s", False
        except Exception as error:  # noqa: BLE001  said in the panel, which nobody awaits
            kind = "" if isinstance(error, KwflowError) else f"{type(error).__name__}: "
            message, wrong = f"{kind}{error}", True
        finally:
            if run.session is not None:
                run.session.close()
        with self._turn:
            if not run.stopped:  # else it was said, and another may have begun
                self._run, self.stop.disabled = None, True
                self._set_status(status_line(message, wrong=wrong) + ("" if wrong else self._in_code(run)))

    def _generate(self, run: Run) -> None:
        from kwflow.huggingface.auto import AutoDistributedModelForCausalLM
        from kwflow.huggingface.remote_cache import RemoteCache
        from kwflow.models.prepare import cache_argument

        ends: Any = self.flow.ends
        batch = ends.tokenize([run.prompt, run.prompt])
        columns = batch["input_ids"].shape[1]
        if not columns:
            raise KwargError("the prompt is empty: give at least one token")
        session = self.flow.session(columns + run.new_tokens + 1)
        with self._turn:
            run.session = session
            if run.stopped:
                return
        scale = self._scale(run, batch, session)
        with self._turn:
            if run.stopped:
                return
            self.scale = scale
        model = AutoDistributedModelForCausalLM.from_pretrained(ends.folder, flow=self.flow)
        model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            edit=_second_row(run, scale),
            streamer=_Streamer(self, run),
            max_new_tokens=run.new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=ends.tokenizer.pad_token_id,
            **{cache_argument(model.forward): RemoteCache(session)},
        )

    def _scale(self, run: Run, batch: Mapping[str, Tensor], session: Session) -> float:
        """What the vector is multiplied by: the strength times what it is added to, by the vector's own length."""
        import torch

        from kwflow.kwargs.capture import Capture

        point, key = run.vectors.point, (run.prompt, run.vectors.point)
        length = float(torch.linalg.vector_norm(run.vectors[run.layer]))
        if not run.strength or not length:
            return 0.0
        if self._sizes is None or self._sizes[0] != key:
            layers = [0] if point == "embed" else range(self.flow.stop)
            acts = Capture({point: layers}, at="prompt[-1]")
            with torch.no_grad():
                session.step(**session.inputs(batch), capture=acts, phase="prompt")
            self._sizes = key, {n: float(torch.linalg.vector_norm(acts[point, n][0])) for n in layers}
            session.rollback(0)
        return run.strength * self._sizes[1][run.layer] / length

    def _take(self, run: Run, tokens: Tensor) -> None:
        """Show one more token of each row."""
        import torch

        with self._turn:
            if run.stopped:
                return
            run.tokens.append(tokens.cpu())
            self.ids = torch.stack(run.tokens, 1)  # (2, new tokens)
            tokenizer: Any = self.flow.tokenizer  # type: ignore[attr-defined]
            first, second = (tokenizer.decode(row, skip_special_tokens=True) for row in self.ids)
            self.texts = first, second
            self._set_status(status_line(f"{len(run.tokens)} of {run.new_tokens} tokens"))
            self._show(run)

    # ---- what is shown

    def _set_status(self, text: str) -> None:
        self.status.value = text

    def _show(self, run: Run | None = None) -> None:
        steered_title = (
            "with the vector" if run is None else f"with {run.name} at layer {run.layer}, strength {run.strength:g}"
        )
        for widget, title, text in zip(
            (self.baseline, self.steered), ("baseline", steered_title), self.texts, strict=True
        ):
            widget.value = _side(title, "" if run is None else run.prompt, text)

    def _in_code(self, run: Run) -> str:
        """The same in a cell: the call's own argument."""
        code = f"edit=v.edits({self.scale:.4g}, layers=[{run.layer}], at={run.at!r})"
        return f" <code style='white-space:nowrap'>{escape(code)}</code>"


def _second_row(run: Run, scale: float) -> list[Any]:
    """The vector at the second of two rows; nothing of it at the first."""
    import torch

    return run.vectors.edits(torch.tensor([0.0, scale]), layers=[run.layer], at=run.at)


class _Streamer:
    """What generate gives its tokens to: first the prompt (2, columns), then (2,) at each step."""

    def __init__(self, lab: SteerLab, run: Run):
        self.lab, self.run = lab, run

    def put(self, tokens: Tensor) -> None:
        if tokens.dim() == 1:
            self.lab._take(self.run, tokens)

    def end(self) -> None:
        pass


def _side(title: str, prompt: str, text: str) -> str:
    css = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.4;min-height:6em;margin-top:.3em"
    border = f"border:1px solid {html.GREY}66;border-radius:3px;padding:.4em .7em"
    words = f"<span style='opacity:.6'>{escape(prompt)}</span>{escape(text)}"
    return f"<b>{escape(title)}</b><div style='{css};{border}'>{words}</div>"
