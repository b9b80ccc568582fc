"""Blocks as pure functions ``block_fn(params, hidden, **kwargs) -> hidden``, and spans of them.

A block is a Hugging Face decoder layer, called as it is: attention is not written again. What a layer needs besides
``hidden`` (causal mask, rotary cos/sin, ALiBi) is computed once per call for a whole span by a pure ``prepare``. No
transformers here: ``kwflow.models`` builds the SpanSpecs.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kwflow.background import hold_in_forks
from kwflow.blocks import adapters
from kwflow.blocks.hooks import acting
from kwflow.blocks.kv import KV, StepCache
from kwflow.blocks.patterns import eager, eager_mask
from kwflow.blocks.projections import Adapted, adapting
from kwflow.errors import BlockError, CallerError, KwargError, UnknownKwarg
from kwflow.kwargs import prefix_kv, tree
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.bind import PerLayer, bind_kwargs, bind_value
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import INSIDE, at_points
from kwflow.kwargs.kwarg import Act, LayerCall, Place
from kwflow.kwargs.points import ENTERING, LEAVING, PATTERN, point_at
from kwflow.kwargs.positions import token_positions
from kwflow.kwargs.schema import Schema

Params = Mapping[str, Tensor]

# only CUDA has a type for it in torch
NO_MEMORY = "can't allocate memory", "not enough memory", "MPS backend out of memory", "_STATUS_ALLOC_FAILED"


class BlockFn(Protocol):
    """The one contract: pure, the same locally and remotely."""

    def __call__(self, params: Params, hidden: Tensor, /, **kwargs: Any) -> Tensor: ...


class Prepare(Protocol):
    """What a span's layers need besides hidden, from this call's mask, positions and past length; by kind of layer."""

    def __call__(
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        kinds: Collection[str],
    ) -> Mapping[str, Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Call:
    """What holds for one call of a span: the layers' arguments, token positions, keys and values."""

    layer_args: Mapping[str, Mapping[str, Any]]  # by kind of layer
    token_position: Tensor | None
    cache: StepCache | None  # of the layer that runs
    past: int = 0  # columns before these, a prefix's too
    captured: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by layer and order there


