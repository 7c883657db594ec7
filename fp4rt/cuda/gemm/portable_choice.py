"""The portable kernel's tile for a product: candidates, cost, minimum.

The cost is a fit to measurements on an H200 (m = 1 ... 4096, the four sizes of the bench; within 10 % of nearly all):
a multiprocessor takes in a number of weights a microsecond that falls with the tokens they meet, a tenth less where it
holds one block alone, and every further wave of blocks fills and drains once more. Other architectures are ranked by
the same ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from fp4rt.cuda.gemm.portable import Alignment, PortableTile
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import counted
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.problem import Problem

__all__ = ["candidates", "choose_portable", "cost", "portable_specs"]

# Tiles by the tokens of a block. Two row tiles a warp share its activations; with one there are more blocks.
_BY_TOKENS = {
    tokens: tuple(
        PortableTile(warps_n, warps_k, row_tiles, tokens // 8, 1, stages, blocks_per_sm)
        for warps_n, warps_k, row_tiles, stages, blocks_per_sm in shapes
    )
    for tokens, shapes in {
        8: ((1, 4, 2, 4, 3), (1, 4, 1, 4, 4), (2, 4, 1, 4, 2), (4, 2, 2, 3, 2)),
        16: ((1, 4, 2, 4, 3), (2, 4, 1, 4, 2), (2, 4, 2, 4, 1), (4, 2, 2, 3, 2)),
        32: ((1, 8, 2, 2, 1), (2, 4, 2, 3, 1), (4, 1, 2, 4, 2)),
        64: ((4, 1, 2, 3, 2), (4, 2, 2, 3, 1)),
    }.items()
}
_FEWEST_STAGES = 2
_MOST_SPLITS = 8
_RESERVED_BYTES = 1024  # of shared memory, by the system, a block

_WEIGHTS_PER_US = {1: 42_700, 2: 37_000, 4: 25_600, 8: 16_500}  # of a multiprocessor, by tiles of 8 tokens
_ALONE = 0.9  # of that, with one block on a multiprocessor
_START_US, _WAVE_US, _SPLIT_US = 8.0, 2.0, 3.5  # launch and first stage; each further wave; the second kernel


def candidates(problem: Problem, a_kind: str) -> Iterator[tuple[PortableTile, int]]:
    """(tile, splits) that fit the device; a tile has fewer stages where shared memory is short."""
    tokens = next((t for t in _BY_TOKENS if t >= problem.m), max(_BY_TOKENS))
    for full in _BY_TOKENS[tokens]:
        fitting = (full.with_stages(stages) for stages in range(full.stages, _FEWEST_STAGES - 1, -1))
        tile = next((t for t in fitting if t.shared_bytes(a_kind) <= problem.device.shared_bytes), None)
        splits = 1
        while tile is not None and splits <= min(_MOST_SPLITS, tile.max_splits(problem.k)):
            yield tile, splits
            splits *= 2


def cost(problem: Problem, a_kind: str, tile: PortableTile, splits: int) -> float:
    """Estimated microseconds."""
    device = problem.device
    blocks = tile.blocks(problem.m, problem.n, splits) / device.multiprocessors  # of one of them
    fitting = device.shared_bytes_of_multiprocessor // (tile.shared_bytes(a_kind) + _RESERVED_BYTES)
    together = min(max(1, fitting), tile.blocks_per_sm, ceil(blocks))
    weights = tile.block_n * ceil_div(ceil_div(problem.k, tile.block_k), splits) * tile.block_k
    busiest = max(1.0, blocks) if together > 1 else ceil(blocks)
    rate = _WEIGHTS_PER_US[tile.token_tiles] * (1.0 if together > 1 else _ALONE)
    if tile.token_tiles > 1:  # narrow blocks fetch the same tokens more often: 0.94 at 64 rows, 0.88 at 32
        rate *= 1.1 * (tile.block_n + 32) / (tile.block_n + 48)
    waves = ceil(blocks / together)
    return _START_US + busiest * weights / rate + _WAVE_US * (waves - 1) + (_SPLIT_US if splits > 1 else 0.0)


def choose_portable(problem: Problem, a_kind: str) -> tuple[PortableTile, int, str]:
    """(tile, splits, why); ``a_kind`` is what the kernel gets, after a possible pass over the activations."""
    tile, splits = min(candidates(problem, a_kind), key=lambda found: cost(problem, a_kind, *found))
    blocks = counted(tile.blocks(problem.m, problem.n, splits), "block")
    why = f"{blocks} of {tile.block_n} rows x {tile.block_m} tokens on {problem.device.multiprocessors} multiprocessors"
    return tile, splits, why + (f", k in {splits} parts" if splits > 1 else "")


def portable_specs() -> Iterator[KernelSpec]:
    """Compilations of every tile with bf16 activations, and of some with every kind and alignment."""
    for tiles in _BY_TOKENS.values():
        for tile in tiles:
            yield tile.spec("bfloat16", "nvfp4", Alignment())
    few, some = _BY_TOKENS[16][0], _BY_TOKENS[64][0]
    for tile in (few, some):
        yield tile.spec("bfloat16", "prepacked", Alignment())
        yield tile.spec("float16", "prepacked", Alignment())
        yield tile.spec("float16", "nvfp4", Alignment(a=2, b=1, b_scales=1))
    yield few.spec("bfloat16", "nvfp4", Alignment(b=8, b_scales=1))
    for align in (Alignment(), Alignment(8, 1, 8, 1), Alignment(1, 1, 1, 1)):
        yield few.spec("nvfp4", "nvfp4", align)
