"""Data sets of activations: harvested into folders, and read. The code: ``kwflow.research.harvest``."""

from kwflow.research.harvest import *  # noqa: F403
