"""Proof that a flow gives the local model's values. The code: ``kwflow.research.verify``."""

from kwflow.research.verify import *  # noqa: F403
