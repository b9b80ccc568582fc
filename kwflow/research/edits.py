"""``kf.edits``: each function makes one entry of ``edit=``. The first four stand in ``kf`` too.

    flow(**x, edit=[kf.edits.clamp_max(4.0, 12, point="neuron", dims=[3, 7]), kf.edits.rotate(source, 8, basis=R)])

Arguments that are not said are those of :func:`add`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from kwflow.errors import KwargError
from kwflow.kwargs.edit import Edit, make
from kwflow.kwargs.noise import SEEDS
from kwflow.kwargs.tree import as_int

__all__ = ["add", "clamp_max", "clamp_min", "noise", "project_out", "put", "rotate", "scale", "set_component"]


def add(
    value: Any,
    layers: Any = None,
    *,
    point: str = "resid",
    at: Any = "all",
    scale: Any = 1.0,
    heads: Any = None,
    dims: Any = None,
) -> Edit:
    """Add ``scale * value`` to activations.

    ``value``: (hidden,), or axes any of "[batch] [pos] hidden" (kf.axes where the rank leaves it open), at the point
    ``head`` "[batch] [pos] head head_dim"; or {layer: value}. ``layers``: absolute numbers. ``point``: see
    ``kwflow.kwargs.points``. ``at``: see ``kwflow.kwargs.positions``. ``heads``, at the point ``head``, and ``dims``,
    of the last axis (at ``neuron``, neurons): only these, of which value has as many. Differentiable with respect to
    value and scale.
    """
    return make("add", value, layers, point, at, heads, dims, strength=scale)


def put(
    value: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None, dims: Any = None
) -> Edit:
    """Replace activations by ``value`` (activation patching; Meng et al. 2022). Arguments as :func:`add`'s.

    With the mean of activations it is mean ablation; at the point ``head`` a mean is each head's own.
    """
    return make("put", value, layers, point, at, heads, dims)


def scale(
    factor: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None, dims: Any = None
) -> Edit:
    """Multiply activations by ``factor``: a number, or a tensor with axes any of "[batch] [pos]" (and "head" there)."""
    return make("scale", factor, layers, point, at, heads, dims)


def project_out(
    direction: Any,
    layers: Any = None,
    *,
    point: str = "resid",
    at: Any = "all",
    scale: Any = 1.0,
    heads: Any = None,
    dims: Any = None,
) -> Edit:
    """Remove ``scale`` of the component along ``direction`` (directional ablation; Arditi et al. 2024)."""
    return make("project_out", direction, layers, point, at, heads, dims, strength=scale)


def clamp_min(
    bound: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None, dims: Any = None
) -> Edit:
    """Raise what is below ``bound`` to it: a number, or a tensor with the axes of ``kf.scale``'s factor.

    Differentiable where it does not act, and with respect to a tensor ``bound`` where it does.
    """
    return make("clamp_min", bound, layers, point, at, heads, dims)


def clamp_max(
    bound: Any, layers: Any = None, *, point: str = "resid", at: Any = "all", heads: Any = None, dims: Any = None
) -> Edit:
    """Lower what is above ``bound`` to it; as :func:`clamp_min`."""
    return make("clamp_max", bound, layers, point, at, heads, dims)


def set_component(
    direction: Any,
    layers: Any = None,
    *,
    to: Any,
    point: str = "resid",
    at: Any = "all",
    heads: Any = None,
    dims: Any = None,
) -> Edit:
    """Make the component along the unit vector of ``direction`` equal to ``to``, a number or a tensor "[batch]".

    A feature clamped to a value (Templeton et al. 2024); with ``to=0.0`` it is ``kf.project_out``. A direction of zeros
    changes nothing. Differentiable with respect to direction and to.
    """
    return make("set_component", direction, layers, point, at, heads, dims, strength=to)


def rotate(
    source: Any,
    layers: Any = None,
    *,
    basis: Any,
    point: str = "resid",
    at: Any = "all",
    scale: Any = 1.0,
    heads: Any = None,
    dims: Any = None,
) -> Edit:
    """Take the part in the span of ``basis`` from ``source``, and leave the rest: x + scale * (source - x) R Rᵀ.

    Distributed alignment search (Geiger et al. 2024). ``basis`` R: (hidden, rank), or axes "[batch] hidden rank", whose
    first feature axis is source's last. Its columns should be orthonormal; they are taken as they are, so that R may be
    trained (``torch.nn.utils.parametrizations.orthogonal``). ``source``: as ``kf.put``'s value. Differentiable with
    respect to source, basis and scale.
    """
    return make("rotate", source, layers, point, at, heads, dims, strength=scale, basis=basis)


def noise(
    std: Any,
    layers: Any = None,
    *,
    seed: int,
    point: str = "resid",
    at: Any = "all",
    heads: Any = None,
    dims: Any = None,
) -> Edit:
    """Add ``std`` times standard normal noise, as causal tracing does to the subject's embeddings (Meng et al. 2022).

        kf.edits.noise(0.1, point="embed", at=[2, 3], seed=0)

    The numbers of a token depend on ``seed`` (0 to 2**64 - 1), the point, the layer, the row in the batch as it is
    given, its token position and nothing else: they are the same to the bit in a call, in sub-batches, in a session and
    in ``generate`` (whose beams have their row's), and after a failure. ``heads`` and ``dims`` get what they would get
    among all. Drawn by the client in float32 (numpy's Philox), and sent: 4 bytes for each number. ``std``: a number, a
    tensor "[batch]", or {layer: std}; differentiable with respect to a tensor.
    """
    number = as_int(seed)
    if number is None or not 0 <= number < SEEDS:
        raise KwargError(f"kf.edits.noise: seed={seed!r:.60}; give a whole number from 0 to 2**64 - 1")
    for one in std.values() if isinstance(std, Mapping) else [std]:
        if isinstance(one, Real) and not (0 <= float(one) and math.isfinite(one)):
            raise KwargError(f"kf.edits.noise: std={one!r:.60}; give a finite number that is not negative")
    return make("noise", std, layers, point, at, heads, dims, seed=number)
