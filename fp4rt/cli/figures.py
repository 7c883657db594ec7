"""Pictures of runs and checkpoints, with matplotlib: the errors, the scales and the codes of every layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from fp4rt.checkpoint.inspect import Inspection, LayerSummary
from fp4rt.checkpoint.report import ERROR_BINS, ERROR_RANGE, RunReport, TensorReport
from fp4rt.cli.console import clean
from fp4rt.errors import BackendUnavailable
from fp4rt.format import E2M1, E4M3

__all__ = ["code_image", "draw_layers", "draw_run", "layer_image", "require", "scale_octaves"]

PIXELS_PER_INCH = 120
LARGEST_ROWS = 400  # layers of one picture; beyond them it shows every n-th
LONGEST_NAME = 64  # characters of a layer's name; of a longer one it shows both ends
MANTISSAS = 1 << E4M3.mantissa_bits


def require() -> None:
    """Refuse to start what could not be drawn at the end.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("pictures need matplotlib; install fp4rt[plot]")


def draw_run(report: RunReport, path: Path) -> None:
    """Error and scale histograms of every quantized layer, and its SQNR, as one picture."""
    rows = [row for row in report.tensors if row.histograms is not None]
    rows = rows[:: -(-len(rows) // LARGEST_ROWS) or 1]
    errors = _by_row([row.histograms.errors for row in rows if row.histograms])
    scales = _by_row([scale_octaves(row.histograms.scales) for row in rows if row.histograms])
    figure, axes = _canvas(rows, 3)
    half = ERROR_RANGE * 100
    _image(axes[0], errors, (-half, half), "error, % of the layer's RMS", f"errors ({ERROR_BINS} bins, log count)")
    _image(axes[1], scales, _octave_range(), "block scale, log2", "block scales (log count)")
    axes[2].barh(range(len(rows)), [min(row.sqnr_db or 0, 100) for row in rows], color="#3b6ea5")
    axes[2].set(title="SQNR", xlabel="dB", ylim=(len(rows) - 0.5, -0.5), yticks=[])
    for index, row in enumerate(rows):
        if row.clipped_blocks:
            axes[2].text(0.5, index, f"{row.clipped_blocks} clipped", va="center", fontsize=6, color="white")
    _names(axes[0], rows)
    figure.suptitle(f"{clean(Path(report.source).name)}: {report.format}", fontsize=10, parse_math=False)
    figure.savefig(path)


def draw_layers(found: Inspection, path: Path) -> None:
    """Scales, codes and global scale of every layer, as one picture."""
    layers = found.layers[:: -(-len(found.layers) // LARGEST_ROWS) or 1]
    figure, axes = _canvas(layers, 3)
    _image(axes[0], layer_image(layers), _octave_range(), "block scale, log2", "block scales (log count)")
    values = E2M1.values
    _image(axes[1], code_image(layers), (-0.5, 15.5), "code", "codes (log count)")
    axes[1].set_xticks(range(values.size), [f"{value:g}" for value in values], fontsize=6, rotation=90)
    decode = [1 / layer.global_scales[0] for layer in layers]
    axes[2].barh(range(len(layers)), decode, color="#3b6ea5")
    axes[2].set(title="decode scale", xscale="log", ylim=(len(layers) - 0.5, -0.5), yticks=[])
    _names(axes[0], layers)
    figure.suptitle(f"{clean(Path(found.path).name)}: {found.format}", fontsize=10, parse_math=False)
    figure.savefig(path)


def scale_octaves(counts: list[int]) -> list[int]:
    """Counts by e4m3 code as counts by exponent; zero and subnormals share the first."""
    table = np.array(counts, np.int64).reshape(-1, MANTISSAS)
    octaves: list[int] = table.sum(axis=1).tolist()
    return octaves


def layer_image(layers: list[LayerSummary]) -> np.ndarray:
    """Log counts of block scales, (layers, octaves)."""
    return _by_row([scale_octaves(layer.scale_counts) for layer in layers])


def code_image(layers: list[LayerSummary]) -> np.ndarray:
    """Log counts of codes, (layers, 16)."""
    return _by_row([layer.code_counts for layer in layers])


def _by_row(counts: list[list[int]]) -> np.ndarray:
    """log10 of counts, each row against its own largest."""
    table = np.log10(np.array(counts, np.float64).reshape(len(counts), -1) + 1)
    return table / np.maximum(table.max(axis=1, keepdims=True, initial=0), 1e-9)


def _octave_range() -> tuple[float, float]:
    octaves = E4M3.magnitude_count // MANTISSAS
    return (1 - E4M3.bias - 1, octaves - E4M3.bias)


def _canvas(rows: list[Any], columns: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.6 + 0.14 * max(len(rows), 4)
    figure = Figure(figsize=(13, height), dpi=PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, sharey=False)


def _image(axes: Any, table: np.ndarray, extent: tuple[float, float], label: str, title: str) -> None:
    if table.size:
        axes.imshow(
            table, aspect="auto", cmap="viridis", interpolation="nearest", extent=(*extent, len(table) - 0.5, -0.5)
        )
    axes.set(title=title, xlabel=label)
    axes.set_yticks([])


def _names(axes: Any, rows: list[TensorReport] | list[LayerSummary]) -> None:
    labels = [_shortened(clean(row.name.removesuffix(".weight"))) for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=5, parse_math=False)  # a $ in a name is no formula


def _shortened(name: str) -> str:
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 3]}...{name[-half:]}"
