"""A few small products by every kernel, for compute-sanitizer: python tests/cuda/sanitized_products.py [--unjudged]

Several stages of k, tails in every direction, k in parts, odd addresses. Prints how many products it made. Unjudged, it
only launches them: under the tool, the fp64 products that judge them would take most of the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(judged: bool) -> None:
    from tests.cuda import gemm_cases as cases

    rng, made = np.random.default_rng(22), 0
    for n, k, offset in ((150, 1104, 0), (70, 336, 1)):
        b = cases.quantized(rng, n, k, "linear" if offset else "128x4", offset=offset)
        for kind in cases.KINDS:
            for m in (3, 14, 40, 140):
                a = cases.activations(rng, m, k, kind, **({"offset": offset} if kind == "nvfp4" else {}))
                for kernel, form in cases.ways():
                    if cases.takes(kernel, m):
                        if judged:
                            cases.check(f"{kind} m={m} n={n}", a, b, kernel, form)
                        else:
                            cases.run(a, b, kernel, form)
                        made += 1
    made += hopper_tiles(cases, rng, judged)
    cases.cupy().cuda.Device().synchronize()
    print(f"{made} products")


def hopper_tiles(cases, rng, judged: bool) -> int:
    """Forms that selection does not take for such small products: clusters of every kind, tiles of several workers.

    k with and without a chunk that is not whole; results that leave as they lie and transposed; and more pieces of work
    than multiprocessors.
    """
    from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile, SmallTile

    if not cases.has_hopper():
        return 0
    tiles = (
        (DecodeTile(1, 4, 1, 3, row_warps=4, k_warps=2, warp_tiles=1, k_cluster=2), 7),
        (DecodeTile(1, 2, 1, 3, row_warps=2, k_warps=4, warp_tiles=1, k_cluster=4), 7),
        (SmallTile(5, 4, 1, 3, 1, 2, 1, 4, k_cluster=4), 33),
        (PrefillTile(64, 1, 12, 4, 2, 2, row_groups=3), 140),
        (SmallTile(5, 16, 1, 2, 4, 1, 1, 4, k_cluster=2, own_groups=3), 40),
        (SmallTile(5, 8, 1, 3, 2, 2, 1, 4, k_cluster=2), 33),
        (PrefillTile(64, 1, 8, 4, 2, 2, cluster=2), 140),
        (PrefillTile(64, 1, 8, 4, 2, 2, k_cluster=2), 140),
        (PrefillTile(64, 1, 8, 2, 2, 2, stage_chunks=2), 140),
        (PrefillTile(64, 2, 16, 4, 2, 2), 140),
    )
    many_pieces = (
        (DecodeTile(1, 1, 1, 3, row_warps=1, k_warps=4, warp_tiles=1), 5),
        (SmallTile(5, 4, 1, 3, 1, 1, 1, 4), 37),
        (PrefillTile(32, 1, 8, 4, 2, 2), 300),
    )
    products = [(tile, m, *rest) for tile, m in tiles for rest in ((500, 1104, "float32"), (504, 1088, "bfloat16"))]
    for tile, m in many_pieces:
        products += [(tile, m, 8600 if m < 300 else 2200, *rest) for rest in ((336, "float32"), (320, "bfloat16"))]
    decoding = (
        (PrefillTile(64, 1, 8, 4, 2, 2, one_piece=True, decodes=True), 140),
        (PrefillTile(96, 1, 8, 4, 2, 2, cluster=2, one_piece=True, decodes=True), 200),
        (PrefillTile(64, 1, 8, 2, 2, 2, stage_chunks=2, one_piece=True, decodes=True), 70),
    )
    for tile, m in decoding:
        products += [(tile, m, 504, 1088, "bfloat16"), (tile, m, 500, 700, "float32")]
    made = 0
    weights = {(n, k): cases.quantized(rng, n, k) for n, k in {product[2:4] for product in products}}
    for tile, m, n, k, out_dtype in products:
        for kind in ("nvfp4",) if getattr(tile, "decodes", False) else ("bfloat16", "nvfp4"):
            a = cases.activations(rng, m, k, kind)
            if judged:
                cases.check_tile(f"{kind} m={m} n={n} k={k}", a, weights[n, k], tile, out_dtype)
            else:
                cases.run_tile(a, weights[n, k], tile, out_dtype)
            made += 1
    return made


if __name__ == "__main__":
    main(judged="--unjudged" not in sys.argv)
