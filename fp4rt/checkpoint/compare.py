"""Compare two checkpoints tensor by tensor, whatever their formats: quantized layers by value, others by byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp4rt import api
from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.layers import matrices
from fp4rt.checkpoint.store import Store

__all__ = ["Difference", "compare"]

SLAB_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How one weight of A is found in B.

    Attributes:
        name: name of the weight.
        verdict: "identical" (same codes and block scales, or same bytes), "same values", "differs", "only in A",
            "only in B", or "other shape".
        max_error: largest absolute difference; None where values cannot be compared.
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


class _Side:
    """One checkpoint as weights by name."""

    def __init__(self, store: Store, wanted: str | None) -> None:
        self.store = store
        self.layers = catalog(store, detect(store, read_configuration(store), wanted))
        parts = {name for layer in self.layers.values() for name in layer.tensors}
        self.names = [*self.layers, *(name for name in store if name not in parts)]

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self.layers.get(name)
        if layer is None:
            return self.store.entry(name).shape
        *stack, rows, columns = layer.shape
        return (*stack, columns, rows) if layer.transposed else layer.shape

    def values(self, name: str) -> list[np.ndarray] | None:
        """The matrices of a weight as they are stored or dequantized to fp32; None for what holds no floats."""
        layer = self.layers.get(name)
        if layer is not None:
            parts = [api.dequantize(q) for q in matrices(self.store, layer)]
            if layer.fused_rows:
                parts = [np.concatenate(parts)]
            return [part.T for part in parts] if layer.transposed else parts
        if self.store.entry(name).dtype not in (*FLOAT_TAGS, "F64"):
            return None
        array = self.store[name]
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
    known = set(left.names)
    result = []
    others = set(right.names)
    for name in left.names:
        result.append(_one(left, right, name) if name in others else Difference(name, "only in A"))
        tensors = left.layers[name].tensors if name in left.layers else (name,)
        for tensor in tensors:
            a.release(tensor)
            if progress is not None:
                progress(a.entry(tensor).nbytes)
    result += [Difference(name, "only in B") for name in right.names if name not in known]
    return result


def _one(left: _Side, right: _Side, name: str) -> Difference:
    if left.shape(name) != right.shape(name):
        return Difference(name, "other shape")
    if _identical(left, right, name):
        return Difference(name, "identical", 0.0, math.inf)
    values = left.values(name), right.values(name)
    if values[0] is None or values[1] is None:
        return Difference(name, "differs")
    signal = noise = largest = 0.0
    for x, y in zip(values[0], values[1], strict=True):
        step = max(1, SLAB_ELEMENTS // max(1, x[:1].size))
        for row in range(0, len(x) if x.ndim else 1, step):
            first = np.asarray(x[row : row + step] if x.ndim else x, np.float64)
            second = np.asarray(y[row : row + step] if y.ndim else y, np.float64)
            difference = second - first
            signal += float(np.square(first).sum())
            noise += float(np.square(difference).sum())
            largest = max(largest, float(np.abs(difference).max(initial=0)))
    if noise == 0:
        return Difference(name, "same values", 0.0, math.inf)
    ratio = signal / noise
    return Difference(name, "differs", largest, 10 * math.log10(ratio) if ratio > 0 else -math.inf)


def _identical(left: _Side, right: _Side, name: str) -> bool:
    """Same bytes; for quantized layers the same codes, block scales and global scales, however they lie."""
    layers: tuple[StoredLayer | None, StoredLayer | None] = (left.layers.get(name), right.layers.get(name))
    if layers[0] is None and layers[1] is None:
        entries = left.store.entry(name), right.store.entry(name)
        return entries[0].dtype == entries[1].dtype and left.store.raw(name) == right.store.raw(name)
    if layers[0] is None or layers[1] is None or layers[0].fused_rows != layers[1].fused_rows:
        return False
    pairs = zip(matrices(left.store, layers[0]), matrices(right.store, layers[1]), strict=True)
    return all(
        np.array_equal(x.global_scale, y.global_scale)
        and np.array_equal(x.scales, y.scales)
        and np.array_equal(x.data, y.data)
        for x, y in pairs
    )
