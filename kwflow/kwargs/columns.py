"""``attention_mask`` and ``position_ids``: what holds for the columns of a whole call, an argument of the layers."""

from __future__ import annotations

from kwflow.autograd.transforms import is_wrapped
from kwflow.errors import KwargError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.kwarg import Features
from kwflow.kwargs.schema import Spec


def mask_spec(_: Features) -> Spec:
    """0 and 1 for each row and column; or for each head and query too, bool, or floats that are added."""
    return Spec(forms=(("batch key", ("int", "bool")), ("batch head seq key", ("bool", "float"))), group="call")


def positions_spec(features: Features) -> Spec | None:
    return Spec(forms=(("batch seq", ("int",)),), group="call") if features.positions else None


def check_mask(bound: Bound) -> None:
    """Raise KwargError for a 2-D mask of other numbers than 0 and 1, as far as its values can be looked at."""
    leaf = bound.call().get("attention_mask")
    if leaf is None or len(leaf.axes) != 2 or is_wrapped(leaf.tensor) or leaf.tensor.is_meta:
        return
    if not bool(((leaf.tensor == 0) | (leaf.tensor == 1)).all()):
        raise KwargError(f"attention_mask {describe(leaf.tensor)} 'batch key' holds other numbers than 0 and 1")
