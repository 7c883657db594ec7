"""vLLM's FP4 functions (``vllm._custom_ops`` and ``vllm.utils.flashinfer``) on fp4rt.

Names, signatures, shapes and dtypes are vLLM's; so are the kinds of errors: ``AssertionError`` where its Python
asserts, ``RuntimeError`` where its compiled code checks, ``ValueError`` where it raises one. Global scales are encode
scales (2688 / amax); scales come back as float8_e4m3fn. What is different:

- it runs on every device that fp4rt runs on;
- every byte of the results is written, padding included, so nothing is filled beforehand; only the rows of scales that
  no expert of :func:`scaled_fp4_experts_quant` can reach stay unwritten, as in vLLM;
- ``padded_n`` works with ``backend="trtllm"`` and its 8x4 layout too.
"""

from __future__ import annotations

import os

import torch

from fp4rt.compat import experts
from fp4rt.compat import flashinfer as _flashinfer
from fp4rt.compat.products import check_count, multiply
from fp4rt.compat.sorted import cutlass_fp4_moe_mm
from fp4rt.errors import counted
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns, data_shape, round_up
from fp4rt.torch import ops

__all__ = [
    "create_fp4_output_tensors",
    "create_fp4_scale_tensor",
    "cutlass_fp4_moe_mm",
    "cutlass_scaled_fp4_mm",
    "cutlass_scaled_mm_supports_fp4",
    "flashinfer_quant_nvfp4_8x4_sf_layout",
    "flashinfer_scaled_fp4_mm",
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
    "swizzle_blockscale",
]

SCALES_PER_INT32 = 4
TRTLLM_8X4_ROWS = 32  # backend "trtllm" takes layout 8x4 up to this many rows
GEMM_ALIGNMENT = 32  # of n and k in vLLM's product
MAX_TOKENS_VARIABLE = "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"
MAX_TOKENS_PER_EXPERT = 163840
_SWIZZLED, _LINEAR, _SMALL = LAYOUTS["128x4"], LAYOUTS["linear"], LAYOUTS["8x4"]


