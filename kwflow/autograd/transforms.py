"""What torch.func and autograd do to tensors, asked of torch: wrapped, mapped over, dual; and their plain values.

The only place that reads torch's private names for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kwflow.errors import UnsupportedError

_OLDER_VMAP: Any = torch._C._parse_dispatch_key("Batched")


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a torch.func transform holds this tensor, so that its values cannot be looked at."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def is_mapped(tensor: Tensor) -> bool:
    """Whether a vmap holds this tensor: other transforms let its values be looked at."""
    while is_wrapped(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return False


def in_transform() -> bool:
    """Whether this runs inside a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def in_forward_mode(tensors: Sequence[Tensor]) -> bool:
    """Whether a dual number of torch.autograd.forward_ad is among the inputs."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if t.is_floating_point())


def plain(tensor: Tensor) -> Tensor:
    """The values alone, for another thread: autograd, torch.func and tensor subclasses are of the caller's thread.

    Raises UnsupportedError for a tensor that torch's older vmap maps over.
    """
    if _by_older_vmap(tensor):
        raise UnsupportedError(
            "is_grads_batched=True and vectorize=True map by an older vmap, which no call to a worker can follow: use "
            "torch.func.jacrev, jacfwd or hessian, or torch.func.vmap over torch.func.vjp"
        )
    values = tensor.detach()
    while is_wrapped(values):  # a transform that goes on wraps what is made within it
        values = torch._C._functorch.get_unwrapped(values)  # pyright: ignore[reportAttributeAccessIssue]
    return values if type(values) is Tensor else values.as_subclass(Tensor)


def _by_older_vmap(tensor: Tensor) -> bool:
    """Whether torch._vmap_internals maps over it: what autograd.grad(is_grads_batched=True) does."""
    return torch._C._dispatch_keys(tensor).has(_OLDER_VMAP)
