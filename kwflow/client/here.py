"""``kf.here``: a caller's own function at a layer. A call is cut there: it runs here, and the workers go on from that.

No worker knows of it.
"""

# B batch, S seq, D hidden

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kwflow.client.call import Estimate
from kwflow.errors import KwargError, ShapeError, SpanError, UnsupportedError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.bound import Bound, Span
from kwflow.kwargs.capture import Capture
from kwflow.kwargs.edit import Edit
from kwflow.kwargs.points import numbers

LEAVING, ENTERING, EMBED = "resid", "resid_pre", "embed"
_WITHIN = (
    "a worker would have to stop within a layer for it. kf.here acts at 'resid', 'resid_pre' and 'embed'; edits act at "
    "every point, and so does a worker's own block_fn"
)

Function = Callable[[Tensor], Tensor]
Layers = Callable[[Span, Tensor, Bound], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Here:
    """A function at layers; made by :func:`here`."""

    fn: Function
    layers: tuple[int, ...]
    point: str

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"kf.here({name}, layers={list(self.layers)}, point={self.point!r})"

    def cut(self, layer: int) -> int:
        """Before which layer a call is cut for it."""
        return layer + 1 if self.point == LEAVING else layer

    def run(self, hidden_BSD: Tensor) -> Tensor:
        """Raises ShapeError for what is no hidden of the same kind, and whatever the function raises."""
        out = self.fn(hidden_BSD)
        form = (hidden_BSD.shape, hidden_BSD.dtype, hidden_BSD.device)
        if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != form:
            gave = f"{describe(out)} on {out.device}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ShapeError(
                f"{self!r} gave {gave}; it must give hidden as it got it: {describe(hidden_BSD)} on {hidden_BSD.device}"
            )
        return out


def here(fn: Function, layers: Any = None, *, point: str = LEAVING) -> Here:
    """Run ``fn`` in this process at layers: ``fn(hidden)`` gives the hidden (batch, seq, hidden) that goes on.

        flow(**x, edit=[kf.here(lambda h: sae.decode(sae.encode(h)), 12)])

    Any code, with what it closes over: gradients reach that, too, as torch and torch.func give them. It stands among
    ``edit=``, in calls, gradients and sweeps; ``hidden`` has the columns of the call, pads too. ``layers``: absolute
    numbers. ``point``: "resid", behind all else that acts there; "resid_pre" or "embed", before all else. The workers
    need not agree to it: every place costs one way to this client and back (``flow.estimate``), and rows wait for each
    other there. Raises KwargError for other points, SpanError.
    """
    what = "kf.here"
    if not callable(fn):
        raise KwargError(f"{what} takes a function of hidden, got a {type(fn).__name__}")
    if point not in (LEAVING, ENTERING, EMBED):
        raise KwargError(f"{what}: point={point!r:.40}: {_WITHIN}")
    if layers is None and point != EMBED:
        raise KwargError(f"{what}: say where: layers=12 or layers=range(10, 20)")
    chosen = numbers(0 if layers is None else layers, "layers", what)
    if point == EMBED and chosen != (0,):
        raise SpanError(f"{what}: the point 'embed' is the input of layer 0, got layers={layers!r:.60}")
    return Here(fn, chosen, point)


def without(kwargs: Mapping[str, Any], what: str) -> None:
    """Raise UnsupportedError if a caller's function is among the kwargs."""
    if any(isinstance(edit, Here) for edit in _listed(kwargs.get("edit"))):
        raise UnsupportedError(
            f"{what} takes no kf.here: the workers hand on to each other what they keep keys and values of. It acts in "
            f"calls, flow(**x, edit=[…]), their gradients and sweeps; edits act in sessions too"
        )


