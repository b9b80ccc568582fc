"""Plots of what researchers do with flows, in plain matplotlib; each gives a Figure, which a notebook shows.

Colours are told apart by everybody (cividis, and PuOr where numbers have two signs), backgrounds are transparent and
text is mid-grey, so that a figure reads on a light and on a dark page.
"""

# L layers, P positions, S strengths, N texts

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from kwflow.errors import KwargError, ShapeError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#808080"
LINES = ("#3a87c8", "#d08a1e", "#8c6bb1", "#4d9f9a")  # blue, orange, violet, teal
WIDTH = 8.0  # inches: a laptop's notebook


def heatmap(
    values: Any,
    local: Any = None,
    *,
    xticks: Sequence[Any] | None = None,
    yticks: Sequence[Any] | None = None,
    xlabel: str = "position",
    ylabel: str = "layer",
    label: str = "",
    title: str = "",
) -> Figure:
    """Draw ``values`` (layer, position), and \\|values - local\\| beside them where the local numbers are given.

        kf.notebook.heatmap(kf.sweep(flow, x, grid, reduce), by_hand, xticks=tokens, label="logit difference")

    ``xticks``, ``yticks``: what to write at each position (a token) and each layer (all numbers from 0 if not given).
    ``label``: what the numbers are. Raises ShapeError, KwargError.
    """
    values_LP = _array(values, 2, "values")
    sides = [(title, values_LP, label)]
    if local is not None:
        local_LP = _array(local, 2, "local")
        if local_LP.shape != values_LP.shape:
            raise ShapeError(f"heatmap: values are {values_LP.shape}, local {local_LP.shape}; give the same numbers")
        sides.append((*_gap(values_LP, local_LP), ""))
    with _style():
        figure, row = _figure(1, len(sides), (WIDTH if len(sides) > 1 else 0.6 * WIDTH, 4.0), sharey=True)
        for ax, (above, numbers, what) in zip(row, sides, strict=True):
            image = ax.imshow(numbers, aspect="auto", origin="lower", interpolation="nearest", **_scale(numbers))
            figure.colorbar(image, ax=ax, label=what)
            ax.grid(visible=False)
            ax.set(xlabel=xlabel, title=above)
            _ticks(ax, "x", xticks, values_LP.shape[1])
        row[0].set_ylabel(ylabel)
        _ticks(row[0], "y", yticks, values_LP.shape[0])
    return figure


def timeline(
    seconds: Sequence[float] | Any,
    *,
    first: int = 0,
    marks: Mapping[int, str] | None = None,
    replays: Sequence[Any] = (),
    values: Mapping[str, Any] | None = None,
    label: str = "",
) -> Figure:
    """Draw the time that each token took, with what happened in between, and the values below it.

        kf.notebook.timeline(seconds, first=5, marks={17: "kill -9"}, replays=session.replays,
                             values={"undisturbed": a, "killed": b}, label="log p of the token")

    ``seconds``: of each step of one column, the first of which made column ``first`` of the session. ``marks``:
    {column: what was done to a worker before that step}. ``replays``: ``session.replays``; each is said in a line
    below the title. ``values``: {name: a number for each step}; a NaN is a gap in its line. Raises KwargError,
    ShapeError.
    """
    step_seconds = _array(seconds, 1, "seconds")
    if not (step_seconds > 0).all():
        raise KwargError(f"timeline: seconds has {step_seconds.min():g}; each step takes some time")
    columns = range(first, first + len(step_seconds))
    marks = dict(marks or {})
    if outside := [column for column in marks if column not in columns]:
        raise KwargError(f"timeline: marks[{outside[0]!r}] is none of the columns {columns.start}:{columns.stop}")
    lines = {name: _array(series, 1, f"values[{name!r}]") for name, series in (values or {}).items()}
    for name, series in lines.items():
        if len(series) != len(step_seconds):
            raise ShapeError(f"timeline: values[{name!r}] has {len(series)} numbers for {len(step_seconds)} steps")
    with _style():
        figure, column_of = _figure(1 + bool(lines), 1, (WIDTH, 3.6 if lines else 2.4), sharex=True)
        _bars(column_of[0], columns, step_seconds, marks)
        for number, (name, series) in enumerate(lines.items()):
            wide: dict[str, Any] = (
                {"lw": 5.0, "alpha": 0.45} if number == 0 and len(lines) > 1 else {"lw": 1.5, "marker": "."}
            )
            column_of[-1].plot(columns, series, label=name, color=LINES[number % len(LINES)], **wide)
        if lines:
            column_of[-1].set_ylabel(label)
            column_of[-1].legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1, ncols=len(lines))
        for ax in column_of:
            for column in marks:
                ax.axvline(column - 0.5, color=LINES[1], ls="--", lw=1.2)
        column_of[-1].set_xlabel("column of the session")
        if replays:
            figure.suptitle("\n".join(_replay_line(replay) for replay in replays), fontsize="small", x=0.01, ha="left")
    return figure


