"""Adapters as PEFT's folders and live models hold them, as kwargs of a flow. The code: ``kwflow.research.adapters``."""

from kwflow.research.adapters import *  # noqa: F403
