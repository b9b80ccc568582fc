"""What numbers of this process depend on beside the model: torch, and the kernels that it, MKL and oneDNN choose here.

Two processes may add up in another order, and so differ in the last bits, because a processor has other instructions or
another maker (MKL asks), or because a variable of the environment says which kernels to take. Imports no network.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

# by which MKL and oneDNN choose, on x86 and on ARM, as torch.cpu.get_capabilities names them
INSTRUCTIONS = (
    *("sse4_2", "avx2", "avx_vnni", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10_1", "avx10_2"),
    *("amx_int8", "amx_bf16", "amx_fp16", "bf16", "i8mm", "sve", "sve2", "sve_bf16", "sve_max_length", "sme", "sme2"),
)
VARIABLES = (
    *(
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_MAX_CPU_ISA",
        "ONEDNN_CPU_ISA_HINTS",
        "ONEDNN_DEFAULT_FPMATH_MODE",
    ),
    *("DNNL_MAX_CPU_ISA", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE"),  # oneDNN's older names
)


def numerics() -> dict[str, str]:
    """What two processes must have in common for equal bits, each part by its name."""
    return {
        "torch": str(torch.__version__),
        "isa": torch.backends.cpu.get_cpu_capability(),  # of torch's own kernels
        "kernels": kernels(),
        "matmul": torch.get_float32_matmul_precision(),  # "highest": no TF32, no bfloat16 inside float32 products
    }


def kernels() -> str:
    """By what MKL and oneDNN choose theirs: ``GenuineIntel avx2 avx512_f amx_bf16 MKL_CBWR=AVX2``."""
    said = [f"{name}={value}" for name in VARIABLES if (value := os.environ.get(name))]
    return " ".join([*_processor(), *said])


@functools.cache
def _processor() -> tuple[str, ...]:
    """The processor's maker, or its name where that is not known, and its instructions."""
    has = torch.cpu.get_capabilities()
    told = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    vendors = [line.partition(":")[2].strip() for line in told if line.startswith("vendor_id")]
    found = [f"{name}={value}" if value is not True else name for name in INSTRUCTIONS if (value := has.get(name))]
    return (vendors[0] if vendors else str(has.get("cpu_name", "")), *found)
