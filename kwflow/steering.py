"""Steering vectors: made from contrasts, read, written, applied. The code: ``kwflow.research.steering``."""

from kwflow.research.steering import *  # noqa: F403
