"""The isolation experiment: which scale buffer must not be left unfilled, and what filling it costs.

Fill policy (zero | empty | covered | poison) x layout (128x4 | linear | 8x4) x shape, for two quantizers: the
library's, and one that is made wrong on purpose: it writes the scales of the matrix and nothing else, and its tag
claims that the kernel writes the padding. A third row shows the remedy: the same kernel with an honest tag.

Each row has the time of a call, the bytes that the pool zeroed in it, the verdict of the write-coverage check, and the
errors of a product that reads whole tiles, over three kinds of stale memory: NaN scales, the largest scales, anything.
That product does what a tensor-core kernel without predicates does: it takes every scale byte of a tile row, padding
included, and whatever codes follow the row in memory. Scales of zero make these codes vanish; stale bytes do not.

    python -m bench.isolation [--device cuda] [--shapes 128x48 ...] [--check]

``--check`` exits with 1 unless the finding is reproduced: under ``empty`` the incomplete quantizer breaks 128x4 and 8x4
and only these, and the library's breaks nothing. That takes a shape whose block columns fill no whole tiles; where they
do (n a multiple of 64), a product meets no padding and nothing can break.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fp4rt
from bench.needs import need_gpu
from bench.rows import Row, time_host, timing, write_rows
from fp4rt import coverage, interop
from fp4rt.format import BLOCK, E2M1, E4M3, E4M3_MAX_BYTE, E4M3_NAN_BYTE
from fp4rt.layout import LAYOUTS, ScaleLayout, block_columns
from fp4rt.pool import Fill, PaddedPool, current_pool, scale_tag, use_pool

SHAPES = ((128, 48), (128, 80), (150, 48), (150, 80), (64, 7152))
WEIGHT_ROWS = 128
CALLS_PER_TIMING = 20

Quantizer = Callable[[Any, ScaleLayout], fp4rt.QuantizedTensor]


def complete(x: Any, layout: ScaleLayout) -> fp4rt.QuantizedTensor:
    """The library's quantizer: every byte written by the kernel."""
    return fp4rt.quantize(x, layout=layout.name)


def incomplete(x: Any, layout: ScaleLayout) -> fp4rt.QuantizedTensor:
    """Writes only real scales, and claims to write all."""
    return _write_only_real_scales(x, layout, "kernel")


def incomplete_but_honest(x: Any, layout: ScaleLayout) -> fp4rt.QuantizedTensor:
    """Writes only real scales, and says that the pool must zero the padding."""
    return _write_only_real_scales(x, layout, "pool")


def _write_only_real_scales(x: Any, layout: ScaleLayout, writer: Any) -> fp4rt.QuantizedTensor:
    q = fp4rt.quantize(x, layout="linear")
    m, n = q.shape
    view = interop.view(x)
    columns = block_columns(n)
    tag = scale_tag(layout.name, m, n, n, writer)
    buffer = current_pool().allocate(tag.nbytes, view.device, interop.stream_handle(None, view), tag)
    if view.device.kind == "cpu":
        scales = buffer.numpy(tag.physical)
    else:
        scales = interop.from_device(buffer, tag.physical, "uint8", view.library)
    scales.reshape(-1)[_like(x, layout.offsets(m, columns))] = q.scales
    return fp4rt.QuantizedTensor(q.data, scales, q.global_scale, q.shape, layout.name)


QUANTIZERS: dict[str, Quantizer] = {
    "fp4rt": complete,
    "incomplete": incomplete,
    "incomplete, honest tag": incomplete_but_honest,
}


def _like(x: Any, array: np.ndarray) -> Any:
    """A host array where ``x`` is."""
    return array if isinstance(x, np.ndarray) else sys.modules["cupy"].asarray(array)


def whole_tiles(q: fp4rt.QuantizedTensor) -> np.ndarray:
    """The fp64 values (m, columns of whole tiles * 16) that a kernel reading whole tiles multiplies, on the host."""
    layout = LAYOUTS[q.layout]
    m = q.shape[0]
    columns = block_columns(q.padded_n)
    read_columns = layout.shape(m, columns)[1]
    data = _host(q.data).reshape(-1)
    row_bytes, read_bytes = q.data.shape[1], read_columns * 8
    data = np.concatenate([data, np.zeros(read_bytes, np.uint8)])  # beyond the buffer a bulk copy delivers zeros
    codes = data[np.arange(m)[:, None] * row_bytes + np.arange(read_bytes)[None, :]]  # beyond the row: the next row
    values = np.stack([E2M1.values[codes & 15], E2M1.values[codes >> 4]], axis=-1).reshape(m, -1)
    offsets = layout.offset(np.arange(m)[:, None], np.arange(read_columns)[None, :], columns)
    scales = E4M3.values[_host(q.scales).reshape(-1)[offsets]].astype(np.float64)
    return values * np.repeat(scales, 16, axis=1) / float(_host(q.global_scale)[0])


