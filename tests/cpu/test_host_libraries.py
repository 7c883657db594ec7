"""The same bytes from every library's host arrays, and results that come back in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt.errors import DtypeError
from tests.cpu.comparison import DTYPES, assert_same_bits, assert_same_tensor, bits_of


def to_numpy(array: np.ndarray) -> Any:
    return array


def to_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="needs torch")
    return torch.from_numpy(bits_of(array).view(f"i{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))


def to_jax(array: np.ndarray) -> Any:
    jax = pytest.importorskip("jax", reason="needs jax")
    return jax.device_put(array, jax.devices("cpu")[0])


class OnlyDlpack:
    """An array that nothing is known of but that it speaks DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def to_dlpack(array: np.ndarray) -> Any:
    """bfloat16 through torch: NumPy exports its own dtypes only."""
    return OnlyDlpack(to_torch(array) if array.dtype.name == "bfloat16" else array)


LIBRARIES: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": to_numpy,
    "torch": to_torch,
    "jax": to_jax,
    "dlpack": to_dlpack,
}
RESULTS = {"numpy": "numpy", "torch": "torch", "jax": "jaxlib", "dlpack": "numpy"}


def as_numpy(array: Any) -> np.ndarray:
    if type(array).__module__.startswith("torch"):
        import torch

        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(array)


def as_numpy_tensor(q: fp4rt.QuantizedTensor) -> fp4rt.QuantizedTensor:
    arrays = [as_numpy(a) for a in (q.data, q.scales, q.global_scale)]
    return fp4rt.QuantizedTensor(*arrays, q.shape, q.layout, q.padded_n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_bytes_and_gets_its_own_arrays_back(library: str, dtype: str) -> None:
    x = np.random.default_rng(6).standard_normal((21, 80)).astype(DTYPES[dtype])
    wanted = fp4rt.quantize(x)
    q = fp4rt.quantize(LIBRARIES[library](x))
    home = RESULTS[library]
    for part in (q.data, q.scales, q.global_scale):
        assert type(part).__module__.startswith(home)
    assert_same_tensor(as_numpy_tensor(q), wanted, library)
    for target in DTYPES:
        y = q.dequantize(target)
        assert type(y).__module__.startswith(home)
        assert_same_bits(as_numpy(y), wanted.dequantize(target), f"{library}, dequantized to {target}")
    moved = q.relayout("8x4")
    assert moved.data is q.data
    assert type(moved.scales).__module__.startswith(home)
    assert_same_tensor(as_numpy_tensor(moved), wanted.relayout("8x4"), f"{library}, relaid out")
    scale = fp4rt.global_scale(LIBRARIES[library](x))
    assert type(scale).__module__.startswith(home)
    assert_same_bits(as_numpy(scale), wanted.global_scale, f"{library}, global scale")


@pytest.mark.parametrize("library", LIBRARIES)
def test_products_in_every_library(library: str) -> None:
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((5, 64)).astype(np.float16), rng.standard_normal((9, 64)).astype(np.float32)
    weight = fp4rt.quantize(w)
    foreign = fp4rt.quantize(LIBRARIES[library](w))
    bias = rng.standard_normal(9).astype(np.float32)
    wanted = fp4rt.matmul(x, weight, bias=bias)
    for b in (foreign, fp4rt.prepack(foreign)):
        got = fp4rt.matmul(LIBRARIES[library](x), b, bias=LIBRARIES[library](bias))
        assert type(got).__module__.startswith(RESULTS[library])
        assert_same_bits(as_numpy(got), wanted, f"{library}, product")


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "dlpack"])
def test_bfloat16_of_every_library_is_read_as_bfloat16(library: str) -> None:
    x = np.array([[1.5, -1.5] * 8], DTYPES["bfloat16"])
    q = as_numpy_tensor(fp4rt.quantize(LIBRARIES[library](x), 1.0, layout="linear"))
    assert q.scales.tolist() == [[0x28]]
    assert (q.data == 0xF7).all()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_other_dtypes_of_every_library_are_refused(library: str, dtype: str) -> None:
    x = np.ones((2, 32), dtype)
    if library != "numpy":
        module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy"}[library], reason=f"needs {library}")
        x = module.ones((2, 32), dtype=getattr(module, dtype))
    with pytest.raises(DtypeError, match=f"float16, bfloat16, float32, got {dtype}"):
        fp4rt.quantize(x)


def test_torch_views_of_any_strides_and_float8_scales() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    base = torch.randn(40, 96, dtype=torch.bfloat16)
    for x in (base[:, 16:64], base[:, ::2], base.t()[:32, :32], base[5].expand(7, 96)):
        assert_same_tensor(
            as_numpy_tensor(fp4rt.quantize(x)), as_numpy_tensor(fp4rt.quantize(x.contiguous())), "torch view"
        )
    q = fp4rt.quantize(base)
    again = fp4rt.QuantizedTensor(
        q.data, q.scales.view(torch.float8_e4m3fn), q.global_scale, q.shape, q.layout, q.padded_n
    )
    assert again.scales.dtype == torch.uint8
    assert again.scales.data_ptr() == q.scales.data_ptr()
    assert_same_bits(as_numpy(again.dequantize()), as_numpy(q.dequantize()), "float8 scales")


def test_torch_tensors_as_out() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.randn(33, 64)
    q = fp4rt.quantize(x)
    out = fp4rt.QuantizedTensor(
        torch.full_like(q.data, 0x7F), torch.full_like(q.scales, 0x7F), torch.zeros(1), q.shape, q.layout
    )
    assert fp4rt.quantize(x, out=out) is out
    assert_same_tensor(as_numpy_tensor(out), as_numpy_tensor(q), "torch out")
    y = torch.empty(33, 64, dtype=torch.bfloat16)
    assert fp4rt.dequantize(q, torch.bfloat16, out=y) is y
    assert torch.equal(y, q.dequantize(torch.bfloat16))
