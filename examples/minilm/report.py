"""The demo's tables and picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
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
    """One line for each kind of layer, over the encoder's depth; the picture has every layer."""
    kinds: dict[str, list[LayerRow]] = {}
    for row in rows:
        kinds.setdefault(row.name.split(".", 3)[3], []).append(row)
    table = Table(title="SQNR of the weights and of the outputs, dB: mean (worst) over the blocks", box=SIMPLE)
    table.add_column("layer", no_wrap=True)
    table.add_column("n x k", justify="right", no_wrap=True)
    for column in ("weights", *variants):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, group in kinds.items():
        columns = [
            [row.weight_db for row in group],
            *([row.output_db[variant] for row in group] for variant in variants),
        ]
        cells = [f"{np.mean(values):.1f} ({min(values):.1f})" for values in columns]
        table.add_row(kind, f"{group[0].shape[0]} x {group[0].shape[1]}", *cells)
    console.print(table)


def print_variants(console: Console, rows: list[VariantRow]) -> None:
    """One column a variant, the original first."""
    table = Table(title="Sentence embeddings", box=SIMPLE)
    table.add_column("linear layers", no_wrap=True)
    for row in rows:
        table.add_column(row.name, justify="right", no_wrap=True)
    table.add_row("bytes of their weights", *(f"{row.linear_bytes / 1e6:.1f} MB" for row in rows))
    table.add_row("time to encode", *(f"{1e3 * row.encode_seconds:.0f} ms" for row in rows))
    lines: dict[str, Callable[[EmbeddingAgreement], str]] = {
        "cosine to fp32, mean": lambda same: f"{same.mean_cosine:.4f}",
        "cosine to fp32, worst": lambda same: f"{same.min_cosine:.4f}",
        "nearest neighbour kept": lambda same: f"{same.nearest_kept} of {same.sentences}",
        f"of the {NEIGHBOURS} nearest kept": lambda same: f"{100 * same.neighbours_kept:.0f} %",
        "rank correlation of all pairs": lambda same: f"{same.rank_correlation:.4f}",
    }
    for title, text in lines.items():
        table.add_row(title, *("" if row.agreement is None else text(row.agreement) for row in rows))
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