def _host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else sys.modules["cupy"].asnumpy(array)


# What memory may hold that others used before.
STALE: dict[str, Callable[[int], np.ndarray]] = {
    "nan": lambda nbytes: np.full(nbytes, E4M3_NAN_BYTE, np.uint8),
    "largest": lambda nbytes: np.full(nbytes, E4M3_MAX_BYTE, np.uint8),
    "random": lambda nbytes: np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8),
}


def make_stale(pool: PaddedPool, x: Any, sizes: list[int], content: Callable[[int], np.ndarray]) -> None:
    """Leaves blocks with stale content in the pool, two of each size."""
    view = interop.view(x)
    kept = []
    for size in sizes * 2:
        buffer = pool.allocate(size, view.device, interop.stream_handle(None, view))
        if view.device.kind == "cpu":
            array = buffer.numpy((size,))
        else:
            array = interop.from_device(buffer, (size,), "uint8", "cupy")
        array[:] = _like(x, content(size))
        kept.append(array)


@dataclass(frozen=True)
class Outcome:
    """One cell of the experiment."""

    errors: dict[str, float]  # by stale content: relative to the largest true product; NaN where any product is
    zeroed: int  # bytes a call
    seconds: list[float]

    @property
    def broken(self) -> bool:
        """Whether a product is wrong: the true ones are exact but for fp64 rounding."""
        return not all(error < 1e-9 for error in self.errors.values())


def experiment(quantizer: Quantizer, fill: Fill, layout: ScaleLayout, a: Any, b: Any) -> Outcome:
    """Quantize two operands over stale memory under a policy and multiply them by whole tiles."""
    honest = [whole_tiles(fp4rt.quantize(x, layout="linear")) for x in (a, b)]
    expected = honest[0] @ honest[1].T
    errors = {}
    pool = PaddedPool(fill)
    with use_pool(pool):
        sizes = [layout.nbytes(x.shape[0], block_columns(x.shape[1])) for x in (a, b)]
        for kind, content in STALE.items():
            make_stale(pool, a, sizes, content)
            tiles = [whole_tiles(quantizer(x, layout)) for x in (a, b)]
            with np.errstate(invalid="ignore"):
                errors[kind] = float(np.abs(tiles[0] @ tiles[1].T - expected).max() / np.abs(expected).max())
        before = pool.stats()
        quantizer(a, layout)
        zeroed = pool.stats().bytes_zeroed - before.bytes_zeroed
        seconds = time_calls(lambda: quantizer(a, layout), a)
    return Outcome(errors, zeroed, seconds)


def time_calls(function: Callable[[], object], x: Any) -> list[float]:
    """Seconds a call: on the host each, on a device the mean of a queue of calls between two events."""
    if isinstance(x, np.ndarray):
        return time_host(function)
    cupy = sys.modules["cupy"]
    seconds = []
    for _ in range(15):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(CALLS_PER_TIMING):
            function()
        end.record()
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / CALLS_PER_TIMING)
    return seconds[2:]


def has_padding(layout: ScaleLayout, m: int, n: int) -> bool:
    """Whether some bytes of the scales belong to no block of an (m, n) matrix."""
    columns = block_columns(n)
    return layout.nbytes(m, columns) > m * columns


def reads_padding(layout: ScaleLayout, n: int) -> bool:
    """Whether :func:`whole_tiles` takes padding: that of the block columns; rows of padding lie in no tile row of m."""
    columns = block_columns(n)
    return layout.shape(1, columns)[1] > columns


def operands(device: str, m: int, n: int) -> tuple[Any, Any]:
    """Random fp16 activations (m, n) and weights (128, n)."""
    rng = np.random.default_rng(m * n)
    a, b = (rng.normal(size=(rows, n)).astype(np.float16) for rows in (m, WEIGHT_ROWS))
    if device == "cpu":
        return a, b
    import cupy

    return cupy.asarray(a), cupy.asarray(b)


