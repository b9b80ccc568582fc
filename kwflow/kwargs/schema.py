"""What blocks take: a Spec for each kwarg, a Schema for a span. Workers announce theirs in ``hello``. Words only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kwflow.errors import KwargError

Span = tuple[int, int]  # layers [start, stop)

SCALARS: dict[str, type | tuple[type, ...]] = {"float": (float, int), "int": int, "bool": bool, "str": str}


@dataclass(frozen=True)
class Spec:
    """What one kwarg may be: signatures with the kinds of dtype each takes, or scalars, or a free tree."""

    forms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    scalars: tuple[str, ...] = ()
    tree: bool = False  # nested; its tensors are declared by the caller with kf.axes
    bare: bool = True  # a tensor without declared axes is taken when its rank says which form it is
    by_layer: bool = False  # {layer: value} is taken
    required: bool = False
    points: tuple[str, ...] = ()  # it acts at these points of a layer, at token positions (edit, capture)
    projections: str = ""  # it acts at projections (lora, ia3); what it takes, in words
    prefix: str = ""  # it stands before the columns (prefix_kv); what it takes, in words
    group: str = "layers"

    @property
    def kind(self) -> str:
        """How it is given: entries that act at points, adapters of projections, a prefix, or values with axes."""
        declared = {"points": self.points, "projections": self.projections, "prefix": self.prefix}
        return next((kind for kind, what in declared.items() if what), "values")

    @property
    def signatures(self) -> tuple[str, ...]:
        return tuple(signature for signature, _ in self.forms)

    def says(self) -> str:
        """What the kwarg takes, for an error message."""
        if self.points:
            return "what kf.add and the others of kf.edits make, or a kf.Capture"
        if self.projections or self.prefix:
            return self.projections or self.prefix
        tensors = ["a tensor with axes " + " | ".join(map(repr, self.signatures))] if self.forms else []
        return " | ".join([*tensors, *self.scalars]) or "a tree whose tensors are declared with kf.axes"


@dataclass(frozen=True)
class Scaling:
    """How rotary scaling depends on a call's length: its highest position + 1.

    Keys keep the scale of the step that made them: steps give the same when they are joined only if ``of`` says the
    same of each and of all together.
    """

    borders: tuple[int, ...] = ()  # up to such a length there is one scale, beyond it another (longrope)
    beyond: int | None = None  # from here on each length has its own (dynamic)

    def of(self, length: int) -> tuple[int, ...]:
        """Which scale a call of this length has."""
        exact = length if self.beyond is not None and length > self.beyond else 0
        return (*(border for border in self.borders if border < length), exact)

    def joined(self, other: Scaling) -> Scaling:
        """Where layers of both kinds are."""
        ends = [scaling.beyond for scaling in (self, other) if scaling.beyond is not None]
        return Scaling(tuple(sorted({*self.borders, *other.borders})), min(ends, default=None))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scaling:
        """Raises KwargError, and what else nonsense makes Python raise."""
        borders, beyond = data.get("borders", []), data.get("beyond")
        if not all(type(length) is int for length in [*borders, *([] if beyond is None else [beyond])]):
            raise KwargError(f"scaling is {data!r:.80}")
        return cls(tuple(borders), beyond)


@dataclass(frozen=True)
class Schema:
    """The kwargs that a span's blocks take, the model's sizes, names refused with the reason, the projections, and how
    what the blocks make depends on a call's length."""

    kwargs: Mapping[str, Spec]
    sizes: Mapping[str, int]
    refused: Mapping[str, str] = field(default_factory=dict)
    projections: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by dotted name: features in and out
    scaling: Scaling = Scaling()

    def to_json(self) -> dict[str, Any]:
        kwargs = {
            name: {**vars(spec), "forms": [[s, list(k)] for s, k in spec.forms]} for name, spec in self.kwargs.items()
        }
        projections = {name: list(sizes) for name, sizes in self.projections.items()}
        data = {"kwargs": kwargs, "sizes": dict(self.sizes), "refused": dict(self.refused), "projections": projections}
        scaling = {"borders": list(self.scaling.borders), "beyond": self.scaling.beyond}
        return data if self.scaling == Scaling() else {**data, "scaling": scaling}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        """Raises KwargError, and what else nonsense makes Python raise."""
        defaults = vars(Spec())  # a newer worker may say more; what is not known here is left out
        kwargs = {}
        for name, spec in data["kwargs"].items():
            spec = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in spec.items()
                if key in defaults
            }
            forms = tuple((signature, tuple(kinds)) for signature, kinds in spec.pop("forms", ()))
            kwargs[name] = replace(Spec(forms=forms), **spec)
            if wrong := [key for key, value in vars(kwargs[name]).items() if type(value) is not type(defaults[key])]:
                raise KwargError(f"{wrong[0]} of {name!r:.40} is {spec[wrong[0]]!r:.40}")
        sizes, projections = dict(data["sizes"]), data.get("projections", {})
        projections = {name: (int(a), int(b)) for name, (a, b) in projections.items()}
        if not {"hidden", "head", "head_dim"} <= sizes.keys() or not all(type(size) is int for size in sizes.values()):
            raise KwargError(f"sizes are {sizes!r:.80}")
        scaling = Scaling.from_json(data.get("scaling", {}))  # an older worker does not say
        return cls(kwargs, sizes, dict(data["refused"]), projections, scaling)
