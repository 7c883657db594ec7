"""The portable kernel's tile for a product: candidates, cost, minimum.

The cost is a fit to measurements on an H200 (m = 1 ... 256, ten sizes of weights from 1024 x 4096 to 28672 x 8192;
within 9 % of two thirds of them, and what it chooses is 2 % slower than the fastest on average): full multiprocessors
take in so many weights a microsecond, each further wave of blocks fills and drains once more, and parts of k are handed
to a second kernel. Other architectures are ranked by the same ratios.
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
# multiprocessor full of such blocks takes in a microsecond, as fitted.
_FITTED = {
    8: ((1, 4, 2, 1, 4, 3, 37.2), (1, 4, 1, 1, 4, 4, 38.1), (2, 4, 1, 1, 4, 2, 38.4), (1, 8, 2, 1, 3, 2, 39.2),
        (4, 2, 2, 2, 2, 2, 38.7)),
    16: ((1, 4, 2, 1, 4, 3, 27.4), (1, 4, 1, 1, 3, 4, 24.8), (2, 4, 1, 1, 4, 2, 28.8), (2, 8, 2, 1, 3, 1, 29.5),
         (2, 2, 4, 2, 2, 2, 30.9)),
    32: ((1, 8, 2, 1, 2, 1, 16.9), (2, 4, 2, 1, 3, 1, 22.4), (2, 4, 2, 1, 2, 2, 21.9), (4, 2, 2, 1, 3, 1, 25.4)),
    64: ((2, 4, 2, 1, 2, 1, 14.2), (4, 2, 2, 1, 3, 1, 16.2), (4, 1, 2, 2, 2, 1, 16.1), (4, 1, 2, 1, 3, 2, 15.5)),
}  # fmt: skip
_BY_TOKENS = {
    tokens: {
        PortableTile(warps_n, warps_k, row_tiles, tokens // 8, pieces, stages, blocks_per_sm): 1000 * rate
        for warps_n, warps_k, row_tiles, pieces, stages, blocks_per_sm, rate in rows
    }
    for tokens, rows in _FITTED.items()
}
_MOST_SPLITS = 8
_RESERVED_BYTES = 1024  # of shared memory, by the system, a block

_START_US, _WAVE_US = 6.5, 1.6  # launch and first stage; each further wave
_BUSIEST = 0.57  # how far the multiprocessor with the most blocks decides, and not all together
_SPLIT_US, _PART_US, _SUM_US = 1.9, 0.3, 4.6e-6  # the second kernel; a part of k; a sum handed over


class Candidate(NamedTuple):
    """A tile, and into how many parts k is cut."""

    us: float  # estimated
    tile: PortableTile
    splits: int


def candidates(problem: Problem, a_kind: str) -> list[Candidate]:
    """What fits the device, the cheapest first; a tile has fewer stages where shared memory is short."""
    tokens = next((t for t in _BY_TOKENS if t >= problem.m), max(_BY_TOKENS))
    found: list[Candidate] = []
    for full, rate in _BY_TOKENS[tokens].items():
        fitting = (full.with_stages(stages) for stages in range(full.stages, FEWEST_STAGES - 1, -1))
        tile = next((t for t in fitting if t.shared_bytes(a_kind) <= problem.device.shared_bytes), None)
        splits = 1
        while tile is not None and splits <= min(_MOST_SPLITS, tile.max_splits(problem.k)):
            found.append(Candidate(_cost(problem, a_kind, tile, rate, splits), tile, splits))
            splits *= 2
    return sorted(found, key=lambda candidate: candidate.us)


def _cost(problem: Problem, a_kind: str, tile: PortableTile, rate: float, splits: int) -> float:
    """Estimated microseconds; ``rate``: weights that a multiprocessor takes in a microsecond."""
    device = problem.device
    blocks = tile.blocks(problem.m, problem.n, splits) / device.multiprocessors  # of one of them
    fitting = device.shared_bytes_of_multiprocessor // (tile.shared_bytes(a_kind) + _RESERVED_BYTES)
    together = min(max(1, fitting), tile.blocks_per_sm, ceil(blocks))
    weights = tile.block_n * ceil_div(ceil_div(problem.k, tile.block_k), splits) * tile.block_k
    busy = _BUSIEST * ceil(blocks) + (1 - _BUSIEST) * max(1.0, blocks)
    handing = _SPLIT_US + splits * (_PART_US + _SUM_US * problem.m * problem.n) if splits > 1 else 0.0
    return _START_US + busy * weights / rate + _WAVE_US * (ceil(blocks / together) - 1) + handing


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
