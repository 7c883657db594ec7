"""Code written for vLLM's and FlashInfer's FP4 functions, on any GPU or on a CPU: change the import.

python -m examples.engine_ops
"""

from __future__ import annotations

from typing import Any

import torch

from fp4rt.compat import flashinfer
from fp4rt.compat import vllm as ops


def main(m: int = 24, n: int = 256, k: int = 240) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    x_scale, w_scale = (448 * 6 / t.abs().max().float() for t in (x, w))
    alpha = 1.0 / (x_scale * w_scale)
    reference = x.float() @ w.float().T

    # vLLM: k = 240 is no multiple of 32, so the quantizer pads to 256 columns.
    a, a_sf = ops.scaled_fp4_quant(x, x_scale, padded_n=256)
    b, b_sf = ops.scaled_fp4_quant(w, w_scale, padded_n=256)
    product = ops.cutlass_scaled_fp4_mm(a, b, a_sf, b_sf, alpha, torch.bfloat16)
    print(f"vLLM on {device}: codes {tuple(a.shape)} {a.dtype}, scales {tuple(a_sf.shape)} {a_sf.dtype}")

    # The TensorRT-LLM layout for few rows, with the padding that the original refuses.
    _, small = ops.scaled_fp4_quant(x, x_scale, backend="trtllm", padded_n=256)
    print(f"8x4 scales: {tuple(small.shape)}")

    # FlashInfer: the weight comes transposed.
    c, c_sf = flashinfer.nvfp4_quantize(x, x_scale, sfLayout=flashinfer.SfLayout.layout_128x4)
    d, d_sf = flashinfer.nvfp4_quantize(w, w_scale)
    other = flashinfer.mm_fp4(c, d.T, c_sf, d_sf.T, alpha, torch.bfloat16)

    similarity = [
        torch.nn.functional.cosine_similarity(reference.ravel(), y.float().ravel(), dim=0).item()
        for y in (product, other)
    ]
    print(f"cosine similarity with the unquantized product: {similarity[0]:.4f}, {similarity[1]:.4f}")
    return {"similarity": similarity, "small": small}


if __name__ == "__main__":
    main()