def _bars(ax: Axes, columns: range, step_seconds: np.ndarray, marks: Mapping[int, str]) -> None:
    """Milliseconds of every step, those after a mark in the mark's colour, on a log scale."""
    colours = [LINES[1] if column in marks else LINES[0] for column in columns]
    ax.bar(columns, 1000 * step_seconds, color=colours, width=0.8)
    ax.set_yscale("log")
    ax.set_ylabel("ms per token")
    low, high = 1000 * step_seconds.min(), 1000 * step_seconds.max()
    ax.set_ylim(low / 2, high * 3)
    for column, what in marks.items():
        ax.annotate(what, (column - 0.4, high * 1.4), color=LINES[1], ha="left", parse_math=False)


def _replay_line(replay: Any) -> str:
    start, stop = replay.layers
    by = ", ".join(f"{peer[-8:]} ({a}:{b})" for peer, a, b in replay.by)
    lost = f"column {replay.position}: layers {start}:{stop} of {replay.peer[-8:]} went to {by}"
    return f"{lost}; {replay.steps} steps repeated {replay.mode}"


def loss_curve(
    remote: Any, local: Any = None, *, marks: Mapping[int, str] | None = None, label: str = "loss"
) -> Figure:
    """Draw a loss over the steps of a training run, and \\|remote - local\\| below it where the local run is given.

        kf.notebook.loss_curve(through_workers, on_this_machine, marks={12: "kill -9"})

    ``remote``, ``local``: the loss of each step, (steps,). ``marks``: {step: what was done to a worker in that step}.
    ``label``: what the numbers are. Raises KwargError, ShapeError.
    """
    from matplotlib.ticker import MaxNLocator

    curves = {"remote": _array(remote, 1, "remote")}
    if local is not None:
        curves = {"local": _array(local, 1, "local"), **curves}
        if len(curves["local"]) != len(curves["remote"]):
            raise ShapeError(f"loss_curve: remote has {len(curves['remote'])} steps, local {len(curves['local'])}")
    steps, marks = range(len(curves["remote"])), dict(marks or {})
    if outside := [step for step in marks if step not in steps]:
        raise KwargError(f"loss_curve: marks[{outside[0]!r}] is none of the steps 0:{steps.stop}")
    with _style():
        ratios = {"height_ratios": [3, 1] if len(curves) > 1 else [1]}
        size = (0.75 * WIDTH, 3.6 if len(curves) > 1 else 2.8)
        figure, column_of = _figure(len(curves), 1, size, sharex=True, gridspec_kw=ratios)
        for number, (name, losses) in enumerate(curves.items()):
            wide: dict[str, Any] = {"lw": 5.0, "alpha": 0.45} if name == "local" else {"lw": 1.5, "marker": "."}
            column_of[0].plot(steps, losses, label=name, color=LINES[number], **wide)
        column_of[0].set_ylabel(label)
        column_of[0].legend()
        if len(curves) > 1:
            title, gap = _gap(curves["remote"], curves["local"])
            column_of[1].plot(steps, gap, color=LINES[2], marker=".", lw=1.5)
            column_of[1].set_title(title)
            top = max((value for value in gap if isfinite(value)), default=0.0) or 1.0
            column_of[1].set_ylim(-0.1 * top, 1.15 * top)
            if not gap.any():
                column_of[1].set_yticks([0])
        for ax in column_of:
            for step in marks:
                ax.axvline(step, color=LINES[1], ls="--", lw=1.2)
        for step, what in marks.items():
            column_of[0].annotate(
                what, (step, 1), (4, -10), ("data", "axes fraction"), "offset points", color=LINES[1], parse_math=False
            )
        column_of[-1].set_xlabel("step")
        column_of[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def dose_response(strengths: Any, panels: Mapping[str, Any], *, xlabel: str = "strength") -> Figure:
    """Draw what a dose does to many texts: the median, and the bands that hold the middle half and 80% of them.

        kf.notebook.dose_response(strengths, {"p(good words)": {"layer 12": p12, "layer 20": p20}, "perplexity": ppl})

    ``strengths`` (S,); ``panels``: what is measured -> numbers (S, N texts), or {name: (S, N)} for several lines. Each
    has a panel of its own, side by side. Raises ShapeError, KwargError.
    """
    doses = _array(strengths, 1, "strengths")
    if not panels:
        raise KwargError("dose_response: panels is empty; give {what: numbers (strengths, texts)}")
    with _style():
        figure, row = _figure(1, len(panels), (WIDTH if len(panels) > 1 else 0.6 * WIDTH, 3.2), sharex=True)
        for ax, (what, measured) in zip(row, panels.items(), strict=True):
            lines = measured if isinstance(measured, Mapping) else {"": measured}
            for number, (name, series) in enumerate(lines.items()):
                numbers = _array(series, 2, f"{what}: {name}" if name else what)
                if len(numbers) != len(doses):
                    raise ShapeError(f"dose_response: {what} has {len(numbers)} rows for {len(doses)} strengths")
                _band(ax, doses, numbers, name, LINES[number % len(LINES)])
            ax.set(xlabel=xlabel, ylabel=what)
            if isinstance(measured, Mapping):
                ax.legend()
    return figure


def _band(ax: Axes, doses: np.ndarray, numbers_SN: np.ndarray, name: str, colour: str) -> None:
    import numpy as np

    low, quarter, median, three, high = np.quantile(numbers_SN, (0.1, 0.25, 0.5, 0.75, 0.9), axis=1)
    ax.fill_between(doses, low, high, color=colour, alpha=0.15, lw=0)
    ax.fill_between(doses, quarter, three, color=colour, alpha=0.3, lw=0)
    ax.plot(doses, median, color=colour, marker=".", label=name)


def latency(timings: Sequence[Any], *, title: str = "") -> Figure:
    """Draw where the time of requests goes, by worker: the median milliseconds of queue, compute and network.

        with flow.timed() as timings:
            out = flow(**x)
        kf.notebook.latency(timings)

    A bar for each worker, layers and operation, with the number of requests behind it. In a session a worker that is
    handed the output of the worker before it also waits for that, which is drawn first and pale: it is that worker's
    time. Sub-batches are on their way at once, so bars of one call do not add up to its time. Raises KwargError.
    """
    import numpy as np

    parts = {"waited": GREY, "queue": LINES[1], "compute": LINES[0], "network": LINES[2]}
    samples: dict[tuple[Any, ...], list[list[float]]] = {}
    for timing in timings:
        numbers = [1000 * max(0.0, getattr(timing, part)) for part in parts]
        samples.setdefault((timing.op, *timing.layers, timing.peer), []).append(numbers)
    if not samples:
        raise KwargError("latency: timings is empty; collect them with flow.timed()")
    ops = [op for op, *_ in samples]  # in the order in which they came
    keys = sorted(samples, key=lambda key: (ops.index(key[0]), *key[1:]))
    names = [f"{key[0]} {key[1]}:{key[2]}, {key[3][-8:]} ({len(samples[key])}×)" for key in keys]
    medians = np.array([np.median(samples[key], axis=0) for key in keys])
    with _style():
        figure, (ax,) = _figure(1, 1, (WIDTH, 1.0 + 0.3 * len(names)))
        left, places = np.zeros(len(names)), range(len(names))
        for (part, colour), values in zip(parts.items(), medians.T, strict=True):
            if part != "waited" or values.any():
                part_label = "waits for the worker before" if part == "waited" else part
                ax.barh(
                    places,
                    values,
                    left=left,
                    height=0.7,
                    label=part_label,
                    color=colour,
                    alpha=0.3 if part_label != part else 1,
                )
            left += values
        ax.set_yticks(places, names)
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set(xlabel="ms, median", title=title)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1, ncols=4)
    return figure


