"""Checkpoints: NVFP4 models as files, read, written, converted and verified without torch.

::

    checkpoint = fp4rt.checkpoint.open("model-nvfp4")              # a file or a folder of shards; nothing is read yet
    weight = checkpoint.load("model.layers.0.mlp.down_proj")       # a QuantizedTensor, views of the file
    fp4rt.checkpoint.save("layer.safetensors", {"down_proj": weight}, format="compressed-tensors")

    fp4rt.checkpoint.quantize("model", "model-nvfp4")              # what the commands do
    fp4rt.checkpoint.convert("model-nvfp4", "model-ct", to="compressed-tensors")

How it fits together::

    header ─ reader, writer        one safetensors file, strictly, tensor by tensor
    folder ─ store                 shards, index, companions; every tensor by name
    formats ─ detect ─ catalog     which convention, which tensors form a layer
    layers                         stored bytes <-> QuantizedTensor
    selection, methods, joined     what to quantize, how scales are chosen, and which weights share one
    orientation, experts           which axis of a stored weight is k; stacks and the modules that they are
    operations ─ plan* ─ shard     what happens to each tensor; plain data that a worker receives
    run, journal, claim            files and folders, interrupted runs, one run at a time
    configs, beside                hf_quant_config.json and quantization_config
    verify, compare, inspect       looking at results
"""

from __future__ import annotations

import os

from fp4rt.checkpoint.compare import Difference
from fp4rt.checkpoint.compare import compare as _compare
from fp4rt.checkpoint.fusing import FusedParts, fuse
from fp4rt.checkpoint.methods import METHODS, Method
from fp4rt.checkpoint.opened import Checkpoint
from fp4rt.checkpoint.plan_quantize import QuantizeOptions
from fp4rt.checkpoint.report import RunReport, ShardReport, TensorReport
from fp4rt.checkpoint.saved import save
from fp4rt.checkpoint.selection import Selection
from fp4rt.checkpoint.store import Store
from fp4rt.checkpoint.tasks import convert, dequantize, quantize
from fp4rt.checkpoint.verify import Finding
from fp4rt.checkpoint.verify import verify as _verify
from fp4rt.tensor import QuantizedTensor

__all__ = [
    "METHODS",
    "Checkpoint",
    "Difference",
    "Finding",
    "FusedParts",
    "Method",
    "QuantizeOptions",
    "RunReport",
    "Selection",
    "ShardReport",
    "TensorReport",
    "compare",
    "convert",
    "dequantize",
    "fuse",
    "load",
    "open",
    "quantize",
    "save",
    "verify",
]


def open(path: str | os.PathLike[str], format: str | None = None) -> Checkpoint:
    """Open a checkpoint for reading: see :class:`Checkpoint`.

    Args:
        path: a safetensors file, an index, or a folder with one file or with shards.
        format: "modelopt", "compressed-tensors" or "comfy" where names and configuration do not tell.

    Raises:
        CheckpointError: a file is broken, a layer is incomplete, or the format cannot be told.
    """
    return Checkpoint(path, format)


def load(path: str | os.PathLike[str], name: str, *, format: str | None = None) -> QuantizedTensor:
    """One quantized layer of a checkpoint: ``open(path).load(name)``."""
    return Checkpoint(path, format).load(name)


def verify(path: str | os.PathLike[str], format: str | None = None) -> list[Finding]:
    """Every broken invariant of a checkpoint; an empty list where there is none.

    Raises:
        CheckpointError: the checkpoint cannot be read at all, or its format cannot be told.
    """
    return _verify(Store(path), format)


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[Difference]:
    """Compare checkpoint ``b`` with ``a`` weight by weight, whatever their formats.

    Raises:
        CheckpointError: one of them cannot be read, or its format cannot be told.
    """
    return _compare(Store(a), Store(b))
