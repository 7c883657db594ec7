"""The portable kernel's tile for a product: candidates, cost, minimum.

The cost is a fit to 24,884 measurements on an H200 (m = 1 ... 128, twelve sizes of weights from 1024 x 4096 to
28672 x 8192, 443 tiles; what it chooses is 1 % slower than the fastest of all on average, 7 % at worst): a
multiprocessor takes in so many weights a microsecond, fewer with fewer blocks than fit, each further wave of blocks
fills and drains once more, and parts of k are handed to a second kernel. Other architectures are ranked by the same
ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from fp4rt.cuda.gemm.portable import FEWEST_STAGES, Alignment, PortableTile
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import counted
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.problem import Problem

__all__ = ["Candidate", "candidates", "choose_portable", "portable_specs"]

# By the tokens of a block: warps_n, warps_k, row_tiles, pieces, stages, blocks_per_sm, and how many thousand weights a
# multiprocessor takes in a microsecond with one such block, and full of them, as fitted.
_FITTED = {
    8: ((1, 4, 1, 1, 3, 4, 26.6, 39.0), (1, 8, 1, 1, 3, 2, 37.0, 37.0), (1, 4, 4, 1, 2, 4, 28.3, 46.2),
        (4, 2, 1, 2, 3, 2, 36.3, 41.9), (2, 4, 1, 2, 3, 2, 33.6, 39.4), (1, 4, 2, 1, 4, 3, 33.4, 41.5)),
    16: ((1, 4, 4, 1, 3, 2, 28.1, 37.1), (1, 8, 1, 1, 5, 1, 22.1, 22.1), (1, 4, 1, 1, 3, 4, 19.1, 29.5),
         (2, 4, 1, 1, 3, 3, 26.2, 33.9), (2, 2, 4, 2, 2, 2, 28.8, 38.6), (2, 8, 2, 1, 3, 1, 31.0, 31.0)),
    32: ((2, 2, 2, 1, 3, 3, 18.4, 29.4), (1, 8, 2, 1, 2, 1, 17.9, 17.9), (2, 2, 4, 1, 3, 2, 22.2, 28.3),
         (2, 4, 2, 1, 3, 1, 22.7, 22.7), (2, 2, 2, 2, 2, 2, 19.1, 25.0)),
    64: ((2, 4, 2, 1, 2, 1, 14.5, 14.5), (4, 2, 2, 1, 4, 1, 16.2, 16.2), (4, 1, 2, 2, 2, 2, 14.1, 17.4),
         (4, 1, 2, 1, 3, 2, 13.0, 17.2)),
}  # fmt: skip


class _Rates(NamedTuple):
    """Weights that a multiprocessor takes in a microsecond."""

    alone: float  # with one block
    full: float  # with as many as the tile is made for

    def of(self, blocks: float, most: int) -> float:
        """With ``blocks`` of at most ``most``."""
        return self.full if most == 1 else self.alone + (self.full - self.alone) * (blocks - 1) / (most - 1)


_BY_TOKENS = {
    tokens: {
        PortableTile(warps_n, warps_k, row_tiles, tokens // 8, pieces, stages, blocks_per_sm): _Rates(
            1000 * alone, 1000 * full
        )
        for warps_n, warps_k, row_tiles, pieces, stages, blocks_per_sm, alone, full in rows
    }
    for tokens, rows in _FITTED.items()
}
_MOST_SPLITS = 8
_RESERVED_BYTES = 1024  # of shared memory, by the system, a block

_START_US, _WAVE_US = 6.6, 1.2  # launch and first stage; each further wave
_BUSIEST = 0.7  # how far the multiprocessor with the most blocks decides, and not all together
_SPLIT_US, _PART_US, _SUM_US = 1.7, 0.5, 4.5e-6  # the second kernel; a part of k; a sum handed over


class Candidate(NamedTuple):
    """A tile, and into how many parts k is cut."""

    us: float  # estimated
    tile: PortableTile
    splits: int


def candidates(problem: Problem, a_kind: str) -> list[Candidate]:
    """What fits the device, the cheapest first; a tile has fewer stages where shared memory is short."""
    tokens = next((t for t in _BY_TOKENS if t >= problem.m), max(_BY_TOKENS))
    found: list[Candidate] = []
    for fitted, rates in _BY_TOKENS[tokens].items():
        fitting = (fitted.with_stages(stages) for stages in range(fitted.stages, FEWEST_STAGES - 1, -1))
        tile = next((t for t in fitting if t.shared_bytes(a_kind) <= problem.device.shared_bytes), None)
        splits = 1
        while tile is not None and splits <= min(_MOST_SPLITS, tile.max_splits(problem.k)):
            found.append(Candidate(_cost(problem, a_kind, tile, rates, splits), tile, splits))
            splits *= 2
    return sorted(found, key=lambda candidate: candidate.us)


def _cost(problem: Problem, a_kind: str, tile: PortableTile, rates: _Rates, splits: int) -> float:
    """Estimated microseconds."""
    device = problem.device
    blocks = max(1.0, tile.blocks(problem.m, problem.n, splits) / device.multiprocessors)  # of one of them
    fitting = device.shared_bytes_of_multiprocessor // (tile.shared_bytes(a_kind) + _RESERVED_BYTES)
    together = min(max(1, fitting), tile.blocks_per_sm)
    weights = tile.block_n * ceil_div(ceil_div(problem.k, tile.block_k), splits) * tile.block_k

    def busy(count: float, resident: float) -> float:
        return count * weights / rates.of(resident, tile.blocks_per_sm)

    rest = ceil(blocks) % together  # of the busiest multiprocessor's blocks, after its full waves
    busiest = busy(ceil(blocks) - rest, together) + busy(rest, max(1, rest))
    average = busy(blocks, min(together, blocks))
    waves = ceil_div(ceil(blocks), together)
    handing = _SPLIT_US + splits * (_PART_US + _SUM_US * problem.m * problem.n) if splits > 1 else 0.0
    return _START_US + _BUSIEST * busiest + (1 - _BUSIEST) * average + _WAVE_US * (waves - 1) + handing


def choose_portable(problem: Problem, a_kind: str) -> tuple[PortableTile, int, str]:
    """(tile, splits, why); ``a_kind`` is what the kernel gets, after a possible pass over the activations."""
    _, tile, splits = candidates(problem, a_kind)[0]
    blocks = counted(tile.blocks(problem.m, problem.n, splits), "block")
    why = f"{blocks} of {tile.block_n} rows x {tile.block_m} tokens on {problem.device.multiprocessors} multiprocessors"
    return tile, splits, why + (f", k in {splits} parts" if splits > 1 else "")


def portable_specs() -> Iterator[KernelSpec]:
    """Compilations of every tile with bf16 activations, and of some with every kind and alignment."""
    for tiles in _BY_TOKENS.values():
        for tile in tiles:
            yield tile.spec("bfloat16", "nvfp4", Alignment())
    few, some = next(iter(_BY_TOKENS[16])), next(iter(_BY_TOKENS[64]))
    for tile in (few, some):
        yield tile.spec("bfloat16", "prepacked", Alignment())
        yield tile.spec("float16", "prepacked", Alignment())
        yield tile.spec("float16", "nvfp4", Alignment(a=2, b=1, b_scales=1))
    yield few.spec("bfloat16", "nvfp4", Alignment(b=8, b_scales=1))
    for align in (Alignment(), Alignment(8, 1, 8, 1), Alignment(1, 1, 1, 1)):
        yield few.spec("nvfp4", "nvfp4", align)
