"""What tests compare with: the Hugging Face model with plain hooks, and comparisons that raise.

Nothing of kwflow computes here (a bound is from there): prompts and steer are written again, row by row.
"""

# B batch, S seq, P prefix, D hidden

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.research.verify import OTHER_SHAPES

Hook = tuple[nn.Module, str, Callable[..., Any]]  # of a module, "pre" or "post"

# (rtol, atol): max|a - b| <= atol + rtol * max|b| for each tensor, of the same shapes; of others: OTHER_SHAPES
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1.3e-6, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


def assert_close(ours: Tensor, expected: Tensor, what: str = "", *, small: bool = False) -> None:
    """Raise unless equal within the table, and unless there is something to compare (``small`` allows all zeros)."""
    _assert_within(ours, expected, what, small, *TOLERANCE[expected.dtype])


def assert_near(ours: Tensor, expected: Tensor, what: str = "", *, small: bool = False) -> None:
    """Raise unless equal but for what the same rows or columns, computed beside others, round otherwise."""
    _assert_within(ours, expected, what, small, OTHER_SHAPES[expected.dtype], 0.0)


def _assert_within(ours: Tensor, expected: Tensor, what: str, small: bool, rtol: float, atol: float) -> None:
    assert isinstance(ours, Tensor) and isinstance(expected, Tensor), f"{what}: {type(ours)} against {type(expected)}"
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), f"{what}: {ours.shape} {ours.dtype}"
    assert not expected.isnan().any(), f"{what}: the reference has NaN"
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    assert small or largest > 1e-3, f"{what}: the reference is all but zero ({largest}): nothing is compared"
    gap = (ours.detach().double() - expected.detach().double()).abs().max().item() if expected.numel() else 0.0
    assert gap <= atol + rtol * largest, f"{what}: gap {gap:.3g}, largest {largest:.3g}"


def assert_bits(ours: Tensor, expected: Tensor, what: str = "") -> None:
    """Raise unless equal to the bit (NaN too, and the sign of zero)."""
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), f"{what}: {ours.shape} {ours.dtype}"
    a, b = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (ours, expected))
    if not torch.equal(a, b):
        gap = (ours.detach().double() - expected.detach().double()).abs().max().item()
        raise AssertionError(f"{what}: not the same bits, gap {gap:.3g}")


LAYER_LISTS = ("layers", "h", "blocks", "decoder.layers")  # of every family's base model, one


def layers_of(model: nn.Module) -> nn.ModuleList:
    base: Any = getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    modules = dict(base.named_modules())
    return next(modules[path] for path in LAYER_LISTS if path in modules)


def with_prompts(hidden_BSD: Tensor, prompts: Tensor, mask_BS: Tensor | None) -> Tensor:
    """Add prompt p (of 1 or B rows, P, D) to each row's p-th unmasked column."""
    rows = []
    for row, columns in enumerate(hidden_BSD):
        own = prompts[row if len(prompts) > 1 else 0]
        count, out = 0, []
        for column, value in enumerate(columns):
            there = mask_BS is None or bool(mask_BS[row if len(mask_BS) > 1 else 0, column])
            out.append(value + own[count].to(value.dtype) if there and count < len(own) else value)
            count += there
        rows.append(torch.stack(out))
    return torch.stack(rows)


def residual(
    model: nn.Module,
    hidden: Tensor,
    *,
    steer: Mapping[int, Tensor] | None = None,
    prompts: Mapping[int, Tensor] | None = None,
    gain: Mapping[int, Tensor] | None = None,
    cache: Any = None,
    extra: Sequence[Hook] = (),
    **call: Any,
) -> Tensor:
    """The residual before the final norm, by the model's own forward on a hidden given to its first layer.

    ``steer``: added after the layer, broadcasts to (batch, seq, hidden). ``gain``: what all of this adds is multiplied.
    ``extra``: hooks ("pre" or "post") on any of its modules.
    """
    base: Any = getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    layers, seen, hooks, entered = layers_of(model), [], [], {}
    given = call.get("attention_mask")
    mask = given if given is not None and given.dim() == 2 else None
    build = getattr(base, "build_alibi_tensor", None)
    if build is not None and mask is None and given is not None:  # bloom does not know a 4-D mask: columns count
        columns = torch.ones(len(hidden), given.shape[3], dtype=torch.long)
        base.build_alibi_tensor = lambda _, heads, dtype: build(columns, heads, dtype=dtype)

    def before(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            value = hidden if number == 0 else args[0]
            entered[number] = value
            if number in (prompts or {}):
                value = with_prompts(value, prompts[number], mask)  # type: ignore[index]
            return (value, *args[1:])

        return hook

    def after(number: int) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            value = out[0] if isinstance(out, tuple) else out
            if number in (steer or {}):
                value = value + steer[number].to(value.dtype)  # type: ignore[index]
            if number in (gain or {}):
                value = entered[number] + gain[number].to(value.dtype) * (value - entered[number])  # type: ignore[index]
            seen.append(value)
            return (value, *out[1:]) if isinstance(out, tuple) else value

        return hook

    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(before(number)))
    hooks += register(extra)
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(after(number)))
    if cache is not None:
        call[cache_name(base)] = cache
    if mask is None and given is not None and "position_ids" in inspect.signature(base.forward).parameters:
        call.setdefault("position_ids", torch.arange(hidden.shape[1])[None])  # opt would count them in a 4-D mask
    try:
        # use_cache: without one, transformers reads position_ids that jump as packed sequences
        width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        base(inputs_embeds=torch.zeros(*hidden.shape[:2], width, dtype=hidden.dtype), use_cache=True, **call)
    finally:
        base.__dict__.pop("build_alibi_tensor", None)
        for hook in hooks:
            hook.remove()
    return seen[-1]


def register(hooks: Sequence[Hook]) -> list[Any]:
    """Put hooks on their modules; handles to remove them."""
    kinds = {"pre": nn.Module.register_forward_pre_hook, "post": nn.Module.register_forward_hook}
    return [kinds[when](module, hook) for module, when, hook in hooks]


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Within, the modules have these hooks."""
    handles = register(hooks)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cache_name(module: nn.Module) -> str:
    """What this version of transformers calls the cache."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
