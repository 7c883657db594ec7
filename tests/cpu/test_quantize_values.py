"""What quantizing and dequantizing give for inputs that other software of this kind got wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt.format import E2M1, E4M3
from fp4rt.layout import LAYOUTS
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor, bits_of

ALL_LAYOUTS = list(LAYOUTS)
ALL_DTYPES = list(DTYPES)


def hexadecimal(data: np.ndarray) -> str:
    return data.tobytes().hex(" ").upper()


def test_even_column_is_in_the_low_nibble() -> None:
    x = np.array([[0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0]], np.float32)
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert q.scales.tolist() == [[0x38]]
    assert hexadecimal(q.data) == "21 43 65 07 A9 CB ED 8F"
    assert_same_bits(q.dequantize(), x, "round trip, the sign of zero included")


def test_tie_rounds_to_the_even_code() -> None:
    x = np.array([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]], np.float32)
    q = fp4rt.quantize(np.concatenate([x, -x], axis=1), 1.0, layout="linear")
    assert q.scales.tolist() == [[0x38]]
    assert hexadecimal(q.data) == "07 22 44 66 8F AA CC EE"
    wanted = [6, 0, 1, 1, 2, 2, 4, 4]
    assert q.dequantize().tolist() == [wanted + [-v for v in wanted]]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("tie", "below", "above"),
    [(0.25, 0, 0.5), (0.75, 0.5, 1), (1.25, 1, 1.5), (1.75, 1.5, 2), (2.5, 2, 3), (3.5, 3, 4), (5, 4, 6)],
)
def test_one_ulp_beside_a_tie_goes_to_the_nearer_side(tie: float, below: float, above: float, sign: int) -> None:
    x = np.full((1, 16), 6, np.float32)
    x[0, 4] = sign * np.nextafter(np.float32(tie), np.float32(0))
    x[0, 5] = sign * np.nextafter(np.float32(tie), np.float32(9))
    assert fp4rt.quantize(x, 1.0).dequantize()[0, 4:6].tolist() == [sign * below, sign * above]


def test_block_above_the_range_saturates_instead_of_becoming_nan_and_is_counted() -> None:
    x = np.zeros((1, 16), np.float32)
    x[0, :4] = 5376, 2688, 1344, -448
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert q.scales.tolist() == [[0x7E]]
    assert hexadecimal(q.data[:, :2]) == "77 A5"
    assert q.dequantize()[0, :4].tolist() == [2688, 2688, 1344, -448]
    assert fp4rt.quantization_error(x, q).clipped_blocks == 1


@pytest.mark.parametrize(("largest", "clipped"), [(2687.0, 0), (2688.0, 0), (2689.0, 1), (5376.0, 1), (np.inf, 1)])
def test_clipping_is_learnt_exactly_where_it_begins(largest: float, clipped: int) -> None:
    x = np.zeros((2, 32), np.float32)
    x[1, 20] = -largest
    assert fp4rt.quantization_error(x, fp4rt.quantize(x, 1.0)).clipped_blocks == clipped


def test_automatic_global_scale_looks_at_magnitudes_not_at_the_signed_maximum() -> None:
    x = np.full((1, 32), 6, np.float32)
    x[0, 0] = -2688
    q = fp4rt.quantize(x, layout="linear")
    assert q.global_scale.tolist() == [1.0]
    assert q.scales.tolist() == [[0x7E, 0x38]]
    assert q.dequantize()[0, [0, 16]].tolist() == [-2688, 6]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_automatic_global_scale_never_clips_a_finite_value(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for exponent in (-6, 0, 3):
        x = (rng.standard_normal((40, 64)) * 10.0**exponent).astype(DTYPES[dtype])
        assert fp4rt.quantization_error(x, fp4rt.quantize(x)).clipped_blocks == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_all_zero_tensor_has_a_finite_scale_and_stays_zero(dtype: str, layout: str) -> None:
    q = fp4rt.quantize(np.zeros((2, 32), DTYPES[dtype]), layout=layout)
    assert q.global_scale.tolist() == [1.0]
    assert not q.data.any()
    assert not q.scales.any()
    assert_same_bits(q.dequantize(), np.zeros((2, 32), np.float32), "dequantized zeros")
    finite = fp4rt.quantize(np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32))
    assert not fp4rt.matmul(finite, q, out_dtype="float32").any()
    assert not fp4rt.matmul(q, finite, out_dtype="float32").any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_global_scale_ignores_what_is_not_finite(dtype: str) -> None:
    x = np.zeros((2, 32), DTYPES[dtype])
    x[0, 0], x[0, 1], x[1, 5] = np.inf, np.nan, -1.5
    assert fp4rt.global_scale(x).tolist() == [2688 / 1.5]
    x[1, 5] = np.nan
    assert fp4rt.global_scale(x).tolist() == [1.0]


def test_global_scale_of_a_tiny_tensor_is_the_largest_finite_number() -> None:
    x = np.full((1, 16), 1e-45, np.float32)
    assert fp4rt.global_scale(x).tolist() == [np.finfo(np.float32).max]
    assert np.isfinite(fp4rt.quantize(x).dequantize()).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_nan_spoils_its_own_block_only(dtype: str) -> None:
    x = np.full((3, 48), 6, DTYPES[dtype])
    x[1, 20] = np.nan
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert q.scales.tolist() == [[0x38] * 3, [0x38, 0x7F, 0x38], [0x38] * 3]
    assert not q.data[1, 8:16].any()
    y = q.dequantize()
    assert np.isnan(y[1, 16:32]).all()
    assert np.isnan(y).sum() == 16


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3e-39, 1e30])
def test_infinity_saturates_to_six(dtype: str, scale: float) -> None:
    x = np.ones((1, 16), DTYPES[dtype])
    x[0, 2], x[0, 3] = np.inf, -np.inf
    q = fp4rt.quantize(x, scale, layout="linear")
    assert q.scales.tolist() == [[0x7E]]
    assert q.data[0, 1] == 0xF7


def test_zero_stays_zero_where_the_encode_factor_overflows() -> None:
    x = np.zeros((1, 16), np.float32)
    x[0, 3], x[0, 4] = 3.4e-41, -0.0
    q = fp4rt.quantize(x, np.finfo(np.float32).max, layout="linear")
    assert q.scales.tolist() == [[0x01]]
    assert hexadecimal(q.data) == "00 70 08 00 00 00 00 00"


def test_sign_of_negative_zero_survives_beside_a_value_and_not_in_a_zero_block() -> None:
    x = np.full((1, 32), -0.0, np.float32)
    x[0, 16] = 6
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert not q.data[0, :8].any()
    assert q.data[0, 8:].tolist() == [0x87] + [0x88] * 7


def test_subnormal_block_scales_decode_as_subnormals() -> None:
    x = np.array([0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875, 0.015625])
    data = np.full((8, 8), 0x22, np.uint8)
    scales = np.arange(1, 9, dtype=np.uint8)[:, None]
    q = fp4rt.QuantizedTensor(data, scales, np.ones(1, np.float32), (8, 16), "linear")
    assert q.dequantize()[:, 0].tolist() == x.tolist()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_scale_byte_times_every_code_is_the_tables_product(dtype: str) -> None:
    codes = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    for scale in (np.float32(1), np.float32(0.37), np.float32(1e30), np.float32(1e-30)):
        q = fp4rt.QuantizedTensor(codes, scales, np.array([scale]), (256, 16), "linear")
        with np.errstate(all="ignore"):
            wanted = (E2M1.values[None, :] * (E4M3.values[:, None] / scale)).astype(DTYPES[dtype])
        got = q.dequantize(dtype)
        finite = ~np.isnan(wanted)
        assert_same_bits(got[finite], wanted[finite], f"products in {dtype} at global scale {scale}")
        assert np.isnan(got[~finite]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dequantize_rounds_once_to_nearest_even(dtype: str) -> None:
    """The products over many global scales reach every kind of rounding: ties, subnormals, overflow."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (256, 8), dtype=np.uint8)
    scales = np.arange(256, dtype=np.uint8)[:, None]
    for scale in np.exp(rng.uniform(-60, 60, 60)).astype(np.float32):
        q = fp4rt.QuantizedTensor(codes, scales, np.array([scale]), (256, 16), "linear")
        with np.errstate(all="ignore"):
            wanted = q.dequantize("float32").astype(DTYPES[dtype])
        got = q.dequantize(dtype)
        finite = ~np.isnan(wanted)
        assert_same_bits(got[finite], wanted[finite], f"{dtype} at global scale {scale}")


