"""A layer's projections, made ready for adapters once, when the layer is loaded.

Each is given a subclass of its own class, whose forward asks a ContextVar: calls in other threads do not see each
other, hooks at points stay outside of it, and without adapters it costs that one question. (A pair of hooks on each
would send every call through torch's slow path.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from kwflow.errors import BlockError

Sizes = tuple[int, int]  # features in, features out
Adapted = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # of a projection and its input, to its output
_adapting: ContextVar[tuple[Mapping[str, Adapted], set[str]] | None] = ContextVar("kwflow_adapting", default=None)


def find(layer: nn.Module) -> dict[str, Sizes]:
    """The projections of a layer by dotted name: nn.Linear, transformers' Conv1D, quantized ones."""
    return {name: sizes for name, module in layer.named_modules() if (sizes := _sizes(module)) and name}


def _sizes(module: nn.Module) -> Sizes | None:
    if type(module).__name__.endswith("Router"):  # phimoe's is a Linear that returns a tuple
        return None
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(size, int) for size in sizes):
            return sizes  # type: ignore[return-value]
    return None


def common(layers: Iterable[Mapping[str, Sizes]]) -> dict[str, Sizes]:
    """The projections that some layer has; not those that are larger in one layer than in another."""
    by_name: dict[str, set[Sizes]] = {}
    for projections in layers:
        for name, sizes in projections.items():
            by_name.setdefault(name, set()).add(tuple(sizes))  # type: ignore[arg-type]
    return {name: next(iter(sizes)) for name, sizes in by_name.items() if len(sizes) == 1}


def install(layer: nn.Module) -> None:
    """Let adapters act at every projection of a layer, from now on."""
    for name in find(layer):
        module = layer.get_submodule(name)
        module.__class__ = _adaptable(type(module))
        module.projection = name  # type: ignore[assignment]


@functools.cache
def _adaptable(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        current = _adapting.get()
        if current is None or self.projection not in current[0]:
            return kind.forward(self, *args, **kwargs)
        current[1].add(self.projection)
        return current[0][self.projection](functools.partial(kind.forward, self), *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


@contextmanager
def adapting(adapted: Mapping[str, Adapted], layer: int) -> Iterator[None]:
    """Within, each of ``adapted`` computes its projection. Raises BlockError if the layer did not call one of them."""
    reached: set[str] = set()
    token = _adapting.set((adapted, reached))
    try:
        yield
    finally:
        _adapting.reset(token)
    if missed := adapted.keys() - reached:
        name = min(missed)
        raise BlockError(f"layer {layer} did not call a projection {name!r}, so nothing was adapted there")
