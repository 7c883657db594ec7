"""Products of packed codes and their scales: what both libraries' product functions come down to."""

from __future__ import annotations

import torch

from fp4rt import api
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, ScaleLayout, block_columns
from fp4rt.tensor import QuantizedTensor
from fp4rt.torch.dispatch import check_one_device

__all__ = ["GEMM_BACKENDS", "PACKED", "SCALES", "check_count", "check_mm", "multiply", "one"]

GEMM_BACKENDS = ("auto", "cudnn", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "trtllm")
PACKED = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))  # dtypes of codes
SCALES = (torch.uint8, torch.float8_e4m3fn)
MXFP4_BLOCK = 32

_library = torch.library.Library("fp4rt", "FRAGMENT")
_library.define(
    "multiply_into(Tensor a, Tensor a_scales, str a_layout, Tensor b, Tensor b_scales, Tensor alpha, "
    "Tensor(a!) out) -> ()"
)


def multiply(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    a_layout: ScaleLayout,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """alpha * a @ b.T of codes (m, k / 2) and (n, k / 2) with their scales, b's in 128x4; written to ``out`` itself."""
    columns = a.shape[1] * CODES_PER_BYTE
    result = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype) if out is None else out
    if result.dtype != out_dtype:
        raise ValueError(f"mm_fp4: out must be {out_dtype}, got {result.dtype}")
    torch.ops.fp4rt.multiply_into(
        a.view(torch.uint8),
        _scale_bytes("a_descale", a_scales, a_layout, a.shape[0], columns),
        a_layout.name,
        b.view(torch.uint8),
        _scale_bytes("b_descale", b_scales, LAYOUTS["128x4"], b.shape[0], columns),
        one(a.device) if alpha is None else alpha,
        result,
    )
    return result


@torch.library.impl(_library, "multiply_into", "CompositeExplicitAutograd")
def _multiply_into(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    a_layout: str,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    alpha: torch.Tensor,
    out: torch.Tensor,
) -> None:
    columns = a.shape[1] * CODES_PER_BYTE
    # alpha stands in the place of the global scales, which it makes irrelevant
    left = QuantizedTensor(a, a_scales, alpha, (a.shape[0], columns), a_layout)
    right = QuantizedTensor(b, b_scales, alpha, (b.shape[0], columns), "128x4")
    api.matmul(left, right, out_dtype=out.dtype, alpha=alpha, out=out)


@torch.library.register_fake("fp4rt::multiply_into", lib=_library)
def _(*arguments: object) -> None:
    """Nothing new is made."""
    check_one_device("multiply", arguments)


def _scale_bytes(name: str, scales: torch.Tensor, layout: ScaleLayout, rows: int, columns: int) -> torch.Tensor:
    shape = layout.shape(rows, block_columns(columns))
    if scales.numel() != shape[0] * shape[1]:
        raise ValueError(f"mm_fp4: {name} in layout {layout.name} must be {shape}, but got {tuple(scales.shape)}")
    return scales.view(torch.uint8).reshape(shape)


def check_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    block_size: int,
    use_8x4_sf_layout: bool,
    backend: str,
    use_nvfp4: bool,
) -> None:
    """FlashInfer's checks of ``mm_fp4``, in its order.

    Raises:
        ValueError: the first thing that does not fit.
        NotImplementedError: MXFP4.
    """

    def refuse(condition: bool, message: str) -> None:
        if condition:
            raise ValueError(f"mm_fp4: {message}")

    refuse(a.ndim != 2 or b.ndim != 2, f"accepts 2d tensors, got {tuple(a.shape)} and {tuple(b.shape)}")
    refuse(
        a.shape[1] != b.shape[0],
        f"K dimension mismatch: a.shape[1] = {a.shape[1]}, b.shape[0] = {b.shape[0]}; pass b transposed",
    )
    refuse(
        a.dtype not in PACKED or b.dtype not in PACKED,
        f"a and b must be float4_e2m1fn_x2 packed into uint8, got {a.dtype} and {b.dtype}",
    )
    for name, tensor in (("b", b), ("b_descale", b_descale)):
        refuse(
            tensor.ndim == 2 and not tensor.t().is_contiguous(),
            f"{name} must be column-major, got strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass "
            f"{name}.t() of what the quantization gives",
        )
    refuse(
        a_descale.dtype not in SCALES or b_descale.dtype not in SCALES,
        f"a_descale and b_descale must be float8_e4m3fn or uint8, got {a_descale.dtype} and {b_descale.dtype}",
    )
    if alpha is not None:
        refuse(alpha.dtype != torch.float32, f"alpha must be a float tensor, got {alpha.dtype}")
        refuse(alpha.numel() != 1, f"alpha must be a scalar, got {alpha.numel()} elements")
    refuse(
        out_dtype not in (torch.bfloat16, torch.float16),
        f"unsupported output dtype {out_dtype}; only torch.bfloat16 and torch.float16 are supported",
    )
    refuse(use_nvfp4 and block_size != BLOCK, f"nvfp4 only supports block_size = {BLOCK}, got {block_size}")
    refuse(
        not use_nvfp4 and block_size != MXFP4_BLOCK, f"mxfp4 only supports block_size = {MXFP4_BLOCK}, got {block_size}"
    )
    refuse(backend not in GEMM_BACKENDS, f"unknown backend {backend!r}; use one of {', '.join(GEMM_BACKENDS)}")
    refuse(backend != "trtllm" and use_8x4_sf_layout, f"only trtllm supports the 8x4 scale layout, got {backend!r}")
    refuse(
        backend == "trtllm" and out_dtype != torch.bfloat16,
        f"only torch.bfloat16 is supported with backend 'trtllm', got {out_dtype}",
    )
    if not use_nvfp4:
        raise NotImplementedError("mm_fp4: MXFP4 is not implemented; use NVFP4 (use_nvfp4=True, block_size=16)")


def check_count(function: str, name: str, values: torch.Tensor, count: int, error: type[Exception]) -> None:
    """That there is one value for each of ``count`` matrices, or ``error``."""
    if values.numel() != count:
        raise error(f"{function}: {name} needs numel() = {count}, but got {values.numel()}")


def one(device: torch.device) -> torch.Tensor:
    """fp32 (1,) holding 1. Made anew: one made inside a graph's capture holds nothing outside of it."""
    return torch.ones(1, dtype=torch.float32, device=device)
