"""Published sparse autoencoders: features and their directions. The code: ``kwflow.research.features``."""

from kwflow.research.features import *  # noqa: F403
