"""fp4rt in JAX: the functions under ``jit``, and quantized tensors as pytrees.

``fp4rt.quantize`` and the other functions take concrete JAX arrays as they are. The ones here also work while JAX
traces: they are calls into this library from the compiled program (XLA's foreign function interface), on XLA's own
memory and stream, on the host and on CUDA devices alike. Importing the module registers ``QuantizedTensor`` and
``PrepackedWeight`` as pytrees, so that they go in and out of ``jit``::

    import fp4rt.jax
    w = fp4rt.jax.quantize(weight)
    step = jax.jit(lambda x, w: fp4rt.jax.matmul(x, w))

Gradients go through ``matmul`` to a 16-bit a and to bias, in reverse mode, inside ``shard_map`` with
``check_vma=False``; ``quantize`` has none. What is trained lies in a pytree of its own, beside the quantized weights::

    jax.grad(lambda adapters, weights, x: loss(adapters, weights, x))(adapters, weights, x)
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"fp4rt.jax needs JAX ({error}); pip install 'fp4rt[jax]'", name="jax") from None
import numpy as np

from fp4rt import api, fp32
from fp4rt.arguments import (
    ACTIVATION_DTYPES,
    check_dtype,
    check_is_no_weight,
    check_is_quantized,
    check_is_weight,
    check_positive,
    number_as_fp32,
)
from fp4rt.errors import DtypeError, ShapeError
from fp4rt.format import BLOCK, INPUT_DTYPES
from fp4rt.interop import cuda_driver, view
from fp4rt.jax import ffi
from fp4rt.layout import block_columns, ceil_div, data_shape, get_layout
from fp4rt.prepacked import PrepackedWeight, check_version
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_matrix_shape, check_padded_n

__all__ = ["dequantize", "global_scale", "matmul", "prepack", "quantize", "relayout"]


def quantize(
    x: Any, global_scale: Any = None, *, layout: str = "128x4", padded_n: int | None = None
) -> QuantizedTensor:
    """:func:`fp4rt.quantize` for arrays and tracers.

    Args:
        x: (m, n) float16, bfloat16 or float32.
        global_scale: the encode scale: a number or a one-element fp32 array; None computes it.
        layout: "128x4", "linear" or "8x4".
        padded_n: columns in memory, a multiple of 16.

    Raises:
        ShapeError, DtypeError, LayoutError: as :func:`fp4rt.quantize` does, while tracing.
        ScaleError: a global scale that is known while tracing is not finite and positive; others fail as they run.
    """
    m, n = _check_matrix("quantize", x)
    known = get_layout(layout)
    padded_n = check_padded_n("quantize", (m, n), padded_n)
    results: Any = [
        jax.ShapeDtypeStruct(data_shape(m, padded_n), jnp.uint8),
        jax.ShapeDtypeStruct(known.shape(m, block_columns(padded_n)), jnp.uint8),
        jax.ShapeDtypeStruct((1,), jnp.float32),
    ]
    arguments = [x] if global_scale is None else [x, _check_global_scale(global_scale)]
    data, scales, scale = ffi.call("quantize", results, *arguments, n=n, layout=known.name, padded_n=padded_n)
    return QuantizedTensor.trusted(data, scales, scale, (m, n), known.name, padded_n)


def dequantize(q: QuantizedTensor, dtype: Any = jnp.float32) -> Any:
    """:func:`fp4rt.dequantize` for arrays and tracers: (m, n) in ``dtype``."""
    check_is_quantized("dequantize", "q", q)
    result = jax.ShapeDtypeStruct(q.shape, _dtype("dequantize", "dtype", dtype))
    return ffi.call("dequantize", result, *_checked_parts(q), **_settings(q))


def relayout(q: QuantizedTensor, layout: str) -> QuantizedTensor:
    """:func:`fp4rt.relayout` for arrays and tracers, as plain JAX operations."""
    check_is_quantized("relayout", "q", q)
    _checked_parts(q)
    known, before = get_layout(layout), get_layout(q.layout)
    m, n = q.shape
    columns, valid = block_columns(q.padded_n), ceil_div(n, BLOCK)
    rows, cols = jnp.arange(m)[:, None], jnp.arange(valid)[None, :]
    scales = q.scales.reshape(-1)[before.offset(rows, cols, columns)]
    moved = jnp.zeros(known.nbytes(m, columns), jnp.uint8).at[known.offset(rows, cols, columns)].set(scales)
    moved = moved.reshape(known.shape(m, columns))
    return QuantizedTensor.trusted(q.data, moved, q.global_scale, q.shape, known.name, q.padded_n)


def global_scale(x: Any) -> Any:
    """:func:`fp4rt.global_scale` for arrays and tracers: fp32 (1,)."""
    _check_matrix("global_scale", x)
    return ffi.call("global_scale", jax.ShapeDtypeStruct((1,), jnp.float32), x)


def matmul(
    a: Any, b: QuantizedTensor | PrepackedWeight, *, out_dtype: Any = jnp.bfloat16, alpha: Any = None, bias: Any = None
) -> Any:
    """:func:`fp4rt.matmul` for arrays and tracers: (m, n) = alpha * a @ b.T + bias.

    Args:
        a: QuantizedTensor (m, k), or a float16/bfloat16 array (m, k).
        b: QuantizedTensor (n, k), or the result of :func:`prepack`.
        out_dtype: float16, bfloat16 or float32.
        alpha: a number or a one-element fp32 array, in the place of the operands' global scales, which then do not
            count; None means 1 / (their product), and so the product of the values.
        bias: (n,).

    Differentiable (in reverse mode) in an array a and in bias; b, quantized, stays as it is. The gradient of a is the
    product with b rounded to ``out_dtype``.

    Raises:
        ShapeError, DtypeError, LayoutError: as :func:`fp4rt.matmul` does, while tracing.
        NotImplementedError: a gradient of alpha or of a global scale is asked for.
    """
    check_is_no_weight(a)
    check_is_weight(b)
    if isinstance(b, PrepackedWeight):
        check_version(b)
    dense = not isinstance(a, QuantizedTensor)
    _, k = _check_matrix("matmul", a, "a", ACTIVATION_DTYPES, "k") if dense else a.shape
    n, k_of_b = b.shape
    if k != k_of_b:
        raise ShapeError(f"matmul needs a (m, k) and b (n, k) with one k, got k = {k} and k = {k_of_b}")
    if bias is not None:
        _check_array("matmul", "bias", bias, INPUT_DTYPES)
        if tuple(bias.shape) != (n,):
            raise ShapeError(f"matmul needs bias of shape ({n},), got {tuple(bias.shape)}")
    for operand in (b,) if dense else (a, b):
        _checked_parts(operand)
    alpha = None if alpha is None else _scalar("alpha", alpha)
    dtype = _dtype("matmul", "out_dtype", out_dtype)
    if not any(isinstance(part, jax.core.Tracer) for part in jax.tree_util.tree_leaves((a, b, alpha, bias))):
        return _call_matmul(dtype, a, b, alpha, bias)
    return _product(dtype, a if dense else _constant(a), _constant(b), _constant(alpha), bias)


def _call_matmul(dtype: Any, a: Any, b: Any, alpha: Any, bias: Any) -> Any:
    dense = not isinstance(a, QuantizedTensor)
    settings = {
        "a": None if dense else _settings(a),
        "b": _weight_settings(b),
        "alpha": alpha is not None,
        "bias": bias is not None,
    }
    optional = [value for value in (alpha, bias) if value is not None]
    arguments = [*([a] if dense else _parts(a)), *_parts(b), *optional]
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), dtype)
    return ffi.call("matmul", result, *arguments, **settings)


# ---- gradients


@jax.custom_vjp
def _constant(value: Any) -> Any:
    """The same arrays, of which nobody gets a gradient."""
    return value


def _refuse_gradient(_: Any, __: Any) -> Any:
    raise NotImplementedError(
        "matmul has gradients of an array a and of bias alone; put jax.lax.stop_gradient around alpha and global scales"
    )


_constant.defvjp(lambda value: (value, None), _refuse_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: Any, a: Any, b: Any, alpha: Any, bias: Any) -> Any:
    return _call_matmul(dtype, a, b, alpha, bias)


def _product_forward(dtype: Any, a: Any, b: Any, alpha: Any, bias: Any) -> Any:
    arrays = [None if value is None or isinstance(value, QuantizedTensor) else value for value in (a, bias)]
    like = [None if value is None else jnp.empty((0,), value.dtype) for value in arrays]  # dtypes, as JAX keeps them
    return _product(dtype, a, b, alpha, bias), (b, alpha, like)


def _product_backward(_: Any, kept: Any, y: Any) -> Any:
    b, alpha, (like_a, like_bias) = kept
    if alpha is not None:  # it stands for the global scales
        data, scales, scale = _parts(b)
        b = type(b).trusted(data, scales, jnp.ones_like(scale), b.shape, b.layout, b.padded_n)
    of_a = None
    if like_a is not None:
        weight = ffi.call("values", jax.ShapeDtypeStruct(b.shape, y.dtype), *_parts(b), **_weight_settings(b))
        product = jnp.matmul(y, weight, precision="highest", preferred_element_type=jnp.float32)
        of_a = (product if alpha is None else product * alpha).astype(like_a.dtype)
    of_bias = None if like_bias is None else y.sum(0, dtype=jnp.float32).astype(like_bias.dtype)
    return of_a, None, None, of_bias


_product.defvjp(_product_forward, _product_backward)


def prepack(b: QuantizedTensor) -> PrepackedWeight:
    """:func:`fp4rt.prepack`; not under ``jit``: how many blocks it keeps aside depends on their values.

    Raises:
        DtypeError: b is no QuantizedTensor, or is being traced.
    """
    check_is_quantized("prepack", "b", b)
    if any(isinstance(part, jax.core.Tracer) for part in _checked_parts(b)):
        raise DtypeError(
            "prepack needs b with values, got one that JAX is tracing: how many blocks it keeps aside depends on them; "
            "prepack outside jit and pass the result in"
        )
    return api.prepack(b)


# ---- what runs inside the compiled program


def _run_quantize(call: ffi.Call) -> None:
    s = call.settings
    x, *scale = call.arguments
    data, scales, global_scale = call.results
    out = QuantizedTensor.trusted(data, scales, global_scale, tuple(x.shape), s["layout"], s["padded_n"])
    api.quantize(
        x, scale[0] if scale else None, layout=s["layout"], padded_n=s["padded_n"], out=out, stream=call.stream
    )


def _run_dequantize(call: ffi.Call) -> None:
    q, _ = _rebuild(call.arguments, call.settings)
    api.dequantize(q, call.results[0].dtype, out=call.results[0], stream=call.stream)


def _run_values(call: ffi.Call) -> None:
    b, _ = _rebuild(call.arguments, call.settings)
    api.weight_values(b, call.results[0], stream=call.stream)


def _run_global_scale(call: ffi.Call) -> None:
    scale = view(api.global_scale(call.arguments[0], stream=call.stream), "global_scale")  # made on that stream
    out = call.results[0]
    if call.stream is None:
        out.bits()[...] = scale.bits()
    else:
        with cuda_driver.on_device(out.device.index) as driver:
            driver.copy(out.pointer, scale.pointer, out.nbytes, call.stream)


def _run_matmul(call: ffi.Call) -> None:
    s, arguments = call.settings, call.arguments
    a: Any
    if s["a"] is None:
        a, arguments = arguments[0], arguments[1:]
    else:
        a, arguments = _rebuild(arguments, s["a"])
    b, arguments = _rebuild(arguments, s["b"])
    alpha, arguments = (arguments[0], arguments[1:]) if s["alpha"] else (None, arguments)
    bias = arguments[0] if s["bias"] else None
    out = call.results[0]
    api.matmul(a, b, out_dtype=out.dtype, alpha=alpha, bias=bias, out=out, stream=call.stream)


def _rebuild(arguments: list[Any], settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The quantized or prepacked tensor in front of ``arguments``, and the rest of them."""
    data, scales, scale, *rest = arguments
    shape = (settings.get("rows", data.shape[0]), settings["n"])
    make: Any = PrepackedWeight.trusted if settings.get("prepacked") else QuantizedTensor.trusted
    return make(data, scales, scale, shape, settings["layout"], settings["padded_n"]), rest


