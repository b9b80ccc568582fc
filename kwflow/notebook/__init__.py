"""What a notebook shows: plots here, and the HTML that flows, sessions and match reports show themselves as.

    kf.notebook.heatmap(remote, local, xticks=tokens)           # layer × position, |remote - local| beside
    kf.notebook.timeline(seconds, marks={17: "kill -9"}, replays=session.replays)
    kf.notebook.dose_response(strengths, {"p(good words)": p, "perplexity": ppl})
    kf.notebook.latency(timings)                                # of flow.timed(): network, queue and compute by worker
    kf.notebook.loss_curve(through_workers, on_this_machine, marks={12: "kill -9"})
    kf.notebook.steer_lab(flow, {"praise": v})                  # a live panel: text beside steered text
    kf.notebook.swarm_view(swarm, flow=flow)                    # a live map, with buttons that kill, pause, add

Plots need matplotlib and panels ipywidgets (``pip install 'kwflow[notebook]'``), imported when the first one is made.
"""

from __future__ import annotations

from kwflow.notebook.lab import steer_lab as steer_lab
from kwflow.notebook.live import swarm_view as swarm_view
from kwflow.notebook.plots import dose_response as dose_response
from kwflow.notebook.plots import heatmap as heatmap
from kwflow.notebook.plots import latency as latency
from kwflow.notebook.plots import loss_curve as loss_curve
from kwflow.notebook.plots import timeline as timeline

__all__ = ["dose_response", "heatmap", "latency", "loss_curve", "steer_lab", "swarm_view", "timeline"]
