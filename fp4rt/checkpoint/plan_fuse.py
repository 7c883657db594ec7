"""Plan to join layers that lie beside each other, as q, k and v: their weights, scales and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4rt.checkpoint.catalog import StoredLayer
from fp4rt.checkpoint.formats import Format, LayerName
from fp4rt.checkpoint.header import check_name, printable
from fp4rt.checkpoint.layers import TargetLayer, global_scales
from fp4rt.checkpoint.operations import Fuse, Join
from fp4rt.checkpoint.plan import layer_bytes
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError

__all__ = ["fuse_layers"]


def fuse_layers(
    store: Store,
    layers: dict[str, StoredLayer],
    operations: dict[str, Any],
    form: Format,
    layout: str,
    joined: str,
    parts: Sequence[str],
    mode: str,
) -> None:
    """Replace the operations of all layers called ``parts`` by ones that join them into a layer called ``joined``.

    Args:
        store: the source.
        layers: its layers.
        operations: by the tensor at whose place the result goes; changed in place.
        form: the format to write.
        layout: the layout of its scales.
        joined: last part of the fused module's name.
        parts: last parts of the modules' names, in the order of rows.
        mode: what becomes of different global scales.

    Raises:
        CheckpointError: some parts of a group are missing, are stacks, or differ in width; or ``joined`` is no name.
    """
    check_name(joined, str(store.path))
    if len(parts) < 2:
        raise CheckpointError(f"{joined} needs two parts or more to be fused from, got {list(parts)}")
    if len(set(parts)) < len(parts):
        raise CheckpointError(f"{joined} can have each part once, got {list(parts)}")
    found = False
    for layer in layers.values():
        parent, dot, leaf = layer.name.base.rpartition(".")
        if leaf != parts[0] or layer.name.bare:
            continue
        found = True
        group = [_sibling(store, layers, f"{parent}{dot}{part}") for part in parts]
        name = LayerName(f"{parent}{dot}{joined}")
        operation = _fuse(store, group, form, layout, name, mode)
        for member in group:
            del operations[member.data]
        operations[layer.data] = operation
        join = _join_biases(store, group, name)
        if join is not None:
            operations[join.reads[0]] = join
    if not found:
        raise CheckpointError(f"{store.path}: no quantized layer is called {printable(parts[0])}; nothing to fuse")


def _sibling(store: Store, layers: dict[str, StoredLayer], base: str) -> StoredLayer:
    layer = layers.get(f"{base}.weight")
    if layer is None:
        raise CheckpointError(f"{store.path}: {printable(base)} is missing or not quantized; it cannot be fused")
    if layer.experts is not None or layer.fused_rows or layer.extras:
        raise CheckpointError(f"{store.path}: {printable(base)} is no single plain matrix; it cannot be fused")
    return layer


def _fuse(store: Store, group: list[StoredLayer], form: Format, layout: str, name: LayerName, mode: str) -> Fuse:
    first = group[0]
    if len({(layer.columns, layer.padded_columns) for layer in group}) > 1:
        widths = [layer.columns for layer in group]
        raise CheckpointError(
            f"{store.path}: {printable(name.base)}: its parts have {widths} columns; wanted one width"
        )
    with_input = [layer.input_scale is not None for layer in group]
    if any(with_input) and not all(with_input):
        raise CheckpointError(f"{store.path}: {printable(name.base)}: only some of its parts have an activation scale")
    encode = np.concatenate([global_scales(store, layer) for layer in group])
    keeps = mode == "keep" and np.unique(encode).size > 1
    target = TargetLayer(
        name,
        form,
        layout,
        None,
        sum(layer.rows for layer in group),
        first.columns,
        first.padded_columns,
        False,
        tuple(layer.rows for layer in group) if keeps else (),
        form.scalar_shape if all(with_input) else None,
    )
    return Fuse(tuple(group), target, mode, sum(layer_bytes(store, layer) for layer in group))


def _join_biases(store: Store, group: list[StoredLayer], name: LayerName) -> Join | None:
    names = [f"{layer.name.base}.bias" for layer in group]
    present = [bias for bias in names if bias in store]
    if not present:
        return None
    if len(present) < len(names):
        raise CheckpointError(f"{store.path}: {printable(name.base)}: only some of its parts have a bias")
    entries = [store.entry(bias) for bias in names]
    if len({entry.dtype for entry in entries}) > 1 or any(len(entry.shape) != 1 for entry in entries):
        raise CheckpointError(f"{store.path}: {printable(name.base)}: the biases of its parts differ in kind")
    length = sum(entry.shape[0] for entry in entries)
    return Join(tuple(names), TensorSpec(f"{name.base}.bias", entries[0].dtype, (length,)))
