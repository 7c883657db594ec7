"""The specification as plain NumPy: every step of ``fp4rt.format`` in the open, nothing clever.

The fast kernels of this package are tested against this file bit for bit. It makes fp32 copies of its input and
searches tables; it is for reading and testing, and never runs in production.
"""

from __future__ import annotations

import numpy as np

from fp4rt.format import (
    AMAX_TARGET,
    BLOCK,
    E2M1,
    E4M3,
    E4M3_NAN_BYTE,
    FP32_MAX,
    NEGATIVE_ZERO_CODE,
    R6,
    FloatFormat,
)
from fp4rt.layout import ScaleLayout, block_columns, ceil_div

__all__ = [
    "dequantize",
    "global_scale",
    "matmul",
    "nearest_even_code",
    "pack_codes",
    "quantize",
    "quantize_blocks",
    "relayout",
    "round_to_bits",
    "unpack_codes",
    "widen",
]


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns of float16, bfloat16 or float32 as fp32 values; exact."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as bit patterns of ``dtype``, one rounding to nearest even; overflow becomes infinity."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def nearest_even_code(magnitude: np.ndarray, number_format: FloatFormat) -> np.ndarray:
    """Code of the nearest value of the format; ties to the even code, saturating. NaN saturates too."""
    finite = number_format.magnitude_count - len(number_format.nan_codes)
    values = number_format.values[:finite]
    midpoints = (values[:-1] + values[1:]) / 2  # exact: one bit more than the format has
    below = np.searchsorted(midpoints, magnitude, side="left")  # a tie counts as below: the lower code
    above = np.searchsorted(midpoints, magnitude, side="right")  # a tie counts as above: the upper code
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


def global_scale(x: np.ndarray) -> np.float32:
    """2688 / amax over the finite values of fp32 ``x``."""
    finite = np.abs(x[np.isfinite(x)])
    amax = finite.max(initial=np.float32(0))
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(AMAX_TARGET) / amax, FP32_MAX)


def quantize_blocks(x: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 (m, C, 16) and scales uint8 (m, C) of fp32 blocks (m, C, 16)."""
    gs = np.float32(global_scale)
    with np.errstate(all="ignore"):
        v = np.abs(x).max(axis=-1, initial=np.float32(0))  # 1
        t = gs * (v * R6)  # 2
        scales = np.where(np.isnan(v), E4M3_NAN_BYTE, nearest_even_code(t, E4M3)).astype(np.uint8)  # 3
        scale = E4M3.values[scales]
        enc = np.where(scale == 0, np.float32(0), np.float32(1) / (scale * (np.float32(1) / gs)))  # 4
        product = np.where(x == 0, np.float32(0), np.abs(x) * enc[..., None])  # 5; 0 * inf is 0 here
    signs = np.where(np.signbit(x), NEGATIVE_ZERO_CODE, 0).astype(np.uint8)
    codes = nearest_even_code(product, E2M1) | signs
    codes[(scales == 0) | (scales == E4M3_NAN_BYTE)] = 0
    return codes, scales


def quantize(
    x: np.ndarray, global_scale: np.float32, layout: ScaleLayout, padded_n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Data (m, padded_n / 2) and scales (in the layout's shape) of fp32 ``x`` (m, n)."""
    m, n = x.shape
    padded = np.zeros((m, padded_n), np.float32)
    padded[:, :n] = x
    codes, scales = quantize_blocks(padded.reshape(m, block_columns(padded_n), BLOCK), global_scale)
    codes = codes.reshape(m, padded_n)
    codes[:, n:] = 0
    return pack_codes(codes), layout.pack(scales)


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes (m, n) to bytes (m, n / 2), the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(data: np.ndarray) -> np.ndarray:
    """Bytes (m, n / 2) to codes (m, n)."""
    codes = np.empty((data.shape[0], data.shape[1] * 2), np.uint8)
    codes[:, 0::2] = data & 0xF
    codes[:, 1::2] = data >> 4
    return codes


def dequantize(
    data: np.ndarray, scales: np.ndarray, global_scale: np.float32, shape: tuple[int, int], layout: ScaleLayout
) -> np.ndarray:
    """fp32 (m, n): code * fp32(scale / global_scale)."""
    m, n = shape
    columns = block_columns(data.shape[1] * 2)
    with np.errstate(all="ignore"):
        block_scale = E4M3.values[layout.unpack(scales, m, columns)] / np.float32(global_scale)
        blocks = E2M1.values[unpack_codes(data)].reshape(m, columns, BLOCK) * block_scale[..., None]
    return blocks.reshape(m, columns * BLOCK)[:, :n]


def relayout(
    scales: np.ndarray, shape: tuple[int, int], columns: int, source: ScaleLayout, target: ScaleLayout
) -> np.ndarray:
    """Scales in ``target``; every byte that belongs to no block of the n columns is 0."""
    m, n = shape
    row_major = source.unpack(scales, m, columns)
    row_major[:, ceil_div(n, BLOCK) :] = 0
    return target.pack(row_major)


def matmul(
    a: np.ndarray, b: np.ndarray, alpha: np.float32, bias: np.ndarray | None = None, dtype: str = "bfloat16"
) -> np.ndarray:
    """Bits of round(alpha * a @ b.T + bias) for unscaled fp32 operands (m, k) and (n, k); fp32 throughout."""
    with np.errstate(all="ignore"):
        product = (a @ b.T) * np.float32(alpha)
        if bias is not None:
            product = product + bias
    return round_to_bits(product, dtype)
