"""The demo's tables and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.minilm.compare import NEIGHBOURS, EmbeddingAgreement


@dataclass(frozen=True)
class LayerRow:
    """One linear layer: SQNR in dB of its weight, and of its output for each variant on the original inputs."""

    name: str
    shape: tuple[int, int]
    weight_db: float
    output_db: Mapping[str, float]


@dataclass(frozen=True)
class VariantRow:
    """One way to run the model: bytes of its linear weights, seconds to encode all sentences, agreement with fp32."""

    name: str
    linear_bytes: int
    encode_seconds: float
    agreement: EmbeddingAgreement | None


def print_layers(console: Console, rows: list[LayerRow], variants: list[str]) -> None:
    """One line a layer."""
    table = Table(title="Linear layers: signal to quantization noise, dB (more is better)")
    table.add_column("layer")
    table.add_column("n x k", justify="right")
    for column in ("weight", *(f"output, {variant}" for variant in variants)):
        table.add_column(column, justify="right")
    for row in rows:
        values = (row.weight_db, *(row.output_db[variant] for variant in variants))
        name = row.name.removeprefix("encoder.layer.")
        table.add_row(name, f"{row.shape[0]} x {row.shape[1]}", *(f"{value:.1f}" for value in values))
    console.print(table)


def print_variants(console: Console, rows: list[VariantRow]) -> None:
    """One line a variant, the original first."""
    table = Table(title="Sentence embeddings against fp32")
    headings = ("linears", "their weights", "encode", "cosine mean", "cosine min", "nearest kept")
    for heading in (*headings, f"nearest {NEIGHBOURS} kept", "rank correlation"):
        table.add_column(heading, justify="left" if heading == "linears" else "right")
    for row in rows:
        same = row.agreement
        agreement = ["-"] * 5
        if same is not None:
            agreement = [
                f"{same.mean_cosine:.4f}",
                f"{same.min_cosine:.4f}",
                f"{same.nearest_kept} of {same.sentences}",
            ]
            agreement += [f"{100 * same.neighbours_kept:.0f} %", f"{same.rank_correlation:.4f}"]
        size = f"{row.linear_bytes / 1e6:.1f} MB"
        table.add_row(row.name, size, f"{1e3 * row.encode_seconds:.0f} ms", *agreement)
    console.print(table)


def draw(path: Path, similarities: Mapping[str, np.ndarray], rows: list[LayerRow]) -> None:
    """Similarity matrices (B, B) of each variant side by side, and the layers' SQNR below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(similarities), 7.5), layout="constrained")
    grid = figure.add_gridspec(2, len(similarities), height_ratios=[1.2, 1])
    axes = [figure.add_subplot(grid[0, column]) for column in range(len(similarities))]
    for axis, (name, similarity) in zip(axes, similarities.items(), strict=True):
        image = axis.imshow(similarity, vmin=0, vmax=1, cmap="viridis")
        axis.set_title(name)
        axis.set_xlabel("sentence")
    axes[0].set_ylabel("sentence")
    figure.colorbar(image, ax=axes, label="cosine similarity")
    axis = figure.add_subplot(grid[1, :])
    places = np.arange(len(rows))
    axis.plot(places, [row.weight_db for row in rows], "k--", label="weight")
    for variant in rows[0].output_db:
        axis.plot(places, [row.output_db[variant] for row in rows], marker="o", label=f"output, {variant}")
    axis.set_xticks(places, [row.name.removeprefix("encoder.layer.") for row in rows], rotation=90, fontsize=6)
    axis.set_ylabel("SQNR, dB")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
