"""Tiles measured fastest on one H200: (n, k) to rows of (largest m, tile)."""

from __future__ import annotations

from fp4rt.cuda.gemm.hopper import DecodeTile, HopperTile, PrefillTile, SmallTile

__all__ = ["ANY_M", "MEASURED", "MEASURED_MULTIPROCESSORS", "MEASURED_NVFP4"]

ANY_M = 2**63
MEASURED_MULTIPROCESSORS = 132
# Tiles that win for several sizes; one or two per cent are given away so that there are few to compile.
_WIDE = PrefillTile(256, 1, 8, 4, 2, 4)
_WIDE_HALVES = PrefillTile(256, 1, 8, 4, 2, 4, k_cluster=2)
_SHARED_TOKENS = PrefillTile(256, 1, 8, 4, 2, 4, cluster=2)
_MIDDLE = PrefillTile(192, 1, 8, 5, 2, 4)
_MIDDLE_HALVES = PrefillTile(192, 1, 8, 5, 2, 4, k_cluster=2)
_NARROW = PrefillTile(128, 1, 8, 4, 2, 4, stage_chunks=2)
_NARROW_HALVES = PrefillTile(128, 1, 8, 4, 2, 4, k_cluster=2, stage_chunks=2)
_NARROW_TALL = PrefillTile(128, 2, 16, 6, 2, 4)

# With bf16 activations
MEASURED: dict[tuple[int, int], tuple[tuple[int, HopperTile], ...]] = {
    (28672, 8192): (
        (8, DecodeTile(1, 14, 1, 3, row_warps=14, k_warps=1, warp_tiles=1)),
        (32, SmallTile(4, 16, 1, 4, row_groups=4, k_groups=1, row_blocks=1, fragments=4, k_cluster=2, own_groups=3)),
        (64, SmallTile(8, 16, 1, 3, row_groups=4, k_groups=1, row_blocks=1, fragments=2, k_cluster=2, own_groups=3)),
        (128, _NARROW_TALL),
        (192, _MIDDLE),
        (256, _WIDE),
        (384, _MIDDLE),
        (512, _WIDE),
        (ANY_M, _SHARED_TOKENS),
    ),
    (8192, 28672): (
        (8, DecodeTile(1, 4, 2, 4, row_warps=4, k_warps=4, warp_tiles=1)),
        (32, SmallTile(4, 8, 1, 5, row_groups=2, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (64, SmallTile(8, 8, 1, 4, row_groups=2, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (96, SmallTile(12, 8, 1, 3, row_groups=2, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (128, _NARROW_HALVES),
        (192, _MIDDLE_HALVES),
        (256, _WIDE_HALVES),
        (384, _MIDDLE),
        (1024, _WIDE),
        (ANY_M, _SHARED_TOKENS),
    ),
    (8192, 8192): (
        (8, DecodeTile(1, 4, 2, 4, row_warps=4, k_warps=4, warp_tiles=1)),
        (16, DecodeTile(2, 4, 2, 4, row_warps=4, k_warps=4, warp_tiles=1)),
        (32, SmallTile(4, 4, 2, 4, row_groups=1, k_groups=2, row_blocks=1, fragments=4)),
        (64, SmallTile(8, 4, 1, 5, row_groups=1, k_groups=2, row_blocks=1, fragments=4)),
        (112, SmallTile(14, 8, 1, 3, row_groups=2, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (128, _NARROW_HALVES),
        (192, _MIDDLE_HALVES),
        (256, _NARROW),
        (384, _MIDDLE),
        (512, _WIDE),
        (ANY_M, _SHARED_TOKENS),
    ),
    (4096, 4096): (
        (8, DecodeTile(1, 2, 2, 4, row_warps=2, k_warps=8, warp_tiles=1)),
        (16, DecodeTile(2, 2, 2, 7, row_warps=2, k_warps=4, warp_tiles=1)),
        (32, SmallTile(4, 4, 1, 6, row_groups=1, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (64, SmallTile(8, 4, 1, 4, row_groups=1, k_groups=1, row_blocks=1, fragments=4, k_cluster=2)),
        (80, SmallTile(10, 4, 1, 4, row_groups=1, k_groups=2, row_blocks=1, fragments=4, k_cluster=2)),
        (96, SmallTile(12, 4, 1, 3, row_groups=1, k_groups=2, row_blocks=1, fragments=4, k_cluster=2)),
        (128, PrefillTile(64, 1, 8, 4, 3, 4, k_cluster=2, stage_chunks=2)),
        (192, PrefillTile(96, 1, 8, 4, 3, 4, k_cluster=2, stage_chunks=2)),
        (256, _NARROW_HALVES),
        (384, _MIDDLE_HALVES),
        (512, _NARROW),
        (ANY_M, _SHARED_TOKENS),
    ),
}

# With NVFP4 activations, where others win: the decode kernel, when it decodes them itself, wants few stages, as each
# has a fixed cost; and so it does behind the pass that decodes them, for which all stages but the first wait.
MEASURED_NVFP4: dict[tuple[int, int], tuple[tuple[int, HopperTile], ...]] = {
    (8192, 8192): ((8, DecodeTile(1, 4, 2, 3, row_warps=2, k_warps=4, warp_tiles=2)),),
    (4096, 4096): (
        (8, DecodeTile(1, 2, 4, 3, row_warps=2, k_warps=4, warp_tiles=1)),
        (16, DecodeTile(2, 2, 4, 3, row_warps=2, k_warps=4, warp_tiles=1)),
        (32, DecodeTile(4, 2, 2, 3, row_warps=2, k_warps=4, warp_tiles=1)),
    ),
}
