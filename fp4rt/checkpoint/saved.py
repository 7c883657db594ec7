"""Write tensors that are in memory as a checkpoint file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4rt import api, interop
from fp4rt.arguments import check_is_quantized
from fp4rt.checkpoint import configs
from fp4rt.checkpoint.beside import check_beside, refuse_existing
from fp4rt.checkpoint.configs import Outcome
from fp4rt.checkpoint.dtypes import numpy_dtype, tag_of
from fp4rt.checkpoint.folder import QUANT_CONFIG, SUFFIX, check_parent
from fp4rt.checkpoint.formats import FORMATS, MODELOPT, LayerName
from fp4rt.checkpoint.header import TensorEntry, check_metadata, check_name, printable
from fp4rt.checkpoint.journal import json_bytes
from fp4rt.checkpoint.kinds import check_kinds
from fp4rt.checkpoint.layers import TargetLayer, check_encode, lay_out
from fp4rt.checkpoint.operations import target_metadata
from fp4rt.checkpoint.writer import TensorFileWriter, TensorSpec, write_atomically
from fp4rt.errors import CheckpointError
from fp4rt.prepacked import PrepackedWeight
from fp4rt.tensor import QuantizedTensor

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    format: str = MODELOPT.name,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write quantized and other tensors to one safetensors file; it appears complete or not at all.

    Args:
        path: the file, ``*.safetensors``. For modelopt, hf_quant_config.json is written beside it.
        tensors: by name. A :class:`QuantizedTensor` becomes the tensors of its format under the module's name ("x" and
            "x.weight" mean the same); any other host array is stored as it is, bit for bit and little endian.
        format: "modelopt", "compressed-tensors" or "comfy". The first and the last keep the decode scale, the fp32
            reciprocal of ``global_scale``, which read again may be its neighbour; the other keeps it as it is.
        metadata: strings to keep in the file, such as those of an opened one; "fp4rt.shapes", "fp4rt.fused_rows",
            "quantization_config" and "_quantization_metadata", which say how tensors are stored, are written anew.
        overwrite: replace what is there.

    Raises:
        CheckpointError: the file exists, the format is unknown, a name or the metadata is no string of UTF-8, a name is
            the header's own, two tensors would have one name, a global scale is unusable, or hf_quant_config.json
            describes another file of the folder.
        DtypeError, DeviceError: an array has a dtype that safetensors lacks, is masked, or lives on a device; overwrite
            is no bool.
    """
    check_kinds(
        "save",
        ("path", path, (str, os.PathLike), "a path"),
        ("tensors", tensors, Mapping, "a mapping from names to tensors"),
        ("overwrite", overwrite, bool, "a bool"),
    )
    path = Path(path)
    form = FORMATS.get(format)
    if form is None:
        raise CheckpointError(f"unknown format {format!r}; use one of {', '.join(FORMATS)}")
    if not path.name.endswith(SUFFIX):
        raise CheckpointError(f"{path}: wanted a name that ends in {SUFFIX}")
    check_parent(path)
    for name, value in tensors.items():
        check_name(name, str(path))
        if not name:
            raise CheckpointError(f"{path}: a tensor needs a name, got {name!r}")
        if isinstance(value, PrepackedWeight):
            check_is_quantized("save", printable(name), value)
    own_metadata = check_metadata({} if metadata is None else metadata, str(path))
    quantized = {name: value for name, value in tensors.items() if isinstance(value, QuantizedTensor)}
    refuse_existing(path, overwrite)
    arrays: dict[str, tuple[TensorSpec, np.ndarray]] = {}
    targets = []
    for name, value in tensors.items():
        if name in quantized:
            target = _target(name, value, format)
            targets.append(target)
            linear = _linear(value)
            check_encode(linear.global_scale, linear.global_scale, f"{path}: the global scale of {printable(name)}")
            laid_out = lay_out(target, iter((linear,)), None)
            produced = [(spec, laid_out[spec.name]) for spec in target.specs()]
        else:
            produced = [_plain(name, value)]
        for spec, array in produced:
            if spec.name in arrays:
                raise CheckpointError(f"{path}: two tensors would be called {printable(spec.name)}")
            arrays[spec.name] = (spec, array)
    plain = [TensorEntry(n, arrays[n][0].dtype, arrays[n][0].shape, 0, 0) for n in tensors if n not in quantized]
    modules = tuple(sorted(target.name.base for target in targets))
    outcome = Outcome(form if quantized else None, modules, (), configs.kept_linears(plain, modules))
    content = json_bytes(configs.hf_quant_config(outcome))
    if outcome.has_hf_quant_config:
        check_beside(path, content, overwrite)
    table = configs.file_metadata(own_metadata, outcome, target_metadata(targets), standalone=True)
    with TensorFileWriter(path, [spec for spec, _ in arrays.values()], table) as writer:
        for name, (_, array) in arrays.items():
            writer.write(name, array)
    if outcome.has_hf_quant_config:
        write_atomically(path.parent / QUANT_CONFIG, content)


def _target(name: str, q: QuantizedTensor, format: str) -> TargetLayer:
    form = FORMATS[format]
    module = LayerName(LayerName.of_weight(name).base)
    return TargetLayer(module, form, form.layout, None, q.shape[0], q.shape[1], q.padded_n)


def _linear(q: QuantizedTensor) -> QuantizedTensor:
    """The tensor as NumPy arrays on the host, scales linear."""
    host = (_host(part, name) for part, name in ((q.data, "data"), (q.scales, "scales")))
    scale = _host(q.global_scale, "global_scale").view(np.float32)
    data, scales = host
    numpy_q = QuantizedTensor.trusted(data, scales, scale, q.shape, q.layout, q.padded_n)
    return api.relayout(numpy_q, "linear")


def _host(array: Any, name: str) -> np.ndarray:
    """The bits of a host array, dense."""
    view = interop.view(array, name)
    if view.device.kind != "cpu":
        raise CheckpointError(f"{name} lives on {view.device}; copy it to the host before saving")
    return np.ascontiguousarray(view.bits())


def _plain(name: str, value: Any) -> tuple[TensorSpec, np.ndarray]:
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        tag = tag_of(value.dtype.name)
        return TensorSpec(name, tag, value.shape), value.astype(numpy_dtype(tag), copy=False)
    view = interop.view(value, name)
    return TensorSpec(name, tag_of(view.dtype), tuple(view.shape)), _host(value, name)
