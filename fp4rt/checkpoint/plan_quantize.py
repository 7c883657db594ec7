"""Plan to quantize a plain checkpoint: which tensors, how, and what becomes of the others."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp4rt.checkpoint import configs
from fp4rt.checkpoint.configs import Outcome
from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.formats import COMFY, COMPRESSED_TENSORS, MODELOPT, Format, LayerName
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.joined import joined_modules, missing_parts
from fp4rt.checkpoint.kinds import check_kinds
from fp4rt.checkpoint.layers import TargetLayer
from fp4rt.checkpoint.methods import Method
from fp4rt.checkpoint.operations import Copy, Quantize
from fp4rt.checkpoint.orientation import Orientation, read_orientation
from fp4rt.checkpoint.overrides import Overrides
from fp4rt.checkpoint.plan import Plan, check_orientation, format_named, make_jobs, scale_layout
from fp4rt.checkpoint.selection import Selection, unused
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError, DtypeError, counted
from fp4rt.format import AMAX_TARGET, BLOCK, FP32_MAX
from fp4rt.layout import round_up

__all__ = ["QuantizeOptions", "check_input_amax", "plan_quantize"]


@dataclass(frozen=True)
class QuantizeOptions:
    """What ``quantize`` is to do.

    Attributes:
        form: name of the format to write.
        layout: layout of the block scales; None for the format's own. Only modelopt knows others.
        activations: whether activations are to be quantized too (w4a4), which stores ``input_amax / 2688``.
        input_amax: largest activation magnitude to expect; without calibration, the largest that a scale of 1 covers.
        selection: which tensors.
        method: how scales are chosen.
        override: method for a tensor, None to leave it alone; None where there are no overrides.
        compare: measure all methods.
        histograms: count errors and scales for a picture.

    Raises:
        CheckpointError: the format is unknown or has no such layout, or ``input_amax`` gives no usable scale.
        DtypeError: a value is of another kind.
        LayoutError: the layout is unknown.
    """

    form: str = MODELOPT.name
    layout: str | None = None
    activations: bool = False
    input_amax: float = AMAX_TARGET
    selection: Selection = field(default_factory=Selection)
    method: Method = field(default_factory=Method)
    override: Callable[[str, Method], Method | None] | None = None
    compare: bool = False
    histograms: bool = False

    def __post_init__(self) -> None:
        check_kinds(
            "QuantizeOptions",
            ("form", self.form, str, "a string"),
            ("layout", self.layout, (str, type(None)), "a string or None"),
            ("activations", self.activations, bool, "a bool"),
            ("selection", self.selection, Selection, 'a Selection, as Selection(include=("*.mlp.*",))'),
            ("method", self.method, Method, 'a Method, as Method("mse")'),
            ("compare", self.compare, bool, "a bool"),
            ("histograms", self.histograms, bool, "a bool"),
        )
        if self.override is not None and not callable(self.override):
            raise DtypeError(f"QuantizeOptions needs override as a function or None, got {self.override!r}")
        scale_layout(format_named(self.form), self.layout)
        check_input_amax(self.input_amax, "input_amax")
        object.__setattr__(self, "input_amax", float(self.input_amax))


def check_input_amax(value: Any, what: str) -> None:
    """Refuse a largest magnitude of activations that gives no usable scale; ``what`` is its name, for the message.

    Raises:
        CheckpointError: it is not finite and positive, or the scale or its reciprocal is not in fp32.
        DtypeError: it is no number.
    """
    if type(value) is bool or not issubclass(type(value), numbers.Real):
        raise DtypeError(f"{what} must be a number, got {value!r}")
    with np.errstate(over="ignore"):
        usable = 0 < value <= float(FP32_MAX) and np.float32(AMAX_TARGET / float(value)) <= FP32_MAX
    if not usable:
        raise CheckpointError(
            f"{what} must be positive and finite, and so must {AMAX_TARGET:g} / {what} in fp32, got {value}"
        )


def plan_quantize(store: Store, options: QuantizeOptions) -> Plan:
    """Plan to quantize a plain checkpoint.

    Raises:
        CheckpointError: the source is quantized already, nothing is selected, or a pattern fits nothing.
    """
    configuration = read_configuration(store)
    if detect(store, configuration) is not None:
        raise CheckpointError(f"{store.path}: is NVFP4 already; `fp4rt convert` changes its format")
    if configuration.quantization:
        other = configuration.quantization.get("quant_method")
        raise CheckpointError(
            f"{store.path}: is quantized already (quant_method {printable(other)}); start from the original"
        )
    form = format_named(options.form)
    layout = scale_layout(form, options.layout)
    patterns = (*options.selection.include, *options.selection.exclude)
    for pattern in unused(patterns, list(store)):
        raise CheckpointError(f"{store.path}: the pattern {printable(pattern)} fits no tensor")
    lie = read_orientation(store)
    left = {name: options.selection.reason_to_leave(store.entry(name), name in lie.transposed) for name in store}
    if isinstance(options.override, Overrides):
        options.override.check_used(left)
    operations: dict[str, Any] = {}
    for name, reason in left.items():
        entry = store.entry(name)
        spec = TensorSpec(name, entry.dtype, entry.shape)
        method: Method | None = options.method
        if reason is None and options.override is not None:
            method = _overridden(options.override(name, options.method), name)
            reason = "left by an override" if method is None else None
        if reason is None and method is not None:
            operations[name] = _quantize(spec, form, layout, name in lie.transposed, method, options)
        else:
            operations[name] = Copy(spec, reason or "")
    _join(operations)
    quantized = [operation for operation in operations.values() if isinstance(operation, Quantize)]
    if not quantized:
        reasons = _reasons(operations.values())
        why = f"every tensor is left: {reasons}" if operations else "it holds no tensor"
        raise CheckpointError(f"{store.path}: nothing to quantize; {why}")
    modules = tuple(sorted(operation.target.name.base for operation in quantized))
    plain = (store.entry(name) for name, operation in operations.items() if isinstance(operation, Copy))
    kept = configs.kept_linears(plain, modules)
    outcome = Outcome(form, () if options.activations else modules, modules if options.activations else (), kept)
    plan = Plan("quantize", store, configuration, outcome, make_jobs(store, operations, outcome))
    if options.activations:
        plan.notes.append(
            f"activations: input_scale = {options.input_amax:g} / {AMAX_TARGET:g}, not calibrated; magnitudes up to "
            f"{options.input_amax:g} are not clipped"
        )
    if form.name != COMFY.name:  # ComfyUI joins no layers
        plan.notes.extend(_half_joined(modules, kept))
    plan.notes.extend(_assumed(lie, (operation.source.name for operation in quantized)))
    return plan


def _join(operations: dict[str, Any]) -> None:
    """Let weights that engines join share their global scale, where they are quantized alike."""
    quantized = {op.target.name.base: op for op in operations.values() if isinstance(op, Quantize)}
    for module, together in joined_modules(quantized).items():
        own = quantized[module]
        alike = (quantized[other] for other in together)
        same = [op for op in alike if (op.method, op.target.experts) == (own.method, own.target.experts)]
        if len(same) > 1:
            operations[own.source.name] = replace(own, joined=tuple(op.source for op in same))


def _half_joined(quantized: Iterable[str], kept: Iterable[str]) -> Iterator[str]:
    """What to know of layers that engines would join with some that stay floats."""
    missing = missing_parts(quantized, kept)
    if missing:
        module, others = min(missing.items())
        has = counted(len(missing), "quantized layer is", "quantized layers are")
        yield (
            f"{has} beside others that stay as they are and that engines join with them, all or none (as "
            f"{printable(module)}, without {', '.join(map(printable, others))})"
        )


def _assumed(lie: Orientation, quantized: Iterable[str]) -> Iterator[str]:
    """What to know of stacks of which nothing says how they lie."""
    names = [name for name in quantized if name in lie.assumed]
    if names:
        are = counted(len(names), "stack is", "stacks are")
        yield (
            f"{are} taken as (experts, n, k), the last axis being k (as {printable(names[0])}): no config.json says "
            "otherwise; where it is (experts, k, n), leave it with --exclude"
        )


def _overridden(method: Any, name: str) -> Method | None:
    if method is not None and not isinstance(method, Method):
        raise DtypeError(f"override must give a Method or None, got {method!r} for {printable(name)}")
    return method


def _quantize(
    spec: TensorSpec, form: Format, layout: str, transposed: bool, method: Method, options: QuantizeOptions
) -> Quantize:
    *stack, rows, columns = spec.shape
    if transposed:
        rows, columns = columns, rows
    name = LayerName.of_weight(spec.name)
    if stack and form.name == COMPRESSED_TENSORS.name:
        raise CheckpointError(
            f"{printable(spec.name)}: compressed-tensors has no stacks of experts; quantize to modelopt, then convert"
        )
    check_orientation(printable(spec.name), form, layout, transposed)
    target = TargetLayer(
        name,
        form,
        layout,
        stack[0] if stack else None,
        rows,
        columns,
        round_up(columns, BLOCK),
        transposed,
        (),
        form.scalar_shape if options.activations else None,
    )
    encode = AMAX_TARGET / options.input_amax if options.activations else None
    return Quantize(spec, target, method, encode, options.compare, options.histograms)


def _reasons(operations: Iterable[Any]) -> str:
    reasons = sorted({operation.note for operation in operations if operation.note})
    return "; ".join(reasons[:6]) + ("; ..." if len(reasons) > 6 else "")
