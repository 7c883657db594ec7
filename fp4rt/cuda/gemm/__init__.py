"""Matrix products with NVFP4 weights: which kernel, with which tile, and its launch.

matmul ─▶ problem ─▶ selection ─▶ portable_choice, hopper_choice ─▶ tiles of portable, hopper
       ─▶ passes before, the kernel, the addition of split sums
"""

from __future__ import annotations

from fp4rt.cuda.gemm.explain import explain
from fp4rt.cuda.gemm.matmul import matmul
from fp4rt.cuda.gemm.prepack import prepack, prepacked_values, unpack

__all__ = ["explain", "matmul", "prepack", "prepacked_values", "unpack"]
