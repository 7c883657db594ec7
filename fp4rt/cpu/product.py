"""The product on the CPU: operands dequantized to fp32 in blocks, BLAS, and an epilogue that rounds once.

code * scale has at most 6 significant bits, so both operands are exact in fp32 and only the order of BLAS's fp32
additions is free; the global scales come in with alpha. Columns from k on are never read, whatever they hold.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fp4rt.backend import Explanation, PrepackedViews, QuantizedViews
from fp4rt.cpu.decode import Products, decode_rows
from fp4rt.cpu.kernels.bits import KINDS
from fp4rt.cpu.kernels.prepacked import prepacked_rows
from fp4rt.cpu.kernels.product import finish_rows, widen_rows
from fp4rt.cpu.memory import Target, aligned, matrix, scalar
from fp4rt.cpu.threads import map_rows, on_thread
from fp4rt.format import FP32_MAX

if TYPE_CHECKING:
    from fp4rt.interop import ArrayView

__all__ = ["explain", "matmul"]

OPERAND_BLOCK = 1 << 22  # elements of an operand in fp32 at a time: 16 MB
ONE = np.float32(1)
LEAST_NORMAL, MOST_FINITE = float(np.finfo(np.float32).tiny), float(FP32_MAX)


class _Operand(Protocol):
    """A matrix whose rows can be had in fp32."""

    shape: tuple[int, int]
    scale: np.float32  # the operand's values are rows / scale

    def read(self, first: int, end: int, out: np.ndarray) -> None:
        """Rows ``first`` ... ``end`` into fp32 ``out``."""


class _Quantized:
    def __init__(self, views: QuantizedViews) -> None:
        self.views, self.shape = views, views.shape
        self.scale = scalar(views.global_scale)
        self.products = Products(ONE, "float32")

    def read(self, first: int, end: int, out: np.ndarray) -> None:
        def run(begin: int, stop: int) -> None:
            decode_rows(self.views, self.products, first + begin, first + stop, out[begin:stop].view(np.uint32))

        map_rows(run, end - first, self.shape[1])


class _Array:
    scale = ONE

    def __init__(self, view: ArrayView) -> None:
        self.source = matrix(view)
        m, k = view.shape
        self.shape = m, k

    def read(self, first: int, end: int, out: np.ndarray) -> None:
        def run(begin: int, stop: int) -> None:
            widen_rows(*self.source, self.shape[1], first + begin, out[begin:stop].reshape(-1))

        map_rows(run, end - first, self.shape[1])


class _Prepacked:
    def __init__(self, views: PrepackedViews) -> None:
        self.shape = views.shape
        self.scale = scalar(views.global_scale)
        tiles = views.data.bits()
        self.row_tiles = tiles.shape[1]
        self.words = aligned(tiles.reshape(-1)).view(np.uint32)
        self.products = Products(ONE, "float32").bits.view(np.float32)

    def read(self, first: int, end: int, out: np.ndarray) -> None:
        def run(begin: int, stop: int) -> None:
            rows = out[begin:stop].reshape(-1)
            prepacked_rows(self.words, self.row_tiles, self.products, self.shape[1], first + begin, rows)

        map_rows(run, end - first, self.shape[1])


def _operand(value: QuantizedViews | ArrayView | PrepackedViews) -> _Operand:
    if isinstance(value, QuantizedViews):
        return _Quantized(value)
    if isinstance(value, PrepackedViews):
        return _Prepacked(value)
    return _Array(value)


def matmul(
    a: QuantizedViews | ArrayView,
    b: QuantizedViews | PrepackedViews,
    out_dtype: str,
    alpha: ArrayView | float | None,
    bias: ArrayView | None,
    out: ArrayView | None,
    stream: int = 0,
) -> Any:
    """See :class:`fp4rt.backend.Backend`."""
    left, right = _operand(a), _operand(b)
    (m, k), n = left.shape, right.shape[0]
    library = a.data.library if isinstance(a, QuantizedViews) else a.library
    target = Target((m, n), out_dtype, out, library)
    if alpha is None:
        first, factor = on_thread(lambda: _true_alpha(left.scale, right.scale))
    else:
        first, factor = ONE, scalar(alpha)
    addend = np.empty(n if bias is not None else 0, np.float32)
    if bias is not None:
        widen_rows(*matrix(bias), n, 0, addend)

    rows_a_block, columns_a_block = _block_sizes(m, n, k)
    rows, columns = np.empty((rows_a_block, k), np.float32), np.empty((columns_a_block, k), np.float32)
    sums = np.empty(rows_a_block * columns_a_block, np.float32)
    for i in range(0, m, max(1, rows_a_block)):
        x = rows[: min(rows_a_block, m - i)]
        left.read(i, i + len(x), x)
        for j in range(0, n, max(1, columns_a_block)):
            w = columns[: min(columns_a_block, n - j)]
            right.read(j, j + len(w), w)
            product = sums[: len(x) * len(w)].reshape(len(x), len(w))
            on_thread(functools.partial(_multiply, x, w, first, product))
            _finish(product, factor, addend, target.bits[i : i + len(x)], j, KINDS[out_dtype])
    return target.finish()


def explain(
    a: QuantizedViews | ArrayView, b: QuantizedViews | PrepackedViews, measure: bool, stream: int = 0
) -> Explanation:
    """See :class:`fp4rt.backend.Backend`; there is one way here, so nothing is measured."""
    (m, k), n = a.shape, b.shape[0]
    rows, columns = _block_sizes(m, n, k)
    workspace = {"operand a": rows * k * 4, "operand b": columns * k * 4, "sums": rows * columns * 4}
    why = "host arrays: operands are dequantized to fp32 in blocks, which is exact, and multiplied by BLAS"
    return Explanation("BLAS", f"{rows} x {columns} x {k}", workspace, why)


def _block_sizes(m: int, n: int, k: int) -> tuple[int, int]:
    """Rows of a and of b at a time."""
    rows = max(1, OPERAND_BLOCK // k)
    return min(m, rows), min(n, rows)


def _multiply(x: np.ndarray, w: np.ndarray, factor: np.float32, out: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # NaN scales and infinite activations are values, not mistakes
        np.matmul(x, w.T, out=out)
        if factor != ONE:
            out *= factor


def _true_alpha(left: np.float32, right: np.float32) -> tuple[np.float32, np.float32]:
    """1 / (product of the operands' global scales) in two factors, of which the first is a power of two.

    It is 1, and the second one is rounded once, unless that would take bits of it, or all: products may be normal
    numbers of fp32 where it is none.
    """
    scales = float(left) * float(right)
    alpha = 1.0 / scales if scales else math.inf
    if LEAST_NORMAL <= abs(alpha) <= MOST_FINITE:
        return ONE, np.float32(alpha)
    first = 2.0**64 if alpha > 1.0 else 2.0**-64
    return np.float32(first), np.float32(min(alpha / first, MOST_FINITE))  # infinity times 0 would be NaN


def _finish(
    product: np.ndarray, alpha: np.float32, bias: np.ndarray, out: np.ndarray, first_column: int, kind: int
) -> None:
    width, n = product.shape[1], out.shape[1]

    def run(first: int, end: int) -> None:
        rows = out[first:end].reshape(-1)
        sums = product[first:end].reshape(-1)
        finish_rows(rows, sums, alpha, bias, bias.size > 0, width, n, first_column, kind)

    map_rows(run, *product.shape)
