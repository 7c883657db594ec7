"""Compare two checkpoints tensor by tensor, whatever their formats: quantized layers by value, others by byte.

Experts that one side stacks and the other keeps apart are compared as the modules that they are apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fp4rt import api
from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.experts import GATE_UP, ExpertPart, apart
from fp4rt.checkpoint.formats import LayerName, encode_scale
from fp4rt.checkpoint.layers import matrices, rows_of, stored_scales
from fp4rt.checkpoint.orientation import read_orientation
from fp4rt.checkpoint.store import Store
from fp4rt.tensor import QuantizedTensor

__all__ = ["Difference", "compare"]

SLAB_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How one weight of A is found in B.

    Attributes:
        name: name of the weight.
        verdict: "identical" (same codes and scales, or same bytes), "same values", "differs", "only in A", "only in B",
            or "other shape".
        max_error: largest absolute difference, infinite where one alone is NaN or infinite; None where values cannot be
            compared.
        sqnr_db: of B against A; infinite where there is no difference.
    """

    name: str
    verdict: str
    max_error: float | None = None
    sqnr_db: float | None = None

    @property
    def matches(self) -> bool:
        """Whether both hold the tensor with the same shape."""
        return self.verdict in ("identical", "same values", "differs")


@dataclass(frozen=True)
class _Weight:
    """What is compared under one name: a whole tensor or layer, or the part of a stack that is one expert's module."""

    name: str
    stored: str
    part: ExpertPart | None = None