# ---- checks and pytrees


def _check_array(function: str, name: str, x: Any, dtypes: tuple[str, ...]) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise DtypeError(f"{function} needs {name} as an array, got {type(x).__name__}")
    _check_library(f"{function} needs {name}", x)
    if str(x.dtype) not in dtypes:
        raise DtypeError(f"{function} needs {name} as {', '.join(dtypes)}, got {x.dtype}; cast it yourself")


def _dtype(function: str, name: str, dtype: Any) -> Any:
    """A dtype in JAX's spellings or in those of :func:`fp4rt.dequantize`."""
    if isinstance(dtype, str):
        with suppress(TypeError):  # it may be one of fp4rt's
            dtype = jnp.dtype(dtype).name
    return jnp.dtype(check_dtype(function, name, dtype))


def _check_library(what: str, x: Any) -> None:
    if not (isinstance(x, (jax.Array, np.ndarray)) or hasattr(x, "__jax_array__")):
        raise DtypeError(
            f"{what} as an array of JAX or NumPy, got {type(x).__name__}; jax.numpy.from_dlpack makes one of it"
        )


def _check_matrix(
    function: str, x: Any, name: str = "x", dtypes: tuple[str, ...] = INPUT_DTYPES, columns: str = "n"
) -> tuple[int, int]:
    _check_array(function, name, x, dtypes)
    return check_matrix_shape(x.shape, f"{function} needs {name}", columns)


