"""Derivatives through a remote function: one autograd.Function whose own derivatives apply it again.

``remote_call`` is the unit. The Function's non-tensor argument holds a list of operations, empty for the value, then
one entry per transform: ``{"vjp": inputs, "given": outputs}``, ``{"jvp": inputs}``, ``{"vmap": dims}``. Each rule of
the Function (backward, jvp, vmap) applies it with one more entry, so autograd composes workers and any order works.
``evaluate`` is the worker's side: it folds the same list around the pure function. No network, no transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kwflow.errors import KwargError

Operation = dict[str, Any]
Operations = tuple[Operation, ...]
# Runs operations elsewhere; None marks an input that the outputs do not depend on.
Perform = Callable[[Operations, Sequence[Tensor]], Sequence[Tensor | None]]


def remote_call(perform: Perform, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a remote function of ``tensors``, differentiable in any order and mode that the worker has."""
    return [out for out in _apply(perform, (), tensors) if out is not None]


class _Work:
    """What to do and, after forward, which outputs exist. Opaque, so that torch.func does not take it apart."""

    def __init__(self, perform: Perform, operations: Operations, present: list[int] | None = None):
        self.perform, self.operations = perform, operations
        self.present: list[int] = [] if present is None else present

    def then(self, operation: Operation) -> _Work:
        """One more derivative, of the outputs that exist."""
        operations = self.operations
        if operations and "vjp" in operations[-1]:
            input_indices = [operations[-1]["vjp"][i] for i in self.present]
            operations = (*operations[:-1], {**operations[-1], "vjp": input_indices})
        return _Work(self.perform, (*operations, operation))


def _apply(perform: Perform, operations: Operations, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Apply the Function; what has no path comes back as None (autograd knows no None among outputs)."""
    work = _Work(perform, operations)
    outputs = _Remote.apply(work, *tensors)
    count = len(operations[-1]["vjp"]) if operations and "vjp" in operations[-1] else len(outputs)
    by_index = dict(zip(work.present, outputs, strict=False))
    return [by_index.get(i) for i in range(count)]


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(work: _Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = work.perform(work.operations, tensors)
        work.present[:] = [i for i, result in enumerate(results) if result is not None]
        # a Function returns at least one tensor
        return tuple(r for r in results if r is not None) or (tensors[0].new_zeros(()),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.work, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        tensors, cotangents = ctx.saved_tensors, grad_outputs
        differentiable = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
        input_indices = [i for i in differentiable if ctx.needs_input_grad[1 + i]]
        output_indices = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
        grads: list[Tensor | None] = [None] * len(tensors)
        if input_indices and output_indices and ctx.work.present:
            work = ctx.work.then({"vjp": input_indices, "given": output_indices})
            inputs = [*tensors, *(c for c in cotangents if c is not None)]
            for i, grad in zip(input_indices, _apply(work.perform, work.operations, inputs), strict=True):
                grads[i] = grad
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor, ...]:
        tangents = grad_inputs[1:]  # the first stands for the work
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        inputs = [*ctx.saved_tensors, *(t for t in tangents if t is not None)]
        return tuple(_Remote.apply(ctx.work.then({"jvp": moving}), *inputs))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        work, *tensors = args
        outputs = _Remote.apply(
            _Work(work.perform, (*work.operations, {"vmap": list(in_dims[1:])}), work.present), *tensors
        )
        return outputs, (0,) * len(outputs)


# ---- the worker's side -------------------------------------------------------------------------------------------


def is_first_order(operations: Sequence[Operation]) -> bool:
    """The value or one vjp: what plain reverse mode computes, with the fused attention kernels."""
    return not operations or (len(operations) == 1 and "vjp" in operations[0])


def math_attention() -> AbstractContextManager[Any]:
    """The attention kernel that has forward mode and double backward; set for the whole process."""
    return sdpa_kernel(SDPBackend.MATH)


def evaluate(
    fn: Callable[..., tuple[Tensor, ...]],
    operations: Sequence[Operation],
    tensors: Sequence[Tensor],
    *,
    attention: Callable[[], AbstractContextManager[Any]] = math_attention,
) -> Sequence[Tensor | None]:
    """Fold operations around ``fn``, whose outputs are a tuple, and call it: what :class:`_Remote` asks a worker for.

    First order goes through ``torch.autograd.grad``, which tells "no path" (None) from zero; the rest through
    torch.func, under the math attention kernel (``attention``), since the fused ones have no forward mode and no double
    backward.
    """
    if not operations:
        with torch.no_grad():
            return fn(*tensors)
    if is_first_order(operations):
        return _vjp(fn, operations[0]["vjp"], operations[0]["given"], tensors)
    folded = fn
    for operation in operations:
        folded = _fold(folded, operation)
    # NOTE [grad mode] must be on: with it off, torch picks backward kernels (silu's) that cannot be derived again
    with torch.enable_grad(), attention():
        return [result.detach() for result in folded(*tensors)]


def _vjp(
    fn: Callable[..., tuple[Tensor, ...]],
    input_indices: Sequence[int],
    output_indices: Sequence[int],
    tensors: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The gradients of some inputs; ``tensors``: the primals, and behind them a cotangent for some of the outputs."""
    count = len(tensors) - len(output_indices)
    primals, cotangents = list(tensors[:count]), tensors[count:]
    with torch.enable_grad():
        for i in input_indices:
            primals[i] = primals[i].detach().requires_grad_()
        outputs = fn(*primals)
        pulled = [(outputs[i], c) for i, c in zip(output_indices, cotangents, strict=True) if outputs[i].requires_grad]
        if not pulled:
            return [None] * len(input_indices)
        outs, cotangents = zip(*pulled, strict=True)
        return torch.autograd.grad(outs, [primals[i] for i in input_indices], cotangents, allow_unused=True)


def _fold(fn: Callable[..., tuple[Tensor, ...]], operation: Operation) -> Callable[..., tuple[Tensor, ...]]:
    if "vmap" in operation:
        dims = tuple(operation["vmap"])
        return lambda *inputs: torch.func.vmap(fn, in_dims=dims)(*inputs)
    moving: list[int] = operation["vjp"] if "vjp" in operation else operation.get("jvp", [])
    if not moving:
        raise KwargError(f"cannot derive {operation!r}: an operation is a vjp, jvp or vmap")

    def split(inputs: tuple[Tensor, ...], extra: int) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
        primals = list(inputs[: len(inputs) - extra])

        def of_moving(*values: Tensor) -> tuple[Tensor, ...]:
            full = list(primals)
            for i, value in zip(moving, values, strict=True):
                full[i] = value
            return fn(*full)

        return of_moving, [primals[i] for i in moving]

    def vjp(*inputs: Tensor) -> tuple[Tensor, ...]:
        output_indices = operation["given"]
        function, primals = split(inputs, len(output_indices))
        pull: Any = torch.func.vjp(lambda *x: tuple(function(*x)[i] for i in output_indices), *primals)[1]
        return pull(tuple(inputs[len(inputs) - len(output_indices) :]))

    def jvp(*inputs: Tensor) -> tuple[Tensor, ...]:
        function, primals = split(inputs, len(moving))
        return torch.func.jvp(function, tuple(primals), tuple(inputs[len(inputs) - len(moving) :]))[1]

    return vjp if "vjp" in operation else jvp
