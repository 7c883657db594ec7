"""fp4rt in PyTorch: operators that ``torch.compile`` understands, a linear layer, and a model converter.

``fp4rt.quantize`` and the other functions take torch tensors as they are; use this module inside ``torch.compile``, for
``torch.load`` of quantized and prepacked weights, and for layers::

    import fp4rt.torch
    fp4rt.torch.quantize_model(model, exclude="lm_head")
    model = torch.compile(model, fullgraph=True)
"""

from __future__ import annotations

from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fp4rt.torch needs PyTorch ({error}); pip install 'fp4rt[torch]'", name="torch"
    ) from None

from fp4rt.errors import DtypeError, LayoutError, ShapeError
from fp4rt.layout import get_layout
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_integer
from fp4rt.torch import ops
from fp4rt.torch.linear import NVFP4Linear
from fp4rt.torch.model import quantize_model

# So that torch.load reads what torch.save wrote of them, also with its default weights_only: both check what they are
# made of, and nothing else is run.
torch.serialization.add_safe_globals([QuantizedTensor, PrepackedWeight])

__all__ = ["NVFP4Linear", "dequantize", "global_scale", "matmul", "ops", "quantize", "quantize_model", "relayout"]


ONE_FLOAT = "a one-element float32 tensor, such as torch.tensor([1.0], device=x.device)"


def quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None = None, *, layout: str = "128x4", padded_n: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, scales, global_scale) of x (m, n), as :func:`fp4rt.quantize` computes them.

    Args:
        x: (m, n) float16, bfloat16 or float32.
        global_scale: the encode scale as a one-element fp32 tensor on x's device; None computes it.
        layout: "128x4", "linear" or "8x4".
        padded_n: columns in memory, a multiple of 16.

    Raises:
        DtypeError: x or ``global_scale`` is no tensor, or no dense one. Others as :func:`fp4rt.quantize` does.
    """
    _check_tensor("quantize", "x", x)
    if global_scale is not None:
        _check_tensor("quantize", "global_scale", global_scale, ONE_FLOAT)
    _check_layouts(layout)
    if padded_n is not None:
        padded_n = _integer("quantize", "padded_n", padded_n)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ops.quantize(x, global_scale, layout, padded_n)
    return result


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    n: int | None = None,
    layout: str = "128x4",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(m, n) in ``dtype``; n is all columns in memory where None."""
    _check_parts("dequantize", "q", (data, scales, global_scale))
    _check_dtype("dequantize", "dtype", dtype)
    _check_layouts(layout)
    n = _columns("dequantize", data, n)
    result: torch.Tensor = ops.dequantize(data, scales, global_scale, n, layout, dtype)
    return result


def relayout(
    data: torch.Tensor, scales: torch.Tensor, to: str, *, n: int | None = None, layout: str = "128x4"
) -> torch.Tensor:
    """The scales in layout ``to``; data only says how many rows and columns there are."""
    _check_tensor("relayout", "data", data)
    _check_tensor("relayout", "scales", scales)
    _check_layouts(layout, to)
    n = _columns("relayout", data, n)
    result: torch.Tensor = ops.relayout(data, scales, n, layout, to)
    return result


def global_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 (1,): 2688 / amax over the finite values of x (m, n)."""
    _check_tensor("global_scale", "x", x)
    result: torch.Tensor = ops.global_scale(x)
    return result


def matmul(
    a: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    k: int | None = None,
    layouts: tuple[str, str] = ("128x4", "128x4"),
    out_dtype: torch.dtype = torch.bfloat16,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(m, n) = alpha * a @ b.T + bias of two quantized tensors.

    Args:
        a: (data, scales, global_scale) of (m, k).
        b: the same of (n, k).
        k: columns; all in memory where None, and both sides must then have as many.
        layouts: where a's and b's scales lie.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32.
        alpha: one-element fp32 tensor, in the place of the global scales, which then do not count; None means
            1 / (their product), and so the product of the values.
        bias: (n,).

    Raises:
        ShapeError: the two have different numbers of columns in memory, and ``k`` does not say how many count.
        DtypeError: a or b are no three tensors, ``alpha`` or ``bias`` no tensor, or ``k`` no integer.
        LayoutError: ``layouts`` are not two names of layouts.
    """
    _check_parts("matmul", "a", a)
    _check_parts("matmul", "b", b)
    if alpha is not None:
        _check_tensor("matmul", "alpha", alpha, ONE_FLOAT)
    if bias is not None:
        _check_tensor("matmul", "bias", bias)
    _check_dtype("matmul", "out_dtype", out_dtype)
    try:
        layout_of_a, layout_of_b = layouts
    except (TypeError, ValueError):
        raise LayoutError(f"matmul needs layouts as two names, such as ('128x4', '8x4'), got {layouts!r}") from None
    _check_layouts(layout_of_a, layout_of_b)
    if k is not None:
        k = _integer("matmul", "k", k)
    else:
        k, columns_of_b = ops.memory_columns(a[0]), ops.memory_columns(b[0])
        if k != columns_of_b:
            raise ShapeError(
                f"matmul needs a (m, k) and b (n, k) with one k, got {k} and {columns_of_b} columns in memory; "
                "pass k where some of them are padding"
            )
    arguments: Any = (*a, layout_of_a, *b, layout_of_b, k, out_dtype, alpha, bias)
    result: torch.Tensor = ops.matmul(*arguments)
    return result


def _check_tensor(function: str, name: str, value: Any, wanted: str = "a torch.Tensor") -> None:
    """Refuse what the operators' schemas would, in one line; what stands for a tensor is none of our business."""
    if not (isinstance(value, torch.Tensor) or hasattr(value, "__torch_function__")):
        raise DtypeError(f"{function} needs {name} as {wanted}, got {type(value).__name__}")


def _check_parts(function: str, name: str, q: Any) -> None:
    if isinstance(q, (tuple, list)) and len(q) == 3:
        for part, value in zip(("data", "scales", "global_scale"), q, strict=True):
            _check_tensor(function, f"{name}'s {part}", value)
        return
    if isinstance(q, (tuple, list)):
        got = f"{len(q)} of them"
    elif isinstance(q, QuantizedTensor):
        got = "a QuantizedTensor; pass (q.data, q.scales, q.global_scale), or use fp4rt.matmul outside torch.compile"
    else:
        got = f"{type(q).__name__}; quantize a tensor with fp4rt.torch.quantize, or keep it: NVFP4Linear takes 16 bits"
    raise DtypeError(f"{function} needs {name} as three tensors (data, scales, global_scale), got {got}")


def _columns(function: str, data: torch.Tensor, n: Any) -> Any:
    """n, or all columns in memory where it is None."""
    return ops.memory_columns(data) if n is None else _integer(function, "n", n)


def _integer(function: str, name: str, value: Any) -> Any:
    """An integer that a schema takes; a symbol stays one."""
    return value if type(value) is int or isinstance(value, torch.SymInt) else check_integer(function, name, value)


def _check_layouts(*layouts: Any) -> None:
    """Refuse what is no string; the operators refuse strings that name no layout."""
    for layout in layouts:
        if not isinstance(layout, str):
            get_layout(layout)  # raises


def _check_dtype(function: str, name: str, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"{function} needs {name} as a torch.dtype, such as torch.bfloat16, got {dtype!r}")
