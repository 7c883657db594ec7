"""The Hopper products' own sources, run on the CPU thread by thread (tests/kernels/emulation), against fp64.

Copies land when somebody waits for them and destroy what lies there when they start, so a stage that is used too early
or filled too early gives NaN; unknown memory is NaN; blocks run one after the other, so one that waits for another
hangs. The blocks of a cluster run together: what one sends another is NaN until that one waits for it, and must not
come when that one is over. A box of activations is what its memory holds when it is asked for.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest

from fp4rt import prepacked
from fp4rt.cpu import reference
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile, SmallTile
from fp4rt.format import BLOCK, E2M1, E4M3, INPUT_DTYPES
from fp4rt.layout import LAYOUTS, ceil_div, round_up

ARGUMENTS = argument_struct("block/gemm_arguments.cuh", "GemmArguments")
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
GUARD = 0x5A
MANY = 10**6  # multiprocessors: a piece of work for each

WARPS = DecodeTile(1, 3, 1, 2, row_warps=3, k_warps=2, warp_tiles=1)
PAIRS_OF_TILES = DecodeTile(2, 4, 2, 3, row_warps=2, k_warps=4, warp_tiles=2)
ONE_GROUP = SmallTile(2, 3, 1, 2, row_groups=1, k_groups=1, row_blocks=1, fragments=2)
TWO_K_GROUPS = SmallTile(3, 4, 1, 3, row_groups=1, k_groups=2, row_blocks=1, fragments=1)
TALL = SmallTile(2, 8, 1, 2, row_groups=1, k_groups=1, row_blocks=2, fragments=4)
OWN_ROWS = SmallTile(2, 8, 1, 2, row_groups=2, k_groups=1, row_blocks=1, fragments=4, k_cluster=2, own_groups=1)
DECODING = replace(WARPS, activation_warps=1)  # every second token
DECODING_PAIRS = replace(PAIRS_OF_TILES, activation_warps=4)  # 4 tokens at a time, of 16
WIDE = PrefillTile(32, 1, 8, 3, 2, 2)
FIVE_PASSES = PrefillTile(80, 1, 8, 3, 2, 2)
PAIRED = PrefillTile(32, 1, 8, 2, 2, 2, stage_chunks=2)
TWO_BLOCKS = PrefillTile(48, 2, 12, 2, 2, 1)
THREE_GROUPS = PrefillTile(48, 1, 12, 3, 2, 2, row_groups=3)
SHARING_TOKENS = PrefillTile(32, 1, 8, 3, 2, 2, cluster=2)
AMONG_BLOCKS = PrefillTile(32, 1, 8, 4, 2, 2, one_piece=True, decodes=True)
AMONG_CLUSTERS = PrefillTile(48, 1, 8, 5, 2, 2, cluster=2, one_piece=True, decodes=True)
AMONG_PAIRED = PrefillTile(16, 1, 8, 2, 2, 2, stage_chunks=2, one_piece=True, decodes=True)
# (tile, type of a, m, n, k, type of out, blocks, launched as a dependent). Where k is a multiple of 64, whole chunks
# are copied, all of a stage at once.
CASES = (
    (WARPS, "bfloat16", 5, 70, 600, "float32", 2, False),
    (WARPS, "float16", 8, 120, 48, "float16", 1, True),  # one block for all the work: the stages go on
    (WARPS, "bfloat16", 1, 33, 1088, "float32", 1, True),
    (PAIRS_OF_TILES, "bfloat16", 13, 66, 832, "bfloat16", 1, False),
    (DECODING, "nvfp4", 5, 70, 600, "bfloat16", 2, False),  # half a block at the end of k
    (DECODING, "nvfp4", 8, 120, 48, "float32", 1, False),
    (DECODING, "nvfp4", 1, 33, 1099, "float32", 3, False),  # half a byte
    (DECODING_PAIRS, "nvfp4", 13, 66, 784, "float32", 1, False),
    (ONE_GROUP, "bfloat16", 11, 50, 336, "float32", 2, False),
    (TWO_K_GROUPS, "float16", 24, 100, 528, "bfloat16", 2, False),
    (TALL, "bfloat16", 16, 130, 320, "float16", 2, True),
    (WIDE, "bfloat16", 70, 152, 336, "bfloat16", 2, False),  # leaves transposed
    (WIDE, "float16", 33, 131, 48, "float16", 3, False),  # rows that cannot
    (WIDE, "bfloat16", 1, 129, 800, "float32", 4, True),
    (PAIRED, "bfloat16", 70, 152, 832, "bfloat16", 2, False),  # k ends in the first chunk of a stage
    (PAIRED, "float16", 33, 131, 48, "float32", 3, True),
    (TWO_BLOCKS, "bfloat16", 50, 240, 272, "float16", 2, False),
    (THREE_GROUPS, "bfloat16", 60, 376, 576, "bfloat16", 2, False),  # a last tile of 184 rows
    (THREE_GROUPS, "float16", 50, 291, 272, "float32", 1, True),  # 99 of them, of which a warpgroup has 35
    (FIVE_PASSES, "bfloat16", 75, 136, 48, "bfloat16", 1, False),  # 16 tokens at a time, the last ones not whole
    (TWO_K_GROUPS, "bfloat16", 19, 104, 576, "bfloat16", 2, False),  # leaves transposed, 8 tokens at a time
    (TALL, "bfloat16", 15, 136, 272, "float16", 2, True),  # leaves transposed, 16 at a time
)
# Clusters, whose blocks share k, or that of their last rows, or their tokens
CLUSTER_CASES = (
    (replace(WARPS, k_cluster=2), "bfloat16", 5, 70, 1088, "bfloat16", 4, False),
    (replace(PAIRS_OF_TILES, k_cluster=2), "float16", 13, 66, 2000, "float32", 4, True),
    (replace(TWO_K_GROUPS, k_cluster=2), "bfloat16", 24, 100, 1100, "bfloat16", 4, False),
    (replace(TALL, k_cluster=2), "bfloat16", 11, 130, 832, "float32", 4, False),
    (replace(WARPS, k_cluster=4), "bfloat16", 5, 70, 1088, "bfloat16", 8, True),
    (replace(TWO_K_GROUPS, k_cluster=4), "float16", 24, 60, 1500, "bfloat16", 4, False),
    (replace(ONE_GROUP, k_cluster=4), "bfloat16", 11, 50, 2000, "float32", 8, False),
    (OWN_ROWS, "bfloat16", 11, 184, 1300, "bfloat16", 2, False),  # a block takes 3 units of the shared rows, one 2
    (OWN_ROWS, "float16", 16, 100, 272, "float32", 2, True),  # no rows to share, few of the second block's own
    (OWN_ROWS, "bfloat16", 9, 330, 200, "bfloat16", 4, False),  # one unit: the second block has none to share
    (PrefillTile(32, 1, 8, 3, 2, 2, k_cluster=2), "bfloat16", 70, 152, 784, "bfloat16", 12, False),
    (PrefillTile(48, 2, 12, 4, 2, 1, k_cluster=2), "float16", 50, 240, 528, "float32", 8, False),
    (replace(PAIRED, k_cluster=2), "bfloat16", 40, 152, 832, "bfloat16", 8, False),
    (replace(PAIRED, cluster=2), "bfloat16", 40, 280, 832, "bfloat16", 8, True),
    (SHARING_TOKENS, "bfloat16", 70, 152, 784, "bfloat16", 6, True),
    (SHARING_TOKENS, "float16", 33, 131, 48, "float32", 4, False),  # one chunk; few rows for the second block
    (replace(THREE_GROUPS, cluster=2), "bfloat16", 60, 500, 400, "bfloat16", 8, False),
    (SHARING_TOKENS, "bfloat16", 20, 120, 300, "float16", 2, False),  # none
)
# Blocks that decode activations among themselves: three layouts, token tiles that are not whole; k ends in a block of
# 16, in a group, in its first half (whose second half is left out), with a group
DECODING_CASES = (
    (AMONG_BLOCKS, "nvfp4", 70, 152, 784, "bfloat16", 6, False),
    (replace(AMONG_BLOCKS, k_tail=True), "nvfp4", 33, 131, 600, "float32", 4, False),
    (AMONG_BLOCKS, "nvfp4", 5, 300, 1024, "bfloat16", 3, False),
    (AMONG_CLUSTERS, "nvfp4", 70, 152, 777, "bfloat16", 4, False),
    (AMONG_CLUSTERS, "nvfp4", 95, 280, 512, "bfloat16", 8, False),
    (AMONG_PAIRED, "nvfp4", 23, 152, 832, "bfloat16", 4, False),
    (replace(AMONG_PAIRED, cluster=2), "nvfp4", 30, 200, 272, "float32", 4, False),
)
# The same for prefill tiles, with (whole tiles, sharers) instead: 2 x 2 tiles, k of 5 column groups
SHARED_CASES = (
    ((WIDE, "bfloat16", 40, 152, 1200, "bfloat16", 3, False), (3, 3)),  # one tile among all three
    ((WIDE, "float16", 40, 152, 1200, "float32", 3, False), (0, 3)),  # none whole, tiles among one and two
    ((WIDE, "bfloat16", 33, 136, 1200, "bfloat16", 3, False), (2, 2)),  # two sharers of three, a tile each
    ((WIDE, "bfloat16", 33, 136, 1200, "float32", 20, False), (0, 20)),  # a column group each
    ((PAIRED, "bfloat16", 40, 152, 1200, "bfloat16", 3, False), (0, 3)),
    ((TWO_BLOCKS, "bfloat16", 50, 240, 600, "float16", 4, False), (0, 4)),  # two in two halves
    ((THREE_GROUPS, "bfloat16", 60, 376, 1200, "bfloat16", 3, False), (2, 3)),
    ((SHARING_TOKENS, "bfloat16", 70, 152, 784, "bfloat16", 4, True), (2, 2)),  # one among two clusters
)


@pytest.fixture(scope="module")
def build(emulate):
    def build(spec):
        options = [f"-D{name}={value}" for name, value in spec.defines]
        return emulate("gemm_hopper.cpp", *options, f'-DSOURCE="{spec.source}"', f"-DENTRY={spec.entry}")

    return build


def spec_of(case):
    return case[0].spec("bfloat16" if case[1] == "nvfp4" else case[1])


def weight(rng, n, k):
    """(tiles, fp64 values): every scale but NaN, padding that would show."""
    padded = round_up(k, BLOCK)
    codes = rng.integers(0, 16, (n, padded), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (n, padded // BLOCK), dtype=np.uint8)
    values = (E2M1.values[codes].reshape(n, -1, BLOCK) * E4M3.values[scales][..., None]).reshape(n, padded)
    codes[:, k:] = 0xF
    return prepacked.pack(reference.pack_codes(codes), scales, k)[0], values[:, :k].astype(np.float64)


def quantized(rng, m, k, unit):
    """(codes, scales, block columns, layout, fp64 values) of activations whose padding would show."""
    blocks, layout = ceil_div(k, BLOCK), list(LAYOUTS.values())[m % 3]
    columns = round_up(blocks + 3, unit)
    codes = rng.integers(0, 16, (m, columns * BLOCK), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (m, columns), dtype=np.uint8)
    values = (E2M1.values[codes].reshape(m, -1, BLOCK) * E4M3.values[scales][..., None]).reshape(m, -1)
    placed = np.full(layout.nbytes(m, columns), 0x7F, np.uint8)
    placed[layout.offsets(m, columns)[:, :blocks]] = scales[:, :blocks]
    values = values[:, :k].astype(np.float64)
    return aligned(reference.pack_codes(codes)), aligned(placed), columns, layout.index, values


def aligned(array):
    """A copy at a multiple of 16."""
    raw = np.empty(array.nbytes + 16, np.uint8)
    begin = -raw.ctypes.data % 16
    copy = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def one_piece(case):
    """The same product with a block, or a cluster, for each piece of work."""
    tile, a_type, m, n, k, out_type, _, dependent = case
    tile = tile.for_product(m, n, k, MANY)
    assert tile.one_piece
    columns, rows, _ = tile.grid(m, n, k, MANY)
    return tile, a_type, m, n, k, out_type, columns * rows, dependent


def multiply(build, case, bias=None, change=None, shared=None, order=None, seed=0, scales_product=None, slot=0):
    """(result, values of a, of b) with alpha 0.5, or 1 / (``scales_product``, a's global scale and that of b).

    ``order`` is that of the clusters, ``seed`` disturbs the threads'.
    """
    tile, a_type, m, n, k, out_type, blocks, dependent = case
    rng = np.random.default_rng(m * n + k)
    library = build(spec_of(case))
    tiles, b = weight(rng, n, k)
    if change is not None:
        change(tiles)
    tiles = aligned(tiles)
    library.allow_reads(ctypes.c_void_p(tiles.ctypes.data), ctypes.c_uint64(tiles.nbytes))
    a_bits, codes, scales, columns, layout = np.zeros(0, np.uint16), np.zeros(0, np.uint8), np.zeros(0, np.uint8), 0, 0
    if a_type == "nvfp4":
        decodes = getattr(tile, "decodes", False)
        codes, scales, columns, layout, a = quantized(rng, m, k, 4 if decodes else 1)
        a_bits = aligned(np.full((m, round_up(k, BLOCK) if decodes else 0), 0xFFFF, np.uint16))  # NaN
    else:
        a_bits = reference.round_to_bits(rng.standard_normal((m, k)).astype(np.float32), a_type)
        a = reference.widen(a_bits, a_type).astype(np.float64)
    guarded = aligned(np.full(m * n * 4 + 64, GUARD, np.uint8))
    global_scales = np.array(scales_product or (), np.float32)
    a_global, b_global = (global_scales[i:].ctypes.data if scales_product else 0 for i in range(2))
    args = ARGUMENTS.pack(
        *(codes.ctypes.data, scales.ctypes.data, tiles.ctypes.data, 0, bias.ctypes.data if bias is not None else 0),
        *(guarded.ctypes.data, 0, 0, a_global, b_global, 0, 0, m, n, k, columns, 0, layout, 0),
        *(INPUT_DTYPES.index(out_type), INPUT_DTYPES.index("float32"), 1, 0.5),
    )
    box_chunks = tile.box_chunks if k % 64 == 0 else 0
    result_rows = tile.out_tokens if isinstance(tile, PrefillTile) and out_type != "float32" and n % 8 == 0 else 0
    whole_tiles, sharers = (tile.tiles(m, n) if isinstance(tile, PrefillTile) else 0, 0) if shared is None else shared
    piece_groups = (tile.tiles(m, n) - whole_tiles) * ceil_div(k, 256) // sharers if sharers else 0
    shared_sums = 64 * tile.row_groups * tile.row_blocks * tile.tokens * tile.cluster if sharers else 0
    sums = aligned(np.full((2 * sharers, shared_sums, 4), 0xFF, np.uint8))  # NaN
    arrivals = np.zeros((64, 3, 2), np.uint32)
    cluster = tile.k_cluster * getattr(tile, "cluster", 1)
    clusters = np.arange(blocks // cluster) if order is None else np.array(order)
    order = np.repeat(clusters * cluster, cluster).astype(np.uint32)
    columns = tile.grid(m, n, k, MANY)[0] if tile.one_piece else blocks
    library.disturb(ctypes.c_uint64(seed))
    library.run(
        *(ctypes.c_void_p(order.ctypes.data), blocks, columns, tile.threads, args),
        *(ctypes.c_void_p(a_bits.ctypes.data), ctypes.c_uint64(a_bits.shape[-1] or k), tile.box_rows, box_chunks),
        *(result_rows, dependent),
        *(whole_tiles, ctypes.c_void_p(sums.ctypes.data), ctypes.c_void_p(arrivals.ctypes.data), sharers),
        *(piece_groups, slot, tile.plan.nbytes),
    )
    assert library.counters_are_clear()
    element = 4 if out_type == "float32" else 2
    assert (guarded[m * n * element :] == GUARD).all(), "writes past the end"
    out = guarded[: m * n * element].view(np.float32 if element == 4 else np.uint16).reshape(m, n)
    return (out if element == 4 else reference.widen(out, out_type)).astype(np.float64), a, b


def assert_within_bound(got, a, b, out_type, bias=0.0, alpha=0.5, least=2.0**-25):
    true = alpha * (a @ b.T) + bias
    size = alpha * np.abs(a) @ np.abs(b).T + np.abs(bias)
    bound = (a.shape[1] + 8) * 2.0**-24 * size + ROUNDING[out_type] * np.abs(true)
    wrong = np.argwhere(~(np.abs(got - true) <= bound + least))
    assert not len(wrong), (
        f"{len(wrong)} of {got.size} out of bounds, first at {tuple(wrong[0])}: "
        f"got {got[tuple(wrong[0])]!r}, wanted {true[tuple(wrong[0])]!r} +- {bound[tuple(wrong[0])]!r}"
    )


def name_of(case):
    tile, a_type, m, n, k, out_type, *_ = case
    return f"{tile.entry}-{a_type}-m{m}-n{n}-k{k}-{out_type}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_element_lies_within_the_derived_bound(build, case):
    assert_within_bound(*multiply(build, case), case[5])


@pytest.mark.parametrize("case", [*CASES, *CLUSTER_CASES], ids=name_of)
def test_a_block_for_each_piece_gives_the_same_bits(build, case):
    alone = one_piece(case)
    got, a, b = multiply(build, alone)
    assert_within_bound(got, a, b, case[5])
    if isinstance(case[0], PrefillTile):  # whose blocks go through every second piece's k backwards
        case = (case[0], *alone[1:])
    if case[0].k_cluster == 1:  # the others have it so anyway
        assert np.array_equal(got, multiply(build, case)[0])


@pytest.mark.parametrize("case", [CASES[11], CASES[12], CASES[17]], ids=name_of)
def test_half_a_column_group_left_out_at_the_end_of_k_changes_no_bit(build, case):
    assert case[0].has_k_tail(case[4])
    shorter = (replace(case[0], k_tail=True), *case[1:])  # its blocks go through several pieces, also backwards
    first, _, _ = multiply(build, case)
    for seed in (0, 1, 2):
        assert np.array_equal(multiply(build, shorter, seed=seed)[0], first)


@pytest.mark.parametrize(("case", "shared"), SHARED_CASES, ids=lambda value: str(value)[-16:])
def test_tiles_shared_among_workers_are_whole_again(build, case, shared):
    assert_within_bound(*multiply(build, case, shared=shared), case[5])


def test_whichever_worker_comes_last_the_bits_are_the_same(build):
    for case, shared in SHARED_CASES:
        first, _, _ = multiply(build, case, shared=shared)
        workers = case[6] // case[0].cluster
        orders = [range(workers - 1, -1, -1), *(np.random.default_rng(i).permutation(workers) for i in range(3))]
        for order in orders:
            assert np.array_equal(multiply(build, case, shared=shared, order=order)[0], first), (case, list(order))


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=name_of)
def test_clusters_are_right_whatever_they_share(build, case):
    assert case[6] == case[0].grid(*case[2:5], 132)[0]
    assert_within_bound(*multiply(build, case), case[5])


@pytest.mark.parametrize("case", DECODING_CASES, ids=name_of)
def test_blocks_decode_activations_among_themselves_in_any_order(build, case):
    tile, _, *sizes, out_type, blocks, _ = case
    assert blocks == math.prod(tile.grid(*sizes, MANY))
    first, a, b = multiply(build, case)
    assert_within_bound(first, a, b, out_type)
    clusters = blocks // tile.cluster
    backwards, drawn = range(clusters - 1, -1, -1), np.random.default_rng(2).permutation(clusters)
    for seed, order in ((0, backwards), (1, None), (2, drawn)):
        assert np.array_equal(multiply(build, case, seed=seed, order=order, slot=511)[0], first)


# Each as it runs on a device: blocks that halve k have one piece of work, those that share tokens several.
ANY_ORDER = [*CASES[:8], *map(one_piece, CASES[3:5])]
ANY_ORDER += [case if case[0].k_cluster == 1 else one_piece(case) for case in CLUSTER_CASES]


@pytest.mark.parametrize("case", ANY_ORDER, ids=name_of)
def test_no_order_of_threads_changes_a_bit(build, case):
    first, _, _ = multiply(build, case)
    for seed in (1, 2, 3):
        assert np.array_equal(multiply(build, case, seed=seed)[0], first)


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[7], *CASES[-2:]], ids=name_of)
def test_bias_is_added_before_the_one_rounding(build, case):
    bias = np.random.default_rng(1).standard_normal(case[3]).astype(np.float32) * 64
    assert_within_bound(*multiply(build, case, bias=bias), case[5], bias=bias)


@pytest.mark.parametrize("scale", [2.0**-65, 2.0**66], ids=["huge", "tiny"])
@pytest.mark.parametrize("case", [CASES[2], CASES[7], CASES[10], CASES[13]], ids=name_of)
def test_a_product_of_global_scales_beyond_fp32_takes_no_bit_of_the_result(build, case, scale):
    case = (*case[:5], "float32", *case[6:])

    def clear_a_tile(tiles):
        tiles[:, 1] = 0

    scales = (np.float32(1.37 * scale), np.float32(1.11 * scale))
    got, a, b = multiply(build, case, change=clear_a_tile, scales_product=scales)
    alpha = 1.0 / (float(scales[0]) * float(scales[1]))
    assert alpha > 2.0**128 or alpha < 2.0**-128
    b[16:32] = 0
    true = alpha * (a @ b.T)
    beyond = np.abs(true) > 2.0**128 * (1 + 2.0**-20)
    assert np.array_equal(got[beyond], np.copysign(np.inf, true[beyond]))
    got[beyond] = true[beyond]
    assert_within_bound(got, a, b, "float32", alpha=alpha, least=2.0**-149)


@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[9]], ids=name_of)
def test_a_nan_block_makes_exactly_its_row_nan(build, case):
    def spoil(tiles):
        e5m3_nan = tiles[0, 1, prepacked.TILE_CODE_BYTES + 16 * 3 : prepacked.TILE_CODE_BYTES + 16 * 3 + 4].view("<u4")
        e5m3_nan |= 0xFC << 4  # the first scale of row 16 + 3

    got, _, _ = multiply(build, case, change=spoil)
    assert np.isnan(got[:, 19]).all()
    assert not np.isnan(np.delete(got, 19, axis=1)).any()