@dataclass(frozen=True, eq=False)
class Block:
    """One decoder layer as a pure function; ``module`` gives the structure, ``params`` are its own tensors."""

    layer: int
    module: nn.Module
    params: Params
    prepare: Prepare
    schema: Schema
    cache_name: str
    kind: str = "full_attention"  # layers of one kind share what prepare makes: full_attention, sliding_attention, …
    custom: Callable[..., Tensor] | None = None
    declared: frozenset[str] = frozenset()  # the kwargs that ``custom`` declares
    attention: str = ""  # the module that gives the attention pattern; none where this is empty
    lock: Any = field(default_factory=threading.RLock)  # other params are put into the module while it runs

    def __post_init__(self) -> None:
        hold_in_forks(self.lock)  # else a child could have the other params in its module, and the lock taken for ever

    def __call__(self, params: Params, hidden: Tensor, /, **kwargs: Any) -> Tensor:
        """Run the block by hand; kwargs are one layer's part (no ``layer`` axis), ``steer`` may be a bare vector."""
        span = (self.layer, self.layer + 1)
        flow_kwargs = {}
        for name, value in kwargs.items():
            spec = self.schema.kwargs.get(name)
            shared = spec and spec.group == "layers" and not spec.points
            flow_kwargs[name] = PerLayer({self.layer: value}, None) if shared else value
        sizes = {"batch": hidden.shape[0], "seq": hidden.shape[1], "key": hidden.shape[1]}
        return run([self], [params], hidden, bind_kwargs([(span, self.schema)], span, flow_kwargs, sizes))

    def __repr__(self) -> str:
        return f"<block_fn of layer {self.layer}: {type(self.module).__name__}, takes {', '.join(self.schema.kwargs)}>"

    def apply(self, params: Params, hidden: Tensor, call: Call, kwargs: Mapping[str, Any]) -> Tensor:
        """Run the block within a prepared call."""
        if self.custom is None:
            return self._normal(params, hidden, call, kwargs)
        kwargs = {name: _bare(value) if name in self.declared else value for name, value in kwargs.items()}
        block = BoundBlock(self, call)
        out = self.custom(params, hidden, block=block, **kwargs)
        if dropped := sorted(kwargs.keys() - self.declared - block.handed_on):
            raise BlockError(
                f"the block_fn of layer {self.layer} did not hand {', '.join(dropped)} on; it must call "
                f"block(params, hidden, **kw)"
            )
        return out

    def _normal(self, params: Params, hidden: Tensor, call: Call, kwargs: Mapping[str, Any]) -> Tensor:
        batch_seq = (hidden.shape[0], hidden.shape[1])
        here = LayerCall(self.layer, batch_seq, self.schema.sizes, call.token_position, call.captured)
        acts = at_points(kwargs, here) if kwargs else {}
        adapted = self._adapted(kwargs, batch_seq, acts)
        for entering in ENTERING:
            hidden = acts.pop(entering)(hidden) if entering in acts else hidden
        last = acts.pop(LEAVING, None)
        args = dict(call.layer_args[self.kind])
        if call.cache is not None:
            args[self.cache_name] = call.cache
        edited, eagerly = acting(acts, self.layer) if acts else nullcontext(), nullcontext()
        if PATTERN in acts:
            args["attention_mask"] = eager_mask(args.get("attention_mask"), hidden, call.past)
            eagerly = eager(self.module.get_submodule(self.attention))
        with self.lock, edited, eagerly, adapting(adapted, self.layer) if adapted else nullcontext():
            if params is self.params:
                out = self.module(hidden, **args)
            else:
                out = torch.func.functional_call(self.module, dict(params), (hidden,), args, strict=True)
        out = out[0] if isinstance(out, tuple) else out
        return out if last is None else last(out)

    def _adapted(
        self, kwargs: Mapping[str, Any], batch_seq: tuple[int, int], acts: dict[str, Act]
    ) -> dict[str, Adapted]:
        """What to do at each projection; takes what acts at its input and output out of ``acts``."""
        at_ends: dict[str, dict[str, Act]] = {}
        for name in list(acts):
            if (at := point_at(name)).projection:
                at_ends.setdefault(at.projection, {})[at.reached] = acts.pop(name)
        adapted = adapters.by_projection(kwargs)
        return {
            name: functools.partial(_project, adapter=adapted.get(name), ends=at_ends.get(name, {}), rows=batch_seq)
            for name in adapted.keys() | at_ends.keys()
        }


def _project(
    module: Callable[[Tensor], Tensor], x: Tensor, *, adapter: Any, ends: Mapping[str, Act], rows: tuple[int, int]
) -> Tensor:
    """A projection with what acts at its input, its adapter, and what acts at its output."""
    x = ends["input"](x) if "input" in ends else x
    out = module(x) if adapter is None else adapters.adapt(module, x, adapter, rows)
    return ends["output"](out) if "output" in ends else out


@dataclass(frozen=True)
class BoundBlock:
    """The normal block as a worker's own block_fn gets it: masks, positions and keys/values are inside."""

    _block: Block
    _call: Call
    handed_on: set[str] = field(default_factory=set)  # the kwargs that it was called with

    @property
    def layer(self) -> int:
        """The layer's absolute number."""
        return self._block.layer

    def __call__(self, params: Params, hidden: Tensor, /, **kwargs: Any) -> Tensor:
        self.handed_on.update(kwargs)
        if unknown := set(kwargs) - INSIDE.keys():
            raise UnknownKwarg(f"the normal block takes {', '.join(INSIDE)}, got {', '.join(sorted(unknown))}")
        rows = {"batch": hidden.shape[0], "seq": hidden.shape[1]}
        bound = {name: self._bound(name, value, rows) for name, value in kwargs.items() if value is not None}
        return self._block._normal(params, hidden, self._call, bound)

    def _bound(self, name: str, value: Any, rows: Mapping[str, int]) -> Any:
        """A kwarg as the block takes it: a block_fn hands it on as it came, or gives bare tensors of one layer."""
        if INSIDE[name].kind != "projections" and not isinstance(value, Tensor):
            return value
        schema = self._block.schema
        sizes = {**schema.sizes, **rows}
        return bind_value(name, value, Place(name, INSIDE[name], sizes, schema.projections, single_layer=True))


