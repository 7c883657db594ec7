"""Between the tensors of a file and :class:`QuantizedTensor`: the one place that knows what the bytes mean.

Reading gives matrices with linear scales and the even column in the low nibble, zero-copy where the file has them so.
Writing lays matrices out as a format wants them. Codes and block scales are moved, never recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp4rt.checkpoint.catalog import StoredLayer
from fp4rt.checkpoint.formats import Format, LayerName, decode_scale, encode_scale, swap_nibbles
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError
from fp4rt.format import E4M3_NAN_BYTE
from fp4rt.layout import block_columns, data_shape, get_layout, round_up
from fp4rt.tensor import QuantizedTensor

__all__ = [
    "TargetLayer",
    "check_encode",
    "global_scales",
    "input_scales",
    "lay_out",
    "matrices",
    "rows_of",
    "scales_that_move",
    "stored_scales",
    "wrong_scales",
]

LINEAR = "linear"
SIGN_BIT = 0x80


def global_scales(store: Store, layer: StoredLayer) -> np.ndarray:
    """Encode scales of a layer, one for each matrix or part, checked to be usable.

    Raises:
        CheckpointError: a scale is zero, negative, NaN or infinite, or its reciprocal is; the message names it.
    """
    return _encode_scales(store, layer.global_scale, layer.form)


def input_scales(store: Store, layer: StoredLayer) -> np.ndarray | None:
    """Encode scales of the layer's activations; None where it has none."""
    return None if layer.input_scale is None else _encode_scales(store, layer.input_scale, layer.form)


def stored_scales(store: Store, layer: StoredLayer) -> dict[str, np.ndarray]:
    """The layer's global scale and that of its activations, where it has one, as they are stored; by tensor name."""
    names = (layer.global_scale, layer.input_scale)
    return {name: np.array(store[name], np.float32).reshape(-1) for name in names if name is not None}


def scales_that_move(store: Store, layer: StoredLayer, form: Format) -> list[str]:
    """Names of global scales that ``form`` stores as reciprocals whose own reciprocals are others.

    The nearest reciprocal is stored; where it does not lead back, no fp32 number does.
    """
    there, back = (encode_scale, decode_scale) if layer.form.stores_decode else (decode_scale, encode_scale)
    if layer.form.stores_decode == form.stores_decode:
        return []
    stored = stored_scales(store, layer)
    return [name for name, scales in stored.items() if not np.array_equal(back(there(scales)), scales)]


def matrices(store: Store, layer: StoredLayer, first: int = 0) -> Iterator[QuantizedTensor]:
    """The matrices of a layer in linear layout: its experts from ``first`` on, its fused parts, or the one it is."""
    scales = global_scales(store, layer)
    count = layer.experts or 1
    per_matrix = np.broadcast_to(scales, (count,)) if scales.size == 1 else scales
    for index in range(first, count):
        data, block_scales = _matrix(store, layer, index)
        if layer.fused_rows:
            yield from _parts(layer, data, block_scales, scales)
        else:
            scale = np.ascontiguousarray(per_matrix[index : index + 1])
            shape = (layer.rows, layer.columns)
            yield QuantizedTensor.trusted(data, block_scales, scale, shape, LINEAR, layer.padded_columns)


def rows_of(q: QuantizedTensor, first: int, end: int) -> QuantizedTensor:
    """Some rows of a matrix in linear layout, as views."""
    shape = (end - first, q.shape[1])
    return QuantizedTensor.trusted(q.data[first:end], q.scales[first:end], q.global_scale, shape, q.layout, q.padded_n)


def wrong_scales(q: QuantizedTensor) -> dict[str, np.ndarray]:
    """Which block scales of a matrix no quantizer makes: masks (m, blocks) of those that are "NaN" and "negative"."""
    return {"NaN": q.scales & ~np.uint8(SIGN_BIT) == E4M3_NAN_BYTE, "negative": q.scales & SIGN_BIT != 0}


