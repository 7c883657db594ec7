"""The orders in which FlashInfer's products want scales and weights: layout 128x4, and TensorRT-LLM's shuffled rows."""

from __future__ import annotations

import torch

from fp4rt.format import BLOCK
from fp4rt.layout import LAYOUTS

__all__ = ["block_scale_interleave", "shuffle_matrix_a", "shuffle_matrix_sf_a", "shuffled_rows"]


def block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """Row-major scales (m, c) or (batch, m, c) in layout 128x4, padded with zeros.

    Args:
        unswizzled_sf: uint8 or bfloat16.

    Returns:
        One dimension: the batches' padded scales one behind the other.

    Raises:
        AssertionError: another dtype or rank.
    """
    if unswizzled_sf.dtype not in (torch.uint8, torch.bfloat16):
        raise AssertionError(f"block_scale_interleave: input must be uint8 or bfloat16, but got {unswizzled_sf.dtype}")
    if unswizzled_sf.ndim not in (2, 3):
        raise AssertionError(f"block_scale_interleave: input must have 2 or 3 dimensions, but got {unswizzled_sf.ndim}")
    batches = unswizzled_sf.reshape(-1, *unswizzled_sf.shape[-2:])
    count, m, columns = batches.shape
    layout, device = LAYOUTS["128x4"], batches.device
    rows = torch.arange(m, device=device).unsqueeze(-1)
    offset = layout.offset(rows, torch.arange(columns, device=device), columns)
    swizzled = batches.new_zeros(count, layout.nbytes(m, columns))
    swizzled[:, offset] = batches
    return swizzled.reshape(-1)


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """The rows in the order of TensorRT-LLM's epilogue.

    Raises:
        AssertionError: the rows are no whole number of shuffle blocks (32 with a tile of 128 rows, else 16).
    """
    return input_tensor[shuffled_rows(input_tensor, epilogue_tile_m)]


def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    """Row-major scales with their rows shuffled as :func:`shuffle_matrix_a` does, then in layout 128x4."""
    if num_elts_per_sf != BLOCK:
        raise NotImplementedError(f"shuffle_matrix_sf_a: only {BLOCK} elements a scale, but got {num_elts_per_sf}")
    return block_scale_interleave(shuffle_matrix_a(input_tensor, epilogue_tile_m))


def shuffled_rows(x: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """int64 (m,): the row that goes to each place. In a block of 4 * 8 (or 2 * 8) rows: transpose to 8 * 4 (8 * 2)."""
    groups = 4 if epilogue_tile_m % 128 == 0 else 2
    m, block = x.shape[0], groups * 8
    if m % block:
        raise AssertionError(f"shuffle: input_tensor.shape[0] must be a multiple of {block}, but got {m}")
    rows = torch.arange(m, device=x.device).reshape(-1, 8, groups)
    return rows.transpose(1, 2).reshape(-1)
