"""Recorded outputs of other systems' references; what the files hold is said in README.md beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.cpu.comparison import DTYPES

GOLDEN = Path(__file__).resolve().parent
SOURCE = "vllm_test_ref"


def files_of_kind(*kinds: str) -> list[Path]:
    return [path for path in sorted(GOLDEN.glob("*.npz")) if json.loads(np.load(path)["meta"].item())["kind"] in kinds]


def cases(path: Path) -> Iterator[tuple[str, np.ndarray, np.float32, dict[str, np.ndarray]]]:
    """(name, x, global scale, outputs of the source) of every global scale in a file."""
    file = np.load(path)
    x = file["x_bits"].view(DTYPES[json.loads(file["meta"].item())["dtype"]])
    scales = file["gs_list"] if "gs_list" in file else [file["gs"]]
    for i, scale in enumerate(scales):
        prefix = f"g{i}/{SOURCE}/" if "gs_list" in file else f"{SOURCE}/"
        outputs = {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}
        yield f"{path.stem}, global scale {scale}", x, np.float32(scale), outputs


def magnitudes(data: np.ndarray) -> np.ndarray:
    return data & 0x77
