"""Run the kernels that quantize and repack under compute-sanitizer: memcheck, initcheck, racecheck must find nothing.

    python -m tools.sanitize_cuda [memcheck initcheck racecheck]

The workload takes every kernel through aligned and odd addresses, partial blocks, padding, views of any strides, few
and many rows, ordinary and extreme global scales, weights with and without records. Each array has an allocation of its
own, so that one byte too far is outside of it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import cycle

TOOLS = ("memcheck", "initcheck", "racecheck")
FOUND_ERRORS = 9
SHAPES = [(1, 16, 16), (3, 50, 64), (130, 80, 96), (257, 1040, 1056), (2, 7152, 7168), (1030, 512, 512)]
SCALES = (1.0, 1e-38, 3e38, None)


def workload() -> None:
    """Calls every kernel; what it computes is the tests' business."""
    import cupy
    import numpy as np

    import fp4rt
    from fp4rt import api
    from fp4rt.cuda.quantizers import quantize
    from fp4rt.format import INPUT_DTYPES
    from fp4rt.layout import LAYOUTS

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    scales, targets, results = cycle(SCALES), cycle([*LAYOUTS, "linear"]), cycle(INPUT_DTYPES)  # of periods 4, 4 and 3
    for dtype in INPUT_DTYPES:
        size = 4 if dtype == "float32" else 2
        kind = _kind(dtype)
        for m, n, padded_n in SHAPES:
            bits = rng.integers(0, 256, (m * n * size + size,), dtype=np.uint8)
            for start in (0, size):
                quantize.READ_ONCE = range(1 << 40 if m % 2 else 0)  # as if x were too large for L2, and not
                x = cupy.asarray(bits)[start : start + m * n * size].view(kind).reshape(m, n)
                for layout in LAYOUTS:
                    q = fp4rt.quantize(x, next(scales), layout=layout, padded_n=padded_n)
                    fp4rt.relayout(q, next(targets))
                    fp4rt.dequantize(q, next(results))
                for sign in (0, 0x80):  # with it, every block leaves a record
                    signed = q.data, q.scales | cupy.uint8(sign), q.global_scale, q.shape, q.layout, q.padded_n
                    weight = fp4rt.prepack(fp4rt.QuantizedTensor(*signed))
                    weight.unpack()
                    api.weight_values(weight, cupy.empty((m, n), _kind(next(results))))
                for view in (x[::-1], x[:, ::-1], x[::2, 1:], x.T):
                    fp4rt.quantize(view, padded_n=-(-view.shape[1] // 16) * 16)
                cupy.cuda.Device().synchronize()
    cupy.cuda.Device().synchronize()
    print("workload done")


def _kind(dtype: str) -> object:
    import ml_dtypes
    import numpy as np

    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def main(arguments: list[str]) -> int:
    """0 where every tool was content, 1 where one was not, 2 where there is no compute-sanitizer."""
    if arguments == ["--workload"]:
        workload()
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    failed = []
    for tool in arguments or TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_ERRORS)]
        done = subprocess.run(
            [*command, sys.executable, "-m", "tools.sanitize_cuda", "--workload"], capture_output=True, text=True
        )
        print(f"{tool}: exit status {done.returncode}")
        print("\n".join(done.stdout.strip().splitlines()[-12:] + done.stderr.strip().splitlines()[-12:]))
        if done.returncode or "workload done" not in done.stdout:
            failed.append(tool)
    print("failed: " + ", ".join(failed) if failed else "all clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
