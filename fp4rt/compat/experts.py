"""Quantizing the rows of several experts at once, each with its own global scale, as plain PyTorch operations.

Which row belongs to which expert is known on the device only: nothing here reads it back, so that the calls can be
captured in a graph. The steps are those of ``fp4rt.format``; their numbers stand beside the lines.
"""

from __future__ import annotations

import torch

from fp4rt.format import BLOCK, CODES_PER_BYTE, E4M3_MAX, NEGATIVE_ZERO_CODE, R6
from fp4rt.layout import LAYOUTS, round_up

__all__ = ["quantize_experts", "quantize_rows", "reachable_rows", "silu_and_mul"]

# Where a magnitude passes on to the next code; on the border itself the even code wins, so every other one is closed.
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (m, 2k) = gate || up: in fp32, then rounded once, as the fused kernels do."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def quantize_rows(x: torch.Tensor, row_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with one encode scale a row.

    Args:
        x: (m, k) float16, bfloat16 or float32, k a multiple of 16.
        row_scale: fp32 (m,).

    Returns:
        data uint8 (m, k / 2), scales uint8 (m, k / 16) row-major.
    """
    m, k = x.shape
    blocks = x.float().reshape(m, k // BLOCK, BLOCK)
    scale32 = row_scale.reshape(m, 1)
    v = blocks.abs().amax(dim=-1)  # step 1
    t = scale32 * (v * float(R6))  # step 2; a tensor of it would be copied from the host, and the call would wait
    scales = t.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)  # step 3
    scale = scales.float()
    enc = torch.where(scale == 0, 0.0, 1.0 / (scale * (1.0 / scale32)))  # step 4
    magnitude = torch.where(blocks.isinf(), torch.inf, (blocks * enc.unsqueeze(-1)).abs())  # step 5
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    for index, border in enumerate(_BORDERS):
        codes += magnitude >= border if index % 2 else magnitude > border
    codes += blocks.signbit().to(torch.uint8) * NEGATIVE_ZERO_CODE
    codes *= ((scale != 0) & ~scale.isnan()).unsqueeze(-1)  # a block of scale 0, or with a NaN, has codes 0
    pairs = codes.reshape(m, k // CODES_PER_BYTE, CODES_PER_BYTE)
    return pairs[..., 0] | pairs[..., 1] << 4, scales.view(torch.uint8)


def reachable_rows(m: int, num_experts: int) -> int:
    """Rows of scales that experts stay within when each begins on the next free tile."""
    tile_rows = LAYOUTS["128x4"].tile_rows
    return round_up(m, tile_rows) + tile_rows * num_experts


def quantize_experts(
    x: torch.Tensor,
    global_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    scale_offsets: torch.Tensor,
    scale_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows sorted by expert.

    Args:
        x: (m, k) float16 or bfloat16; expert e has rows ``expert_offsets[e]`` ... ``expert_offsets[e + 1]``.
        global_scales: fp32 (experts,), encode scales.
        expert_offsets: integer (experts + 1,).
        scale_offsets: integer (experts + 1,): the row of the scale buffer where an expert's tiles begin.
        scale_rows: rows of the scale buffer.

    Returns:
        data uint8 (m, k / 2), all written; scales uint8 (scale_rows, ceil4(k / 16)) in layout 128x4. Padding is 0 in
        the first ceil128(m) + 128 * experts rows, which experts stay within when each begins on the next free tile;
        further rows stay as the memory was, except for the scales of an expert that begins there.
    """
    m, k = x.shape
    layout = LAYOUTS["128x4"]
    num_experts = global_scales.numel()
    columns = k // BLOCK
    width = round_up(columns, layout.tile_columns)
    rows = torch.arange(m, device=x.device)
    expert = torch.searchsorted(expert_offsets[1:].contiguous(), rows, right=True)
    inside = (expert < num_experts) & (rows >= expert_offsets[0])
    expert = expert.clamp(max=num_experts - 1)
    data, scales = quantize_rows(x, global_scales.reshape(-1)[expert])
    target = (rows - expert_offsets[expert] + scale_offsets[expert]).unsqueeze(-1)
    offset = layout.offset(target, torch.arange(columns, device=x.device), columns)
    nbytes = scale_rows * width
    buffer = torch.empty(nbytes + layout.tile_bytes, dtype=torch.uint8, device=x.device)
    reachable = min(scale_rows, reachable_rows(m, num_experts))
    buffer[: reachable * width].zero_()
    lost = ~inside.unsqueeze(-1) | (offset >= nbytes)  # rows of no expert go behind the end
    buffer[torch.where(lost, nbytes, offset)] = scales
    return data, buffer[:nbytes].reshape(scale_rows, width)
