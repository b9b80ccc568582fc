"""A layer's projections in 8 or 4 bits, as bitsandbytes computes them and transformers converts them.

    int8   weights and activations in 8 bits, row by row: LLM.int8() with threshold 0 (Dettmers et al. 2022)
    nf4    4-bit NormalFloat weights in blocks of 64, computed in the worker's dtype  (QLoRA, Dettmers et al. 2023)

The same projections as ``from_pretrained(quantization_config=config(mode, dtype))`` and the same bits. The modules are
kwflow's, since bitsandbytes' own keep state: the first input decides how they compute, a CPU with AVX512-BF16 repacks
weights in place and then has no gradient, a replaced parameter may be ignored. Here every number is in ``weight``, its
scale and ``bias``.

NOTE [threshold] LLM.int8() computes columns of activations that reach a threshold (6 by default) in 16 bits. They are
chosen over the whole request, so a text's values depend on the texts beside it, against law 2: on SmolLM2, logits of up
to 30 moved by 3.4 when a batch of two was cut. Without it they do not move at all, at a KL divergence from float32 of
0.08 instead of 0.02 (NF4: 0.34).
"""

# N out features, K in features

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kwflow.autograd.transforms import is_wrapped
from kwflow.errors import ModelError, UnsupportedError, did_you_mean

MODES = ("int8", "nf4")
BLOCK = 64  # weights that share a scale in nf4


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
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def mode_of(model: Any) -> str:
    """How a Hugging Face model is quantized, in a worker's words; what no worker runs says how it differs."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return ""
    if getattr(quantization, "load_in_8bit", False):
        return (
            "int8"
            if quantization.llm_int8_threshold == 0.0
            else f"int8 with threshold {quantization.llm_int8_threshold:g}"
        )
    if getattr(quantization, "load_in_4bit", False):
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        deviations = {
            f"computed in {quantization.bnb_4bit_compute_dtype}": quantization.bnb_4bit_compute_dtype != dtype,
            "with double quantization": quantization.bnb_4bit_use_double_quant,
        }
        return " ".join([quantization.bnb_4bit_quant_type, *(how for how, differs in deviations.items() if differs)])
    return str(getattr(quantization, "quant_method", "quantized"))


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
    for parameter in layer.parameters():  # norms, biases: views of a mapped file would keep all of its pages
        parameter.data = parameter.data.clone()


def as_pure(model: nn.Module) -> nn.Module:
    """Replace a Hugging Face model's NF4 projections in place by NF4Linear with the same numbers, which has float64."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit":
            model.set_submodule(name, NF4Linear.holding(module.weight, module.bias))  # type: ignore[arg-type]
    return model


class NF4Linear(nn.Module):
    """``x @ W.T + bias`` with W in NF4: ``weight`` holds two numbers a byte, ``absmax`` a float32 scale per block."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.stored = weight_NK.dtype  # what backward dequantizes to, as in bitsandbytes
        packed, state = _bnb().functional.quantize_4bit(
            weight_NK.detach().contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        self.weight, self.absmax = _frozen(packed), _frozen(state.absmax)
        self.bias = None if bias is None else _frozen(bias)

    @classmethod
    def holding(cls, packed: Any, bias: Tensor | None) -> NF4Linear:
        """Of bitsandbytes' Params4bit, which holds the same numbers."""
        self, state = cls.__new__(cls), packed.quant_state
        nn.Module.__init__(self)
        (self.out_features, self.in_features), self.stored = state.shape, state.dtype
        self.weight, self.absmax = _frozen(packed.data), _frozen(state.absmax)
        self.bias = None if bias is None else _frozen(bias)
        return self

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
    """``x @ W.T + bias``, W and every row of x rounded to 8 bits: ``weight``, and ``scale``, a float32 per output."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        half = weight_NK.detach().contiguous().to(torch.float16)
        rounded, scale, _ = _bnb().functional.int8_vectorwise_quant(half)
        self.weight, self.scale = _frozen(rounded), _frozen(scale)
        self.bias = None if bias is None else _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise UnsupportedError(
                "int8 rounds activations to 8 bits, so float64 computes nothing closer: there is no fp64 verdict"
            )
        return _int8(x, self.weight, self.scale, self.bias)

    extra_repr = NF4Linear.extra_repr


class _Int8(torch.autograd.Function):
    """The product in 8 bits; its derivative is bitsandbytes', that of the product with the dequantized weights."""

    @staticmethod
    def forward(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _bnb()  # registers the operators
        ops: Any = torch.ops.bitsandbytes
        rounded, row_scale, _ = ops.int8_vectorwise_quant(rows.to(torch.float16))
        out = ops.int8_scaled_mm(rounded, weight_NK, row_scale, scale_N.float(), bias=bias, dtype=x.dtype)
        return out.reshape(*x.shape[:-1], weight_NK.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])
        ctx.save_for_forward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (cotangent,) = grad_outputs
        rows = cotangent.reshape(-1, cotangent.shape[-1])
        weight_NK, scale_N = ctx.saved_tensors
        grad = rows @ _dequantized_int8(weight_NK, scale_N, cotangent.dtype)
        return grad.reshape(*cotangent.shape[:-1], grad.shape[-1]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        tangent, (weight_NK, scale_N) = grad_inputs[0], ctx.saved_tensors
        return tangent @ _dequantized_int8(weight_NK, scale_N, tangent.dtype).T

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """Rows do not know of each other, so more of them are the same call."""
        if any(dim is not None for dim in in_dims[1:]):
            raise UnsupportedError("int8 weights have no batching rule: vmap over hidden or kwargs, not over params")
        return _int8(args[0].movedim(in_dims[0], 0), *args[1:]), 0


_int8: Callable[..., Tensor] = _Int8.apply  # type: ignore[assignment]


def _dequantized_int8(weight_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight_NK.to(dtype) * (scale_N.float()[:, None] * (1.0 / 127.0))).to(dtype)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _bnb() -> Any:
    return importlib.import_module("bitsandbytes")
