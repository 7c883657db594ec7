"""The functions as PyTorch operators, ``torch.ops.fp4rt.*``, with fake implementations for ``torch.compile``.

An operator takes and returns plain tensors: a quantized tensor is (data, scales, global_scale) with its columns n and
its layout beside it. Results are torch's own memory, so that torch's allocator, its graphs and its memory planning see
them; the kernels write every byte of it.

``linear`` and ``linear_prepacked`` are differentiable in x and bias, the quantized weight being fixed; quantizing x
there counts as the identity (straight-through). A backward pass through any other operator raises.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fp4rt import api
from fp4rt.errors import ShapeError
from fp4rt.layout import block_columns, data_shape, get_layout
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_matrix_shape, check_padded_n
from fp4rt.torch.dispatch import cast_by_autocast, define, fake

__all__ = [
    "dequantize",
    "dequantize_prepacked",
    "global_scale",
    "linear",
    "linear_prepacked",
    "matmul",
    "memory_columns",
    "prepacked_weight",
    "quantize",
    "relayout",
]


def _empty_quantized(
    x: torch.Tensor, n: int, layout: str, padded_n: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the codes, scales and global scale of x (m, n)."""
    m = x.shape[0]
    padded_n = n if padded_n is None else padded_n
    scale_shape = get_layout(layout).shape(m, block_columns(padded_n))
    return (
        x.new_empty(data_shape(m, padded_n), dtype=torch.uint8),
        x.new_empty(scale_shape, dtype=torch.uint8),
        x.new_empty((1,), dtype=torch.float32),
    )


def memory_columns(data: torch.Tensor) -> int:
    """Columns in memory of packed codes (m, columns / 2).

    Raises:
        ShapeError: they have fewer than two dimensions.
    """
    try:
        return data.shape[1] * 2
    except IndexError:
        raise ShapeError(f"QuantizedTensor needs data as (m, columns / 2), got shape {tuple(data.shape)}") from None


def _tensor(
    data: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, n: int, layout: str
) -> QuantizedTensor:
    """The quantized tensor (m, n) that these three make up, checked."""
    columns = memory_columns(data)
    return QuantizedTensor(data, scales, global_scale, (data.shape[0], n), layout, columns)


@define("quantize(Tensor x, Tensor? global_scale, str layout, SymInt? padded_n) -> (Tensor, Tensor, Tensor)")
def quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None, layout: str, padded_n: int | None
) -> tuple[torch.Tensor, ...]:
    """(data, scales, global_scale) of x (m, n)."""
    shape = check_matrix_shape(x.shape, "quantize needs x")
    padded_n = check_padded_n("quantize", shape, padded_n)
    layout = get_layout(layout).name
    data, scales, scale = _empty_quantized(x, shape[1], layout, padded_n)
    out = QuantizedTensor.trusted(data, scales, scale, shape, layout, padded_n)
    out.remember_checked_out(out.views())  # fresh and dense: there is nothing to check
    api.quantize(x, global_scale, layout=layout, padded_n=padded_n, out=out)
    return data, scales, scale


@fake("quantize")
def _(
    x: torch.Tensor, global_scale: torch.Tensor | None, layout: str, padded_n: int | None
) -> tuple[torch.Tensor, ...]:
    return _empty_quantized(x, x.shape[1], layout, padded_n)


