"""The functions as PyTorch operators, ``torch.ops.fp4rt.*``, with fake implementations for ``torch.compile``.

An operator takes and returns plain tensors: a quantized tensor is (data, scales, global_scale) with its columns n and
its layout beside it. Results are torch's own memory, so that torch's allocator, its graphs and its memory planning see
them; the kernels write every byte of it.

``linear`` and ``linear_prepacked`` are differentiable in x and bias, the quantized weight being fixed; quantizing x
there counts as the identity (straight-through). A backward pass through any other operator raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from fp4rt import api
from fp4rt.errors import DeviceError, DtypeError, ShapeError
from fp4rt.layout import block_columns, data_shape, get_layout
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor
from fp4rt.tensor_checks import check_matrix_shape, check_padded_n

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

_library = torch.library.Library("fp4rt", "DEF")
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
_dispatch_keys = getattr(torch._C.DispatchKeySet, "raw_repr", repr)  # PyTorch 2.4 shows them as text only

# Dispatch keys of plain tensors on one device: nothing is between autograd and the device.
_PLAIN = frozenset(
    _dispatch_keys(torch._C.DispatchKeySet(device) | torch._C.DispatchKeySet(autograd))
    for device, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
)

# Dispatch keys of tensors that are no memory of dense rows.
_NOT_DENSE = ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU")

_CAST = (torch.float16, torch.bfloat16, torch.float32)  # what autocast casts, of what the operators take


def _requires_grad(*arguments: Any) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)


_any_requires_grad = getattr(torch._C, "_any_requires_grad", _requires_grad)  # older PyTorch has none


# From the result's gradient, the arguments by name, and the names of those that want one: their gradients. An operator
# is linear in some arguments: nothing but their shape is kept, and is what the function gets.
Gradient = Callable[[torch.Tensor, dict[str, Any], list[str]], dict[str, torch.Tensor]]
_LINEAR_IN = ("x", "bias")


def _operator(schema: str, gradient: Gradient | None = None) -> Any:
    """Define ``fp4rt::schema``; the decorated function runs it on both devices, ``_fake`` shapes it."""

    def register(function: Any) -> Any:
        name = _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for device in ("CPU", "CUDA"):
            _library.impl(name, function, device)
        operator = getattr(torch.ops.fp4rt, name)
        for key in _NOT_DENSE:
            _library.impl(name, _refusal(operator.default), key)
        kernel = _autograd_kernel(operator.default, function, gradient)
        _library.impl(name, kernel, "Autograd", with_keyset=True)
        return operator

    return register


def _autograd_kernel(operator: Any, function: Any, gradient: Gradient | None) -> Any:
    """What runs above the devices' kernels, and keeps what the backward pass needs where a gradient is wanted.

    ``torch.library.register_autograd`` does the same, but goes through the dispatcher a second time at every call;
    here that is left out where nothing is between autograd and the device.
    """
    names = [argument.name for argument in operator._schema.arguments]
    types = [str(argument.type) for argument in operator._schema.arguments]
    shaped = [i for i, name in enumerate(names) if name in _LINEAR_IN]
    tensors = [i for i, kind in enumerate(types) if "Tensor" in kind and i not in shaped]
    others = [i for i in range(len(names)) if i not in tensors and i not in shaped]
    order = [names[i] for i in (*tensors, *others, *shaped)]

    def keep(ctx: Any, args: tuple[Any, ...]) -> None:
        if gradient is not None:
            ctx.save_for_backward(*[args[i] for i in tensors])
            ctx.others = [args[i] for i in others] + [getattr(args[i], "shape", None) for i in shaped]

    def run(keyset: Any, args: tuple[Any, ...]) -> Any:
        if _dispatch_keys(keyset) in _PLAIN:
            return function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & _BELOW_AUTOGRAD, *args)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(keyset: Any, *args: Any) -> Any:
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # for torch.func's levels below this one
                return run(keyset, args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep(ctx, inputs[1:])

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(f"{operator.name()} has no forward-mode derivative")

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if gradient is None:
                raise NotImplementedError(
                    f"{operator.name()} has no gradient: call it under torch.no_grad(), or use fp4rt.torch.NVFP4Linear"
                )
            wanted = [name for name, wants in zip(names, ctx.needs_input_grad[1:], strict=True) if wants]
            for name in wanted:
                if name not in _LINEAR_IN:
                    raise NotImplementedError(f"{operator.name()} has no gradient for {name}; .detach() it")
            args = dict(zip(order, (*ctx.saved_tensors, *ctx.others), strict=True))
            found = gradient(gradients[0], args, wanted)
            return (None, *[found.get(name) for name in names])

    class Direct(Recorded):
        """The same where nothing is between autograd and the device: recorded in half the time."""

        setup_context = torch.autograd.function._SingleLevelFunction.setup_context  # that is, there is none

        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:  # type: ignore[override]
            keep(ctx, args)
            return function(*args)

    # torch.func has chosen the level already, and since PyTorch 2.14 a Function's apply would ask it again.
    methods = {key: Recorded.__dict__[key] for key in ("forward", "setup_context", "jvp", "backward")}
    OneLevel: Any = type("Recorded", (torch.autograd.function._SingleLevelFunction,), methods)

    def kernel(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(*args)):
            is_plain = forward_ad._current_level < 0 and _dispatch_keys(keyset) in _PLAIN
            transformed = torch._C._are_functorch_transforms_active()
            if is_plain and not transformed:
                return super(torch.autograd.Function, Direct).apply(keyset, *args)
            with enable_single_level_autograd_function():
                if transformed:
                    return OneLevel.apply(keyset, *args)
                return super(torch.autograd.Function, Recorded).apply(keyset, *args)
        return run(keyset, args)

    return kernel


def _refusal(operator: Any) -> Any:
    """What runs where a tensor is not dense."""

    def refuse(*args: Any) -> Any:
        for argument, value in zip(operator._schema.arguments, args, strict=True):
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                name = operator.name().removeprefix("fp4rt::")
                raise DtypeError(
                    f"{name} needs {argument.name} as a dense tensor, got {value.layout}; call .to_dense() on it"
                )

    return refuse


def _cast_by_autocast(operator: Any) -> None:
    """Under ``torch.autocast`` x goes to its dtype first, as for torch's own ``linear``."""

    def register(device: str, key: str) -> None:
        autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast(x: torch.Tensor, *args: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(autocast):
                return operator(x.to(torch.get_autocast_dtype(device)) if x.dtype in _CAST else x, *args)

        _library.impl(operator.name().removeprefix("fp4rt::"), cast, key)

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


def check_one_device(name: str, arguments: tuple[Any, ...]) -> None:
    """Refuse tensors on several devices, of which meta is one: memory that nobody writes would come back."""
    devices = {value.device for value in arguments if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise DeviceError(f"{name} needs its tensors on one device, got {found}; move or load those left behind")


def _fake(name: str) -> Any:
    """Registers what a graph sees; PyTorch takes it too where a single argument is on meta, beside ones with memory."""
    register = torch.library.register_fake(f"fp4rt::{name}", lib=_library)

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*arguments: Any) -> Any:
            check_one_device(name, arguments)
            return function(*arguments)

        return register(checked)

    return decorate


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


@_operator("quantize(Tensor x, Tensor? global_scale, str layout, SymInt? padded_n) -> (Tensor, Tensor, Tensor)")
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


@_fake("quantize")
def _(
    x: torch.Tensor, global_scale: torch.Tensor | None, layout: str, padded_n: int | None
) -> tuple[torch.Tensor, ...]:
    return _empty_quantized(x, x.shape[1], layout, padded_n)


@_operator(
    "dequantize(Tensor data, Tensor scales, Tensor global_scale, SymInt n, str layout, ScalarType dtype) -> Tensor"
)
def dequantize(
    data: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, n: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """(m, n) in ``dtype``."""
    q = _tensor(data, scales, global_scale, n, layout)
    out = data.new_empty((data.shape[0], n), dtype=dtype)
    api.dequantize(q, dtype, out=out)
    return out


@_fake("dequantize")
def _(
    data: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, n: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    return data.new_empty((data.shape[0], n), dtype=dtype)


@_operator("relayout(Tensor data, Tensor scales, SymInt n, str layout, str to) -> Tensor")
def relayout(data: torch.Tensor, scales: torch.Tensor, n: int, layout: str, to: str) -> torch.Tensor:
    """The scales of (data, scales) in layout ``to``; data is not read."""
    one = torch.ones(1, dtype=torch.float32, device=data.device)
    result: torch.Tensor = api.relayout(_tensor(data, scales, one, n, layout), to).scales
    return result.clone()


@_fake("relayout")
def _(data: torch.Tensor, scales: torch.Tensor, n: int, layout: str, to: str) -> torch.Tensor:
    return scales.new_empty(get_layout(to).shape(data.shape[0], block_columns(data.shape[1] * 2)))


@_operator("global_scale(Tensor x) -> Tensor")
def global_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 (1,): 2688 / amax."""
    result: torch.Tensor = api.global_scale(x)
    return result.clone()


@_fake("global_scale")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((1,), dtype=torch.float32)


@_operator(
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


@_fake("matmul")
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


@_operator(
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


@_fake("dequantize_prepacked")
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


@_operator(
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


@_fake("linear")
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


@_operator(
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


@_fake("linear_prepacked")
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


_cast_by_autocast(linear.default)
_cast_by_autocast(linear_prepacked.default)

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
