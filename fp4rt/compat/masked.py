"""FlashInfer's FP4 functions on a batch of matrices of which the first rows are used, as many as a mask says.

The mask is never read on the host: the functions work on all rows, so that they can be captured in a graph, and unused
rows cost as much as used ones.
"""

from __future__ import annotations

import torch

from fp4rt.compat.experts import silu_and_mul
from fp4rt.compat.products import PACKED, SCALES, check_count, multiply
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns, data_shape
from fp4rt.torch import ops

__all__ = [
    "grouped_gemm_nt_masked",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]

_SWIZZLED = LAYOUTS["128x4"]
_TILE = (_SWIZZLED.tile_rows // _SWIZZLED.row_groups, _SWIZZLED.row_groups, _SWIZZLED.tile_columns)
_FROM_MEMORY = (3, 4, 1, 5, 2, 0)  # (group, row tile, column tile, *_TILE) to FlashInfer's (32, 4, rm, 4, rk, group)
_TO_MEMORY = (5, 2, 4, 0, 1, 3)
FP4, E4M3 = "float4_e2m1fn", "float8_e4m3fn"  # FlashInfer's names
OUT_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def scaled_fp4_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the used rows of a batch of matrices, each matrix with its own encode scale.

    Args:
        a: (l, m, k) float16 or bfloat16, k a multiple of 16.
        mask: int32 (l,): how many rows of a matrix are used; not read on the host.
        a_global_sf: fp32 (l,): encode scales.

    Returns:
        uint8 (m, k / 2, l), in memory (l, m, k / 2), and float8_e4m3fn (32, 4, ceil128(m) / 128, 4,
        ceil4(k / 16) / 4, l), in memory layout 128x4 a matrix. Unused rows have codes 0 and scales 0, whatever ``a``
        holds there; FlashInfer leaves them as the memory was.

    Raises:
        AssertionError: no batch of matrices, k or the dtype do not fit, or not a scale and a count for every matrix.
    """
    _check_batch("scaled_fp4_grouped_quantize", a, mask, a_global_sf, BLOCK)
    return _quantize(a, mask, a_global_sf)


def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`scaled_fp4_grouped_quantize` of silu(gate) * up, with ``a`` (l, m, 2k) = gate || up."""
    _check_batch("silu_and_mul_scaled_nvfp4_experts_quantize", a, mask, a_global_sf, 2 * BLOCK)
    return _quantize(silu_and_mul(a), mask, a_global_sf)


def _check_batch(function: str, a: torch.Tensor, mask: torch.Tensor, scales: torch.Tensor, multiple: int) -> None:
    if a.ndim != 3 or a.dtype not in (torch.float16, torch.bfloat16):
        raise AssertionError(
            f"{function}: a must be float16 or bfloat16 with 3 dimensions (l, m, k), but got {a.dtype} {tuple(a.shape)}"
        )
    if a.shape[2] % multiple:
        raise AssertionError(f"{function}: a.shape[2] must be a multiple of {multiple}, but got {a.shape[2]}")
    check_count(function, "mask", mask, a.shape[0], AssertionError)
    check_count(function, "a_global_sf", scales, a.shape[0], AssertionError)


def _quantize(a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups, m, k = a.shape
    used = torch.where(_used_rows(mask, m).unsqueeze(-1), a, 0)
    data = a.new_empty((groups, *data_shape(m, k)), dtype=torch.uint8)
    rows, columns = _SWIZZLED.shape(m, block_columns(k))
    scales = a.new_empty((groups, rows, columns), dtype=torch.uint8)
    for index, scale in enumerate(a_global_sf.reshape(-1).split(1)):
        data[index], scales[index], _ = ops.quantize(used[index], scale, _SWIZZLED.name, None)
    down, across = rows // _SWIZZLED.tile_rows, columns // _SWIZZLED.tile_columns
    tiles = scales.view(torch.float8_e4m3fn).view(groups, down, across, *_TILE)
    return data.permute(1, 2, 0), tiles.permute(_FROM_MEMORY)


def grouped_gemm_nt_masked(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
    dst_signals: torch.Tensor | None = None,
    sm_count: int | None = None,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
    alpha: torch.Tensor | None = None,
    alpha_dtype: str | None = None,
) -> None:
    """out[:, :, i] = alpha[i] * a[:, :, i] @ b[:, :, i].T in the first ``masked_m[i]`` rows; the others stay.

    Args:
        lhs: a (m, k / 2, l) uint8 and its scales, as :func:`scaled_fp4_grouped_quantize` returns them.
        rhs: b (n, k / 2, l) and its scales, likewise.
        out: (m, n, l) to write to.
        masked_m: int32 (l,); not read on the host.
        ab_dtype: "float4_e2m1fn".
        sf_dtype: "float8_e4m3fn".
        c_dtype: "float16", "bfloat16" or "float32": out's.
        sf_vec_size: 16.
        dst_signals: not implemented.
        sm_count: without effect here.
        mma_tiler_mn: without effect here.
        cluster_shape_mn: without effect here.
        alpha: l factors, of any float dtype; None means 1.
        alpha_dtype: without effect here: factors are taken as fp32.

    Raises:
        NotImplementedError: other operands than NVFP4, or signals.
        ValueError: ``c_dtype`` is not out's, or dtypes, sizes, or the number of counts or factors do not fit.
    """
    if (ab_dtype, sf_dtype, sf_vec_size) != (FP4, E4M3, BLOCK) or dst_signals is not None:
        raise NotImplementedError(
            f"grouped_gemm_nt_masked: only NVFP4 is implemented (ab_dtype={FP4!r}, sf_dtype={E4M3!r}, "
            f"sf_vec_size={BLOCK}, no dst_signals), got {ab_dtype!r}, {sf_dtype!r}, {sf_vec_size}"
        )
    (a, a_scales), (b, b_scales) = lhs, rhs
    _check_operand("lhs", a, a_scales)
    _check_operand("rhs", b, b_scales)
    wanted = (a.shape[0], b.shape[0], a.shape[2])
    if OUT_DTYPES.get(c_dtype) != out.dtype or tuple(out.shape) != wanted or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"grouped_gemm_nt_masked: a {tuple(a.shape)} and b {tuple(b.shape)} need one k and one l, and out {wanted} "
            f"of c_dtype {c_dtype!r}, one of {', '.join(OUT_DTYPES)}; got out {tuple(out.shape)} of {out.dtype}"
        )
    check_count("grouped_gemm_nt_masked", "masked_m", masked_m, a.shape[2], ValueError)
    if alpha is not None:
        check_count("grouped_gemm_nt_masked", "alpha", alpha, a.shape[2], ValueError)
    used = _used_rows(masked_m, a.shape[0]).unsqueeze(-1)
    a_scales, b_scales = (scales.permute(_TO_MEMORY).contiguous() for scales in (a_scales, b_scales))
    factors = None if alpha is None else alpha.reshape(-1).float()
    for i in range(a.shape[2]):
        factor = None if factors is None else factors[i : i + 1]
        left, right = a[..., i].contiguous(), b[..., i].contiguous()
        product = multiply(left, a_scales[i], _SWIZZLED, right, b_scales[i], factor, out.dtype, None)
        out[..., i] = torch.where(used[i], product, out[..., i])


def _check_operand(name: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    if codes.dtype not in PACKED or codes.ndim != 3:
        raise ValueError(
            f"grouped_gemm_nt_masked: codes of {name} must be uint8 (rows, k / 2, l), got {codes.dtype} "
            f"{tuple(codes.shape)}"
        )
    rows, columns = _SWIZZLED.shape(codes.shape[0], block_columns(codes.shape[1] * CODES_PER_BYTE))
    down, across = rows // _SWIZZLED.tile_rows, columns // _SWIZZLED.tile_columns
    wanted = (*_TILE[:2], down, _TILE[2], across, codes.shape[2])
    if scales.dtype not in SCALES or tuple(scales.shape) != wanted:
        raise ValueError(
            f"grouped_gemm_nt_masked: scales of {name} must be float8_e4m3fn {wanted}, got {scales.dtype} "
            f"{tuple(scales.shape)}"
        )


def _used_rows(mask: torch.Tensor, m: int) -> torch.Tensor:
    """bool (l, m): whether a row lies before its matrix's count."""
    return torch.arange(m, device=mask.device) < mask.reshape(-1, 1)
