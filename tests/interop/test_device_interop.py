"""Device arrays of PyTorch, JAX and CuPy: the same memory in and out, the right order of streams, no waiting."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.interop import streams
from fp4rt.pool import PaddedPool
from tests.torch_graphs import captured

pytestmark = pytest.mark.gpu

MILLISECOND = 1_980_000  # clocks of the busiest card here; a slower one is only busy for longer
ROUNDS = 200
SIX, CODES, SCALE = 6.0, 0x77, 0x38  # x = 6 everywhere with global scale 1
# Inputs of two rounds and their codes and scales: what an earlier round left would show
ALTERNATING, ALTERNATING_BYTES = (6.0, -3.0), ((0x77, 0x38), (0xFF, 0x30))


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("needs a torch that sees the CUDA device")
    return module


@pytest.fixture
def jax() -> Any:
    module = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in module.devices()):
        pytest.skip("needs a JAX with a GPU backend")
    return module


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


class OnStream:
    """A torch tensor whose DLPack export is ordered by ``stream``: an array of a library with a stream of its own."""

    def __init__(self, torch: Any, tensor: Any, stream: Any) -> None:
        self.torch, self.tensor, self.stream = torch, tensor, stream
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, **rest: Any) -> Any:
        self.asked.append(stream)
        with self.torch.cuda.stream(self.stream):
            return self.tensor.__dlpack__(stream=stream)


# ---- the same memory


def test_torch_tensors_are_seen_where_they_lie(torch: Any) -> None:
    base = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    for part in (base, base[1:, 16:], base.t(), base[:, ::2]):
        view = interop.view(part)
        assert (view.pointer, view.strides, view.shape) == (part.data_ptr(), part.stride(), part.shape)
        assert view.device == interop.Device("cuda", part.device.index)


def test_jax_arrays_are_seen_where_they_lie(jax: Any) -> None:
    x = jax.numpy.ones((8, 64), "bfloat16")
    view = interop.view(x)
    assert (view.library, view.dtype, view.pointer) == ("jax", "bfloat16", x.unsafe_buffer_pointer())
    assert view.readonly
    assert view.foreign


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_a_pools_memory_becomes_an_array_and_comes_back(request: pytest.FixtureRequest, library: str) -> None:
    request.getfixturevalue(library)
    pytest.importorskip("fp4rt.cuda")  # brings the pool its allocator
    pool = PaddedPool()
    buffer = pool.allocate(4096, interop.Device("cuda", 0), 0)
    pointer = buffer.pointer
    array = interop.from_device(buffer, (32, 64), "float16", library)
    del buffer
    again = interop.view(array)
    assert (again.library, again.dtype, again.pointer) == (library, "float16", pointer)
    part = array[1:]
    del array, again
    gc.collect()
    assert pool.stats().bytes_in_use > 0
    del part
    gc.collect()
    pytest.importorskip("cupy").cuda.Device().synchronize()
    streams.let_go()
    gc.collect()
    assert pool.stats().bytes_in_use == 0


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_results_come_back_in_the_library_on_the_device(request: pytest.FixtureRequest, library: str) -> None:
    module = request.getfixturevalue(library)
    host = np.random.default_rng(0).standard_normal((130, 96)).astype(np.float16)
    if library == "torch":
        x = module.from_numpy(host).cuda()
    elif library == "jax":
        x = module.device_put(host, next(d for d in module.devices() if d.platform == "gpu"))
    else:
        x = module.asarray(host)
    q = fp4rt.quantize(x, layout="8x4")
    expected = fp4rt.quantize(host, layout="8x4")
    for part in (q.data, q.scales, q.global_scale, q.dequantize("float16"), q.relayout("linear").scales):
        view = interop.view(part)
        assert (view.library, view.device.kind) == (library, "cuda")
    to_host = (lambda a: a.cpu().numpy()) if library == "torch" else np.asarray if library == "jax" else module.asnumpy
    assert to_host(q.data).tobytes() == expected.data.tobytes()
    assert to_host(q.scales).tobytes() == expected.scales.tobytes()
    assert to_host(q.dequantize("float16")).tobytes() == expected.dequantize("float16").tobytes()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_b25_bf16_has_its_own_bits_on_the_device(request: pytest.FixtureRequest, library: str) -> None:
    module = request.getfixturevalue(library)
    values = np.tile(np.array([1.5, -1.5], np.float32), (1, 8))
    if library == "torch":
        q = fp4rt.quantize(module.from_numpy(values).to(module.bfloat16).cuda(), 1.0, layout="linear")
        data, scales = q.data.cpu().numpy(), q.scales.cpu().numpy()
    else:
        q = fp4rt.quantize(module.numpy.asarray(values, "bfloat16"), 1.0, layout="linear")
        data, scales = np.asarray(q.data), np.asarray(q.scales)
    assert scales.tolist() == [[0x28]]
    assert (data == 0xF7).all()


def test_b25_a_cupy_result_in_bf16(torch: Any, cupy: Any) -> None:
    x = cupy.full((2, 32), SIX, cupy.float16)
    if int(cupy.__version__.split(".")[0]) < 14:
        with pytest.raises(fp4rt.errors.DtypeError, match=r"CuPy .* has no bfloat16"):
            fp4rt.quantize(x, 1.0).dequantize("bfloat16")
        return
    y = fp4rt.quantize(x, 1.0).dequantize("bfloat16")
    assert y.dtype.name == "bfloat16"
    assert (torch.from_dlpack(y).float() == SIX).all()


def test_host_and_device_arrays_together_name_both(torch: Any) -> None:
    x = torch.ones(4, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(fp4rt.errors.DeviceError, match="x is on cuda:0 but global_scale is on cpu"):
        fp4rt.quantize(x, torch.ones(1))
    with pytest.raises(fp4rt.errors.DeviceError, match=r"is on cuda:0 but \w+ is on cpu"):
        fp4rt.matmul(x, fp4rt.quantize(x.cpu()))


# ---- B16: the producer is still writing


@pytest.mark.parametrize("producer", ["dlpack", "torch"])
def test_b16_a_busy_producer_is_waited_for_on_the_device(torch: Any, cupy: Any, producer: str) -> None:
    x = torch.zeros(1024, 1024, dtype=torch.float16, device="cuda")
    writing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    x.fill_(SIX)
    fp4rt.quantize(x, 1.0, stream=reading)  # kernels are loaded, and the stream has its memory
    seen_busy = 0
    for round_number in range(ROUNDS):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(writing):
            torch.cuda._sleep(20 * MILLISECOND)  # longer than other programs hold up the host
            x.fill_(SIX)
            if producer == "torch":
                q = fp4rt.quantize(x, 1.0, stream=reading)
        if producer == "dlpack":
            source = OnStream(torch, x, writing)
            q = fp4rt.quantize(source, 1.0, stream=reading.cuda_stream)
            assert source.asked == [reading.cuda_stream]
        is_over = reading.query()
        is_busy = not writing.query()  # asked last: what was waited for was over before
        assert not (is_over and is_busy), round_number
        seen_busy += is_busy
        reading.synchronize()
        data, scales = (part.cpu().numpy() if producer == "torch" else part.get() for part in (q.data, q.scales))
        assert (data == CODES).all(), round_number
        assert (scales == SCALE).all(), round_number
    assert seen_busy > 0.9 * ROUNDS  # in the others the host was held up for longer; a call that waits has none


def test_b16_a_busy_jax_program_is_waited_for(jax: Any) -> None:
    jnp = jax.numpy

    @jax.jit
    def slow_six(seed: Any) -> Any:
        a = jnp.full((2048, 2048), seed, jnp.bfloat16)
        for _ in range(4):
            a = (a @ a) * 0
        return jnp.full((1024, 1024), SIX, jnp.float16) + a[:1024, :1024].astype(jnp.float16)

    slow_six(0.0).block_until_ready()
    for round_number in range(ROUNDS):
        q = fp4rt.quantize(slow_six(float(round_number % 3)), 1.0)  # the argument dies before its kernel has run
        other = jnp.full((1024, 1024), -1.0, jnp.float16)  # and JAX may use its memory again
        assert (np.asarray(q.data) == CODES).all(), round_number
        assert (np.asarray(q.scales) == SCALE).all(), round_number
        del other


def test_b16_reverse_a_third_stream_waits_for_our_results(torch: Any, cupy: Any) -> None:
    inputs = [cupy.full((1024, 1024), value, cupy.float16) for value in ALTERNATING]
    working, reading = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    fp4rt.quantize(inputs[0], 1.0)
    for round_number in range(ROUNDS):
        x, (codes, scale) = inputs[round_number % 2], ALTERNATING_BYTES[round_number % 2]
        with working, torch.cuda.stream(reading):
            with torch.cuda.stream(torch.cuda.ExternalStream(working.ptr)):
                torch.cuda._sleep(MILLISECOND)
            q = fp4rt.quantize(x, 1.0)
            assert not working.done
            data, scales = torch.from_dlpack(q.data).clone(), torch.from_dlpack(q.scales).clone()
        reading.synchronize()
        assert (data == codes).all(), round_number
        assert (scales == scale).all(), round_number
        del q
        fp4rt.quantize(x, 2.0)  # takes the same memory again, on another stream


def test_b16_reverse_jax_waits_for_our_results(torch: Any, jax: Any) -> None:
    inputs = [jax.numpy.full((1024, 1024), value, "float16") for value in ALTERNATING]
    fp4rt.quantize(inputs[0], 1.0)
    with torch.cuda.stream(torch.cuda.default_stream()):  # what a JAX array's quantization runs on
        for round_number in range(ROUNDS):
            codes, scale = ALTERNATING_BYTES[round_number % 2]
            torch.cuda._sleep(MILLISECOND)
            q = fp4rt.quantize(inputs[round_number % 2], 1.0)
            total = jax.numpy.sum(q.scales.astype("int32")), jax.numpy.sum(q.data.astype("int32"))
            assert (int(total[0]), int(total[1])) == (scale << 16, codes << 19), round_number


def test_arrays_of_another_library_are_ordered_before_the_first_ones_stream(torch: Any, cupy: Any) -> None:
    x = torch.full((256, 1024), SIX, dtype=torch.float16, device="cuda")
    scale = cupy.zeros(1, cupy.float32)
    fp4rt.quantize(x, scale)
    writing = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        with writing:
            scale.fill(0.25)
            with torch.cuda.stream(torch.cuda.ExternalStream(writing.ptr)):
                torch.cuda._sleep(MILLISECOND)
            scale.fill(1.0)
            q = fp4rt.quantize(x, scale)
        assert (q.scales == SCALE).all()
        torch.cuda.synchronize()


def test_two_streams_at_once_keep_their_results_apart(torch: Any) -> None:
    pair = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [torch.full((512, 1024), value, dtype=torch.float16, device="cuda") for value in (6.0, 3.0)]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        results = []
        for stream, x in zip(pair, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(fp4rt.quantize(x, 1.0))
        for stream, q, scale in zip(pair, results, (0x38, 0x30), strict=True):
            with torch.cuda.stream(stream):
                assert (q.data == CODES).all()
                assert (q.scales == scale).all()


# ---- nothing waits


@pytest.fixture
def calls(torch: Any) -> dict[str, Any]:
    """One call of every function, warm."""
    import fp4rt.torch as ft
    from fp4rt.compat import flashinfer, vllm

    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    w = fp4rt.quantize(torch.randn(256, 1024, dtype=torch.bfloat16, device="cuda"))
    q, packed, one = fp4rt.quantize(x), fp4rt.prepack(w), torch.ones(1, device="cuda")
    linear = ft.NVFP4Linear.from_linear(torch.nn.Linear(1024, 256, device="cuda", dtype=torch.bfloat16))
    w4a4 = ft.NVFP4Linear.from_linear(torch.nn.Linear(1024, 256, device="cuda", dtype=torch.bfloat16), mode="w4a4")
    offsets = torch.tensor([0, 20, 64], dtype=torch.int32, device="cuda")
    scale_offsets = torch.tensor([0, 128, 256], dtype=torch.int32, device="cuda")
    other = torch.cuda.Stream()
    functions = {
        "quantize": lambda: fp4rt.quantize(x, one),
        "quantize with an automatic scale": lambda: fp4rt.quantize(x),
        "quantize on another stream": lambda: fp4rt.quantize(x, 1.0, stream=other),
        "quantize a DLPack array": lambda: fp4rt.quantize(OnStream(torch, x, torch.cuda.current_stream()), one),
        "global_scale": lambda: fp4rt.global_scale(x),
        "dequantize": lambda: q.dequantize("bfloat16"),
        "relayout": lambda: q.relayout("8x4"),
        "matmul": lambda: fp4rt.matmul(q, w),
        "matmul, 16-bit times 4-bit": lambda: fp4rt.matmul(x, packed),
        "operator": lambda: ft.quantize(x),
        "linear": lambda: linear(x),
        "linear, both in 4 bits": lambda: w4a4(x),
        "vllm": lambda: vllm.scaled_fp4_quant(x, one),
        "vllm's experts": lambda: vllm.scaled_fp4_experts_quant(x, one.repeat(2), offsets, scale_offsets, 1),
        "flashinfer": lambda: flashinfer.nvfp4_quantize(x, one),
    }
    for function in functions.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    return functions


def test_calls_return_while_their_stream_is_busy(torch: Any, calls: dict[str, Any]) -> None:
    waited = {}
    for name, function in calls.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function()
            stream.synchronize()
            torch.cuda._sleep(60 * MILLISECOND)
            start = time.perf_counter()
            function()
            if stream.query() or time.perf_counter() - start > 0.03:
                waited[name] = time.perf_counter() - start
        torch.cuda.synchronize()
    assert not waited


# ---- graphs


def test_torch_graphs_replay_every_function_on_new_contents(torch: Any) -> None:
    x = torch.randn(48, 512, dtype=torch.bfloat16, device="cuda")
    w = fp4rt.quantize(torch.randn(128, 512, dtype=torch.bfloat16, device="cuda"))
    packed = fp4rt.prepack(w)
    q = fp4rt.quantize(x)
    y = q.dequantize("bfloat16")
    products = [torch.empty(48, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def step() -> None:
        fp4rt.quantize(x, out=q)
        fp4rt.dequantize(q, "bfloat16", out=y)
        fp4rt.matmul(q, w, out=products[0])
        fp4rt.matmul(x, packed, out=products[1])

    graph, _ = captured(step)
    for seed in range(5):
        x.copy_(torch.randn(48, 512, generator=torch.Generator().manual_seed(seed)) * 2.0**seed)
        graph.replay()
        expected = fp4rt.quantize(x)
        assert torch.equal(q.data, expected.data)
        assert torch.equal(q.scales, expected.scales)
        assert torch.equal(q.global_scale, expected.global_scale)
        assert torch.equal(y, expected.dequantize("bfloat16"))
        assert torch.equal(products[0], fp4rt.matmul(expected, w))
        assert torch.equal(products[1], fp4rt.matmul(x, packed))


def test_a_layers_forward_is_captured_with_its_own_allocations(torch: Any) -> None:
    from fp4rt.torch import NVFP4Linear

    layers = [
        NVFP4Linear.from_linear(torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16), mode=mode)
        for mode in ("w4a16", "w4a4")
    ]
    model = torch.nn.Sequential(*layers).eval()
    x = torch.randn(16, 512, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        graph, y = captured(lambda: model(x))
        for seed in range(3):
            x.copy_(torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(y, model(x))
            fp4rt.quantize(x)  # eager work between replays must not touch the graph's memory


def test_a_layers_first_call_inside_a_capture_takes_the_weight_as_it_is(torch: Any) -> None:
    from fp4rt.torch import NVFP4Linear

    layer = NVFP4Linear.from_linear(torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)).eval()
    x = torch.randn(16, 512, dtype=torch.bfloat16, device="cuda")
    weight, bias = layer.weight(), layer.bias
    with torch.no_grad():
        fp4rt.matmul(x, weight, bias=bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        assert not layer.prepacked
        x.normal_()
        graph.replay()
        assert torch.equal(y, fp4rt.matmul(x, weight, bias=bias))


def test_a_first_call_inside_a_capture_works_or_fails_before_the_capture_is_spoilt() -> None:
    """In a fresh process with an empty kernel cache nothing is compiled or loaded yet."""
    import os
    import subprocess
    import sys
    import tempfile

    code = """