def test_bfloat16_bits_are_not_taken_for_float16() -> None:
    x = np.array([[1.5, -1.5] * 8], ml_dtypes.bfloat16)
    assert bits_of(x)[0, :2].tolist() == [0x3FC0, 0xBFC0]
    q = fp4rt.quantize(x, 1.0, layout="linear")
    assert q.scales.tolist() == [[0x28]]
    assert (q.data == 0xF7).all()
    assert_same_tensor(q, fp4rt.quantize(x.astype(np.float32), 1.0, layout="linear"), "bfloat16 and float32")


def test_a_fixed_global_scale_may_be_a_number_or_an_array() -> None:
    x = np.random.default_rng(2).standard_normal((4, 32)).astype(np.float16)
    wanted = fp4rt.quantize(x, 3.5)
    array = np.array([3.5], np.float32)
    for scale in (np.float32(3.5), np.float64(3.5), array, np.float32([[3.5]]), np.array(3.5, np.float32)):
        assert_same_tensor(fp4rt.quantize(x, scale), wanted, repr(scale))
    assert not np.shares_memory(fp4rt.quantize(x, array).global_scale, array)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_two_experts_keep_their_own_padded_scales(layout: str) -> None:
    """Scales of each expert are padded by themselves, and one expert's NaN does not reach the other."""
    weights = [np.full((130, 64), value, np.float32) for value in (6, 3)]
    q = [fp4rt.quantize(w, 1.0, layout=layout) for w in weights]
    if layout == "128x4":
        joined = np.concatenate([expert.scales.reshape(-1) for expert in q])
        assert [expert.scales.nbytes for expert in q] == [1024, 1024]
        assert joined[1024] == 0x30
        assert joined[520] == 0x00  # expert 0's padding row 192, where an unpadded step would land
    token = np.full((1, 64), 6, np.float16)
    for expert, wanted in zip(q, (2304, 1152), strict=True):
        assert (fp4rt.matmul(token, expert, out_dtype="float32") == wanted).all()
    q[0].scales.reshape(-1)[0] = 0x7F
    assert np.isnan(fp4rt.matmul(token, q[0], out_dtype="float32")[0, 0])
    assert (fp4rt.matmul(token, q[1], out_dtype="float32") == 1152).all()


