"""kwflow: a transformer's blocks as pure functions on remote workers, with any keyword argument and exact gradients."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module; imported when first used, so that `import kwflow` takes neither torch nor transformers nor hivemind
_WHERE = {
    "connect": "kwflow.connect",
    "local_swarm": "kwflow.swarm.local",
    "model_path": "kwflow.models.checkpoint",
    "load_blocks": "kwflow.models.spans",
    "chain": "kwflow.blocks",
    "axes": "kwflow.axes",
    "Axes": "kwflow.axes",
    "per_layer": "kwflow.kwargs",
    "stream": "kwflow.verify",
    "Capture": "kwflow.captures",
    "add": "kwflow.edits",
    "put": "kwflow.edits",
    "scale": "kwflow.edits",
    "project_out": "kwflow.edits",
    "sweep": "kwflow.sweep",
    "grid": "kwflow.sweep",
    "AutoDistributedConfig": "kwflow.models.auto",
    "AutoDistributedModel": "kwflow.models.auto",
    "AutoDistributedModelForCausalLM": "kwflow.models.auto",
    "AutoDistributedModelForSequenceClassification": "kwflow.models.auto",
}
_MODULES = ("adapters", "errors", "faults", "notebook", "steering", "verify")

__all__ = [
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "Axes",
    "Capture",
    "__version__",
    "adapters",
    "add",
    "axes",
    "chain",
    "connect",
    "errors",
    "faults",
    "grid",
    "load_blocks",
    "local_swarm",
    "model_path",
    "notebook",
    "per_layer",
    "project_out",
    "put",
    "scale",
    "steering",
    "stream",
    "sweep",
    "verify",
]

if TYPE_CHECKING:
    from kwflow import adapters as adapters
    from kwflow import errors as errors
    from kwflow import faults as faults
    from kwflow import notebook as notebook
    from kwflow import steering as steering
    from kwflow import verify as verify
    from kwflow.axes import Axes as Axes
    from kwflow.axes import axes as axes
    from kwflow.blocks import chain as chain
    from kwflow.captures import Capture as Capture
    from kwflow.connect import connect as connect
    from kwflow.edits import add as add
    from kwflow.edits import project_out as project_out
    from kwflow.edits import put as put
    from kwflow.edits import scale as scale
    from kwflow.kwargs import per_layer as per_layer
    from kwflow.models.auto import AutoDistributedConfig as AutoDistributedConfig
    from kwflow.models.auto import AutoDistributedModel as AutoDistributedModel
    from kwflow.models.auto import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from kwflow.models.auto import (
        AutoDistributedModelForSequenceClassification as AutoDistributedModelForSequenceClassification,
    )
    from kwflow.models.checkpoint import model_path as model_path
    from kwflow.models.spans import load_blocks as load_blocks
    from kwflow.swarm.local import local_swarm as local_swarm
    from kwflow.sweep import grid as grid
    from kwflow.sweep import sweep as sweep
    from kwflow.verify import stream as stream


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kwflow.{name}")
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    if name.startswith("Distributed"):  # DistributedLlamaForCausalLM and so on: one for each class of transformers
        return getattr(importlib.import_module("kwflow.huggingface"), name)
    raise AttributeError(f"module 'kwflow' has no attribute {name!r}")


class _FrontDoor(ModuleType):
    """Importing a module binds its name in the package: ``kwflow.axes`` and ``kwflow.connect`` stay functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor


def __dir__() -> list[str]:
    return sorted(__all__)