import torch, fp4rt
x = torch.full((64, 512), 6.0, dtype=torch.float16, device="cuda")
q = fp4rt.QuantizedTensor(
    *(torch.zeros(*shape, dtype=torch.uint8, device="cuda") for shape in ((64, 256), (128, 32))),
    torch.zeros(1, device="cuda"), (64, 512), "128x4")
torch.cuda.synchronize()
graph, error = torch.cuda.CUDAGraph(), None
with torch.cuda.graph(graph):
    y = x * 2
    try:
        fp4rt.quantize(x, 1.0, out=q)
    except fp4rt.errors.Fp4rtError as raised:
        error = raised
graph.replay()
torch.cuda.synchronize()
assert (y == 12).all(), "the capture was spoilt"
if error is None:
    assert (q.data == 0x77).all() and (q.scales == 0x38).sum() == 64 * 32, "captured but not replayed"
fp4rt.quantize(x, 1.0, out=q)
assert (q.data == 0x77).all()
print("captured" if error is None else f"refused: {error}")
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FP4RT_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment, check=False
        )
    assert done.returncode == 0, done.stderr
    print(done.stdout)


# ---- frameworks' compilers


def test_a_compiled_mlp_equals_eager(torch: Any) -> None:
    from fp4rt.torch import NVFP4Linear, quantize_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    model = model.to("cuda", torch.bfloat16).eval()
    assert quantize_model(model) == ["0", "2"]
    for layer in model:
        if isinstance(layer, NVFP4Linear):
            layer.prepack()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for m in (1, 17):
            x = torch.randn(m, 512, dtype=torch.bfloat16, device="cuda")
            assert torch.equal(compiled(x), model(x))


def test_a_jitted_program_equals_eager_and_stays_on_the_device(jax: Any) -> None:
    import fp4rt.jax as fj

    x = jax.random.normal(jax.random.PRNGKey(0), (64, 512), "bfloat16")
    w = fj.quantize(jax.random.normal(jax.random.PRNGKey(1), (128, 512), "bfloat16"))

    def step(x: Any, w: Any) -> Any:
        q = fj.quantize(x)
        return q.data, q.scales, q.global_scale, fj.matmul(q, w), fj.dequantize(q)

    for compiled, eager in zip(jax.jit(step)(x, w), step(x, w), strict=True):
        assert {device.platform for device in compiled.devices()} == {"gpu"}
        assert np.asarray(compiled).tobytes() == np.asarray(eager).tobytes()
    ours = fp4rt.quantize(np.asarray(x))
    assert np.asarray(step(x, w)[0]).tobytes() == ours.data.tobytes()
