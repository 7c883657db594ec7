"""The Hopper kernels' compile-time choices: one frozen class a kernel, from which macros, memory plan and grid follow.

Where things lie in shared memory is computed there, once, and handed to the kernel as macros.
"""

from fp4rt.cuda.gemm.hopper_plan import A_TYPES, MAX_SHARED_BYTES
from fp4rt.cuda.gemm.hopper_prefill import DECODING_SLOTS, PrefillTile, TileSharing
from fp4rt.cuda.gemm.hopper_stages import DecodeTile, SmallTile

__all__ = [
    "A_TYPES",
    "DECODING_SLOTS",
    "MAX_SHARED_BYTES",
    "DecodeTile",
    "HopperTile",
    "PrefillTile",
    "SmallTile",
    "TileSharing",
]

HopperTile = DecodeTile | SmallTile | PrefillTile