@pytest.mark.parametrize(
    ("m", "layout", "place", "size"),
    [
        (65537, "linear", 65536, 65537),
        (65537, "128x4", 262144, 262656),
        (65537, "8x4", 262144, 262176),
        (262145, "linear", 262144, 262145),
        (262145, "128x4", 1048576, 1049088),
        (262145, "8x4", 1048576, 1048608),
    ],
)
def test_more_rows_than_a_grid_has_are_all_written(m: int, layout: str, place: int, size: int) -> None:
    x = np.zeros((m, 16), np.float16)
    x[-1] = 6
    q = fp4rt.quantize(x, 1.0, layout=layout)
    flat = q.scales.reshape(-1)
    assert flat.size == size
    assert flat[place] == 0x38
    assert int(flat.astype(np.int64).sum()) == 0x38
    assert (q.data.reshape(-1)[-8:] == 0x77).all()
    y = q.dequantize("float16")
    assert y.shape == (m, 16)
    assert (y[-1] == 6).all()
    assert not y[:-1].any()
    product = fp4rt.matmul(q, fp4rt.quantize(np.full((1, 16), 6, np.float16), 1.0), out_dtype="float32")
    assert product[-1, 0] == 16 * 36
    assert not product[:-1].any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("scale", [None, 2.5])
def test_no_rows_give_empty_results_of_the_right_shapes(layout: str, scale: float | None) -> None:
    q = fp4rt.quantize(np.empty((0, 64), np.float16), scale, layout=layout)
    assert q.data.shape == (0, 32)
    assert q.scales.shape == (0, 4)
    assert q.global_scale.tolist() == [scale or 1.0]
    for dtype in ALL_DTYPES:
        y = q.dequantize(dtype)
        assert (y.shape, y.dtype) == ((0, 64), DTYPES[dtype])
    weight = fp4rt.quantize(np.ones((8, 64), np.float16))
    for a in (q, np.empty((0, 64), np.float16)):
        for b in (weight, fp4rt.prepack(weight)):
            product = fp4rt.matmul(a, b)
            assert (product.shape, product.dtype) == ((0, 8), DTYPES["bfloat16"])
    assert fp4rt.matmul(weight, q).shape == (8, 0)
    for target in ALL_LAYOUTS:
        assert q.relayout(target).scales.shape == (0, 4)
    assert fp4rt.quantization_error(np.empty((0, 64), np.float16), q).blocks == 0
