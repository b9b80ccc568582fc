"""How a flow is run: what is never a kwarg."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How a flow is run: never a kwarg."""

    timeout: float = 300.0  # seconds for one call in all
    batch_tokens: int = 1024  # tokens in one sub-batch: rows are cut, never columns
    peers_blocked: tuple[str, ...] = ()
    dtype: str | None = None  # "float64": each worker upcasts its span for the call
    push: bool = True  # in a session each worker hands its output to the next one directly