@define("dequantize(Tensor data, Tensor scales, Tensor global_scale, SymInt n, str layout, ScalarType dtype) -> Tensor")
def dequantize(
    data: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, n: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """(m, n) in ``dtype``."""
    q = _tensor(data, scales, global_scale, n, layout)
    out = data.new_empty((data.shape[0], n), dtype=dtype)
    api.dequantize(q, dtype, out=out)
    return out


@fake("dequantize")
def _(
    data: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, n: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    return data.new_empty((data.shape[0], n), dtype=dtype)


@define("relayout(Tensor data, Tensor scales, SymInt n, str layout, str to) -> Tensor")
def relayout(data: torch.Tensor, scales: torch.Tensor, n: int, layout: str, to: str) -> torch.Tensor:
    """The scales of (data, scales) in layout ``to``; data is not read."""
    one = torch.ones(1, dtype=torch.float32, device=data.device)
    result: torch.Tensor = api.relayout(_tensor(data, scales, one, n, layout), to).scales
    return result.clone()


@fake("relayout")
def _(data: torch.Tensor, scales: torch.Tensor, n: int, layout: str, to: str) -> torch.Tensor:
    return scales.new_empty(get_layout(to).shape(data.shape[0], block_columns(data.shape[1] * 2)))


@define("global_scale(Tensor x) -> Tensor")
def global_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 (1,): 2688 / amax."""
    result: torch.Tensor = api.global_scale(x)
    return result.clone()


@fake("global_scale")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((1,), dtype=torch.float32)


@define(
    "matmul(Tensor a_data, Tensor a_scales, Tensor a_global_scale, str a_layout, Tensor b_data, Tensor b_scales, "
    "Tensor b_global_scale, str b_layout, SymInt k, ScalarType out_dtype, Tensor? alpha, Tensor? bias) -> Tensor"
)
def matmul(
    a_data: torch.Tensor,
    a_scales: torch.Tensor,
    a_global_scale: torch.Tensor,
    a_layout: str,
    b_data: torch.Tensor,
    b_scales: torch.Tensor,
    b_global_scale: torch.Tensor,
    b_layout: str,
    k: int,
    out_dtype: torch.dtype,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(m, n) = alpha * a (m, k) @ b (n, k).T + bias, both quantized."""
    a = _tensor(a_data, a_scales, a_global_scale, k, a_layout)
    b = _tensor(b_data, b_scales, b_global_scale, k, b_layout)
    out = a_data.new_empty((a_data.shape[0], b_data.shape[0]), dtype=out_dtype)
    api.matmul(a, b, out_dtype=out_dtype, alpha=alpha, bias=bias, out=out)
    return out


@fake("matmul")
def _(
    a_data: torch.Tensor,
    a_scales: torch.Tensor,
    a_global_scale: torch.Tensor,
    a_layout: str,
    b_data: torch.Tensor,
    b_scales: torch.Tensor,
    b_global_scale: torch.Tensor,
    b_layout: str,
    k: int,
    out_dtype: torch.dtype,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return a_data.new_empty((a_data.shape[0], b_data.shape[0]), dtype=out_dtype)


@define(
    "dequantize_prepacked(Tensor data, Tensor restored, Tensor global_scale, SymInt n, SymInt k, str layout, "
    "SymInt padded_k, ScalarType dtype) -> Tensor"
)
def dequantize_prepacked(
    data: torch.Tensor,
    restored: torch.Tensor,
    global_scale: torch.Tensor,
    n: int,
    k: int,
    layout: str,
    padded_k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(n, k) in ``dtype``: a weight that ``fp4rt.prepack`` repacked."""
    weight = prepacked_weight(data, restored, global_scale, (n, k), layout, padded_k)
    out = data.new_empty((n, k), dtype=dtype)
    api.weight_values(weight, out)
    return out


@fake("dequantize_prepacked")
def _(
    data: torch.Tensor,
    restored: torch.Tensor,
    global_scale: torch.Tensor,
    n: int,
    k: int,
    layout: str,
    padded_k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return data.new_empty((n, k), dtype=dtype)


def _product_gradients(y: torch.Tensor, args: dict[str, Any], wanted: list[str]) -> dict[str, torch.Tensor]:
    """Those of x and bias from that of the result; the weight is made anew, rounded to the gradient's dtype."""
    found = {}
    if "x" in wanted:
        k, layout, scale = args["x"][1], args["layout"], args["global_scale"]
        if "restored" in args:
            tiles, padded_k = (args["data"], args["restored"], scale), args["padded_k"]
            weight: Any = dequantize_prepacked(*tiles, args["n"], k, layout, padded_k, y.dtype)
        else:
            weight = dequantize(args["data"], args["scales"], scale, k, layout, y.dtype)
        found["x"] = y @ weight
    if "bias" in wanted:
        found["bias"] = y.sum(0, dtype=torch.float32)
    return found


@define(
    "linear(Tensor x, Tensor data, Tensor scales, Tensor global_scale, str layout, Tensor? bias, "
    "bool quantize_input, Tensor? input_global_scale) -> Tensor",
    _product_gradients,
)
def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    layout: str,
    bias: torch.Tensor | None,
    quantize_input: bool,
    input_global_scale: torch.Tensor | None,
) -> torch.Tensor:
    """(m, n) in x's dtype = x (m, k) @ weight (n, k).T + bias; x is quantized first where asked."""
    weight = _tensor(data, scales, global_scale, x.shape[1], layout)
    return _apply_weight(x, weight, bias, quantize_input, input_global_scale, data.shape[1] * 2)


@fake("linear")
def _(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    layout: str,
    bias: torch.Tensor | None,
    quantize_input: bool,
    input_global_scale: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], data.shape[0]))


@define(
    "linear_prepacked(Tensor x, Tensor data, Tensor restored, Tensor global_scale, SymInt n, str layout, "
    "SymInt padded_k, Tensor? bias, bool quantize_input, Tensor? input_global_scale) -> Tensor",
    _product_gradients,
)
def linear_prepacked(
    x: torch.Tensor,
    data: torch.Tensor,
    restored: torch.Tensor,
    global_scale: torch.Tensor,
    n: int,
    layout: str,
    padded_k: int,
    bias: torch.Tensor | None,
    quantize_input: bool,
    input_global_scale: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`linear` with a weight that ``fp4rt.prepack`` repacked."""
    weight = prepacked_weight(data, restored, global_scale, (n, x.shape[1]), layout, padded_k)
    return _apply_weight(x, weight, bias, quantize_input, input_global_scale, padded_k)


@fake("linear_prepacked")
def _(
    x: torch.Tensor,
    data: torch.Tensor,
    restored: torch.Tensor,
    global_scale: torch.Tensor,
    n: int,
    layout: str,
    padded_k: int,
    bias: torch.Tensor | None,
    quantize_input: bool,
    input_global_scale: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


cast_by_autocast(linear.default)
cast_by_autocast(linear_prepacked.default)

_prepacked: weakref.WeakValueDictionary[int, PrepackedWeight] = weakref.WeakValueDictionary()  # by id of the tiles


def prepacked_weight(
    data: torch.Tensor,
    restored: torch.Tensor,
    global_scale: torch.Tensor,
    shape: tuple[int, int],
    layout: str,
    padded_k: int,
) -> PrepackedWeight:
    """The weight of these tensors: the same object again as long as anybody holds it, for what it remembers."""
    known = _prepacked.get(id(data))  # holds its tiles, so the id is still theirs
    if (
        known is None
        or known.data is not data
        or known.restored is not restored
        or known.global_scale is not global_scale
        or (known.shape, known.layout, known.padded_n) != (shape, layout, padded_k)
    ):
        known = _prepacked[id(data)] = PrepackedWeight(data, restored, global_scale, shape, layout, padded_k)
    return known


def _apply_weight(
    x: torch.Tensor,
    weight: QuantizedTensor | PrepackedWeight,
    bias: torch.Tensor | None,
    quantize_input: bool,
    input_global_scale: torch.Tensor | None,
    padded_k: int,
) -> torch.Tensor:
    a: Any = api.quantize(x, input_global_scale, padded_n=padded_k) if quantize_input else x
    out = x.new_empty((x.shape[0], weight.shape[0]))
    api.matmul(a, weight, out_dtype=x.dtype, bias=bias, out=out)
    return out
