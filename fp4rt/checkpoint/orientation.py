"""Which axis of a stored weight is k: blocks of NVFP4 run along it, and not every model stores it last.

Shapes tell first: a bias has n elements, and projections of experts begin or end at the language model's
``hidden_size``, or at ``moe_latent_size`` where experts work on a projection of it. Where they fit either way the
model's type does: Hugging Face's ``Conv1D`` stores (k, n), and some models keep stacks of experts as (e, k, n), for
x @ w. Both are read from config.json, beside a single file, too. Where nothing tells, (n, k) and (e, n, k) are assumed,
and for stacks the report says so.

Sources: transformers 5.24, ``pytorch_utils.Conv1D``, ``use_experts_implementation(is_transposed=True)``,
``conversion_mapping.py`` and ``models/nemotron_h``; vLLM, ``models/jais.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp4rt.checkpoint.folder import CONFIG, read_configuration_file
from fp4rt.checkpoint.formats import LayerName
from fp4rt.checkpoint.store import Store

__all__ = ["Orientation", "read_orientation"]

CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder", "jais"}
CONV1D = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc2?)$")
TRANSPOSED_MODELS = {
    *("llama4", "llama4_text", "gpt_oss", "openai_privacy_filter", "aria", "aria_text"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text"),
}
# Models whose gate_up_proj alternates rows of gate and up.
INTERLEAVED_MODELS = {"gpt_oss"}
# Projections of experts whose k, or whose n, is the model's hidden_size.
FROM_HIDDEN = {"gate_up_proj", "gate_and_up_projs", "gate_proj", "up_proj", "w1", "w3", "fc1"}
TO_HIDDEN = {"down_proj", "down_projs", "w2", "fc2"}
# Parts of a configuration that describe a language model; those of images and sound have a hidden_size, too.
LANGUAGE_PARTS = {
    *("text_config", "language_config", "language_model", "llm_config", "llm", "lm_config"),
    *("thinker_config", "talker_config", "decoder", "decoder_config", "generator"),
}


@dataclass(frozen=True)
class Orientation:
    """How the weights of one checkpoint lie.

    Attributes:
        transposed: weights that are stored as (k, n), and stacks as (e, k, n).
        assumed: stacks of which nothing says how they are stored.
        interleaved: whether the model's gate_up_proj alternates rows of gate and up.
    """

    transposed: frozenset[str]
    assumed: frozenset[str]
    interleaved: bool


def read_orientation(store: Store) -> Orientation:
    """Look at names, shapes, biases and the model's configuration.

    Raises:
        CheckpointError: config.json is no JSON object, or a link that leaves the folder.
    """
    config = read_configuration_file(store.location, CONFIG) or {}  # also where only a file of the folder was named
    types = _model_types(config)
    conv1d = {name for name in store if _bias_says_transposed(store, name)}
    if types & CONV1D_MODELS or any(CONV1D.search(LayerName.of_weight(name).base) for name in conv1d):
        conv1d.update(name for name in store if CONV1D.search(LayerName.of_weight(name).base))
    extents = list(_extents_of_experts(config))
    stacks = {name: _shape_says(store, name, extents) for name in store if len(store.entry(name).shape) == 3}
    said = {verdict for verdict in stacks.values() if verdict is not None}
    usual = said.pop() if len(said) == 1 else True if types & TRANSPOSED_MODELS else None
    assumed = (name for name, verdict in stacks.items() if verdict is None and usual is None)
    flipped = (name for name, verdict in stacks.items() if (usual if verdict is None else verdict))
    interleaved = not types.isdisjoint(INTERLEAVED_MODELS)
    return Orientation(frozenset((*conv1d, *flipped)), frozenset(assumed), interleaved)


def _bias_says_transposed(store: Store, name: str) -> bool:
    """Whether a matrix has a bias that fits its columns and not its rows."""
    bias = LayerName.of_weight(name).base + ".bias"
    if not name.endswith(".weight") or bias not in store:
        return False
    shape, length = store.entry(name).shape, store.entry(bias).shape
    return len(shape) == 2 and shape[0] != shape[1] and length == shape[1:]


def _shape_says(store: Store, name: str, extents: list[tuple[int, int | None]]) -> bool | None:
    """Whether a stack is transposed; None where its extents do not tell."""
    leaf = LayerName.of_weight(name).base.rpartition(".")[2]
    if leaf not in FROM_HIDDEN | TO_HIDDEN:
        return None
    _, first, last = store.entry(name).shape
    said = set()
    for hidden, inner in extents:
        inside = {inner, 2 * inner if leaf in FROM_HIDDEN else inner} if inner else set()  # gate and up in one
        begins, ends = first == hidden and last in inside, last == hidden and first in inside
        if not (begins or ends):  # a part of an expert, or more than one: then the extent at its ends alone tells
            begins, ends = first == hidden, last == hidden
        if begins != ends:
            said.add(begins == (leaf in FROM_HIDDEN))
    return said.pop() if len(said) == 1 else None


def _extents_of_experts(config: dict[str, Any]) -> Iterator[tuple[int, int | None]]:
    """(extent at an expert's ends, extent inside or None) as each language model of a configuration says."""
    tables = [config]
    while tables:
        table = tables.pop()
        latent, hidden, inner = (
            value if type(value := table.get(key)) is int else None
            for key in ("moe_latent_size", "hidden_size", "moe_intermediate_size")
        )
        end = hidden if latent is None else latent
        if end is not None:
            yield end, inner
        tables += [value for key, value in table.items() if key in LANGUAGE_PARTS and isinstance(value, dict)]


def _model_types(config: dict[str, Any]) -> set[str]:
    """The types of a model and of its parts."""
    types, tables = set(), [config]
    while tables:
        table = tables.pop()
        if isinstance(table.get("model_type"), str):
            types.add(table["model_type"])
        tables += [value for value in table.values() if isinstance(value, dict)]
    return types
