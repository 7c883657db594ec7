"""Does a checkpoint keep every invariant of its format? Nothing is assumed of who wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4rt.checkpoint.catalog import StoredLayer, catalog
from fp4rt.checkpoint.configs import kept_linears
from fp4rt.checkpoint.detect import Configuration, detect, read_configuration
from fp4rt.checkpoint.formats import COMFY
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.joined import joined_modules, missing_parts
from fp4rt.checkpoint.layers import global_scales, input_scales, matrices, wrong_scales
from fp4rt.checkpoint.selection import EMBEDDING, ROUTER, is_listed
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, counted
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import block_columns, ceil_div, get_layout
from fp4rt.tensor import QuantizedTensor

__all__ = ["Finding", "verify"]


@dataclass(frozen=True)
class Finding:
    """One broken invariant. ``severity`` is "error", or "warning" where values are right but unusual."""

    severity: str
    tensor: str
    message: str


def verify(
    store: Store,
    wanted: str | None = None,
    progress: Callable[[int], None] | None = None,
    layers_needed: bool = False,
) -> list[Finding]:
    """Check every quantized layer, and the configuration against the layers.

    Opening the store has checked headers and index already. Checked here: all parts present, with fitting dtypes and
    shapes; block scales neither NaN nor negative; padding of codes and scales zero; global scales finite and positive;
    configuration and layers in agreement; where engines join layers, all of them quantized, with one global scale; the
    size that the index tells.

    Args:
        store: the checkpoint.
        wanted: its format where names and configuration do not tell.
        progress: called with bytes as they are dealt with.
        layers_needed: refuse a checkpoint without quantized layers.

    Raises:
        CheckpointError: the format cannot be told, a layer is incomplete, or there is none though one is needed.
    """
    configuration = read_configuration(store)
    layers = catalog(store, detect(store, configuration, wanted))
    if layers_needed and not layers:
        raise CheckpointError(f"no NVFP4 layers in {store.path}; `fp4rt quantize` makes them")
    plain = _plain_linears(store, layers)
    findings = [*_index(store), *_configuration(configuration, layers), *_unlisted(store, configuration, plain)]
    for layer in layers.values():
        findings.extend(_layer(store, layer))
        for tensor in layer.tensors:
            store.release(tensor)
            if progress is not None:
                progress(store.entry(tensor).nbytes)
    broken = {finding.tensor for finding in findings if finding.severity == "error"}
    sound = {layer.name.base: layer for layer in layers.values() if layer.name.weight not in broken}
    return findings + list(_joined(store, sound)) + list(_half_joined(layers, plain))


def _half_joined(layers: dict[str, StoredLayer], plain: tuple[str, ...]) -> Iterator[Finding]:
    """Layers that engines would join with some that are not quantized; ComfyUI joins none."""
    bases = {layer.name.base: layer for layer in layers.values() if layer.form.name != COMFY.name}
    for module, others in sorted(missing_parts(bases, plain).items()):
        names = ", ".join(map(printable, others))
        message = f"is quantized, {names} beside it not; engines that join them take all of them or none"
        yield Finding("warning", bases[module].name.weight, message)


def _plain_linears(store: Store, layers: dict[str, StoredLayer]) -> tuple[str, ...]:
    """Names of the linear modules that are not quantized."""
    parts = {name for layer in layers.values() for name in layer.tensors}
    plain = (store.entry(name) for name in store if name not in parts)
    return kept_linears(plain, [layer.name.base for layer in layers.values()])


def _joined(store: Store, layers: dict[str, StoredLayer]) -> Iterator[Finding]:
    """Layers that serving engines join, with different global scales; ComfyUI joins none."""
    for module, together in sorted(joined_modules(layers).items()):
        first, own = layers[together[0]], layers[module]
        if own.form.name == COMFY.name or own.experts != first.experts:
            continue
        if not np.array_equal(global_scales(store, own), global_scales(store, first)):
            message = (
                f"has another global scale than {printable(first.name.base.rpartition('.')[2])}; engines that join the "
                "two compute with one for both"
            )
            yield Finding("warning", own.name.weight, message)


def _index(store: Store) -> Iterator[Finding]:
    """A size in the index that is not that of the tensors; loaders plan memory by it."""
    index, size = store.location.index, store.location.total_size
    if index is not None and size is not None and (isinstance(size, bool) or size != store.nbytes):
        message = f"metadata.total_size is {printable(size)}; the tensors have {counted(store.nbytes, 'byte')}"
        yield Finding("warning", index.name, message)


def _layer(store: Store, layer: StoredLayer) -> Iterator[Finding]:
    for check in (global_scales, input_scales):
        try:
            check(store, layer)
        except CheckpointError as error:
            yield Finding("error", layer.name.weight, _without_path(store, error))
            return
    yield from _scale_padding(store, layer)
    yield from _row_padding(store, layer)
    first = 0
    for index, q in enumerate(matrices(store, layer)):
        where = f"expert {index}, " if layer.experts is not None else ""
        yield from _matrix(layer, q, where, 0 if layer.experts is not None else first)
        first += q.shape[0]


def _matrix(layer: StoredLayer, q: QuantizedTensor, where: str, first_row: int) -> Iterator[Finding]:
    """Block scales and the padding behind the columns of one matrix."""
    scales, name = q.scales, layer.name.weight
    for what, wrong in wrong_scales(q).items():
        count = int(np.count_nonzero(wrong))
        if count:
            row, column = np.unravel_index(int(np.argmax(wrong)), scales.shape)
            place = f"{where}row {first_row + int(row)}, block {int(column)}"
            value = scales[row, column]
            found = counted(count, "block scale is", "block scales are")
            yield Finding("error", name, f"{found} {what}, first 0x{value:02X} at {place}")
    used = ceil_div(q.shape[1], BLOCK)
    if np.any(scales[:, used:]):
        yield Finding("error", name, f"{where}scales of blocks behind column {q.shape[1]} are not zero")
    if _codes_behind(q):
        yield Finding("error", name, f"{where}codes behind column {q.shape[1]} are not zero")
    zero = scales == 0
    if zero.any():
        blocks = q.data.reshape(q.shape[0], -1, BLOCK // CODES_PER_BYTE)
        stray = int(np.count_nonzero(zero & blocks.any(axis=2)))
        if stray:
            found = counted(stray, "block of scale 0 has", "blocks of scale 0 have")
            yield Finding("warning", name, f"{where}{found} codes that are not 0")


def _codes_behind(q: QuantizedTensor) -> bool:
    first, odd = divmod(q.shape[1], CODES_PER_BYTE)
    if odd and np.any(q.data[:, first] >> 4):
        return True
    return bool(np.any(q.data[:, first + odd :]))


def _scale_padding(store: Store, layer: StoredLayer) -> Iterator[Finding]:
    """Bytes of a tiled layout that belong to no block."""
    layout = get_layout(layer.layout)
    if not layout.tiled:
        return
    stored = store[layer.scales].view(np.uint8).reshape(layer.experts or 1, -1)
    mask = layout.padding_mask(layer.stored_rows, block_columns(layer.padded_columns)).reshape(-1)
    wrong = int(np.count_nonzero(stored[:, mask]))
    if wrong:
        found = counted(
            wrong, f"padding byte of {layer.layout} scales is", f"padding bytes of {layer.layout} scales are"
        )
        yield Finding("error", layer.name.weight, f"{found} not zero")


def _row_padding(store: Store, layer: StoredLayer) -> Iterator[Finding]:
    """Rows that only the format stores."""
    if layer.stored_rows == layer.rows:
        return
    stored = store[layer.data].reshape(layer.experts or 1, layer.stored_rows, -1)
    if np.any(stored[:, layer.rows :]):
        yield Finding("error", layer.name.weight, f"codes of rows behind row {layer.rows} are not zero")


def _configuration(configuration: Configuration, layers: dict[str, StoredLayer]) -> Iterator[Finding]:
    """Layers that the configuration excludes, though they are quantized."""
    patterns = _excluded(configuration)
    for layer in layers.values():
        excluded = next((pattern for pattern in patterns if is_listed(pattern, layer.name.weight)), None)
        if excluded is not None and layer.form.name != COMFY.name:
            message = f"is quantized, but the configuration excludes it by {excluded!r}"
            yield Finding("error", layer.name.weight, message)


def _excluded(configuration: Configuration) -> list[str]:
    """Its patterns of modules that are not quantized."""
    patterns = [*_strings(configuration.quantization.get("ignore"))]
    return patterns + _strings(configuration.hf_quant.get("quantization", {}).get("exclude_modules"))


def _unlisted(store: Store, configuration: Configuration, plain: tuple[str, ...]) -> Iterator[Finding]:
    """Layers that are not quantized, though the configuration says so of every linear one that it does not exclude.

    Engines never take embeddings and routers for quantized; and a part of a name, too, excludes for vLLM.
    """
    if not _means_every_linear(configuration):
        return
    patterns = _excluded(configuration)
    for module in plain:
        weight = f"{module}.weight"
        excluded = any(each in module or is_listed(each, weight) for each in patterns)
        if weight in store and not excluded and not EMBEDDING.search(module) and not ROUTER.search(module):
            yield Finding("warning", weight, "is not quantized, but the configuration does not exclude it")


def _means_every_linear(configuration: Configuration) -> bool:
    """Whether it names no layers of its own, or those of the class Linear."""
    hf_quant = configuration.hf_quant.get("quantization", {})
    if isinstance(hf_quant, dict) and hf_quant.get("quant_algo") == "NVFP4":
        return True
    groups = configuration.quantization.get("config_groups")
    named = (
        [group.get("targets") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return named == [["Linear"]]


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _without_path(store: Store, error: Exception) -> str:
    return str(error).removeprefix(f"{store.path}: ")
