"""Make a Llama-like model on disk: sharded bf16, grouped-query attention, an expert layer, tied embeddings.

    python -m bench.checkpoint_model FOLDER [--gigabytes 4.2] [--shards 5]

The values are normal noise with a few outliers, from one fixed seed; they are cut from one pool, so that gigabytes are
made at the speed of the disk. The last layer is a mixture of experts, one tensor an expert; with ``--stacked`` its
experts are stacked 3-D tensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4rt.checkpoint.writer import TensorFileWriter, TensorSpec

POOL = 1 << 24
SEED = 20250101


@dataclass(frozen=True)
class Size:
    """Extents of a model; the defaults are those of a 7-billion-parameter layer."""

    layers: int = 11
    hidden: int = 4096
    intermediate: int = 11008
    heads: int = 32
    kv_heads: int = 8
    experts: int = 8
    expert_intermediate: int = 2816
    vocabulary: int = 32000
    stacked: bool = False

    @property
    def head_dim(self) -> int:
        """Columns of one attention head."""
        return self.hidden // self.heads


TINY = Size(3, 64, 96, 4, 2, 2, 32, 100)


def tensors(size: Size) -> Iterator[TensorSpec]:
    """Names and shapes in the order of the model."""

    def matrix(name: str, rows: int, columns: int) -> TensorSpec:
        return TensorSpec(name, "BF16", (rows, columns))

    yield matrix("model.embed_tokens.weight", size.vocabulary, size.hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield TensorSpec(f"{prefix}.input_layernorm.weight", "BF16", (size.hidden,))
        for name, rows in (("q", size.hidden), *((name, size.kv_heads * size.head_dim) for name in "kv")):
            yield matrix(f"{prefix}.self_attn.{name}_proj.weight", rows, size.hidden)
        yield matrix(f"{prefix}.self_attn.o_proj.weight", size.hidden, size.hidden)
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", "BF16", (size.hidden,))
        if layer < size.layers - 1:
            yield from _mlp(f"{prefix}.mlp", size.intermediate, size.hidden)
            continue
        yield matrix(f"{prefix}.mlp.gate.weight", size.experts, size.hidden)
        if size.stacked:
            experts, inner = size.experts, size.expert_intermediate
            yield TensorSpec(f"{prefix}.mlp.experts.gate_up_proj", "BF16", (experts, 2 * inner, size.hidden))
            yield TensorSpec(f"{prefix}.mlp.experts.down_proj", "BF16", (experts, size.hidden, inner))
        else:
            for expert in range(size.experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", size.expert_intermediate, size.hidden)
    yield TensorSpec("model.norm.weight", "BF16", (size.hidden,))


def _mlp(prefix: str, inner: int, hidden: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.gate_proj.weight", "BF16", (inner, hidden))
    yield TensorSpec(f"{prefix}.up_proj.weight", "BF16", (inner, hidden))
    yield TensorSpec(f"{prefix}.down_proj.weight", "BF16", (hidden, inner))


def write_model(folder: Path, size: Size = TINY, shards: int = 4, pool_elements: int = 1 << 16) -> Path:
    """Write a model; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    pool = rng.standard_normal(pool_elements, np.float32) * np.float32(0.02)
    pool[rng.integers(0, pool_elements, pool_elements // 1000 + 1)] *= 12  # outliers
    values = pool.astype(ml_dtypes.bfloat16)
    specs = list(tensors(size))
    total = sum(spec.nbytes for spec in specs)
    groups: list[list[TensorSpec]] = [[] for _ in range(shards)]
    position = 0
    for spec in specs:
        groups[min(shards - 1, position * shards // total)].append(spec)
        position += spec.nbytes
    weight_map = {}
    for index, group in enumerate(groups):
        name = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        with TensorFileWriter(folder / name, group, {"format": "pt"}) as writer:
            for spec in group:
                writer.write(spec.name, _values(spec, values, rng))
                weight_map[spec.name] = name
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2))
    (folder / "config.json").write_text(json.dumps(_config(size), indent=2))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return folder


def _values(spec: TensorSpec, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    count = int(np.prod(spec.shape))
    if len(spec.shape) == 1:
        return np.ones(count, ml_dtypes.bfloat16)
    return np.resize(np.roll(values, int(rng.integers(values.size))), count)


def _config(size: Size) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "num_local_experts": size.experts,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.2)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--stacked", action="store_true", help="experts as stacked 3-D tensors")
    arguments = parser.parse_args()
    layers = 2
    while sum(spec.nbytes for spec in tensors(Size(layers))) < arguments.gigabytes * 1e9:
        layers += 1
    write_model(arguments.folder, Size(layers, stacked=arguments.stacked), arguments.shards, POOL)
    print(f"{arguments.folder}: {layers} layers, {arguments.shards} shards")


if __name__ == "__main__":
    main()
