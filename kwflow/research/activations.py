"""Data sets of activations: kept by ``flow.harvest``, read as a torch Dataset.

acts = flow.harvest(texts, {"resid": [8]}, "acts/")          # again after an interrupt: it goes on
acts = kf.activations.read("acts/")
acts[5]["resid", 8]                                          # (hidden,), the sixth token's
for shard in acts.shards(): shard["resid", 8]                # (tokens, hidden), one shard in memory
"""

from __future__ import annotations

import os

from kwflow.client.activations import Activations
from kwflow.client.harvest import harvest

__all__ = ["Activations", "harvest", "read"]


def read(folder: str | os.PathLike[str]) -> Activations:
    """What ``flow.harvest`` kept in a folder, also while it runs or was interrupted: the shards that are whole.

    Raises ModelError for a folder that is damaged or none.
    """
    return Activations(folder)
