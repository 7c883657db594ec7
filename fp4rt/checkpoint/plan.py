"""From a source and a wish to a list of shard jobs: everything is decided, and refused, before a byte is written.

A shard of the source becomes the shard of the same name of the target; the parts of a quantized layer go to where its
codes were. So any number of workers gives the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fp4rt.checkpoint import configs
from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.configs import Outcome
from fp4rt.checkpoint.detect import Configuration, detect, read_configuration
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.formats import COMFY, COMPRESSED_TENSORS, FORMATS, MODELOPT, Format, LayerName
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.layers import TargetLayer
from fp4rt.checkpoint.methods import Method
from fp4rt.checkpoint.operations import Convert, Copy, Dequantize, Quantize, layer_metadata, target_of
from fp4rt.checkpoint.selection import Selection, unused
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError
from fp4rt.format import AMAX_TARGET, BLOCK
from fp4rt.layout import get_layout, round_up

__all__ = ["Plan", "QuantizeOptions", "ShardJob", "plan_convert", "plan_dequantize", "plan_quantize"]

# Models that keep stacked experts as (e, k, n), for x @ w.
TRANSPOSED_MODELS = ("llama4", "llama4_text", "gpt_oss")
INTERLEAVED_MODELS = ("gpt_oss",)
GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class ShardJob:
    """One file to write; plain data, so that any worker can do it.

    Attributes:
        source: path of the source checkpoint.
        file: name of the file to write.
        operations: what to write into it, in order.
        metadata: its ``__metadata__``.
    """

    source: str
    file: str
    operations: tuple[Any, ...]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return sum(operation_bytes(operation) for operation in self.operations)


@dataclass
class Plan:
    """All jobs of a run and the configuration that goes with their result."""

    operation: str
    store: Store
    configuration: Configuration
    outcome: Outcome
    jobs: list[ShardJob]
    float_dtype: str | None = None
    notes: list[str] = field(default_factory=list)


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


def operation_bytes(operation: Any) -> int:
    """Bytes of the source that an operation reads."""
    if isinstance(operation, Copy):
        return operation.spec.nbytes
    return operation.source.nbytes if isinstance(operation, Quantize) else operation.nbytes


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
    form = _format(options.form)
    layout = _layout(form, options.layout)
    patterns = (*options.selection.include, *options.selection.exclude)
    for pattern in unused(patterns, list(store)):
        raise CheckpointError(f"{store.path}: the pattern {printable(pattern)} fits no tensor")
    transposed = configuration.config.get("model_type") in TRANSPOSED_MODELS
    operations: dict[str, Any] = {}
    for name in store:
        entry = store.entry(name)
        spec = TensorSpec(name, entry.dtype, entry.shape)
        reason = options.selection.reason_to_leave(entry, transposed)
        method: Method | None = options.method
        if reason is None and options.override is not None:
            method = options.override(name, options.method)
            reason = "left by an override" if method is None else None
        if reason is None and method is not None:
            operations[name] = _quantize(spec, form, layout, transposed, method, options)
        else:
            operations[name] = Copy(spec, reason or "")
    quantized = [operation for operation in operations.values() if isinstance(operation, Quantize)]
    if not quantized:
        reasons = _reasons(operations.values())
        raise CheckpointError(f"{store.path}: nothing to quantize; every tensor is left: {reasons}")
    modules = tuple(sorted(operation.target.name.base for operation in quantized))
    kept = configs.kept_linears(store.entry(name) for name, op in operations.items() if isinstance(op, Copy))
    outcome = Outcome(form, () if options.activations else modules, modules if options.activations else (), kept)
    plan = Plan("quantize", store, configuration, outcome, _jobs(store, operations, outcome))
    if options.activations:
        plan.notes.append(
            f"activations: input_scale = {options.input_amax:g} / {AMAX_TARGET:g}, not calibrated; magnitudes up to "
            f"{options.input_amax:g} are not clipped"
        )
    return plan


def _quantize(
    spec: TensorSpec, form: Format, layout: str, transposed: bool, method: Method, options: QuantizeOptions
) -> Quantize:
    *stack, rows, columns = spec.shape
    flipped = transposed and bool(stack)
    if flipped:
        rows, columns = columns, rows
    name = LayerName.of_weight(spec.name)
    if stack and form.name == COMPRESSED_TENSORS.name:
        raise CheckpointError(
            f"{printable(spec.name)}: compressed-tensors has no stacks of experts; quantize to modelopt, then convert"
        )
    if flipped and form.name == COMFY.name:
        raise CheckpointError(f"{printable(spec.name)}: a stack stored as (experts, k, n) has no comfy form")
    target = TargetLayer(
        name,
        form,
        layout,
        stack[0] if stack else None,
        rows,
        columns,
        round_up(columns, BLOCK),
        flipped,
        (),
        form.scalar_shape if options.activations else None,
    )
    encode = AMAX_TARGET / options.input_amax if options.activations else None
    return Quantize(spec, target, method, encode, options.compare, options.histograms)


def plan_convert(store: Store, to: str, wanted: str | None = None, layout: str | None = None) -> Plan:
    """Plan to move an NVFP4 checkpoint into another format.

    Args:
        store: the source.
        to: name of the format.
        wanted: the source's format where names and configuration do not tell.
        layout: layout of the block scales; None for the format's own.

    Raises:
        CheckpointError: the source has no NVFP4 layers, or something that the format cannot carry.
    """
    form = _format(to)
    own_layout = _layout(form, layout)
    configuration, source, layers = _read_quantized(store, wanted)
    if form.name != source.name:
        _refuse_foreign(store, layers, form)
    interleaved = configuration.config.get("model_type") in INTERLEAVED_MODELS
    operations = {layer.data: _convert(store, layer, form, own_layout, interleaved) for layer in layers.values()}
    operations = _with_copies(store, layers, operations)
    with_activations: list[str] = []
    weight_only: list[str] = []
    for operation in operations.values():
        for target in operation.targets():
            (weight_only if target.input_shape is None else with_activations).append(target.name.base)
    kept = configs.kept_linears(store.entry(name) for name, op in operations.items() if isinstance(op, Copy))
    outcome = Outcome(
        form,
        tuple(sorted(weight_only)),
        tuple(sorted(with_activations)),
        kept,
        configs.kv_cache_algorithm(configuration),
    )
    return Plan("convert", store, configuration, outcome, _jobs(store, operations, outcome))


def plan_dequantize(store: Store, dtype: str, wanted: str | None = None) -> Plan:
    """Plan to turn the NVFP4 layers of a checkpoint into floats; other tensors stay as they are.

    Args:
        store: the source.
        dtype: tag: "BF16", "F16" or "F32".
        wanted: the source's format where names and configuration do not tell.
    """
    configuration, _, layers = _read_quantized(store, wanted)
    _refuse_foreign(store, layers, None)
    operations = {layer.data: Dequantize(layer, dtype, _layer_bytes(store, layer)) for layer in layers.values()}
    outcome = Outcome(None)
    jobs = _jobs(store, _with_copies(store, layers, operations), outcome)
    return Plan("dequantize", store, configuration, outcome, jobs, FLOAT_TAGS[dtype])


def _read_quantized(store: Store, wanted: str | None) -> tuple[Configuration, Format, dict[str, StoredLayer]]:
    configuration = read_configuration(store)
    form = detect(store, configuration, wanted)
    if form is None:
        raise CheckpointError(f"{store.path}: holds no NVFP4 layers; `fp4rt quantize` makes them")
    return configuration, form, catalog(store, form)


def _refuse_foreign(store: Store, layers: dict[str, StoredLayer], form: Format | None) -> None:
    """Refuse what another format would lose: other quantizations, and parts that change a layer's result."""
    target = "a plain checkpoint" if form is None else form.name
    for layer in layers.values():
        if layer.extras:
            raise CheckpointError(
                f"{store.path}: {printable(layer.extras[0])} changes what the layer computes; {target} cannot carry it"
            )
    for name in store:
        scaled = any(f"{name}{suffix}" in store for suffix in ("_scale", "_scale_inv"))
        if store.entry(name).dtype.startswith(("F8", "I8")) and scaled and name.endswith("weight"):
            raise CheckpointError(
                f"{store.path}: {printable(name)} is quantized as {store.entry(name).dtype}, which fp4rt only copies; "
                f"it cannot become part of {target}"
            )


