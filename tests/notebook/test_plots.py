"""What notebooks show: plots, and the HTML of flows, sessions and match reports."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import matplotlib.image
import matplotlib.pyplot
import matplotlib.text
import numpy as np
import pytest
import torch

import kwflow as kf
from kwflow.client.stage import Replay
from kwflow.errors import KwargError, ShapeError, WorkerFailed
from kwflow.show.html import BLUE, ORANGE
from kwflow.wire.channel import Timing
from tests.doubles.mortal import Swarm
from tests.oracle import tiny
from tests.oracle.tiny import random

matplotlib.use("agg")
RC = dict(matplotlib.rcParams)

B, S, D, LAYERS = 2, 4, tiny.HIDDEN, tiny.LAYERS
REPLAY = Replay((1, 3), 6, "peer-lost", "closed the stream (EOF)", (("peer-new", 1, 3),), 2, "stepwise", True, 0.25)


def drawn(figure: Any) -> np.ndarray:
    """The picture's pixels (height, width, RGBA)."""
    file = io.BytesIO()
    figure.savefig(file, dpi=144)
    file.seek(0)
    return (255 * matplotlib.image.imread(file)).astype(int)


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


# ---------------------------------------------------------------- plots


def test_a_heatmap_stands_beside_its_difference() -> None:
    values = random(3, 5)
    figure = kf.notebook.heatmap(values, values, xticks=list("abcde"), label="logit")
    (one, other) = (ax.images[0] for ax in figure.axes if ax.images)
    assert np.array_equal(one.get_array(), values.double())
    assert not other.get_array().any() and "every number is equal" in texts(figure)
    assert one.norm.vmin == -one.norm.vmax and other.norm.vmin == 0
    assert "largest 0.5" in texts(kf.notebook.heatmap(values, values + 0.5 * torch.eye(5)[:3]))


def test_a_timeline_marks_what_was_done_and_says_who_took_over() -> None:
    seconds, values = [0.1, 0.1, 2.0, 0.1], {"undisturbed": [1.0, 2.0, 3.0, 4.0], "killed": random(4)}
    figure = kf.notebook.timeline(
        seconds, first=4, marks={6: "kill -9"}, replays=[REPLAY], values=values, label="log p"
    )
    times, below = figure.axes
    assert [bar.get_height() for bar in times.patches] == pytest.approx([100, 100, 2000, 100])
    assert len({bar.get_facecolor() for bar in times.patches}) == 2
    assert "kill -9" in texts(figure)
    assert "layers 1:3 of eer-lost went to peer-new (1:3); 2 steps repeated stepwise" in texts(figure)
    assert np.array_equal(below.lines[1].get_xydata()[:, 1], values["killed"].double())
    assert all(5.5 in ax.lines[-1].get_xdata() for ax in figure.axes), "the mark goes through both"


def test_a_dose_response_shows_median_and_spread() -> None:
    strengths, p = torch.linspace(-1, 1, 5), torch.sigmoid(random(5, 20))
    figure = kf.notebook.dose_response(strengths, {"p": {"layer 1": p, "layer 2": p / 2}, "perplexity": p})
    assert np.allclose(figure.axes[0].lines[0].get_ydata(), p.double().quantile(0.5, dim=1))
    assert len(figure.axes[0].collections) == 4 and "layer 2" in texts(figure)


def timing(op: str = "step", layers: tuple[int, int] = (0, 2), waited: float = 0.0, compute: float = 0.03) -> Timing:
    """Of a millisecond in the queue and two on the network."""
    return Timing(op, layers, "peer-some", 0.0, waited + compute + 0.003, waited, 0.001, compute, 10, 10)


def test_latency_stacks_the_medians_of_each_worker() -> None:
    steps = [timing(compute=own) for own in (0.01, 0.03, 9.0)] + [timing(layers=(2, 4), waited=0.04)]
    figure = kf.notebook.latency([*steps, timing("forward", (2, 4))])
    (ax,) = figure.axes
    waited, queue, compute, network = ([bar.get_width() for bar in bars] for bars in ax.containers)
    assert waited == pytest.approx([0, 40, 0]) and queue == pytest.approx([1, 1, 1])
    assert compute == pytest.approx([30, 30, 30]) and network == pytest.approx([2, 2, 2])
    assert [bar.get_x() for bar in ax.containers[-1]] == pytest.approx([31, 71, 31]), "each begins where another ends"
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["step 0:2, eer-some (3×)", "step 2:4, eer-some (1×)", "forward 2:4, eer-some (1×)"]
    assert "waits" not in texts(kf.notebook.latency([timing()]))


