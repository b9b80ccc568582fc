"""``steer={layer: vector}``: a vector added to the residual stream behind a layer, at every column of a call.

Short for ``kf.add`` (activation addition; Turner et al. 2023), and for all layers at once with declared axes. Cast to
hidden's dtype where it acts, so its gradient comes back in the caller's.
"""

# B batch, S seq, D hidden

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kwflow.kwargs.axes import Axed, spread
from kwflow.kwargs.kwarg import Act, Features, LayerCall
from kwflow.kwargs.points import LEAVING
from kwflow.kwargs.schema import Spec


def spec(_: Features) -> Spec:
    return Spec(forms=(("[layer] [batch] [seq] hidden", ("float",)),), bare=False, by_layer=True)


def at_points(vector: Axed, _: LayerCall) -> Mapping[str, Act]:
    return {LEAVING: lambda hidden: add_steer(hidden, vector)}


def add_steer(hidden_BSD: Tensor, steer: Axed) -> Tensor:
    """Add a vector to the residual stream: axes any of ``[batch] [seq] hidden``."""
    return hidden_BSD + spread(steer, ("batch", "seq", "hidden")).to(hidden_BSD.device, hidden_BSD.dtype)
