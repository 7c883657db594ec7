"""Plan to move an NVFP4 checkpoint into another format, or back into floats; refuses what the target cannot carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp4rt.checkpoint import configs
from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.configs import Outcome
from fp4rt.checkpoint.detect import Configuration, detect, read_configuration
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.experts import GATE_UP, apart
from fp4rt.checkpoint.formats import COMPRESSED_TENSORS, Format
from fp4rt.checkpoint.fusing import FUSE_MODES
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.layers import TargetLayer, scales_that_move
from fp4rt.checkpoint.operations import Convert, Copy, Dequantize, Fuse, Join, target_of
from fp4rt.checkpoint.orientation import read_orientation
from fp4rt.checkpoint.plan import (
    SCALAR_SHAPES,
    Plan,
    check_orientation,
    format_named,
    layer_bytes,
    make_jobs,
    scale_layout,
)
from fp4rt.checkpoint.plan_fuse import fuse_layers
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError, counted

__all__ = ["plan_convert", "plan_dequantize"]


def plan_convert(
    store: Store,
    to: str,
    wanted: str | None = None,
    layout: str | None = None,
    fuse: Mapping[str, Sequence[str]] | None = None,
    fused_scales: str = FUSE_MODES[0],
) -> Plan:
    """Plan to move an NVFP4 checkpoint into another format.

    Args:
        store: the source.
        to: name of the format.
        wanted: the source's format where names and configuration do not tell.
        layout: layout of the block scales; None for the format's own.
        fuse: layers to join by rows: name of the fused module -> names of its parts, all beside each other, as
            {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
        fused_scales: what becomes of different global scales: "keep" or "rescale".

    Raises:
        CheckpointError: the source has no NVFP4 layers, or something that the format cannot carry.
    """
    form = format_named(to)
    own_layout = scale_layout(form, layout)
    configuration, source, layers = _read_quantized(store, wanted)
    same = form.name == source.name
    if not same:
        _refuse_extras(store, layers, form)
    if not same or configuration.quantization or configuration.hf_quant:  # which is written anew
        _refuse_foreign(store, form)
    interleaved = read_orientation(store).interleaved
    operations: dict[str, Any] = {
        layer.data: _convert(store, layer, form, own_layout, interleaved) for layer in layers.values()
    }
    for joined, parts in (fuse or {}).items():
        fuse_layers(store, layers, operations, form, own_layout, joined, parts, fused_scales)
    operations = _with_copies(store, layers, operations)
    with_activations: list[str] = []
    weight_only: list[str] = []
    for operation in operations.values():
        for target in operation.targets():
            (weight_only if target.input_shape is None else with_activations).append(target.name.base)
    plain = (store.entry(name) for name, operation in operations.items() if isinstance(operation, Copy))
    kept = configs.kept_linears(plain, (*weight_only, *with_activations))
    outcome = Outcome(
        form,
        tuple(sorted(weight_only)),
        tuple(sorted(with_activations)),
        kept,
        configs.kv_cache_algorithm(configuration),
    )
    plan = Plan("convert", store, configuration, outcome, make_jobs(store, operations, outcome))
    by_part = [op.target for op in operations.values() if isinstance(op, Fuse) and op.target.fused_rows]
    if by_part:
        have = counted(len(by_part), "fused layer has", "fused layers have")
        plan.notes.append(
            f"{have} a global scale for each part (as {printable(by_part[0].name.base)}), which a reader must "
            "apply by rows; --fused-scales rescale makes them one"
        )
    moved = [name for layer in layers.values() for name in scales_that_move(store, layer, form)]
    if moved:
        have = counted(len(moved), "global scale has", "global scales have")
        plan.notes.append(
            f"{have} no fp32 reciprocal that leads back (as {printable(moved[0])}); converting back gives the nearest "
            "that has one"
        )
    return plan


def plan_dequantize(store: Store, dtype: str, wanted: str | None = None) -> Plan:
    """Plan to turn the NVFP4 layers of a checkpoint into floats; other tensors stay as they are.

    Args:
        store: the source.
        dtype: tag: "BF16", "F16" or "F32".
        wanted: the source's format where names and configuration do not tell.
    """
    configuration, _, layers = _read_quantized(store, wanted)
    _refuse_extras(store, layers, None)
    _refuse_foreign(store, None)
    operations = {layer.data: Dequantize(layer, dtype, layer_bytes(store, layer)) for layer in layers.values()}
    outcome = Outcome(None)
    jobs = make_jobs(store, _with_copies(store, layers, operations), outcome)
    return Plan("dequantize", store, configuration, outcome, jobs, FLOAT_TAGS[dtype])


def _read_quantized(store: Store, wanted: str | None) -> tuple[Configuration, Format, dict[str, StoredLayer]]:
    configuration = read_configuration(store)
    form = detect(store, configuration, wanted)
    if form is None:
        raise CheckpointError(f"{store.path}: holds no NVFP4 layers; `fp4rt quantize` makes them")
    return configuration, form, catalog(store, form)


def _refuse_extras(store: Store, layers: dict[str, StoredLayer], form: Format | None) -> None:
    """Refuse parts that change a layer's result, which another format would lose."""
    for layer in layers.values():
        if layer.extras:
            raise CheckpointError(
                f"{store.path}: {printable(layer.extras[0])} changes what the layer computes; {_named(form)} cannot "
                "carry it"
            )


def _named(form: Format | None) -> str:
    return "a plain checkpoint" if form is None else form.name


def _refuse_foreign(store: Store, form: Format | None) -> None:
    """Refuse other quantizations: the configuration that is written does not tell of them."""
    for name in store:
        scaled = any(f"{name}{suffix}" in store for suffix in ("_scale", "_scale_inv"))
        if store.entry(name).dtype.startswith(("F8", "I8")) and scaled and name.endswith("weight"):
            raise CheckpointError(
                f"{store.path}: {printable(name)} is quantized as {store.entry(name).dtype}, which fp4rt only copies; "
                f"it cannot become part of {_named(form)}, whose configuration would not tell of it"
            )


def _convert(store: Store, layer: StoredLayer, form: Format, layout: str, interleaved: bool) -> Convert:
    nbytes = layer_bytes(store, layer)
    input_shape: tuple[int, ...] | None = None
    if layer.input_scale is not None:
        shape = store.entry(layer.input_scale).shape
        input_shape = form.scalar_shape if shape in SCALAR_SHAPES else shape
    if form.name == COMPRESSED_TENSORS.name and layer.experts is not None:
        return Convert(layer, _split_stack(store, layer, form, layout, interleaved), nbytes)
    check_orientation(f"{store.path}: {printable(layer.data)}", form, layout, layer.transposed)
    target = target_of(layer, form, layout, input_shape)
    return Convert(layer, ((target, 0, 0, layer.rows),), nbytes)


def _split_stack(
    store: Store, layer: StoredLayer, form: Format, layout: str, interleaved: bool
) -> tuple[tuple[TargetLayer, int, int, int], ...]:
    """One module per expert, as compressed-tensors has them; gate_up is cut into gate and up."""
    if layer.name.base.rpartition(".")[2] == GATE_UP:
        if interleaved:
            raise CheckpointError(
                f"{store.path}: {printable(layer.data)} interleaves gate and up; it cannot be cut by rows"
            )
        if layer.rows % 2:
            have = f"has {counted(layer.rows, 'row')} an expert; gate and up need an even number"
            raise CheckpointError(f"{store.path}: {printable(layer.data)} {have}")
    inputs = None if layer.input_scale is None else form.scalar_shape
    return tuple(
        (
            TargetLayer(
                part.name,
                form,
                layout,
                None,
                part.end - part.first,
                layer.columns,
                layer.padded_columns,
                input_shape=inputs,
            ),
            part.expert,
            part.first,
            part.end,
        )
        for part in apart(layer.name, layer.experts or 0, layer.rows)
    )


def _with_copies(store: Store, layers: dict[str, StoredLayer], operations: dict[str, Any]) -> dict[str, Any]:
    """All tensors in the store's order: the layers' operations at their codes, copies of what no layer consumes."""
    consumed = {name for layer in layers.values() for name in layer.tensors if name not in layer.extras}
    consumed.update(name for op in operations.values() if isinstance(op, Join) for name in op.reads)
    markers = {layer.name.join("comfy_quant") for layer in layers.values()}
    result: dict[str, Any] = {}
    for name in store:
        if name in operations:
            result[name] = operations[name]
        elif name not in consumed and name not in markers:
            entry = store.entry(name)
            result[name] = Copy(TensorSpec(name, entry.dtype, entry.shape))
    return result
