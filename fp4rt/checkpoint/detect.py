"""Which format a checkpoint is in: from tensor names, dtypes and configuration; never from a guess.

Names decide between compressed-tensors and the two formats that call the codes ``weight``. Those two differ in nibble
order and scale layout, so one of these has to tell them apart: the configuration, the metadata of the files, the name
of a scale tensor, or the shape of the scales of at least one layer. Where evidence is missing or contradicts itself
the error lists what was seen, and the caller names the format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fp4rt.checkpoint.folder import CONFIG, QUANT_CONFIG, read_configuration_file
from fp4rt.checkpoint.formats import COMFY, COMPRESSED_TENSORS, FORMATS, MODELOPT, SCALES, Format, LayerName
from fp4rt.checkpoint.header import printable
from fp4rt.checkpoint.store import Store
from fp4rt.errors import CheckpointError, counted
from fp4rt.format import BLOCK, CODES_PER_BYTE
from fp4rt.layout import LAYOUTS, block_columns

__all__ = ["COMFY_METADATA", "Configuration", "detect", "read_configuration"]

COMFY_METADATA = "_quantization_metadata"
COMFY_TENSOR = "comfy_quant"
CONFIG_METADATA = "quantization_config"
CT_FORMAT = "nvfp4-pack-quantized"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


@dataclass
class Configuration:
    """What the files beside the tensors say.

    Attributes:
        config: the folder's config.json; empty where there is none.
        quantization: the ``quantization_config`` of config.json or of the files' metadata.
        hf_quant: the folder's hf_quant_config.json.
        votes: format name -> where that format was claimed.
    """

    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    hf_quant: dict[str, Any] = field(default_factory=dict)
    votes: dict[str, list[str]] = field(default_factory=dict)

    def vote(self, name: str, place: str) -> None:
        """Note that ``place`` claims the format ``name``."""
        self.votes.setdefault(name, []).append(place)


def read_configuration(store: Store) -> Configuration:
    """Read the configuration of a checkpoint.

    Raises:
        CheckpointError: a file is no JSON object, names a block size other than 16, or links out of the folder.
    """
    result = Configuration()
    folder = store.location.folder
    config, hf_quant = (
        read_configuration_file(store.location, name) if store.location.is_folder else None
        for name in (CONFIG, QUANT_CONFIG)
    )
    if config is not None:
        result.config = config
        result.quantization = _object(_quantization_of(config), f"{folder / CONFIG}: {CONFIG_METADATA}")
        _vote_for_method(result, result.quantization, CONFIG)
    if hf_quant is not None:
        result.hf_quant = hf_quant
        result.vote(MODELOPT.name, QUANT_CONFIG)
        _check_hf_quant(hf_quant, str(folder / QUANT_CONFIG))
    for name, file in store.files.items():
        if COMFY_METADATA in file.metadata:
            result.vote(COMFY.name, f"{COMFY_METADATA} of {name}")
        if CONFIG_METADATA in file.metadata and not result.quantization:
            place = f"{CONFIG_METADATA} of {name}"
            result.quantization = _object(_json(file.metadata[CONFIG_METADATA], place), place)
            _vote_for_method(result, result.quantization, place)
    marker = next((name for name in store if name.endswith(f".{COMFY_TENSOR}")), None)
    if marker is not None:
        result.vote(COMFY.name, f"tensor {printable(marker)}")
    return result


def _quantization_of(config: dict[str, Any]) -> Any:
    """``quantization_config``; of models with several parts, that of a part."""
    parts = (part for part in config.values() if isinstance(part, dict) and CONFIG_METADATA in part)
    return config[CONFIG_METADATA] if CONFIG_METADATA in config else next(parts, {}).get(CONFIG_METADATA)


def detect(store: Store, configuration: Configuration, wanted: str | None = None) -> Format | None:
    """The format of a checkpoint; None where nothing in it is NVFP4.

    Args:
        store: the tensors.
        configuration: what the files beside them say.
        wanted: the format's name where the caller knows it; then only the names of the tensors must agree.

    Raises:
        CheckpointError: the evidence is missing, contradicts itself, or names a quantization that is not NVFP4.
    """
    packed = [name for name in store if name.endswith(".weight_packed") and store.entry(name).dtype == "U8"]
    plain = _coded_weights(store)
    if packed and plain:
        raise CheckpointError(
            f"{store.path}: names of two formats: {printable(packed[0])} (compressed-tensors) and "
            f"{printable(plain[0].weight)} with scales (modelopt or comfy); convert them apart"
        )
    if not packed and not plain:
        _check_without_codes(store, configuration)
        return None
    families = {COMPRESSED_TENSORS.name} if packed else {MODELOPT.name, COMFY.name}
    if wanted is not None:
        if wanted not in FORMATS:
            raise CheckpointError(f"unknown format {wanted!r}; use one of {', '.join(FORMATS)}")
        if wanted not in families:
            names = " or ".join(sorted(families))
            raise CheckpointError(f"{store.path}: is not {wanted}: its tensors are named as in {names}")
        return FORMATS[wanted]
    claimed = set(configuration.votes)
    if len(claimed) > 1 or not claimed <= families:
        raise _contradiction(store, configuration, families)
    if claimed or packed:
        return FORMATS[next(iter(claimed or families))]
    return _by_shape(store, plain)


def _coded_weights(store: Store) -> list[LayerName]:
    """Layers whose weight is U8 and has a scale beside it."""
    layers = []
    for name in store:
        if store.entry(name).dtype != "U8":
            continue
        layer = LayerName.of_weight(name)
        scales = [layer.scales(MODELOPT, layout) for layout in LAYOUTS]
        if any(part in store for part in (*scales, layer.global_scale(MODELOPT))):
            layers.append(layer)
    return layers


def _check_without_codes(store: Store, configuration: Configuration) -> None:
    """Nothing is NVFP4: a plain checkpoint, unless its configuration or half a layer says otherwise."""
    orphan = next((name for name in store if name.endswith((".weight_scale_2", ".weight_global_scale"))), None)
    if orphan is not None:
        base, _, suffix = orphan.rpartition(".")
        form = MODELOPT if suffix == MODELOPT.global_scale else COMPRESSED_TENSORS
        codes = LayerName(base).data(form)
        found = f"is {store.entry(codes).dtype}; wanted U8, F4 or I8" if codes in store else "(U8) is missing"
        raise CheckpointError(f"{store.path}: {printable(codes)} {found}; {printable(orphan)} is its scale")
    if configuration.votes:
        places = "; ".join(place for places in configuration.votes.values() for place in places)
        raise CheckpointError(f"{store.path}: {places} says NVFP4, but no tensor holds codes (U8 with scales)")


def _by_shape(store: Store, layers: list[LayerName]) -> Format:
    """Tell modelopt from comfy by the shape of the scales, or by the name of a scale tensor that only fp4rt writes."""
    for layer in layers:
        if any(layer.scales(MODELOPT, layout) in store for layout in LAYOUTS if layout != MODELOPT.layout):
            return MODELOPT
        name = layer.scales(MODELOPT, MODELOPT.layout)
        if name not in store:
            raise CheckpointError(
                f"{store.path}: {printable(name)} is missing; without the block scales {printable(layer.weight)} "
                "has no values"
            )
        *_, rows, row_bytes = (1, 1, *store.entry(layer.weight).shape)
        columns = block_columns(row_bytes * CODES_PER_BYTE)
        found = store.entry(name).shape[-2:]
        linear, swizzled = (LAYOUTS[form.layout].shape(rows, columns) for form in (MODELOPT, COMFY))
        transposed = (rows * CODES_PER_BYTE // BLOCK, row_bytes)
        if linear != swizzled and found == swizzled:
            return COMFY
        if linear != swizzled and found in (linear, transposed):
            return MODELOPT
    count = counted(len(layers), "layer")
    raise CheckpointError(
        f"{store.path}: modelopt or comfy? Both name the codes `weight` and the scales `{SCALES}`; the scales of "
        f"{count} (as {printable(layers[0].base)}) have a shape that fits either, and there is no "
        f"{QUANT_CONFIG}, no {CONFIG_METADATA} and no {COMFY_METADATA}; say which with --from"
    )


def _contradiction(store: Store, configuration: Configuration, families: set[str]) -> CheckpointError:
    claims = "; ".join(f"{name}: {', '.join(places)}" for name, places in sorted(configuration.votes.items()))
    return CheckpointError(
        f"{store.path}: which format? The tensors are named as in {' or '.join(sorted(families))}, "
        f"the configuration says {claims}; say which with --from"
    )


def _vote_for_method(result: Configuration, quantization: dict[str, Any], place: str) -> None:
    method = quantization.get("quant_method")
    if method == MODELOPT.name:
        if quantization.get("quant_algo") in (None, *ALGORITHMS):
            result.vote(MODELOPT.name, f"{place} (quant_method)")
            _check_weight_groups(quantization, place)
    elif method == COMPRESSED_TENSORS.name and _names_nvfp4(quantization):
        result.vote(COMPRESSED_TENSORS.name, f"{place} (format)")
        _check_weight_groups(quantization, place)


def _check_weight_groups(quantization: dict[str, Any], place: str) -> None:
    """That every group of 4-bit weights has blocks of 16."""
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("num_bits") == 4:
            _check_group_size(weights, f"{place}: config_groups {printable(name)}")


def _names_nvfp4(quantization: dict[str, Any]) -> bool:
    groups = quantization.get("config_groups")
    formats = [quantization.get("format")]
    if isinstance(groups, dict):
        formats += [group.get("format") for group in groups.values() if isinstance(group, dict)]
    return CT_FORMAT in formats


def _check_hf_quant(hf_quant: dict[str, Any], place: str) -> None:
    quantization = _object(hf_quant.get("quantization"), f"{place}: quantization")
    algorithm = quantization.get("quant_algo")
    if algorithm not in ALGORITHMS:
        wanted = ", ".join(ALGORITHMS)
        raise CheckpointError(f"{place}: quant_algo {printable(algorithm)} is not read; wanted one of {wanted}")
    _check_group_size(quantization, place)


def _check_group_size(quantization: dict[str, Any], place: str) -> None:
    group_size = quantization.get("group_size", BLOCK)
    if group_size not in (None, BLOCK):
        raise CheckpointError(f"{place}: group_size {printable(group_size)}; NVFP4 has blocks of {BLOCK}")


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{place}: not valid JSON") from None


def _object(value: Any, place: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{place}: wanted an object, got {type(value).__name__}")
    return value