def _convert(store: Store, layer: StoredLayer, form: Format, layout: str, interleaved: bool) -> Convert:
    nbytes = _layer_bytes(store, layer)
    input_shape: tuple[int, ...] | None = None
    if layer.input_scale is not None:
        shape = store.entry(layer.input_scale).shape
        input_shape = form.scalar_shape if shape in ((), (1,), (1, 1)) else shape
    if form.name == COMPRESSED_TENSORS.name and layer.experts is not None:
        return Convert(layer, _split_stack(store, layer, form, layout, interleaved), nbytes)
    if layer.transposed and form.name == COMFY.name:
        raise CheckpointError(
            f"{store.path}: {printable(layer.data)} is stored as (experts, k, n), which has no comfy form"
        )
    target = target_of(layer, form, layout, input_shape)
    return Convert(layer, ((target, 0, 0, layer.rows),), nbytes)


def _split_stack(
    store: Store, layer: StoredLayer, form: Format, layout: str, interleaved: bool
) -> tuple[tuple[TargetLayer, int, int, int], ...]:
    """One module per expert, as compressed-tensors has them; gate_up is cut into gate and up."""
    parent, _, leaf = layer.name.base.rpartition(".")
    halves = {leaf: (0, layer.rows)}
    if leaf == GATE_UP:
        if interleaved or layer.rows % 2:
            raise CheckpointError(
                f"{store.path}: {printable(layer.data)} interleaves gate and up; it cannot be cut by rows"
            )
        half = layer.rows // 2
        halves = {"gate_proj": (0, half), "up_proj": (half, layer.rows)}
    inputs = None if layer.input_scale is None else form.scalar_shape
    return tuple(
        (
            TargetLayer(
                LayerName(f"{parent}.{expert}.{name}".lstrip(".")),
                form,
                layout,
                None,
                end - first,
                layer.columns,
                layer.padded_columns,
                input_shape=inputs,
            ),
            expert,
            first,
            end,
        )
        for expert in range(layer.experts or 0)
        for name, (first, end) in halves.items()
    )


