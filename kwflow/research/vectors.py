"""Control vectors by layer at a point of a model: arithmetic, and how they become edits. See ``kwflow.steering``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import in_forward_mode, is_wrapped
from kwflow.errors import KwargError, ShapeError, SpanError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.edit import Edit
from kwflow.kwargs.points import EDITED, no_point, numbers, takes_edits
from kwflow.research.edits import add, project_out


@dataclass(frozen=True, eq=False, repr=False)
class Vectors:
    """Vectors by layer at one point of a model: ``v[12]`` is (hidden,), at the point ``head`` (head, head_dim).

        v = kf.steering.Vectors({12: a, 13: b})                # a, b: (hidden,)
        v[12], v[10:13], v.at_layers([13]), v.layers, list(v.items())
        2 * v, -v, v / 3, v + w, v - w, v.normalized(), v.project_out(w), v.cosine(w), v.to(torch.float64)

    Immutable; every operation gives new vectors, differentiable with respect to the old ones. ``model``,
    ``model_type`` and ``method`` say where they come from, and go into files.
    """

    by_layer: Mapping[int, Tensor]
    point: str = "resid"
    _: KW_ONLY
    model: str = ""
    model_type: str = ""
    method: str = ""

    def __post_init__(self) -> None:
        what = "kf.steering.Vectors"
        if not takes_edits(self.point):
            raise no_point(what, self.point, EDITED)
        if not isinstance(self.by_layer, Mapping) or not self.by_layer:
            raise KwargError(f"{what} takes {{layer: tensor}} with at least one layer, got {self.by_layer!r:.60}")
        layers = numbers(list(self.by_layer), "layers", what)
        if min(layers) < 0 or (self.point == "embed" and layers != (0,)):
            raise SpanError(
                f"{what}: layers {list(layers)} at {self.point!r}: layers count from 0, and 'embed' has one"
            )
        rank = 2 if self.point == "head" else 1
        first = self.by_layer[layers[0]]
        for layer, vector in self.by_layer.items():
            if not isinstance(vector, Tensor) or not vector.is_floating_point():
                got = describe(vector) if isinstance(vector, Tensor) else type(vector).__name__
                raise KwargError(f"{what}: layer {layer} has a {got}; give float tensors")
            if vector.dim() != rank or vector.shape != first.shape:
                expected = "(head, head_dim)" if rank == 2 else "(hidden,)"
                raise ShapeError(f"{what}: layer {layer} has {describe(vector)}; each is {expected}, all of one shape")
        object.__setattr__(self, "by_layer", MappingProxyType({n: self.by_layer[n] for n in sorted(layers)}))

    def __repr__(self) -> str:
        origin = [name for name in (self.method, self.model and f"of {self.model}") if name]
        first = next(iter(self.by_layer.values()))
        layers = ", ".join(map(str, self.layers)) if len(self) < 9 else f"{self.layers[0]}, …, {self.layers[-1]}"
        return f"Vectors(layers [{layers}] at {self.point}, {describe(first)}{''.join(f', {text}' for text in origin)})"

    # ---- what is in it

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers' absolute numbers, in order."""
        return tuple(self.by_layer)

    def __len__(self) -> int:
        return len(self.by_layer)

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_layer)

    def __contains__(self, layer: object) -> bool:
        return layer in self.by_layer

    def items(self) -> Iterator[tuple[int, Tensor]]:
        """Pairs of a layer and its vector."""
        return iter(self.by_layer.items())

    def __getitem__(self, layer: Any) -> Any:
        """One layer's vector; with a slice the Vectors of the layers from ``a`` up to before ``b``, by their number."""
        if isinstance(layer, slice):
            start, stop = layer.start or 0, self.layers[-1] + 1 if layer.stop is None else layer.stop
            if layer.step not in (None, 1) or start < 0 or stop < 0:
                raise SpanError(f"{self!r}[{layer}]: give layer numbers, such as [10:20]")
            return self.at_layers([n for n in self.layers if start <= n < stop] or range(start, stop))
        return self.at_layers(layer).by_layer[operator.index(layer)]

    def at_layers(self, layers: Any) -> Vectors:
        """The Vectors of some layers. Raises SpanError for one that has none."""
        chosen = numbers(layers, "layers", repr(self))
        if missing := [layer for layer in chosen if layer not in self.by_layer]:
            raise SpanError(f"{self!r} has no vector for layer {missing[0]}")
        return replace(self, by_layer={layer: self.by_layer[layer] for layer in chosen})

    # ---- arithmetic

    __array_ufunc__ = None  # numpy's numbers ask __rmul__, and do not take the layers' numbers for an array

    def _map(self, change: Callable[[Tensor], Tensor]) -> Vectors:
        return replace(self, by_layer={layer: change(vector) for layer, vector in self.items()})

    def __mul__(self, factor: Any) -> Vectors:
        return self._map(lambda vector: vector * _as_number(factor)) if _is_scalar(factor) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Vectors:
        if not isinstance(divisor, Tensor) and divisor == 0:
            raise KwargError(f"{self!r} / {divisor}: division by zero")
        return self._map(lambda vector: vector / _as_number(divisor)) if _is_scalar(divisor) else NotImplemented

    def __neg__(self) -> Vectors:
        return self._map(torch.neg)

    def __add__(self, other: Any) -> Vectors:
        """Layer by layer; a layer that one of them lacks is the other's alone."""
        if not isinstance(other, Vectors):
            return NotImplemented
        self._check_fits(other)
        both = {n: self.by_layer[n] + other.by_layer[n] for n in self if n in other}
        origin = {
            n: value for n in ("model", "model_type", "method") if (value := getattr(self, n)) == getattr(other, n)
        }
        return Vectors({**self.by_layer, **other.by_layer, **both}, self.point, **origin)

    def __sub__(self, other: Any) -> Vectors:
        return self + (-other) if isinstance(other, Vectors) else NotImplemented

    def normalized(self) -> Vectors:
        """Each layer's vector at length 1 (over all its numbers). Raises KwargError for one of length 0."""
        self._check_nonzero("normalized")
        return self._map(lambda vector: vector / _length(vector))

    def project_out(self, other: Vectors) -> Vectors:
        """Each layer's vector without its component along ``other``'s there, which must have all these layers."""
        self._check_fits(other)
        along = other.at_layers(self.layers)
        along._check_nonzero("project_out")

        def without(vector: Tensor, unit: Tensor) -> Tensor:
            return vector - (vector * unit).sum() * unit

        units = along.normalized()
        return replace(self, by_layer={n: without(vector, units.by_layer[n]) for n, vector in self.items()})

    def cosine(self, other: Vectors) -> dict[int, Tensor]:
        """The cosine similarity at each layer that both have, each a tensor (). Raises SpanError if there is none."""
        self._check_fits(other)
        shared = [n for n in self if n in other]
        if not shared:
            raise SpanError(f"{self!r} and {other!r} have no layer in common")
        units, other_units = self.at_layers(shared).normalized(), other.at_layers(shared).normalized()
        return {n: (units.by_layer[n] * other_units.by_layer[n]).sum() for n in shared}

    def to(self, *args: Any, **kwargs: Any) -> Vectors:
        """In another dtype or on another device; arguments as ``Tensor.to``'s."""
        return self._map(lambda vector: vector.to(*args, **kwargs))

    def _check_fits(self, other: Any) -> None:
        if not isinstance(other, Vectors):
            raise KwargError(f"{type(other).__name__} is not kf.steering.Vectors")
        shape, other_shape = (next(iter(vectors.by_layer.values())).shape for vectors in (self, other))
        if self.point != other.point or shape != other_shape:
            raise ShapeError(f"{self!r} and {other!r} are of different points or sizes")

    def _check_nonzero(self, what: str) -> None:
        for layer, vector in self.items():
            if not is_wrapped(vector) and not bool(vector.any()):
                raise KwargError(f"{what}: the vector of layer {layer} is zero: it has no direction")

    # ---- use

    def edits(self, scale: Any = 1.0, *, at: Any = "all", layers: Any = None) -> list[Edit]:
        """What adds ``scale`` times each vector at its layer, so at every layer that ``v`` has.

            flow(**x, edit=v[12:13].edits(2.0))                                  # one layer's alone
            model.generate(**inputs, edit=v.edits(2.0, at="generated", layers=[12]))     # in a plain call all is prompt

        ``scale``: as kf.add's: a number, a tensor (), or (batch,) for each row its own; ``layers``: some of them.
        The lists of several vectors are joined: ``edit=[*v.edits(), *w.ablate()]``. A vector of zeros from which
        nothing is derived is left out, so ``(v * 0).edits()`` is the baseline to the bit: x + 0.0 would turn -0.0
        into 0.0.
        """
        return [
            add(vector, layer, point=self.point, at=at, scale=scale)
            for layer, vector in self._chosen(layers).items()
            if not _adds_nothing(vector, scale)
        ]

    def ablate(self, scale: Any = 1.0, *, at: Any = "all", layers: Any = None) -> list[Edit]:
        """What removes ``scale`` of the component along each vector, at its layer: directional ablation.

        One direction at many layers is ``kf.project_out(v[12], layers=range(30))``.
        """
        chosen = self._chosen(layers)
        chosen._check_nonzero("ablate")
        return [project_out(vector, n, point=self.point, at=at, scale=scale) for n, vector in chosen.items()]

    def as_hooks(
        self, model: Any, scale: Any = 1.0, *, at: Any = "all", layers: Any = None
    ) -> AbstractContextManager[Any]:
        """Within, a plain Hugging Face model does :meth:`edits` in its own forward: ``kf.steering.as_hooks``."""
        from kwflow.models.hooked import edited

        return edited(model, self.edits(scale, at=at, layers=layers))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.safetensors`` file, or a ``.gguf`` control vector as repeng and llama.cpp do.

        GGUF holds float32 at the point ``resid`` of layers from 1 on; see ``kwflow.research.vector_files``. Raises
        KwargError for what the format cannot say.
        """
        from kwflow.research.vector_files import METADATA, write

        write(path, self.by_layer, {name: getattr(self, name) for name in METADATA})

    def _chosen(self, layers: Any) -> Vectors:
        return self if layers is None else self.at_layers(layers)


def _is_scalar(factor: Any) -> bool:
    tensor = isinstance(factor, Tensor) and factor.dim() == 0
    return tensor or (isinstance(factor, Real) and not isinstance(factor, bool))


def _as_number(number: Any) -> Any:
    """A number of numpy's as Python's."""
    return number if isinstance(number, Tensor) else float(number)


def _length(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector)


def _adds_nothing(vector: Tensor, scale: Any) -> bool:
    """Whether a vector's sum with anything is that thing, and no derivative is asked for."""
    if any(isinstance(t, Tensor) and _is_derived(t) for t in (vector, scale)):
        return False
    zero = not isinstance(scale, Tensor) and not isinstance(scale, bool) and scale == 0
    return zero or not bool(vector.any())


def _is_derived(tensor: Tensor) -> bool:
    return is_wrapped(tensor) or tensor.requires_grad or in_forward_mode([tensor])
