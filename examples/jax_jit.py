"""NVFP4 in JAX: quantized weights as pytrees, products inside ``jit``.

    python -m examples.jax_jit

Runs on JAX's default device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import fp4rt
import fp4rt.jax


def init(width: int) -> dict[str, Any]:
    up, down = jax.random.split(jax.random.PRNGKey(0))
    return {
        "up": jax.random.normal(up, (4 * width, width), jnp.bfloat16) / width**0.5,
        "down": jax.random.normal(down, (width, 4 * width), jnp.bfloat16) / (4 * width) ** 0.5,
    }


def forward(weights: dict[str, Any], x: Any) -> Any:
    """Two layers; a weight is an array or a quantized tensor."""

    def apply(weight: Any, x: Any) -> Any:
        if isinstance(weight, fp4rt.QuantizedTensor):
            return fp4rt.jax.matmul(x, weight)
        return x @ weight.T

    return apply(weights["down"], jax.nn.relu(apply(weights["up"], x)))


def main(width: int = 256) -> dict[str, Any]:
    weights = init(width)
    x = jax.random.normal(jax.random.PRNGKey(1), (8, width), jnp.bfloat16)
    quantized = jax.tree_util.tree_map(fp4rt.jax.quantize, weights)
    print(f"{jax.devices()[0].platform}: {quantized['up']}")

    step = jax.jit(forward)
    reference, y = step(weights, x), step(quantized, x)
    eager = forward(quantized, x)
    flat, expected = y.astype(jnp.float32).ravel(), reference.astype(jnp.float32).ravel()
    similarity = float(flat @ expected / jnp.linalg.norm(flat) / jnp.linalg.norm(expected))
    same = bool((y == eager).all())
    print(f"cosine similarity of the outputs: {similarity:.4f}")
    print(f"jit and eager: {'the same bits' if same else 'different'}")

    # The functions of the package take concrete JAX arrays too.
    back = fp4rt.dequantize(fp4rt.quantize(x), "bfloat16")
    print(f"largest error of a round trip: {float(jnp.abs(back - x).max()):.3f}")
    return {"similarity": similarity, "same": same, "back": back}


if __name__ == "__main__":
    main()
