"""Derivatives through a function that runs elsewhere: any order and mode, and only what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from kwflow.autograd.derive import Operations, evaluate, is_first_order, remote_call
from kwflow.errors import KwargError
from kwflow.wire.message import Message, dumps, loads
from tests.oracle import assert_bits, assert_close
from tests.oracle.tiny import random

X, Y, W = (random(3, seed=i, dtype=torch.float64) for i in range(3))
INTS = torch.tensor([2, 0, 1])


def local(x: Tensor, y: Tensor, w: Tensor, ints: Tensor) -> Tensor:
    """Not symmetric, not linear; ``w`` is not used."""
    return torch.sin(x) * y[ints] + (x * y).exp().sum() * x


class Elsewhere:
    """Runs operations as a worker does, through bytes, and keeps what was asked."""

    def __init__(self, fn: Callable[..., Any], outputs: int = 1):
        self.fn = (lambda *inputs: (fn(*inputs),)) if outputs == 1 else fn
        self.asked, self.answers = list[Operations](), list[list[Tensor | None]]()

    def perform(self, operations: Operations, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        sent = loads(dumps(Message({"ops": list(operations)}, [t.detach() for t in tensors])))
        self.asked.append(operations)
        self.answers.append(list(loads(dumps(Message({}, list(evaluate(self.fn, sent.meta["ops"], sent.tree))))).tree))
        return self.answers[-1]

    def __call__(self, *tensors: Tensor) -> Any:
        outputs = remote_call(self.perform, tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f(X, Y, W, INTS),
    "grad": lambda f: grad(lambda x, y: f(x, y, W, INTS).sum(), (0, 1))(X, Y),
    "vjp": lambda f: vjp(lambda x, y: f(x, y, W, INTS), X, Y)[1](Y),
    "jvp": lambda f: jvp(lambda x, y: f(x, y, W, INTS), (X, Y), (Y, X)),
    "jvp of one": lambda f: jvp(lambda y: f(X, y, W, INTS), (Y,), (X,)),
    "vmap": lambda f: vmap(f, in_dims=(0, None, None, None))(torch.stack([X, Y]), Y, W, INTS),
    "vmap of another dim": lambda f: vmap(f, in_dims=(1, 0, None, None))(
        torch.stack([X, Y], 1), torch.stack([Y, X]), W, INTS
    ),
    "vmap of ints": lambda f: vmap(f, in_dims=(None, None, None, 0))(X, Y, W, torch.stack([INTS, INTS.flip(0)])),
    "vmap of vmap": lambda f: vmap(lambda x: vmap(lambda y: f(x, y, W, INTS))(torch.stack([X, Y])))(
        torch.stack([Y, X, X])
    ),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x, Y, W, INTS).sum()))(torch.stack([X, Y])),
    "grad of vmap": lambda f: grad(lambda x: vmap(lambda y: f(x, y, W, INTS))(torch.stack([X, Y])).sum())(X),
    "jacrev": lambda f: jacrev(lambda y: f(X, y, W, INTS))(Y),
    "jacfwd": lambda f: jacfwd(lambda y: f(X, y, W, INTS))(Y),
    "hessian": lambda f: hessian(lambda x: f(x, Y, W, INTS).sum())(X),
    "reverse over reverse": lambda f: jacrev(jacrev(lambda x: f(x, Y, W, INTS)))(X),
    "forward over forward": lambda f: jacfwd(jacfwd(lambda x: f(x, Y, W, INTS)))(X),
    "reverse over forward": lambda f: jacrev(jacfwd(lambda x: f(x, Y, W, INTS)))(X),
    "third order": lambda f: grad(lambda a: grad(lambda b: grad(lambda c: f(c, Y, W, INTS).sum())(b).sum())(a).sum())(
        X
    ),
    "zeros for what is unused": lambda f: grad(lambda w: f(X, Y, w, INTS).sum())(W),
    "vmap of jvp of grad": lambda f: vmap(lambda t: jvp(grad(lambda x: f(x, Y, W, INTS).sum()), (X,), (t,))[1])(
        torch.eye(3).double()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_same_as_here(name: str) -> None:
    ours, theirs = TRANSFORMS[name](Elsewhere(local)), TRANSFORMS[name](local)
    ours, theirs = (v if isinstance(v, tuple) else (v,) for v in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, name, small=name.startswith("zeros"))


def test_several_outputs() -> None:
    """Each may be derived, alone and together; what the loss does not touch is not asked for."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x) * y, (x * x).sum()[None]

    def mixed(f: Any) -> Any:
        return lambda x, y: (f(x, y)[0] ** 2).sum() * f(x, y)[1].sum()

    remote = Elsewhere(two, outputs=2)
    for transform in (
        lambda f: grad(mixed(f), (0, 1))(X, Y),
        lambda f: jvp(lambda x: f(x, Y), (X,), (Y,))[1],
        lambda f: vmap(lambda x: f(x, Y))(torch.stack([X, Y])),
        lambda f: vmap(grad(mixed(f)), (0, None))(torch.stack([X, Y]), Y),
        lambda f: hessian(mixed(f))(X, Y),
        lambda f: grad(lambda x: grad(lambda x: f(x, Y)[1].sum())(x).sum())(X),
    ):
        ours, theirs = transform(remote), transform(two)
        ours, theirs = (v if isinstance(v, tuple) else (v,) for v in (ours, theirs))
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)
    y = Y.clone().requires_grad_()
    alone = Elsewhere(two, outputs=2)
    assert torch.autograd.grad(alone(X, y)[1].sum() + y.sum() * 0, [y])[0].abs().max() == 0
    assert alone.asked[1:] == [({"vjp": [1], "given": [1]},)] and alone.answers[1] == [None]
    second = Elsewhere(two, outputs=2)
    second(X, y)[0].sum().backward()
    assert second.asked[1:] == [({"vjp": [1], "given": [0]},)]


