"""Products captured with ``out=``: replayed on new contents, a graph's are the eager ones bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.cuda import kernel
from fp4rt.cuda.gemm import passes
from fp4rt.cuda.gemm.matmul import forget_plans
from tests.cuda import gemm_cases as cases
from tests.torch_graphs import captured

pytestmark = pytest.mark.gpu

N, K = 512, 4096
REPLAYS = 3
each_kind = pytest.mark.parametrize("kind", cases.KINDS)
each_form = pytest.mark.parametrize("form", [cases.PLAIN, cases.PREPACKED])
each_size = pytest.mark.parametrize("m", [1, 4, 64, 300])


def arrays(given):
    """What an operand reads, in one order for the captured operand and for its new contents."""
    return [given.data, given.scales, given.global_scale] if isinstance(given, fp4rt.QuantizedTensor) else [given]


@each_size
@each_form
@each_kind
def test_a_cupy_graph_replays_on_new_contents(kind, form, m):
    xp, rng = cases.cupy(), np.random.default_rng(m)
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        a, b = cases.activations(rng, m, K, kind), cases.quantized(rng, N, K)
        weight, out = b.weight(form), xp.zeros((m, N), np.float32)
        fp4rt.matmul(a.given, weight, out_dtype="float32", out=out)  # compiles, and the stream has its memory
        stream.synchronize()
        stream.begin_capture()
        fp4rt.matmul(a.given, weight, out_dtype="float32", out=out)
        graph = stream.end_capture()
        for replay in range(REPLAYS):
            changed = [(a.given, cases.activations(rng, m, K, kind).given)]
            if form == cases.PLAIN:
                changed.append((weight, cases.quantized(rng, N, K).given))
            for captured, fresh in changed:
                for to, source in zip(arrays(captured), arrays(fresh), strict=True):
                    to.view(np.uint8)[...] = source.view(np.uint8)
            out.fill(np.nan)
            graph.launch(stream)
            eager = fp4rt.matmul(a.given, weight, out_dtype="float32")
            stream.synchronize()
            assert np.array_equal(cases.bits(out), cases.bits(eager)), f"replay {replay}"


@pytest.mark.parametrize("m", [1, 512, 1024])
def test_kernels_may_be_loaded_while_a_graph_is_captured(monkeypatch, m):
    """The first product of a process, with NVFP4 activations, in the strictest mode."""
    xp, rng = cases.cupy(), np.random.default_rng(m)
    a, b = cases.quantized(rng, m, 512).given, cases.quantized(rng, 4096, 512).packed
    stream = xp.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(kernel, "_kernels", {})
    passes._prepared.cache_clear()
    forget_plans()
    out = xp.zeros((m, 4096), np.float16)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(xp.cuda.runtime.streamCaptureModeGlobal)
        fp4rt.matmul(a, b, out_dtype="float16", out=out)
        graph = stream.end_capture()
        assert kernel._kernels
        graph.launch(stream)
        stream.synchronize()
        eager = fp4rt.matmul(a, b, out_dtype="float16")
        stream.synchronize()
    assert np.array_equal(cases.bits(out), cases.bits(eager))


@each_size
@each_form
@each_kind
def test_a_torch_graph_replays_on_new_contents(kind, form, m):
    torch = pytest.importorskip("torch")

    dtype = torch.float16 if kind == "float16" else torch.bfloat16

    def matrix(rows, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, K, generator=generator).to(dtype).cuda() * 2.0**seed

    def operand(seed):
        return fp4rt.quantize(matrix(m, seed)) if kind == "nvfp4" else matrix(m, seed)

    a, plain = operand(0), fp4rt.quantize(matrix(N, 1))
    weight = fp4rt.prepack(plain) if form == cases.PREPACKED else plain
    out = torch.zeros(m, N, dtype=torch.bfloat16, device="cuda")
    graph, _ = captured(lambda: fp4rt.matmul(a, weight, out=out))
    for seed in range(2, 2 + REPLAYS):
        for to, source in zip(arrays(a), arrays(operand(seed)), strict=True):
            to.copy_(source)
        if form == cases.PLAIN:
            for to, source in zip(arrays(weight), arrays(fp4rt.quantize(matrix(N, seed))), strict=True):
                to.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, fp4rt.matmul(a, weight)), f"seed {seed}"


def test_what_the_graph_of_a_layers_first_call_reads_stays_until_the_layer_is_repacked():
    torch = pytest.importorskip("torch")
    from fp4rt.torch import NVFP4Linear

    layer = NVFP4Linear.from_linear(torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16))
    x, graph = torch.randn(16, K, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = layer(x)
    eager = layer(x)
    assert not layer.prepacked
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, eager)
    assert layer.prepack().prepacked
