"""The golden vectors as torch tensors, each global scale a case of its own, with the scales in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fp4rt.layout import LAYOUTS
from tests.golden.vectors import GOLDEN, cases

NAMES = ["rand_{}_150x80", "rand_{}_3x48", "ties_{}", "scaletie_{}", "outlier_{}"]


GoldenCase = tuple[str, Any, Any, np.ndarray, dict[str, np.ndarray]]


def golden_cases(name: str, dtype: str, device: str) -> Iterator[GoldenCase]:
    """(what, x, encode scale, packed codes, layout -> scale bytes)."""
    for what, x, scale, outputs in cases(GOLDEN / f"{name.format(dtype)}.npz"):
        tensor = torch.from_numpy(x.view(np.int16)).view(getattr(torch, dtype)).to(device)
        scales = {layout: LAYOUTS[layout].pack(outputs["sf"]) for layout in LAYOUTS}
        scales |= {layout: outputs[f"sf_{layout}"] for layout in LAYOUTS if f"sf_{layout}" in outputs}
        yield what, tensor, torch.tensor(scale, device=device), outputs["packed"], scales