def _check_global_scale(value: Any) -> Any:
    scale = _scalar("global_scale", value)
    if isinstance(value, np.ndarray):
        number: float | None = fp32.number_of(int(value.view(np.uint32).item()))
    else:
        number = number_as_fp32(value)
    if number is not None:  # known while tracing
        check_positive("quantize", number)
    return scale


def _scalar(name: str, value: Any) -> Any:
    number = number_as_fp32(value)
    if number is not None:
        return jnp.asarray(np.array([fp32.bits_of(number)], np.uint32).view(np.float32))
    if not hasattr(value, "dtype"):
        raise DtypeError(f"{name} must be a number or a float32 array, got {type(value).__name__}")
    if value.dtype != jnp.float32:
        raise DtypeError(f"{name} must be a number or a float32 array, got {value.dtype}")
    if value.size != 1:
        raise ShapeError(f"{name} must have one element, got shape {tuple(value.shape)}")
    return value.reshape(1)


def _parts(q: QuantizedTensor | PrepackedWeight) -> tuple[Any, Any, Any]:
    return q.data, (q.restored if isinstance(q, PrepackedWeight) else q.scales), q.global_scale


def _checked_parts(q: QuantizedTensor | PrepackedWeight) -> tuple[Any, Any, Any]:
    """The arrays, which as those of a pytree may be any."""
    q.check_parts()
    for part in _parts(q):
        _check_library(f"{type(q).__name__} needs each part", part)
    return _parts(q)


