"""What goes before a product: NVFP4 activations to bf16, a plain weight to prepacked tiles; both into a workspace.

Where each block has one large tile, no pass is needed: its blocks decode the activations among themselves
(``block/shared_decoding.cuh``). Measured on one H200 with weights of 4096 x 4096 and 1024 tokens: 47.5 us so, 49.1
behind the pass, 46.4 without either, with the same values as bf16; cuBLAS's bf16 product 47.9. What it took:

- Each block decodes the first column group itself, half of its tokens where a cluster shares them, and the copy engine
  hands that to the other block. Stores into the other block's memory, one by one, took 2 us more.
- The others are decoded by two idle warps of each block. An instruction beside wgmma takes a warp more than six cycles:
  addresses calculated anew for each token made it as slow as the pass, spilled registers half of that.
- The warps that multiply cannot decode beside their products: a chunk takes them twice as long as to multiply it.

And the pass it is where a launch has several tiles a block. As many blocks as tiles, one after the other on a
multiprocessor, each decoding as above, took as long as the pass with 4096 x 4096 and 2048 or 4096 tokens, 3 % longer
with 8192 x 8192 and 1024, 5 to 10 % with 28672 x 8192. Nor was it worth it to have a pass decode the first 4 column
groups, and idle warps of the blocks the others beside the products, with right bits: 0 to 1.6 % less than behind the
whole pass with 4096 x 4096 and 2048 tokens (six runs), 2.8 % less to 0.8 % more with 8192 x 8192 and 1024 (five), and
47.8 us where it is 47.2 as above (4096 x 4096 and 1024 tokens, two).

Tiles of 128 tokens multiply a column group faster than its values come through memory. At 512 tokens, in us: 28.4
behind the pass, 27.2 with the same values as bf16, cuBLAS 28.3. With right bits, and not kept:

- Blocks decode among themselves as above: 39.6, and 29.3 where all helpers have work, each in every second group.
  Multiplying begins at 3.0 us instead of 2.1 with bf16, a group takes 5 % longer while helpers decode beside it.
- Behind the pass, but the first group decoded by the blocks that multiply it, which takes longer than the wait: 29.1.
- Blocks of few enough registers that they begin beside the pass, after 1.2 us instead of 2.6: 28.4. Both then fetch
  from memory together, the pass stores half a us later, and its end is seen at 3.8 as before.
- So, and the pass announces each group instead of its end: 29.8.
- A pass of the first 4 column groups alone would leave 27.8. With idle warps that decode the others beside the products
  it is 28.5 to 28.9, as behind the whole pass in the same runs; where nobody waits for them 28.4, without their stores
  28.4, without their loads 27.5. That the pass fetches what they load into L2, or that it goes past L1: no change.
- So, but blocks on the 4 multiprocessors that are left free decode the others: 36.6, and 34.1 where nobody waits.
- The pass asks for the first weights of the product, which so come out of L2: no change, for it takes as much longer.
- One launch, whose consumers decode all activations among themselves before they multiply: 29.5. Their loads leave at
  1.0, the last values are announced at 3.5 and seen at 4.1.
- So, but each block decodes the first group for itself: 28.6 to 28.9 (1024 tokens: 49.0); with a warpgroup of its own
  for its part of the others 28.8 to 29.6, 28.4 to 29.0 where nobody waits for it. Where nobody decodes that, 27.2 to
  27.6: with all fetched at once, it multiplies 1500 cycles later (6500 after its start, not 5000). A warpgroup that
  gives registers away waits for its loads first, and those that want them wait with it.
- Beside a pass of few registers, the first group decoded by the blocks: 29.0 to 29.3.
- A pass of the first 4 column groups, and consumers that decode the others while they wait for its end: 29.0, and 28.8
  where it fetches their codes into L2. So with 6 groups in the pass; with 2 it is 29.3.
- A pass that has the multiprocessor set up its shared memory as the product wants it: 28.8, or no change with half.
- Consumers go through their loop once on nothing while the first values are on their way, as instructions are cold,
  too: 30.8. With instructions out of L2: no change.

The pass's blocks are over at 1.8 us, the product's wait for it at 3.1; the first weights are there at 3.0, the first
activations at 3.7. Where products alone are left (one group decoded, nothing fetched after the first stages, wrong
sums) the whole takes 25.9 with bf16, not 27.3: decoding, weights and activations cost 0.4 each.

In the product's loop a chunk takes 539 to 565 cycles, 512 of them the tensor cores' own; one card differs from the
next, and with bf16 it is no other than behind the pass. No change: stores and loads with other cache policies, chunks
side by side in memory, weights from memory straight to registers, activations for two blocks at once, a fifth stage,
8 % fewer instructions around the products (their descriptors, as in gemm_small.cu). Slower: stages of four chunks (35
us: no room for the next), warpgroups that take strict turns (29.1), row blocks that begin at different column groups
(29.5: blocks that read the same lines at the same time share them), activations for four blocks at once (48: such
clusters do not all find room), products with something between them (29.3 and more).

Tried instead of the pass with 1024 tokens, too, with right bits:

- The producers' warps decode half of what their cluster needs, all the time: 72 us. More warps would have shared memory
  move 130 bytes a cycle, and it moves 128.
- The 4 multiprocessors that the product leaves free decode what comes after the first quarter: 50.1. Each does 25
  values a ns, as many as are wanted, but the product beside them takes 5 us more even where it waits for none of them.
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
