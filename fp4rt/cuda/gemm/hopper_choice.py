"""The Hopper kernels' tile for a product: measured where it was measured, estimated elsewhere.

An estimate counts cycles of one multiprocessor: ``max(reading, computing)`` a chunk of 64 columns, times chunks, times
rounds of blocks, and what each block has beside that. In small tiles products and decoding add up, because both need
the registers' bandwidth; in prefill tiles the products hide the decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fp4rt.cuda.gemm.hopper import MAX_SHARED_BYTES, DecodeTile, HopperTile, PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_measured import MEASURED, MEASURED_MULTIPROCESSORS, MEASURED_NVFP4
from fp4rt.cuda.gemm.hopper_plan import GROUP_CHUNKS
from fp4rt.cuda.gemm.portable import Alignment
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
_FEWEST_TOKENS, _MOST_TOKENS = 48, 256  # of a prefill tile worth a look
_MANY_TOKENS, _FEWEST_OF_MANY = 600, 96  # of a product; of its tiles
_THREE_GROUPS_TOKENS = 64, 160  # of tiles with three warpgroups: with more, registers run out
_FEWEST_SMALL_STAGES, _MOST_SMALL_STAGES = 3, 6  # with two, prefill tiles are as fast
_MOST_OWN_TOKEN_TILES = 12  # of small tiles with rows of their own: beyond, registers run out
_ACTIVATION_BYTES = 4 * _MOST_TOKENS * CHUNK_COLUMNS * 2  # of activations under way
_PAIRED_TOKENS = 128  # up to here two chunks make a stage, where a tile has one row block
_RASTER = 4  # prefill tiles' token tiles swept together
_CHUNK_BYTES = TILE_BYTES * CHUNK_COLUMNS // TILE_COLUMNS  # of a row tile

# Of weights under way in a multiprocessor: more is slower. Of few row tiles fewer, which come in more pieces.
_DECODE_BYTES, _FEW_ROWS_DECODE_BYTES = 110_000, 82_000
_DECODE_WAVE_TILES = 0.5  # row tiles that could be read in the time that another wave of blocks costs

# Cycles of an H200 at its usual clocks, fitted to 4800 measurements of 221 products: the tile estimated fastest takes
# 1 % longer than the fastest of those measured, some 10 % at worst.
_LAUNCH_CYCLES = 9200
_FAIR_BYTES = 16.5  # that a multiprocessor reads in a cycle while all do
_SMALL_BYTES, _PREFILL_BYTES = 59.0, 37.4  # from memory while few do, and from L2
_SMALL_TOKEN_CYCLES, _DECODE_CYCLES = 1.25, 106  # of 64 rows and a chunk: a token's products, and decoding
_IN_FOURS = 0.91  # of all multiprocessors
_LATENCY_CYCLES = 1260  # from asking for a stage of a small tile to its first bytes
_SMALL_TILE_CYCLES, _SMALL_RESULT_CYCLES = 1230, 17.7  # first loads and results of a small tile, and for each token
_PREFILL_TILE_CYCLES, _PREFILL_RESULT_CYCLES = 740, 17.1  # and of a prefill tile
_ADDING_CYCLES = 7.1  # for each token, 64 rows and part of k after the first: sums of small tiles
_SMALL_CLUSTER_CYCLES, _PREFILL_CLUSTER_CYCLES = 1480, 2750  # blocks of a cluster add their sums
_SHARING_TOKENS_CYCLES = 1230  # blocks that share tokens wait for each other
_DOUBT = 0.05  # by how much an estimate may be wrong before it says more than a tile measured with other tokens
_LONG_CYCLES = 120_000  # of a product at the power limit, where joules count
_FEWER_JOULES, _DECODING_JOULES = 0.98, 0.04  # what shared tokens leave of its time; decoding anew for 128 tokens adds


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
                tile = _narrowed(tile, m)
                if _is_far_from_best(tile, m, n, k):
                    break
                return tile, f"measured fastest around m = {m} for n = {n}, k = {k}"
    tile = _estimated(m, n, k, multiprocessors, kernel)
    return tile, f"estimated fastest for m = {m}, n = {n}, k = {k} on {multiprocessors} multiprocessors"


def _narrowed(tile: HopperTile, m: int) -> HopperTile:
    """A tile of all tokens, cut down to the tokens there are; of some, so that all tiles have as many."""
    if not isinstance(tile, PrefillTile):
        return replace(tile, token_tiles=min(tile.token_tiles, ceil_div(m, 8)))
    return replace(tile, tokens=round_up(ceil_div(m, ceil_div(m, tile.tokens)), _PREFILL_TOKENS))


@lru_cache(maxsize=4096)
def _is_far_from_best(tile: HopperTile, m: int, n: int, k: int) -> bool:
    """Whether a tile, measured at other numbers of tokens, fills the multiprocessors badly with these."""
    if not isinstance(tile, PrefillTile):
        return False
    best = _estimated(m, n, k, MEASURED_MULTIPROCESSORS, None)
    times = [estimate(each, m, n, k, MEASURED_MULTIPROCESSORS) for each in (tile, best)]
    return times[0] > times[1] * (1 + _DOUBT)


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
        found += _small_tiles(m, _FEWEST_SMALL_STAGES if kernel is None else 2)
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
    """Cycles of a small or prefill tile for a product; infinite where its clusters have no room."""
    assert not isinstance(tile, DecodeTile)
    cluster = tile.k_cluster * (tile.cluster if isinstance(tile, PrefillTile) else 1)
    if _in_clusters(cluster, multiprocessors) < cluster:
        return math.inf
    if isinstance(tile, SmallTile):
        return _LAUNCH_CYCLES + _small_cycles(tile, n, k, multiprocessors)
    cycles = _LAUNCH_CYCLES + _prefill_cycles(tile, m, n, k, multiprocessors)
    if cycles <= _LONG_CYCLES:
        return cycles
    return cycles * (1 + _DECODING_JOULES * 128 / tile.tokens) * (_FEWER_JOULES if tile.cluster > 1 else 1)


def _prefill_cycles(tile: PrefillTile, m: int, n: int, k: int, multiprocessors: int) -> float:
    chunks = ceil_div(ceil_div(k, TILE_COLUMNS), tile.k_cluster) * GROUP_CHUNKS
    if tile.k_cluster == 1 and tile.has_k_tail(k):
        chunks -= GROUP_CHUNKS // 2
    blocks = tile.tiles(m, n) * tile.cluster * tile.k_cluster
    reading = _reading(tile.row_tiles, tile.tokens / tile.cluster, blocks, multiprocessors, _PREFILL_BYTES)
    working = tile.group_cycles / GROUP_CHUNKS
    around = _PREFILL_TILE_CYCLES + _PREFILL_RESULT_CYCLES * tile.tokens * tile.row_blocks
    around += _PREFILL_CLUSTER_CYCLES * (tile.k_cluster > 1) + _SHARING_TOKENS_CYCLES * (tile.cluster > 1)
    return tile.sharing(m, n, k, multiprocessors).rounds * (chunks * max(*reading, working) + around)


def _small_cycles(tile: SmallTile, n: int, k: int, multiprocessors: int) -> float:
    own = tile.own_groups  # whose rows a block has for all of k
    units = ceil_div(ceil_div(k, TILE_COLUMNS), tile.stage_groups)
    chunks = (units if own else ceil_div(units, tile.k_cluster)) * tile.box_chunks
    blocks = ceil_div(ceil_div(n, TILE_ROWS), tile.cluster_tiles) * tile.k_cluster
    row_tiles = tile.cluster_tiles / tile.k_cluster if own else tile.row_tiles
    row_groups = own + 1 / tile.k_cluster if own else ceil_div(tile.row_tiles, 4)
    memory, shared = _reading(row_tiles, tile.max_tokens, blocks, multiprocessors, _SMALL_BYTES)
    working = row_groups * (_SMALL_TOKEN_CYCLES * tile.max_tokens + _DECODE_CYCLES)
    stage = _LATENCY_CYCLES + shared * tile.box_chunks  # cycles until it is there
    waiting = stage / (tile.box_chunks * (tile.stages - 1))
    sums = tile.max_tokens * tile.row_blocks * max(1, tile.row_groups - own)
    around = _SMALL_TILE_CYCLES + _SMALL_RESULT_CYCLES * tile.max_tokens
    around += _ADDING_CYCLES * (tile.k_groups * tile.k_cluster - 1) * sums
    around += _SMALL_CLUSTER_CYCLES * (tile.k_cluster > 1)
    rounds = ceil_div(blocks, _in_clusters(tile.k_cluster, multiprocessors))
    return rounds * (chunks * max(memory, shared, working, waiting) + around)


def _in_clusters(blocks: int, multiprocessors: int) -> int:
    """Multiprocessors that clusters of so many blocks fill: those of four leave some of each GPC's free.

    On an H200 30 of them run at a time, and 32 one after the other.
    """
    return multiprocessors if blocks < 4 else int(multiprocessors * _IN_FOURS) // 4 * 4


def _reading(
    row_tiles: float, tokens: float, blocks: int, multiprocessors: int, most_bytes: float
) -> tuple[float, float]:
    """Cycles for a chunk: of its weights from memory, which all blocks share, and of all of it from L2."""
    weights, activations = row_tiles * _CHUNK_BYTES, tokens * CHUNK_COLUMNS * 2
    fair = min(most_bytes, _FAIR_BYTES * multiprocessors / min(blocks, multiprocessors))
    return weights / fair, (weights + activations) / most_bytes


def _decode_tiles(m: int, n: int, multiprocessors: int) -> list[HopperTile]:
    """Row tiles a block so that few waves are nearly full; around 110 or 82 KB of weights under way, best first."""
    rows = ceil_div(n, TILE_ROWS)

    def cost(row_tiles: int) -> float:
        return ceil_div(ceil_div(rows, row_tiles), multiprocessors) * (row_tiles + _DECODE_WAVE_TILES)

    row_tiles = min(range(_MAX_ROW_TILES, 0, -1), key=cost)
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


@lru_cache(maxsize=64)
def _small_tiles(m: int, fewest_stages: int) -> list[HopperTile]:
    """Every division of the work, each with as many stages as fit."""
    tokens = ceil_div(m, 8)
    found: list[HopperTile] = []
    # row tiles, row groups, k groups, row blocks, fragments
    divisions = ((4, 1, 2, 1, 4), (8, 2, 1, 1, 4), (12, 3, 1, 1, 2), (14, 2, 1, 2, 2), (16, 2, 1, 2, 2))
    for row_tiles, *division in divisions:
        for k_cluster in (1, 2, 4):
            found += _most_stages(fewest_stages, tokens, row_tiles, *division, k_cluster=k_cluster)
    for row_tiles, row_groups, fragments in ((12, 3, 4), (16, 4, 2)) if tokens <= _MOST_OWN_TOKEN_TILES else ():
        own = {"k_cluster": 2, "own_groups": row_groups - 1}
        found += _most_stages(fewest_stages, tokens, row_tiles, row_groups, 1, 1, fragments, **own)
    return found


def _most_stages(
    fewest: int, tokens: int, row_tiles: int, *division: int, k_cluster: int, own_groups: int = 0
) -> list[SmallTile]:
    """The tile with as many stages as fit, if it can be at all."""
    for stages in range(_MOST_SMALL_STAGES, fewest - 1, -1):
        try:
            tile = SmallTile(tokens, row_tiles, 1, stages, *division, k_cluster=k_cluster, own_groups=own_groups)
        except ShapeError:
            return []
        if tile.plan.nbytes <= MAX_SHARED_BYTES:
            return [tile]
    return []


@lru_cache(maxsize=1024)
def _prefill_tiles(m: int) -> list[PrefillTile]:
    """Tiles that share out the tokens evenly, each with as many stages as are of use and fit."""
    fewest = _FEWEST_OF_MANY if m > _MANY_TOKENS else _FEWEST_TOKENS
    counts = range(ceil_div(m, _MOST_TOKENS), ceil_div(m, fewest) + 1)
    found: list[PrefillTile] = []
    for tokens in sorted({round_up(ceil_div(m, count), _PREFILL_TOKENS) for count in counts}):
        stages = _ACTIVATION_BYTES // (tokens * CHUNK_COLUMNS * 2)
        if tokens <= _PAIRED_TOKENS:
            one = PrefillTile(tokens, 1, 8, 4, 3 if tokens <= 96 else 2, _RASTER, stage_chunks=2)
            found += one, replace(one, k_cluster=2), PrefillTile(tokens, 2, 16, 6, 2, _RASTER)
        else:
            one = PrefillTile(tokens, 1, 8, stages, 2, _RASTER)
            found += one, replace(one, k_cluster=2), replace(one, cluster=2)
        if _THREE_GROUPS_TOKENS[0] <= tokens <= _THREE_GROUPS_TOKENS[1]:
            found.append(PrefillTile(tokens, 1, 12, min(stages, 7), 2, _RASTER, row_groups=3))
    return [tile for tile in found if tile.plan.nbytes <= MAX_SHARED_BYTES]


def kernel_specs() -> Iterator[KernelSpec]:
    """Compilations for products of the measured sizes: 1 to 8192 tokens, powers of two, in bf16 and NVFP4.

    And one tile a kernel for fp16, and one for blocks with several pieces of work. Others are compiled at their first
    use; they differ in numbers only.
    """
    products = [(1 << power, n, k) for n, k in MEASURED for power in range(14)]

    def chosen(nvfp4: bool) -> dict[HopperTile, None]:
        processors = MEASURED_MULTIPROCESSORS
        found = []
        for product in products:
            tile = choose_hopper(*product, processors, nvfp4=nvfp4)[0].for_product(*product, processors)
            found.append(tile)
            if nvfp4 and isinstance(tile, PrefillTile) and tile.can_decode(*product, Alignment()):
                found.append(replace(tile, decodes=True))
        return dict.fromkeys(sorted(found, key=str))

    bf16, nvfp4 = chosen(False), chosen(True)
    for tile in bf16 | nvfp4:
        yield tile.spec("bfloat16")
    for kernel in (DecodeTile, SmallTile, PrefillTile):
        yield next(tile for tile in bf16 if isinstance(tile, kernel)).spec("float16")
        several = next(tile for tile in bf16 if isinstance(tile, kernel) and tile.k_cluster == 1)
        yield replace(several, one_piece=False).spec("bfloat16")
    for tile in nvfp4:
        if isinstance(tile, DecodeTile) and tile.token_tiles == 1:
            yield replace(tile, activation_warps=ACTIVATION_WARPS).spec("bfloat16")
