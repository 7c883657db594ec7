"""What the door refuses: each mistake gets its own error that says what, wanted, got and what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt.errors import DeviceError, DtypeError, Fp4rtError, LayoutError, ScaleError, ShapeError
from tests.cpu.comparison import DTYPES

X = np.ones((3, 48), np.float16)
Q = fp4rt.quantize(X, 1.0)
W = fp4rt.quantize(np.ones((5, 48), np.float16), 1.0)


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, Fp4rtError)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_n_that_is_no_multiple_of_16_names_n_16_and_the_padding_to_pass() -> None:
    text = message(ShapeError, lambda: fp4rt.quantize(np.ones((3, 50), np.float16)))
    assert text == "quantize needs n divisible by 16, got x.shape = (3, 50); pass padded_n=64"
    assert issubclass(ShapeError, ValueError)


@pytest.mark.parametrize("shape", [(48,), (2, 3, 48), ()])
def test_arrays_that_are_not_matrices(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    for call in (lambda: fp4rt.quantize(x), lambda: fp4rt.global_scale(x), lambda: fp4rt.matmul(x.astype("f2"), W)):
        assert f"got shape {shape}" in message(ShapeError, call)


@pytest.mark.parametrize("shape", [(48,), (2, 3, 48), (3, 0)])
def test_the_columns_of_a_products_left_side_are_called_k(shape: tuple[int, ...]) -> None:
    text = message(ShapeError, lambda: fp4rt.matmul(np.ones(shape, np.float16), W))
    assert ("k >= 1 columns" if 0 in shape else "2 dimensions (m, k)") in text


@pytest.mark.parametrize("m", [0, 3])
def test_no_columns_is_an_error(m: int) -> None:
    x = np.ones((m, 0), np.float16)
    for call in (
        lambda: fp4rt.quantize(x),
        lambda: fp4rt.quantize(x, padded_n=16),
        lambda: fp4rt.global_scale(x),
        lambda: fp4rt.matmul(x, W),
    ):
        assert f"({m}, 0)" in message(ShapeError, call)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused_and_the_accepted_ones_listed(dtype: Any) -> None:
    x = np.ones((3, 48)).astype(dtype)
    text = message(DtypeError, lambda: fp4rt.quantize(x))
    assert all(name in text for name in DTYPES)
    assert np.dtype(dtype).name in text
    assert issubclass(DtypeError, TypeError)


def test_objects_that_are_not_arrays() -> None:
    for value in ([[1.0] * 16], "weights", None, 3.0, object()):
        message(DtypeError, lambda value=value: fp4rt.quantize(value))


@pytest.mark.parametrize(("padded_n", "advice"), [(32, 48), (40, 48), (50, 64), (-16, 48), (0, 48)])
def test_padded_n_that_does_not_fit(padded_n: int, advice: int) -> None:
    text = message(ShapeError, lambda: fp4rt.quantize(X, padded_n=padded_n))
    assert f"padded_n = {padded_n}" in text
    assert f"pass padded_n={advice}" in text


@pytest.mark.parametrize("padded_n", ["64", 64.0])
def test_padded_n_that_is_no_integer(padded_n: Any) -> None:
    assert repr(padded_n) in message(DtypeError, lambda: fp4rt.quantize(X, padded_n=padded_n))


@pytest.mark.parametrize("layout", ["4x128", "", None, 128, ["linear"]])
def test_unknown_layouts(layout: Any) -> None:
    for call in (lambda: fp4rt.quantize(X, layout=layout), lambda: fp4rt.relayout(Q, layout)):
        text = message(LayoutError, call)
        assert repr(layout) in text
        assert "'linear', '128x4', '8x4'" in text


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, -np.inf, np.nan, 1e39, 1e-46])
def test_a_global_scale_must_be_finite_and_positive(scale: float) -> None:
    with np.errstate(over="ignore"):
        array = np.array([scale]).astype(np.float32)
    for value in (scale, np.float64(scale), array):
        assert "global_scale" in message(ScaleError, lambda value=value: fp4rt.quantize(X, value))
    assert "got inf" in message(ScaleError, lambda: fp4rt.quantize(X, 10**400))
    assert issubclass(ScaleError, ValueError)


def test_a_global_scale_of_another_kind() -> None:
    message(DtypeError, lambda: fp4rt.quantize(X, np.ones(1, np.float64)))
    message(DtypeError, lambda: fp4rt.quantize(X, np.ones(1, np.float16)))
    message(DtypeError, lambda: fp4rt.quantize(X, "1.0"))
    message(ShapeError, lambda: fp4rt.quantize(X, np.ones(2, np.float32)))
    message(ShapeError, lambda: fp4rt.quantize(X, np.ones(0, np.float32)))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("a", "str"),
        (1j, "complex"),
        ([1.0], "list"),
        (True, "bool"),
        (np.True_, "bool"),
        (np.ones(1, np.complex64), "complex64"),
    ],
)
def test_what_is_neither_a_number_nor_an_array_is_no_scale(value: Any, got: str) -> None:
    wanted = "as a number or a float32 array, got " + got
    assert f"quantize needs global_scale {wanted}" in message(DtypeError, lambda: fp4rt.quantize(X, value))
    assert f"matmul needs alpha {wanted}" in message(DtypeError, lambda: fp4rt.matmul(X, W, alpha=value))


def test_a_scale_that_cannot_be_read_says_why() -> None:
    masked = np.ma.MaskedArray([1.0])
    assert "masked array" in message(DtypeError, lambda: fp4rt.quantize(X, masked))


@pytest.mark.parametrize("dtype", ["float64", "int8", np.float64, "float8_e4m3fn", "FLOAT16", 3, None])
def test_output_dtypes_that_do_not_exist(dtype: Any) -> None:
    for call in (lambda: fp4rt.dequantize(Q, dtype), lambda: fp4rt.matmul(Q, W, out_dtype=dtype)):
        assert repr(dtype) in message(DtypeError, call)


@pytest.mark.parametrize("spelling", ["float16", np.float16, np.dtype("float16"), "fp16", "half"])
def test_output_dtypes_in_every_spelling(spelling: Any) -> None:
    assert fp4rt.dequantize(Q, spelling).dtype == np.float16


def test_something_else_where_a_quantized_tensor_belongs() -> None:
    for call in (
        lambda: fp4rt.dequantize(X),  # type: ignore[arg-type]
        lambda: fp4rt.relayout(X, "linear"),  # type: ignore[arg-type]
        lambda: fp4rt.prepack(X),  # type: ignore[arg-type]
        lambda: fp4rt.matmul(X, X),
        lambda: fp4rt.quantize(X, out=np.empty((3, 24), np.uint8)),  # type: ignore[arg-type]
        lambda: fp4rt.quantization_error(X, X),  # type: ignore[arg-type]
    ):
        assert "ndarray" in message(DtypeError, call)


def test_a_quantized_tensor_is_no_array_and_says_what_to_call() -> None:
    q = fp4rt.quantize(np.ones((2, 16), np.float32))
    for convert in (np.asarray, np.array, lambda q: np.asarray(q, np.float32)):
        with pytest.raises(DtypeError, match=r"\.dequantize\(\)"):
            convert(q)


def test_a_prepacked_weight_in_the_place_of_the_activations_looks_swapped() -> None:
    q = fp4rt.quantize(np.ones((2, 16), np.float32))
    for function in (fp4rt.matmul, fp4rt.explain):
        with pytest.raises(DtypeError, match="operands look swapped; the weight is b"):
            function(fp4rt.prepack(q), q)


def test_a_prepacked_weight_in_the_place_of_a_quantized_tensor_is_told_to_unpack() -> None:
    weight: Any = fp4rt.prepack(W)
    for call in (
        lambda: fp4rt.dequantize(weight),
        lambda: fp4rt.relayout(weight, "linear"),
        lambda: fp4rt.prepack(weight),
    ):
        assert "got PrepackedWeight; .unpack() gives back" in message(DtypeError, call)
    for write in (
        lambda: fp4rt.quantize(np.ones((2, 16), np.float32), out=weight),
        lambda: fp4rt.relayout(W, "linear", out=weight),
    ):
        assert "out as a QuantizedTensor, got PrepackedWeight; make one with" in message(DtypeError, write)


def test_products_whose_k_differ() -> None:
    text = message(ShapeError, lambda: fp4rt.matmul(np.ones((3, 32), np.float16), W))
    assert "k = 32" in text
    assert "k = 48" in text
    message(ShapeError, lambda: fp4rt.matmul(np.ones((3, 64), np.float16), fp4rt.prepack(W)))


def test_products_of_float32_activations_are_refused() -> None:
    assert "float16, bfloat16" in message(DtypeError, lambda: fp4rt.matmul(np.ones((3, 48), np.float32), W))


def test_biases_and_alphas_that_do_not_fit() -> None:
    message(ShapeError, lambda: fp4rt.matmul(X, W, bias=np.ones(4, np.float32)))
    message(ShapeError, lambda: fp4rt.matmul(X, W, bias=np.ones((1, 5), np.float32)))
    message(DtypeError, lambda: fp4rt.matmul(X, W, bias=np.ones(5, np.float64)))
    message(ShapeError, lambda: fp4rt.matmul(X, W, alpha=np.ones(2, np.float32)))
    message(DtypeError, lambda: fp4rt.matmul(X, W, alpha=np.ones(1, np.float64)))


def test_an_error_measured_against_another_shape() -> None:
    message(ShapeError, lambda: fp4rt.quantization_error(X[:2], Q))


class FakeDeviceArray:
    """A matrix that says it lives on a CUDA device; nothing ever reads it."""

    def __init__(self, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "version": 3,
        }


def test_host_and_device_arrays_do_not_meet() -> None:
    scale = FakeDeviceArray((1,), "<f4")
    text = message(DeviceError, lambda: fp4rt.quantize(X, scale))
    assert "cpu" in text
    assert "cuda:0" in text
    bias = FakeDeviceArray((5,), "<f4")
    assert "cuda:0" in message(DeviceError, lambda: fp4rt.matmul(X, W, bias=bias))
    out = FakeDeviceArray((3, 48), "<f4")
    assert "cuda:0" in message(DeviceError, lambda: fp4rt.dequantize(Q, out=out))


def test_a_stream_means_nothing_for_host_arrays() -> None:
    assert (fp4rt.quantize(X, 1.0, stream=5).data == Q.data).all()


def parts(**changes: Any) -> dict[str, Any]:
    return {
        "data": Q.data,
        "scales": Q.scales,
        "global_scale": Q.global_scale,
        "shape": Q.shape,
        "layout": Q.layout,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": np.zeros((3, 25), np.uint8)}, ShapeError, "(3, 24)"),
        ({"data": np.zeros((3, 48), np.uint8)[:, ::2]}, ShapeError, "C-contiguous"),
        ({"data": np.zeros((3, 24), np.int32)}, DtypeError, "uint8, int8, float4_e2m1fn_x2"),
        ({"scales": np.zeros((3, 3), np.uint8)}, ShapeError, "(128, 4)"),
        ({"scales": np.zeros((128, 4), np.int32)}, DtypeError, "uint8, int8, float8_e4m3fn"),
        ({"scales": np.zeros((128, 4), np.float64)}, DtypeError, "uint8, int8, float8_e4m3fn"),
        ({"global_scale": np.ones(1, np.float64)}, DtypeError, "float32"),
        ({"global_scale": np.ones(2, np.float32)}, ShapeError, "one element"),
        ({"shape": (3, 47)}, ShapeError, "padded_n=48"),
        ({"shape": (3, 0)}, ShapeError, "n >= 1"),
        ({"shape": (3,)}, ShapeError, "2 dimensions"),
        ({"shape": None}, DtypeError, "as (m, n), got None"),
        ({"shape": ("a", 48)}, DtypeError, "with integers (m, n), got shape ('a', 48)"),
        ({"shape": (3.7, 48)}, DtypeError, "with integers (m, n), got shape (3.7, 48)"),
        ({"padded_n": 64}, ShapeError, "(3, 32)"),
        ({"layout": "8x8"}, LayoutError, "'8x8'"),
        ({"layout": "linear"}, ShapeError, "(3, 3)"),
    ],
)
def test_quantized_tensors_whose_parts_disagree(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    assert text in message(error, lambda: fp4rt.QuantizedTensor(**parts(**changes)))


def test_scale_bytes_are_reinterpreted_never_converted() -> None:
    data = np.full((1, 8), 0x77, np.uint8)
    byte = np.array([[0x38]], np.uint8)
    for scales in (byte, byte.view(np.int8), byte.view(ml_dtypes.float8_e4m3fn)):
        for codes in (data, data.view(np.int8)):
            q = fp4rt.QuantizedTensor(codes, scales, np.ones(1, np.float32), (1, 16), "linear")
            assert (q.scales.dtype, q.data.dtype) == (np.uint8, np.uint8)
            assert np.shares_memory(q.scales, byte)
            assert (q.dequantize() == 6.0).all()


def test_a_quantized_tensor_is_frozen() -> None:
    with pytest.raises(AttributeError, match="frozen"):
        Q.layout = "linear"
    with pytest.raises(AttributeError, match="frozen"):
        del Q.data
    assert Q.nbytes == 3 * 24 + 512 + 4


def test_bfloat16_without_ml_dtypes_names_what_to_install() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy, fp4rt
q = fp4rt.quantize(numpy.ones((1, 16), numpy.float16), 1.0)
try:
    q.dequantize("bfloat16")
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ml_dtypes" in result.stdout, result.stderr


def test_an_array_in_the_place_of_a_dtype_is_said_to_be_one() -> None:
    class Tensor:
        name, shape, dtype = None, (2, 16), "float32"

    for thing in (Tensor(), np.zeros((2, 16))):
        with pytest.raises(DtypeError, match=f"got an array of {type(thing).__name__}$"):
            fp4rt.dequantize(Q, thing)


def test_an_out_of_another_dtype_says_how_to_ask_for_it() -> None:
    out = np.empty((Q.shape[0], W.shape[0]), np.float32)
    with pytest.raises(DtypeError, match="got float32; pass out_dtype='float32' for that$"):
        fp4rt.matmul(Q, W, out=out)
    with pytest.raises(DtypeError, match="got float16; pass dtype='float16' for that$"):
        fp4rt.dequantize(Q, out=np.empty(Q.shape, np.float16))
    with pytest.raises(DtypeError, match="got uint8$"):
        fp4rt.dequantize(Q, out=np.empty(Q.shape, np.uint8))
