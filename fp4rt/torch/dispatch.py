"""How a function becomes a PyTorch operator: on both devices, under autograd and autocast, in graphs.

``torch.library`` does most of that with decorators of its own; what is here costs less at every call, which
``_autograd_kernel`` says more about, and refuses what those would take wrongly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from fp4rt.errors import DeviceError, DtypeError

__all__ = ["cast_by_autocast", "check_one_device", "define", "fake"]

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


def define(schema: str, gradient: Gradient | None = None) -> Any:
    """Define ``fp4rt::schema``; the decorated function runs it on both devices, ``fake`` shapes it."""

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


def cast_by_autocast(operator: Any) -> None:
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


def fake(name: str) -> Any:
    """Registers what a graph sees; PyTorch takes it too where a single argument is on meta, beside ones with memory."""
    register = torch.library.register_fake(f"fp4rt::{name}", lib=_library)

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*arguments: Any) -> Any:
            check_one_device(name, arguments)
            return function(*arguments)

        return register(checked)

    return decorate
