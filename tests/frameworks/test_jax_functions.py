"""``fp4rt.jax``: eager, under jit, through vmap and as pytrees, always the functions' bits."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp4rt  # noqa: E402
import fp4rt.jax as fj  # noqa: E402
from fp4rt.errors import DtypeError, LayoutError, ScaleError, ShapeError  # noqa: E402

LAYOUTS = ["linear", "128x4", "8x4"]


@pytest.fixture
def place(device: str) -> Any:
    """Puts an array on the device under test."""
    kind = "gpu" if device == "cuda" else "cpu"
    try:
        target = jax.devices(kind)[0]
    except RuntimeError as error:
        pytest.skip(f"needs a JAX with a {kind} backend: {error}")
    return lambda array: jax.device_put(array, target)


def matrix(m: int, n: int, dtype: Any = "float16", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, n)).astype(jnp.dtype(dtype))


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_tensor(q: Any, other: Any) -> bool:
    parts = all(same_bits(getattr(q, name), getattr(other, name)) for name in ("data", "scales", "global_scale"))
    return parts and (q.shape, q.layout, q.padded_n) == (other.shape, other.layout, other.padded_n)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "padded_n"), [(64, None), (50, 64)])
def test_quantize_is_the_functions_result_eager_and_under_jit(
    place: Any, layout: str, dtype: str, n: int, padded_n: int | None
) -> None:
    x = matrix(5, n, dtype)
    expected = fp4rt.quantize(x, layout=layout, padded_n=padded_n)

    def quantize(x: Any) -> Any:
        return fj.quantize(x, layout=layout, padded_n=padded_n)

    assert same_tensor(quantize(place(x)), expected)
    assert same_tensor(jax.jit(quantize)(place(x)), expected)


@pytest.mark.parametrize("scale", [3.5, np.float32(3.5), np.array([3.5], np.float32)])
def test_a_global_scale_can_be_a_number_or_an_array(place: Any, scale: Any) -> None:
    x = matrix(5, 64)
    expected = fp4rt.quantize(x, 3.5)
    given = jnp.asarray(scale) if isinstance(scale, np.ndarray) else scale
    assert same_tensor(jax.jit(lambda x: fj.quantize(x, given))(place(x)), expected)


def test_eager_functions_of_the_package_take_jax_arrays(place: Any, device: str) -> None:
    x = matrix(5, 64, "bfloat16")
    q = fp4rt.quantize(place(x))
    assert isinstance(q.data, jax.Array)
    assert {d.platform for d in q.data.devices()} == {"gpu" if device == "cuda" else "cpu"}
    assert same_tensor(q, fp4rt.quantize(x))
    assert same_bits(q.dequantize("bfloat16"), fp4rt.quantize(x).dequantize("bfloat16"))


def test_a_jitted_program_equals_eager(place: Any) -> None:
    w = fj.quantize(place(matrix(24, 64, seed=1)))
    bias = place(matrix(1, 24, seed=2)[0])

    def step(x: Any, w: Any) -> Any:
        q = fj.relayout(fj.quantize(x * 2), "8x4")
        d = fj.dequantize(q, jnp.float16)
        return fj.matmul(q, w, bias=bias), fj.matmul(d, w, out_dtype=jnp.float32, alpha=0.5), fj.global_scale(d)

    x = place(matrix(5, 64))
    for compiled, eager in zip(jax.jit(step)(x, w), step(x, w), strict=True):
        assert same_bits(compiled, eager)
    q = fp4rt.quantize(np.asarray(x) * 2)
    assert same_bits(step(x, w)[0], fp4rt.matmul(q, fp4rt.quantize(matrix(24, 64, seed=1)), bias=np.asarray(bias)))


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_relayout_keeps_every_byte(place: Any, layout: str, to: str) -> None:
    x = matrix(150, 50)
    q = fj.quantize(place(x), layout=layout, padded_n=80)
    assert same_tensor(jax.jit(lambda q: fj.relayout(q, to))(q), fp4rt.quantize(x, layout=to, padded_n=80))


def test_a_prepacked_weight_goes_into_jit(place: Any) -> None:
    x, w = place(matrix(5, 272)), fp4rt.quantize(place(matrix(24, 272, seed=1)))
    prepacked = fj.prepack(w)
    assert same_bits(jax.jit(fj.matmul)(x, prepacked), fp4rt.matmul(x, prepacked))


def test_what_is_printed_names_the_library(place: Any) -> None:
    q = fj.quantize(place(matrix(5, 64)))
    assert repr(q) == "QuantizedTensor(shape=(5, 64), layout='128x4', jax)"
    assert repr(fj.prepack(q)) == "PrepackedWeight(shape=(5, 64), version=2, jax)"
    seen = []
    jax.jit(lambda q: seen.append(repr(q)))(q)
    assert seen == [repr(q)]
    assert repr(fp4rt.quantize(matrix(5, 64))).endswith(", numpy)")


def test_prepacking_is_done_outside_jit(place: Any) -> None:
    w = fj.quantize(place(matrix(24, 64)))
    for call in (lambda: jax.jit(fj.prepack)(w), lambda: jax.eval_shape(fj.prepack, w)):
        with pytest.raises(DtypeError, match="prepack outside jit and pass the result in"):
            call()


def test_quantized_tensors_are_pytrees(place: Any) -> None:
    q = fj.quantize(place(matrix(5, 64)), padded_n=96, layout="8x4")
    leaves, tree = jax.tree_util.tree_flatten(q)
    assert [leaf.shape for leaf in leaves] == [(5, 48), (8, 8), (1,)]
    assert same_tensor(jax.tree_util.tree_unflatten(tree, leaves), q)
    assert same_tensor(jax.jit(lambda q: q)(q), q)


def test_leaves_of_quantized_tensors_have_names(place: Any) -> None:
    q = fj.quantize(place(matrix(16, 32)))
    paths = jax.tree_util.tree_leaves_with_path({"q": q, "w": fj.prepack(q)})
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    assert names[:3] == ["['q'].data", "['q'].scales", "['q'].global_scale"]
    assert names[3:] == ["['w'].data", "['w'].restored", "['w'].global_scale"]


def test_vmap_runs_matrix_by_matrix(place: Any) -> None:
    x = place(np.stack([matrix(5, 64, seed=s) for s in range(3)]))
    batched = jax.vmap(lambda x: fj.dequantize(fj.quantize(x)))(x)
    for index in range(3):
        assert same_bits(batched[index], fp4rt.quantize(np.asarray(x[index])).dequantize())


def test_tensors_that_vmap_stacked_are_refused_but_by_vmap(place: Any) -> None:
    """A pytree keeps the shape (5, 64) of one matrix, whatever is stacked in its arrays."""
    x = place(np.stack([matrix(5, 64, seed=s) for s in range(3)]))
    q, one = jax.vmap(fj.quantize)(x), fj.quantize(x[0])
    assert "shape=(5, 64)" in repr(q)
    on_host = jax.tree.map(np.asarray, q)
    for call in (
        q.dequantize,
        lambda: q.relayout("linear"),
        lambda: q.nbytes,
        lambda: fp4rt.prepack(q),
        lambda: fp4rt.matmul(one, q),
        lambda: fp4rt.matmul(q, one),
        lambda: fj.dequantize(q),
        lambda: fj.relayout(q, "linear"),
        lambda: jax.jit(fj.matmul)(one, q),
        on_host.dequantize,
        lambda: fp4rt.quantize(np.asarray(x[0]), out=on_host),
    ):
        with pytest.raises(ShapeError, match=r"needs data of shape \(5, 32\), got \(3, 5, 32\); .*jax\.vmap again"):
            call()
    assert same_bits(jax.vmap(fj.dequantize)(q)[2], fp4rt.quantize(np.asarray(x[2])).dequantize())
    weights = [fj.prepack(fj.quantize(matrix)) for matrix in x]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *weights)
    for call in (lambda: stacked.nbytes, stacked.unpack, lambda: fp4rt.matmul(x[0], stacked)):
        with pytest.raises(ShapeError, match=r"needs data of shape \(1, 1, 2304\), got \(3, 1, 1, 2304\)"):
            call()
    _, products = jax.lax.scan(lambda _, w: (None, fj.matmul(x[0], w)), None, stacked)
    assert same_bits(products[1], fp4rt.matmul(x[0], weights[1]))


def test_a_pytree_whose_arrays_were_exchanged_for_others_is_refused(place: Any) -> None:
    q = fj.quantize(place(matrix(5, 64)))
    cast = jax.tree.map(lambda part: part.astype(jnp.bfloat16), q)
    for call in (cast.dequantize, lambda: fj.dequantize(cast), lambda: jax.jit(fj.matmul)(q, cast)):
        with pytest.raises(DtypeError, match="needs data as uint8, got bfloat16"):
            call()
    with pytest.raises(ShapeError, match="needs data C-contiguous"):
        jax.tree.map(np.asfortranarray, q).dequantize()
    with pytest.raises(DtypeError, match="needs data as an array, got str"):
        fj.dequantize(jax.tree.map(lambda _: "part", q))


def test_an_empty_batch_has_empty_results(place: Any) -> None:
    q = jax.jit(fj.quantize)(place(matrix(0, 64)))
    assert (q.data.shape, q.scales.shape, float(q.global_scale[0])) == ((0, 32), (0, 4), 1.0)


def test_errors_come_while_tracing() -> None:
    with pytest.raises(ShapeError, match="padded_n=64"):
        jax.jit(fj.quantize)(jnp.ones((3, 50)))
    with pytest.raises(DtypeError, match="float16, bfloat16, float32, got int32"):
        jax.jit(fj.quantize)(jnp.ones((3, 64), jnp.int32))
    with pytest.raises(LayoutError, match="unknown scale layout"):
        fj.quantize(jnp.ones((3, 64)), layout="4x4")
    q = fj.quantize(jnp.ones((3, 64)))
    with pytest.raises(ShapeError, match="k = 32 and k = 64"):
        fj.matmul(jnp.ones((3, 32), jnp.float16), q)
    with pytest.raises(ShapeError, match=r"needs a with 2 dimensions \(m, k\)"):
        fj.matmul(jnp.ones((1, 3, 64), jnp.float16), q)
    with pytest.raises(ShapeError, match=r"bias of shape \(3,\)"):
        fj.matmul(q, q, bias=jnp.ones(4))
    with pytest.raises(DtypeError, match=r"float16, bfloat16, float32, got <class 'jax\.numpy\.int8'>"):
        fj.dequantize(q, jnp.int8)
    with pytest.raises(DtypeError, match=r"fp4rt\.jax"):
        jax.jit(lambda x: fp4rt.quantize(x))(jnp.ones((3, 64)))


def test_dtypes_of_a_product_are_checked_while_tracing() -> None:
    x, q = jnp.ones((3, 64), jnp.bfloat16), fj.quantize(jnp.ones((5, 64)))
    for b in (q, fj.prepack(q)):
        with pytest.raises(DtypeError, match="needs a as float16, bfloat16, got float32; cast it yourself"):
            jax.eval_shape(fj.matmul, x.astype(jnp.float32), b)
        with pytest.raises(DtypeError, match="needs bias as float16, bfloat16, float32, got int32"):
            jax.eval_shape(lambda b: fj.matmul(x, b, bias=jnp.ones(5, jnp.int32)), b)


def test_dtypes_are_spelled_as_for_the_functions_and_others_are_refused() -> None:
    x, q = jnp.ones((3, 64), jnp.bfloat16), fj.quantize(jnp.ones((5, 64)))
    torch = pytest.importorskip("torch")
    for dtype in ("fp16", "half", "f2", "<f2", np.float16, jnp.float16, np.dtype("float16"), torch.float16):
        assert fj.dequantize(q, dtype).dtype == fj.matmul(x, q, out_dtype=dtype).dtype == jnp.float16
    for dtype in ("zz", 5, None, "float64", np.float64, torch.int8, jnp.float8_e4m3fn):
        with pytest.raises(DtypeError, match="dequantize needs dtype as one of float16, bfloat16, float32, got"):
            fj.dequantize(q, dtype)
        with pytest.raises(DtypeError, match="matmul needs out_dtype as one of float16, bfloat16, float32, got"):
            fj.matmul(x, q, out_dtype=dtype)


def test_arrays_that_jax_does_not_take_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    x, q = jnp.ones((3, 64), jnp.bfloat16), fj.quantize(jnp.ones((5, 64)))
    for value, message in (
        (torch.ones(3, 64), r"an array of JAX or NumPy, got Tensor; jax\.numpy\.from_dlpack"),
        (np.ones((3, 64), ">f4"), "float16, bfloat16.*, got >f4; cast it yourself"),
    ):
        for call, name in (
            (lambda x: fj.quantize(x), "quantize needs x as"),
            (lambda x: fj.global_scale(x), "global_scale needs x as"),
            (lambda b: fj.matmul(x, q, bias=b[0]), "matmul needs bias as"),
        ):
            with pytest.raises(DtypeError, match=f"{name} {message}"):
                call(value)
    with pytest.raises(DtypeError, match="matmul needs a as an array of JAX or NumPy, got Tensor"):
        fj.matmul(torch.ones(3, 64, dtype=torch.float16), q)
    of_torch = fp4rt.quantize(torch.ones(3, 64))
    for call in (
        lambda: fj.dequantize(of_torch),
        lambda: fj.relayout(of_torch, "linear"),
        lambda: fj.matmul(x, of_torch),
        lambda: fj.matmul(x, fp4rt.prepack(of_torch)),
    ):
        with pytest.raises(DtypeError, match="needs each part as an array of JAX or NumPy, got Tensor"):
            call()


@pytest.mark.parametrize("scale", [-1.0, 0, float("nan"), 1e39, 10**400, np.float32("inf"), np.zeros(1, np.float32)])
def test_a_global_scale_known_while_tracing_must_be_finite_and_positive(scale: Any) -> None:
    for function in (fj.quantize, jax.jit(lambda x, _: fj.quantize(x, scale))):
        with pytest.raises(ScaleError, match="needs global_scale finite and positive"):
            function(jnp.ones((3, 64)), scale if function is fj.quantize else None)


@pytest.mark.parametrize("kind", [ShapeError, KeyboardInterrupt])
def test_an_error_inside_the_program_reaches_the_caller(kind: type[BaseException]) -> None:
    """An interrupt too, as an error of the program: without one XLA would take what is not written for its result."""
    from fp4rt.jax import ffi

    def fail(call: Any) -> None:
        raise kind("no such luck")

    target = f"test_failure_{kind.__name__}"
    ffi.register(target, fail)
    with pytest.raises(Exception, match=f"{kind.__name__}: no such luck"):
        ffi.call(target, jax.ShapeDtypeStruct((1,), jnp.float32), jnp.ones(3)).block_until_ready()


def test_what_is_no_operand_is_refused_while_tracing(place: Any) -> None:
    x, q = place(matrix(1, 48)), fj.quantize(place(matrix(1, 48)))
    prepacked = fj.prepack(q)
    for call in (lambda: fj.dequantize(prepacked), lambda: fj.relayout(prepacked, "8x4"), lambda: fj.dequantize(x)):
        with pytest.raises(DtypeError, match="needs q as a QuantizedTensor"):
            jax.jit(call)()
    for a, b, message in (
        (prepacked, q, "the weight is b"),
        (x, x, "needs b as a QuantizedTensor or the result of prepack"),
        ([1.0], q, "needs a as an array, got list"),
    ):
        with pytest.raises(DtypeError, match=message):
            fj.matmul(a, b)
    with pytest.raises(DtypeError, match="needs bias as an array, got list"):
        fj.matmul(x, q, bias=[1.0])
    with pytest.raises(DtypeError, match="alpha must be a number or a float32 array, got str"):
        fj.matmul(x, q, alpha="x")
    with pytest.raises(DtypeError, match="global_scale must be a number or a float32 array, got bool"):
        fj.quantize(x, True)
    with pytest.raises(DtypeError, match="needs x as an array, got list"):
        fj.quantize([1.0])
    parts = (prepacked.data, prepacked.restored, prepacked.global_scale, q.shape, q.layout, q.padded_n)
    with pytest.raises(LayoutError, match="layout version 1"):
        jax.jit(fj.matmul)(x, fp4rt.PrepackedWeight(*parts, 1))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize(
    ("dtype", "of_a", "of_b"),
    [
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "bfloat16", "float16"),
    ],
)
def test_gradients_reach_an_array_and_the_bias(
    place: Any, dtype: Any, of_a: str, of_b: str, alpha: float | None, prepacked: bool, jitted: bool
) -> None:
    q = fj.quantize(place(matrix(48, 40, "float32")), padded_n=48)
    weight = fj.prepack(q) if prepacked else q
    x, bias = place(matrix(6, 40, of_a, 1)), place(matrix(1, 48, of_b, 2)[0])

    def product(x: Any, bias: Any, weight: Any) -> Any:
        return fj.matmul(x, weight, out_dtype=dtype, alpha=alpha, bias=bias)

    call = jax.jit(product) if jitted else product
    y, pull_back = jax.vjp(lambda x, bias: call(x, bias, weight), x, bias)
    assert same_bits(y, product(x, bias, weight))
    assert all(leaf.shape != x.shape for leaf in jax.tree_util.tree_leaves(pull_back)), "x is kept"
    g = place(matrix(6, 48, dtype, 3))
    of_x, of_bias = pull_back(g)
    assert (str(of_x.dtype), str(of_bias.dtype)) == (of_a, of_b)
    factor = 1.0 if alpha is None else alpha * float(np.asarray(q.global_scale)[0])
    values = np.asarray(fj.dequantize(q), np.float64) * factor
    rows = np.asarray(g, np.float64)
    exact, size = rows @ values, np.abs(rows) @ np.abs(values)
    # The weight rounded to the result's dtype, fp32 sums of 48 products, rounded to bf16; fp32 values times the factor.
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
    u = rounding[dtype]
    bound = (u + 53 * 2.0**-24) * size * (1 + u) + rounding[of_a] * np.abs(exact) + 2.0**-24
    assert (np.abs(np.asarray(of_x, np.float64) - exact) <= bound).all()
    bound = 6 * 2.0**-24 * np.abs(rows).sum(0) + rounding[of_b] * np.abs(rows.sum(0))
    assert (np.abs(np.asarray(of_bias, np.float64) - rows.sum(0)) <= bound).all()


def test_a_gradient_overflows_no_fp16_before_alpha_is_applied(place: Any) -> None:
    values = np.full((48, 64), 6, np.float32)
    q, x = fj.quantize(place(values), 448.0), place(matrix(4, 64, "bfloat16"))  # codes 6, scales 448
    of_x = jax.grad(lambda x: fj.matmul(x, q, out_dtype="float16", alpha=1 / 1024).sum())(x)
    assert np.array_equal(np.asarray(of_x, np.float32), np.full((4, 64), 48 * 6 * 448 / 1024, np.float32))


def test_a_unit_gradient_gives_exactly_the_weight(place: Any) -> None:
    q = fj.quantize(place(matrix(48, 64, "float32")))
    _, pull_back = jax.vjp(lambda x: fj.matmul(x, q), place(matrix(48, 64, "bfloat16")))
    (of_x,) = pull_back(place(np.eye(48, dtype=jnp.bfloat16)))
    assert np.array_equal(of_x, fj.dequantize(q, "bfloat16"))


def test_gradients_that_a_product_has_not_are_refused(place: Any) -> None:
    q, x = fj.quantize(place(matrix(48, 64))), place(matrix(4, 64))

    def of_scale(scale: Any) -> Any:
        weight = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(q), (q.data, q.scales, scale))
        return fj.matmul(x, weight, out_dtype="float32").sum()

    def of_scale_of_a(scale: Any) -> Any:
        a = fj.quantize(x)
        a = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(a), (a.data, a.scales, scale))
        return fj.matmul(a, q, out_dtype="float32").sum()

    one = place(np.ones(1, np.float32))
    for function, at in (
        (of_scale, q.global_scale),
        (of_scale_of_a, one),
        (lambda a: fj.matmul(x, q, alpha=a).sum(), one),
    ):
        with pytest.raises(NotImplementedError, match="stop_gradient around alpha and global scales"):
            jax.grad(function)(at)
    bias = place(matrix(1, 48, "float32")[0])
    a = fj.quantize(x)
    ones = jax.grad(lambda bias: fj.matmul(a, q, out_dtype="float32", bias=bias).sum())(bias)
    assert same_bits(ones, np.full(48, 4, np.float32))


def test_gradients_go_through_vmap_and_checkpoint(place: Any) -> None:
    q, x = fj.quantize(place(matrix(48, 64))), place(matrix(4, 64, "bfloat16"))

    def total(x: Any) -> Any:
        return fj.matmul(x, q, out_dtype="float32").sum()

    one = jax.grad(total)(x)
    assert same_bits(jax.grad(jax.checkpoint(total))(x), one)
    assert same_bits(jax.vmap(jax.grad(total))(jnp.stack([x, 2 * x]))[1], one)


ENDING = """
import sys, threading, jax, jax.numpy as jnp, fp4rt.jax
kind, how = sys.argv[1:]
with jax.default_device(jax.devices(kind)[0]):
    w = fp4rt.jax.quantize(jnp.ones((512, 1024), jnp.float32))
    x = jnp.ones((20, 64, 1024), jnp.bfloat16)
    products = jax.jit(jax.vmap(lambda x: fp4rt.jax.matmul(x, w)))
    if how == "dropped": products(x)
    if how == "thread":
        thread = threading.Thread(target=products, args=(x,))
        thread.start(), thread.join()
    if how == "pmap": y = jax.pmap(products, devices=jax.devices(kind))(jnp.stack([x] * len(jax.devices(kind))))
