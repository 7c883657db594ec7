"""How well a quantized tensor represents its source, in one streaming pass; a block that clipped does not hide."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fp4rt.backend import QuantizedViews
from fp4rt.cpu.decode import Products
from fp4rt.cpu.kernels.error import CLIPPED, COUNTERS, FLUSHED, LARGEST, NOISE, NONFINITE, POWERS, SIGNAL, error_rows
from fp4rt.cpu.memory import flat_bytes, matrix, offsets, scalar
from fp4rt.cpu.threads import map_rows, on_thread
from fp4rt.format import AMAX_TARGET, BLOCK, E4M3, E4M3_NAN_BYTE
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["QuantizationError", "quantization_error"]

# A block clips where its maximum exceeds 2688 / global_scale. The global scale is itself rounded to fp32, so that an
# automatic one may lie half a unit above 2688 / amax: that much is no clipping.
FP32_ROUNDING = 2.0**-22


@dataclass(frozen=True)
class QuantizationError:
    """What quantization cost. Sums are over the elements that are finite in x and not NaN in its quantized form.

    Attributes:
        elements: elements of x.
        nonfinite_elements: those that are infinite or NaN.
        blocks: blocks of 16 columns, a partial last one included.
        clipped_blocks: blocks whose maximum exceeds 2688 / global_scale: their largest elements saturated; and those
            whose factor 1 / (scale * (1 / global_scale)) is beyond fp32: all elements but zeros saturated.
        zero_blocks: blocks with scale 0; all of their codes are 0.
        flushed_blocks: those of them whose elements were not all zero: too small for the global scale.
        nan_blocks: blocks with a NaN, none of whose elements is in the sums.
        signal_power: sum of x squared.
        noise_power: sum of the squared errors.
        max_abs_error: the largest error.
        scale_counts: int64 (256,), how often each scale byte occurs.
    """

    elements: int
    nonfinite_elements: int
    blocks: int
    clipped_blocks: int
    zero_blocks: int
    flushed_blocks: int
    nan_blocks: int
    signal_power: float
    noise_power: float
    max_abs_error: float
    scale_counts: np.ndarray = field(repr=False)

    @property
    def sqnr_db(self) -> float:
        """Signal power over noise power in dB; infinite where there is no error."""
        if self.noise_power == 0:
            return math.inf
        if self.signal_power == 0:
            return -math.inf
        return 10 * math.log10(self.signal_power / self.noise_power)


def quantization_error(x: ArrayView, q: QuantizedViews) -> QuantizationError:
    """Compare ``x`` (m, n) with ``q``; the extra memory is some bytes a row."""
    m, n = q.shape
    source = matrix(x)
    global_scale = scalar(q.global_scale)
    products = Products(global_scale, "float32").bits.view(np.float32)
    clip_limits = on_thread(lambda: _clip_limits(global_scale))
    powers = np.empty((m, POWERS), np.float64)
    data, scales = flat_bytes(q.data), flat_bytes(q.scales)
    row_bytes = q.data.shape[1]

    def run(first: int, end: int) -> np.ndarray:
        rows, columns = offsets(q.layout, q.columns, first, end)
        counts = np.zeros(COUNTERS, np.int64)
        error_rows(
            *source, n, products, data, row_bytes, scales, rows, columns, clip_limits, first, powers, counts
        )  # fmt: skip
        return counts

    counts = sum(map_rows(run, m, n), np.zeros(COUNTERS, np.int64))
    scale_counts = counts[:256]
    return QuantizationError(
        elements=m * n,
        nonfinite_elements=int(counts[NONFINITE]),
        blocks=m * ceil_div(n, BLOCK),
        clipped_blocks=int(counts[CLIPPED]),
        zero_blocks=int(scale_counts[0]),
        flushed_blocks=int(counts[FLUSHED]),
        nan_blocks=int(scale_counts[E4M3_NAN_BYTE]),
        signal_power=float(powers[:, SIGNAL].sum()),  # by rows: the same whatever the number of threads
        noise_power=float(powers[:, NOISE].sum()),
        max_abs_error=float(powers[:, LARGEST].max(initial=0.0)),
        scale_counts=scale_counts,
    )


def _clip_limits(global_scale: np.float32) -> np.ndarray:
    """float64 (256,), by scale byte: the largest maximum of a block that does not clip."""
    scales = np.abs(E4M3.values)
    with np.errstate(all="ignore"):  # whoever made the tensor may have given it a global scale of 0
        limits = np.full(256, np.float64(AMAX_TARGET) / np.float64(global_scale) * (1 + FP32_ROUNDING))
        factors = np.float32(1) / (scales * (np.float32(1) / global_scale))  # step 4 of fp4rt.format
    limits[(scales > 0) & np.isinf(factors)] = 0
    return limits
