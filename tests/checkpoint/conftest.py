"""Files made by hand, byte for byte, so that the reader is not tested with the writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.checkpoint_model import TINY, write_model

Tensors = Mapping[str, tuple[str, list[int], bytes]]

# CASES B03: codes 0 ... 15, low nibble first, with one block scale of 2.0.
B03_CODES = bytes.fromhex("1032547698BADCFE")
B03_VALUES = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, -0.0, -0.25, -0.5, -0.75, -1, -1.5, -2, -3]


def hand_made(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file with the data in the order given, without any padding."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return with_header(path, json.dumps(table).encode(), b"".join(data for _, _, data in tensors.values()))


def with_header(path: Path, header: bytes, data: bytes, claimed: int | None = None) -> Path:
    """A file from a raw header; ``claimed`` lies about its length."""
    path.write_bytes((len(header) if claimed is None else claimed).to_bytes(8, "little") + header + data)
    return path


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def modelopt_tensors(decode: float = 0.25) -> dict[str, tuple[str, list[int], bytes]]:
    """B03's matrix as ModelOpt stores it."""
    return {
        "w.weight": ("U8", [1, 8], B03_CODES),
        "w.weight_scale": ("F8_E4M3", [1, 1], b"\x40"),
        "w.weight_scale_2": ("F32", [], f32(decode)),
    }


def compressed_tensors_tensors(encode: float = 4.0) -> dict[str, tuple[str, list[int], bytes]]:
    """The same as compressed-tensors stores it."""
    return {
        "w.weight_packed": ("U8", [1, 8], B03_CODES),
        "w.weight_scale": ("F8_E4M3", [1, 1], b"\x40"),
        "w.weight_global_scale": ("F32", [1], f32(encode)),
    }


@pytest.fixture
def files() -> Any:
    """The functions of this module, for tests."""

    class Files:
        make: Callable[..., Path] = staticmethod(hand_made)
        with_header: Callable[..., Path] = staticmethod(with_header)
        f32: Callable[..., bytes] = staticmethod(f32)
        modelopt = staticmethod(modelopt_tensors)
        compressed_tensors = staticmethod(compressed_tensors_tensors)
        codes = B03_CODES
        values = B03_VALUES

    return Files


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Llama-like model: grouped-query attention, experts, tied embeddings; 5 layers' worth of kilobytes."""
    return write_model(tmp_path_factory.mktemp("model") / "llama", TINY, shards=4)


@pytest.fixture(scope="session")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model as modelopt."""
    from fp4rt import checkpoint

    target = tmp_path_factory.mktemp("quantized") / "modelopt"
    checkpoint.quantize(model, target)
    return target


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative name, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def read_tree() -> Callable[[Path], dict[str, bytes]]:
    return tree
