"""Spans of blocks: what a worker serves, ``chain`` by hand, and a worker's own block_fn around every block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.blocks.block import Block, Params, run
from kwflow.errors import AxesError, KwargError, SpanError
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.axes import Axes
from kwflow.kwargs.bind import bind_kwargs
from kwflow.kwargs.builtin import BUILTIN, INSIDE
from kwflow.kwargs.schema import SCALARS, Schema, Spec


@dataclass(frozen=True, eq=False)
class SpanSpec:
    """Blocks ``[start, stop)`` ready to run, what they take, and what they are (for ``hello``)."""

    start: int
    stop: int
    blocks: tuple[Block, ...]
    schema: Schema
    identity: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = field(kw_only=True)  # in which hidden is computed; quantized weights have others
    device: torch.device = field(kw_only=True)  # where the params are, and inputs are moved to

    @property
    def params(self) -> list[Params]:
        return [block.params for block in self.blocks]

    def part(self, start: int, stop: int) -> tuple[Block, ...]:
        return self.blocks[start - self.start : stop - self.start]


def chain(blocks: Sequence[Block]) -> Callable[..., Tensor]:
    """Join blocks into ``fn(params, hidden, **kwargs)``: ``params`` a list, kwargs as a flow takes them.

    What a worker computes for its span, so ``flow(hidden, **kw)`` equals ``chain(fns)(params, hidden, **kw)``.
    Raises KwargError for what are not blocks, or not of layers in a row.
    """
    if not blocks or not all(isinstance(block, Block) for block in blocks):
        raise KwargError("kf.chain takes blocks: kf.chain([block_fn for block_fn, _ in kf.load_blocks(model)])")
    layers = [block.layer for block in blocks]
    span = (layers[0], layers[-1] + 1)
    if layers != list(range(*span)):
        raise SpanError(f"kf.chain takes layers in a row, got {', '.join(map(str, layers))}; call others one by one")

    def chained(params: Sequence[Params], hidden: Tensor, /, **kwargs: Any) -> Tensor:
        if isinstance(params, Mapping) or len(params) != len(blocks):
            got = "a dict" if isinstance(params, Mapping) else len(params)
            raise KwargError(f"a chain of layers {span[0]}:{span[1]} takes a list of {len(blocks)} params, got {got}")
        sizes = {"batch": hidden.shape[0], "seq": hidden.shape[1], "key": hidden.shape[1]}
        schemas = [((block.layer, block.layer + 1), block.schema) for block in blocks]
        return run(blocks, params, hidden, bind_kwargs(schemas, span, kwargs, sizes))

    return chained


# ---- a worker's own block_fn -------------------------------------------------------------------------------------


def declared_kwargs(fn: Callable[..., Tensor]) -> tuple[dict[str, Spec], bool]:
    """The kwargs that a worker's own block_fn declares, and whether ``**kw`` lets the built-in ones through.

    ``fn(params, hidden, /, *, block, gain: kf.Axes["layer hidden"], **kw)``. Checked when a worker starts: raises
    KwargError or AxesError.
    """
    name = getattr(fn, "__name__", repr(fn))
    form = f"def {name}(params, hidden, /, *, block, gain: kf.Axes['layer hidden'], **kw)"
    parameters = list(inspect.signature(fn, eval_str=True).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise KwargError(f"a block_fn takes params and hidden, and the rest by keyword only: {form}")
    keyword = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    if "block" not in keyword:
        raise KwargError(f"block_fn {name!r} must take `block`, the normal block: {form}")
    specs = {}
    for key, parameter in keyword.items():
        if key == "block":
            continue
        if key == prefix_kv.HUGGING_FACE or (key in BUILTIN and key not in INSIDE):
            raise KwargError(f"block_fn {name!r} declares {key!r}, which is inside `block` already")
        required, kind = parameter.default is parameter.empty, parameter.annotation
        if isinstance(kind, Axes):
            forms = tuple((signature, ("float", "int", "bool")) for signature in kind.signatures)
            specs[key] = Spec(forms=forms, required=required)
        elif isinstance(kind, type) and kind.__name__ in SCALARS:
            specs[key] = Spec(scalars=(kind.__name__,), required=required)
        elif kind in (dict, list, tuple):
            specs[key] = Spec(tree=True, required=required)
        else:
            raise AxesError(
                f"kwarg {key!r} of block_fn {name!r} is not typed: annotate it with kf.Axes['layer hidden'], "
                f"with float, int, bool or str, or with dict or list for a tree declared by the caller"
            )
    return specs, any(p.kind is p.VAR_KEYWORD for p in parameters)


def with_block_fn(span: SpanSpec, fn: Callable[..., Tensor], identity: str) -> SpanSpec:
    """The span with a worker's own ``fn`` around every block; its kwargs join the schema."""
    specs, through = declared_kwargs(fn)
    builtin = {
        name: spec for name, spec in span.schema.kwargs.items() if through or spec.group == "call" or spec.prefix
    }
    schema = replace(span.schema, kwargs={**builtin, **specs})
    blocks = tuple(replace(block, custom=fn, declared=frozenset(specs), schema=schema) for block in span.blocks)
    return replace(span, blocks=blocks, schema=schema, identity={**span.identity, "block_fn": identity})
