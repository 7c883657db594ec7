"""What goes before a product: NVFP4 activations to bf16, a plain weight to prepacked tiles; both into a workspace.

Where each block has one large tile, no pass is needed: its blocks decode the activations among themselves
(``block/shared_decoding.cuh``). Measured on one H200 with weights of 4096 x 4096 and 1024 tokens: 47.5 us so, 49.1
behind the pass, 46.4 without either, with the same values as bf16; cuBLAS's bf16 product 47.9. What it took:

- Each block decodes the first column group itself, half of its tokens where a cluster shares them, and the copy engine
  hands that to the other block. Stores into the other block's memory, one by one, took 2 us more.
- The others are decoded by two idle warps of each block. An instruction beside wgmma takes a warp more than six cycles:
  addresses calculated anew for each token made it as slow as the pass, spilled registers half of that.
- The warps that multiply cannot decode beside their products: a chunk takes them twice as long as to multiply it.

And the pass it is where a launch has several tiles a block, or tiles of 128 tokens: these multiply a column group
faster than its values come through memory. What else was tried, and what it took: ``bench/NOTES.md``.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.gemm.portable import alignment_of
from fp4rt.cuda.kernel import Extent, Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import MAX_GRID_Y
from fp4rt.format import BLOCK
from fp4rt.layout import LAYOUTS, ScaleLayout, ceil_div

if TYPE_CHECKING:
    from fp4rt.backend import QuantizedViews

__all__ = ["MOST_COLUMNS", "activation_specs", "dequantize_activations", "repack"]

ARGUMENTS = argument_struct("kernels/dequantize_activations.cu", "DequantizeActivationsArguments")
THREADS = 128
_ALIGNMENTS = (4, 1)
_PIECES = (2, 4)  # of 8 columns a thread: of few activations, and of many
_MANY_BLOCKS = 1 << 16  # of 16 columns; from here on half as many threads are faster
MOST_COLUMNS = MAX_GRID_Y * THREADS * _PIECES[1] * 8  # of activations


def _spec(layout: ScaleLayout, align: int, pieces: int) -> KernelSpec:
    defines = (("LAYOUT", layout.index), ("ALIGN", align), ("PIECES", pieces))
    return KernelSpec("kernels/dequantize_activations.cu", "dequantize_activations", defines)


def activation_specs() -> list[KernelSpec]:
    """Every compilation of dequantize_activations.cu."""
    return [_spec(*each) for each in itertools.product(LAYOUTS.values(), _ALIGNMENTS, _PIECES)]


def dequantize_activations(a: QuantizedViews, to: int, stream: int) -> None:
    """code * scale as bf16, rows of 16 * ceil(k / 16) elements, at address ``to``."""
    data = a.data
    kernel, grid, constants = _prepared(
        data.device.index, data.pointer % _ALIGNMENTS[0], a.shape, a.columns, a.layout.name
    )
    kernel.launch_struct(grid, THREADS, ARGUMENTS, (data.pointer, a.scales.pointer, to, *constants), stream)


@lru_cache(maxsize=4096)
def _prepared(
    device: int, misalignment: int, shape: tuple[int, int], columns: int, layout: str
) -> tuple[Kernel, Extent, tuple[int, ...]]:
    """Kernel, grid, and the argument struct's members after the pointers."""
    m, k = shape
    blocks = ceil_div(k, BLOCK)
    align = alignment_of(misalignment, _ALIGNMENTS)  # rows are whole blocks of 8 bytes
    pieces = _PIECES[m * blocks >= _MANY_BLOCKS]
    spans = ceil_div(2 * blocks, pieces * THREADS)
    return _spec(LAYOUTS[layout], align, pieces).on(device), (m, spans, 1), (blocks, columns)


def repack(b: QuantizedViews, to: int, stream: int) -> None:
    """The tiles of ``fp4rt.prepacked`` at address ``to``; what the arithmetic does not see is not kept aside."""
    from fp4rt.cuda.gemm.prepack import pack_tiles

    pack_tiles(b, to, stream)
