"""NVFP4 in CuPy: quantize and multiply on a stream, then replay the same work as a CUDA graph.

    python -m examples.cupy_graph

Where CuPy has no CUDA device the same calls run on NumPy arrays, without a graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fp4rt


def find_cupy() -> Any:
    """CuPy with a device that works, or None."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        print(f"no CUDA device ({error}): NumPy")
        return None
    return cupy


def main(m: int = 16, n: int = 256, k: int = 512) -> dict[str, Any]:
    cupy = find_cupy()
    xp = np if cupy is None else cupy
    random = np.random.default_rng(0)
    weight = fp4rt.quantize(xp.asarray(random.standard_normal((n, k)).astype(np.float32)))
    x = xp.asarray(random.standard_normal((m, k)).astype(np.float16))
    q = fp4rt.quantize(x)
    y = fp4rt.matmul(q, weight, out_dtype="float32")
    print(f"{q} @ {weight} -> {type(y).__module__} {y.dtype} {y.shape}")
    results = {"y": y, "replayed": None}
    if cupy is None:
        return results

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        fp4rt.quantize(x, out=q)
        fp4rt.matmul(q, weight, out_dtype="float32", out=y)
        graph = stream.end_capture()
        x *= 2
        graph.launch(stream)
    stream.synchronize()
    expected = fp4rt.matmul(fp4rt.quantize(x), weight, out_dtype="float32")
    results["replayed"] = bool((y == expected).all())
    print(f"replayed on new contents: {'the same bits as eager' if results['replayed'] else 'different'}")
    return results


if __name__ == "__main__":
    main()
