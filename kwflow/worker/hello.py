"""What a worker says of itself: what it serves, takes and can do, and what its numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kwflow.blocks.numerics import numerics
from kwflow.blocks.span import SpanSpec
from kwflow.version import __version__
from kwflow.wire.message import PROTOCOL

FEATURES = (
    *("hello", "run", "vjp", "jvp", "vmap", "nested", "float64"),
    *("step", "reorder", "rollback", "sent once", "grows"),
)


def hello(spec: SpanSpec, model: str, limits: Mapping[str, int], threads: int) -> dict[str, Any]:
    """What a client learns before its first call."""
    return {
        "protocol": PROTOCOL,
        "version": __version__,
        "features": features(spec),
        "model": model,
        "span": [spec.start, spec.stop],
        "dtype": _name(spec.dtype),
        "quantization": spec.identity.get("quantization", ""),
        "device": str(spec.device),
        "schema": spec.schema.to_json(),
        "limits": limits,
        "fingerprint": fingerprint(spec, threads),
        "layers": spec.identity.get("layers", []),
    }


def fingerprint(spec: SpanSpec, threads: int) -> dict[str, Any]:
    """What must be equal on both sides for bitwise equal values (DESIGN law 1)."""
    return {
        "checkpoint": spec.identity.get("checkpoint", ""),
        "dtype": _name(spec.dtype),
        "quantization": spec.identity.get("quantization", ""),
        "device": processor(spec.device),
        **numerics(),
        "threads": threads,
        "attention": spec.identity.get("attention", ""),
        "block_fn": spec.identity.get("block_fn", ""),
    }


def features(spec: SpanSpec) -> list[str]:
    """What this worker can do."""
    # int8 rounds activations, whatever the precision around it; MPS has no float64
    lacks = {"float64"} if spec.identity.get("quantization") == "int8" or spec.device.type == "mps" else set()
    return [feature for feature in FEATURES if feature not in lacks]


def processor(device: torch.device) -> str:
    """What computes: a CUDA device's kernels depend on its kind."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
