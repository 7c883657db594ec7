"""Gradients through NVFP4 layers: of x and the bias, while the weight stays as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fp4rt  # noqa: E402
from fp4rt.api import weight_values  # noqa: E402
from fp4rt.errors import DtypeError  # noqa: E402
from fp4rt.torch import NVFP4Linear  # noqa: E402

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
OUT = 48


def layer_and_batch(
    device: str, dtype: Any = torch.bfloat16, in_features: int = 64, mode: Any = "w4a16", prepacked: bool = False
) -> tuple[Any, Any]:
    torch.manual_seed(3)
    layer = NVFP4Linear.from_linear(torch.nn.Linear(in_features, OUT, dtype=dtype, device=device), mode)
    layer.bias.requires_grad_(True)
    if prepacked:
        layer.prepack()
    return layer, torch.randn(3, 5, in_features, dtype=dtype, device=device).requires_grad_(True)


def weight_of(layer: Any, dtype: Any) -> Any:
    return torch.as_tensor(fp4rt.dequantize(layer.weight(), dtype))


@pytest.fixture(autouse=True)
def sums_in_fp32() -> Iterator[None]:
    """cuBLAS may else add parts of a sum in 16 bits."""
    cublas, names = torch.backends.cuda.matmul, [f"allow_{t}_reduced_precision_reduction" for t in ("bf16", "fp16")]
    before = [getattr(cublas, name) for name in names]
    for name in names:
        setattr(cublas, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(cublas, name, value)


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("in_features", [64, 40])
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("w4a16", torch.bfloat16),
        ("w4a16", torch.float16),
        ("w4a4", torch.bfloat16),
        ("w4a4", torch.float16),
        ("w4a4", torch.float32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_gradients_lie_within_the_derived_bound(
    device: str, mode: str, dtype: Any, in_features: int, prepacked: bool
) -> None:
    layer, x = layer_and_batch(device, dtype, in_features, mode, prepacked)
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    assert (x.grad.dtype, layer.bias.grad.dtype) == (dtype, dtype)
    weight, u = weight_of(layer, "float32").double(), ROUNDING[dtype]
    exact, size = g.double() @ weight, g.double().abs() @ weight.abs()
    # The weight rounded to x's dtype, fp32 sums of OUT products, the result rounded.
    bound = (u + (OUT + 2) * 2.0**-24) * size * (1 + u) + u * exact.abs() + 2.0**-24
    assert ((x.grad.double() - exact).abs() <= bound).all()
    rows = g.double().reshape(-1, OUT)
    bound = rows.shape[0] * 2.0**-24 * rows.abs().sum(0) + u * rows.sum(0).abs() + 2.0**-24
    assert ((layer.bias.grad.double() - rows.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("prepacked", [False, True])
def test_a_unit_gradient_gives_exactly_the_weight(device: str, prepacked: bool) -> None:
    layer, _ = layer_and_batch(device, in_features=40, prepacked=prepacked)
    x = torch.zeros(OUT, 40, dtype=torch.bfloat16, device=device, requires_grad=True)
    layer(x).backward(torch.eye(OUT, dtype=torch.bfloat16, device=device))
    assert torch.equal(x.grad, weight_of(layer, "bfloat16"))


def test_only_what_wants_a_gradient_has_one_and_x_is_not_kept(device: str) -> None:
    layer, x = layer_and_batch(device)
    layer.bias.requires_grad_(False)
    rows = x.detach().reshape(15, 64).requires_grad_(True)
    y = layer(rows)
    assert all(kept is None or kept.data_ptr() != rows.data_ptr() for kept in y.grad_fn.saved_tensors)
    y.sum().backward()
    assert layer.bias.grad is None
    assert rows.grad is not None
    layer.bias.requires_grad_(True)
    layer(rows.detach()).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((OUT,), 15.0, dtype=torch.bfloat16, device=device))
    with torch.no_grad():
        assert not layer(rows).requires_grad
    inner = rows * 2
    kept = weakref.ref(inner)
    y = layer(inner)
    del inner
    gc.collect()
    assert kept() is None
    y.sum().backward()


def test_a_bias_of_another_dtype_has_its_gradient_in_fp32(device: str) -> None:
    layer, _ = layer_and_batch(device)
    layer.bias = torch.nn.Parameter(torch.zeros(OUT, device=device))
    y = layer(torch.zeros(1000, 64, dtype=torch.bfloat16, device=device))
    g = torch.randn(1000, OUT, device=device).bfloat16()
    y.backward(g)
    exact = g.double().sum(0)
    assert ((layer.bias.grad.double() - exact).abs() <= 1000 * 2.0**-24 * g.double().abs().sum(0)).all()


def test_a_scale_that_wants_a_gradient_is_refused(device: str) -> None:
    source = torch.nn.Linear(64, OUT, dtype=torch.bfloat16, device=device)
    layer = NVFP4Linear.from_linear(source, mode="w4a4", input_global_scale=100.0)
    x = torch.randn(4, 64, dtype=torch.bfloat16, device=device)
    layer(x)
    for name, argument in (("input_global_scale", "input_global_scale"), ("weight_global_scale", "global_scale")):
        getattr(layer, name).requires_grad_(True)
        y = layer(x)
        with pytest.raises(NotImplementedError, match=f"has no gradient for {argument};"):
            y.sum().backward()
        getattr(layer, name).requires_grad_(False)


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_a_compiled_layer_has_the_same_gradients(device: str, mode: str, prepacked: bool) -> None:
    torch._dynamo.reset()
    layer, x = layer_and_batch(device, mode=mode, prepacked=prepacked)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for call in (layer, compiled):
        x.grad = layer.bias.grad = None
        call(x).float().square().sum().backward()
        found.append((x.grad, layer.bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_checkpointing_and_second_derivatives(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = layer_and_batch(device)
    layer(x).sum().backward()
    first, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, first)
    y = layer(x)
    g, v = torch.randn_like(y).requires_grad_(True), torch.randn_like(x)
    (of_x,) = torch.autograd.grad(y, x, g, create_graph=True)
    (of_g,) = torch.autograd.grad(of_x, g, v)
    assert torch.equal(of_g, v @ weight_of(layer, "bfloat16").t())


def test_torch_func_differentiates_a_layer(device: str) -> None:
    layer, x = layer_and_batch(device)
    x = x.detach()[0]
    weight = weight_of(layer, "bfloat16")
    ones = torch.ones(5, OUT, dtype=torch.bfloat16, device=device)
    assert torch.equal(torch.func.grad(lambda x: layer(x).sum())(x), ones @ weight)
    _, pullback = torch.func.vjp(layer, x)
    assert torch.equal(pullback(2 * ones)[0], (2 * ones) @ weight)
    layer.bias.requires_grad_(False)

    def energy(product: Any) -> Any:
        return lambda x: product(x).float().square().sum()

    def dense(x: Any) -> Any:
        return torch.nn.functional.linear(x, weight, layer.bias)

    both = energy(layer), energy(dense)
    second = [torch.func.grad(lambda x, one=one: torch.func.grad(one)(x).float().sum())(x) for one in both]
    assert second[1].abs().sum() > 0
    largest = second[1].abs().max()
    assert (second[0] - second[1]).abs().max() <= 2.0**-6 * largest  # each rounds its two products to bf16
    outer = x.clone().requires_grad_()
    assert torch.func.grad(both[0])(outer).requires_grad
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.hessian(both[0])(x)


def test_forward_mode_is_refused_and_not_zero(device: str) -> None:
    from torch.autograd import forward_ad

    layer, x = layer_and_batch(device)
    x = x.detach()
    for differentiate in (torch.func.jacfwd(layer), lambda x: torch.func.jvp(layer, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="fp4rt::linear(_prepacked)? has no forward-mode derivative"):
            differentiate(x)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(forward_ad.make_dual(x, x))
        assert torch.equal(layer(x), layer(x.clone()))  # without a tangent it is a product as ever


def test_under_autocast_gradients_have_the_dtype_of_x(device: str) -> None:
    layer, _ = layer_and_batch(device)
    x = torch.randn(4, 64, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    ones = torch.ones(4, OUT, dtype=torch.bfloat16, device=device)
    assert torch.equal(x.grad, (ones @ weight_of(layer, "bfloat16")).float())


@pytest.mark.parametrize("change", ["prepack", "unpack", "call"])
def test_a_layer_whose_form_changed_in_inference_mode_can_be_trained_through(device: str, change: str) -> None:
    layer, x = layer_and_batch(device, prepacked=change == "unpack")
    with torch.inference_mode():
        layer(x.detach()) if change == "call" else getattr(layer, change)()
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("prepacked", [False, True])
def test_a_graph_recorded_outside_is_differentiated_inside_torch_func(device: str, prepacked: bool) -> None:
    layer, x = layer_and_batch(device, prepacked=prepacked)
    y, weight = layer(x), weight_of(layer, "bfloat16")
    gradient = torch.randn_like(y)

    def energy(gradient: Any) -> Any:
        (of_x,) = torch.autograd.grad(y, x, gradient, retain_graph=True, create_graph=True)
        return of_x.float().sum()

    found = torch.func.grad(energy)(gradient)
    assert torch.equal(found, torch.ones_like(x) @ weight.t())


@pytest.mark.parametrize("prepacked", [False, True])
def test_a_dispatch_mode_sees_both_passes(device: str, prepacked: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    layer, x = layer_and_batch(device, prepacked=prepacked)
    layer(x).sum().backward()
    first, x.grad = x.grad, None
    with Watch():
        layer(x).sum().backward()
    assert torch.equal(x.grad, first)
    form = "_prepacked" if layer.prepacked_data is not None else ""  # on a GPU the first call repacks
    assert {f"fp4rt::linear{form}", f"fp4rt::dequantize{form}"} <= set(seen)


def test_compiled_autograd_takes_a_layer(device: str) -> None:
    layer, x = layer_and_batch(device)
    layer(x).sum().backward()
    first, x.grad = x.grad, None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        layer(x).sum().backward()
    assert torch.equal(x.grad, first)


@pytest.mark.gpu
def test_forward_and_backward_go_into_a_cuda_graph() -> None:
    layer, x = layer_and_batch("cuda", prepacked=True)
    layer(x).sum().backward()
    expected = x.grad.clone()
    captured = torch.cuda.make_graphed_callables(layer, (torch.zeros_like(x).requires_grad_(True),))
    for _ in range(2):
        x.grad = None
        captured(x).sum().backward()
        assert torch.equal(x.grad, expected)


def test_a_result_is_not_written_into_what_records_gradients(device: str) -> None:
    q = fp4rt.quantize(torch.randn(8, 16, device=device))
    leaf = torch.zeros(8, 16, device=device, requires_grad=True)
    for out in (leaf, leaf * 2):
        with pytest.raises(DtypeError, match=r"wants no gradient.*\.detach"):
            fp4rt.dequantize(q, out=out)
    with torch.no_grad():
        fp4rt.dequantize(q, out=leaf)
    assert torch.equal(leaf.detach(), fp4rt.dequantize(q))
    fp4rt.dequantize(q, out=leaf.detach())


def written_by(function: str, device: str) -> tuple[Any, Any]:
    """(a tensor that a call writes to, the call)."""
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    q, out = fp4rt.quantize(x), torch.zeros(16, 32, device=device)
    to = fp4rt.quantize(x, layout="linear")
    square = torch.zeros(16, 16, device=device)
    return {
        "dequantize": (out, lambda: fp4rt.dequantize(q, out=out)),
        "matmul": (square, lambda: fp4rt.matmul(x, q, out_dtype="float32", out=square)),
        "weight_values": (out, lambda: weight_values(fp4rt.prepack(q), out)),
        "relayout": (to.scales, lambda: fp4rt.relayout(q, "linear", out=to)),
        "quantize, codes": (to.data, lambda: fp4rt.quantize(x, layout="linear", out=to)),
        "quantize, global scale": (to.global_scale, lambda: fp4rt.quantize(x, layout="linear", out=to)),
    }[function]


@pytest.mark.parametrize("function", ["dequantize", "matmul", "weight_values", "quantize, global scale"])
def test_a_backward_pass_refuses_what_was_written_to_after_it_was_saved(function: str, device: str) -> None:
    written, call = written_by(function, device)
    loss = (torch.ones((), device=device, requires_grad=True) * written).sum()
    loss.backward(retain_graph=True)
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("function", ["relayout", "quantize, codes"])
def test_a_write_to_codes_and_scales_is_counted(function: str, device: str) -> None:
    written, call = written_by(function, device)
    before = written._version
    call()
    assert written._version > before


def test_writes_in_inference_mode_are_not_counted(device: str) -> None:
    with torch.inference_mode():
        written, call = written_by("dequantize", device)
        call()
    assert written.is_inference()
    assert written.any()


def test_a_weight_quantized_anew_between_the_passes_is_noticed(device: str) -> None:
    weight = fp4rt.quantize(torch.randn(OUT, 64, device=device), layout="linear")
    parts = (weight.data, weight.scales, weight.global_scale, weight.layout)
    x = torch.randn(5, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    loss = torch.ops.fp4rt.linear(x, *parts, None, False, None).sum()
    loss.backward(retain_graph=True)
    fp4rt.quantize(torch.randn(OUT, 64, device=device), layout="linear", out=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_global_scale_that_wants_a_gradient_is_not_written_to(device: str) -> None:
    q = fp4rt.quantize(torch.ones(4, 64, device=device))
    scale = torch.ones(1, device=device, requires_grad=True)
    out = fp4rt.QuantizedTensor(q.data, q.scales, scale, q.shape, q.layout)
    with pytest.raises(DtypeError, match=r"out\.global_scale that wants no gradient"):
        fp4rt.quantize(torch.ones(4, 64, device=device), out=out)
    assert scale.item() == 1
