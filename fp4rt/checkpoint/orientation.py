"""Which axis of a stored weight is k: blocks of NVFP4 run along it, and not every model stores it last.

Shapes tell first: a bias has n elements, and projections of experts begin or end at ``hidden_size``. Where they fit
either way the model's type does: Hugging Face's ``Conv1D`` stores (k, n), and some models keep stacks of experts as
(e, k, n), for x @ w. Both are read from config.json, beside a single file, too. Where nothing tells, (n, k) and
(e, n, k) are assumed, and for stacks the report says so.

Sources: transformers 5.24, ``pytorch_utils.Conv1D``, ``use_experts_implementation(is_transposed=True)`` and
``conversion_mapping.py``; vLLM, ``models/jais.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp4rt.checkpoint.folder import CONFIG, read_json
from fp4rt.checkpoint.formats import LayerName
from fp4rt.checkpoint.store import Store

__all__ = ["Orientation", "interleaves", "read_orientation"]

CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder", "jais"}
CONV1D = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc2?)$")
TRANSPOSED_MODELS = {
    *("llama4", "llama4_text", "gpt_oss", "openai_privacy_filter", "aria", "aria_text"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text"),
}
# Models whose gate_up_proj alternates rows of gate and up.
INTERLEAVED_MODELS = {"gpt_oss"}
# Projections of experts whose k, or whose n, is the model's hidden_size.
FROM_HIDDEN = {"gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "fc1"}
TO_HIDDEN = {"down_proj", "w2", "fc2"}


@dataclass(frozen=True)
class Orientation:
    """How the weights of one checkpoint lie.

    Attributes:
        transposed: weights that are stored as (k, n), and stacks as (e, k, n).
        assumed: stacks of which nothing says how they are stored.
    """

    transposed: frozenset[str]
    assumed: frozenset[str]


def read_orientation(store: Store) -> Orientation:
    """Look at names, shapes, biases and the model's configuration.

    Raises:
        CheckpointError: config.json is no JSON object.
    """
    config = _model_config(store)
    types = set(_values(config, "model_type"))
    conv1d = {name for name in store if _bias_says_transposed(store, name)}
    if types & CONV1D_MODELS or any(CONV1D.search(LayerName.of_weight(name).base) for name in conv1d):
        conv1d.update(name for name in store if CONV1D.search(LayerName.of_weight(name).base))
    hidden = set(_values(config, "hidden_size"))
    stacks = {name: _shape_says(store, name, hidden) for name in store if len(store.entry(name).shape) == 3}
    said = {verdict for verdict in stacks.values() if verdict is not None}
    usual = said.pop() if len(said) == 1 else True if types & TRANSPOSED_MODELS else None
    assumed = (name for name, verdict in stacks.items() if verdict is None and usual is None)
    flipped = (name for name, verdict in stacks.items() if (usual if verdict is None else verdict))
    return Orientation(frozenset((*conv1d, *flipped)), frozenset(assumed))


def interleaves(store: Store) -> bool:
    """Whether the model's gate_up_proj alternates rows of gate and up.

    Raises:
        CheckpointError: config.json is no JSON object.
    """
    return not INTERLEAVED_MODELS.isdisjoint(_values(_model_config(store), "model_type"))


def _model_config(store: Store) -> dict[str, Any]:
    """The config.json of the folder, also where only a file of it was named; empty where there is none."""
    path = store.location.folder / CONFIG
    return read_json(path) if path.is_file() else {}


def _bias_says_transposed(store: Store, name: str) -> bool:
    """Whether a matrix has a bias that fits its columns and not its rows."""
    bias = LayerName.of_weight(name).base + ".bias"
    if not name.endswith(".weight") or bias not in store:
        return False
    shape, length = store.entry(name).shape, store.entry(bias).shape
    return len(shape) == 2 and shape[0] != shape[1] and length == shape[1:]


def _shape_says(store: Store, name: str, hidden: set[Any]) -> bool | None:
    """Whether a stack is transposed; None where its extents do not tell."""
    leaf = LayerName.of_weight(name).base.rpartition(".")[2]
    _, first, last = store.entry(name).shape
    if (first in hidden) == (last in hidden) or leaf not in FROM_HIDDEN | TO_HIDDEN:
        return None
    return (first in hidden) == (leaf in FROM_HIDDEN)


def _values(config: dict[str, Any], key: str) -> Iterator[Any]:
    """What ``key`` says in a configuration and in those of the model's parts within it."""
    tables: list[dict[str, Any]] = [config]
    while tables:
        table = tables.pop()
        if isinstance(table.get(key), (str, int)):
            yield table[key]
        tables += [value for value in table.values() if isinstance(value, dict)]
