"""Faults that other software of this kind had at the border between libraries: B22 and B25, on the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4rt

ONE = np.ones(1, np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn], ids=lambda d: np.dtype(d).name)
def test_b22_scale_bytes_are_reinterpreted(dtype: Any) -> None:
    data = np.full((1, 8), 0x77, np.uint8)
    scales = np.array([[0x38]], np.uint8).view(dtype)
    q = fp4rt.QuantizedTensor(data, scales, ONE, (1, 16), "linear")
    assert (q.dequantize() == 6.0).all()  # 56 would be 0x38 converted, and 0x66 on disk
    assert np.asarray(q.scales).tobytes() == b"\x38"


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.float32, np.float16])
def test_b22_wider_scales_are_a_type_error_that_names_what_is_taken(dtype: Any) -> None:
    data = np.full((1, 8), 0x77, np.uint8)
    with pytest.raises(TypeError, match="uint8, int8, float8_e4m3fn"):
        fp4rt.QuantizedTensor(data, np.ones((1, 1), dtype), ONE, (1, 16), "linear")


def bf16(library: str) -> Any:
    values = np.tile(np.array([1.5, -1.5], np.float32), (1, 8))
    if library == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(values).to(torch.bfloat16)
    if library == "jax":
        return pytest.importorskip("jax").numpy.asarray(values, "bfloat16")
    array = values.astype(ml_dtypes.bfloat16)
    if library == "dlpack":
        return pytest.importorskip("fp4rt.interop.export").Export(
            array, array.ctypes.data, fp4rt.interop.CPU, "bfloat16", array.shape
        )
    return array


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "dlpack"])
def test_b25_bf16_is_read_as_bf16_from_every_library(library: str) -> None:
    x = bf16(library)
    q = fp4rt.quantize(x, 1.0, layout="linear")
    wide = fp4rt.quantize(np.tile(np.array([1.5, -1.5], np.float32), (1, 8)), 1.0, layout="linear")
    assert np.asarray(q.scales).tolist() == [[0x28]]
    assert (np.asarray(q.data) == 0xF7).all()
    assert np.asarray(q.data).tobytes() == wide.data.tobytes()
    assert (np.asarray(fp4rt.dequantize(q)) == np.asarray(fp4rt.dequantize(wide))).all()


def test_b25_numpy_refuses_dlpack_for_bf16_so_it_is_taken_by_dtype() -> None:
    array = bf16("numpy")
    with pytest.raises(BufferError):
        array.__dlpack__()
    assert fp4rt.interop.view(array).dtype == "bfloat16"


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["complex64", "int32", "float64", "uint8"])
def test_b25_other_types_are_a_type_error_that_names_the_three(library: str, dtype: str) -> None:
    x: Any = np.ones((1, 16), dtype)
    if library == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    with pytest.raises(TypeError, match="float16, bfloat16, float32"):
        fp4rt.quantize(x)


def test_b25_a_bf16_result_without_ml_dtypes_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from fp4rt.interop import dtypes

    dtypes.numpy_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="ml_dtypes"):
        dtypes.numpy_dtype("bfloat16")
