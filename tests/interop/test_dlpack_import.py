"""Reading DLPack capsules: versions, flags, offsets, strides, types, and who frees the memory when."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.errors import DeviceError, DtypeError, ShapeError

READ_ONLY = 1
SUBBYTE_PADDED = 4
CUDA = (2, 0)


def floats(count: int = 12) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (1, 9)])
def test_legacy_and_every_minor_version_are_read(producer: Any, version: tuple[int, int] | None) -> None:
    source = producer(floats().reshape(3, 4), version=version)
    view = interop.view(source)
    assert (view.library, view.dtype, view.shape, view.strides) == ("dlpack", "float32", (3, 4), (4, 1))
    assert view.pointer == source.array.ctypes.data
    assert np.array_equal(view.bits().view(np.float32), source.array)


def test_the_newest_version_is_asked_for_and_no_stream_on_the_host(producer: Any) -> None:
    source = producer(floats())
    interop.view(source)
    assert source.calls == [{"max_version": (1, 1)}]


def test_a_producer_without_max_version_is_asked_again_without_it(producer: Any) -> None:
    source = producer(floats(), version=None, old_signature=True)
    assert interop.view(source).shape == (12,)
    assert source.calls == [{"max_version": (1, 1)}, {}]


def test_another_major_version_is_refused_and_still_freed(producer: Any) -> None:
    source = producer(floats(), version=(2, 0))
    with pytest.raises(DtypeError, match=r"DLPack 2\.0.*understood is 1\.x"):
        interop.view(source)
    gc.collect()
    assert source.deleted == 1


def test_read_only_flag_is_kept_on_the_view_and_on_its_bits(producer: Any) -> None:
    assert interop.view(producer(floats(), flags=READ_ONLY)).readonly
    bits = interop.view(producer(floats(), flags=READ_ONLY)).bits()
    assert not bits.flags.writeable
    assert interop.view(producer(floats())).bits().flags.writeable


def test_byte_offset_is_added_to_the_pointer(producer: Any) -> None:
    source = producer(floats(), shape=(4,), byte_offset=8)
    assert interop.view(source).bits().view(np.float32).tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("strides", [(1, 3), (-4, 1), (0, 2), (4, 2)])
def test_any_strides_are_kept(producer: Any, strides: tuple[int, int]) -> None:
    base = floats(24)
    offset = 32 if strides[0] < 0 else 0
    source = producer(base, shape=(3, 2), strides=strides, byte_offset=offset)
    expected = np.lib.stride_tricks.as_strided(base[offset // 4 :], (3, 2), tuple(4 * s for s in strides))
    view = interop.view(source)
    assert view.strides == strides
    assert not view.contiguous
    assert np.array_equal(view.bits().view(np.uint32), expected.view(np.uint32))


def test_null_strides_mean_dense_rows(producer: Any) -> None:
    view = interop.view(producer(floats(24).reshape(2, 3, 4)))
    assert view.strides == (12, 4, 1)
    assert view.contiguous


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ((2, 16, 1), "float16"),
        ((4, 16, 1), "bfloat16"),
        ((2, 32, 1), "float32"),
        ((1, 8, 1), "uint8"),
        ((0, 8, 1), "int8"),
        ((10, 8, 1), "float8_e4m3fn"),
        ((14, 8, 1), "float8_e8m0fnu"),
        ((17, 4, 2), "float4_e2m1fn_x2"),
        ((5, 64, 1), "complex64"),
        ((0, 32, 1), "int32"),
    ],
)
def test_type_codes_have_their_names(producer: Any, code: tuple[int, int, int], name: str) -> None:
    memory = np.arange(64, dtype=np.uint8)
    view = interop.view(producer(memory, code, shape=(4,)))
    assert view.dtype == name
    assert view.itemsize == code[1] * code[2] // 8


def test_packed_four_bit_codes_counted_singly_become_bytes(producer: Any) -> None:
    memory = np.arange(16, dtype=np.uint8)
    view = interop.view(producer(memory, (17, 4, 1), shape=(2, 16)))
    assert (view.dtype, view.shape, view.strides) == ("float4_e2m1fn_x2", (2, 8), (8, 1))
    assert np.array_equal(view.bits(), memory.reshape(2, 8))


def test_packed_codes_that_end_in_half_a_byte_are_refused(producer: Any) -> None:
    with pytest.raises(ShapeError, match="rows must fill whole bytes"):
        interop.view(producer(np.arange(16, dtype=np.uint8), (17, 4, 1), shape=(2, 15)))


def test_unpacked_four_bit_codes_are_not_taken_for_packed_ones(producer: Any) -> None:
    view = interop.view(producer(np.arange(16, dtype=np.uint8), (17, 4, 1), shape=(2, 8), flags=SUBBYTE_PADDED))
    assert view.dtype == "dlpack(code=17, bits=4, lanes=1)"


def test_vector_lanes_are_no_known_type(producer: Any) -> None:
    assert interop.view(producer(floats(), (2, 32, 4), shape=(3,))).dtype == "dlpack(code=2, bits=32, lanes=4)"


def test_the_deleter_runs_once_when_the_last_view_dies(producer: Any) -> None:
    source = producer(floats())
    view = interop.view(source)
    bits = view.bits()
    part = bits[3:]
    del view, bits
    gc.collect()
    assert source.deleted == 0
    assert part.view(np.float32)[0] == 3.0
    del part
    gc.collect()
    assert source.deleted == 1


def test_a_null_deleter_is_not_called(producer: Any) -> None:
    source = producer(floats())
    capsule = source.capsule()
    source.alive[-1][0].deleter = type(source.alive[-1][0].deleter)()
    view = interop.view(capsule)
    assert view.shape == (12,)
    del view
    gc.collect()
    assert source.deleted == 0


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_serves_once(producer: Any, versioned: bool) -> None:
    source = producer(floats())
    capsule = source.capsule(versioned)
    view = interop.view(capsule, "x")
    with pytest.raises(DtypeError, match="x is a DLPack capsule that was consumed before"):
        interop.view(capsule, "x")
    assert repr(capsule).startswith('<capsule object "used_dltensor')
    assert view.bits().view(np.float32)[5] == 5.0
    del view
    gc.collect()
    assert source.deleted == 1


def test_a_capsule_that_is_never_read_is_not_freed_by_us(producer: Any) -> None:
    source = producer(floats())
    capsule = source.capsule()
    del capsule
    gc.collect()
    assert source.deleted == 0


def test_a_producer_can_be_read_twice_and_each_export_is_freed(producer: Any) -> None:
    source = producer(floats())
    first, second = interop.view(source), interop.view(source)
    assert first.pointer == second.pointer
    del first, second
    gc.collect()
    assert source.deleted == 2


def test_no_capsule_is_an_error(producer: Any) -> None:
    class Liar:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **wanted: Any) -> Any:
            return 17

    with pytest.raises(DtypeError, match="gave 17, which is no DLPack capsule"):
        interop.view(Liar())


def test_a_foreign_capsule_is_an_error() -> None:
    import datetime

    capsule = datetime.datetime_CAPI  # type: ignore[attr-defined]
    with pytest.raises(DtypeError, match="no DLPack capsule"):
        interop.view(capsule)


def test_null_memory_behind_elements_is_an_error_and_behind_none_is_not(producer: Any) -> None:
    with pytest.raises(ShapeError, match="null pointer"):
        interop.view(producer(floats(), null=True))
    empty = interop.view(producer(floats(), shape=(0, 4), null=True))
    assert empty.bits().shape == (0, 4)


def test_a_refusal_to_export_names_the_array_and_the_reason() -> None:
    class Refuses:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **wanted: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(DtypeError, match="bias cannot be exported through DLPack: not today"):
        interop.view(Refuses(), "bias")


def test_an_unknown_device_is_an_error_before_anything_is_exported(producer: Any) -> None:
    source = producer(floats(), device=(10, 0))
    with pytest.raises(DeviceError, match="DLPack device type 10"):
        interop.view(source)
    assert source.calls == []


def test_pinned_host_memory_is_host_memory(producer: Any) -> None:
    view = interop.view(producer(floats(), device=(3, 0)))
    assert view.device == interop.CPU
    assert view.bits().view(np.float32)[1] == 1.0


# ---- a CUDA producer: what it is told, no device needed


@pytest.mark.parametrize(("asked", "told"), [(77, 77), (0, 1), (1, 1), (2, 2)])
def test_the_producer_is_told_the_consumers_stream(producer: Any, asked: int, told: int) -> None:
    source = producer(floats(), device=CUDA)
    view = interop.view(source, stream=asked)
    assert source.calls == [{"max_version": (1, 1), "stream": told}]
    assert view.device == interop.Device("cuda", 0)
    assert view.foreign


def test_a_stream_object_is_told_by_its_handle(producer: Any) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 4242)

    source = producer(floats(), device=(2, 3))
    assert interop.view(source, stream=Stream()).device.index == 3
    assert source.calls[0]["stream"] == 4242


def test_without_a_stream_the_producer_is_told_the_default_one(producer: Any, monkeypatch: Any) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    source = producer(floats(), device=CUDA)
    interop.view(source)
    assert source.calls[0]["stream"] == 1  # never None, never -1, never the ambiguous 0


def test_without_a_stream_the_producer_is_told_cupys_current_one(producer: Any, monkeypatch: Any) -> None:
    import sys
    import types

    asked: list[int] = []

    def current(device: int) -> Any:
        asked.append(device)
        return types.SimpleNamespace(ptr=555)

    cupy = types.SimpleNamespace(
        ndarray=type("ndarray", (), {}), cuda=types.SimpleNamespace(get_current_stream=current)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    source = producer(floats(), device=(2, 1))
    interop.view(source)
    assert (source.calls[0]["stream"], asked) == (555, [1])


def test_device_memory_is_not_read_on_the_host(producer: Any) -> None:
    view = interop.view(producer(floats(), device=CUDA), "x", stream=1)
    with pytest.raises(DeviceError, match="x is on cuda:0"):
        view.bits()


def test_host_and_device_arrays_together_name_both(producer: Any) -> None:
    host = interop.view(floats(), "a")
    device = interop.view(producer(floats(), device=(2, 1)), "bias", stream=1)
    with pytest.raises(DeviceError, match="a is on cpu but bias is on cuda:1"):
        interop.same_device(host, device)
    assert interop.same_device(host, host) == interop.CPU


def test_a_global_scale_known_by_dlpack_alone_has_one_element_of_one_dimension(producer):
    q = fp4rt.quantize(np.full((1, 16), 3, np.float32), 1.0)
    parts = q.data, q.scales
    for shape in ((), (1, 1)):
        with pytest.raises(ShapeError, match=r"known only by DLPack with shape \(1,\)"):
            fp4rt.QuantizedTensor(*parts, producer(np.ones(shape, np.float32)), q.shape, q.layout)
    assert fp4rt.QuantizedTensor(*parts, producer(np.ones(1, np.float32)), q.shape, q.layout).shape == (1, 16)
