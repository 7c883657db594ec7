"""A few small products by every kernel, for compute-sanitizer: python tests/cuda/sanitized_products.py

Several stages of k, tails in every direction, k in parts, odd addresses. Prints how many products it made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    from tests.cuda import gemm_cases as cases

    rng, made = np.random.default_rng(22), 0
    for n, k, offset in ((150, 1104, 0), (70, 336, 1)):
        b = cases.quantized(rng, n, k, "linear" if offset else "128x4", offset=offset)
        for kind in cases.KINDS:
            for m in (3, 14, 40, 140):
                a = cases.activations(rng, m, k, kind, **({"offset": offset} if kind == "nvfp4" else {}))
                for kernel, form in cases.ways():
                    if cases.takes(kernel, m):
                        cases.check(f"{kind} m={m} n={n}", a, b, kernel, form)
                        made += 1
    print(f"{made + hopper_tiles(cases, rng)} products")


def hopper_tiles(cases, rng) -> int:
    """Forms that selection does not take for such small products: clusters of every kind, tiles of several workers."""
    from fp4rt.cuda.gemm.hopper import PrefillTile, SmallTile

    if not cases.has_hopper():
        return 0
    tiles = (
        (SmallTile(5, 16, 1, 2, 4, 1, 1, 4, k_cluster=2, own_groups=3), 40),
        (SmallTile(5, 8, 1, 3, 2, 2, 1, 4, k_cluster=2), 33),
        (PrefillTile(64, 1, 8, 4, 2, 2, cluster=2), 140),
        (PrefillTile(64, 1, 8, 4, 2, 2, k_cluster=2), 140),
        (PrefillTile(64, 1, 8, 2, 2, 2, stage_chunks=2), 140),
        (PrefillTile(64, 2, 16, 4, 2, 2), 140),
    )
    b = cases.quantized(rng, 500, 1104)
    for tile, m in tiles:
        for kind in ("bfloat16", "nvfp4"):
            cases.check_tile(f"{kind} m={m}", cases.activations(rng, m, 1104, kind), b, tile)
    return 2 * len(tiles)


if __name__ == "__main__":
    main()
