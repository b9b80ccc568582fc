"""What a built-in kwarg is: a row of the table in ``kwargs.builtin``.

A kwarg is cut into sub-batches and layers, expanded over beams and folded into rows by the axes that its tensors have,
whatever it is; a row says the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from kwflow.kwargs.bound import Bound, Layers, Span
from kwflow.kwargs.points import Projections, point_at
from kwflow.kwargs.positions import Columns
from kwflow.kwargs.schema import Spec

Act = Callable[[Tensor], Tensor]  # of an activation (batch, seq, features), to the same


@dataclass(frozen=True)
class Kwarg:
    """One built-in kwarg: its fields in the order in which they are asked.

    ``spec``: what blocks with these features take; None where they lack its place.
    ``lower``: where positions matter, makes entries for layers of what a caller gives, when all columns are known. A
    layer's entries add up, in order; of another kwarg a layer has one value.
    ``bind``: gives a caller's or a peer's value its axes, checked; None: by the signatures of its spec.
    ``check``: what must hold between it and the rest of a call.
    ``at_points``: what it does to activations, by point. (``blocks.adapters`` acts at projections; what layers take as
    arguments is made by ``prepare``, and keys and values stand in their cache.)
    ``joined``: of several steps into one, in a merged replay: by its axes, by columns, as the first step's, left out.
    ``folds``: variants of a sweep that differ by it are rows of one batch.
    """

    name: str
    spec: Callable[[Features], Spec | None]
    lower: Callable[[Any, Span, Columns], Sequence[tuple[Layers, Any]]] | None = None
    bind: Callable[[Any, Place], Any] | None = None
    check: Callable[[Bound], None] | None = None
    at_points: Callable[[Any, LayerCall], Mapping[str, Act]] | None = None
    joined: Literal["axes", "columns", "first", "not"] = "axes"
    folds: bool = False


@dataclass(frozen=True)
class Features:
    """What a family's blocks have, for ``Kwarg.spec``."""

    points: tuple[str, ...] = ()  # where edits and captures act
    captured_only: tuple[str, ...] = ()  # points where captures alone do
    projections: bool = False
    positions: bool = False  # they take position_ids


@dataclass(frozen=True)
class Place:
    """Where one kwarg goes, for ``Kwarg.bind``: to which layers, what their blocks take, and its name in messages."""

    what: str  # ``steer[12]``
    spec: Spec
    sizes: Mapping[str, int]
    projections: Projections  # those that every layer's worker has
    single_layer: bool  # it is one layer's value, so it has no ``layer`` axis


@dataclass(frozen=True)
class LayerCall:
    """One layer in one call, for ``Kwarg.at_points``."""

    layer: int
    batch_seq: tuple[int, int]
    sizes: Mapping[str, int]  # of the model's axes; empty where only its output is acted on
    token_position: Tensor | None  # (batch, seq), -1 at pads; None where a 4-D mask leaves it unsaid
    captured: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by layer and order there

    def heads_at(self, point: str) -> int:
        """How many heads stand side by side at a point; 1 where it is not by head."""
        at = point_at(point)
        return self.sizes.get(at.features[0], 1) if at.by_head else 1
