"""The configuration that goes with quantized tensors: hf_quant_config.json, ``quantization_config``, metadata.

Serving engines decide by it which modules are quantized, so it is made from what was written, never copied: every
linear module that kept its floats is listed by name, and every quantized one has the group it belongs to.

Sources: nvidia-modelopt 0.47, ``torch/export/convert_hf_config.py`` and ``quant_utils.py``; compressed-tensors 0.20,
``quantization/quant_config.py`` and the presets NVFP4 and NVFP4A16 of ``quant_scheme.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fp4rt.checkpoint.catalog import FUSED_METADATA, SHAPES_METADATA
from fp4rt.checkpoint.detect import COMFY_METADATA, CONFIG_METADATA, CT_FORMAT, Configuration
from fp4rt.checkpoint.dtypes import FLOAT_TAGS
from fp4rt.checkpoint.formats import COMFY, COMPRESSED_TENSORS, MODELOPT, Format, LayerName
from fp4rt.checkpoint.header import TensorEntry, printable
from fp4rt.checkpoint.selection import EXPERTS, NORM
from fp4rt.errors import CheckpointError
from fp4rt.format import BLOCK
from fp4rt.version import __version__

__all__ = ["Outcome", "file_metadata", "folder_config", "hf_quant_config", "kept_linears", "quantization_config"]

W4A4, W4A16 = "NVFP4", "W4A16_NVFP4"
KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# Embeddings of language models, and what their output head is called.
TIED_TO = re.compile(r"(^|\.)(embed_tokens|wte)\.weight$")
HEAD_NAME = "lm_head"
# What is surely no linear module: linear ones, too, may be called something with "embed".
EMBEDDING_TABLE = re.compile(
    r"(^|\.)(embed_tokens\w*|(\w+_)?embeddings?|wte|wpe|shared|relative_attention_bias)$", re.IGNORECASE
)
OWN_METADATA = (COMFY_METADATA, CONFIG_METADATA, SHAPES_METADATA, FUSED_METADATA)


@dataclass(frozen=True)
class Outcome:
    """What was written, as far as configuration cares.

    Attributes:
        form: the format; None where nothing is quantized any more.
        weight_only, with_activations: names of quantized modules without and with an activation scale.
        kept: linear modules that kept their floats.
        kv_cache: "FP8" where the cache of keys and values is quantized, else None.
    """

    form: Format | None
    weight_only: tuple[str, ...] = ()
    with_activations: tuple[str, ...] = ()
    kept: tuple[str, ...] = field(default=())
    kv_cache: str | None = None

    @property
    def has_hf_quant_config(self) -> bool:
        """Whether hf_quant_config.json goes with it."""
        return self.form is not None and self.form.name == MODELOPT.name

    @property
    def groups(self) -> list[tuple[str, tuple[str, ...]]]:
        """(algorithm, modules) of every group that has modules."""
        groups = ((W4A4, self.with_activations), (W4A16, self.weight_only))
        return [group for group in groups if group[1]]


def kept_linears(entries: Iterable[TensorEntry], quantized: Iterable[str]) -> tuple[str, ...]:
    """Modules that stay floats, for the lists of modules to leave alone.

    Those of unquantized linear weights and stacks of experts; and the output head where it is tied to the embeddings:
    it is a linear module without a tensor of its own, and a loader would look for its codes.

    Args:
        entries: the unquantized tensors.
        quantized: names of the quantized modules.
    """
    names = []
    entries = list(entries)
    has_head = any(HEAD_NAME in name for name in (*quantized, *(entry.name for entry in entries)))
    if not has_head and any(TIED_TO.search(entry.name) for entry in entries):
        names.append(HEAD_NAME)
    for entry in entries:
        module = LayerName.of_weight(entry.name)
        if entry.dtype not in FLOAT_TAGS or NORM.search(module.base):
            continue
        if len(entry.shape) == 3 and (not module.bare or EXPERTS.search(entry.name)):  # a stack of experts
            names.append(module.base.rpartition(".")[0] if module.bare else module.base)
        if len(entry.shape) == 2 and not module.bare and not EMBEDDING_TABLE.search(module.base):
            names.append(module.base)
    return tuple(sorted(set(names)))


def kv_cache_algorithm(configuration: Configuration) -> str | None:
    """How the source quantizes keys and values: None or "FP8".

    Raises:
        CheckpointError: it is quantized in another way, which has no name in the other formats.
    """
    quantization = configuration.hf_quant.get("quantization", {})
    found = quantization.get("kv_cache_quant_algo") or configuration.quantization.get("kv_cache_scheme")
    if found is None or found == "FP8":
        return found
    if isinstance(found, dict) and found.get("num_bits") == 8 and found.get("type") == "float":
        return "FP8"
    raise CheckpointError(f"keys and values are cached as {printable(found)}; only FP8 can be carried over")


def hf_quant_config(outcome: Outcome) -> dict[str, Any]:
    """The content of hf_quant_config.json."""
    quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": outcome.kv_cache}
    groups = outcome.groups
    if len(groups) == 1:
        quantization.update(quant_algo=groups[0][0], group_size=BLOCK, exclude_modules=list(outcome.kept))
    else:
        layers = {name: {"quant_algo": algorithm, "group_size": BLOCK} for algorithm, names in groups for name in names}
        quantization.update(
            quant_algo="MIXED_PRECISION",
            quantized_layers=dict(sorted(layers.items())),
            exclude_modules=list(outcome.kept),
        )
    return {"producer": {"name": "fp4rt", "version": __version__}, "quantization": quantization}


def quantization_config(outcome: Outcome) -> dict[str, Any] | None:
    """The ``quantization_config`` of config.json; None for formats that have none."""
    if outcome.form is None or outcome.form.name == COMFY.name:
        return None
    if outcome.form.name == MODELOPT.name:
        return _modelopt(outcome)
    return _compressed_tensors(outcome)


def _modelopt(outcome: Outcome) -> dict[str, Any]:
    details = hf_quant_config(outcome)["quantization"]
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    groups = {}
    for index, (algorithm, names) in enumerate(outcome.groups):
        group: dict[str, Any] = {"weights": fp4}
        if algorithm == W4A4:
            group = {"input_activations": fp4, **group}
        groups[f"group_{index}"] = {**group, "targets": ["Linear"] if len(outcome.groups) == 1 else list(names)}
    config: dict[str, Any] = {"config_groups": groups}
    if "quantized_layers" in details:
        config["quantized_layers"] = details["quantized_layers"]
    config.update(ignore=list(outcome.kept), quant_algo=details["quant_algo"])
    if outcome.kv_cache:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    config.update(producer={"name": "fp4rt", "version": __version__}, quant_method=MODELOPT.name)
    return config


def _compressed_tensors(outcome: Outcome) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK,
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    activations = {**weights, "dynamic": "local", "observer": "static_minmax"}
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if len(outcome.groups) == 1 else list(names),
            "weights": weights,
            "input_activations": activations if algorithm == W4A4 else None,
            "output_activations": None,
            "format": CT_FORMAT,
        }
        for index, (algorithm, names) in enumerate(outcome.groups)
    }
    return {
        "config_groups": groups,
        "quant_method": COMPRESSED_TENSORS.name,
        "kv_cache_scheme": KV_FP8 if outcome.kv_cache else None,
        "format": CT_FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(outcome.kept),
    }


def folder_config(config: dict[str, Any], outcome: Outcome, float_dtype: str | None = None) -> dict[str, Any]:
    """The source's config.json with the quantization of what was written.

    Args:
        config: the source's.
        outcome: what was written.
        float_dtype: dtype that dequantized layers have now, noted where the configuration names one.
    """
    result = _without_quantization(config)
    quantization = quantization_config(outcome)
    if quantization is not None:
        result[CONFIG_METADATA] = quantization
    for key in ("torch_dtype", "dtype"):
        if float_dtype is not None and isinstance(result.get(key), str):
            result[key] = float_dtype
    return result


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those of a model's parts in it, without their quantization."""
    parts = {key: _without_quantization(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in parts.items() if key != CONFIG_METADATA}


def file_metadata(source: dict[str, str], outcome: Outcome, layers: dict[str, Any], standalone: bool) -> dict[str, str]:
    """The ``__metadata__`` of one file.

    Args:
        source: that of the source's file; its own keys go along.
        outcome: what was written.
        layers: logical shapes, fused rows and the comfy table of the file's layers.
        standalone: whether the file is a checkpoint by itself, so that it carries the configuration too.
    """
    result = {key: value for key, value in source.items() if key not in OWN_METADATA}
    for key in (SHAPES_METADATA, FUSED_METADATA):
        if layers[key]:
            result[key] = json.dumps(layers[key], sort_keys=True, separators=(",", ":"))
    if outcome.form is not None and outcome.form.name == COMFY.name and layers["comfy"]:
        result[COMFY_METADATA] = json.dumps({"format_version": "1.0", "layers": layers["comfy"]}, sort_keys=True)
    quantization = quantization_config(outcome)
    if standalone and quantization is not None:
        result[CONFIG_METADATA] = json.dumps(quantization, sort_keys=True)
    return result
