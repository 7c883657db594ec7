"""FlashInfer's FP4 functions (``flashinfer`` and ``flashinfer.fp4_quantization``) on fp4rt.

Names, signatures, shapes and dtypes are FlashInfer's. Codes and scales are uint8. ``global_scale`` and ``a_global_sf``
are encode scales (2688 / amax); the one of :func:`e2m1_and_ufp8sf_scale_to_float` is a decode scale. Recipes other than
NVFP4 (block size 32, UE8M0 scales, per-token scales) raise ``NotImplementedError``. What is different: it runs on every
device that fp4rt runs on, tensors stay on theirs, and swizzled scales have their padded shape even where n / 16 is not
a multiple of 4.
"""

from __future__ import annotations

import numbers
from enum import Enum
from typing import Any

import torch

from fp4rt.compat.experts import silu_and_mul
from fp4rt.compat.masked import (
    grouped_gemm_nt_masked,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from fp4rt.compat.orders import block_scale_interleave, shuffle_matrix_a, shuffle_matrix_sf_a, shuffled_rows
from fp4rt.compat.products import GEMM_BACKENDS, check_mm, multiply, one
from fp4rt.compat.sorted import group_gemm_nvfp4_nt_groupwise
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns
from fp4rt.torch import ops

__all__ = [
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_gemm_nt_masked",
    "mm_fp4",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_quantize",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]

nvfp4_block_scale_interleave = block_scale_interleave

QUANTIZE_BACKENDS = ("cuda", "cute-dsl")
E4M3_SCALES = 1  # ufp8_type
EPILOGUE_TILE = 128  # rows that TensorRT-LLM's product shuffles together


class SfLayout(Enum):
    """Where scales lie."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


_LAYOUTS = {
    SfLayout.layout_128x4: LAYOUTS["128x4"],
    SfLayout.layout_8x4: LAYOUTS["8x4"],
    SfLayout.layout_linear: LAYOUTS["linear"],
}


def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | float | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last dimension of ``input``; the others together are the rows.

    Args:
        input: (..., m, k) float16 or bfloat16, k a multiple of 16. A column-major one is quantized along its columns.
        global_scale: a number, or one element of any float dtype, taken as fp32: the encode scale; None means 1.
        sf_vec_size: 16: NVFP4.
        sf_use_ue8m0: False: NVFP4.
        is_sf_swizzled_layout: 128x4; else row-major.
        is_sf_8x4_layout: 8x4 in place of 128x4.
        is_global_scale_inversed: ``global_scale`` is a decode scale.
        enable_pdl: without effect here.
        backend: one of FlashInfer's names; without effect here.

    Returns:
        uint8 (..., m, k / 2) and uint8 scales of all rows in their layout's shape; both transposed for a column-major
        input.

    Raises:
        NotImplementedError: another recipe, or another input dtype.
        AssertionError: there are no rows and columns, or k does not fit.
        TypeError: the global scale is neither a tensor nor a number.
        ValueError: the backend is unknown.
    """
    if backend not in QUANTIZE_BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; it must be one of {', '.join(map(repr, QUANTIZE_BACKENDS))}")
    _check_recipe("fp4_quantize", sf_vec_size, sf_use_ue8m0)
    if input.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"fp4_quantize takes float16 and bfloat16, but got {input.dtype}")
    if input.ndim < 2:
        raise AssertionError(f"fp4_quantize takes (..., m, k), but got {input.ndim} dimensions")
    column_major = input.stride(-2) == 1 and input.stride(-1) != 1
    rows = input.transpose(-2, -1) if column_major else input
    if rows.shape[-1] % sf_vec_size:
        raise AssertionError(f"fp4_quantize: k must be a multiple of {sf_vec_size}, but got {rows.shape[-1]}")
    layout = LAYOUTS["linear"]
    if is_sf_swizzled_layout:
        layout = LAYOUTS["8x4" if is_sf_8x4_layout else "128x4"]
    scale = _fp32_scale("fp4_quantize", global_scale, rows.device)
    if is_global_scale_inversed:
        scale = 1.0 / scale
    data, scales, _ = ops.quantize(rows.reshape(-1, rows.shape[-1]), scale, layout.name, None)
    data = data.reshape(*rows.shape[:-1], data.shape[-1])
    return (data.transpose(-2, -1), scales.transpose(-2, -1)) if column_major else (data, scales)


def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    *,
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to NVFP4.

    Args:
        a: (m, k) float16 or bfloat16.
        a_global_sf: a number, or one element of any float dtype, taken as fp32: the encode scale.
        sfLayout: where the scales lie.
        do_shuffle: shuffle rows as TensorRT-LLM's product wants its weights; with 128x4 only, m a multiple of 32.
        sf_vec_size: 16.
        enable_pdl: without effect here.
        backend: as :func:`fp4_quantize`.
        per_token_activation: not implemented.
        expanded_idx_to_permuted_idx: not implemented.

    Returns:
        uint8 (m, k / 2) and uint8 scales in their layout's shape.

    Raises:
        AssertionError: shuffling with another layout.
        NotImplementedError: scales per token, or as :func:`fp4_quantize`.
        ValueError: ``expanded_idx_to_permuted_idx`` without scales per token, or as :func:`fp4_quantize`.
    """
    if expanded_idx_to_permuted_idx is not None and not per_token_activation:
        raise ValueError("nvfp4_quantize: expanded_idx_to_permuted_idx goes with per_token_activation=True only")
    if per_token_activation:
        raise NotImplementedError(
            "nvfp4_quantize: per-token scales are not implemented; quantize with one global scale"
        )
    if do_shuffle and sfLayout != SfLayout.layout_128x4:
        raise AssertionError(f"nvfp4_quantize: do_shuffle needs layout_128x4, but got {sfLayout}")
    if sfLayout not in _LAYOUTS:
        raise ValueError(f"nvfp4_quantize: sfLayout must be one of {', '.join(map(str, _LAYOUTS))}, got {sfLayout!r}")
    layout = LAYOUTS["linear"] if do_shuffle else _LAYOUTS[sfLayout]
    data, scales = fp4_quantize(
        a,
        a_global_sf,
        sf_vec_size,
        is_sf_swizzled_layout=layout.tiled,
        is_sf_8x4_layout=layout.name == "8x4",
        enable_pdl=enable_pdl,
        backend=backend,
    )
    if not do_shuffle:
        return data, scales
    shuffled = shuffle_matrix_sf_a(scales, EPILOGUE_TILE)
    return shuffle_matrix_a(data, EPILOGUE_TILE), shuffled.reshape(LAYOUTS["128x4"].shape(*scales.shape))


def silu_and_mul_nvfp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | float,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp4_quantize` of silu(gate) * up, rounded once to the input's dtype.

    Args:
        input: (..., 2k) = gate || up, float16 or bfloat16; all but the last dimension are flattened to m rows.
        global_scale: the encode scale.
        sf_vec_size: 16.
        is_sf_swizzled_layout: 128x4; else row-major.
        is_sf_8x4_layout: 8x4 in place of 128x4.
        enable_pdl: without effect here.

    Returns:
        uint8 (m, k / 2) and uint8 scales in their layout's shape.
    """
    rows = silu_and_mul(input.reshape(-1, input.shape[-1]))
    return fp4_quantize(rows, global_scale, sf_vec_size, False, is_sf_swizzled_layout, is_sf_8x4_layout)


def nvfp4_batched_quantize(
    a: torch.Tensor, a_global_sf: torch.Tensor | float, sf_vec_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a batch of matrices with one encode scale, scales in 128x4 a matrix.

    Args:
        a: (batch, m, k) float16 or bfloat16.
        a_global_sf: as :func:`nvfp4_quantize`.
        sf_vec_size: 16.

    Returns:
        uint8 (batch, m, k / 2) and uint8 (batch, bytes of a matrix's padded scales).

    Raises:
        ValueError: ``a`` is no batch of at least one matrix.
        The errors of :func:`fp4_quantize`.
    """
    _check_recipe("nvfp4_batched_quantize", sf_vec_size, False)
    if a.ndim != 3 or a.shape[0] == 0:
        raise ValueError(f"nvfp4_batched_quantize takes (batch, m, k) with batch >= 1, but got shape {tuple(a.shape)}")
    parts = [fp4_quantize(matrix, a_global_sf) for matrix in a.unbind(0)]
    return torch.stack([data for data, _ in parts]), torch.stack([scales.reshape(-1) for _, scales in parts])


def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
) -> torch.Tensor:
    """code * scale * global scale in fp32: the *decode* scale, amax / 2688.

    Args:
        e2m1_tensor: uint8 (m, k / 2).
        ufp8_scale_tensor: uint8 scales, any shape, in 128x4 or row-major.
        global_scale_tensor: fp32, one element; None means 1.
        sf_vec_size: 16: NVFP4.
        ufp8_type: 1: E4M3.
        is_sf_swizzled_layout: 128x4, else row-major.

    Returns:
        float32 (m, k) on the host, whatever the input's device is, as FlashInfer does.

    Raises:
        NotImplementedError: another recipe.
    """
    _check_recipe("e2m1_and_ufp8sf_scale_to_float", sf_vec_size, ufp8_type != E4M3_SCALES)
    data = e2m1_tensor.cpu().view(torch.uint8)
    m, columns = data.shape[0], data.shape[1] * CODES_PER_BYTE
    layout = LAYOUTS["128x4" if is_sf_swizzled_layout else "linear"]
    shape = layout.shape(m, block_columns(columns))
    scales = ufp8_scale_tensor.cpu().view(torch.uint8).reshape(shape)
    values: torch.Tensor = ops.dequantize(data, scales, one(data.device), columns, layout.name, torch.float32)
    return values if global_scale_tensor is None else values * global_scale_tensor.cpu()


def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,
    *,
    skip_check: bool = False,
) -> torch.Tensor:
    """(m, n) = alpha * a @ b.

    Args:
        a: uint8 or float4_e2m1fn_x2 (m, k / 2).
        b: the same, (k / 2, n), column-major: the transpose of what :func:`nvfp4_quantize` gives.
        a_descale: uint8 or float8_e4m3fn, layout 128x4, or 8x4 with ``use_8x4_sf_layout``.
        b_descale: likewise the transpose of scales in 128x4.
        alpha: fp32, one element: 1 / (product of the encode scales); None means 1.
        out_dtype: bfloat16 or float16.
        out: (m, n) to write to.
        block_size: 16.
        use_8x4_sf_layout: of a's scales; with backend "trtllm" only.
        backend: "trtllm" expects b shuffled (``do_shuffle=True``); the other names are alike here.
        use_nvfp4: True.
        enable_pdl: without effect here.
        skip_check: without effect here: the checks cost nothing beside the product.

    Raises:
        ValueError: ranks, dtypes, k, alpha, ``out_dtype``, block size or backend do not fit.
        NotImplementedError: MXFP4.
    """
    check_mm(a, b, a_descale, b_descale, alpha, out_dtype, block_size, use_8x4_sf_layout, backend, use_nvfp4)
    layout = LAYOUTS["8x4" if use_8x4_sf_layout else "128x4"]
    weight, weight_scales = b.t(), b_descale.t() if b_descale.ndim == 2 else b_descale
    if backend != "trtllm":
        return multiply(a, a_descale, layout, weight, weight_scales, alpha, out_dtype, out)
    product = multiply(a, a_descale, layout, weight, weight_scales, alpha, out_dtype, None)
    result = torch.empty_like(product) if out is None else out
    if result.shape != product.shape or result.dtype != product.dtype:
        found = f"{tuple(result.shape)} of {result.dtype}"
        raise ValueError(f"out must have shape {tuple(product.shape)} of {product.dtype}, got {found}")
    result[:, shuffled_rows(weight, EPILOGUE_TILE)] = product
    return result


def _is_backend_supported(backend: str, compute_capability: int | None = None) -> bool:
    """Whether :func:`mm_fp4` takes this name; the device does not matter from compute capability 8.0 on."""
    return backend in GEMM_BACKENDS and (compute_capability is None or compute_capability >= 80)


mm_fp4.is_backend_supported = _is_backend_supported  # type: ignore[attr-defined]


def _fp32_scale(name: str, scale: torch.Tensor | float | None, device: torch.device) -> torch.Tensor:
    """A global scale as the operators take it."""
    if scale is None:
        return one(device)
    if isinstance(scale, torch.Tensor):
        return scale.float()
    if isinstance(scale, numbers.Real):
        return torch.full((1,), float(scale), dtype=torch.float32, device=device)
    raise TypeError(f"{name}: global_scale must be a tensor with one element or a number, got {type(scale).__name__}")


def _check_recipe(name: str, sf_vec_size: int, ue8m0: Any) -> None:
    if sf_vec_size not in (16, 32):
        raise NotImplementedError(f"{name}: sf_vec_size can only be 16 or 32, got {sf_vec_size}")
    if sf_vec_size != BLOCK or ue8m0:
        raise NotImplementedError(f"{name}: only NVFP4 is implemented (sf_vec_size=16, E4M3 scales)")