@dataclass(frozen=True)
class Cuts:
    """The functions of one call, by the layer before which it is cut; in the order in which they run."""

    span: Span
    functions: Mapping[int, Sequence[Here]]

    def __bool__(self) -> bool:
        return bool(self.functions)

    def spans(self) -> list[Span]:
        """The layers between the cuts."""
        ends = sorted({*self.span, *self.functions})
        return list(zip(ends, ends[1:], strict=False))

    def run(
        self, hidden: Tensor, bound: Bound, layers: Callable[[Span, Tensor, Bound], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Hidden, then what is captured: ``layers`` runs some on workers, the functions run between."""
        captured = list[Tensor]()
        hidden = self._at(self.span[0], hidden)
        for span in self.spans():
            hidden, *more = layers(span, hidden, bound.part(None, span)[0])
            captured += more
            hidden = self._at(span[1], hidden)
        return [hidden, *captured]

    def _at(self, layer: int, hidden: Tensor) -> Tensor:
        for function in self.functions.get(layer, ()):
            hidden = function.run(hidden)
        return hidden

    def estimate(self, estimates: Sequence[Estimate]) -> Estimate:
        """Of the whole call, from those of its spans."""
        first, *others = estimates
        for one in others:
            first = replace(
                first,
                hops=first.hops + one.hops,
                bytes_sent=first.bytes_sent + one.bytes_sent,
                bytes_received=first.bytes_received + one.bytes_received,
            )
        return replace(first, here=tuple(sorted(self.functions)))


def taken(kwargs: Mapping[str, Any], span: Span) -> tuple[Cuts, dict[str, Any]]:
    """The functions among a call's ``edit=``, and the kwargs without them. Raises KwargError and SpanError."""
    edits = _listed(kwargs.get("edit"))
    functions = [(number, edit) for number, edit in enumerate(edits) if isinstance(edit, Here)]
    if not functions:
        return Cuts(span, {}), dict(kwargs)
    by_cut: dict[int, list[Here]] = {}
    # behind a layer first, then before the next
    for number, function in sorted(functions, key=lambda pair: pair[1].point != LEAVING):
        for layer in function.layers:
            if not span[0] <= layer < span[1]:
                raise SpanError(
                    f"edit[{number}], {function!r}: this flow has layers {span[0]}:{span[1]} (absolute), not {layer}"
                )
            _check_order(number, function, layer, edits)
            _check_captures(function, layer, kwargs.get("capture"))
            by_cut.setdefault(function.cut(layer), []).append(function)
    acts = kwargs.get("capture")
    for function in (function for _, function in functions if function.point == LEAVING):
        if isinstance(acts, Capture) and (
            seen := [layer for layer in function.layers if (LEAVING, layer) in set(acts)]
        ):
            raise KwargError(
                f"{function!r} acts behind what workers capture at 'resid' of layer {seen[0]}: capture 'resid_pre' of "
                f"layer {seen[0] + 1} to see what it gave, or keep it in the function"
            )
    others = [edit for edit in edits if not isinstance(edit, Here)]
    rest = {name: value for name, value in kwargs.items() if name != "edit"}
    return Cuts(span, by_cut), {**rest, "edit": others} if others else rest


def _check_captures(function: Here, layer: int, acts: Any) -> None:
    if function.point == LEAVING and isinstance(acts, Capture) and (LEAVING, layer) in set(acts):
        raise KwargError(
            f"{function!r} acts behind what workers capture at 'resid' of layer {layer}: capture 'resid_pre' of layer "
            f"{layer + 1} to see what it gave, or keep it in the function"
        )


def _check_order(number: int, function: Here, layer: int, edits: Sequence[Any]) -> None:
    """An edit of a worker's at the same place must stand in the list as it acts."""
    leaving = function.point == LEAVING
    points = (LEAVING,) if leaving else (ENTERING, EMBED)
    others = edits[number + 1 :] if leaving else edits[:number]
    for edit in others:
        if isinstance(edit, Edit) and edit.point in points and any(layer in layers for layers in edit.values):
            where = (
                "behind all edits at its point: give it last" if leaving else "before all edits there: give it first"
            )
            raise KwargError(f"edit[{number}], {function!r} acts {where}, or {edit!r} as a function too")


def _listed(edits: Any) -> list[Any]:
    if isinstance(edits, Here):
        return [edits]
    return list(edits) if isinstance(edits, Sequence) else [edits]
