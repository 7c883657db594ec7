"""Which tensors of a checkpoint form a quantized layer: every part found, its dtype, shape and size checked.

A layer is a matrix (n, k), a fused matrix with one global scale a part, or a stack of experts (e, n, k). Stacks may
be stored transposed, (e, k, n), as Llama 4 and gpt-oss keep them: the shape of the scales tells which.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from fp4rt.checkpoint.formats import SCALES, Format, LayerName
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, counted
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns, get_layout

__all__ = ["FUSED_METADATA", "SHAPES_METADATA", "StoredLayer", "catalog"]

# Metadata that fp4rt adds where tensors alone do not say it: name -> [rows, columns], name -> [rows of each part].
SHAPES_METADATA = "fp4rt.shapes"
FUSED_METADATA = "fp4rt.fused_rows"
SCALE_DTYPES = ("F8_E4M3", "U8")
# Tensors that change what a layer computes, and that only the checkpoint's own format knows.
COMPANIONS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point")


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer in a checkpoint.

    Attributes:
        name: the layer's name.
        form: the format it is in.
        layout: the layout of its scales.
        data, scales, global_scale: names of its tensors; ``input_scale`` None where the layer has none.
        experts: extent of a stack, None for a matrix.
        rows, columns: of one matrix, as the user sees it.
        stored_rows, padded_columns: of one matrix in the file.
        transposed: whether a stack lies as (e, k, n).
        fused_rows: rows of each part of a fused matrix; empty where it has one global scale.
        extras: further tensors of the layer that only its own format knows.
    """

    name: LayerName
    form: Format
    layout: str
    data: str
    scales: str
    global_scale: str
    input_scale: str | None
    experts: int | None
    rows: int
    columns: int
    stored_rows: int
    padded_columns: int
    transposed: bool = False
    fused_rows: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight: (n, k), or (e, n, k)."""
        matrix = (self.rows, self.columns)
        return matrix if self.experts is None else (self.experts, *matrix)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the layer."""
        optional = () if self.input_scale is None else (self.input_scale,)
        return (self.data, self.scales, self.global_scale, *optional, *self.extras)


def catalog(store: Store, form: Format | None) -> dict[str, StoredLayer]:
    """The quantized layers of a checkpoint by the name of their weight.

    Raises:
        CheckpointError: a part is missing or has a wrong dtype or shape; the message names the tensor.
    """
    if form is None:
        return {}
    logical, fused = (_metadata(store, key) for key in (SHAPES_METADATA, FUSED_METADATA))
    return {name.weight: _layer(store, form, name, logical, fused) for name in _layer_names(store, form)}


def _layer_names(store: Store, form: Format) -> list[LayerName]:
    """Every layer of which any part exists, in the order of the file."""
    names: dict[LayerName, None] = {}
    for tensor in store:
        layer = _layer_of(store, form, tensor)
        if layer is not None:
            names[layer] = None
    return list(names)


def _layer_of(store: Store, form: Format, tensor: str) -> LayerName | None:
    """The layer that ``tensor`` is the codes, the scales or the global scale of."""
    dtype = store.entry(tensor).dtype
    suffixes = {form.global_scale: ("F32",), **dict.fromkeys(_scale_suffixes(form), SCALE_DTYPES)}
    if form.data != "weight":
        suffixes[form.data] = ("U8",)
    for suffix, dtypes in suffixes.items():
        layer = LayerName.of_part(tensor, suffix)
        if layer is None or dtype not in dtypes:
            continue
        # Block scales beside a weight of another dtype (FP8) are another quantization's; a global scale is not.
        foreign = layer.data(form) in store and store.entry(layer.data(form)).dtype != "U8"
        if foreign and suffix != form.global_scale:
            continue
        if layer.bare and layer.data(form) not in store:
            continue
        return layer
    if form.data == "weight" and dtype == "U8" and tensor.endswith(".weight"):
        return LayerName.of_weight(tensor)
    return None


def _scale_suffixes(form: Format) -> list[str]:
    return [SCALES if layout == form.layout else f"{SCALES}_{layout}" for layout in LAYOUTS]


def _layer(
    store: Store, form: Format, name: LayerName, logical: dict[str, list[int]], fused: dict[str, list[int]]
) -> StoredLayer:
    """Find and check the parts of one layer."""
    data = _need(store, name.data(form), "the codes")
    found = [layout for layout in LAYOUTS if name.scales(form, layout) in store]
    if len(found) > 1:
        raise CheckpointError(f"{store.path}: {printable(name.base)} has its scales twice, as {' and '.join(found)}")
    layout = found[0] if found else form.layout
    scales = _need(store, name.scales(form, layout), "the block scales")
    global_scale = _need(store, name.global_scale(form), "the global scale")
    entry = store.entry(data)
    _check_dtype(store, data, ("U8",))
    _check_dtype(store, scales, SCALE_DTYPES)
    _check_dtype(store, global_scale, ("F32",))
    if len(entry.shape) not in (2, 3):
        raise CheckpointError(f"{store.path}: {printable(data)} has shape {entry.shape}; wanted 2 or 3 dimensions")
    experts = entry.shape[0] if len(entry.shape) == 3 else None
    if experts == 0:
        raise CheckpointError(f"{store.path}: {printable(data)} has shape {entry.shape}; a stack has 1 expert or more")
    rows, padded, transposed = _extents(store, data, scales, layout)
    shape = logical.get(name.weight, [rows, padded])
    if len(shape) != 2 or not (0 < shape[0] <= rows and 0 < shape[1] <= padded):
        raise CheckpointError(
            f"{store.path}: {SHAPES_METADATA} says {printable(name.weight)} is {printable(shape)}, but it is stored as "
            f"{rows} x {padded}"
        )
    parts = _fused_rows(store, name, global_scale, experts, shape[0], fused)
    input_scale = name.input_scale(form) if name.input_scale(form) in store else None
    if input_scale is not None:
        _check_input_scale(store, input_scale, form, experts, parts)
    extras = tuple(extra for extra in map(name.join, COMPANIONS) if extra in store)
    return StoredLayer(
        name, form, layout, data, scales, global_scale, input_scale, experts, shape[0], shape[1], rows, padded,
        transposed, parts, extras,
    )  # fmt: skip


