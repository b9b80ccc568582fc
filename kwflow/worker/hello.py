"""What a worker says of itself: what it serves, takes and can do, and what its numbers depend on."""

from __future__ import annotations

from dataclasses import replace

import torch

from kwflow.blocks.numerics import numerics
from kwflow.blocks.span import SpanSpec
from kwflow.version import __version__
from kwflow.wire.hello import Fingerprint, Hello, WorkerLimits
from kwflow.wire.message import PROTOCOL

FEATURES = (
    *("hello", "run", "vjp", "jvp", "vmap", "nested", "float64"),
    *("step", "reorder", "rollback", "sent once", "grows"),
)


def hello(spec: SpanSpec, model: str, limits: WorkerLimits, threads: int, *, push: bool = False) -> Hello:
    """What a client learns before its first call; ``push``: whether it can hand outputs on to other workers."""
    return Hello(
        protocol=PROTOCOL,
        version=__version__,
        features=(*features(spec), "push") if push else features(spec),
        model=model,
        span=(spec.start, spec.stop),
        dtype=_name(spec.dtype),
        quantization=spec.identity.get("quantization", ""),
        device=str(spec.device),
        schema=spec.schema,
        limits=limits,
        fingerprint=fingerprint(spec, threads),
        layers=tuple(spec.identity.get("layers", ())),
    )


def fingerprint(spec: SpanSpec, threads: int) -> Fingerprint:
    """What must be equal on both sides for bitwise equal values (law 1 in CONTRIBUTING.md)."""
    parts = Fingerprint(
        checkpoint=spec.identity.get("checkpoint", ""),
        dtype=_name(spec.dtype),
        quantization=spec.identity.get("quantization", ""),
        device=processor(spec.device),
        threads=threads,
        attention=spec.identity.get("attention", ""),
        block_fn=spec.identity.get("block_fn", ""),
    )
    return replace(parts, **numerics())


def features(spec: SpanSpec) -> tuple[str, ...]:
    """What this worker can do."""
    # int8 rounds activations, whatever the precision around it; MPS has no float64
    lacks = {"float64"} if spec.identity.get("quantization") == "int8" or spec.device.type == "mps" else set()
    return tuple(feature for feature in FEATURES if feature not in lacks)


def processor(device: torch.device) -> str:
    """What computes: a CUDA device's kernels depend on its kind."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
