"""Layers that serving engines join to one: all read the same input, and their rows lie one behind the other.

A joined layer has one global scale. Engines take the largest of its parts' and leave the block scales as they are,
which is right only where the parts' are the same; so producers of checkpoints give them one, and so does ``quantize``.

Sources: nvidia-modelopt 0.47, ``torch/export``; llm-compressor, ``update_fused_layer_weight_global_scales``; vLLM,
``packed_modules_mapping`` of its models and ``modelopt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["joined_modules", "missing_parts"]

_PARTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a"),
)
_GROUP_OF = {part: parts for parts in _PARTS for part in parts}


def joined_modules(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Module name -> those that engines join it with, itself among them; only of modules that have others."""
    known = set(modules)
    found = {}
    for module in known:
        parent, dot, last = module.rpartition(".")
        together = tuple(f"{parent}{dot}{part}" for part in _GROUP_OF.get(last, ()) if f"{parent}{dot}{part}" in known)
        if len(together) > 1:
            found[module] = together
    return found


def missing_parts(quantized: Iterable[str], plain: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Quantized module -> last names of those among ``plain`` that engines would join it with, and cannot."""
    taken, left = set(quantized), set(plain)
    return {
        module: others
        for module, together in joined_modules(taken | left).items()
        if module in taken and (others := tuple(part.rpartition(".")[2] for part in together if part in left))
    }
