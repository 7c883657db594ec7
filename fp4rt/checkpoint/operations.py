"""What can happen to a tensor on its way from one checkpoint into another: copy, quantize, convert, dequantize, fuse.

An operation is plain data that a worker process can receive. It says beforehand which tensors it will write, and then
makes them from the source, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fp4rt import api
from fp4rt.checkpoint.catalog import FUSED_METADATA, SHAPES_METADATA, StoredLayer
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.formats import COMFY, Format, LayerName
from fp4rt.checkpoint.fusing import FusedParts, fuse
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.layers import TargetLayer, input_scales, lay_out, matrices, rows_of, wrong_scales
from fp4rt.checkpoint.methods import METHODS, Method, NonFinite, quantize_matrix, reach
from fp4rt.checkpoint.report import Measurement, TensorReport
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.writer import TensorSpec
from fp4rt.errors import CheckpointError
from fp4rt.format import E2M1_MAX, E4M3
from fp4rt.layout import get_layout
from fp4rt.tensor import QuantizedTensor

__all__ = ["Convert", "Copy", "Dequantize", "Fuse", "Join", "Operation", "Quantize", "target_metadata", "target_of"]

FP16_MAX = float(np.finfo(np.float16).max)
Arrays = dict[str, np.ndarray]


class Operation(Protocol):
    """One step of a shard."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the source's tensors, for the order of work and the progress in bytes."""

    def specs(self) -> list[TensorSpec]:
        """The tensors that it writes."""

    def targets(self) -> list[TargetLayer]:
        """The quantized layers that it writes."""

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Make the tensors. The report is complete when the iterator is exhausted."""


@dataclass(frozen=True)
class Copy:
    """Keep a tensor byte for byte. The writer takes the bytes straight from the source file."""

    spec: TensorSpec
    note: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensor itself."""
        return (self.spec.name,)

    def specs(self) -> list[TensorSpec]:
        """The tensor itself."""
        return [self.spec]

    def targets(self) -> list[TargetLayer]:
        """None."""
        return []

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Nothing to compute."""
        spec = self.spec
        row = TensorReport(spec.name, "copied", spec.shape, spec.dtype, spec.nbytes, spec.nbytes, note=self.note)
        return iter(()), row


@dataclass(frozen=True)
class Quantize:
    """Turn a float weight, or a stack of them, into NVFP4.

    Attributes:
        source: the weight as it is stored.
        target: the layer to write; its extents are those of the weight.
        method: how scales are chosen.
        input_encode: encode scale to store for activations, None for none.
        compare: measure the other methods too.
        histograms: count errors and scales for a picture.
        joined: weights that share its global scale, itself among them; empty where none do.
    """

    source: TensorSpec
    target: TargetLayer
    method: Method
    input_encode: float | None = None
    compare: bool = False
    histograms: bool = False
    joined: tuple[TensorSpec, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The weight."""
        return (self.source.name,)

    def specs(self) -> list[TensorSpec]:
        """Codes and scales."""
        return self.target.specs()

    def targets(self) -> list[TargetLayer]:
        """The layer."""
        return [self.target]

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Quantize and measure."""
        shape = (self.target.rows, self.target.columns)
        full = shape if self.target.experts is None else (self.target.experts, *shape)
        after = sum(spec.nbytes for spec in self.specs())
        row = TensorReport(
            self.source.name, "quantized", full, self.source.dtype, self.source.nbytes, after, str(self.method)
        )
        others = [LayerName.of_weight(spec.name).base for spec in self.joined if spec != self.source]
        if others:
            row.note = f"one global scale with {', '.join(name.rpartition('.')[2] for name in others)}"
        return self._arrays(store, row), row

    def _arrays(self, store: Store, row: TensorReport) -> Iterator[Arrays]:
        weight = store[self.source.name]
        measured = Measurement(self.histograms)
        others = {name: Measurement() for name in METHODS if self.compare and name != self.method.name}

        def parts() -> Iterator[QuantizedTensor]:
            for index in range(self.target.experts or 1):
                x = weight if self.target.experts is None else weight[index]
                x = np.require(x.T if self.target.transposed else x, requirements=("C", "A"))
                q = quantize_matrix(x, self.method, self._reach(store, self.method, index))
                measured.add(x, q)
                for name, other in others.items():
                    method = Method(name, self.method.percentile)
                    other.add(x, quantize_matrix(x, method, self._reach(store, method, index)))
                yield q

        inputs = None if self.input_encode is None else np.array([self.input_encode], np.float32)
        arrays = lay_out(self.target, parts(), inputs)
        measured.fill(row)
        row.methods = {name: other.sqnr_db for name, other in others.items()}
        yield arrays

    def _reach(self, store: Store, method: Method, index: int) -> float:
        """What the global scale is made from: the largest of all weights that share it."""
        return max(self._reach_of(store, spec, method, index) for spec in self.joined or (self.source,))

    def _reach_of(self, store: Store, spec: TensorSpec, method: Method, index: int) -> float:
        key = spec.name, method, index
        if key not in store.reaches:
            weight = store[spec.name]
            x = weight if self.target.experts is None else weight[index]
            try:
                store.reaches[key] = reach(np.require(x, requirements=("C", "A")), method)
            except NonFinite as error:
                place = error.position if self.target.experts is None else (index, *error.position)
                raise CheckpointError(
                    f"{store.path}: {printable(spec.name)} holds {error.value} at {list(place)}; "
                    "NVFP4 has no code for it; repair the weight, or leave it with --exclude"
                ) from None
            if spec != self.source:
                store.release(spec.name)
        return store.reaches[key]


@dataclass(frozen=True)
class Convert:
    """Move a layer into another format; every code and block scale is kept.

    ``pieces`` are what it becomes: itself, or the experts of a stack as (layer, expert, first row, end row).
    """

    layer: StoredLayer
    pieces: tuple[tuple[TargetLayer, int, int, int], ...]
    nbytes: int

    @property
    def reads(self) -> tuple[str, ...]:
        """All parts of the layer."""
        return self.layer.tensors

    def specs(self) -> list[TensorSpec]:
        """The parts in the new format."""
        return [spec for target in self.targets() for spec in target.specs()]

    def targets(self) -> list[TargetLayer]:
        """The layers that it becomes."""
        return [target for target, *_ in self.pieces]

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Lay the bytes out anew."""
        after = sum(spec.nbytes for spec in self.specs())
        action = "converted" if len(self.pieces) == 1 else "split"
        row = TensorReport(self.layer.name.weight, action, self.layer.shape, self.layer.form.name, self.nbytes, after)
        return self._arrays(store), row

    def _arrays(self, store: Store) -> Iterator[Arrays]:
        inputs = input_scales(store, self.layer)
        if len(self.pieces) == 1:
            yield lay_out(self.pieces[0][0], matrices(store, self.layer), inputs)
            return
        experts = enumerate(matrices(store, self.layer))
        current, matrix = next(experts)
        for target, expert, first, end in self.pieces:
            if expert != current:
                current, matrix = next(experts)
            own = inputs if inputs is None or inputs.size == 1 else inputs[expert : expert + 1]
            yield lay_out(target, iter((rows_of(matrix, first, end),)), own)


