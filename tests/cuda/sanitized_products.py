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
    print(f"{made} products")


if __name__ == "__main__":
    main()
