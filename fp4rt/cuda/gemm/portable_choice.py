"""The portable kernel's tile for a product: candidates, cost, minimum.

A tile is worth what it costs the busiest multiprocessor: the bytes that its blocks bring in, the tensor-core work, and
a fixed price a block. The rates are measured (H200); other architectures are judged by the same ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fp4rt.cuda.gemm.portable import Alignment, PortableTile
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.layout import ceil_div

if TYPE_CHECKING:
    from fp4rt.cuda.gemm.problem import Problem

__all__ = ["candidates", "choose_portable", "cost", "portable_specs"]


class _Shape(NamedTuple):
    """How a block's warps divide it: see :class:`PortableTile`."""

    warps_n: int
    warps_m: int
    warps_k: int
    row_tiles: int
    pieces: int
    stages: int
    blocks_per_sm: int


# Few tokens: many rows of B at once on a multiprocessor, k divided among warps. Two row tiles share activations.
_FEW = (
    _Shape(1, 1, 4, 2, 1, 4, 3),
    _Shape(1, 1, 8, 2, 1, 3, 1),
    _Shape(2, 1, 4, 2, 1, 4, 1),
    _Shape(4, 1, 2, 2, 1, 4, 2),
    _Shape(7, 1, 2, 2, 1, 3, 1),
)
_SOME = (_Shape(2, 1, 4, 2, 1, 3, 1), _Shape(4, 1, 2, 2, 1, 3, 1), _Shape(1, 1, 4, 2, 1, 3, 2), _Shape(4, 1, 1, 2, 1, 4, 1))
_MANY = (_Shape(4, 2, 1, 2, 1, 3, 1),)
# tokens of a block, tiles of 8 tokens a warp, shapes
_BY_TOKENS = ((8, 1, _FEW), (16, 2, _FEW), (32, 4, _SOME), (64, 8, _SOME), (128, 8, _MANY))
_FEWEST_STAGES = 2
_MAX_SPLITS = 8
_BYTES_PER_US = 26_000  # into one multiprocessor, while all of them read
_MMA_PER_US = 900  # m16n8k16 of a multiprocessor, decoding of codes included
_SPLIT_US = 3.0  # the second kernel
_BLOCK_US = 1.5  # filling the ring, and the sums


def _tile(shape: _Shape, token_tiles: int) -> PortableTile:
    return PortableTile(*shape[:4], token_tiles, *shape[4:])


def candidates(problem: Problem, a_kind: str) -> Iterator[tuple[PortableTile, int]]:
    """(tile, splits) that fit the device; a tile has fewer stages where shared memory is short."""
    for tokens, token_tiles, shapes in _BY_TOKENS:
        if tokens < min(problem.m, _BY_TOKENS[-1][0]):
            continue
        for shape in shapes:
            for stages in range(shape.stages, _FEWEST_STAGES - 1, -1):
                tile = _tile(shape._replace(stages=stages), token_tiles)
                if tile.shared_bytes(a_kind) <= problem.device.shared_bytes:
                    splits = 1
                    while splits <= min(_MAX_SPLITS, tile.max_splits(problem.k)):
                        yield tile, splits
                        splits *= 2
                    break
        break


def cost(problem: Problem, a_kind: str, tile: PortableTile, splits: int) -> float:
    """Estimated microseconds."""
    device = problem.device
    busiest = ceil_div(tile.blocks(problem.m, problem.n, splits), device.multiprocessors)
    k = ceil_div(ceil_div(problem.k, tile.block_k), splits) * tile.block_k
    tokens = min(problem.m, tile.block_m)
    bytes_ = k * (tile.block_n * 9 + tokens * (9 if a_kind == "nvfp4" else 32)) / 16
    mma = k / 16 * tile.block_n / 16 * tile.block_m / 8
    resident = max(1, device.shared_bytes_of_multiprocessor // (tile.shared_bytes(a_kind) + 1024))
    time = busiest * max(bytes_ / _BYTES_PER_US, mma / _MMA_PER_US) + ceil_div(busiest, resident) * _BLOCK_US
    return time + (_SPLIT_US if splits > 1 else 0.0)


def choose_portable(problem: Problem, a_kind: str) -> tuple[PortableTile, int, str]:
    """(tile, splits, why); ``a_kind`` is what the kernel gets, after a possible pass over the activations."""
    found = min(candidates(problem, a_kind), key=lambda c: cost(problem, a_kind, *c))
    tile, splits = found
    blocks = tile.blocks(problem.m, problem.n, splits)
    why = (
        f"{blocks} blocks of {tile.block_n} rows x {tile.block_m} tokens on {problem.device.multiprocessors} "
        f"multiprocessors"
    )
    return tile, splits, why + (f", k in {splits} parts" if splits > 1 else "")


def portable_specs() -> Iterator[KernelSpec]:
    """Compilations of every tile with bf16 activations, and of one tile with every kind and alignment."""
    seen = set()
    for _, token_tiles, shapes in _BY_TOKENS:
        for shape in shapes:
            seen.add(_tile(shape, token_tiles).spec("bfloat16", "nvfp4", Alignment()))
    for tile in (_tile(_FEW[0], 1), _tile(_FEW[0], 2), _tile(_MANY[0], 8)):
        for a_kind in ("float16", "bfloat16"):
            for b_kind in ("nvfp4", "prepacked"):
                seen.add(tile.spec(a_kind, b_kind, Alignment()))
        for align in (Alignment(16, 4, 8, 1), Alignment(2, 4, 1, 1)):
            seen.add(tile.spec("bfloat16", "nvfp4", align))
    for tile in (_tile(shape, token_tiles) for token_tiles in (1, 2) for shape in _FEW[:2]):
        for align in (Alignment(), Alignment(8, 1, 8, 1), Alignment(1, 1, 1, 1)):
            seen.add(tile.spec("nvfp4", "nvfp4", align))
    return iter(sorted(seen, key=str))