print("over")
"""


@pytest.mark.parametrize("how", ["dropped", "thread", "pmap"])
def test_an_interpreter_ends_while_nobody_waits_for_a_program(place: Any, device: str, how: str) -> None:
    kind = "gpu" if device == "cuda" else "cpu"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", ENDING, kind, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert (done.stdout, "Traceback" in done.stderr) == ("over\n", False)


def test_no_rows_on_the_host_stay_there_also_while_a_function_is_traced() -> None:
    host = jax.local_devices(backend="cpu")[0]
    empty = jax.device_put(jnp.zeros((0, 64), jnp.float32), host)
    found = []

    def traced(x: Any) -> Any:
        found.append(fp4rt.quantize(empty).data)
        return x

    jax.jit(traced)(1.0)
    assert found[0].shape == (0, 32)
    assert found[0].devices() == {host}


def test_stacks_of_quantized_tensors_can_be_pickled_and_copied() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 64), np.float32))
    stacked = jax.vmap(fj.quantize)(x)
    for again in (pickle.loads(pickle.dumps(stacked)), copy.deepcopy(stacked)):
        alone = jax.vmap(fj.dequantize)(again)
        assert (alone == jax.vmap(fj.dequantize)(stacked)).all()


def test_a_compiled_program_has_subnormal_numbers_too() -> None:
    """XLA runs it with subnormals flushed, on the host."""
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.asarray((np.arange(1, 65) * 1e36).astype(np.float32).reshape(1, 64))
        scale = jnp.asarray(np.array([1784060], np.uint32).view(np.float32))  # 2.5e-39
        a = jnp.asarray(np.full((1, 64), 11, np.uint16).view(ml_dtypes.bfloat16))  # 1e-39
        weight = fp4rt.quantize(np.full((5, 64), 1000, np.float32))
        wanted, q = fp4rt.matmul(a, weight, out_dtype="float32"), fp4rt.quantize(x, scale)
        assert wanted.min() > 0
        weight = fp4rt.QuantizedTensor(
            *map(jnp.asarray, (weight.data, weight.scales, weight.global_scale)), (5, 64), "128x4"
        )
        product = jax.jit(lambda a, b: fj.matmul(a, b, out_dtype=jnp.float32))(a, weight)
        np.testing.assert_array_equal(product, wanted)
        found = jax.jit(fj.quantize)(x, scale)
        fixed = jax.jit(lambda x: fj.quantize(x, 2.5e-39))(x)
    for got in (found, fixed):
        np.testing.assert_array_equal(got.data, q.data)
        np.testing.assert_array_equal(got.scales, q.scales)
        assert np.asarray(got.global_scale).view(np.uint32)[0] == 1784060
