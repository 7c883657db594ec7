"""A checkpoint as one HTML file that a browser opens: tables and bars, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from fp4rt.checkpoint.inspect import Inspection, LayerSummary
from fp4rt.checkpoint.writer import write_atomically
from fp4rt.cli.console import size
from fp4rt.cli.figures import code_image, layer_image
from fp4rt.cli.results import shape_text
from fp4rt.errors import counted
from fp4rt.format import E2M1

__all__ = ["write_page"]

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
svg { vertical-align: middle; }
code { background: #f3f3f3; padding: 0 .2rem; }
"""
BAR_WIDTH, BAR_HEIGHT = 7, 22
SHOWN = 200  # characters of a metadata string


def write_page(found: Inspection, path: Path) -> None:
    """Write the page; every text of the checkpoint is escaped."""
    write_atomically(path, _page(found).encode("utf-8", "backslashreplace"))


def _page(found: Inspection) -> str:
    title = html.escape(Path(found.path).name)
    evidence = f" Said by {html.escape(', '.join(found.evidence))}." if found.evidence else ""
    total = sum(nbytes for _, nbytes, _ in found.files)
    layers = counted(len(found.layers), "quantized layer")
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1><p>Format <code>{found.format}</code>, {layers}, {size(total)}.",
        f"{evidence}</p>",
        _table(("file", "tensors", "bytes"), [(name, str(count), size(nbytes)) for name, nbytes, count in found.files]),
        _table(
            ("dtype", "tensors", "bytes"),
            [(tag, str(count), size(nbytes)) for tag, (count, nbytes) in found.dtypes.items()],
        ),
    ]
    if found.layers:
        parts.append(_layers(found.layers))
    rows = [(name, tag, shape_text(shape), size(nbytes)) for name, tag, shape, nbytes in found.plain]
    parts.append(f"<h2>Other tensors</h2>{_table(('tensor', 'dtype', 'shape', 'bytes'), rows)}")
    if found.metadata:
        strings = [(key, _shortened(value)) for key, value in sorted(found.metadata.items())]
        parts.append(f"<h2>Metadata</h2>{_table(('key', 'value'), strings)}")
    return "\n".join([*parts, "</html>\n"])


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _layers(layers: list[LayerSummary]) -> str:
    """One row a layer, with bars of log counts of its block scales and of its codes."""
    scales, codes = layer_image(layers), code_image(layers)
    headings = ("weight", "shape", "bytes", "encode scale", "zero blocks", "saturated blocks", "layout")
    head = "".join(
        f"<th>{text}</th>" for text in (*headings, "block scales, 2^-7 ... 2^8", "codes, 0 ... 6, -0 ... -6")
    )
    body = []
    names = [f"{value:g}" for value in E2M1.values]
    for index, layer in enumerate(layers):
        low, high = layer.global_scales
        cells = (
            html.escape(layer.name),
            shape_text(layer.shape),
            size(layer.nbytes),
            f"{low:.6g}" if low == high else f"{low:.4g} ... {high:.4g}",
            f"{layer.zero_blocks} / {layer.blocks}",
            str(layer.saturated_blocks),
            layer.layout,
            _bars(scales[index].tolist(), [f"octave {i}" for i in range(scales.shape[1])]),
            _bars(codes[index].tolist(), names),
        )
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<h2>Quantized layers</h2><table><tr>{head}</tr>{''.join(body)}</table>"


def _bars(heights: list[float], names: list[str]) -> str:
    """An inline drawing of values in 0 ... 1."""
    rectangles = "".join(
        f"<rect x='{index * BAR_WIDTH}' y='{BAR_HEIGHT * (1 - height):.1f}' width='{BAR_WIDTH - 1}' "
        f"height='{BAR_HEIGHT * height:.1f}' fill='#3b6ea5'><title>{name}</title></rect>"
        for index, (height, name) in enumerate(zip(heights, names, strict=False))
    )
    return f"<svg width='{len(heights) * BAR_WIDTH}' height='{BAR_HEIGHT}'>{rectangles}</svg>"


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
