"""vLLM's and FlashInfer's products of rows sorted by expert with each expert's weight.

Both libraries read an expert's rows on the device. Here the host reads them: on a device the call waits for them, and a
graph that is being captured is refused; give them in host memory, and the call waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4rt.compat.products import PACKED, SCALES, check_count, multiply
from fp4rt.errors import counted
from fp4rt.format import CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns, round_up

__all__ = ["cutlass_fp4_moe_mm", "group_gemm_nvfp4_nt_groupwise"]

_SWIZZLED = LAYOUTS["128x4"]
OUT_DTYPES = (torch.float16, torch.bfloat16)


def cutlass_fp4_moe_mm(
    out_tensors: torch.Tensor,
    a_tensors: torch.Tensor,
    b_tensors: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    alphas: torch.Tensor,
    problem_sizes: torch.Tensor,
    expert_offsets: torch.Tensor,
    sf_offsets: torch.Tensor,
) -> None:
    """vLLM's product of rows sorted by expert with each expert's weight, written to ``out_tensors``.

    The host reads sizes and offsets; :mod:`fp4rt.compat.sorted` says what that means.

    Args:
        out_tensors: (m, n) float16 or bfloat16; rows of no expert stay as they are.
        a_tensors: uint8 (m, k / 2).
        b_tensors: uint8 (experts, n, k / 2).
        a_scales: float8_e4m3fn (rows, ceil4(k / 16)), layout 128x4 an expert, as ``scaled_fp4_experts_quant`` returns.
        b_scales: float8_e4m3fn (experts, ceil128(n), ceil4(k / 16)), layout 128x4 an expert.
        alphas: fp32 (experts,): 1 / (product of the encode scales).
        problem_sizes: int32 (experts, 3): an expert's (m, n, k).
        expert_offsets: int32 (experts,): where an expert's rows begin.
        sf_offsets: int32 (experts,): where its rows of scales begin.

    Raises:
        RuntimeError: dtypes, contiguity, ranks or sizes do not fit, or sizes on the device during a capture.
    """
    _check_moe(out_tensors, a_tensors, b_tensors, a_scales, b_scales, alphas, problem_sizes, expert_offsets, sf_offsets)
    sizes, begins, scale_begins = _on_host("cutlass_fp4_moe_mm", problem_sizes, expert_offsets, sf_offsets)
    n, k = b_tensors.shape[1], b_tensors.shape[2] * CODES_PER_BYTE
    for i, (_, *given) in enumerate(sizes):
        if given != [n, k]:
            raise RuntimeError(f"cutlass_fp4_moe_mm: expert {i} has (n, k) = {tuple(given)}, but b has {(n, k)}")
    ends = [begin + rows for begin, (rows, *_) in zip(begins, sizes, strict=True)]
    places = list(zip(begins, ends, scale_begins, strict=True))
    _multiply_sorted("cutlass_fp4_moe_mm", out_tensors, a_tensors, a_scales, b_tensors, b_scales, alphas, places)


def group_gemm_nvfp4_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """FlashInfer's product of rows sorted by group with each group's weight.

    The host reads ``m_indptr``; :mod:`fp4rt.compat.sorted` says what that means.

    Args:
        a: uint8 or float4_e2m1fn_x2 (m, k / 2).
        b: the same, (groups, n, k / 2).
        a_scale: uint8 or float8_e4m3fn (rows, ceil4(k / 16)), layout 128x4 a group; group i begins at row
            (m_indptr[i] + 127 * i) rounded down to a multiple of 128.
        b_scale: uint8 or float8_e4m3fn (groups, ceil128(n), ceil4(k / 16)), layout 128x4 a group.
        m_indptr: int32 (groups + 1,): where a group's rows begin.
        alpha: fp32 (groups,): 1 / (product of the encode scales); None means 1.
        tile_m: without effect here.
        tile_n: without effect here.
        tile_k: without effect here.
        swap_ab: without effect here.
        out: (m, n) to write to.
        out_dtype: float16 or bfloat16; None means out's, else bfloat16.

    Raises:
        RuntimeError: sizes do not fit, or ``m_indptr`` on the device during a capture.
        ValueError: a dtype, or ``out``, does not fit.
    """
    name = "group_gemm_nvfp4_nt_groupwise"
    if b.ndim != 3 or a.ndim != 2 or a.shape[1] != b.shape[2] or m_indptr.numel() != b.shape[0] + 1:
        raise RuntimeError(
            f"{name}: a (m, k / 2), b (groups, n, k / 2) and m_indptr (groups + 1,) do not fit: got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and {tuple(m_indptr.shape)}"
        )
    for what, tensor, dtypes in (
        ("a", a, PACKED),
        ("b", b, PACKED),
        ("a_scale", a_scale, SCALES),
        ("b_scale", b_scale, SCALES),
        ("alpha", alpha, (torch.float32,)),
    ):
        if tensor is not None and tensor.dtype not in dtypes:
            raise ValueError(f"{name}: {what} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if alpha is not None:
        check_count(name, "alpha", alpha, b.shape[0], RuntimeError)
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    if dtype not in OUT_DTYPES:
        raise ValueError(f"{name}: out_dtype must be {' or '.join(map(str, OUT_DTYPES))}, got {dtype}")
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    if out.shape != (a.shape[0], b.shape[1]) or out.dtype != dtype:
        raise ValueError(
            f"{name}: out must be {(a.shape[0], b.shape[1])} of {dtype}, got {tuple(out.shape)} of {out.dtype}"
        )
    (begins,) = _on_host(name, m_indptr)
    tile = _SWIZZLED.tile_rows
    scale_begins = [(begin + i * (tile - 1)) // tile * tile for i, begin in enumerate(begins[:-1])]
    places = list(zip(begins[:-1], begins[1:], scale_begins, strict=True))
    _multiply_sorted(name, out, a, a_scale, b, b_scale, alpha, places)
    return out


def _on_host(name: str, *sizes: torch.Tensor) -> list[list[Any]]:
    """Sizes and offsets as numbers."""
    if any(t.is_cuda for t in sizes) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: sizes and offsets are read by the host, which a graph's capture does not allow; pass them in "
            "host memory"
        )
    return [t.tolist() for t in sizes]


def _multiply_sorted(
    name: str,
    out: torch.Tensor,
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    alphas: torch.Tensor | None,
    places: list[tuple[int, int, int]],
) -> None:
    """out[begin:end] = alpha * a[begin:end] @ b[i].T for every place (begin, end, first row of the scales of a)."""
    n, columns = b.shape[1], block_columns(b.shape[2] * CODES_PER_BYTE)
    wanted = _SWIZZLED.shape(n, columns)
    if tuple(b_scales.shape) != (b.shape[0], *wanted) or a_scales.ndim != 2 or a_scales.shape[1] != wanted[1]:
        raise RuntimeError(
            f"{name}: the scales of a and b must be (rows, {wanted[1]}) and {(b.shape[0], *wanted)}, got "
            f"{tuple(a_scales.shape)} and {tuple(b_scales.shape)}"
        )
    scale_ends = [scale_begin + round_up(end - begin, _SWIZZLED.tile_rows) for begin, end, scale_begin in places]
    for i, ((begin, end, scale_begin), scale_end) in enumerate(zip(places, scale_ends, strict=True)):
        if not 0 <= begin <= end <= a.shape[0] or not 0 <= scale_begin <= scale_end <= a_scales.shape[0]:
            raise RuntimeError(
                f"{name}: expert {i} has rows {begin} ... {end} and rows of scales {scale_begin} ... {scale_end}, but "
                f"there are {a.shape[0]} and {a_scales.shape[0]}"
            )
    for i, ((begin, end, scale_begin), scale_end) in enumerate(zip(places, scale_ends, strict=True)):
        left, left_scales, factor = a[begin:end], a_scales[scale_begin:scale_end], None
        if alphas is not None:
            factor = alphas.reshape(-1)[i : i + 1]
        multiply(left, left_scales, _SWIZZLED, b[i], b_scales[i], factor, out.dtype, out[begin:end])


def _check_moe(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    alphas: torch.Tensor,
    sizes: torch.Tensor,
    begins: torch.Tensor,
    scale_begins: torch.Tensor,
) -> None:
    for name, tensor, dtype, rank in (
        ("a", a, torch.uint8, 2),
        ("b", b, torch.uint8, 3),
        ("a_blockscale", a_scales, torch.float8_e4m3fn, 2),
        ("b_blockscales", b_scales, torch.float8_e4m3fn, 3),
        ("alphas", alphas, torch.float32, 1),
        ("problem_sizes", sizes, torch.int32, 2),
    ):
        if tensor.dtype != dtype or tensor.ndim != rank or not tensor.is_contiguous():
            dimensions = counted(rank, "dimension")
            raise RuntimeError(
                f"cutlass_fp4_moe_mm: {name} must be a contiguous {dtype} tensor with {dimensions}, but got "
                f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    experts = b.shape[0]
    if sizes.shape != (experts, 3) or begins.numel() != experts or scale_begins.numel() != experts:
        need = counted(experts, "expert needs", "experts need")
        raise RuntimeError(
            f"cutlass_fp4_moe_mm: {need} problem_sizes ({experts}, 3) and as many offsets, but got "
            f"{tuple(sizes.shape)}, {begins.numel()} and {scale_begins.numel()}"
        )
    check_count("cutlass_fp4_moe_mm", "alphas", alphas, experts, RuntimeError)
    if out.dtype not in OUT_DTYPES or out.shape != (a.shape[0], b.shape[1]) or not out.is_contiguous():
        raise RuntimeError(
            f"cutlass_fp4_moe_mm: output must be float16 or bfloat16 {(a.shape[0], b.shape[1])}, contiguous, but got "
            f"{out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )
    if a.shape[1] != b.shape[2]:
        raise RuntimeError(f"cutlass_fp4_moe_mm: a {tuple(a.shape)} and b {tuple(b.shape)} have different k")