def test_a_loss_curve_stands_above_its_difference() -> None:
    losses = 2 + random(6)
    figure = kf.notebook.loss_curve(losses, losses, marks={3: "kill -9"}, label="cross-entropy")
    above, below = figure.axes
    local, remote = (line.get_xydata() for line in above.lines[:2])
    assert np.array_equal(remote[:, 1], losses.double()) and np.array_equal(local, remote)
    assert not below.lines[0].get_ydata().any() and "every number is equal" in texts(figure)
    assert "kill -9" in texts(figure) and "cross-entropy" in texts(figure)
    assert all(list(ax.lines[-1].get_xdata()) == [3, 3] for ax in figure.axes), "the mark goes through both"

    other = losses.clone()
    other[4] += 0.5
    figure = kf.notebook.loss_curve(other, losses)
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx([0, 0, 0, 0, 0.5, 0])
    assert "largest 0.5" in texts(figure) and figure.axes[1].get_ylim()[1] > 0.5
    assert len(kf.notebook.loss_curve(losses).axes) == 1, "nothing to compare with"


def test_a_loss_that_is_lost_is_drawn_too() -> None:
    nan, inf = float("nan"), float("inf")
    figure = kf.notebook.loss_curve([2.0, inf, nan], [2.0, inf, nan])
    drawn(figure)
    assert "every number is equal" in texts(figure)
    drawn(kf.notebook.loss_curve([2.0, inf, nan], [2.0, 1.0, 1.0]))


def test_tokens_are_written_as_they_are() -> None:
    tokens = ["$$", r"$\frac$", "a$b$"]
    figure = kf.notebook.heatmap(random(3, 3), xticks=tokens, yticks=tokens)
    drawn(figure)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == tokens
    for token in tokens:
        for figure in (
            kf.notebook.timeline([0.1, 0.2], marks={1: token}),
            kf.notebook.loss_curve([2.0, 1.0], marks={1: token}),
        ):
            drawn(figure)
            assert token in texts(figure)


def test_workers_of_one_name_have_bars_of_their_own() -> None:
    two = [replace(timing(), peer=f"{where}-a-peer-some") for where in ("here", "there")]
    (ax,) = kf.notebook.latency(two).axes
    assert len({bar.get_y() for bar in ax.containers[0]}) == 2


def test_figures_are_clear_grey_and_leave_nothing_behind() -> None:
    figures = [
        kf.notebook.heatmap(random(3, 5), title="HEAT"),
        kf.notebook.timeline([0.1, 0.2], replays=[REPLAY]),
        kf.notebook.dose_response([0.0, 1.0], {"p": {"LINE": random(2, 3)}}),
        kf.notebook.latency([timing()], title="TIME"),
        kf.notebook.loss_curve([2.0, 1.0], [2.0, 1.5], marks={1: "MARK"}),
    ]
    for figure in figures:
        pixels = drawn(figure)
        assert pixels[0, 0, 3] == 0, "the page shows through"
        assert figure.get_size_inches()[0] <= 8
        dark = pixels[(pixels[..., 3] == 255) & (pixels[..., :3].max(-1) < 32)]
        assert not len(dark), "black text would not be seen on a dark page"
    assert dict(matplotlib.rcParams) == RC
    assert not matplotlib.pyplot.get_fignums(), "shown by the cell that ends with it, once"


