"""Move block scales from one layout to another; target bytes that belong to no block become 0."""

from __future__ import annotations

import numba
import numpy as np

from fp4rt.cpu.kernels.compiled import BYTES, COUNT, OFFSETS, Kernel, const

__all__ = ["relayout_rows"]


def _relayout_rows(target, source, source_rows, source_columns, target_rows, target_columns, blocks):
    """``source_rows`` has the rows that exist; ``target_rows`` those and the padding behind them."""
    for row in range(target_rows.size):
        valid = blocks if row < source_rows.size else 0
        for c in range(valid):
            target[target_rows[row] + target_columns[c]] = source[source_rows[row] + source_columns[c]]
        for c in range(valid, target_columns.size):
            target[target_rows[row] + target_columns[c]] = 0


relayout_rows = Kernel(
    _relayout_rows, {np.uint8: (BYTES, const(numba.uint8), OFFSETS, OFFSETS, OFFSETS, OFFSETS, COUNT)}
)