def _with_copies(store: Store, layers: dict[str, StoredLayer], operations: dict[str, Any]) -> dict[str, Any]:
    """All tensors in the store's order: the layers' operations at their codes, copies of what no layer consumes."""
    consumed = {name for layer in layers.values() for name in layer.tensors if name not in layer.extras}
    markers = {layer.name.join("comfy_quant") for layer in layers.values()}
    result: dict[str, Any] = {}
    for name in store:
        if name in operations:
            result[name] = operations[name]
        elif name not in consumed and name not in markers:
            entry = store.entry(name)
            result[name] = Copy(TensorSpec(name, entry.dtype, entry.shape))
    return result


def _jobs(store: Store, operations: dict[str, Any], outcome: Outcome) -> list[ShardJob]:
    """The operations by the file that holds their first tensor; every name of the result must be one."""
    seen: set[str] = set()
    for operation in operations.values():
        for spec in operation.specs():
            if spec.name in seen:
                raise CheckpointError(f"{store.path}: two tensors of the result would be called {printable(spec.name)}")
            seen.add(spec.name)
    jobs = []
    for file, tensors in store.files.items():
        own = tuple(operations[name] for name in tensors if name in operations)
        if not own:  # its tensors became part of layers whose codes lie elsewhere
            continue
        standalone = len(store.files) == 1
        metadata = configs.file_metadata(tensors.metadata, outcome, layer_metadata(list(own)), standalone)
        jobs.append(ShardJob(str(store.path), file, own, metadata))
    return jobs


def _layer_bytes(store: Store, layer: StoredLayer) -> int:
    return sum(store.entry(name).nbytes for name in layer.tensors)


def _format(name: str) -> Format:
    form = FORMATS.get(name)
    if form is None:
        raise CheckpointError(f"unknown format {name!r}; use one of {', '.join(FORMATS)}")
    return form


def _layout(form: Format, layout: str | None) -> str:
    """The layout to write: the format's own, or for modelopt any."""
    if layout is None:
        return form.layout
    name = get_layout(layout).name
    if name != form.layout and form.name != MODELOPT.name:
        raise CheckpointError(f"{form.name} stores scales as {form.layout}; {name} is possible with modelopt only")
    return name


def _reasons(operations: Iterable[Any]) -> str:
    reasons = sorted({operation.note for operation in operations if operation.note})
    return "; ".join(reasons[:6]) + ("; ..." if len(reasons) > 6 else "")
