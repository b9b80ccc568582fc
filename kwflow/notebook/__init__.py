"""What a notebook shows: plots here, and the HTML that flows, sessions and match reports show themselves as.

    kf.notebook.heatmap(remote, local, xticks=tokens)           # layer × position, |remote - local| beside
    kf.notebook.timeline(seconds, marks={17: "kill -9"}, replays=session.replays)
    kf.notebook.dose_response(strengths, {"p(good words)": p, "perplexity": ppl})
    kf.notebook.latency(timings)                                # of flow.timed(): network, queue and compute by worker
    kf.notebook.loss_curve(through_workers, on_this_machine, marks={12: "kill -9"})

Plots need matplotlib (``pip install 'kwflow[notebook]'``), which is imported when the first one is drawn.
"""

from __future__ import annotations

from kwflow.notebook.plots import dose_response as dose_response
from kwflow.notebook.plots import heatmap as heatmap
from kwflow.notebook.plots import latency as latency
from kwflow.notebook.plots import loss_curve as loss_curve
from kwflow.notebook.plots import timeline as timeline

__all__ = ["dose_response", "heatmap", "latency", "loss_curve", "timeline"]
