"""Rows of a quantized matrix as numbers: what dequantize, matmul and the error statistics share."""

from __future__ import annotations

import numpy as np

from fp4rt.backend import QuantizedViews
from fp4rt.cpu.kernels.bits import KINDS
from fp4rt.cpu.kernels.dequantize import TABLE_SIZE, dequantize_rows, product_table
from fp4rt.cpu.memory import BITS, flat_bytes, offsets
from fp4rt.cpu.threads import on_thread

__all__ = ["Products", "decode_rows"]


class Products:
    """All products code * fp32(scale / global_scale), rounded to ``dtype``: ``bits[scale byte * 16 + code]``.

    A ``global_scale`` of 1 gives code * scale, which fp32 holds exactly.
    """

    def __init__(self, global_scale: np.float32, dtype: str) -> None:
        self.bits = np.empty(TABLE_SIZE, BITS[dtype])
        on_thread(lambda: product_table(self.bits, global_scale, KINDS[dtype]))


def decode_rows(q: QuantizedViews, products: Products, first: int, end: int, out: np.ndarray) -> None:
    """Rows ``first`` ... ``end`` into ``out``, (rows, n) bits, C-contiguous. Runs on the calling thread."""
    rows, columns = offsets(q.layout, q.columns, first, end)
    data, scales = flat_bytes(q.data), flat_bytes(q.scales)
    row_bytes = q.data.shape[1]
    dequantize_rows(out.reshape(-1), products.bits, data, row_bytes, scales, rows, columns, q.shape[1], first)
