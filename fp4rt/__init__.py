"""NVFP4 quantization runtime: quantize, dequantize, relayout and multiply, on the CPU and on CUDA devices.

Importing this package imports NumPy at most; everything else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp4rt.version import __version__

if TYPE_CHECKING:
    from fp4rt import checkpoint, compat, coverage, errors
    from fp4rt.api import (
        backends,
        dequantize,
        explain,
        global_scale,
        matmul,
        prepack,
        quantization_error,
        quantize,
        relayout,
    )
    from fp4rt.pool import PaddedPool, PaddingTag, current_pool, use_pool
    from fp4rt.prepacked import PrepackedWeight
    from fp4rt.tensor import QuantizedTensor

# name -> the module that has it, or "" for a submodule
_EXPORTS = {
    "PaddedPool": "pool",
    "PaddingTag": "pool",
    "PrepackedWeight": "prepacked",
    "QuantizedTensor": "tensor",
    "backends": "api",
    "checkpoint": "",
    "compat": "",
    "coverage": "",
    "current_pool": "pool",
    "dequantize": "api",
    "errors": "",
    "explain": "api",
    "global_scale": "api",
    "matmul": "api",
    "prepack": "api",
    "quantization_error": "api",
    "quantize": "api",
    "relayout": "api",
    "use_pool": "pool",
}

_FRAMEWORKS = ("jax", "torch")  # imported only where a program asks for one

__all__ = [
    "PaddedPool",
    "PaddingTag",
    "PrepackedWeight",
    "QuantizedTensor",
    "__version__",
    "backends",
    "checkpoint",
    "compat",
    "coverage",
    "current_pool",
    "dequantize",
    "errors",
    "explain",
    "global_scale",
    "matmul",
    "prepack",
    "quantization_error",
    "quantize",
    "relayout",
    "use_pool",
]


if not TYPE_CHECKING:  # to a type checker a module with this function has every name

    def __getattr__(name: str) -> Any:
        home = _EXPORTS.get(name)
        if name in _FRAMEWORKS:
            raise AttributeError(f"module 'fp4rt' has no attribute {name!r} yet; `import fp4rt.{name}` makes it")
        if home is None:
            raise AttributeError(f"module 'fp4rt' has no attribute {name!r}")
        if home == "":
            return importlib.import_module(f"fp4rt.{name}")
        value = getattr(importlib.import_module(f"fp4rt.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