@pytest.mark.parametrize(
    ("draw", "error", "said"),
    [
        (lambda: kf.notebook.heatmap(random(3)), ShapeError, "values has shape (3,)"),
        (lambda: kf.notebook.heatmap(random(3, 5), random(3, 4)), ShapeError, "local (3, 4)"),
        (lambda: kf.notebook.heatmap(random(3, 5), xticks="abc"), ShapeError, "3 entries for 5"),
        (lambda: kf.notebook.timeline([0.1], marks={1: "kill"}), KwargError, "none of the columns 0:1"),
        (lambda: kf.notebook.timeline([0.1, 0.0]), KwargError, "seconds has 0"),
        (lambda: kf.notebook.timeline([0.1], values={"a": [1.0, 2.0]}), ShapeError, "2 numbers for 1"),
        (lambda: kf.notebook.loss_curve([1.0, 2.0], [1.0]), ShapeError, "remote has 2 steps, local 1"),
        (lambda: kf.notebook.loss_curve([1.0, 2.0], marks={2: "kill"}), KwargError, "none of the steps 0:2"),
        (lambda: kf.notebook.loss_curve(random(2, 3)), ShapeError, "remote has shape (2, 3)"),
        (lambda: kf.notebook.dose_response([0.0], {}), KwargError, "panels is empty"),
        (lambda: kf.notebook.dose_response([0.0], {"p": random(2, 3)}), ShapeError, "p has 2 rows for 1"),
        (lambda: kf.notebook.dose_response(["a"], {"p": random(1, 3)}), KwargError, "strengths is a list"),
        (lambda: kf.notebook.latency([]), KwargError, "timings is empty"),
    ],
)
def test_plots_refuse_what_does_not_fit(draw: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        draw()


# ---------------------------------------------------------------- HTML


def test_a_flow_shows_who_serves_which_layers() -> None:
    swarm = Swarm("llama", (0, 2), (2, LAYERS), (1, LAYERS))
    page = swarm.flow._repr_html_()
    assert page.count(BLUE) == 3 and "float32, 0:2 of the next call" in page
    assert "margin-left:50.00%;width:50.00%" in page, "2:4 of four layers"
    swarm.flow.peers.failed(WorkerFailed("closed the stream (EOF)", peer=swarm.names[1]))
    page = swarm.flow.options(peers_blocked=[swarm.names[2]])._repr_html_()
    assert page.count(ORANGE) == 2 and "failed just now" in page and "blocked" in page
    assert "no route for the next call: no live worker serves layer 2" in page


def test_a_session_shows_its_kwargs_and_whom_it_lost() -> None:
    swarm = Swarm("llama", (0, 2), (2, LAYERS), (2, LAYERS))
    v = random(D)
    with swarm.flow.session(max_length=16) as session:
        assert "no step yet" in session._repr_html_()
        session.step(random(B, S, D))
        session.step(random(B, 1, D))
        session.step(random(B, 1, D), steer={3: v})
        page = session._repr_html_()
        assert f"<td style='text-align:left;padding:0 1em 0 0'>0:{S + 1}</td>" in page and "steer" in page
        assert "no worker was lost" in page
        swarm.kill(swarm.names.index(session.workers[1].hop.peer))
        session.step(random(B, 1, D))
        page = session._repr_html_()
    assert "3 stepwise, bitwise" in page and session.replays[0].reason in page


def test_a_capture_shows_what_it_holds_of_each_point() -> None:
    swarm = Swarm("llama", (0, 2), (2, LAYERS))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert "nothing yet" in kf.Capture(resid=[1])._repr_html_()
    points = {"resid": range(3), "head": [0, 2], "pattern": [3]}
    _, acts = swarm.flow.capture(points, random(B, S, D), attention_mask=mask)
    rows = [re.findall("<td[^>]*>([^<]*)", row) for row in acts._repr_html_().split("<tr>")[2:]]
    assert rows == [
        ["resid", "0..2", f"{B}×{S}×{D} (batch pos hidden)", "float32", f"{3 * B * S * D * 4:,}"],
        ["head", "0, 2", f"{B}×{S}×4×{D // 4} (batch pos head head_dim)", "float32", f"{2 * B * S * D * 4:,}"],
        ["pattern", "3", f"{B}×{S}×4×{S} (batch pos head key)", "float32", f"{B * S * 4 * S * 4:,}"],
    ]
    assert acts.nbytes == sum(acts[key].nbytes for key in acts) == (5 * D + 4 * S) * B * S * 4
    assert f"positions: 2 to 4 in a row; {acts.nbytes:,} bytes in all" in acts._repr_html_()


def test_a_sessions_capture_shows_the_positions_of_all_steps() -> None:
    swarm, acts = Swarm("llama", (0, LAYERS)), kf.Capture(pattern=[1])
    with swarm.flow.session(max_length=8) as session:
        for _ in range(3):
            session.step(random(B, 1, D), capture=acts)
    assert f"{B}×3×4×3 (batch pos head key)" in acts._repr_html_()
    assert f"positions: 3 in each row; {B * 4 * (1 + 2 + 3) * 4:,} bytes in all" in acts._repr_html_()


def test_a_match_says_its_verdict_in_words_and_in_no_red_or_green() -> None:
    match = kf.verify.Match("different", "a <gap>", (kf.verify.Comparison("hidden", False, 1.0, 0.5, (1, 2)),))
    page = match._repr_html_()
    assert "DIFFERENT" in page and "a &lt;gap&gt;" in page and ORANGE in page
    assert BLUE in kf.verify.Match("bitwise", "all", ())._repr_html_()
