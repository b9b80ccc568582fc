"""Edits of activations, the four of ``kf`` and more. The code: ``kwflow.research.edits``."""

from kwflow.research.edits import *  # noqa: F403
