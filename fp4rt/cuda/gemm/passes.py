"""What goes before a product: NVFP4 activations to bf16, a plain weight to prepacked tiles; both into a workspace.

Why a pass, where the product has many tokens: its blocks would each decode what dozens of others decode too. Measured
on one H200 with weights of 4096 x 4096. At 512 tokens: 28.6 us behind the pass, of which a second launch is some 0.8,
and 27.4 with bf16 activations; 40 where eight warps of each block decode beside the products; and where four decode the
first chunks and the others cost nothing, no less than behind the pass. At 1024: 48.8 us; 46.3 without a pass, with the
same values as bf16; some 47.5 behind a kernel that does nothing. Also tried at 1024, with right bits:

- Idle warps of each block decode each value once, in the order of need: 48.0 to 48.6, and much more with few rows.
- The producers' warps decode half of what their cluster needs: 72, since an instruction beside wgmma takes them more
  than six cycles. More warps would have shared memory move 130 bytes a cycle, and it moves 128.
- The 4 multiprocessors that the product leaves free decode what comes after the first quarter: 50.1. Each does 25
  values a ns, as many as are wanted, but the product beside them takes 5 us more even where it waits for none of them.
- All blocks decode a share, begin with it and hand it to the others by flags: 49.5. Until a block has its codes and
  scales out of cold memory and decoded takes 2.5 us, until it has written them 3.4. (The cooperative launch that it
  would need costs nothing.)
- A pass of half as many instructions, or one that fetches the first weights for the product: no change, it writes as
  fast as what L2 holds can leave it.

Where the time goes, in us from the pass's first block: its blocks have arguments and instructions at 0.5, codes and
scales out of cold memory at 1.5 to 2.4, all results written at 3.5 (8.4 MB in some 2); blocks of the product begin at
3.6, may read at 4.5 and multiply from 5.5 on, where without a pass they do from 1.5 on. Without its loads it would cost
0.3 us, without its stores 1.4, without the wait for its end 2.2, as it is 2.5. Scales read once a sector, two or eight
pieces a thread, half the instructions ahead of the loads: no change. Nor is fp16 instead of bf16 faster for the
product: the same bits, in as much time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.gemm.portable import alignment_of
from fp4rt.cuda.kernel import Extent, Kernel
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.cuda.launch import MAX_GRID_Y
from fp4rt.format import BLOCK
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.backend import QuantizedViews

__all__ = ["MOST_COLUMNS", "activation_specs", "dequantize_activations", "repack"]

ARGUMENTS = argument_struct("kernels/dequantize_activations.cu", "DequantizeActivationsArguments")
THREADS = 128
_ALIGNMENTS = (4, 1)
_PIECES = (2, 4)  # of 8 columns a thread: of few activations, and of many
_MANY_BLOCKS = 1 << 16  # of 16 columns; from here on half as many threads are faster
MOST_COLUMNS = MAX_GRID_Y * THREADS * _PIECES[1] * 8  # of activations


def _spec(align: int, pieces: int) -> KernelSpec:
    defines = (("ALIGN", align), ("PIECES", pieces))
    return KernelSpec("kernels/dequantize_activations.cu", "dequantize_activations", defines)


def activation_specs() -> list[KernelSpec]:
    """Every compilation of dequantize_activations.cu."""
    return [_spec(align, pieces) for align in _ALIGNMENTS for pieces in _PIECES]


def dequantize_activations(a: QuantizedViews, to: int, stream: int) -> None:
    """code * scale as bf16, rows of 16 * ceil(k / 16) elements, at address ``to``."""
    data = a.data
    kernel, grid, constants = _prepared(
        data.device.index, data.pointer % _ALIGNMENTS[0], a.shape, a.columns, a.layout.index
    )
    kernel.launch_struct(grid, THREADS, ARGUMENTS, (data.pointer, a.scales.pointer, to, *constants), stream)


@lru_cache(maxsize=4096)
def _prepared(
    device: int, misalignment: int, shape: tuple[int, int], columns: int, layout: int
) -> tuple[Kernel, Extent, tuple[int, ...]]:
    """Kernel, grid, and the argument struct's members after the pointers."""
    m, k = shape
    blocks = ceil_div(k, BLOCK)
    align = alignment_of(misalignment, _ALIGNMENTS)  # rows are whole blocks of 8 bytes
    pieces = _PIECES[m * blocks >= _MANY_BLOCKS]
    spans = ceil_div(2 * blocks, pieces * THREADS)
    return _spec(align, pieces).on(device), (m, spans, 1), (m, blocks, columns, layout)


def repack(b: QuantizedViews, to: int, stream: int) -> None:
    """The tiles of ``fp4rt.prepacked`` at address ``to``; what the arithmetic does not see is not kept aside."""
    from fp4rt.cuda.gemm.prepack import pack_tiles

    pack_tiles(b, to, stream)
