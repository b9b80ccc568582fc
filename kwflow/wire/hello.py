"""What a worker says of itself, as a client reads it."""

from __future__ import annotations

from typing import Any

from kwflow.errors import KwargError
from kwflow.kwargs.schema import Schema


def read(said: Any) -> dict[str, Any]:
    """What a peer said of itself, its schema as one; what an older version does not say is filled in.

    Raises KwargError, and what else nonsense makes Python raise.
    """
    older = {"features": [], "limits": {}, "fingerprint": {}, "quantization": "", "device": "cpu", "layers": []}
    hello = {**older, **said, "schema": Schema.from_json(said["schema"])}
    for name, value in {**older, "span": [], "dtype": ""}.items():
        if type(hello[name]) is not type(value):
            raise KwargError(f"{name} is {hello[name]!r:.40}")
    span, limit = hello["span"], hello["limits"].get("batch_tokens", 0)
    if [*map(type, [*span, limit])] != [int] * 3 or not 0 <= span[0] < span[1]:
        raise KwargError(f"span is {span!r:.40}, batch_tokens {limit!r:.40}")
    return hello
