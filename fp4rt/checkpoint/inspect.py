"""What is in a checkpoint: files, dtypes, format, and for every quantized layer how its scales and codes are spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.detect import detect, read_configuration
from fp4rt.checkpoint.layers import global_scales, input_scales, matrices
from fp4rt.checkpoint.report import jsonable
from fp4rt.checkpoint.store import Store
from fp4rt.format import E2M1, E4M3, E4M3_MAX_BYTE, NEGATIVE_ZERO_CODE
from fp4rt.tensor import QuantizedTensor

__all__ = ["Inspection", "LayerSummary", "inspect"]

CHUNK = 1 << 20
BYTE_VALUES = 256


@dataclass
class LayerSummary:
    """One quantized layer.

    Attributes:
        name: name of its weight.
        shape: of the weight, in elements.
        layout: of its scales.
        nbytes: all its tensors together.
        global_scales: smallest and largest encode scale.
        input_scale: encode scale of the activations, None where there is none.
        blocks: how many; ``zero_blocks`` have scale 0, ``saturated_blocks`` the largest scale.
        scale_counts: blocks by e4m3 code of their scale, sign dropped (128).
        code_counts: elements by e2m1 code (16); empty unless asked for.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int
    global_scales: tuple[float, float]
    input_scale: float | None
    blocks: int
    zero_blocks: int
    saturated_blocks: int
    scale_counts: list[int]
    code_counts: list[int] = field(default_factory=list)


@dataclass
class Inspection:
    """A checkpoint from outside.

    Attributes:
        path: what was named.
        format: "modelopt", "compressed-tensors", "comfy" or "plain".
        evidence: where the format is claimed besides by names and shapes.
        files: (name, bytes, tensors) of every file.
        dtypes: tag -> (tensors, bytes).
        layers: the quantized layers.
        plain: (name, dtype, shape, bytes) of all other tensors.
        metadata: strings of the files.
    """

    path: str
    format: str
    evidence: list[str]
    files: list[tuple[str, int, int]]
    dtypes: dict[str, tuple[int, int]]
    layers: list[LayerSummary]
    plain: list[tuple[str, str, tuple[int, ...], int]]
    metadata: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain objects for JSON."""
        result: dict[str, Any] = jsonable(asdict(self))
        return result


def inspect(
    store: Store, wanted: str | None = None, codes: bool = False, progress: Callable[[int], None] | None = None
) -> Inspection:
    """Look at a checkpoint.

    Args:
        store: the checkpoint.
        wanted: its format where names and configuration do not tell.
        codes: count the codes too, which reads everything.
        progress: called with bytes as they are dealt with.

    Raises:
        CheckpointError: a layer is incomplete or a scale unusable, or the format cannot be told.
    """
    configuration = read_configuration(store)
    form = detect(store, configuration, wanted)
    layers = catalog(store, form)
    dtypes: dict[str, tuple[int, int]] = {}
    for name in store:
        entry = store.entry(name)
        count, nbytes = dtypes.get(entry.dtype, (0, 0))
        dtypes[entry.dtype] = (count + 1, nbytes + entry.nbytes)
    parts = {name for layer in layers.values() for name in layer.tensors}
    summaries = []
    for layer in layers.values():
        summaries.append(_summary(store, layer, codes))
        if progress is not None:
            progress(summaries[-1].nbytes)
    entries = [store.entry(name) for name in store if name not in parts]
    return Inspection(
        str(store.path),
        "plain" if form is None else form.name,
        [place for places in configuration.votes.values() for place in places],
        [(name, file.header.data_start + file.header.data_bytes, len(file)) for name, file in store.files.items()],
        dict(sorted(dtypes.items())),
        summaries,
        [(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in entries],
        {key: value for file in store.files.values() for key, value in file.metadata.items()},
    )


def _summary(store: Store, layer: StoredLayer, codes: bool) -> LayerSummary:
    encode, inputs = global_scales(store, layer), input_scales(store, layer)
    scale_counts = np.zeros(E4M3.magnitude_count, np.int64)
    code_counts = np.zeros(2 * E2M1.magnitude_count, np.int64)
    for q in matrices(store, layer):
        scale_counts += np.bincount(q.scales.reshape(-1) & 0x7F, minlength=scale_counts.size)
        if codes:
            code_counts += _count_codes(q)
    for name in layer.tensors:
        store.release(name)
    return LayerSummary(
        layer.name.weight,
        layer.shape,
        layer.layout,
        sum(store.entry(name).nbytes for name in layer.tensors),
        (float(encode.min()), float(encode.max())),
        None if inputs is None else float(inputs.min()),
        int(scale_counts.sum()),
        int(scale_counts[0]),
        int(scale_counts[E4M3_MAX_BYTE]),
        scale_counts.tolist(),
        code_counts.tolist() if codes else [],
    )


def _count_codes(q: QuantizedTensor) -> np.ndarray:
    """Elements by code, from a histogram of the bytes."""
    flat = np.ascontiguousarray(q.data).reshape(-1)
    histogram = np.zeros(BYTE_VALUES, np.int64)
    for start in range(0, flat.size, CHUNK):
        histogram += np.bincount(flat[start : start + CHUNK], minlength=BYTE_VALUES)
    codes = 2 * NEGATIVE_ZERO_CODE
    pairs = histogram.reshape(codes, codes)  # high nibble, low nibble
    return pairs.sum(axis=0) + pairs.sum(axis=1)
