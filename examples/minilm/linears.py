"""Three ways to compute a linear layer, y = x @ w.T + bias; x is (tokens, k) fp32, y (tokens, n) fp32."""

from __future__ import annotations

from typing import Any

import fp4rt
from examples.minilm.encoder import Array, Linear

Quantized = Any  # fp4rt.QuantizedTensor of a (n, k) weight


def fp32_linear(weight: Array, bias: Array) -> Linear:
    """The original layer: fp32 weights, fp32 activations."""
    return lambda x: x @ weight.T + bias


def weight_only_linear(weight: Quantized, bias: Array) -> Linear:
    """NVFP4 weights, fp16 activations."""
    packed = fp4rt.prepack(weight)
    return lambda x: fp4rt.matmul(x.astype("float16"), packed, out_dtype="float32", bias=bias)


def quantized_linear(weight: Quantized, bias: Array) -> Linear:
    """NVFP4 weights, activations quantized to NVFP4 on the way in with a global scale of their own."""
    swizzled = weight.relayout("128x4")
    return lambda x: fp4rt.matmul(fp4rt.quantize(x, layout="128x4"), swizzled, out_dtype="float32", bias=bias)


VARIANTS = {"NVFP4 weight-only": weight_only_linear, "NVFP4 x NVFP4": quantized_linear}
