"""The forward pass of a BERT sentence encoder, in the array operations that NumPy and CuPy share.

B sentences of at most L tokens, D = hidden size, H heads of size D / H. Linear layers are injected, so that the same
pass runs with fp32, weight-only and fully quantized ones. They get (B * L, k) fp32 and return (B * L, n) fp32.

Source: Devlin et al., "BERT" (arXiv:1810.04805); pooling: Reimers and Gurevych, "Sentence-BERT" (arXiv:1908.10084).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

Array = Any  # a NumPy or a CuPy array
Linear = Callable[[Array], Array]

MASKED_SCORE = np.float32(-1e9)  # exp of it is 0 after the row's maximum is subtracted


@dataclass(frozen=True)
class EncoderConfig:
    """The numbers of ``config.json`` that the forward pass needs."""

    num_layers: int
    num_heads: int
    layer_norm_eps: float

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """From the parsed ``config.json`` of a BERT model."""
        if config["hidden_act"] != "gelu":
            raise ValueError(f"this encoder knows hidden_act gelu, got {config['hidden_act']!r}")
        return cls(config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"])


def linear_names(config: EncoderConfig) -> list[str]:
    """The linear layers of the encoder in the order in which they run; the file has ``NAME.weight``, ``NAME.bias``."""
    attention = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    parts = [*attention, "intermediate.dense", "output.dense"]
    return [f"encoder.layer.{layer}.{part}" for layer in range(config.num_layers) for part in parts]


@numba.vectorize(["float32(float32)"])
def _host_erf(x: float) -> float:
    return math.erf(x)


def erf(x: Array) -> Array:
    """The error function of fp32 values, where they are."""
    if isinstance(x, np.ndarray):
        return _host_erf(x)
    from cupyx.scipy.special import erf as device_erf

    return device_erf(x)


def gelu(x: Array) -> Array:
    """x * Phi(x), with the exact error function as in the trained model."""
    return np.float32(0.5) * x * (1 + erf(x * np.float32(math.sqrt(0.5))))


class Encoder:
    """Token ids to unit-length sentence embeddings.

    Args:
        xp: the array module, ``numpy`` or ``cupy``.
        config: sizes.
        weights: fp32 arrays of ``xp`` by their names in the file; the linear layers' weights are not read.
        linears: one callable for each of :func:`linear_names`.
    """

    def __init__(
        self, xp: Any, config: EncoderConfig, weights: Mapping[str, Array], linears: Mapping[str, Linear]
    ) -> None:
        self.xp = xp
        self.config = config
        self.weights = weights
        self.linears = linears

    def encode(self, token_ids: Array, mask: Array) -> Array:
        """Embeddings of B sentences.

        Args:
            token_ids: (B, L) integers.
            mask: (B, L) fp32, 1 for a token and 0 for padding.

        Returns:
            (B, D) fp32; each row has length 1.
        """
        hidden = self._embed(token_ids)
        score_mask = (1 - mask)[:, None, None, :] * MASKED_SCORE
        for layer in range(self.config.num_layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden, score_mask)
        pooled = (hidden * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return pooled / self.xp.linalg.norm(pooled, axis=1, keepdims=True)

    def _embed(self, token_ids: Array) -> Array:
        word, position, token_type = (
            self.weights[f"embeddings.{table}_embeddings.weight"] for table in ("word", "position", "token_type")
        )
        hidden = word[token_ids] + position[: token_ids.shape[1]] + token_type[0]
        return self._layer_norm("embeddings.LayerNorm", hidden)

    def _layer(self, name: str, hidden: Array, score_mask: Array) -> Array:
        attended = self._linear(f"{name}.attention.output.dense", self._attention(name, hidden, score_mask))
        hidden = self._layer_norm(f"{name}.attention.output.LayerNorm", attended + hidden)
        inner = gelu(self._linear(f"{name}.intermediate.dense", hidden))
        return self._layer_norm(f"{name}.output.LayerNorm", self._linear(f"{name}.output.dense", inner) + hidden)

    def _attention(self, name: str, hidden: Array, score_mask: Array) -> Array:
        query, key, value = (
            self._split_heads(self._linear(f"{name}.attention.self.{part}", hidden))
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(-1, -2) * np.float32(1 / math.sqrt(query.shape[-1])) + score_mask
        weights = self.xp.exp(scores - scores.max(axis=-1, keepdims=True))  # (B, H, L, L)
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ value).swapaxes(1, 2).reshape(hidden.shape)

    def _split_heads(self, x: Array) -> Array:
        """(B, L, D) to (B, H, L, D / H)."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.config.num_heads, -1).swapaxes(1, 2)

    def _linear(self, name: str, x: Array) -> Array:
        return self.linears[name](x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def _layer_norm(self, name: str, x: Array) -> Array:
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = (centered * centered).mean(axis=-1, keepdims=True)
        scaled = centered / self.xp.sqrt(variance + np.float32(self.config.layer_norm_eps))
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