def create_fp4_scale_tensor(m: int, n: int, device: torch.device, is_sf_swizzled_layout: bool) -> torch.Tensor:
    """Memory for the scales of an (m, n) matrix.

    Returns:
        Swizzled: int32 (ceil128(m), ceil4(n / 16) / 4), four scales an element, zeroed, since whoever fills it may not
        write its padding; else uint8 (m, n / 16), not initialized: it has none.
    """
    if not is_sf_swizzled_layout:
        return torch.empty(_LINEAR.shape(m, block_columns(n)), dtype=torch.uint8, device=device)
    rows, columns = _SWIZZLED.shape(m, block_columns(n))
    return torch.zeros((rows, columns // SCALES_PER_INT32), dtype=torch.int32, device=device)


def create_fp4_output_tensors(
    m: int, n: int, device: torch.device, is_sf_swizzled_layout: bool, padded_n: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes, uint8 (m, n / 2), and for the scales; ``padded_n`` columns instead of n where given."""
    physical_n = n if padded_n is None else padded_n
    codes = torch.empty(data_shape(m, physical_n), dtype=torch.uint8, device=device)
    return codes, create_fp4_scale_tensor(m, physical_n, device, is_sf_swizzled_layout)


def scaled_fp4_quant(
    input: torch.Tensor,
    input_global_scale: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    backend: str = "none",
    padded_n: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last dimension of ``input``; the others are flattened to m rows.

    Args:
        input: (..., n) float16 or bfloat16, n a multiple of 16.
        input_global_scale: fp32, one element: the encode scale.
        is_sf_swizzled_layout: scales in 128x4; else row-major.
        backend: a name with "trtllm" takes layout 8x4 for up to 32 rows, whatever the flag says; any other is ignored.
        padded_n: columns in memory, a multiple of 16.

    Returns:
        uint8 (m, padded_n / 2) and float8_e4m3fn scales in their layout's shape.

    Raises:
        AssertionError: no dimensions, n or ``padded_n`` do not fit, or another dtype.
        RuntimeError: the global scale is no fp32 tensor with one element.
    """
    if input.ndim < 1:
        raise AssertionError(f"scaled_fp4_quant: input.ndim needs to be >= 1, but got {input.ndim}")
    rows = input.reshape(1 if input.ndim == 1 else -1, input.shape[-1])
    m, n = rows.shape
    _check_columns("scaled_fp4_quant", n)
    _check_dtype("scaled_fp4_quant", rows)
    if padded_n is not None and (padded_n < n or padded_n % BLOCK):
        raise AssertionError(
            f"scaled_fp4_quant: padded_n must be >= n and a multiple of {BLOCK}, but got padded_n={padded_n}, n={n}; "
            f"pass padded_n={round_up(max(padded_n, n), BLOCK)}"
        )
    _check_floats("scaled_fp4_quant", "input_global_scale", input_global_scale, 1)
    layout = _SWIZZLED if is_sf_swizzled_layout else _LINEAR
    if "trtllm" in backend and m <= TRTLLM_8X4_ROWS:
        layout = _SMALL
    data, scales, _ = ops.quantize(rows, input_global_scale, layout.name, padded_n)
    return data, scales.view(torch.float8_e4m3fn)


def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether :func:`cutlass_scaled_fp4_mm` runs on compute capability ``major * 10 + minor``: from 8.0 on, here."""
    return cuda_device_capability >= 80


def cutlass_scaled_fp4_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    block_scale_a: torch.Tensor,
    block_scale_b: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """(m, n) = alpha * a @ b.T.

    Args:
        a: uint8 (m, k / 2).
        b: uint8 (n, k / 2).
        block_scale_a: float8_e4m3fn (ceil128(m), ceil4(k / 16)), layout 128x4.
        block_scale_b: float8_e4m3fn (ceil128(n), ceil4(k / 16)), layout 128x4.
        alpha: fp32, one element: 1 / (product of the encode scales).
        out_dtype: float16 or bfloat16.

    Raises:
        AssertionError: a or b is no matrix.
        RuntimeError: dtypes, contiguity or shapes do not fit, or no single alpha; n and k must be multiples of 32.
    """
    if a.ndim != 2 or b.ndim != 2:
        raise AssertionError(
            f"cutlass_scaled_fp4_mm: a and b must be matrices, but got {a.ndim} and {b.ndim} dimensions"
        )
    _check_product(a, b, block_scale_a, block_scale_b, alpha, out_dtype)
    return multiply(a, block_scale_a, _SWIZZLED, b, block_scale_b, alpha, out_dtype, None)


def _check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    def refuse(condition: bool, message: str) -> None:
        if condition:
            raise RuntimeError(f"cutlass_scaled_fp4_mm: {message}")

    _check_floats("cutlass_scaled_fp4_mm", "alpha", alpha, 1)
    for name, tensor, dtype in (
        ("a", a, torch.uint8),
        ("b", b, torch.uint8),
        ("scale_a", scale_a, torch.float8_e4m3fn),
        ("scale_b", scale_b, torch.float8_e4m3fn),
    ):
        refuse(not tensor.is_contiguous(), f"{name} must be contiguous, but got strides {tensor.stride()}")
        refuse(tensor.dtype != dtype, f"inconsistent tensor type: {name} must be {dtype}, but got {tensor.dtype}")
    m, n, k = a.shape[0], b.shape[0], a.shape[1] * CODES_PER_BYTE
    shapes = f"a and b shapes cannot be multiplied ({m}x{a.shape[1]} and {n}x{b.shape[1]})"
    refuse(a.shape[1] != b.shape[1], shapes)
    refuse(k % GEMM_ALIGNMENT != 0, f"expected k to be divisible by {GEMM_ALIGNMENT}, but got k = {k}; quantize with "
           f"padded_n={round_up(k, GEMM_ALIGNMENT)}")  # fmt: skip
    refuse(n % GEMM_ALIGNMENT != 0, f"expected n to be divisible by {GEMM_ALIGNMENT}, but got n = {n}")
    for name, scale, rows in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        wanted = _SWIZZLED.shape(rows, block_columns(k))
        refuse(
            tuple(scale.shape) != wanted,
            f"{name} must be padded and swizzled to a shape {wanted}, but got {tuple(scale.shape)}",
        )
    refuse(out_dtype not in (torch.float16, torch.bfloat16), f"unsupported output data type of nvfp4 mm ({out_dtype})")


def flashinfer_quant_nvfp4_8x4_sf_layout(
    a: torch.Tensor, a_global_sf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes (m, n / 2) and uint8 scales in layout 8x4."""
    return _flashinfer.nvfp4_quantize(a, a_global_sf, sfLayout=_flashinfer.SfLayout.layout_8x4)


def flashinfer_scaled_fp4_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    block_scale_a: torch.Tensor,
    block_scale_b: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    block_size: int = 16,
    use_nvfp4: bool = True,
) -> torch.Tensor:
    """vLLM's way into FlashInfer's ``mm_fp4``: b is (n, k / 2) here, and "trtllm" means layout 8x4 up to 32 rows.

    Raises:
        AssertionError: a, b or their scales are no matrices, not dense in k, or of different k.
    """
    for name, tensor in (("a", a), ("b", b), ("block_scale_a", block_scale_a), ("block_scale_b", block_scale_b)):
        if tensor.ndim != 2:
            found = counted(tensor.ndim, "dimension")
            raise AssertionError(f"flashinfer_scaled_fp4_mm: {name} must be a matrix, but got {found}")
    if a.stride(-1) != 1 or b.stride(-1) != 1:
        raise AssertionError("flashinfer_scaled_fp4_mm: a and b must be dense along k")
    if a.shape[1] != b.shape[1]:
        raise AssertionError(f"flashinfer_scaled_fp4_mm: a and b must have one k, but got {a.shape} and {b.shape}")
    return _flashinfer.mm_fp4(
        a,
        b.t(),
        block_scale_a,
        block_scale_b.t(),
        alpha,
        out_dtype,
        block_size=block_size,
        use_8x4_sf_layout=backend == "trtllm" and a.shape[0] <= TRTLLM_8X4_ROWS,
        backend=backend,
        use_nvfp4=use_nvfp4,
    )


def scaled_fp4_experts_quant(
    input_tensor: torch.Tensor,
    input_global_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    blockscale_offsets: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows sorted by expert, each expert with its own global scale; nothing is read back to the host.

    Args:
        input_tensor: (m, k) float16 or bfloat16, m at most the token limit times ``topk``.
        input_global_scale: fp32 (experts,): encode scales.
        expert_offsets: int32 (experts + 1,): where an expert's rows begin.
        blockscale_offsets: int32 (experts + 1,): where its rows of scales begin, multiples of 128.
        topk: experts a token.

    Returns:
        uint8 (m, k / 2), and float8_e4m3fn (rows, ceil4(k / 16)) in layout 128x4 per expert, of limit * topk rows, or
        of ceil128(m) + 128 * experts where those are more. Padding is 0 in so many of them; no expert reaches the
        further ones: they stay unwritten.

    Raises:
        AssertionError: no matrix, k or the dtype do not fit, or more rows than the limit, which the environment
            variable VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE sets.
        RuntimeError: not one fp32 scale an expert, or not one offset more than experts.
    """
    return _quantize_experts(
        "scaled_fp4_experts_quant", input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk
    )


def silu_and_mul_scaled_fp4_experts_quant(
    input_tensor: torch.Tensor,
    input_global_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    blockscale_offsets: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`scaled_fp4_experts_quant` of silu(gate) * up, with ``input_tensor`` (m, 2k) = gate || up."""
    name = "silu_and_mul_scaled_fp4_experts_quant"
    _check_gated(name, input_tensor)
    activation = experts.silu_and_mul(input_tensor) if input_tensor.ndim == 2 else input_tensor
    return _quantize_experts(name, activation, input_global_scale, expert_offsets, blockscale_offsets, topk)


def _quantize_experts(
    name: str,
    x: torch.Tensor,
    global_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    scale_offsets: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.ndim != 2:
        raise AssertionError(f"{name}: input.ndim needs to be == 2, but got {x.ndim}")
    _check_columns(name, x.shape[1])
    _check_dtype(name, x)
    limit = _max_tokens_per_expert()
    if x.shape[0] > limit * topk:
        raise AssertionError(
            f"{name}: m_numtopk must be at most {limit} * topk = {limit * topk}, but got {x.shape[0]}; raise the limit "
            f"with {MAX_TOKENS_VARIABLE}"
        )
    count = max(expert_offsets.numel() - 1, 0)
    _check_floats(name, "input_global_scale", global_scales, count)
    check_count(name, "blockscale_offsets", scale_offsets, count + 1, RuntimeError)
    scale_rows = max(limit * topk, experts.reachable_rows(x.shape[0], count))
    data, scales = experts.quantize_experts(x, global_scales, expert_offsets, scale_offsets, scale_rows)
    return data, scales.view(torch.float8_e4m3fn)


def silu_and_mul_nvfp4_quant(
    input: torch.Tensor, input_global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`scaled_fp4_quant` of silu(gate) * up, with ``input`` (..., 2n) = gate || up."""
    _check_gated("silu_and_mul_nvfp4_quant", input)
    return scaled_fp4_quant(experts.silu_and_mul(input), input_global_scale)


def swizzle_blockscale(scale: torch.Tensor) -> torch.Tensor:
    """Row-major float8_e4m3fn scales (m, c) or (batch, m, c) in layout 128x4, padded with zeros.

    Raises:
        AssertionError: another dtype or rank.
    """
    if scale.dtype != torch.float8_e4m3fn:
        raise AssertionError(f"swizzle_blockscale: scale must be torch.float8_e4m3fn, but got {scale.dtype}")
    if scale.ndim not in (2, 3):
        raise AssertionError(f"swizzle_blockscale: scale must have 2 or 3 dimensions, but got {scale.ndim}")
    batches = scale.shape[:-2]
    shape = _SWIZZLED.shape(*scale.shape[-2:])
    swizzled = _flashinfer.block_scale_interleave(scale.view(torch.uint8))
    return swizzled.reshape(*batches, *shape).view(torch.float8_e4m3fn)


def _check_floats(function: str, name: str, values: object, count: int) -> None:
    """That ``values`` is what the compiled code takes: an fp32 tensor of ``count`` elements."""
    if not isinstance(values, torch.Tensor):
        raise RuntimeError(
            f"{function}: {name} must be a torch.float32 tensor with numel() = {count}, but got {type(values).__name__}"
        )
    if values.dtype != torch.float32 or values.numel() != count:
        raise RuntimeError(
            f"{function}: {name} must be torch.float32 with numel() = {count}, but got {values.dtype} with "
            f"{values.numel()}"
        )


def _max_tokens_per_expert() -> int:
    chosen = os.environ.get(MAX_TOKENS_VARIABLE)
    if not chosen:
        return MAX_TOKENS_PER_EXPERT
    if not chosen.isdecimal() or int(chosen) == 0:
        raise ValueError(f"{MAX_TOKENS_VARIABLE} must be a positive integer, got {chosen!r}; unset it or correct it")
    return int(chosen)


def _check_gated(name: str, x: torch.Tensor) -> None:
    if x.ndim > 0 and x.shape[-1] % 2:
        raise AssertionError(f"{name}: input width must be even (gate || up), but got {x.shape[-1]}")


def _check_columns(name: str, n: int) -> None:
    if n % BLOCK:
        raise AssertionError(f"{name}: last dim has to be multiple of {BLOCK}, but got {n}")


def _check_dtype(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise AssertionError(f"{name}: input.dtype needs to be fp16 or bf16 but got {x.dtype}")
