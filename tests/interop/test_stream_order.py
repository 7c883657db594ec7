"""Which stream is used, which waits for which, and how long memory is held; the driver is a recording."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest

from fp4rt import interop
from fp4rt.errors import BackendUnavailable, DtypeError, ShapeError
from fp4rt.interop import ArrayView, Device, cuda_driver, hold, order, stream_handle, streams

CUDA0 = Device("cuda", 0)


def device_view(library: str = "dlpack") -> ArrayView:
    return ArrayView(None, library, CUDA0, "uint8", (4,), (1,), 0x1000)


class Owner:
    pass


def held_owners() -> list[Any]:
    return [entry.owner for held in streams._held.values() for entry in held]


class WithProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 11)


class WithProtocolAttribute:
    __cuda_stream__ = (0, 12)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (17, 17),
        (WithProtocol(), 11),
        (WithProtocolAttribute(), 12),
        (types.SimpleNamespace(cuda_stream=13), 13),
        (types.SimpleNamespace(ptr=14), 14),
        (types.SimpleNamespace(handle=types.SimpleNamespace(value=15)), 15),
        (types.SimpleNamespace(handle=types.SimpleNamespace(value=None)), 0),
    ],
)
def test_every_spelling_of_a_stream_has_its_handle(stream: Any, handle: int) -> None:
    assert stream_handle(stream, device_view()) == handle


@pytest.mark.parametrize("stream", ["0", 1.0, True, object()])
def test_what_is_no_stream_is_an_error(stream: Any) -> None:
    with pytest.raises(DtypeError, match="wanted an integer handle or an object with __cuda_stream__"):
        stream_handle(stream, device_view())


def test_torchs_current_stream_is_the_default_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = types.SimpleNamespace(_C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 100 + index))
    monkeypatch.setitem(sys.modules, "torch", raw)
    assert stream_handle(None, device_view("torch")) == 100
    current = types.SimpleNamespace(current_stream=lambda index: types.SimpleNamespace(cuda_stream=200 + index))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(_C=object(), cuda=current))
    assert stream_handle(None, device_view("torch")) == 200


def test_the_host_has_no_stream() -> None:
    assert stream_handle(17, interop.view(np.zeros(3, np.float32))) == 0


def test_two_streams_are_ordered_by_an_event_in_the_devices_context(driver: Any) -> None:
    assert order(5, 6, Device("cuda", 2))
    assert driver.named("cuDeviceGet")[0][2] == 2
    relevant = [
        call[0] for call in driver.calls if call[0] not in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    ]
    assert relevant == [
        "cuCtxPushCurrent_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventDestroy_v2",
        "cuCtxPopCurrent_v2",
    ]
    assert driver.named("cuEventRecord", "cuStreamWaitEvent") == [
        ("cuEventRecord", 1, 5),
        ("cuStreamWaitEvent", 6, 1, 0),
    ]


@pytest.mark.parametrize(("before", "after"), [(7, 7), (0, 0), (0, 1), (1, 0)])
def test_one_stream_needs_no_event(driver: Any, before: int, after: int) -> None:
    assert not order(before, after, CUDA0)
    assert driver.calls == []


def test_a_stream_with_a_destroyed_ones_handle_waits_once_for_all_that_the_device_holds(driver: Any) -> None:
    driver.stream_numbers = {16: 1, 32: 2}
    for stream in (16, 32, 16):
        assert interop.enter_stream(stream, device_view()) == stream
    assert driver.named("cuCtxRecordEvent", "cuStreamWaitEvent") == []
    driver.stream_numbers[16] = 3
    for _ in range(2):
        assert interop.enter_stream(16, device_view()) == 16
    relevant = driver.named("cuCtxPushCurrent_v2", "cuCtxRecordEvent", "cuStreamWaitEvent", "cuEventDestroy_v2")
    assert [call[0] for call in relevant] == [
        "cuCtxPushCurrent_v2",
        "cuCtxRecordEvent",
        "cuStreamWaitEvent",
        "cuEventDestroy_v2",
    ]
    assert relevant[2] == ("cuStreamWaitEvent", 16, 1, 0)


def test_the_object_that_has_a_stream_is_asked_about_once_and_one_that_borrows_it_each_time(driver: Any) -> None:
    kinds = {
        name: type(name, (types.SimpleNamespace,), {"__module__": "cupy.cuda.stream"})
        for name in ("Stream", "ExternalStream")
    }
    driver.stream_numbers = {16: 1, 32: 2}
    stream, borrowed = kinds["Stream"](ptr=16), kinds["ExternalStream"](ptr=32)
    for _ in range(3):
        assert [interop.enter_stream(s, device_view()) for s in (stream, borrowed)] == [16, 32]
    assert [call[1] for call in driver.named("cuStreamGetId")] == [16, 32, 32, 32]
    assert driver.named("cuStreamWaitEvent") == []
    driver.stream_numbers[16] = 3
    del stream
    interop.enter_stream(kinds["Stream"](ptr=16), device_view())
    assert driver.named("cuStreamWaitEvent") == [("cuStreamWaitEvent", 16, 1, 0)]


def test_pytorchs_streams_are_asked_about_once_though_each_look_makes_a_new_object(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them can have the handle of a destroyed stream of CuPy's: PyTorch makes them late, all together."""
    cupy_stream = type("Stream", (types.SimpleNamespace,), {"__module__": "cupy.cuda.stream"})
    torch_stream = type("Stream", (types.SimpleNamespace,), {"__module__": "torch.cuda.streams"})
    raw = types.SimpleNamespace(_C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 16))
    monkeypatch.setitem(sys.modules, "torch", raw)
    driver.stream_numbers = {16: 1}
    interop.enter_stream(cupy_stream(ptr=16), device_view())
    driver.stream_numbers[16] = 2
    for _ in range(3):
        assert interop.enter_stream(None, device_view("torch")) == 16
        assert interop.enter_stream(torch_stream(cuda_stream=16), device_view("torch")) == 16
    assert len(driver.named("cuStreamGetId")) == 2
    assert driver.named("cuStreamWaitEvent") == [("cuStreamWaitEvent", 16, 1, 0)]