def run(
    blocks: Sequence[Block],
    params: Sequence[Params],
    hidden: Tensor,
    bound: Bound,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    kv: KV | None = None,
    captured: list[Tensor] | None = None,
) -> Tensor:
    """Run consecutive blocks on ``hidden`` (batch, seq, hidden): prepare once, then one block after the other.

    In a session ``past`` columns stand before these, ``attention_mask`` covers them all, and ``kv`` holds their keys;
    a prefix's columns, before them, are counted in neither. ``captured`` is filled with what ``capture`` asks for, by
    layer.
    """
    if captured is None and bound.captures():
        raise KwargError("capture: blocks run by hand return hidden alone; flow.capture, sessions and generate capture")
    prefix_length = prefix_kv.length(bound)
    if kv is not None:  # a prefix comes with the first step, and stays
        kv.prefix = prefix_length = kv.prefix if past else prefix_length
    arguments = bound.call()
    mask, positions = _bare(arguments.get("attention_mask")), _bare(arguments.get("position_ids"))
    mask = attention_mask if mask is None else mask
    if mask is not None and mask.dim() == 2:
        mask = mask.expand(hidden.shape[0], -1)  # transformers' mask functions index rows
    with _explained("preparing", blocks[0].layer, hidden, bound):
        kinds = {block.kind for block in blocks}
        whole_mask, whole_past = prefix_kv.before(mask, prefix_length), past + prefix_length
        layer_args = blocks[0].prepare(
            hidden, attention_mask=whole_mask, position_ids=positions, past=whole_past, kinds=kinds
        )
    token_position = token_positions(mask, past, hidden.shape[1], hidden.device)
    call = Call(layer_args, token_position, None, whole_past)
    for block, block_params in zip(blocks, params, strict=True):
        who = "block" if block.custom is None else f"block_fn {getattr(block.custom, '__name__', block.custom)!r}"
        with _explained(who, block.layer, hidden, bound, block.custom):
            kwargs = bound.for_layer(block.layer)
            prefix = prefix_kv.keys_values(kwargs.pop(prefix_kv.NAME, None), hidden)
            cache = None if kv is None and prefix is None else StepCache(kv, whole_past, prefix)
            out = block.apply(block_params, hidden, replace(call, cache=cache), kwargs)
        _check_output(out, hidden, block.layer)
        hidden = out
    if captured is not None:
        captured += [call.captured[key] for key in sorted(call.captured)]
    return hidden


def _check_output(out: Any, hidden: Tensor, layer: int) -> None:
    if not isinstance(out, Tensor) or out.shape != hidden.shape or out.dtype != hidden.dtype:
        got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise BlockError(
            f"the block_fn of layer {layer} returned {got} for a hidden of {hidden.dtype} "
            f"{tuple(hidden.shape)}; a block returns the shape and dtype that it got"
        )


@contextmanager
def _explained(who: str, layer: int, hidden: Tensor, bound: Bound, custom: Any = None) -> Iterator[None]:
    """What fails here fails on every worker: a BlockError, with the layer, the shapes and the function's own line."""
    try:
        yield
    except CallerError:
        raise
    except Exception as error:
        if of_the_machine(error):
            raise
        raise BlockError(
            f"{who} of layer {layer} raised {type(error).__name__}{_line(error, custom)}: {error} "
            f"(hidden {tuple(hidden.shape)}; {bound.describe() or 'no kwargs'})"
        ) from error


def _line(error: BaseException, custom: Any) -> str:
    """Where in the caller's own function, whose ``def`` is line 1; its traceback stays with the worker."""
    code = getattr(custom, "__code__", None)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return f" in its line {lines[-1] - code.co_firstlineno + 1}" if code and lines else ""


def of_the_machine(error: BaseException) -> bool:
    """Whether this machine's memory ran out or its device broke, which another's need not."""
    named = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | MemoryError)
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))


def _bare(value: Any) -> Any:
    """A kwarg's tree with plain tensors."""
    if value is None or isinstance(value, Tensor):
        return value
    return value.tensor if isinstance(value, Axed) else tree.map_leaves(lambda leaf: leaf.tensor, value)
