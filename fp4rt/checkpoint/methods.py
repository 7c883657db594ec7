"""How the scales of a weight are chosen. None needs calibration data; all give ordinary NVFP4 tensors.

========================  =============================  ==========================================================
method                    global scale (encode)          block scale
========================  =============================  ==========================================================
``amax``                  2688 / amax                    the specification's, from the block's largest magnitude
``percentile``            2688 / percentile of abs(x)    the same; blocks above the percentile are clipped
``mse``                   2688 / amax                    least squared error among the specification's e4m3 code,
                                                         the 4 below it and the 5 above it
``four-over-six``         1536 / amax                    least squared error of two: the largest magnitude becomes
                                                         code 6 or code 4
========================  =============================  ==========================================================

``four-over-six`` normalizes block scales to 256 instead of 448, so that 1.5 times the largest still is an e4m3 number.
Every global scale is rounded to one that all file formats store without loss. Weights that serving engines join
(``joined``) share one: amax and percentile are then the largest of theirs.

Sources: "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling" (2025); nvidia-modelopt's
``fp8_max_for_normalization``.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np

from fp4rt import api
from fp4rt.checkpoint.formats import storable_scale
from fp4rt.errors import CheckpointError, DtypeError
from fp4rt.format import AMAX_TARGET, BLOCK, E2M1_MAX, FP32_MAX
from fp4rt.layout import block_columns, data_shape, round_up
from fp4rt.tensor import QuantizedTensor

__all__ = [
    "DEFAULT_PERCENTILE",
    "METHODS",
    "Method",
    "NonFinite",
    "largest_magnitude",
    "percentile",
    "quantize_matrix",
    "reach",
]

METHODS = ("amax", "percentile", "mse", "four-over-six")
DEFAULT_PERCENTILE = 99.99
SCALE_MAX_OF_FOUR_OVER_SIX = 256.0
FOUR = 4.0
# Candidates as (factor on t, offset on its e4m3 code); the first is the specification's own.
CANDIDATES = {
    "mse": [(1.0, offset) for offset in (0, -1, 1, -2, 2, -3, 3, -4, 4, 5)],
    "four-over-six": [(1.0, 0), (E2M1_MAX / FOUR, 0)],
}
SLAB_ELEMENTS = 1 << 20


class NonFinite(CheckpointError):
    """A weight holds a NaN or an infinity; ``position`` is its first one."""

    def __init__(self, position: tuple[int, ...], value: float) -> None:
        self.position = position
        self.value = value
        super().__init__(f"{value} at {list(position)}")


@dataclass(frozen=True)
class Method:
    """A method by name, with the percentile that only ``percentile`` uses.

    Raises:
        CheckpointError: the name or the percentile is not one.
        DtypeError: the percentile is no number.
    """

    name: str = "amax"
    percentile: float = DEFAULT_PERCENTILE

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise CheckpointError(f"unknown method {self.name!r}; use one of {', '.join(METHODS)}")
        if isinstance(self.percentile, bool) or not isinstance(self.percentile, numbers.Real):
            raise DtypeError(f"percentile must be a number, got {self.percentile!r}")
        if not 0 < self.percentile <= 100:
            raise CheckpointError(f"percentile must lie in (0, 100], got {self.percentile}")
        object.__setattr__(self, "percentile", float(self.percentile))

    def __str__(self) -> str:
        return f"{self.name} {self.percentile:g}" if self.name == "percentile" else self.name


def reach(x: np.ndarray, method: Method) -> float:
    """The magnitude that a method makes the largest number of the global scale: amax, or the percentile.

    Raises:
        NonFinite: x holds a NaN or an infinity.
    """
    amax = largest_magnitude(x)
    return percentile(x, method.percentile) or amax if method.name == "percentile" else amax


def quantize_matrix(x: np.ndarray, method: Method, largest: float | None = None) -> QuantizedTensor:
    """Quantize a host matrix (m, n) of float16, bfloat16 or float32; scales linear, columns padded to whole blocks.

    Args:
        x: the matrix.
        method: how scales are chosen.
        largest: the :func:`reach` to scale by, of finite x; that of x where None.

    Raises:
        NonFinite: x holds a NaN or an infinity.
    """
    largest = reach(x, method) if largest is None else largest
    target = E2M1_MAX * SCALE_MAX_OF_FOUR_OVER_SIX if method.name == "four-over-six" else AMAX_TARGET
    encode = storable_scale(min(target / largest, float(FP32_MAX)) if largest else 1.0)
    padded_n = round_up(x.shape[1], BLOCK)
    if method.name in CANDIDATES:
        return _search(x, encode, padded_n, CANDIDATES[method.name])
    return api.quantize(x, float(encode), layout="linear", padded_n=padded_n)


def largest_magnitude(x: np.ndarray) -> float:
    """Largest magnitude of x, in one pass without a copy of it.

    Raises:
        NonFinite: x holds a NaN or an infinity; the position is that of the first one.
    """
    bits, infinity = _magnitude_bits(x)
    largest = 0
    for rows in _slabs(bits):
        block = rows & np.iinfo(bits.dtype).max // 2
        largest = max(largest, int(block.max(initial=0)))
        if largest >= infinity:
            break
    else:
        return float(np.array(largest, bits.dtype).view(x.dtype).astype(np.float64))
    magnitudes = bits & np.iinfo(bits.dtype).max // 2
    first = np.unravel_index(int(np.argmax(magnitudes >= infinity)), x.shape)
    raise NonFinite(tuple(int(i) for i in first), float(np.asarray(x[first]).astype(np.float64)))


def percentile(x: np.ndarray, percent: float) -> float:
    """Smallest magnitude that at least ``percent`` % of the elements do not exceed; exact, by counting bit patterns."""
    bits, _ = _magnitude_bits(x)
    rank = max(1, math.ceil(bits.size * percent / 100))
    half = 16 if bits.dtype == np.uint32 else 0
    mask = np.iinfo(bits.dtype).max // 2
    counts = np.zeros(1 << 15, np.int64)
    for rows in _slabs(bits):
        counts += np.bincount(((rows & mask) >> half).ravel(), minlength=counts.size)
    upper, before = _bin_of_rank(counts, rank)
    if half:
        counts = np.zeros(1 << half, np.int64)
        for rows in _slabs(bits):
            magnitudes = rows & mask
            counts += np.bincount(magnitudes[magnitudes >> half == upper] & 0xFFFF, minlength=counts.size)
        lower, _ = _bin_of_rank(counts, rank - before)
        upper = upper << half | lower
    return float(np.array(upper, bits.dtype).view(x.dtype).astype(np.float64))


def _bin_of_rank(counts: np.ndarray, rank: int) -> tuple[int, int]:
    """The bin in which the element of ``rank`` (from 1) lies, and how many lie in the bins before it."""
    cumulative = np.cumsum(counts)
    index = int(np.searchsorted(cumulative, rank))
    return index, int(cumulative[index] - counts[index])


def _magnitude_bits(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The bit patterns of x, and that of its infinity without a sign."""
    bits = x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)
    infinity = np.array(np.inf, x.dtype).view(bits.dtype)
    return bits, int(infinity)


