"""``torch.ops.fp4rt`` and ``fp4rt.torch``: equal to the functions, shaped by their fakes, usable in a full graph."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fp4rt  # noqa: E402
import fp4rt.torch as ft  # noqa: E402
from fp4rt.errors import DeviceError, DtypeError, LayoutError, ShapeError  # noqa: E402
from fp4rt.tensor import QuantizedTensor  # noqa: E402

LAYOUTS = ["linear", "128x4", "8x4"]


def matrix(m: int, n: int, device: str, dtype: Any = torch.float16, seed: int = 0) -> Any:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "padded_n"), [(64, None), (48, 64), (50, 64)])
def test_quantize_is_the_functions_result_in_torchs_memory(
    device: str, layout: str, n: int, padded_n: int | None
) -> None:
    x = matrix(5, n, device)
    data, scales, scale = ft.quantize(x, layout=layout, padded_n=padded_n)
    expected = fp4rt.quantize(x, layout=layout, padded_n=padded_n)
    assert torch.equal(data, expected.data)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(scale, expected.global_scale)
    assert {part.device.type for part in (data, scales, scale)} == {device}


def test_every_operator_agrees_with_its_function(device: str) -> None:
    x, w, bias = matrix(5, 48, device), matrix(24, 48, device, seed=1), matrix(1, 24, device, seed=2)[0]
    a, b = ft.quantize(x, padded_n=64), ft.quantize(w, padded_n=64, layout="8x4")
    qa = fp4rt.QuantizedTensor(*a, (5, 48), "128x4", 64)
    qb = fp4rt.QuantizedTensor(*b, (24, 48), "8x4", 64)
    assert torch.equal(ft.global_scale(x), fp4rt.global_scale(x))
    assert torch.equal(ft.dequantize(*a, n=48, dtype=torch.bfloat16), qa.dequantize("bfloat16"))
    assert torch.equal(ft.relayout(*a[:2], "linear", n=48), qa.relayout("linear").scales)
    assert torch.equal(ft.relayout(*a[:2], "128x4", n=48), qa.scales)
    product = ft.matmul(a, b, k=48, layouts=("128x4", "8x4"), out_dtype=torch.float32, bias=bias)
    assert torch.equal(product, fp4rt.matmul(qa, qb, out_dtype="float32", bias=bias))


def test_torch_load_reads_weights_with_its_default_and_refuses_what_they_cannot_be(device: str) -> None:
    q = fp4rt.quantize(matrix(40, 48, device), padded_n=64)
    saved = {"q": q, "prepacked": fp4rt.prepack(q)}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for found in (loaded["q"], loaded["prepacked"].unpack()):
        assert (found.shape, found.layout, found.padded_n) == (q.shape, q.layout, q.padded_n)
        for part in ("data", "scales", "global_scale"):
            assert torch.equal(getattr(found, part), getattr(q, part))
    larger = QuantizedTensor.trusted(q.data, q.scales, q.global_scale, (4000, 48), "128x4", 64)
    file = io.BytesIO()
    torch.save(larger, file)
    file.seek(0)
    with pytest.raises(ShapeError, match="data of shape"):
        torch.load(file, weights_only=True)


def test_a_product_of_different_columns_needs_to_be_told_how_many_count(device: str) -> None:
    a, b = ft.quantize(matrix(4, 32, device)), ft.quantize(matrix(7, 48, device))
    for left, right in ((a, b), (b, a)):
        with pytest.raises(ShapeError, match="columns in memory; pass k"):
            ft.matmul(left, right)
    padded = ft.quantize(matrix(7, 32, device), padded_n=48)
    assert torch.equal(ft.matmul(a, padded, k=32), ft.matmul(a, ft.quantize(matrix(7, 32, device))))


def test_errors_are_those_of_the_functions(device: str) -> None:
    with pytest.raises(ShapeError, match="padded_n=64"):
        ft.quantize(matrix(3, 50, device))
    with pytest.raises(LayoutError, match="unknown scale layout"):
        ft.quantize(matrix(3, 64, device), layout="4x4")
    with pytest.raises(DtypeError, match="float16, bfloat16, float32"):
        ft.quantize(torch.zeros(3, 64, dtype=torch.int32, device=device))
    data, scales, scale = ft.quantize(matrix(3, 64, device))
    with pytest.raises(ShapeError, match="scales of shape"):
        ft.dequantize(data, scales, scale, layout="linear")


def test_what_is_no_tensor_is_refused_in_one_line(device: str) -> None:
    x, q = matrix(3, 64, device), fp4rt.quantize(matrix(3, 64, device))
    a = ft.quantize(x)
    for call, message in (
        (lambda: ft.quantize(x.cpu().numpy()), "quantize needs x as a torch.Tensor, got ndarray"),
        (lambda: ft.quantize(x, 3.0), "quantize needs global_scale as a one-element float32 tensor, .* got float"),
        (lambda: ft.global_scale([1.0]), "global_scale needs x as a torch.Tensor, got list"),
        (lambda: ft.relayout(*a[:1], None, "linear"), "relayout needs scales as a torch.Tensor, got NoneType"),
        (lambda: ft.dequantize(*a[:2], 3.0), "dequantize needs q's global_scale as a torch.Tensor, got float"),
        (lambda: ft.dequantize(*a, dtype="float16"), "dequantize needs dtype as a torch.dtype, .* got 'float16'"),
        (lambda: ft.matmul(x, a), "matmul needs a as three tensors .* got Tensor; quantize a tensor with"),
        (lambda: ft.matmul(a, q), r"needs b as three tensors .*QuantizedTensor; pass \(q\.data, q\.scales, q\.global"),
        (lambda: ft.matmul(a, a[:2]), "needs b as three tensors .* got 2 of them"),
        (lambda: ft.matmul(a, a, alpha=2.0), "matmul needs alpha as a one-element float32 tensor, .* got float"),
        (lambda: ft.matmul(a, a, bias=[0.0]), "matmul needs bias as a torch.Tensor, got list"),
    ):
        with pytest.raises(DtypeError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_what_operators_cannot_take_is_refused_as_by_the_functions(device: str) -> None:
    x = matrix(4, 32, device)
    a = data, scales, scale = ft.quantize(x)
    no_matrix = r"QuantizedTensor needs data as \(m, columns / 2\), got shape"
    for call, error, message in (
        (lambda: ft.dequantize(data[0], scales, scale), ShapeError, no_matrix),
        (lambda: ft.dequantize(data[0], scales, scale, n=32), ShapeError, no_matrix),
        (lambda: ft.matmul((data[0, 0], scales, scale), a), ShapeError, no_matrix),
        (lambda: ft.matmul(a, (data[0], scales, scale), k=32), ShapeError, no_matrix),
        (lambda: ft.relayout(data[0], scales, "linear"), ShapeError, no_matrix),
        (lambda: ft.dequantize(*a, n=-16), ShapeError, "n >= 1 columns, got shape"),
        (lambda: ft.quantize(x, layout=None), LayoutError, "unknown scale layout None"),
        (lambda: ft.quantize(x, layout=b"128x4"), LayoutError, "unknown scale layout b'128x4'"),
        (lambda: ft.dequantize(*a, layout=5), LayoutError, "unknown scale layout 5"),
        (lambda: ft.relayout(data, scales, None), LayoutError, "unknown scale layout None"),
        (lambda: ft.matmul(a, a, layouts=("128x4", None)), LayoutError, "unknown scale layout None"),
        (lambda: ft.matmul(a, a, layouts="128x4"), LayoutError, "matmul needs layouts as two names, .* got '128x4'"),
        (lambda: ft.matmul(a, a, layouts=("128x4",)), LayoutError, "needs layouts as two names"),
        (lambda: ft.matmul(a, a, layouts=5), LayoutError, "needs layouts as two names, .* got 5"),
        (lambda: ft.quantize(x, padded_n="48"), DtypeError, "quantize needs padded_n as an integer, got '48'"),
        (lambda: ft.dequantize(*a, n=32.0), DtypeError, r"dequantize needs n as an integer, got 32\.0"),
        (lambda: ft.relayout(data, scales, "linear", n="3"), DtypeError, "relayout needs n as an integer, got '3'"),
        (lambda: ft.matmul(a, a, k="3"), DtypeError, "matmul needs k as an integer, got '3'"),
        (lambda: ft.matmul(a, a, k=torch.tensor(3.5)), DtypeError, r"matmul needs k as an integer, got tensor\(3.5"),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr", "to_sparse_bsr"])
def test_sparse_tensors_are_refused_by_name(device: str, form: str) -> None:
    x = matrix(4, 32, device, torch.float32)
    sparse = x.to_sparse_bsr((2, 2)) if form == "to_sparse_bsr" else getattr(x, form)()
    a = ft.quantize(x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for call, name in (
                (lambda: ft.quantize(sparse), "quantize needs x"),
                (lambda: ft.global_scale(sparse), "global_scale needs x"),
                (lambda: ft.matmul(a, a, bias=sparse), "matmul needs bias"),
            ):
                with pytest.raises(DtypeError, match=rf"{name} as a dense tensor, got torch\.sparse_.*\.to_dense\(\)"):
                    call()


def test_a_symbolic_trace_takes_what_stands_for_a_tensor(device: str) -> None:
    x = matrix(3, 64, device)
    traced = torch.fx.symbolic_trace(lambda x: ft.quantize(x)[0])
    assert torch.equal(traced(x), ft.quantize(x)[0])


def test_a_backward_pass_through_an_operator_says_that_there_is_none(device: str) -> None:
    x = torch.nn.Linear(64, 64).to(device)(matrix(3, 64, device, torch.float32))
    data, scales, scale = ft.quantize(x)
    with pytest.raises(NotImplementedError, match="fp4rt::quantize has no gradient"):
        scale.sum().backward()
    assert not data.requires_grad
    assert not scales.requires_grad


OLD = """
import torch
del torch._C.DispatchKeySet.raw_repr, torch._C._any_requires_grad
import fp4rt, fp4rt.torch as ft
x = torch.randn(4, 64, requires_grad=True)
data, scales, scale = ft.quantize(x.detach())
q = fp4rt.quantize(x.detach())
print(all(torch.equal(*pair) for pair in ((data, q.data), (scales, q.scales), (scale, q.global_scale))))
print(scale.requires_grad, ft.quantize(x)[2].requires_grad)
try: ft.quantize(x)[2].sum().backward()
except NotImplementedError as error: print(error)
"""


@pytest.mark.skipif(not hasattr(torch._C, "_any_requires_grad"), reason="this PyTorch is old itself")
def test_an_older_pytorch_does_the_same() -> None:
    """Back to 2.4, which pyproject.toml allows: two functions of newer ones are missing there."""
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, check=True)
    same, gradients, refusal = done.stdout.splitlines()
    assert (same, gradients) == ("True", "False True")
    assert refusal.startswith("fp4rt::quantize has no gradient")


@pytest.mark.parametrize("grad", [True, False])
def test_what_watches_or_traces_torch_sees_the_operators(device: str, grad: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = matrix(4, 64, device)
    with torch.set_grad_enabled(grad):
        with Watch():
            data, _, _ = ft.quantize(x)
        assert seen[0] == "fp4rt.quantize.default"
        traced = make_fx(lambda x: ft.quantize(x)[0])(x)
        assert torch.ops.fp4rt.quantize.default in [node.target for node in traced.graph.nodes]
        assert torch.equal(traced(x), data)
        batches = torch.stack([x, 2 * x])
        assert torch.equal(torch.vmap(lambda x: ft.quantize(x)[0])(batches)[1], ft.quantize(2 * x)[0])


@pytest.mark.parametrize("name", ["quantize", "dequantize", "relayout", "global_scale", "matmul", "linear"])
def test_torchs_own_operator_check_passes(device: str, name: str) -> None:
    x, w = matrix(5, 48, device), matrix(32, 48, device, seed=1)
    a, b = ft.quantize(x), ft.quantize(w, layout="linear")
    arguments: dict[str, tuple[Any, ...]] = {
        "quantize": (x, None, "8x4", 64),
        "dequantize": (*a, 48, "128x4", torch.bfloat16),
        "relayout": (*a[:2], 48, "128x4", "linear"),
        "global_scale": (x,),
        "matmul": (*a, "128x4", *b, "linear", 48, torch.float32, None, None),
        "linear": (x, *b, "linear", None, True, None),
    }
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.fp4rt, name), arguments[name], test_utils=checks)


def test_a_full_graph_equals_eager_for_other_batch_sizes_too(device: str) -> None:
    weight = ft.quantize(matrix(32, 64, device, seed=1))

    def step(x: Any) -> Any:
        a = ft.quantize(x * 2.0)
        return ft.matmul(a, weight, out_dtype=torch.float32) + ft.dequantize(*a).sum(1, keepdim=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for m in (3, 7, 130):
        x = matrix(m, 64, device, seed=m)
        assert torch.equal(compiled(x), step(x))


def test_an_empty_batch_has_empty_results(device: str) -> None:
    weight = ft.quantize(matrix(32, 64, device))
    a = ft.quantize(matrix(0, 64, device))
    assert [tuple(part.shape) for part in a] == [(0, 32), (0, 4), (1,)]
    assert ft.matmul(a, weight).shape == (0, 32)


def call_with_one_on_meta(index: int) -> Any:
    """As where a checkpoint lacks one tensor of a layer that was made on meta."""
    x, bias = torch.ones(16, 64, dtype=torch.bfloat16), torch.ones(16)
    data, scales, scale = ft.quantize(x, layout="linear")
    parts = [data, scales, scale, bias]
    if index < len(parts):
        parts[index] = parts[index].to("meta")
        return torch.ops.fp4rt.linear(x, *parts[:3], "linear", parts[3], False, None)
    if index == 4:
        return ft.quantize(x, scale.to("meta"))
    if index == 5:
        return torch.ops.fp4rt.dequantize(data, scales.to("meta"), scale, 64, "linear", torch.float32)
    if index == 6:
        return fp4rt.compat.vllm.scaled_fp4_quant(x, scale.to("meta"))
    data, scales, _ = ft.quantize(x.repeat(2, 1))
    of = scales.view(torch.float8_e4m3fn)
    return fp4rt.compat.vllm.cutlass_scaled_fp4_mm(data, data, of, of.to("meta"), torch.ones(1), torch.bfloat16)


@pytest.mark.parametrize("index", range(8))
def test_beside_a_tensor_on_meta_no_memory_that_nobody_wrote_comes_back(index: int) -> None:
    with pytest.raises(DeviceError, match="needs its tensors on one device, got cpu, meta"):
        call_with_one_on_meta(index)
