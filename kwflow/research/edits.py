"""``kf.edits``: each function makes one entry of ``edit=``. The first four stand in ``kf`` too.

    flow(**x, edit=[kf.edits.clamp_max(4.0, 12, point="neuron", dims=[3, 7]), kf.edits.rotate(source, 8, basis=R)])

Arguments that are not said are those of :func:`add`.
"""

from __future__ import annotations

from typing import Any

from kwflow.kwargs.edit import Edit, make

__all__ = ["add", "clamp_max", "clamp_min", "project_out", "put", "rotate", "scale", "set_component"]


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
    """Replace activations by ``value`` (activation patching; Meng et al. 2022). Arguments as :func:`add`'s."""
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
