"""What a call costs on the host from PyTorch and JAX: the time until it returns, with the device idle in between.

    python -m bench.host_cost_frameworks [--out FOLDER]

Everything is measured in one run, beside torch's ``x * 2`` and an unquantized linear layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.host_time import HostRows
from bench.needs import need, need_gpu, optional
from bench.rows import RESULTS, Row, write_rows
from fp4rt import interop

torch = optional("torch")


def torch_rows() -> list[Row]:
    import fp4rt.torch
    from fp4rt.compat import flashinfer, vllm

    bench = HostRows(torch.cuda.synchronize)
    measure = bench.measure
    x = torch.ones((64, 1024), dtype=torch.bfloat16, device="cuda")
    g = torch.ones(1, device="cuda")
    double = measure("torch x * 2", lambda: x * 2)
    measure("torch.empty", lambda: torch.empty((64, 512), dtype=torch.uint8, device="cuda"), double)
    buffer = fp4rt.current_pool().allocate(1 << 15, interop.Device("cuda", 0), 0)
    measure("interop.view(torch)", lambda: interop.view(x), double)
    measure("interop.from_device(torch)", lambda: interop.from_device(buffer, (64, 512), "uint8", "torch"), double)
    q = fp4rt.quantize(x, g)
    measure("fp4rt.quantize(torch, g)", lambda: fp4rt.quantize(x, g), double)
    measure("fp4rt.quantize(torch, g, out=q)", lambda: fp4rt.quantize(x, g, out=q), double)
    measure("fp4rt.torch.quantize(torch, g)", lambda: fp4rt.torch.quantize(x, g), double)
    measure("vllm.scaled_fp4_quant", lambda: vllm.scaled_fp4_quant(x, g), double)
    measure("flashinfer.nvfp4_quantize", lambda: flashinfer.nvfp4_quantize(x, g), double)
    source = torch.nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
    w4a16 = fp4rt.torch.NVFP4Linear.from_linear(source).prepack()
    w4a4 = fp4rt.torch.NVFP4Linear.from_linear(source, mode="w4a4").prepack()
    weight = fp4rt.prepack(w4a16.weight())
    with torch.no_grad():
        linear = measure("torch.nn.Linear", lambda: source(x), double)
        measure("fp4rt.matmul(torch, prepacked)", lambda: fp4rt.matmul(x, weight), linear)
        measure("NVFP4Linear", lambda: w4a16(x), linear)
        measure("NVFP4Linear, w4a4", lambda: w4a4(x), linear)
    return bench.rows


def jax_rows() -> list[Row]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return []
    if not any(device.platform == "gpu" for device in jax.devices()):
        return []
    import fp4rt.jax

    x: Any = jnp.ones((64, 1024), jnp.bfloat16)
    doubled = jax.jit(lambda: x * 2)
    bench = HostRows(lambda: jax.block_until_ready(doubled()))  # queued last, and so ready last
    measure = bench.measure
    double = measure("jax.jit x * 2", doubled)
    jitted = jax.jit(lambda x: fp4rt.jax.quantize(x))
    measure("jax.jit fp4rt.jax.quantize", lambda: jitted(x), double)
    measure("fp4rt.jax.quantize, eager", lambda: fp4rt.jax.quantize(x), double)
    measure("fp4rt.quantize(jax)", lambda: fp4rt.quantize(x), double)
    return bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_gpu()
    need("torch")
    rows = torch_rows() + jax_rows()
    print(write_rows("host_cost_frameworks", rows, arguments.out))


if __name__ == "__main__":
    main()
