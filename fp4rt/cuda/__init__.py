"""The CUDA backend: the functions of ``fp4rt.backend.Backend`` over device memory. The only part that imports CuPy.

Kernels are compiled at their first use, by NVRTC, for the device at hand::

    quantize, dequantize, ... (what to launch) ─▶ kernel_spec ─▶ kernel ─▶ cache ─▶ compiler ─▶ kernels_src/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp4rt.cuda import memory  # noqa: F401  makes CuPy's allocator the pool's for CUDA devices
from fp4rt.cuda.quantizers.amax import global_scale
from fp4rt.cuda.quantizers.dequantize import dequantize
from fp4rt.cuda.quantizers.quantize import quantize
from fp4rt.cuda.quantizers.relayout import relayout
from fp4rt.cuda.status import describe, status

if TYPE_CHECKING:
    from fp4rt.cuda.gemm import explain, matmul, prepack, prepacked_values, unpack

__all__ = [
    "dequantize",
    "describe",
    "explain",
    "global_scale",
    "matmul",
    "prepack",
    "prepacked_values",
    "quantize",
    "relayout",
    "status",
    "unpack",
]

_PRODUCTS = ("explain", "matmul", "prepack", "prepacked_values", "unpack")


def __getattr__(name: str) -> Any:
    if name in _PRODUCTS:  # quantizing alone does not pay for them
        from fp4rt.cuda import gemm

        return getattr(gemm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
