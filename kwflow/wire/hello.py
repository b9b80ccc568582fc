"""``Hello``, what a worker announces before a client's first call, and its ``Fingerprint``, as they travel.

The worker makes a Hello (``kwflow.worker.hello``), clients read it. The two may be of different versions: a key that is
unknown here is ignored, and what an older worker does not announce is None or empty, which means "not announced".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kwflow.errors import KwargError
from kwflow.kwargs.schema import Schema, Span
from kwflow.wire.fields import MAX_TEXT, read_fields

MAX_LAYERS = 10_000  # in what a peer announces
MAX_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What must be equal on both sides for bitwise equal values (law 1 in CONTRIBUTING.md). None: not announced.

    A new part is one line here, and one where the worker fills it in. ``more``: parts that a newer version announces,
    which are compared though nobody here knows what they mean.
    """

    checkpoint: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    device: str | None = None  # what computes: "cpu", or "cuda" and its kind
    torch: str | None = None
    isa: str | None = None  # of torch's own kernels
    kernels: str | None = None  # by what MKL and oneDNN choose theirs
    matmul: str | None = None  # "highest": no TF32, no bfloat16 inside float32 products
    threads: int | None = None
    attention: str | None = None
    block_fn: str | None = None
    more: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads is not None and not 0 < self.threads <= MAX_THREADS:
            raise KwargError(f"a fingerprint's threads are {self.threads}; 1 to {MAX_THREADS} are possible")

    def parts(self) -> dict[str, str | int]:
        """What is announced, by name."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "more"}
        return {**{name: value for name, value in known.items() if value is not None}, **self.more}

    def differences(self, other: Fingerprint) -> Iterator[tuple[str, str | int, str | int]]:
        """The parts that both announce and that differ: name, this one's, the other's."""
        theirs = other.parts()
        for name, value in self.parts().items():
            if theirs.get(name, value) != value:
                yield name, value, theirs[name]

    def to_json(self) -> dict[str, Any]:
        return self.parts()

    @classmethod
    def from_json(cls, json: Any) -> Fingerprint:
        """Raises KwargError for what is no fingerprint."""
        if not isinstance(json, Mapping):
            raise KwargError(f"a fingerprint is {json!r:.40}; a JSON object was expected")
        known = {f.name for f in fields(cls)}
        more = {name: value for name, value in json.items() if name not in known and _is_part(name, value)}
        return read_fields(cls, json, more=more)


def _is_part(name: Any, value: Any) -> bool:
    """Whether a part of a newer version can be compared; what is nested or huge is left out, as other unknown keys."""
    return len(str(name)) <= MAX_TEXT and (type(value) is int or (type(value) is str and len(value) <= MAX_TEXT))


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """What a worker takes at once. None: not announced."""

    kv_bytes: int | None = None  # for keys and values of all sessions
    batch_tokens: int | None = None  # in one request
    order: int | None = None  # of derivatives in one request

    def __post_init__(self) -> None:
        if wrong := [f"{name} {value}" for name, value in asdict(self).items() if value is not None and value < 0]:
            raise KwargError(f"a worker's limits are {', '.join(wrong)}; none is below 0")

    def to_json(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, json: Any) -> WorkerLimits:
        """Raises KwargError for what are no limits."""
        return read_fields(cls, json)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a worker announces: what it serves, takes and can do, and what its numbers depend on."""

    protocol: int | None = None
    version: str = ""
    features: tuple[str, ...] = ()
    model: str = ""
    span: Span
    dtype: str  # in which hidden is computed
    quantization: str = ""  # of the weights
    device: str = "cpu"
    schema: Schema
    limits: WorkerLimits = WorkerLimits()
    fingerprint: Fingerprint = Fingerprint()
    layers: tuple[str, ...] = ()  # a hash of each layer's weights

    def __post_init__(self) -> None:
        start, stop = self.span
        if not 0 <= start < stop <= MAX_LAYERS:
            raise KwargError(f"a worker's span is {start}:{stop}; 0 <= start < stop <= {MAX_LAYERS} is possible")

    @property
    def computes_in(self) -> str:
        """How its layers are computed, for people: ``nf4 bfloat16 on cuda:0``."""
        return " ".join(
            filter(None, [self.quantization, self.dtype, "" if self.device == "cpu" else f"on {self.device}"])
        )

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        nested = {name: value.to_json() for name, value in values.items() if hasattr(value, "to_json")}
        return {**values, **lists, **nested}

    @classmethod
    def from_json(cls, json: Any) -> Hello:
        """Read what a peer announces. Raises KwargError for what is no hello."""
        return read_fields(cls, json)
