"""Hooks on a layer's modules that act only within ``acting``: where its points are reached from outside.

Which points there are, and how each is reached: ``kwargs.points``. The hooks are put in once, when a layer is loaded,
and ask a ContextVar: calls in other threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from kwflow.blocks.parts import Part, on_part
from kwflow.errors import BlockError
from kwflow.kwargs.kwarg import Act
from kwflow.kwargs.points import POINTS

_acting: ContextVar[tuple[dict[str, Act], set[str]] | None] = ContextVar("kwflow_acting", default=None)


def install(layer: nn.Module, paths: Mapping[str, str], parts: Mapping[str, Part]) -> None:
    """Make the points of a layer: ``{"attn": module, "mlp": module, "head": output projection}``, dotted names.

    ``parts``: of the points that are not all of their module's output.
    """
    for point, path in paths.items():
        module = layer.get_submodule(path)
        if POINTS[point].reached == "input":
            module.register_forward_pre_hook(_before(point))
        else:
            at_output = POINTS[point].reached == "output"
            module.register_forward_hook(_after(point, parts.get(point)) if at_output else _weights(point))


@contextmanager
def acting(acts: dict[str, Act], layer: int) -> Iterator[None]:
    """Within, each act takes what its point holds and gives what goes on. Raises BlockError if one was not reached."""
    reached: set[str] = set()
    token = _acting.set((acts, reached))
    try:
        yield
    finally:
        _acting.reset(token)
    if missed := acts.keys() - reached:
        raise BlockError(f"layer {layer} did not come by its point {sorted(missed)[0]!r}, so nothing was edited there")


def _act(point: str, activation: Tensor, part: Part | None = None) -> Tensor:
    current = _acting.get()
    if current is None or point not in current[0]:
        return activation
    current[1].add(point)
    return on_part(part, current[0][point])(activation)


def _weights(point: str) -> Any:
    def hook(_: nn.Module, __: Any, out: Any) -> None:
        if isinstance(out, tuple) and len(out) > 1 and isinstance(out[1], Tensor):
            _act(point, out[1])

    return hook


def _before(point: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
        return (_act(point, args[0]), *args[1:])

    return hook


def _after(point: str, part: Part | None) -> Any:
    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (_act(point, out[0], part), *out[1:]) if isinstance(out, tuple) else _act(point, out, part)

    return hook