def test_a_cupy_stream_that_only_borrows_is_asked_about_each_time(driver: Any) -> None:
    cupy = pytest.importorskip("cupy")
    borrowed = cupy.cuda.Stream.from_external(WithProtocol())
    driver.stream_numbers = {11: 1}
    interop.enter_stream(borrowed, device_view("cupy"))
    driver.stream_numbers[11] = 2
    interop.enter_stream(borrowed, device_view("cupy"))
    assert len(driver.named("cuStreamWaitEvent")) == 1


def test_where_a_destroyed_stream_cannot_be_waited_for_the_call_says_why_and_the_next_one_tries_again(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.stream_numbers = {16: 1}
    interop.enter_stream(16, device_view())
    driver.stream_numbers[16] = 2
    with monkeypatch.context() as context:
        context.setattr(driver, "cuCtxRecordEvent", lambda *args: 900, raising=False)
        with pytest.raises(BackendUnavailable, match="handle of a destroyed one.*error 900.*make no new ones"):
            interop.enter_stream(16, device_view())
    assert driver.named("cuEventDestroy_v2") == [("cuEventDestroy_v2", 1)]
    interop.enter_stream(16, device_view())
    assert driver.named("cuStreamWaitEvent") == [("cuStreamWaitEvent", 16, 2, 0)]


def test_cupys_current_stream_is_asked_about_like_one_that_is_given(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = types.SimpleNamespace(ptr=16)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=lambda index: current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for number, waits in ((1, 0), (1, 0), (2, 1)):
        driver.stream_numbers[16] = number
        assert interop.enter_stream(None, device_view("cupy")) == 16
        assert len(driver.named("cuStreamWaitEvent")) == waits
    current.ptr = 0
    assert interop.enter_stream(None, device_view("cupy")) == 0
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert interop.enter_stream(None, device_view("dlpack")) == 0


def test_no_stream_is_asked_for_its_number_while_it_is_captured(driver: Any) -> None:
    driver.stream_numbers, driver.capturing = {16: 1}, True
    assert interop.enter_stream(16, device_view()) == 16
    assert driver.named("cuStreamGetId") == []
    driver.capturing = False
    interop.enter_stream(16, device_view())
    assert len(driver.named("cuStreamGetId")) == 1
    assert driver.named("cuStreamWaitEvent") == []


def test_nothing_is_asked_about_default_streams_and_the_host(driver: Any) -> None:
    assert [interop.enter_stream(stream, device_view()) for stream in (0, 1, 2)] == [0, 1, 2]
    assert interop.enter_stream(17, interop.view(np.zeros(3, np.float32))) == 0
    assert driver.calls == []


def test_drivers_before_12_have_no_numbers_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", cuda_driver.Driver(types.SimpleNamespace()))
    assert interop.enter_stream(16, device_view()) == 16


def test_a_driver_error_says_function_number_and_reason(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuStreamWaitEvent", lambda *args: 400, raising=False)
    with pytest.raises(BackendUnavailable, match="cuStreamWaitEvent failed with error 400"):
        order(5, 6, CUDA0)
    assert driver.calls[-1][0] == "cuCtxPopCurrent_v2"


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "_driver", None)
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", no_library)
    with pytest.raises(BackendUnavailable, match=r"libcuda\.so\.1.*install the NVIDIA driver"):
        order(5, 6, CUDA0)


def test_held_memory_lives_until_its_stream_is_done(driver: Any) -> None:
    first, second = Owner(), Owner()
    alive = weakref.ref(first)
    hold(first, 5, CUDA0)
    del first
    gc.collect()
    assert alive() is not None
    driver.finished.add(1)
    hold(second, 5, CUDA0)
    gc.collect()
    assert alive() is None
    assert held_owners() == [second]


@pytest.mark.parametrize("idle", [False, True])
def test_what_cannot_be_asked_about_stays_held(driver: Any, monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    """The driver refuses while a graph is captured elsewhere; it is asked as far as that is allowed."""
    owner = Owner()
    if idle:
        streams.hold_until_idle(owner, CUDA0)
    else:
        hold(owner, 5, CUDA0)
    with monkeypatch.context() as context:
        context.setattr(driver, "cuCtxRecordEvent" if idle else "cuEventQuery", lambda *args: 900, raising=False)
        for _ in range(2):
            streams.let_go()
            assert held_owners() == [owner]
    driver.calls.clear()
    streams.let_go()
    assert [call[0] for call in driver.calls] == [
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPushCurrent_v2",
        *(["cuEventCreate", "cuCtxRecordEvent"] if idle else []),
        "cuEventQuery",
        "cuCtxPopCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
    ]


def test_an_interrupt_while_held_memory_is_looked_through_loses_none(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    owner = Owner()
    hold(owner, 5, CUDA0)
    monkeypatch.setattr(driver, "cuEventQuery", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        streams.let_go()
    assert held_owners() == [owner]


def test_one_device_that_is_busy_keeps_nothing_of_another(driver: Any) -> None:
    busy, idle = Owner(), Owner()
    hold(busy, 5, CUDA0)
    driver.finished.add(2)
    hold(idle, 6, Device("cuda", 1))
    streams.let_go()
    assert held_owners() == [busy]


def test_only_foreign_operands_are_held_and_with_one_event(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrayView, "any_foreign", False)
    native, owners = device_view(), [Owner(), Owner()]
    interop.hold_foreign(5, native, None, 1.0, (native, "8x4"))
    assert driver.calls == []
    foreign = [ArrayView(o, "jax", CUDA0, "uint8", (4,), (1,), 0x2000, foreign=True) for o in owners]
    interop.hold_foreign(5, native, foreign[0], (native, foreign[1], 7))
    assert held_owners() == [owners]
    assert driver.named("cuEventRecord") == [("cuEventRecord", 1, 5)]


def test_nothing_is_held_for_a_stream_under_capture(driver: Any) -> None:
    driver.capturing = True
    hold(Owner(), 5, CUDA0)
    assert held_owners() == []
    assert driver.named("cuEventRecord", "cuEventQuery") == []


def test_memory_back_from_jax_is_held_behind_all_streams(driver: Any) -> None:
    owner = Owner()
    streams.hold_until_idle(owner, CUDA0)
    assert driver.calls == []  # a destructor may run where the driver must not be called
    streams.let_go()
    assert [call[0] for call in driver.named("cuCtxRecordEvent", "cuEventQuery")] == [
        "cuCtxRecordEvent",
        "cuEventQuery",
    ]
    assert held_owners() == [owner]
    driver.finished.add(1)
    streams.let_go()
    assert held_owners() == []
    assert len(driver.named("cuCtxRecordEvent")) == 1


# ---- __cuda_array_interface__


class CudaArray:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (4, 6),
            "typestr": "<f2",
            "data": (0x7000, False),
            "strides": None,
            "stream": None,
            **changes,
        }


def test_the_cuda_array_interface_is_read() -> None:
    view = interop.view(CudaArray(), stream=9)
    assert (view.library, view.device, view.dtype, view.shape) == ("dlpack", CUDA0, "float16", (4, 6))
    assert (view.strides, view.pointer, view.readonly, view.foreign) == ((6, 1), 0x7000, False, True)
    strided = interop.view(CudaArray(strides=(-24, 4), data=(0x7000, True)), stream=9)
    assert (strided.strides, strided.readonly) == ((-12, 2), True)


def test_its_stream_is_waited_for_by_ours(driver: Any) -> None:
    interop.view(CudaArray(stream=31), stream=9)
    assert driver.named("cuEventRecord", "cuStreamWaitEvent") == [
        ("cuEventRecord", 1, 31),
        ("cuStreamWaitEvent", 9, 1, 0),
    ]


def test_its_stream_of_none_asks_for_no_order(driver: Any) -> None:
    interop.view(CudaArray(stream=None), stream=9)
    assert driver.calls == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stream": 0}, DtypeError, "stream 0"),
        ({"mask": object()}, DtypeError, "mask"),
        ({"typestr": ">f2"}, DtypeError, "native byte order"),
        ({"typestr": "|V6"}, DtypeError, "plain number"),
        ({"strides": (12, 1)}, ShapeError, "byte strides"),
    ],
)
def test_what_the_protocol_forbids_or_we_cannot_read_is_an_error(changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        interop.view(CudaArray(**changes), stream=9)


def test_an_object_that_says_its_device_is_believed() -> None:
    array = CudaArray()
    array.device = types.SimpleNamespace(id=3)  # type: ignore[attr-defined]
    assert interop.view(array, stream=9).device == Device("cuda", 3)


def test_a_device_array_without_a_driver_is_told_so_by_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver(index: int) -> Any:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
    cuda = types.SimpleNamespace(get_current_stream=no_driver, runtime=runtime)
    view = interop.view(CudaArray(), stream=9)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    with pytest.raises(BackendUnavailable, match=r"cuda:0 .* cudaErrorInsufficientDriver"):
        stream_handle(None, view)