def test_two_hops() -> None:
    """Workers are composed by autograd."""
    first, second = Elsewhere(lambda x, v: torch.sin(x * v)), Elsewhere(lambda h, v: h * h.exp() + v)

    def ours(x: Tensor, v: Tensor) -> Tensor:
        return second(first(x, v), v).sum()

    def theirs(x: Tensor, v: Tensor) -> Tensor:
        return (lambda h: h * h.exp() + v)(torch.sin(x * v)).sum()

    for transform in (grad, lambda f: grad(f, 1), lambda f: jacfwd(f, 1), lambda f: hessian(f, 1)):
        assert_close(transform(ours)(X, Y), transform(theirs)(X, Y))  # type: ignore[operator]


def test_no_path_is_none_and_an_integer_has_no_gradient() -> None:
    x, y, w = (t.clone().requires_grad_() for t in (X, Y, W))
    assert torch.autograd.grad(Elsewhere(local)(x, y, w, INTS).sum(), [w], allow_unused=True) == (None,)
    elsewhere = Elsewhere(local)
    out = elsewhere(x, y, w, INTS)
    out.sum().backward(retain_graph=True)
    assert x.grad is not None and y.grad is not None and w.grad is None
    first, x.grad = x.grad, None
    out.sum().backward()
    assert_bits(x.grad, first, "backward twice")  # type: ignore[arg-type]


def test_a_request_lists_what_to_differentiate() -> None:
    elsewhere = Elsewhere(local)
    y = Y.clone().requires_grad_()
    elsewhere(X, y, W, INTS).sum().backward()
    assert elsewhere.asked == [(), ({"vjp": [1], "given": [0]},)]
    assert [len(answer) for answer in elsewhere.answers] == [1, 1]
    elsewhere = Elsewhere(local)
    with torch.no_grad():
        elsewhere(X, y, W, INTS)
    assert elsewhere.asked == [()]


def test_none_of_the_inputs_has_a_path() -> None:
    w = W.clone().requires_grad_()
    constant = Elsewhere(lambda w, x: x * 2)
    (none,) = torch.autograd.grad(constant(w, X).sum(), [w], allow_unused=True)
    assert none is None
    assert_bits(grad(lambda w: constant(w, X).sum())(W), torch.zeros(3).double())


def test_requires_grad_on_the_far_side_means_nothing() -> None:
    x = X.clone().requires_grad_()
    (value,) = evaluate(lambda x, y: (x * y,), [], [x, Y])
    assert value is not None and not value.requires_grad
    (gradient,) = evaluate(lambda x, y: (x * y,), [{"vjp": [1], "given": [0]}], [x, Y, torch.ones(3).double()])
    assert_bits(gradient, X)  # type: ignore[arg-type]
    assert x.grad is None


def test_what_is_first_order() -> None:
    assert is_first_order([]) and is_first_order([{"vjp": [0], "given": [0]}])
    assert not is_first_order([{"jvp": [0]}]) and not is_first_order([{"vjp": [0], "given": [0]}] * 2)


@pytest.mark.parametrize("operation", [{"jvp": []}, {"hvp": [0]}, {}])
def test_an_operation_that_is_none_is_refused(operation: dict[str, Any]) -> None:
    with pytest.raises(KwargError, match="vjp, jvp or vmap"):
        evaluate(local, [{"vmap": [None] * 4}, operation], [X, Y, W, INTS])