def run(device: str, shapes: list[tuple[int, int]]) -> tuple[list[Row], list[str]]:
    """All rows, and what contradicts the published finding."""
    rows: list[Row] = []
    surprises: list[str] = []
    for m, n in shapes:
        a, b = operands(device, m, n)
        for layout in LAYOUTS.values():
            for name in QUANTIZERS:
                new_rows, new_surprises = run_cell(device, name, layout, a, b)
                rows += new_rows
                surprises += new_surprises
    return rows, surprises


def run_cell(device: str, name: str, layout: ScaleLayout, a: Any, b: Any) -> tuple[list[Row], list[str]]:
    """One quantizer, one layout, one shape under every policy."""
    m, n = a.shape
    quantizer = QUANTIZERS[name]
    verdict = coverage.check_allocations(lambda: quantizer(a, layout))
    said = f"{verdict.missed} bytes never written" if verdict.missed else "every byte written"
    rows, surprises = [], []
    if bool(verdict) != (name != "incomplete" or not has_padding(layout, m, n)):
        surprises.append(f"{m}x{n} {layout.name}: coverage of {name}: {verdict}")
    zero_us = None
    for fill in ("zero", "covered", "empty", "poison"):
        outcome = experiment(quantizer, fill, layout, a, b)
        time_us, spread_us = timing(outcome.seconds)
        zero_us = zero_us or time_us
        notes: dict[str, str | float] = {"bytes_zeroed": outcome.zeroed, "coverage": said}
        notes |= {f"error_{kind}": "NaN" if np.isnan(e) else e for kind, e in outcome.errors.items()}
        notes["product"] = "BROKEN" if outcome.broken else "right"
        row = Row(
            f"isolation_{device}",
            f"{m}x{n} {layout.name} {fill}: {name}",
            time_us,
            spread_us,
            ratio=zero_us / time_us,
            reference="the same with fill zero",
            notes=notes,
        )
        rows.append(row)
        print_outcome(row)
        believed = fill == "covered" and name == "incomplete"  # a false claim, and nobody checks it
        unfilled = believed or fill in ("empty", "poison")
        if outcome.broken != (name != "fp4rt" and reads_padding(layout, n) and unfilled):
            surprises.append(f"{row.case}: the product is {notes['product']}")
    return rows, surprises


def print_outcome(row: Row) -> None:
    """One line for a person."""
    notes = row.notes
    errors = " / ".join(f"{notes[f'error_{kind}']:.3}" for kind in STALE)
    print(
        f"{row.case:<52}{row.time_us:>9.1f} us{notes['bytes_zeroed']:>9} B zeroed  "
        f"{notes['coverage']:<25} {notes['product']:<7} errors {errors}",
        flush=True,
    )


def shape_named(text: str) -> tuple[int, int]:
    """(m, n) of MxN.

    Raises:
        argparse.ArgumentTypeError: it is spelled otherwise, or n has no whole blocks.
    """
    found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if found is None or int(found[2]) % BLOCK:
        raise argparse.ArgumentTypeError(f"wanted MxN with n a multiple of {BLOCK}, got {text}")
    return int(found[1]), int(found[2])


def main() -> int:
    """Run, print, write ``bench/results/isolation_DEVICE.jsonl``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--shapes", nargs="+", type=shape_named, metavar="MxN", default=list(SHAPES), help="n is a multiple of 16"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 unless the finding is reproduced")
    parser.add_argument("--no-write", action="store_true", help="only print")
    arguments = parser.parse_args()
    shapes = arguments.shapes
    telling = [n for _, n in shapes if any(reads_padding(layout, n) for layout in LAYOUTS.values())]
    if arguments.check and not telling:
        parser.error("--check needs a shape where a product meets padding: n no multiple of 64, such as 128x48")
    if arguments.device == "cuda":
        need_gpu()
    rows, surprises = run(arguments.device, shapes)
    if not arguments.no_write:
        write_rows(f"isolation_{arguments.device}", rows)
    for surprise in surprises:
        print("UNEXPECTED", surprise)
    if not telling:
        print("nothing to reproduce: no product of these shapes meets padding; take an n that is no multiple of 64")
    elif not surprises:
        print("reproduced: unwritten padding breaks 128x4 and 8x4 and nothing else, and only where nothing zeroes it")
    return 1 if surprises and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
