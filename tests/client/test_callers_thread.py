"""A caller's tensors are computed with on the caller's thread only: torch.func's state, like autograd's modes, is a
thread's own. Other threads get their plain values."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from tests.kwargs.row import B, D, Row, S
from tests.kwargs.rows import ROWS, names
from tests.kwargs.sides import given, inputs, leaves, of_call
from tests.kwargs.suite import applies
from tests.oracle.tiny import KV_HEADS, LAYERS, TWO, flow, make_flow, random


class Watched(Tensor):
    """Notes every operation of another thread than the one that made it; what is made of it is watched, too."""

    home = threading.get_ident()
    elsewhere: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != cls.home:
            cls.elsewhere.append(getattr(func, "__name__", repr(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def watching() -> Iterator[Callable[[Tensor], Tensor]]:
    Watched.home, Watched.elsewhere = threading.get_ident(), []
    yield lambda tensor: tensor.as_subclass(Watched)
    assert not Watched.elsewhere, f"on another thread: {sorted(set(Watched.elsewhere))}"


def in_every_way(remote: kf.Flow, hidden: Tensor, kwargs: dict[str, Any], *, graded: bool = True) -> None:
    """A call, its gradient, the async form, and a step of a session."""
    if graded:
        remote.options(batch_tokens=3 * S)(hidden.detach().requires_grad_(), **kwargs).sum().backward()
    with torch.no_grad():
        remote(hidden, **kwargs)
        asyncio.run(remote.acall(hidden, **kwargs))
        with remote.session(S + 8) as session:
            session.step(hidden, phase="prompt", **kwargs)


FORMS = [(row, False) for row in ROWS] + [(row, True) for row in ROWS if applies(row, "llama", "by layer")]


@pytest.mark.parametrize(
    ("row", "by_layer"), [pytest.param(*one, id=f"{one[0].name}{' by layer' * one[1]}") for one in FORMS]
)
def test_every_kwarg_in_every_form(row: Row, by_layer: bool) -> None:
    with watching() as watched:
        x = {name: watched(value) for name, value in leaves(row, "llama", torch.float32, rows=B).items()}
        kwargs = row.given(given(row, "llama", x, by_layer=by_layer))
        kwargs.pop("capture", None)
        call = {name: watched(value) for name, value in of_call(row, x, slice(None), slice(0, S), slice(0, S)).items()}
        in_every_way(flow("llama", TWO), watched(inputs(torch.float32)), {**call, **kwargs})


def louder(params, hidden, /, *, block, gain: kf.Axes["layer hidden | hidden"], bias: dict, **kw):
    return hidden + gain * (block(params, hidden, **kw) - hidden) + bias["b"]


def test_what_else_is_computed_of_kwargs() -> None:
    """Adapters of rows, a cache of transformers, a block_fn's own kwargs and trees, positions, captures, sweeps."""
    name = names("llama")[0]
    with watching() as watched:
        hidden, past = watched(random(B, S, D)), [watched(random(B, KV_HEADS, 2, D // 4)) for _ in range(2 * LAYERS)]
        a, b = (kf.axes(watched(random(3, *s)), f"adapter {t}") for s, t in (((2, D), "rank in"), ((D, 2), "out rank")))
        rows = watched(torch.tensor([0, -1, 2, 1]))
        own = make_flow("llama", TWO, block_fn=louder)
        in_every_way(own, hidden, {"gain": watched(random(D)), "bias": {"b": kf.axes(watched(random(D)), "hidden")}})
        remote = flow("llama", TWO)
        in_every_way(remote, hidden, {"lora": {name: {"A": a, "B": b, "rows": rows}}})
        in_every_way(remote, hidden, {"layer_past": list(zip(past[::2], past[1::2], strict=True))})
        at, v = watched(torch.tensor([[0, 1]] * B)), watched(random(2, D))
        remote.capture({"resid": [1]}, hidden, at=at, edit=kf.put(kf.axes(v, "pos hidden"), 1, at=at))
        kf.sweep(remote, {"hidden": hidden}, kf.grid(kf.add, value=list(v), layers=[1, 3], at=["all", [0]]))
