"""Fine-tuning over NVFP4 weights: they stay as they are, and small adapters beside them are trained (LoRA).

    python -m examples.finetune_lora

Runs on a CUDA device where PyTorch sees one, else on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

import fp4rt.torch
from examples.pytorch_linear import Block


class Adapted(torch.nn.Module):
    """A linear layer and, added to its result, the product with an adapter of low rank."""

    def __init__(self, base: fp4rt.torch.NVFP4Linear, rank: int, device: str) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False, device=device)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """base(x) + up(down(x))."""
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapt(model: torch.nn.Module, rank: int, device: str) -> list[torch.nn.Parameter]:
    """Put an adapter beside every NVFP4 layer; the adapters' parameters, which are all that is trained."""
    model.requires_grad_(False)
    trained: list[torch.nn.Parameter] = []
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, fp4rt.torch.NVFP4Linear):
                adapted = Adapted(layer, rank, device)
                setattr(parent, name, adapted)
                trained += [*adapted.down.parameters(), *adapted.up.parameters()]
    return trained


def main(width: int = 128, rank: int = 8, steps: int = 40) -> dict[str, Any]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(Block(width), Block(width)).to(device)
    tuned = copy.deepcopy(model)  # what a full fine-tuning would have given: other weights of low rank
    with torch.no_grad():
        for block in tuned:
            block.up.weight += 0.2 * torch.randn(4 * width, 2, device=device) @ torch.randn(2, width, device=device)
    fp4rt.torch.quantize_model(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = adapt(model, rank, device)
    numbers = sum(parameter.numel() for parameter in trained)
    print(f"{numbers} numbers are trained on {device}, beside {len(before)} tensors that stay as they are")

    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(64, width, device=device)
        with torch.no_grad():
            wanted = tuned(x)
        with torch.autocast(device, torch.bfloat16):  # adapters are fp32, products bf16
            loss = torch.nn.functional.mse_loss(model(x).float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2}: loss {losses[-1]:.4f}")
    after = {name.replace(".base.", "."): value for name, value in model.state_dict().items()}
    same = all(torch.equal(after[name], value) for name, value in before.items())
    print(f"NVFP4 weights: {'the same bytes' if same else 'changed'}")
    return {"losses": losses, "same": same}


if __name__ == "__main__":
    main()
