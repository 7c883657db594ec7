"""Arrays on a second device: the work happens there, the thread's current device stays, and the bits are the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fp4rt
from fp4rt.errors import DeviceError

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    before = cupy.cuda.runtime.getDevice()
    cupy.cuda.runtime.setDevice(0)
    yield cupy
    cupy.cuda.runtime.setDevice(before)


def on(cupy, device, array):
    with cupy.cuda.Device(device):
        found = cupy.asarray(array)
        cupy.cuda.Device().synchronize()
    return found


def host(cupy, array):
    with cupy.cuda.Device(array.device.id):
        cupy.cuda.Device().synchronize()
        return array.get()


def everything(cupy, device):
    """Every public function's result for one set of inputs, on the host."""
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((200, 512), (384, 512)))
    x, w = on(cupy, device, x), on(cupy, device, w)
    q = fp4rt.quantize(x)
    padded = fp4rt.quantize(x[:, :480], fp4rt.global_scale(x), layout="8x4", padded_n=512)
    weight = fp4rt.quantize(w, layout="linear")
    packed = fp4rt.prepack(weight)
    found = [q.data, q.scales, q.global_scale, padded.data, padded.scales, fp4rt.relayout(q, "8x4").scales]
    found += [fp4rt.dequantize(padded, "float32"), packed.data, packed.unpack().data]
    for m in (1, 20, 200):
        found += [fp4rt.matmul(x[:m], b, out_dtype="float32") for b in (weight, packed)]
    found += [fp4rt.matmul(q, b, out_dtype="float16") for b in (weight, packed)]
    out = fp4rt.quantize(x, 3.0)
    assert fp4rt.quantize(x, on(cupy, device, np.array([3.0], np.float32)), out=out) is out
    found += [out.data, out.scales]
    assert all(part.device.id == device for part in found)
    return [host(cupy, part) for part in found]


def test_every_function_runs_on_the_device_of_its_arrays_with_the_same_bits(cupy):
    first = everything(cupy, 0)
    second = everything(cupy, 1)
    assert cupy.cuda.runtime.getDevice() == 0
    for ours, theirs in zip(first, second, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_torch_tensors_on_the_second_device(cupy):
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(0)
    x = torch.randn(70, 256, device="cuda:1", dtype=torch.bfloat16)
    w = torch.randn(128, 256, device="cuda:1", dtype=torch.bfloat16)
    packed = fp4rt.prepack(fp4rt.quantize(w))
    got = fp4rt.matmul(x, packed)
    assert got.device == x.device
    assert torch.cuda.current_device() == 0
    wanted = fp4rt.matmul(x.to("cuda:0"), fp4rt.prepack(fp4rt.quantize(w.to("cuda:0"))))
    assert torch.equal(got.cpu(), wanted.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            fp4rt.matmul(x, packed, out=got)
        x.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert not got.any()


def test_arrays_of_two_devices_are_refused_and_both_are_named(cupy):
    x, g = on(cupy, 0, np.ones((4, 32), np.float16)), on(cupy, 1, np.ones(1, np.float32))
    with pytest.raises(DeviceError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        fp4rt.quantize(x, g)
    far = fp4rt.quantize(on(cupy, 1, np.ones((16, 32), np.float16)))
    with pytest.raises(DeviceError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        fp4rt.matmul(x, far)


def test_threads_work_on_both_devices_at_once(cupy):
    wanted, found = everything(cupy, 0), {}

    def work(index):
        cupy.cuda.runtime.setDevice(1 - index)  # the wrong one: the arrays decide
        for _ in range(5):
            found[index] = everything(cupy, index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        assert [part.tobytes() for part in found[index]] == [part.tobytes() for part in wanted]