def _extents(store: Store, data: str, scales: str, layout: str) -> tuple[int, int, bool]:
    """Rows and padded columns of one matrix, and whether it lies transposed; the scales must have the fitting shape."""
    *stack, first, second = store.entry(data).shape
    *scale_stack, scale_rows, scale_columns = (0, 0, *store.entry(scales).shape)
    scale_stack = scale_stack[2:]
    wanted = None
    if second % (BLOCK // CODES_PER_BYTE) == 0 and first and second:
        padded = second * CODES_PER_BYTE
        wanted = get_layout(layout).shape(first, block_columns(padded))
        if stack == scale_stack and (scale_rows, scale_columns) == wanted:
            return first, padded, False
    if stack and layout == "linear" and first % (BLOCK // CODES_PER_BYTE) == 0:
        padded = first * CODES_PER_BYTE
        if stack == scale_stack and (scale_rows, scale_columns) == (block_columns(padded), second):
            return second, padded, True
    if wanted is None:
        raise CheckpointError(
            f"{store.path}: {printable(data)} has shape {store.entry(data).shape}; a row must be a positive "
            f"multiple of {BLOCK // CODES_PER_BYTE} bytes, one block of {BLOCK} codes"
        )
    raise CheckpointError(
        f"{store.path}: {printable(scales)} has shape {store.entry(scales).shape}; {printable(data)} of shape "
        f"{store.entry(data).shape} needs {(*stack, *wanted)} in the {layout} layout"
    )


def _fused_rows(
    store: Store, name: LayerName, global_scale: str, experts: int | None, rows: int, fused: dict[str, list[int]]
) -> tuple[int, ...]:
    """Rows of each part of a fused matrix, after checking how many global scales there are."""
    shape = store.entry(global_scale).shape
    count = math.prod(shape)
    if count == 1:
        return ()
    if experts is not None:
        if count == experts:
            return ()
        raise CheckpointError(
            f"{store.path}: {printable(global_scale)} has shape {shape}; a stack of "
            f"{counted(experts, 'expert')} needs one scale, or one each"
        )
    parts = fused.get(name.weight)
    if parts is None:
        raise CheckpointError(
            f"{store.path}: {printable(global_scale)} holds {count} scales, one for each part that was fused, but "
            f"nothing says how many rows each part has; wanted {FUSED_METADATA} in the metadata"
        )
    if len(parts) != count or sum(parts) != rows or min(parts) <= 0:
        raise CheckpointError(
            f"{store.path}: {FUSED_METADATA} says {printable(parts)} for {printable(name.weight)}, which has "
            f"{counted(rows, 'row')} and {count} global scales"
        )
    return tuple(parts)


def _check_input_scale(
    store: Store, tensor: str, form: Format, experts: int | None, fused_rows: tuple[int, ...]
) -> None:
    """One scale for the activations of the layer, or one for each expert or fused part."""
    _check_dtype(store, tensor, ("F32",))
    shape = store.entry(tensor).shape
    matrices = len(fused_rows) or experts or 1
    if math.prod(shape) not in (1, matrices):
        wanted = f"{form.scalar_shape} for one scale" + (f", or ({matrices},) for one each" if matrices > 1 else "")
        raise CheckpointError(f"{store.path}: {printable(tensor)} has shape {shape}; wanted {wanted}")


def _need(store: Store, tensor: str, what: str) -> str:
    if tensor not in store:
        raise CheckpointError(f"{store.path}: {printable(tensor)} is missing; without {what} the layer has no values")
    return tensor


def _check_dtype(store: Store, tensor: str, dtypes: tuple[str, ...]) -> None:
    dtype = store.entry(tensor).dtype
    if dtype not in dtypes:
        raise CheckpointError(f"{store.path}: {printable(tensor)} is {dtype}; wanted {' or '.join(dtypes)}")


def _metadata(store: Store, key: str) -> dict[str, list[int]]:
    """A table of integer lists from the metadata of all files."""
    result: dict[str, list[int]] = {}
    for name, file in store.files.items():
        if key not in file.metadata:
            continue
        try:
            table: Any = json.loads(file.metadata[key])
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict) or not all(
            isinstance(row, list) and all(type(item) is int for item in row) for row in table.values()
        ):
            raise CheckpointError(f"{name}: {key} in the metadata must be an object of integer lists")
        result.update(table)
    return result
