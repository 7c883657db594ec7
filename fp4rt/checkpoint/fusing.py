"""Join quantized matrices by rows into one: q, k and v, or gate and up.

A fused weight is fastest with one global scale. Where the parts have different ones there are two honest ways:

* ``keep``: the parts keep their global scales; the fused tensor carries one for each part. Nothing is lost, but the
  reader must apply them by rows.
* ``rescale``: the smallest encode scale (the largest range) becomes that of all, and the block scales of the other
  parts are multiplied by the ratio and rounded to e4m3 again. Codes are kept; the loss is stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fp4rt import api
from fp4rt.arguments import check_is_quantized
from fp4rt.errors import CheckpointError, ShapeError, counted
from fp4rt.format import BLOCK, CODES_PER_BYTE, E4M3
from fp4rt.tensor import QuantizedTensor

__all__ = ["FUSE_MODES", "FusedParts", "check_mode", "fuse"]

FUSE_MODES = ("keep", "rescale")


@dataclass(frozen=True)
class FusedParts:
    """Fused matrices and what fusing cost.

    Attributes:
        parts: one matrix, or (``keep``) the parts with their own global scales.
        sqnr_db: of the result against the parts; infinite where nothing was lost.
        max_error: largest absolute difference.
        lost_blocks: blocks whose scale changed in value.
    """

    parts: tuple[QuantizedTensor, ...]
    sqnr_db: float
    max_error: float
    lost_blocks: int

    def describe(self) -> str:
        """The loss in words."""
        if len(self.parts) > 1:
            return f"keeps {len(self.parts)} global scales, one for each part"
        if not self.lost_blocks:
            return "lossless"
        lost = counted(self.lost_blocks, "block scale was", "block scales were")
        return f"{lost} rounded again: {self.sqnr_db:.1f} dB"


def fuse(parts: Sequence[QuantizedTensor], mode: str = "keep") -> FusedParts:
    """Join matrices of equal width by rows.

    Args:
        parts: host matrices (n_i, k) with linear scales.
        mode: "keep" or "rescale"; parts that share one global scale are joined without loss in either.

    Raises:
        CheckpointError: the mode is unknown or there is nothing to join.
        ShapeError: the widths differ.
    """
    check_mode(mode)
    if not parts:
        raise CheckpointError("there is nothing to fuse")
    for i, part in enumerate(parts):
        check_is_quantized("fuse", f"parts[{i}]", part)
    widths = {(part.shape[1], part.padded_n) for part in parts}
    if len(widths) > 1:
        raise ShapeError(f"fused matrices need one number of columns, got {sorted(width for width, _ in widths)}")
    encode = [np.float32(part.global_scale[0]) for part in parts]
    if mode == "keep" and len(set(encode)) > 1:
        return FusedParts(tuple(parts), math.inf, 0.0, 0)
    smallest = min(encode)
    data, scales, signal, noise, largest, lost = [], [], 0.0, 0.0, 0.0, 0
    for part, own in zip(parts, encode, strict=True):
        if own == smallest:
            data.append(part.data)
            scales.append(part.scales)
            continue
        rescaled = _rescale(part.scales, smallest / own)
        after = api.dequantize(_with_scales(part, rescaled, smallest))
        difference = np.nan_to_num(np.subtract(after, api.dequantize(part), dtype=np.float64))  # NaN stays NaN: no loss
        noise += float(np.square(difference).sum())
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        changed = E4M3.values[rescaled] * own != E4M3.values[part.scales] * smallest
        lost += int(np.count_nonzero(changed & ~np.isnan(E4M3.values[part.scales])))
        data.append(_without_codes(part.data, rescaled == 0))
        scales.append(rescaled)
    if noise:
        signal = sum(float(np.nansum(np.square(api.dequantize(part), dtype=np.float64))) for part in parts)
    joined = QuantizedTensor.trusted(
        np.concatenate(data),
        np.concatenate(scales),
        np.array([smallest], np.float32),
        (sum(part.shape[0] for part in parts), parts[0].shape[1]),
        parts[0].layout,
        parts[0].padded_n,
    )
    return FusedParts((joined,), 10 * math.log10(signal / noise) if noise else math.inf, largest, lost)


def check_mode(mode: str) -> None:
    """Refuse a way to fuse scales that there is not.

    Raises:
        CheckpointError: it is none of FUSE_MODES.
    """
    if mode not in FUSE_MODES:
        raise CheckpointError(f"unknown way to fuse scales {mode!r}; use one of {', '.join(FUSE_MODES)}")


def _rescale(scales: np.ndarray, ratio: np.float32) -> np.ndarray:
    """e4m3 of every scale times ``ratio`` <= 1, by a table of its 256 values; a NaN stays one."""
    products = np.abs(E4M3.values) * np.float32(ratio)
    table = products.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)  # nearest even; at most 448, so nothing overflows
    rescaled: np.ndarray = table[scales]
    return rescaled


def _without_codes(data: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Codes 0 in blocks whose scale has become 0."""
    blocks = data.reshape(*zero.shape, BLOCK // CODES_PER_BYTE)
    return np.where(zero[..., None], np.uint8(0), blocks).reshape(data.shape)


def _with_scales(part: QuantizedTensor, scales: np.ndarray, encode: np.float32) -> QuantizedTensor:
    return QuantizedTensor.trusted(
        part.data, scales, np.array([encode], np.float32), part.shape, part.layout, part.padded_n
    )