# ---- what all plots share ----------------------------------------------------------------------------------------


@contextmanager
def _style() -> Iterator[None]:
    """Transparent, grey text, thin grid; nothing of it stays."""
    import matplotlib

    grey = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    clear = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    rc: dict[Any, Any] = {**dict.fromkeys(grey, GREY), **dict.fromkeys(clear, "none")}
    rc |= {"axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "font.size": 9.0}
    rc |= {"axes.titlesize": "medium", "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(rc):
        yield


def _figure(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure that a notebook shows once, where a cell ends with it."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
    plt.close(figure)
    axes = list(grid.flat)
    for ax in axes:
        ax.tick_params(colors=GREY)  # also of ticks that are made when it is drawn
    return figure, axes


def _array(values: Any, rank: int, what: str) -> np.ndarray:
    """Numbers of a tensor on any device, an array or a list, as float64. Raises KwargError, ShapeError."""
    import numpy as np

    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise KwargError(f"{what} is a {type(values).__name__}, and not numbers: {error}") from error
    if array.ndim != rank or not array.size:
        raise ShapeError(f"{what} has shape {array.shape}; give {rank} dimension{'s' * (rank > 1)}, none of size 0")
    return array


def _gap(remote: np.ndarray, local: np.ndarray) -> tuple[str, np.ndarray]:
    """What to write above the picture of a difference, and the difference; a NaN for a NaN is none."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.where((remote == local) | (np.isnan(remote) & np.isnan(local)), 0.0, abs(remote - local))
    most = gap.max(initial=0.0)
    return f"|remote − local|: {'every number is equal' if most == 0 else f'largest {most:.2g}'}", gap


def _scale(numbers: np.ndarray) -> dict[str, Any]:
    """Two colours around zero where there are two signs, else one ramp; all zero is the ramp's low end."""
    import numpy as np

    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    if low < 0 < high:
        most = max(-low, high)
        return {"cmap": "PuOr_r", "vmin": -most, "vmax": most}
    return {"cmap": "cividis", "vmin": low, "vmax": high if high > low else low + 1.0}


def _ticks(ax: Axes, axis: str, names: Sequence[Any] | None, count: int) -> None:
    if names is None:
        return
    if len(names) != count:
        raise ShapeError(f"heatmap: {axis}ticks has {len(names)} entries for {count}")
    tilted = axis == "x" and any(isinstance(name, str) for name in names)
    names = [str(name) for name in names]  # a token may hold $, which is no formula
    getattr(ax, f"set_{axis}ticks")(range(count), names, rotation=30 if tilted else 0, parse_math=False)