def _matrix(store: Store, layer: StoredLayer, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, low nibble first, and linear block scales of one matrix; views of the file where nothing must move."""
    data, scales = store[layer.data], store[layer.scales].view(np.uint8)
    if layer.experts is not None:
        data, scales = data[index], scales[index]
    if layer.transposed:
        data, scales = np.ascontiguousarray(data.T), np.ascontiguousarray(scales.T)
    if layer.form.high_nibble_first:
        data = swap_nibbles(data)
    layout = get_layout(layer.layout)
    if layout.tiled:
        scales = layout.unpack(scales, layer.stored_rows, block_columns(layer.padded_columns))
    return data[: layer.rows], scales[: layer.rows]


def _parts(layer: StoredLayer, data: np.ndarray, scales: np.ndarray, encode: np.ndarray) -> Iterator[QuantizedTensor]:
    first = 0
    for part, rows in enumerate(layer.fused_rows):
        shape = (rows, layer.columns)
        rows_of_part = slice(first, first + rows)
        scale = encode[part : part + 1]
        yield QuantizedTensor.trusted(
            data[rows_of_part], scales[rows_of_part], scale, shape, LINEAR, layer.padded_columns
        )
        first += rows


@dataclass(frozen=True)
class TargetLayer:
    """A quantized layer to be written.

    Attributes:
        name: its name.
        form: the format to write.
        layout: the layout of its scales.
        experts: extent of a stack, None for a matrix.
        rows, columns, padded_columns: of one matrix; all parts together where it is fused.
        transposed: whether a stack lies as (e, k, n).
        fused_rows: rows of the parts that keep a global scale each.
        input_shape: shape of the activation's scale, None where there is none.
    """

    name: LayerName
    form: Format
    layout: str
    experts: int | None
    rows: int
    columns: int
    padded_columns: int
    transposed: bool = False
    fused_rows: tuple[int, ...] = ()
    input_shape: tuple[int, ...] | None = None

    @property
    def stored_rows(self) -> int:
        """Rows of one matrix in the file."""
        return round_up(self.rows, self.form.row_multiple)

    @property
    def stored_as_is(self) -> bool:
        """Whether a reader sees rows and columns without metadata."""
        return self.stored_rows == self.rows and self.padded_columns == self.columns

    def specs(self) -> list[TensorSpec]:
        """The tensors of the layer, in the order in which :func:`lay_out` gives them."""
        form = self.form
        layout = get_layout(self.layout)
        scales = layout.shape(self.stored_rows, block_columns(self.padded_columns))
        specs = [
            TensorSpec(self.name.data(form), "U8", self._stacked(data_shape(self.stored_rows, self.padded_columns))),
            TensorSpec(self.name.scales(form, self.layout), "F8_E4M3", self._stacked(scales)),
            TensorSpec(self.name.global_scale(form), "F32", self._scale_shape()),
        ]
        if self.input_shape is not None:
            specs.append(TensorSpec(self.name.input_scale(form), "F32", self.input_shape))
        return specs

    def _stacked(self, shape: tuple[int, int]) -> tuple[int, ...]:
        if self.transposed:
            shape = (shape[1], shape[0])
        return shape if self.experts is None else (self.experts, *shape)

    def _scale_shape(self) -> tuple[int, ...]:
        if self.fused_rows:
            return (len(self.fused_rows),)
        return self.form.scalar_shape if self.experts is None else (self.experts,)


def lay_out(
    target: TargetLayer, parts: Sequence[QuantizedTensor] | Iterator[QuantizedTensor], inputs: np.ndarray | None
) -> dict[str, np.ndarray]:
    """The arrays of a layer as its format wants them, by tensor name.

    Args:
        target: what to write.
        parts: its matrices in linear layout: experts, fused parts, or one.
        inputs: encode scales of the activations, or None.
    """
    data_spec, scale_spec, global_spec, *rest = target.specs()
    parts = iter(parts)
    first = next(parts)
    if target.experts is None and not target.fused_rows and target.stored_rows == target.rows:
        data, scales = _place(target, first)
        encode = [first.global_scale]
    else:
        data, scales, encode = _gather(target, first, parts, data_spec, scale_spec)
    arrays = {
        data_spec.name: data.reshape(data_spec.shape),
        scale_spec.name: scales.reshape(scale_spec.shape),
        global_spec.name: _stored_scale(target.form, np.concatenate(encode)).reshape(global_spec.shape),
    }
    if inputs is not None and target.input_shape is not None:
        arrays[rest[0].name] = _stored_scale(target.form, inputs).reshape(target.input_shape)
    return arrays


def _gather(
    target: TargetLayer,
    first: QuantizedTensor,
    parts: Iterator[QuantizedTensor],
    data_spec: TensorSpec,
    scale_spec: TensorSpec,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Stack experts or fused parts; rows that only the format adds are zero."""
    if target.fused_rows:
        whole = [first, *parts]
        joined = QuantizedTensor.trusted(
            np.concatenate([part.data for part in whole]),
            np.concatenate([part.scales for part in whole]),
            first.global_scale,
            (target.rows, target.columns),
            LINEAR,
            target.padded_columns,
        )
        encode = [part.global_scale for part in whole]
        first, parts = joined, iter(())
    else:
        encode = [first.global_scale]
    data = np.zeros((target.experts or 1, *data_spec.shape[-2:]), np.uint8)
    scales = np.zeros((target.experts or 1, *scale_spec.shape[-2:]), np.uint8)
    matrix = first
    for index in range(target.experts or 1):
        if index:
            matrix = next(parts)
            encode.append(matrix.global_scale)
        codes, block_scales = _place(target, matrix)
        data[index, : codes.shape[0]] = codes
        scales[index, : block_scales.shape[0]] = block_scales
    return data, scales, encode


def _place(target: TargetLayer, matrix: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one matrix in the nibble order, layout and orientation of the target."""
    data = swap_nibbles(matrix.data) if target.form.high_nibble_first else matrix.data
    scales = matrix.scales if target.layout == LINEAR else get_layout(target.layout).pack(matrix.scales)
    return (data.T, scales.T) if target.transposed else (data, scales)


def _stored_scale(form: Format, encode: np.ndarray) -> np.ndarray:
    return decode_scale(encode) if form.stores_decode else np.asarray(encode, np.float32)


def _encode_scales(store: Store, tensor: str, form: Format) -> np.ndarray:
    stored = np.array(store[tensor], np.float32).reshape(-1)
    encode = encode_scale(stored) if form.stores_decode else stored
    check_encode(encode, stored, f"{store.path}: {printable(tensor)}")
    return encode


def check_encode(encode: np.ndarray, stored: np.ndarray, what: str) -> None:
    """Refuse encode scales that one of the two conventions cannot hold; ``stored`` and ``what`` are for the message.

    Raises:
        CheckpointError: a scale is zero, negative, NaN or infinite, or its reciprocal is infinite.
    """
    for value, scale, reciprocal in zip(stored, encode, decode_scale(encode), strict=True):
        if not (math.isfinite(scale) and scale > 0 and math.isfinite(reciprocal)):
            raise CheckpointError(
                f"{what} is {value}; a global scale must be finite and positive, and so must its reciprocal and the "
                "reciprocal of that"
            )
