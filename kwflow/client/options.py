"""How a flow is run: what is never a kwarg."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kwflow.errors import KwargError
from kwflow.kwargs.tree import as_int


@dataclass(frozen=True)
class Options:
    """How a flow is run: never a kwarg."""

    timeout: float = 300.0  # seconds for one call in all
    batch_tokens: int = 1024  # tokens in one sub-batch: rows are cut, never columns
    peers_blocked: tuple[str, ...] = ()
    dtype: str | None = None  # "float64": each worker upcasts its span for the call
    push: bool = True  # in a session each worker hands its output to the next one directly

    def changed(self, given: Mapping[str, Any]) -> Options:
        """With other values. Raises KwargError that says what there is, and what each may be."""
        changes = dict(given)
        unknown = set(changes) - set(Options.__dataclass_fields__)
        if unknown:
            raise KwargError(f"no option {sorted(unknown)[0]!r}; options are {', '.join(Options.__dataclass_fields__)}")
        if "peers_blocked" in changes:
            blocked = changes["peers_blocked"]
            changes["peers_blocked"] = (blocked,) if isinstance(blocked, str) else tuple(blocked)
        if isinstance(changes.get("dtype"), torch.dtype):
            changes["dtype"] = str(changes["dtype"]).removeprefix("torch.")
        for name in {"timeout", "batch_tokens"} & set(changes):
            number = as_int(changes[name])
            changes[name] = changes[name] if number is None else number
        options = replace(self, **changes)
        if options.dtype not in (None, "float32", "float64"):
            raise KwargError(f"option dtype is {options.dtype!r}; a worker upcasts to 'float32' or 'float64'")
        timeout, tokens = options.timeout, options.batch_tokens
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise KwargError(f"option timeout is {timeout!r}; give a finite number of seconds")
        if type(options.push) is not bool:
            raise KwargError(f"option push is {options.push!r}; give True or False")
        if type(tokens) is not int or tokens < 1:
            raise KwargError(f"option batch_tokens is {tokens!r}; give a number of tokens")
        return options