@dataclass(frozen=True)
class Dequantize:
    """Turn a layer into floats of ``dtype`` (a tag)."""

    layer: StoredLayer
    dtype: str
    nbytes: int

    @property
    def reads(self) -> tuple[str, ...]:
        """All parts of the layer."""
        return self.layer.tensors

    def specs(self) -> list[TensorSpec]:
        """The weight."""
        *stack, rows, columns = self.layer.shape
        shape = (*stack, columns, rows) if self.layer.transposed else self.layer.shape
        return [TensorSpec(self.layer.name.weight, self.dtype, shape)]

    def targets(self) -> list[TargetLayer]:
        """None."""
        return []

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Dequantize."""
        (spec,) = self.specs()
        row = TensorReport(
            self.layer.name.weight, "dequantized", self.layer.shape, self.layer.form.name, self.nbytes, spec.nbytes
        )
        return self._arrays(store, spec, row), row

    def _arrays(self, store: Store, spec: TensorSpec, row: TensorReport) -> Iterator[Arrays]:
        parts = []
        for q in matrices(store, self.layer):
            row.count_wrong(wrong_scales(q))
            parts.append(self._floats(store, q))
        if self.layer.transposed:
            parts = [part.T for part in parts]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        yield {spec.name: whole.reshape(spec.shape)}

    def _floats(self, store: Store, q: QuantizedTensor) -> np.ndarray:
        values: np.ndarray = api.dequantize(q, FLOAT_TAGS[self.dtype])
        largest = float(np.nanmax(np.abs(E4M3.values[q.scales]), initial=0)) * E2M1_MAX / float(q.global_scale[0])
        if self.dtype == "F16" and largest > FP16_MAX and np.isinf(values).any():
            raise CheckpointError(
                f"{store.path}: {printable(self.layer.name.weight)} has values beyond {FP16_MAX:g}, the largest of "
                "float16; use bf16 or fp32"
            )
        return values


@dataclass(frozen=True)
class Join:
    """Join unquantized tensors by rows: the biases of fused layers."""

    names: tuple[str, ...]
    target: TensorSpec

    @property
    def nbytes(self) -> int:
        """Bytes read, which are those written."""
        return self.target.nbytes

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors."""
        return self.names

    def specs(self) -> list[TensorSpec]:
        """The joined tensor."""
        return [self.target]

    def targets(self) -> list[TargetLayer]:
        """None."""
        return []

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Join the bytes."""
        target = self.target
        row = TensorReport(target.name, "fused", target.shape, target.dtype, target.nbytes, target.nbytes)
        return iter(({target.name: np.concatenate([store[name] for name in self.names])},)), row


@dataclass(frozen=True)
class Fuse:
    """Join layers by rows into one, as serving engines do with q, k and v."""

    layers: tuple[StoredLayer, ...]
    target: TargetLayer
    mode: str
    nbytes: int

    @property
    def reads(self) -> tuple[str, ...]:
        """All parts of all layers."""
        return tuple(name for layer in self.layers for name in layer.tensors)

    def specs(self) -> list[TensorSpec]:
        """The parts of the fused layer."""
        return self.target.specs()

    def targets(self) -> list[TargetLayer]:
        """The fused layer."""
        return [self.target]

    def run(self, store: Store) -> tuple[Iterator[Arrays], TensorReport]:
        """Join, and state the loss."""
        after = sum(spec.nbytes for spec in self.specs())
        target = self.target
        row = TensorReport(
            target.name.weight, "fused", (target.rows, target.columns), self.layers[0].form.name, self.nbytes, after
        )
        return self._arrays(store, row), row

    def _arrays(self, store: Store, row: TensorReport) -> Iterator[Arrays]:
        parts = [next(matrices(store, layer)) for layer in self.layers]
        result: FusedParts = fuse(parts, self.mode)
        row.sqnr_db, row.max_error, row.note = result.sqnr_db, result.max_error, result.describe()
        inputs = [scale for layer in self.layers if (scale := input_scales(store, layer)) is not None]
        # One activation feeds all parts: the scale that clips none is the smallest encode scale.
        yield lay_out(self.target, iter(result.parts), np.min(np.stack(inputs), axis=0) if inputs else None)


def target_metadata(targets: Iterable[TargetLayer]) -> dict[str, Any]:
    """What the tensors of a file do not say themselves: logical shapes, fused rows, and ComfyUI's table of layers."""
    shapes, fused, comfy = {}, {}, {}
    for target in targets:
        if not target.stored_as_is:
            shapes[target.name.weight] = [target.rows, target.columns]
        if target.fused_rows:
            fused[target.name.weight] = list(target.fused_rows)
        if target.form.name == COMFY.name:
            comfy[target.name.base] = {"format": "nvfp4"}
    return {SHAPES_METADATA: shapes, FUSED_METADATA: fused, "comfy": comfy}


def target_of(source: StoredLayer, form: Format, layout: str, input_shape: tuple[int, ...] | None) -> TargetLayer:
    """The same layer in another format."""
    return TargetLayer(
        source.name,
        form,
        get_layout(layout).name,
        source.experts,
        source.rows,
        source.columns,
        source.padded_columns,
        source.transposed,
        source.fused_rows,
        input_shape,
    )
