"""The Hopper kernels' tile for a product: measured where it was measured, estimated elsewhere.

An estimate counts cycles of one multiprocessor: ``max(reading, computing)`` a chunk of 64 columns, times chunks, times
rounds of blocks. In small tiles products and decoding add up, because both need the registers' bandwidth; in prefill
tiles the products hide the decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fp4rt.cuda.gemm.hopper import MAX_SHARED_BYTES, DecodeTile, HopperTile, PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_measured import MEASURED, MEASURED_MULTIPROCESSORS, MEASURED_NVFP4
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import BackendUnavailable, ShapeError
from fp4rt.layout import ceil_div, round_up
from fp4rt.prepacked import CHUNK_COLUMNS, TILE_BYTES, TILE_COLUMNS, TILE_ROWS

__all__ = [
    "ACTIVATION_WARPS",
    "DECODE_TOKENS",
    "SMALL_TOKENS",
    "choose_hopper",
    "estimate",
    "kernel_specs",
    "worth_measuring",
]

DECODE_TOKENS = 16
ACTIVATION_WARPS = 8  # of a decode tile for NVFP4 activations
SMALL_TOKENS = 128
_MAX_ROW_TILES = 16
_PREFILL_TOKENS = 16  # a prefill tile's tokens are a multiple of it
_MOST_TOKENS = 256  # of a prefill tile
_MOST_SMALL_STAGES = 6
_MOST_OWN_TOKEN_TILES = 12  # of small tiles with rows of their own: beyond, registers run out
_ACTIVATION_BYTES = 4 * _MOST_TOKENS * CHUNK_COLUMNS * 2  # of activations under way
_PAIRED_TOKENS = 128  # up to here two chunks make a stage, where a tile has one row block
_RASTER = 4  # prefill tiles' token tiles swept together
_CHUNK_BYTES = TILE_BYTES * CHUNK_COLUMNS // TILE_COLUMNS  # of a row tile

# Of weights under way in a multiprocessor: more is slower. Of few row tiles fewer, which come in more pieces.
_DECODE_BYTES, _FEW_ROWS_DECODE_BYTES = 110_000, 82_000

# Cycles of an H200 at its usual clocks, fitted to measured products
_FAIR_BYTES = 18.5  # that a multiprocessor reads in a cycle while all do
_MOST_BYTES = 56.0  # from memory while few do, and from L2
_DECODE_CYCLES = 40  # a warp decodes one row tile's chunk, loads and descriptors included
_LAUNCH_CYCLES = 8000
_TILE_CYCLES = 4500  # first loads and results of a prefill tile
_SMALL_TILE_CYCLES = 3500  # and of a small one
_MEETING_CYCLES = 2000  # two blocks of a cluster add their sums
_LONG_CYCLES, _FEWER_JOULES = 120_000, 0.98  # of a product at the power limit; what shared tokens leave of its time


def choose_hopper(
    m: int, n: int, k: int, multiprocessors: int, kernel: str | None = None, nvfp4: bool = False
) -> tuple[HopperTile, str]:
    """(tile, why) for m tokens; ``kernel`` asks for "decode", "small" or "prefill".

    ``nvfp4`` says that activations are, whoever decodes them.

    Raises:
        BackendUnavailable: the kernel asked for takes fewer tokens.
    """
    most = {"decode": DECODE_TOKENS, "small": SMALL_TOKENS}.get(kernel or "")
    if most is not None and m > most:
        raise BackendUnavailable(
            f"the {kernel} kernel takes at most {most} tokens, got m = {m}; use the prefill kernel"
        )
    if kernel is None and multiprocessors == MEASURED_MULTIPROCESSORS:
        for largest_m, tile in (*(MEASURED_NVFP4.get((n, k), ()) if nvfp4 else ()), *MEASURED.get((n, k), ())):
            if m <= largest_m:
                return _narrowed(tile, m), f"measured fastest around m = {m} for n = {n}, k = {k}"
    tile = _estimated(m, n, k, multiprocessors, kernel)
    return tile, f"estimated fastest for m = {m}, n = {n}, k = {k} on {multiprocessors} multiprocessors"


def _narrowed(tile: HopperTile, m: int) -> HopperTile:
    """A tile of all tokens, cut down to the tokens there are; of some, so that all tiles have as many."""
    if not isinstance(tile, PrefillTile):
        return replace(tile, token_tiles=min(tile.token_tiles, ceil_div(m, 8)))
    return replace(tile, tokens=round_up(ceil_div(m, ceil_div(m, tile.tokens)), _PREFILL_TOKENS))


@lru_cache(maxsize=4096)
def _estimated(m: int, n: int, k: int, multiprocessors: int, kernel: str | None) -> HopperTile:
    few_rows = ceil_div(n, TILE_ROWS) <= 2 * multiprocessors  # most of a 64-row product would be empty
    if kernel == "decode" or (kernel is None and m <= (2 * DECODE_TOKENS if few_rows else DECODE_TOKENS)):
        return _decode_tiles(m, n, multiprocessors)[0]
    candidates = _wide_tiles(m, k, kernel)
    return min(candidates, key=lambda tile: estimate(tile, m, n, k, multiprocessors))


def _wide_tiles(m: int, k: int, kernel: str | None = None) -> list[HopperTile]:
    """Tiles of the small and the prefill kernel that can compute the product."""
    found: list[HopperTile] = []
    if kernel == "small" or (kernel is None and m <= SMALL_TOKENS):
        found += _small_tiles(m)
    if kernel == "prefill" or (kernel is None and m > SMALL_TOKENS // 2):
        found += _prefill_tiles(m)
    return [tile for tile in found if tile.can_share(k)]


def worth_measuring(
    m: int, n: int, k: int, multiprocessors: int, nvfp4: bool = False, most: int = 12
) -> list[HopperTile]:
    """The chosen tile and others that may beat it on the device at hand, the likelier first."""
    found = [choose_hopper(m, n, k, multiprocessors, nvfp4=kind)[0] for kind in (nvfp4, False)]
    if m <= 2 * DECODE_TOKENS:
        found += _decode_tiles(m, n, multiprocessors)
    if m > DECODE_TOKENS // 2:
        found += sorted(_wide_tiles(m, k), key=lambda tile: estimate(tile, m, n, k, multiprocessors))
    return list(dict.fromkeys(found))[:most]


def estimate(tile: HopperTile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Cycles of a small or prefill tile for a product."""
    assert not isinstance(tile, DecodeTile)
    chunks = ceil_div(k, CHUNK_COLUMNS) / tile.k_cluster
    meeting = _MEETING_CYCLES if tile.k_cluster > 1 else 0
    if isinstance(tile, PrefillTile):
        blocks = tile.tiles(m, n) * tile.cluster * tile.k_cluster
        working = tile.group_cycles / (TILE_COLUMNS // CHUNK_COLUMNS)
        reading = _reading(tile.row_tiles, tile.tokens / tile.cluster, blocks, multiprocessors)
        rounds = tile.sharing(m, n, k, multiprocessors).rounds
        cycles = _LAUNCH_CYCLES + rounds * (chunks * max(reading, working) + _TILE_CYCLES + meeting)
        return cycles * _FEWER_JOULES if tile.cluster > 1 and cycles > _LONG_CYCLES else cycles
    blocks = ceil_div(ceil_div(n, TILE_ROWS), tile.cluster_tiles) * tile.k_cluster
    reading = _reading(tile.cluster_tiles, tile.max_tokens, blocks, multiprocessors)
    working = ceil_div(tile.cluster_tiles, 4) * (tile.max_tokens * 2 + _DECODE_CYCLES)
    rounds = ceil_div(blocks, multiprocessors)
    return _LAUNCH_CYCLES + rounds * (chunks * max(reading, working) + _SMALL_TILE_CYCLES + meeting)


def _reading(row_tiles: int, tokens: float, blocks: int, multiprocessors: int) -> float:
    """Cycles for a chunk: the weights come from memory, which all blocks share, the activations from L2."""
    weights, activations = row_tiles * _CHUNK_BYTES, tokens * CHUNK_COLUMNS * 2
    fair = min(_MOST_BYTES, _FAIR_BYTES * multiprocessors / min(blocks, multiprocessors))
    return max(weights / fair, (weights + activations) / _MOST_BYTES)


def _decode_tiles(m: int, n: int, multiprocessors: int) -> list[HopperTile]:
    """Row tiles a block so that the last wave is full; around 110 or 82 KB of weights under way, best first."""
    rows = ceil_div(n, TILE_ROWS)
    row_tiles = min(range(_MAX_ROW_TILES, 0, -1), key=lambda r: ceil_div(ceil_div(rows, r), multiprocessors) * r)
    most_k_warps = 8 if row_tiles == 1 else max(w for w in (1, 2, 4) if w * row_tiles <= _MAX_ROW_TILES)
    usual_groups = 2 if row_tiles <= 8 else 1
    usual_bytes = _FEW_ROWS_DECODE_BYTES if row_tiles <= 4 else _DECODE_BYTES
    found: list[tuple[int, DecodeTile]] = []
    for k_warps in {most_k_warps, max(1, most_k_warps // 2)}:
        for stage_groups in (1, 2, 4):
            if stage_groups * 4 % k_warps:
                continue
            for stages in range(2, 9):
                tile = DecodeTile(ceil_div(m, 8), row_tiles, stage_groups, stages, row_tiles, k_warps, 1)
                under_way = stages * stage_groups * row_tiles * TILE_BYTES
                unusual = (stage_groups != usual_groups) + (k_warps != most_k_warps)
                found.append((abs(under_way - usual_bytes) + unusual * usual_bytes, tile))
    found.sort(key=lambda pair: (pair[0], str(pair[1])))
    return [tile for _, tile in found if tile.plan.nbytes <= MAX_SHARED_BYTES]


def _small_tiles(m: int) -> list[HopperTile]:
    """Every division of the work, each with as many stages as fit."""
    tokens = ceil_div(m, 8)
    found: list[HopperTile] = []
    # row tiles, row groups, k groups, row blocks, fragments
    divisions = ((4, 1, 2, 1, 4), (8, 2, 1, 1, 4), (12, 3, 1, 1, 2), (14, 2, 1, 2, 2), (16, 2, 1, 2, 2))
    for row_tiles, *division in divisions:
        for k_cluster in (1, 2):
            found += _most_stages(tokens, row_tiles, *division, k_cluster=k_cluster)
    for row_tiles, row_groups, fragments in ((12, 3, 4), (16, 4, 2)) if tokens <= _MOST_OWN_TOKEN_TILES else ():
        found += _most_stages(tokens, row_tiles, row_groups, 1, 1, fragments, k_cluster=2, own_groups=row_groups - 1)
    return found


def _most_stages(tokens: int, row_tiles: int, *division: int, k_cluster: int, own_groups: int = 0) -> list[SmallTile]:
    """The tile with as many stages as fit, if it can be at all."""
    for stages in range(_MOST_SMALL_STAGES, 1, -1):
        try:
            tile = SmallTile(tokens, row_tiles, 1, stages, *division, k_cluster=k_cluster, own_groups=own_groups)
        except ShapeError:
            return []
        if tile.plan.nbytes <= MAX_SHARED_BYTES:
            return [tile]
    return []


def _prefill_tiles(m: int) -> list[PrefillTile]:
    """Tiles that share out the tokens evenly, each with as many stages as are of use and fit."""
    fewest = ceil_div(m, _MOST_TOKENS)
    counts = {fewest, fewest + 1, fewest + 2, *(ceil_div(m, tokens) for tokens in (64, 96, 128, 192))}
    found: list[PrefillTile] = []
    for tokens in sorted({round_up(ceil_div(m, count), _PREFILL_TOKENS) for count in counts}):
        if tokens <= _PAIRED_TOKENS:
            one = PrefillTile(tokens, 1, 8, 4, 3 if tokens <= 96 else 2, _RASTER, stage_chunks=2)
            found += one, replace(one, k_cluster=2), PrefillTile(tokens, 2, 16, 6, 2, _RASTER)
        else:
            one = PrefillTile(tokens, 1, 8, _ACTIVATION_BYTES // (tokens * CHUNK_COLUMNS * 2), 2, _RASTER)
            found += one, replace(one, k_cluster=2), replace(one, cluster=2)
    return [tile for tile in found if tile.plan.nbytes <= MAX_SHARED_BYTES]


def kernel_specs() -> Iterator[KernelSpec]:
    """Compilations for products of the measured sizes: 1 to 8192 tokens, powers of two, in bf16 and NVFP4.

    And one tile a kernel for fp16, and one for blocks with several pieces of work. Others are compiled at their first
    use; they differ in numbers only.
    """
    products = [(1 << power, n, k) for n, k in MEASURED for power in range(14)]

    def tiles(nvfp4: bool) -> set[HopperTile]:
        processors = MEASURED_MULTIPROCESSORS
        chosen = ((choose_hopper(*product, processors, nvfp4=nvfp4)[0], product) for product in products)
        return {tile.for_product(*product, processors) for tile, product in chosen}

    bf16, nvfp4 = sorted(tiles(False), key=str), sorted(tiles(True), key=str)
    for tile in dict.fromkeys([*bf16, *nvfp4]):
        yield tile.spec("bfloat16")
    for kernel in (DecodeTile, SmallTile, PrefillTile):
        yield next(tile for tile in bf16 if isinstance(tile, kernel)).spec("float16")
        several = next(tile for tile in bf16 if isinstance(tile, kernel) and tile.k_cluster == 1)
        yield replace(several, one_piece=False).spec("bfloat16")
    for tile in nvfp4:
        if isinstance(tile, DecodeTile) and tile.token_tiles == 1:
            yield replace(tile, activation_warps=ACTIVATION_WARPS).spec("bfloat16")
