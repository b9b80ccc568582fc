"""A layer's projections in 8 or 4 bits, as bitsandbytes computes them and transformers converts them.

    int8   LLM.int8(): weights and activations in 8 bits, outlier columns apart      (Dettmers et al. 2022)
    nf4    4-bit NormalFloat weights in blocks of 64, computed in the worker's dtype (QLoRA, Dettmers et al. 2023)

The same projections as ``from_pretrained(quantization_config=config(mode, dtype))`` and the same bits. The modules are
kwflow's, since bitsandbytes' own keep state: the first input decides how they compute, some CPUs repack their weights in
place, and a replaced parameter may be ignored. Here every number is in ``weight``, its scale and ``bias``.
"""

# N out features, K in features

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kwflow.errors import ModelError, UnsupportedError, did_you_mean
from kwflow.kwargs import is_wrapped

MODES = ("int8", "nf4")
BLOCK = 64  # weights that share a scale in nf4
OUTLIER = 6.0  # int8: a column of activations that reaches this is computed apart; transformers' default


def check_mode(mode: str | None) -> str:
    """``"int8"``, ``"nf4"``, or an empty string for none. Raises ModelError when bitsandbytes is not installed."""
    if not mode:
        return ""
    if mode not in MODES:
        raise ModelError(f"quantize={mode!r}; give one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"quantize={mode!r} needs bitsandbytes: pip install 'kwflow[quantized]'")
    return mode


def config(mode: str, dtype: torch.dtype) -> Any:
    """The BitsAndBytesConfig with which transformers loads the same model in this process.

    AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config("nf4", dtype))
    """
    from transformers import BitsAndBytesConfig

    if check_mode(mode) == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def kept_modules(model: Any) -> list[str]:
    """Patterns of the modules that transformers leaves as they are: the head, and what a family keeps in float32."""
    from transformers.quantizers.base import HfQuantizer

    return HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)


def quantize_layer(layer: nn.Module, mode: str, *, name: str, kept: Collection[str]) -> None:
    """Replace a loaded layer's ``nn.Linear`` and ``Conv1D`` in place, on the device where their weights are.

    ``name``: the layer's in its model, such as ``model.layers.3``, which ``kept`` is matched against.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    kinds = {"int8": Int8Linear, "nf4": NF4Linear}
    for inner, module in list(layer.named_modules()):
        if not should_convert_module(f"{name}.{inner}", list(kept)):
            continue
        if type(module) is nn.Linear:
            layer.set_submodule(inner, kinds[mode](module.weight, module.bias))
        elif isinstance(module, Conv1D):
            layer.set_submodule(inner, kinds[mode](module.weight.T, module.bias))


class NF4Linear(nn.Module):
    """``x @ W.T + bias`` with W in NF4: ``weight`` holds two numbers a byte, ``absmax`` a float32 scale per block."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.stored = weight_NK.dtype  # what backward dequantizes to, as in bitsandbytes
        packed, state = _bnb().functional.quantize_4bit(
            weight_NK.detach().contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        self.weight, self.absmax, self.bias = _frozen(packed), _frozen(state.absmax), _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        # bitsandbytes' Function has no rules for torch.func, and its kernels no float64: there, plain torch ops
        if is_wrapped(x) or x.dtype is torch.float64:
            return F.linear(x, self.dequantized(x.dtype), self.bias)
        return _bnb().matmul_4bit(x, self.weight, quant_state=self._state(self.stored), bias=self.bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W (out, in) in ``dtype``; constant under derivatives."""
        # NOTE [garbage] for float64 the CPU's kernel returns memory that it has not written
        exact = torch.float32 if dtype is torch.float64 else dtype
        return _bnb().functional.dequantize_4bit(self.weight, self._state(exact)).to(dtype)

    def _state(self, dtype: torch.dtype) -> Any:
        shape = torch.Size((self.out_features, self.in_features))
        kind = _bnb().functional.QuantState
        return kind(self.absmax.float(), shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(nn.Module):
    """LLM.int8(): ``weight`` in int8, ``scale`` a float32 per output; activations are rounded to 8 bits row by row.

    Columns of activations that reach OUTLIER anywhere in the request are computed apart, so values depend (within the
    error of 8 bits) on which rows and columns one request holds: the same requests give the same bits.
    """

    def __init__(self, weight_NK: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        half = weight_NK.detach().contiguous().to(torch.float16)
        rounded, scale, _ = _bnb().functional.int8_vectorwise_quant(half)
        self.weight, self.scale, self.bias = _frozen(rounded), _frozen(scale), _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise UnsupportedError(
                "int8 rounds activations to 8 bits, so float64 computes nothing closer: there is no fp64 verdict"
            )
        return _Int8.apply(x, self.weight, self.scale, self.bias)  # type: ignore[no-any-return]

    extra_repr = NF4Linear.extra_repr


class _Int8(torch.autograd.Function):
    """The product in 8 bits; its derivative is bitsandbytes', that of the product with the dequantized weights."""

    @staticmethod
    def forward(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _bnb()  # registers the operators
        ops: Any = torch.ops.bitsandbytes
        rounded, row_scale, outliers = ops.int8_vectorwise_quant(rows.to(torch.float16), OUTLIER)
        out, _ = ops.int8_mixed_scaled_mm(rows, rounded, weight_NK, row_scale, scale_N.float(), outliers, bias)
        return out.reshape(*x.shape[:-1], weight_NK.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])
        ctx.save_for_forward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (cotangent,) = grad_outputs
        rows = cotangent.reshape(-1, cotangent.shape[-1])
        grad = rows @ _dequantized_int8(*ctx.saved_tensors, cotangent.dtype)
        return grad.reshape(*cotangent.shape[:-1], grad.shape[-1]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        tangent = grad_inputs[0]
        return tangent @ _dequantized_int8(*ctx.saved_tensors, tangent.dtype).T

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """One after the other, as a loop would: rows of one product share their outlier columns."""

        def one(index: int) -> list[Any]:
            pairs = zip(args, in_dims, strict=True)
            return [arg if dim is None else arg.select(dim, index) for arg, dim in pairs]

        return torch.stack([_Int8.apply(*one(index)) for index in range(info.batch_size)]), 0  # type: ignore[misc]


def _dequantized_int8(weight_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight_NK.to(dtype) * (scale_N.float()[:, None] * (1.0 / 127.0))).to(dtype)


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)


def _bnb() -> Any:
    return importlib.import_module("bitsandbytes")
