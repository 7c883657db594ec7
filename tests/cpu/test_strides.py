"""Any strides, any alignment, read-only memory: each view gives what its dense copy gives, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor

ALL_DTYPES = list(DTYPES)


def matrix(dtype: str, shape: tuple[int, int] = (37, 96)) -> np.ndarray:
    return np.random.default_rng(11).standard_normal(shape).astype(DTYPES[dtype])


VIEWS = {
    "columns cut off": lambda base: base[:, :32],
    "columns from the middle": lambda base: base[:, 17:81],
    "every other column": lambda base: base[:, ::2],
    "every third row": lambda base: base[::3],
    "rows backwards": lambda base: base[::-1],
    "columns backwards": lambda base: base[:, ::-1],
    "both backwards with steps": lambda base: base[::-2, ::-3],
    "transposed": lambda base: base[:32].T,
    "one row repeated": lambda base: np.broadcast_to(base[3], (9, 96)),
    "one column repeated": lambda base: np.broadcast_to(base[:, 2:3], (37, 48)),
    "one element repeated": lambda base: np.broadcast_to(base[5, 5], (4, 16)),
    "a single row of a transposed matrix": lambda base: base[:32].T[5:6],
    "read-only": lambda base: _read_only(base),
    "rows that overlap": lambda base: np.lib.stride_tricks.as_strided(
        base, (20, 32), (3 * base.itemsize, base.itemsize)
    ),
}


def _read_only(base: np.ndarray) -> np.ndarray:
    base.setflags(write=False)
    return base


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_view_is_quantized_like_its_dense_copy(dtype: str, view: str) -> None:
    base = matrix(dtype)
    before = base.copy()
    x = VIEWS[view](base)
    n = x.shape[1]
    padded_n = -(-n // 16) * 16 + 16
    for scale in (None, 1.0):
        got = fp4rt.quantize(x, scale, padded_n=padded_n)
        assert_same_tensor(got, fp4rt.quantize(np.ascontiguousarray(x), scale, padded_n=padded_n), view)
    assert_same_bits(base, before, "the input")


def test_column_slice_keeps_to_its_own_rows() -> None:
    base = np.full((2, 64), 96, np.float32)
    base[0, :32], base[1, :32] = 6, 3
    q = fp4rt.quantize(base[:, :32], 1.0, layout="linear")
    assert q.scales.tolist() == [[0x38, 0x38], [0x30, 0x30]]
    assert (q.data == 0x77).all()


def test_contiguous_memory_that_starts_one_element_in() -> None:
    buffer = np.zeros(2 * 32 + 1, np.float16)
    x = buffer[1:].reshape(2, 32)
    x[...] = 6
    assert x.ctypes.data % 16 == 2 or buffer.ctypes.data % 16
    for _ in range(2):
        q = fp4rt.quantize(x, 1.0, layout="linear")
        assert (q.scales == 0x38).all()
        assert (q.data == 0x77).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_memory_that_is_not_aligned_to_its_elements(dtype: str) -> None:
    x = matrix(dtype, (5, 48))
    memory = np.zeros(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(x.dtype).reshape(x.shape)
    shifted[...] = x
    assert not shifted.flags.aligned
    q = fp4rt.quantize(x)
    assert_same_tensor(fp4rt.quantize(shifted), q, "unaligned input")
    target = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    assert fp4rt.dequantize(q, dtype, out=target) is target
    assert_same_bits(target, q.dequantize(dtype), "unaligned output")


def shifted_by_one(array: np.ndarray) -> np.ndarray:
    """The same bytes at an odd address."""
    memory = np.empty(array.nbytes + 2, np.uint8)
    start = 1 if memory.ctypes.data % 2 == 0 else 2
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.ctypes.data % 2 == 1
    return view


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_codes_and_scales_that_start_at_an_odd_byte(layout: str) -> None:
    x = matrix("float32", (20, 64))
    q = fp4rt.quantize(x, layout=layout)
    moved = fp4rt.QuantizedTensor(
        shifted_by_one(q.data), shifted_by_one(q.scales), shifted_by_one(q.global_scale), q.shape, layout
    )
    assert_same_bits(moved.dequantize(), q.dequantize(), "dequantized")
    assert_same_bits(moved.relayout("8x4").scales, q.relayout("8x4").scales, "relaid out")
    assert_same_bits(fp4rt.matmul(moved, moved), fp4rt.matmul(q, q), "product")
