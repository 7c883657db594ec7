"""What a call remembers of its operands never outlives a change of them; torch's memory stands in for a device's."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.cuda import dependent_launch, kernel
from fp4rt.cuda.compiler import supported_archs
from fp4rt.cuda.gemm import tensor_map
from fp4rt.cuda.gemm.matmul import ARGUMENTS, HOPPER_ARGUMENTS, forget_plans
from fp4rt.cuda.gemm.problem import device_measures
from fp4rt.errors import BackendUnavailable
from fp4rt.interop import Device, export, readers
from fp4rt.pool import Buffer, HostUpstream
from fp4rt.prepacked import PrepackedWeight, tiles_shape

torch = pytest.importorskip("torch")

HOPPER = {75: 9, 76: 0, 16: 132, 81: 233472, 97: 232448}  # cudaDeviceAttr
CURRENT_STREAM = 5
N, K = 64, 512


class HostMemoryOnCuda(HostUpstream):
    kind = "cuda"


class Launches:
    """A driver and its runtime: launches are written down as (function, device, stream, argument bytes)."""

    def __init__(self) -> None:
        self.device = 0
        self.done: list[tuple[str, int, int, bytes]] = []
        self.names: dict[int, str] = {}
        self.numbers = itertools.count(1)

    def launchKernel(self, function: int, *rest: int) -> None:
        arguments = ctypes.c_void_p.from_address(rest[-2]).value
        self.done.append(
            (self.names[function], self.device, rest[-3], ctypes.string_at(arguments or 0, HOPPER_ARGUMENTS.nbytes))
        )

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, device: int) -> None:
        self.device = device

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return HOPPER[attribute]

    def module(self) -> Any:
        return self

    def load(self, image: bytes) -> None:
        pass

    def funcSetAttribute(self, *args: int) -> None:
        pass

    def get_function(self, name: str) -> Any:
        number = next(self.numbers)
        self.names[number] = name
        return SimpleNamespace(ptr=number)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, driver: Any) -> Iterator[Launches]:
    try:
        supported_archs()
    except BackendUnavailable as error:
        pytest.skip(f"needs NVRTC, which says what it can compile for: {error}")
    recording = Launches()
    monkeypatch.setattr(kernel, "_cuda", lambda: (recording, recording, recording.module))
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_thread", kernel._Thread())
    monkeypatch.setattr(kernel, "cached_compile", lambda *args, **options: SimpleNamespace(image=b""))
    monkeypatch.setattr(tensor_map, "_encode", lambda: lambda *args: 0)
    monkeypatch.setitem(readers._torch_devices, torch.device("cpu"), Device("cuda", 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CURRENT_STREAM, raising=False)
    caches = (kernel.device_attribute, kernel.device_target, device_measures, tensor_map.encode_matrix)
    forgetting = [forget_plans, *(cached.cache_clear for cached in caches)]
    for forget in forgetting:
        forget()
    yield recording
    for forget in forgetting:
        forget()


def prepacked() -> PrepackedWeight:
    tiles = torch.zeros(tiles_shape(N, K), dtype=torch.uint8)
    return PrepackedWeight(tiles, torch.zeros((0, 16), dtype=torch.uint8), torch.ones(1), (N, K), "linear", K)


def at(tensor: Any, misalignment: int) -> Any:
    """A copy of a byte tensor at an address of that remainder modulo 16."""
    memory = torch.zeros(tensor.numel() + 32, dtype=torch.uint8)
    begin = (misalignment - memory.data_ptr()) % 16
    return memory[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


def arguments_of(launch: tuple[str, int, int, bytes]) -> dict[str, Any]:
    kind = HOPPER_ARGUMENTS if launch[0] != "gemm_portable" else ARGUMENTS
    return dict(zip(kind.fields, struct.unpack_from("@" + kind.codes, launch[3]), strict=True))


def test_a_product_reads_the_weight_where_it_is_now(launches: Launches) -> None:
    x, out, weight = torch.ones((4, K), dtype=torch.bfloat16), torch.empty((4, N)), prepacked()
    weight.data.data = at(weight.data, 0)
    for _ in range(2):
        fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert weight.views() is weight.views()
    assert [launch[0] for launch in launches.done] == ["gemm_decode"] * 2
    assert arguments_of(launches.done[-1])["b"] == weight.data.data_ptr()
    weight.data.data = at(weight.data, 0)
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert arguments_of(launches.done[-1])["b"] == weight.data.data_ptr()
    weight.data.data = at(weight.data, 1)  # where the Hopper kernels cannot read it
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert launches.done[-1][0] == "gemm_portable"
    assert arguments_of(launches.done[-1])["b"] == weight.data.data_ptr()


def test_a_product_takes_the_activations_strides_and_alpha_of_this_call(launches: Launches) -> None:
    wide, out, weight = torch.ones((8, 2 * K), dtype=torch.bfloat16), torch.empty((4, N)), prepacked()
    alpha = torch.ones(1)
    for x, factor in ((wide[:4, :K], None), (wide[::2, :K], 0.5), (wide[:4, :K], alpha)):
        fp4rt.matmul(x, weight, out_dtype="float32", alpha=factor, out=out)
    rows = [arguments_of(launch) for launch in launches.done if launch[0] != "gemm_finish"]
    assert [row["a_row_stride"] for row in rows] == [4 * K, 8 * K, 4 * K]
    assert [row["alpha_array"] for row in rows] == [0, 0, alpha.data_ptr()]
    assert [row["alpha"] for row in rows] == [0.0, 0.5, 0.0]
    assert [row["b_global"] for row in rows] == [weight.global_scale.data_ptr(), 0, 0]


def test_a_weight_on_another_stream_is_waited_for_each_time(launches: Launches, driver: Any) -> None:
    x, out, weight = torch.ones((4, K), dtype=torch.bfloat16), torch.empty((4, N)), prepacked()
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert driver.named("cuStreamWaitEvent") == []
    for _ in range(2):
        driver.calls.clear()
        fp4rt.matmul(x, weight, out_dtype="float32", out=out, stream=7)
        waits = [call[1] for call in driver.named("cuStreamWaitEvent")]
        assert waits == [7] * 4  # x, two arrays of the weight, out
        assert launches.done[-1][2] == 7
    driver.calls.clear()
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert driver.named("cuStreamWaitEvent") == []


def test_a_result_is_multiplied_without_its_arrays_and_waited_for_on_another_stream(
    launches: Launches, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "DEVICE_CUDA", export.DEVICE_CPU)  # what torch takes the capsules for
    with fp4rt.use_pool(fp4rt.PaddedPool(upstream=HostMemoryOnCuda())):
        x, g, out, weight = torch.ones((4, K), dtype=torch.bfloat16), torch.ones(1), torch.empty((4, N)), prepacked()
        q = fp4rt.quantize(x, g)
        fp4rt.matmul(q, weight, out_dtype="float32", out=out)
        views = q.views()
        assert arguments_of(launches.done[-1])["a_scales"] == views.scales.pointer
        assert isinstance(views.data.owner, Buffer)  # nobody has asked for an array
        assert driver.named("cuStreamWaitEvent") == []
        fp4rt.matmul(q, weight, out_dtype="float32", out=out, stream=7)
        assert [call[1] for call in driver.named("cuStreamWaitEvent")] == [7] * 6
        assert q.data.data_ptr() == views.data.pointer


def test_arrays_of_another_library_are_told_the_stream(launches: Launches, producer: Any) -> None:
    x, g = torch.ones((4, K), dtype=torch.bfloat16), torch.ones(1)
    scales = producer(np.zeros((4, K // 16), np.uint8), (1, 8, 1), device=(2, 0))
    mixed = fp4rt.QuantizedTensor.trusted(torch.zeros((4, K // 2)).byte(), scales, torch.ones(1), (4, K), "linear", K)
    for _ in range(2):
        fp4rt.quantize(x, g, layout="linear", out=mixed)
        assert scales.calls[-1]["stream"] == CURRENT_STREAM
    wide = producer(np.zeros((N, K // 16), np.uint8), (1, 8, 1), device=(2, 0))
    weight = fp4rt.QuantizedTensor.trusted(torch.zeros((N, K // 2)).byte(), wide, torch.ones(1), (N, K), "linear", K)
    for _ in range(2):
        fp4rt.matmul(x, weight, out_dtype="float32", out=torch.empty((4, N)))
        assert wide.calls[-1]["stream"] == CURRENT_STREAM


def test_a_model_moved_to_another_device_runs_there(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out, weight = torch.ones((4, K), dtype=torch.bfloat16), torch.empty((4, N)), prepacked()
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    monkeypatch.setitem(readers._torch_devices, torch.device("cpu"), Device("cuda", 1))
    weight.data.data = weight.data.clone()
    fp4rt.matmul(x, weight, out_dtype="float32", out=out)
    assert [launch[1] for launch in launches.done] == [0, 1]
    assert launches.device == 0


def test_a_weight_that_speaks_dlpack_is_asked_each_time(producer: Any) -> None:
    tiles = np.zeros(tiles_shape(N, K), np.uint8)
    data = producer(tiles, (1, 8, 1))
    weight = PrepackedWeight.trusted(data, np.zeros((0, 16), np.uint8), np.ones(1, np.float32), (N, K), "linear", K)
    x = np.ones((2, K), np.float16)
    for calls in (1, 2):
        fp4rt.matmul(x, weight)
        assert len(data.calls) == calls


def test_a_dependent_launch_is_told_grid_stream_and_arguments(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def launch_with_attributes(config: int, function: int, params: int, extra: None) -> int:
        words = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        count = ctypes.c_uint.from_address(config + 48).value
        given = ctypes.c_void_p.from_address(params).value or 0
        kind, value = (ctypes.c_uint.from_address(attributes + at).value for at in (0, 8))
        seen.append((list(words), stream, count, kind, value, ctypes.string_at(given, ARGUMENTS.nbytes)))
        return 0

    monkeypatch.setattr(dependent_launch, "_launch_with_attributes", lambda: launch_with_attributes)
    k = kernel.get_kernel("kernels/gemm_finish.cu", "gemm_finish", {}, 0, shared_bytes=100)
    values = (*range(1, 11), *range(11, 23), 0.5)
    for stream in (9, 10):
        dependent_launch.launch_dependent(k, (3, 2, 1), 64, ARGUMENTS, values, stream)
    # CUlaunchConfig; attribute 6 is programmatic stream serialization
    assert seen == [([3, 2, 1, 64, 1, 1, 100], stream, 1, 6, 1, ARGUMENTS.pack(*values)) for stream in (9, 10)]


def test_the_hopper_kernels_arguments_lie_where_c_puts_them() -> None:
    gemm, maps = (*range(1, 23), 0.5), (b"\1" * 128, b"\2" * 128)
    further = [0] * (len(HOPPER_ARGUMENTS.fields) - len(maps) - len(gemm) - 1)
    packed, inner = HOPPER_ARGUMENTS.pack(*maps, *gemm, 1, *further), ARGUMENTS.pack(*gemm)
    assert packed[:256] == b"".join(maps)
    assert packed[256 : 256 + len(inner)] == inner
    assert packed[256 + len(inner) :][:4] == (1).to_bytes(4, "little")


def test_a_foreign_prepacked_weight_is_held_while_work_with_it_is_queued(
    producer: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(matmul=lambda *args: "product", unpack=lambda *args: "tensor")
    monkeypatch.setattr(fp4rt.api, "_backend", lambda view: backend)
    monkeypatch.setattr(interop.ArrayView, "any_foreign", False)
    cuda = {"device": (2, 0)}
    arrays = (
        producer(np.zeros(tiles_shape(N, K), np.uint8), (1, 8, 1), **cuda),
        producer(np.zeros((0, 16), np.uint8), (1, 8, 1), **cuda),
        producer(np.ones(1, np.float32), **cuda),
    )
    weight = PrepackedWeight.trusted(*arrays, (N, K), "linear", K)
    x = interop.ArrayView(None, "cupy", Device("cuda", 0), "float16", (2, K), (K, 1), 0x1000)
    product, unpacked = lambda: fp4rt.matmul(x, weight, stream=5), lambda: weight.unpack(stream=5)
    for call, read in ((product, [1, 0, 1]), (unpacked, [1, 1, 1])):
        interop.streams._held.clear()
        call()
        ((owners, _),) = interop.streams._held[0]
        assert len(owners) == sum(read)
        assert [a.deleted for a in arrays] == [0, 0, 0]
        interop.streams._held.clear()
        del owners
        assert [a.deleted for a in arrays] == read
        for array in arrays:
            array.deleted = 0
