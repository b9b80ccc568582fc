"""Data sets of activations: harvested into folders, and read. The code: ``kwflow.research.activations``."""

from kwflow.research.activations import *  # noqa: F403
