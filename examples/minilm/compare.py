"""How far a quantized model is from the original: layer by layer, in its embeddings, in the neighbours they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from examples.minilm.encoder import Array, Linear

NEIGHBOURS = 5


def sqnr_db(reference: np.ndarray, approximation: np.ndarray) -> float:
    """Signal to quantization noise ratio in dB; infinite where both are equal."""
    noise = float(np.square(reference - approximation, dtype=np.float64).sum())
    signal = float(np.square(reference, dtype=np.float64).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10(signal / noise))


class Recorder:
    """Wraps linear layers and keeps the last input of each."""

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        self.inputs: dict[str, Array] = {}
        self.linears = {name: self._recorded(name, linear) for name, linear in linears.items()}

    def _recorded(self, name: str, linear: Linear) -> Linear:
        def run(x: Array) -> Array:
            self.inputs[name] = x
            return linear(x)

        return run


@dataclass(frozen=True)
class EmbeddingAgreement:
    """What the quantized embeddings (B, D) keep of the original ones.

    ``nearest_kept`` counts sentences whose nearest neighbour is the same; ``neighbours_kept`` is the share of the
    :data:`NEIGHBOURS` nearest that are; ``rank_correlation`` is Spearman's, over the similarities of all pairs.
    """

    mean_cosine: float
    min_cosine: float
    nearest_kept: int
    sentences: int
    neighbours_kept: float
    rank_correlation: float


def agreement(original: np.ndarray, quantized: np.ndarray) -> EmbeddingAgreement:
    """Compare unit-length embeddings of the same sentences."""
    cosine = (original * quantized).sum(axis=1)
    before, after = original @ original.T, quantized @ quantized.T
    count = len(original)
    kept = min(NEIGHBOURS, count - 1)
    near_before, near_after = _neighbours(before, kept), _neighbours(after, kept)
    shared = [len(set(a) & set(b)) for a, b in zip(near_before, near_after, strict=True)]
    pairs = np.triu_indices(count, k=1)
    return EmbeddingAgreement(
        mean_cosine=float(cosine.mean()),
        min_cosine=float(cosine.min()),
        nearest_kept=int((near_before[:, 0] == near_after[:, 0]).sum()),
        sentences=count,
        neighbours_kept=float(np.mean(shared)) / kept,
        rank_correlation=_rank_correlation(before[pairs], after[pairs]),
    )


def _neighbours(similarity: np.ndarray, kept: int) -> np.ndarray:
    """(B, kept) indices of the most similar other sentences, nearest first."""
    others = similarity.copy()
    np.fill_diagonal(others, -np.inf)
    return np.argsort(-others, axis=1, kind="stable")[:, :kept]


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2:
        return 1.0
    ranks_a, ranks_b = np.argsort(np.argsort(a)), np.argsort(np.argsort(b))
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])
