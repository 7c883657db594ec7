"""Choose each block's scale among candidates by squared error, then encode: the searches of checkpoint conversion.

On entry: fp32 rows, dense, as many columns as whole blocks; the global scale is finite and positive. Candidates are
given relative to the byte t of steps 1 to 3 of ``fp4rt.format``: for each one a factor on t and an offset on the
rounded byte. The first candidate is the specification's own scale and wins ties. Steps 4 and 5 are unchanged, so the
result is an ordinary NVFP4 tensor. Writes codes row-major and scales linear.
"""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.bits import bits_of, e2m1_of_magnitude, e4m3_of_magnitude
from fp4rt.cpu.kernels.compiled import BYTES, COUNT, FLOAT, OFFSETS, Kernel, const, device_function
from fp4rt.format import BLOCK, CODES_PER_BYTE, E2M1, E4M3, E4M3_MAX_BYTE, NEGATIVE_ZERO_CODE, R6

__all__ = ["search_rows"]

f32 = np.float32
SCALE_VALUES = E4M3.values[: E4M3.magnitude_count]
CODE_VALUES = E2M1.values[: E2M1.magnitude_count]
SIGN = np.uint8(NEGATIVE_ZERO_CODE)
SIGN_SHIFT = np.uint32(28)  # brings fp32's sign bit to bit 3, the sign of a code


@device_function
def encode_block(block, byte, reciprocal, codes):
    """Steps 4 and 5 for one candidate; returns the squared error of the block."""
    scale = SCALE_VALUES[byte]
    decoded_scale = scale * reciprocal
    enc = f32(1) / decoded_scale if decoded_scale > 0 else f32(0)
    error = 0.0
    for j in range(BLOCK):
        magnitude = abs(block[j])
        code = e2m1_of_magnitude(magnitude * enc)
        difference = np.float64(magnitude) - np.float64(CODE_VALUES[code] * decoded_scale)
        error += difference * difference
        codes[j] = code
    return error


def _search_rows(rows, m, columns, global_scale, factors, offsets, data, scales):
    """Rows 0 ... m - 1 of ``columns`` columns: the best of the candidates for every block."""
    reciprocal = f32(1) / global_scale
    trial = np.empty(BLOCK, np.uint8)
    best = np.empty(BLOCK, np.uint8)
    for index in range(m * columns // BLOCK):
        block = rows[index * BLOCK : (index + 1) * BLOCK]
        largest = f32(0)
        for j in range(BLOCK):
            largest = max(largest, abs(block[j]))  # 1
        least, chosen, previous = np.inf, 0, -1
        for candidate in range(offsets.size):
            t = global_scale * (largest * R6) * factors[candidate]  # 2
            byte = np.int64(e4m3_of_magnitude(t)) + offsets[candidate]  # 3
            byte = min(max(byte, 0), E4M3_MAX_BYTE)
            if byte == previous:
                continue
            previous = byte
            error = encode_block(block, byte, reciprocal, trial)
            if error < least:
                least, chosen = error, byte
                best[:] = trial
        scales[index] = chosen
        for j in range(BLOCK):
            if chosen == 0:
                best[j] = 0
            else:
                best[j] |= np.uint8(bits_of(block[j]) >> SIGN_SHIFT) & SIGN
        for j in range(0, BLOCK, CODES_PER_BYTE):
            data[(index * BLOCK + j) // CODES_PER_BYTE] = best[j] | (best[j + 1] << 4)


_SIGNATURE = (const(numba.float32), COUNT, COUNT, FLOAT, const(FLOAT), OFFSETS, BYTES, BYTES)
search_rows = Kernel(_search_rows, {np.float32: _SIGNATURE})