def _slabs(matrix: np.ndarray) -> list[np.ndarray]:
    """Row ranges of about a million elements."""
    step = max(1, SLAB_ELEMENTS // max(1, matrix.shape[1]))
    return [matrix[row : row + step] for row in range(0, matrix.shape[0], step)]


def _search(x: np.ndarray, encode: np.float32, padded_n: int, candidates: list[tuple[float, int]]) -> QuantizedTensor:
    """Search block scales on all cores; rows are independent, so their number changes nothing."""
    from fp4rt.cpu.kernels.search_scales import search_rows  # numba is needed only here
    from fp4rt.cpu.threads import map_rows

    m, n = x.shape
    data = np.empty(data_shape(m, padded_n), np.uint8)
    scales = np.empty((m, block_columns(padded_n)), np.uint8)
    factors = np.array([factor for factor, _ in candidates], np.float32)
    offsets = np.array([offset for _, offset in candidates], np.int64)

    def run(first: int, end: int) -> None:
        for slab in _slabs(x[first:end]):
            last = first + slab.shape[0]
            rows = np.zeros((slab.shape[0], padded_n), np.float32)
            rows[:, :n] = slab
            flat_data, flat_scales = data[first:last].reshape(-1), scales[first:last].reshape(-1)
            search_rows(rows.reshape(-1), slab.shape[0], padded_n, encode, factors, offsets, flat_data, flat_scales)
            first = last

    map_rows(run, m, n)
    global_scale = np.array([encode], np.float32)
    return QuantizedTensor.trusted(data, scales, global_scale, (m, n), "linear", padded_n)
