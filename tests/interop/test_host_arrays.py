"""NumPy, PyTorch and JAX arrays on the host: seen as they lie, and handed back on the same memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.errors import DeviceError, DtypeError, ShapeError

DTYPES = ["float16", "bfloat16", "float32", "uint8", "int8", "float8_e4m3fn"]


def numpy_array(dtype: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.arange(np.prod(shape)).reshape(shape).astype(kind)


def as_library(array: np.ndarray, library: str) -> Any:
    if library == "torch":
        torch = pytest.importorskip("torch")
        bits = array.view(f"i{array.itemsize}")
        return torch.from_numpy(bits.copy()).view(getattr(torch, array.dtype.name))
    if library == "jax":
        return pytest.importorskip("jax").numpy.asarray(array)
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_bits_are_the_elements_of_every_library(library: str, dtype: str) -> None:
    array = numpy_array(dtype)
    view = interop.view(as_library(array, library))
    assert (view.library, view.dtype, view.shape, view.strides) == (library, dtype, (4, 6), (6, 1))
    assert view.device == interop.CPU
    assert view.nbytes == array.nbytes
    bits = view.bits()
    assert np.array_equal(bits, array.view(f"u{array.itemsize}"))
    assert bits.ctypes.data == view.pointer
    assert view.readonly == (library == "jax")
    assert bits.flags.writeable == (library != "jax")


@pytest.mark.parametrize(
    "index",
    [np.s_[::-1], np.s_[:, ::2], np.s_[1:, 1:], np.s_[::2, ::-1], np.s_[0:0]],
    ids=["rows reversed", "every other column", "offset", "both", "no rows"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numpy_strides_of_any_sign_are_kept(dtype: str, index: Any) -> None:
    array = numpy_array(dtype)[index]
    view = interop.view(array)
    bits = view.bits()
    assert view.strides == tuple(stride // array.itemsize for stride in array.strides)
    assert bits.strides == array.strides
    assert np.array_equal(bits, np.ascontiguousarray(array).view(f"u{array.itemsize}"))


def test_torch_strides_and_offsets_are_kept() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16)
    for part in (base.t(), base[1:, 1:], base[:, ::2], base[0].expand(5, 6)):
        view = interop.view(part)
        assert view.pointer == part.data_ptr()
        assert np.array_equal(view.bits(), part.contiguous().view(torch.int16).numpy().view(np.uint16))


def test_a_broadcast_row_and_a_read_only_array_stay_read_only() -> None:
    row = np.broadcast_to(np.ones(6, np.float16), (4, 6))
    view = interop.view(row)
    assert view.strides == (0, 1)
    assert view.readonly
    assert not view.bits().flags.writeable


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((4, 6), (6, 1), True),
        ((4, 6), (7, 1), False),
        ((1, 6), (99, 1), True),
        ((4, 1), (1, 77), True),
        ((0, 6), (3, 3), True),
        ((6, 4), (1, 6), False),
        ((), (), True),
    ],
)
def test_contiguous_ignores_strides_that_are_never_taken(
    shape: tuple[int, ...], strides: tuple[int, ...], dense: bool
) -> None:
    assert interop.ArrayView(None, "numpy", interop.CPU, "uint8", shape, strides, 0).contiguous is dense


def test_a_torch_parameter_that_requires_grad_is_only_read() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2, 16))
    assert interop.view(weight).pointer == weight.data_ptr()


def test_writes_are_counted_in_tensors_and_not_in_memory_that_is_no_tensor_yet() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 16)
    before = tensor._version
    buffer = interop.ArrayView(object(), "torch", interop.CPU, "uint8", (2, 16), (16, 1), 0)
    interop.note_written((buffer, interop.view(np.zeros(3)), interop.view(tensor)))
    assert tensor._version > before


def test_arrays_without_memory_of_their_own_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(DeviceError, match="x is on meta"):
        interop.view(torch.empty(2, 16, device="meta"))
    with pytest.raises(DtypeError, match="without memory of its own"):
        interop.view(torch.eye(4).to_sparse())
    with FakeTensorMode():
        fake = torch.empty(2, 16)
    with pytest.raises(DtypeError, match="without memory of its own"):
        interop.view(fake)
    negative = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    with pytest.raises(DtypeError, match="resolve_neg"):
        interop.view(negative)


def test_a_jax_tracer_points_to_the_functions_for_jit() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(DtypeError, match=r"x is being traced by JAX.*fp4rt\.jax"):
        jax.jit(lambda x: interop.view(x).shape[0])(jax.numpy.ones(4))


@pytest.mark.parametrize("thing", [[1.0, 2.0], 3.0, "text", None, b"bytes", {}])
def test_what_is_no_array_is_named_by_its_type(thing: Any) -> None:
    with pytest.raises(DtypeError, match=f"bias is a builtins.{type(thing).__name__}, not an array"):
        interop.view(thing, "bias")


def test_numpy_arrays_that_cannot_be_read_as_they_are() -> None:
    with pytest.raises(DtypeError, match="masked"):
        interop.view(np.ma.masked_array(np.ones(3)))
    with pytest.raises(DtypeError, match=r"native byte order; pass x\.astype\(x\.dtype\.newbyteorder"):
        interop.view(np.ones(3, ">f4" if sys.byteorder == "little" else "<f4"))
    with pytest.raises(DtypeError, match="plain dtype"):
        interop.view(np.zeros(3, [("a", "f4")]))
    uneven = np.zeros(4, [("a", "f4"), ("b", "u1")])["a"]
    with pytest.raises(ShapeError, match="not whole elements"):
        interop.view(uneven)


def test_a_stride_that_leads_nowhere_may_be_anything() -> None:
    memory = np.zeros(4 * 258, np.uint8)
    rows = np.ndarray((4, 64), np.float32, memory.data, strides=(258, 4))
    with pytest.raises(ShapeError, match="not whole elements"):
        interop.view(rows)
    assert interop.view(rows[:1]).contiguous
    assert interop.view(rows[:0]).size == 0
    assert fp4rt.quantize(rows[:1]).shape == (1, 64)


def test_numpy_scalars_are_arrays_of_no_dimensions() -> None:
    view = interop.view(np.float32(2.5))
    assert (view.shape, view.dtype) == ((), "float32")
    assert view.bits().view(np.float32) == 2.5


# ---- results


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "dlpack"])
def test_results_stand_on_the_memory_they_were_made_in(library: str, dtype: str | None) -> None:
    if library in ("torch", "jax"):
        pytest.importorskip(library)
    memory = np.zeros(4096, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 2048].view(np.uint16).reshape(32, 32)
    array[:] = np.arange(1024, dtype=np.uint16).reshape(32, 32)
    result = interop.from_host(array, library, dtype)
    view = interop.view(result)
    assert view.library == ("numpy" if library == "dlpack" else library)
    assert (view.dtype, view.shape) == (dtype or "uint16", (32, 32))
    assert view.pointer == array.ctypes.data
    assert np.array_equal(view.bits(), array)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("shape", [(0, 32), (), (1,), (3, 1)])
def test_results_of_any_rank_and_of_no_elements(library: str, shape: tuple[int, ...]) -> None:
    if library != "numpy":
        pytest.importorskip(library)
    result = interop.from_host(np.ones(shape, np.float32), library)
    assert tuple(result.shape) == shape
    assert interop.view(result).dtype == "float32"


def test_torch_gets_a_copy_of_what_may_not_be_written() -> None:
    pytest.importorskip("torch")
    array = np.ones(4, np.float32)
    array.setflags(write=False)
    result = interop.from_host(array, "torch")
    result[0] = 5
    assert array[0] == 1


@pytest.mark.parametrize(
    ("library", "dtype"),
    [
        ("numpy", "float8_e4m3fn"),
        ("numpy", "int8"),
        ("numpy", "uint8"),
        ("torch", "float8_e4m3fn"),
        ("torch", "float4_e2m1fn_x2"),
        ("torch", "uint8"),
        ("jax", "float8_e4m3fn"),
        ("jax", "uint8"),
    ],
)
def test_bytes_are_reinterpreted_never_converted(library: str, dtype: str) -> None:
    raw = np.full((4, 16), 0x38, np.uint8)  # 1.0 as e4m3, 56 as an integer
    if library == "torch":
        torch = pytest.importorskip("torch")
        if not hasattr(torch, dtype):
            pytest.skip(f"needs a torch with {dtype}")
        array: Any = torch.from_numpy(raw).view(getattr(torch, dtype))
    elif library == "jax":
        array = pytest.importorskip("jax").numpy.asarray(raw.view(interop.dtypes.numpy_dtype(dtype)))
    else:
        array = raw.view(interop.dtypes.numpy_dtype(dtype))
    before = interop.view(array)
    result = interop.as_uint8(array)
    after = interop.view(result)
    assert (after.library, after.dtype, after.shape) == (library, "uint8", (4, 16))
    assert after.pointer == before.pointer
    assert np.array_equal(after.bits(), raw)


def test_wider_elements_are_not_bytes() -> None:
    with pytest.raises(DtypeError, match="array of int32 cannot be reinterpreted as bytes"):
        interop.as_uint8(np.zeros(4, np.int32))


def test_no_library_is_imported_for_another_ones_array() -> None:
    code = (
        "import sys, numpy as np; from fp4rt import interop; interop.view(np.ones(3, np.float32)).bits(); "
        "print([name for name in ('torch', 'jax', 'cupy', 'ml_dtypes', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
