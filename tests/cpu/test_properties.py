"""Properties that hold for every input."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fp4rt
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor

layouts = st.sampled_from(list(LAYOUTS))
shapes = st.tuples(st.integers(0, 40), st.integers(1, 80))
UNSIGNED = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Any bit patterns of any dtype: NaN, infinity, subnormals, both zeros."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    return draw(arrays.arrays(UNSIGNED[dtype], draw(shapes))).view(DTYPES[dtype])


@st.composite
def quantized(draw: st.DrawFn, scale_bytes: st.SearchStrategy[int]) -> fp4rt.QuantizedTensor:
    """Any codes under any of the scale bytes, padding zero."""
    m, n = draw(shapes)
    layout = LAYOUTS[draw(layouts)]
    columns = -(-n // 16)
    codes = draw(arrays.arrays(np.uint8, (m, columns * 8)))
    codes[:, (n + 1) // 2 :] = 0
    if n % 2:
        codes[:, n // 2] &= 0xF
    scales = draw(arrays.arrays(np.uint8, (m, columns), elements=scale_bytes))
    scale = draw(st.floats(2.0**-40, 2.0**40, width=32))
    return fp4rt.QuantizedTensor(
        codes, layout.pack(scales), np.array([scale], np.float32), (m, n), layout.name, columns * 16
    )


def poisoned_like(q: fp4rt.QuantizedTensor) -> fp4rt.QuantizedTensor:
    return fp4rt.QuantizedTensor(
        np.full_like(q.data, 0xA5), np.full_like(q.scales, 0xA5), q.global_scale.copy(), q.shape, q.layout, q.padded_n
    )


def largest_code_in_every_block(q: fp4rt.QuantizedTensor) -> None:
    """With a 6 in each block the block's maximum gives back the block's scale."""
    if q.data.size:
        q.data[:, ::8] = q.data[:, ::8] & 0xF0 | 0x07


@settings(max_examples=150, deadline=None)
@given(quantized(st.integers(0x08, 0x7E)))
def test_quantizing_what_was_dequantized_gives_the_same_bytes(q: fp4rt.QuantizedTensor) -> None:
    """For normal scales, with -0 surviving; a power of two as global scale keeps the quotients exact."""
    largest_code_in_every_block(q)
    scale = np.exp2(np.round(np.log2(q.global_scale))).astype(np.float32)
    q = fp4rt.QuantizedTensor(q.data, q.scales, scale, q.shape, q.layout, q.padded_n)
    again = fp4rt.quantize(q.dequantize(), q.global_scale, layout=q.layout, padded_n=q.padded_n)
    assert_same_tensor(again, q, "quantize(dequantize(q))")


@settings(max_examples=150, deadline=None)
@given(quantized(st.integers(0x00, 0xFF)), layouts)
def test_relayout_is_a_bijection(q: fp4rt.QuantizedTensor, target: str) -> None:
    moved = q.relayout(target)
    assert_same_tensor(moved.relayout(q.layout), q, f"to {target} and back")
    m, columns = q.shape[0], q.padded_n // 16
    there = LAYOUTS[target].unpack(moved.scales, m, columns)
    assert_same_bits(there, LAYOUTS[q.layout].unpack(q.scales, m, columns), "scales by row and column")
    values, wanted = moved.dequantize(), q.dequantize()
    assert ((values == wanted) | (np.isnan(values) & np.isnan(wanted))).all()


@settings(max_examples=150, deadline=None)
@given(matrices(), layouts, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_view_equals_its_contiguous_copy(
    base: np.ndarray, layout: str, row_step: int, column_step: int, upward: bool, leftward: bool
) -> None:
    x = base[:: -row_step if upward else row_step, :: -column_step if leftward else column_step]
    padded_n = -(-x.shape[1] // 16) * 16
    got = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
    assert_same_tensor(got, fp4rt.quantize(x.copy(), layout=layout, padded_n=padded_n), "view and copy")


@settings(max_examples=150, deadline=None)
@given(matrices(), layouts, st.integers(0, 3))
def test_padding_is_zero_whatever_out_held(x: np.ndarray, layout: str, more: int) -> None:
    m, n = x.shape
    padded_n = (-(-n // 16) + more) * 16
    plain = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
    out = poisoned_like(plain)
    fp4rt.quantize(x, layout=layout, padded_n=padded_n, out=out)
    assert_same_tensor(out, plain, "poisoned out")
    valid = np.zeros((m, padded_n // 16), np.uint8)
    valid[:, : -(-n // 16)] = 1
    assert not out.scales[LAYOUTS[layout].pack(valid) == 0].any()
    assert not out.data[:, (n + 1) // 2 :].any()


@settings(max_examples=150, deadline=None)
@given(matrices())
def test_the_error_of_a_finite_tensor_is_bounded_by_its_blocks(x: np.ndarray) -> None:
    """Each element is within a quarter of its block's largest, plus the step of the smallest scale.

    Below 2^-100 fp32's range ends: the encode factor may overflow, and the specification then saturates.
    """
    x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), x.dtype)).astype(x.dtype)
    x[np.abs(x.astype(np.float32)) < 2.0**-100] = 0
    m, n = x.shape
    blocks = -(-n // 16)
    q = fp4rt.quantize(x, padded_n=blocks * 16)
    wide = np.zeros((m, blocks * 16))
    wide[:, :n] = np.abs(x.astype(np.float64))
    largest = wide.reshape(m, blocks, 16).max(axis=2, initial=0).repeat(16, axis=1)[:, :n]
    step = 6 * 2.0**-9 / float(q.global_scale[0])
    error = np.abs(q.dequantize().astype(np.float64) - x.astype(np.float64))
    assert (error <= largest / 4 + step).all()
