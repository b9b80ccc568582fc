"""kwflow: a transformer's blocks as pure functions on remote workers, with any keyword argument and exact gradients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module; imported when first used, so that `import kwflow` takes neither torch nor transformers nor hivemind
_WHERE = {
    "connect": "kwflow.connect",
    "local_swarm": "kwflow.swarm.local",
    "model_path": "kwflow.models.checkpoint",
    "load_blocks": "kwflow.models.families",
    "chain": "kwflow.blocks",
    "axes": "kwflow.axes",
    "Axes": "kwflow.axes",
    "per_layer": "kwflow.kwargs",
    "stream": "kwflow.verify",
    "AutoDistributedModelForCausalLM": "kwflow.models.auto",
}
_MODULES = ("errors", "verify")

__all__ = ["__version__", *_WHERE, *_MODULES]

if TYPE_CHECKING:
    from kwflow import errors, verify
    from kwflow.axes import Axes, axes
    from kwflow.blocks import chain
    from kwflow.connect import connect
    from kwflow.kwargs import per_layer
    from kwflow.models.auto import AutoDistributedModelForCausalLM
    from kwflow.models.checkpoint import model_path
    from kwflow.models.families import load_blocks
    from kwflow.swarm.local import local_swarm
    from kwflow.verify import stream


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kwflow.{name}")
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kwflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
