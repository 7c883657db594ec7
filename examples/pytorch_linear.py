"""A PyTorch model with NVFP4 weights: quantize its linear layers in place, save, load, compile.

    python -m examples.pytorch_linear

Runs on a CUDA device where PyTorch sees one, else on the CPU.
"""

from __future__ import annotations

import io
from typing import Any

import torch

import fp4rt
import fp4rt.torch


class Block(torch.nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + down(gelu(up(norm(x))))."""
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


def megabytes(model: torch.nn.Module) -> float:
    return sum(value.numel() * value.element_size() for value in model.state_dict().values()) / 1e6


def main(width: int = 256) -> dict[str, Any]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(Block(width), Block(width)).to(device, torch.bfloat16).eval()
    x = torch.randn(8, width, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        reference = model(x)
        before = megabytes(model)
        names = fp4rt.torch.quantize_model(model)
        print(f"{len(names)} layers on {device}: {', '.join(names)}")
        print(f"state: {before:.2f} MB -> {megabytes(model):.2f} MB")
        y = model(x)
        similarity = torch.nn.functional.cosine_similarity(reference.float().ravel(), y.float().ravel(), dim=0).item()
        print(f"cosine similarity of the outputs: {similarity:.4f}")

        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.nn.Sequential(Block(width), Block(width)).to(device, torch.bfloat16).eval()
        fp4rt.torch.quantize_model(loaded)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        same = torch.equal(loaded(x), y)
        print(f"saved and loaded: {'the same bits' if same else 'different'}")

        compiled = torch.compile(model, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        compiled_y = compiled(x)
        print(f"compiled in one graph: within {(compiled_y - y).abs().max().item():.3g} of eager")

    # The functions themselves take torch tensors, and give torch tensors back.
    q = fp4rt.quantize(x, layout="128x4")
    print(f"{q}: {q.nbytes} bytes for {x.nbytes}")
    return {"similarity": similarity, "same": same, "compiled": compiled_y, "eager": y, "device": device}


if __name__ == "__main__":
    main()
