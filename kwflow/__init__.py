"""kwflow: a transformer's blocks as pure functions on remote workers, with any keyword argument and exact gradients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module; imported when first used, so that `import kwflow` takes neither torch nor transformers nor hivemind
_WHERE = {
    "connect": "kwflow.swarm.connect",
    "local_swarm": "kwflow.swarm.local",
    "model_path": "kwflow.models.files.checkpoint",
    "load_blocks": "kwflow.models.spans",
    "chain": "kwflow.blocks.span",
    "axes": "kwflow.kwargs.axes",
    "Axes": "kwflow.kwargs.axes",
    "per_layer": "kwflow.kwargs.bind",
    "stream": "kwflow.research.verify",
    "Capture": "kwflow.kwargs.capture",
    "add": "kwflow.research.edits",
    "put": "kwflow.research.edits",
    "scale": "kwflow.research.edits",
    "project_out": "kwflow.research.edits",
    "sweep": "kwflow.research.sweep",
    "grid": "kwflow.research.sweep",
    "chat": "kwflow.huggingface.chat",
    "here": "kwflow.client.here",
    "AutoDistributedConfig": "kwflow.huggingface.auto",
    "AutoDistributedModel": "kwflow.huggingface.auto",
    "AutoDistributedModelForCausalLM": "kwflow.huggingface.auto",
    "AutoDistributedModelForSequenceClassification": "kwflow.huggingface.auto",
}
_MODULES = ("activations", "adapters", "edits", "errors", "faults", "features", "notebook", "steering", "verify")

__all__ = [
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "Axes",
    "Capture",
    "__version__",
    "activations",
    "adapters",
    "add",
    "axes",
    "chain",
    "chat",
    "connect",
    "edits",
    "errors",
    "faults",
    "features",
    "grid",
    "here",
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
    from kwflow import activations as activations
    from kwflow import adapters as adapters
    from kwflow import edits as edits
    from kwflow import errors as errors
    from kwflow import features as features
    from kwflow import notebook as notebook
    from kwflow import steering as steering
    from kwflow import verify as verify
    from kwflow.blocks.span import chain as chain
    from kwflow.client.here import here as here
    from kwflow.huggingface.auto import AutoDistributedConfig as AutoDistributedConfig
    from kwflow.huggingface.auto import AutoDistributedModel as AutoDistributedModel
    from kwflow.huggingface.auto import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from kwflow.huggingface.auto import (
        AutoDistributedModelForSequenceClassification as AutoDistributedModelForSequenceClassification,
    )
    from kwflow.huggingface.chat import chat as chat
    from kwflow.kwargs.axes import Axes as Axes
    from kwflow.kwargs.axes import axes as axes
    from kwflow.kwargs.bind import per_layer as per_layer
    from kwflow.kwargs.capture import Capture as Capture
    from kwflow.models.files.checkpoint import model_path as model_path
    from kwflow.models.spans import load_blocks as load_blocks
    from kwflow.research.edits import add as add
    from kwflow.research.edits import project_out as project_out
    from kwflow.research.edits import put as put
    from kwflow.research.edits import scale as scale
    from kwflow.research.sweep import grid as grid
    from kwflow.research.sweep import sweep as sweep
    from kwflow.research.verify import stream as stream
    from kwflow.swarm.connect import connect as connect
    from kwflow.swarm.local import local_swarm as local_swarm


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


def __dir__() -> list[str]:
    return sorted(__all__)
