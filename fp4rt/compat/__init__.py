"""Other libraries' FP4 functions, under their names and with their conventions, running on fp4rt.

``fp4rt.compat.vllm`` and ``fp4rt.compat.flashinfer`` are imported when they are first used; both need PyTorch, and run
on a CPU as well as on any GPU that fp4rt runs on. Their masked and grouped functions are plain loops over the matrices:
right rather than fast. Global scales, by library:

========================================================  =============================================
vLLM ``input_global_scale``                               encode scale: 2688 / amax, as fp4rt's
vLLM, FlashInfer ``alpha`` of a product                   product of the *decode* scales: 1 / (s_a * s_b)
FlashInfer ``global_scale``, ``a_global_sf``              encode scale
FlashInfer ``e2m1_and_ufp8sf_scale_to_float``             decode scale: amax / 2688
========================================================  =============================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4rt.compat import flashinfer, vllm

__all__ = ["flashinfer", "vllm"]


if not TYPE_CHECKING:  # to a type checker a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"fp4rt.compat.{name}")
        raise AttributeError(f"module 'fp4rt.compat' has no attribute {name!r}; it has {', '.join(__all__)}")