class _Side:
    """One checkpoint as weights by name."""

    def __init__(self, store: Store, wanted: str | None) -> None:
        self.store = store
        self.layers = catalog(store, detect(store, read_configuration(store), wanted))
        parts = {name for layer in self.layers.values() for name in layer.tensors}
        self.names = dict.fromkeys((*self.layers, *(name for name in store if name not in parts)))
        self.lie = read_orientation(store)

    def weights(self, name: str, other: _Side) -> list[_Weight]:
        """The weight called ``name``, or the modules of its experts where the other side keeps these apart."""
        modules = self._modules(name) if name not in other.names else []
        found = any(module.name in other.names for module in modules)
        return modules if found else [_Weight(name, name)]

    def _modules(self, name: str) -> list[_Weight]:
        """What a stack of experts is apart; nothing for other tensors, and where gate and up alternate."""
        *stack, rows, _ = self._matrix_shape(name)
        base = LayerName.of_weight(name)
        whole = base.base.rpartition(".")[2] != GATE_UP or (rows % 2 == 0 and not self.lie.interleaved)
        if not stack or not whole:
            return []
        modules = [_Weight(part.name.weight, name, part) for part in apart(base, stack[0], rows)]
        return [] if any(module.name in self.names for module in modules) else modules

    def _matrix_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight as (n, k) or (e, n, k); for other tensors ones are put before it."""
        if name in self.layers:
            return self.layers[name].shape
        shape = self.store.entry(name).shape
        if len(shape) != 3:
            return (1, 1)
        return (shape[0], shape[2], shape[1]) if name in self.lie.transposed else shape

    def shape(self, weight: _Weight) -> tuple[int, ...]:
        if weight.part is not None:
            return (weight.part.end - weight.part.first, self._matrix_shape(weight.stored)[-1])
        layer = self.layers.get(weight.stored)
        if layer is None:
            return self.store.entry(weight.stored).shape
        *stack, rows, columns = layer.shape
        return (*stack, columns, rows) if layer.transposed else layer.shape

    def quantized(self, weight: _Weight) -> Iterator[QuantizedTensor]:
        """The matrices of a quantized weight."""
        layer, part = self.layers[weight.stored], weight.part
        if part is None:
            yield from matrices(self.store, layer)
        else:
            yield rows_of(next(matrices(self.store, layer, first=part.expert)), part.first, part.end)

    def scales(self, weight: _Weight, as_stored: bool) -> list[bytes]:
        """The global scales of a quantized weight and of its activations: one for each of its matrices, fp32."""
        layer, part = self.layers[weight.stored], weight.part
        found = list(stored_scales(self.store, layer).values())
        if layer.form.stores_decode and not as_stored:
            found = [encode_scale(scales) for scales in found]
        count = len(layer.fused_rows) or layer.experts or 1
        own = slice(None) if part is None else slice(part.expert, part.expert + 1)
        return [np.broadcast_to(np.float32(scales), (count,))[own].tobytes() for scales in found]

    def plain(self, weight: _Weight) -> np.ndarray:
        """An unquantized weight."""
        array, part = self.store[weight.stored], weight.part
        if part is None:
            return array
        matrix: np.ndarray = array[part.expert]
        return (matrix.T if weight.stored in self.lie.transposed else matrix)[part.first : part.end]

    def values(self, weight: _Weight) -> list[np.ndarray] | None:
        """The matrices of a weight as they are stored or dequantized to fp32; None for what holds no floats."""
        layer = self.layers.get(weight.stored)
        if layer is not None:
            parts = [api.dequantize(q) for q in self.quantized(weight)]
            if layer.fused_rows:
                parts = [np.concatenate(parts)]
            return [part.T for part in parts] if layer.transposed and weight.part is None else parts
        if self.store.entry(weight.stored).dtype not in (*FLOAT_TAGS, "F64"):
            return None
        array = self.plain(weight)
        return list(array) if array.ndim == 3 else [array]


def compare(
    a: Store,
    b: Store,
    formats: tuple[str | None, str | None] = (None, None),
    progress: Callable[[int], None] | None = None,
) -> list[Difference]:
    """Compare B with A, weight by weight, in A's order.

    Args:
        a: the reference.
        b: what is compared with it.
        formats: their formats where names and configuration do not tell.
        progress: called with the bytes of A that were dealt with.
    """
    left, right = _Side(a, formats[0]), _Side(b, formats[1])
    others = {weight.name: weight for name in right.names for weight in right.weights(name, left)}
    result = []
    for name in left.names:
        for weight in left.weights(name, right):
            other = others.pop(weight.name, None)
            result.append(Difference(weight.name, "only in A") if other is None else _one(left, right, weight, other))
        tensors = left.layers[name].tensors if name in left.layers else (name,)
        for tensor in tensors:
            a.release(tensor)
            if progress is not None:
                progress(a.entry(tensor).nbytes)
    return result + [Difference(name, "only in B") for name in others]


def _one(left: _Side, right: _Side, weight: _Weight, other: _Weight) -> Difference:
    name = weight.name
    if left.shape(weight) != right.shape(other):
        return Difference(name, "other shape")
    if _identical(left, right, weight, other):
        return Difference(name, "identical", 0.0, math.inf)
    values = left.values(weight), right.values(other)
    if values[0] is None or values[1] is None:
        return Difference(name, "differs")
    signal = noise = largest = 0.0
    for x, y in zip(values[0], values[1], strict=True):
        x, y = np.atleast_1d(x), np.atleast_1d(y)
        step = max(1, SLAB_ELEMENTS // max(1, x[:1].size))
        for row in range(0, len(x), step):
            first, error = _errors(*(np.asarray(side[row : row + step], np.float64) for side in (x, y)))
            signal += float(np.square(first).sum())
            noise += float(np.square(error).sum())
            largest = max(largest, float(error.max(initial=0)))
    if noise == 0:
        return Difference(name, "same values", 0.0, math.inf)
    ratio = signal / noise
    return Difference(name, "differs", largest, 10 * math.log10(ratio) if ratio > 0 else -math.inf)


def _errors(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A's values and how far B's are from them: infinitely far where one alone is NaN or infinite.

    What is NaN, or the same infinity, in both is 0 in either array.
    """
    with np.errstate(invalid="ignore"):
        error = np.abs(second - first)
    finite = np.isfinite(error)
    if finite.all():
        return first, error
    alike = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(finite, first, 0), np.where(finite, error, np.where(alike, 0, np.inf))


def _identical(left: _Side, right: _Side, weight: _Weight, other: _Weight) -> bool:
    """Same bytes; for quantized layers the same codes and scales, however they lie.

    Global scales are compared as they are stored, or as encode scales where only one side stores these.
    """
    layers: tuple[StoredLayer | None, StoredLayer | None] = (
        left.layers.get(weight.stored),
        right.layers.get(other.stored),
    )
    if layers[0] is None and layers[1] is None:
        entries = left.store.entry(weight.stored), right.store.entry(other.stored)
        if entries[0].dtype != entries[1].dtype:
            return False
        if weight.part is None and other.part is None:
            return left.store.raw(weight.stored) == right.store.raw(other.stored)
        return left.plain(weight).tobytes() == right.plain(other).tobytes()
    if layers[0] is None or layers[1] is None or layers[0].fused_rows != layers[1].fused_rows:
        return False
    as_stored = layers[0].form.stores_decode == layers[1].form.stores_decode
    if left.scales(weight, as_stored) != right.scales(other, as_stored):
        return False
    pairs = zip(left.quantized(weight), right.quantized(other), strict=True)
    return all(np.array_equal(x.scales, y.scales) and np.array_equal(x.data, y.data) for x, y in pairs)