def _settings(q: QuantizedTensor | PrepackedWeight) -> dict[str, Any]:
    return {"n": q.shape[1], "layout": q.layout, "padded_n": q.padded_n}


def _weight_settings(b: QuantizedTensor | PrepackedWeight) -> dict[str, Any]:
    return {**_settings(b), "rows": b.shape[0], "prepacked": isinstance(b, PrepackedWeight)}


def _flatten(q: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    version = (q.version,) if isinstance(q, PrepackedWeight) else ()
    return _parts(q), (q.shape, q.layout, q.padded_n, *version)


def _flatten_with_names(q: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    second = "restored" if isinstance(q, PrepackedWeight) else "scales"
    parts, settings = _flatten(q)
    names = map(jax.tree_util.GetAttrKey, ("data", second, "global_scale"))
    return tuple(zip(names, parts, strict=True)), settings


for _kind, _make in ((QuantizedTensor, QuantizedTensor.unchecked), (PrepackedWeight, PrepackedWeight.unchecked)):
    jax.tree_util.register_pytree_with_keys(
        _kind, _flatten_with_names, lambda settings, parts, make=_make: make(*parts, *settings), _flatten
    )
for _name, _function in (
    ("quantize", _run_quantize),
    ("dequantize", _run_dequantize),
    ("global_scale", _run_global_scale),
    ("matmul", _run_matmul),
    ("values", _run_values),
):
    ffi.register(_name, _function)
