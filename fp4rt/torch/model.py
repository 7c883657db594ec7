"""``quantize_model``: replace a model's linear layers by NVFP4 ones, in place."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp4rt.errors import DtypeError
from fp4rt.format import INPUT_DTYPES
from fp4rt.torch.linear import MODES, Mode, NVFP4Linear, encode_scale

__all__ = ["quantize_model"]

ENCODERS = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
Selection = str | Iterable[str] | Callable[[str, torch.nn.Linear], bool] | None


def quantize_model(
    model: torch.nn.Module,
    include: Selection = None,
    exclude: Selection = None,
    *,
    mode: Mode = "w4a16",
    input_global_scales: dict[str, Any] | None = None,
) -> list[str]:
    """Replace every selected ``nn.Linear`` of ``model`` by an :class:`NVFP4Linear`, in place.

    Quantize first and put adapters beside the layers then, or exclude them: they are linear layers too. A model on the
    meta device gets layers without weights, to load: the tensors of a folder that ``fp4rt convert --to
    compressed-tensors`` wrote have the names that the layers' state dict has.

    ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` lose their fused path for inference, which reads the
    weights of their linear layers itself.

    Args:
        model: any module; a layer that is used twice is replaced by one layer in both places. Products take fp16 and
            bf16 activations: call ``.bfloat16()`` or ``.half()`` on a model of fp32 layers and on its inputs, or run it
            under ``torch.autocast``; a forward pass with fp32 ones raises DtypeError, unless the mode is "w4a4".
        include: which layers, by dotted name: a shell pattern or several ("*.mlp.*"), or a function of (name, layer);
            None means all.
        exclude: which of these not, in the same form ("lm_head").
        mode: "w4a16" or "w4a4".
        input_global_scales: for "w4a4": the activations' encode scale of layers by name; others compute it per batch.

    Returns:
        Names of the replaced layers, in the model's order.

    Raises:
        TypeError: ``model`` is no module.
        DtypeError: a selected layer has a weight of another dtype than fp16, bf16 or fp32.
        ValueError: the mode is unknown, the model is itself the only linear layer (there is nothing to replace it in),
            a pattern selects nothing, a selected layer has weights that are not finite, or ``input_global_scales``
            names a layer that was not replaced, holds no scale or is given with "w4a16". Before the model is touched,
            as all of these.
    """
    if mode not in MODES:
        raise ValueError(f"quantize_model needs mode as one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"quantize_model needs a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.Linear):
        raise ValueError(
            "quantize_model replaces layers inside a model, got a lone nn.Linear; use NVFP4Linear.from_linear"
        )
    scales = {name: encode_scale(scale) for name, scale in (input_global_scales or {}).items()}
    if scales and mode != "w4a4":
        raise ValueError(f"quantize_model takes input_global_scales only with mode='w4a4', got mode={mode!r}")
    linears = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is torch.nn.Linear  # a subclass may do more than a product: its owner decides
    }
    chosen = _select(linears, include, "include") if include is not None else set(linears)
    if exclude is not None:
        chosen -= _select(linears, exclude, "exclude")
    unknown = set(scales) - chosen
    if unknown:
        raise ValueError(f"quantize_model: input_global_scales names {sorted(unknown)}, which are not among the layers")
    for name in sorted(chosen):
        dtype = str(linears[name].weight.dtype).removeprefix("torch.")
        if dtype not in INPUT_DTYPES:
            raise DtypeError(
                f"quantize_model needs weights of {', '.join(INPUT_DTYPES)}, {name} has {dtype}; exclude it"
            )
        if not linears[name].weight.is_meta and not torch.isfinite(linears[name].weight).all():
            raise ValueError(f"quantize_model needs finite weights, {name} has others; exclude it")
    replaced: dict[int, NVFP4Linear] = {}
    for name, layer in linears.items():
        if name not in chosen:
            continue
        if id(layer) not in replaced:
            replaced[id(layer)] = NVFP4Linear.from_linear(layer, mode, scales.get(name))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replaced[id(layer)])
    for module in model.modules():
        if isinstance(module, ENCODERS) and any(isinstance(part, NVFP4Linear) for part in module.modules()):
            _leave_fused_path(module)
    return [name for name in linears if name in chosen]


def _leave_fused_path(encoder: torch.nn.Module) -> None:
    """What PyTorch's encoders look at before they take the weights of their linear layers into one kernel."""
    if isinstance(encoder, torch.nn.TransformerEncoder):
        encoder.use_nested_tensor = False
    else:
        encoder.activation_relu_or_gelu = 0


def _select(linears: dict[str, torch.nn.Linear], selection: Selection, argument: str) -> set[str]:
    if callable(selection):
        return {name for name, layer in linears.items() if selection(name, layer)}
    patterns = [selection] if isinstance(selection, str) else list(selection or ())
    chosen: set[str] = set()
    for pattern in patterns:
        matched = set(fnmatch.filter(linears, pattern))
        if not matched:
            raise ValueError(
                f"quantize_model: {argument} pattern {pattern!r} matches no linear layer; there are {sorted(linears)}"
            )
        chosen |= matched
    return chosen
