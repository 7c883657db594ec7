"""Tiles of the Hopper kernels: every choice can run, measured ones are used where they were measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fp4rt.cuda.gemm.hopper import MAX_SHARED_BYTES, DecodeTile, PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_choice import choose_hopper, estimate, worth_measuring
from fp4rt.cuda.gemm.hopper_measured import ANY_M, MEASURED, MEASURED_MULTIPROCESSORS
from fp4rt.errors import BackendUnavailable, ShapeError
from fp4rt.layout import ceil_div

H200, H800 = 132, 114
WEIGHTS = [(1, 1), (16, 16), (48, 7152), (1000, 300), (4096, 4096), (5120, 27648), (28672, 8192), (151936, 4096)]
TOKENS = (1, 8, 9, 16, 17, 31, 32, 33, 64, 65, 97, 128, 129, 200, 257, 1000, 70000)


def takes(tile, m):
    return m <= (tile.max_tokens if not isinstance(tile, PrefillTile) else m)


def covers_the_rows(tile):
    if isinstance(tile, DecodeTile):
        return tile.row_warps * tile.warp_tiles >= tile.row_tiles
    return tile.row_groups * tile.row_blocks * 4 >= tile.row_tiles


@pytest.mark.parametrize("multiprocessors", [H200, H800])
def test_every_product_gets_a_tile_that_fits_and_covers_it(multiprocessors):
    for (n, k), m in itertools.product(WEIGHTS, TOKENS):
        tile, why = choose_hopper(m, n, k, multiprocessors)
        assert tile.plan.nbytes <= MAX_SHARED_BYTES, tile
        assert takes(tile, m), (m, tile)
        assert covers_the_rows(tile), tile
        assert tile.can_share(k), (k, tile)
        assert tile.threads <= 1024
        assert why


def test_measured_tiles_fit_cover_their_rows_and_stand_in_order():
    for rows in MEASURED.values():
        assert [m for m, _ in rows] == sorted({m for m, _ in rows})
        assert rows[-1][0] == ANY_M
        for m, tile in rows:
            assert tile.plan.nbytes <= MAX_SHARED_BYTES
            assert takes(tile, min(m, 10**6))
            assert covers_the_rows(tile)


def test_measured_tiles_are_used_on_the_card_that_they_were_measured_on_and_nowhere_else():
    (n, k), rows = next(iter(MEASURED.items()))
    m, tile = rows[0]
    assert choose_hopper(m, n, k, MEASURED_MULTIPROCESSORS)[0] == tile
    assert choose_hopper(m, n, k, MEASURED_MULTIPROCESSORS)[1].startswith("measured")
    assert choose_hopper(m, n, k, H800)[1].startswith("estimated")
    assert choose_hopper(m, n + 16, k, MEASURED_MULTIPROCESSORS)[1].startswith("estimated")


def test_a_tile_is_cut_down_to_the_tokens_there_are():
    assert choose_hopper(17, 8192, 8192, H200)[0].max_tokens == 24
    assert choose_hopper(200, 4096, 4096, H200)[0].tokens == 112


def test_a_tile_measured_with_other_tokens_is_not_used_where_it_leaves_multiprocessors_idle():
    assert choose_hopper(1024, 4096, 4096, H200)[0].tokens == 256  # 4 x 16 pairs of row blocks for 66 clusters
    tile, why = choose_hopper(768, 4096, 4096, H200)
    assert tile.tokens == 192
    assert why.startswith("estimated")


def test_blocks_of_a_cluster_have_one_piece_of_work_each():
    tile = SmallTile(4, 4, 1, 4, row_groups=1, k_groups=2, row_blocks=1, fragments=4, k_cluster=2)
    assert tile.grid(32, 8192, 8192, H200) == (2 * 8192 // 64, 1, 1)
    assert not tile.can_share(256)  # one column group
    own_rows = SmallTile(8, 16, 1, 3, row_groups=4, k_groups=1, row_blocks=1, fragments=4, k_cluster=2, own_groups=3)
    assert own_rows.cluster_tiles == 28
    assert own_rows.grid(64, 28672, 8192, H200)[0] == 128  # 64 clusters of 448 rows
    assert own_rows.grid(64, 28688, 8192, H200)[0] == 130


def test_without_clusters_no_more_blocks_are_launched_than_there_is_work_or_multiprocessors():
    tile = DecodeTile(1, 2, 1, 2, row_warps=2, k_warps=4, warp_tiles=1)
    assert tile.grid(1, 33, 256, H200) == (2, 1, 1)
    assert tile.grid(1, 10**6, 256, H200) == (H200, 1, 1)


def test_a_block_has_one_piece_where_the_grid_has_a_place_for_each():
    decode = DecodeTile(1, 2, 1, 2, row_warps=2, k_warps=4, warp_tiles=1)
    assert decode.for_product(1, 32 * H200, 4096, H200).one_piece
    assert not decode.for_product(1, 32 * H200 + 1, 4096, H200).one_piece
    small = SmallTile(4, 4, 1, 4, row_groups=1, k_groups=2, row_blocks=1, fragments=4, k_cluster=2)
    assert small.for_product(32, 10**6, 4096, H200).one_piece
    prefill = PrefillTile(256, 1, 8, 4, 2, 4)
    one = prefill.for_product(1000, 4100, 4096, H200)
    assert one.one_piece
    assert one.grid(1000, 4100, 4096, H200) == (33, 4, 1)
    assert not prefill.for_product(1025, 4100, 4096, H200).one_piece  # 165 tiles
    assert not prefill.for_product(256, 8192, 8192, H200).one_piece  # 64, shared by two workers each
    assert replace(prefill, cluster=2).for_product(256, 4100, 512, H200).grid(256, 4100, 512, H200) == (34, 1, 1)
    halves = replace(prefill, k_cluster=2)
    assert halves.for_product(1025, 8192, 8192, H200).grid(1025, 8192, 8192, H200) == (128, 5, 1)
    assert not halves.for_product(256 * 65536, 16, 512, H200).one_piece  # more rows of blocks than a grid has
    for tile in (decode, small, prefill, halves):
        assert tile.for_product(1, 4096, 512, H200).for_product(70000, 10**7, 512, H200) == tile.for_product(
            70000, 10**7, 512, H200
        )


def test_products_end_in_the_middle_of_a_column_group_where_k_does():
    tile = PrefillTile(256, 1, 8, 4, 2, 4)
    tails = {k: tile.for_product(1000, 4096, k, H200).k_tail for k in (16, 256, 272, 384, 400, 2880, 4096)}
    assert tails == {16: True, 256: False, 272: True, 384: True, 400: False, 2880: True, 4096: False}
    assert not PrefillTile(64, 1, 8, 4, 2, 4, stage_chunks=2).for_product(1000, 4096, 2880, H200).k_tail
    assert estimate(tile, 1000, 4096, 2816 + 128, H200) < estimate(tile, 1000, 4096, 2816 + 192, H200)


def test_more_waves_cost_more():
    tile = PrefillTile(256, 1, 8, 4, 2, 8)
    one, two = (estimate(tile, m, 128 * H200, 4096, H200) for m in (256, 512))
    assert 1.8 < two / one < 2.2


DECODE = DecodeTile(1, 4, 2, 3, row_warps=4, k_warps=4, warp_tiles=1)
SMALL = SmallTile(1, 4, 2, 2, row_groups=1, k_groups=1, row_blocks=1, fragments=2)
FOUR_GROUPS = SmallTile(8, 16, 1, 3, 4, 1, 1, 4, k_cluster=2, own_groups=3)
PREFILL = PrefillTile(32, 1, 8, 3, 2, 2)
OTHER_THAN_OWN_ROWS = ({"row_tiles": 14}, {"k_cluster": 1}, {"k_cluster": 4}, {"own_groups": 2})
FAULTS = (
    (DECODE, {"row_warps": 2}, "row tiles that no warp has"),
    (DECODE, {"row_warps": 0}, "no warps"),
    (DECODE, {"row_warps": 40}, "more threads than a block can"),
    (DECODE, {"token_tiles": 0}, "no tokens, rows, groups or stages"),
    (DECODE, {"k_warps": 3, "stage_groups": 3}, "no power of two"),
    (DECODE, {"k_warps": 8, "stage_groups": 1, "row_tiles": 2, "row_warps": 2}, "among k_warps"),
    (DECODE, {"warp_tiles": 3}, "among warps"),
    (DECODE, {"stage_groups": 8}, "more copies a stage"),
    (DECODE, {"stage_groups": 4, "activation_warps": 1}, "do not decode whole tokens"),
    *((DECODE, {"k_cluster": k_cluster}, "neither one, two nor four blocks") for k_cluster in (0, 3, 8)),
    *((SMALL, {"fragments": fragments}, "not 1, 2 or 4") for fragments in (3, 8, 16)),
    (SMALL, {"k_groups": 3, "stage_groups": 3}, "not 1, 2 or 4"),
    (SMALL, {"k_groups": 4, "stage_groups": 1, "fragments": 4}, "double buffer"),
    (SMALL, {"row_groups": 6, "row_tiles": 24}, "no share of registers"),
    (SMALL, {"row_tiles": 5}, "row tiles that no warpgroup has"),
    (SMALL, {"row_blocks": 0}, "no row blocks"),
    (SMALL, {"k_cluster": 3}, "neither one, two nor four blocks"),
    (SMALL, {"stages": 1}, "one stage only"),  # it would wait for ever
    *((FOUR_GROUPS, change, "rows of its own") for change in OTHER_THAN_OWN_ROWS),
    (FOUR_GROUPS, {"stage_groups": 6}, "more copies a stage"),
    (PREFILL, {"tokens": 0}, "no tokens, or more than 256"),
    (PREFILL, {"tokens": 272}, "no tokens, or more than 256"),
    (PREFILL, {"tokens": 72}, "tokens in pairs of 8"),
    (PREFILL, {"raster_tokens": 0}, "sweeps of no token tiles"),
    (PREFILL, {"row_blocks": 0}, "no row blocks"),
    (PREFILL, {"row_tiles": 9}, "some that no warpgroup has"),
    *((PREFILL, {"row_groups": groups, "row_tiles": 4}, "neither two nor three row groups") for groups in (1, 4)),
    (PREFILL, {"row_groups": 3, "k_cluster": 2}, "of which blocks that share k have two"),
    (PREFILL, {"row_tiles": 0}, "no row tiles"),
    (PREFILL, {"activation_stages": 1, "cluster": 2}, "one stage only"),
    (PREFILL, {"weight_stages": 0}, "no stages"),
    (PREFILL, {"stage_chunks": 2, "k_tail": True}, "a k_tail of half a column group"),
    (PREFILL, {"stage_chunks": 4}, "neither 1 nor 2"),  # the double buffer would meet itself
    (PREFILL, {"cluster": 2, "k_cluster": 2}, "two kinds of clusters"),
    *((PREFILL, {"k_cluster": k_cluster}, "neither one nor two blocks") for k_cluster in (0, 4)),
    (PREFILL, {"row_blocks": 2, "k_cluster": 2}, "too few stages for the sums"),
)


@pytest.mark.parametrize(("tile", "change", "message"), FAULTS, ids=[f"{t.entry}-{c}" for t, c, _ in FAULTS])
def test_what_a_kernel_cannot_compute_is_refused(tile, change, message):
    with pytest.raises(ShapeError, match=f"{message}.*; choose another tile"):
        replace(tile, **change)


def test_what_needs_too_much_shared_memory_is_refused():
    with pytest.raises(ShapeError, match="bytes of shared memory, sm_90 has"):
        PrefillTile(256, 2, 16, 8, 2, 8).spec("bfloat16")


def test_a_kernel_asked_for_too_many_tokens_is_refused():
    with pytest.raises(BackendUnavailable, match="at most 128 tokens, got m = 129"):
        choose_hopper(129, 4096, 4096, H200, "small")


def test_the_choice_for_nvfp4_is_measured_beside_the_one_for_bf16():
    tiles = worth_measuring(8, 4096, 4096, H200, nvfp4=True)
    chosen, usual = (choose_hopper(8, 4096, 4096, H200, nvfp4=kind)[0] for kind in (True, False))
    assert chosen != usual
    assert tiles[:2] == [chosen, usual]


def test_tiles_worth_measuring_begin_with_the_choice_and_can_all_run():
    for m in (1, 16, 32, 100, 4096):
        tiles = worth_measuring(m, 5120, 5120, H200)
        assert tiles[0] == choose_hopper(m, 5120, 5120, H200)[0]
        assert 2 <= len(tiles) == len(set(tiles)) <= 12
        assert all(takes(t, m) and t.plan.nbytes <= MAX_SHARED_BYTES and t.can_share(5120) for t in tiles)


def test_the_last_tiles_are_shared_where_that_saves_time():
    tile = PrefillTile(256, 1, 8, 4, 2, 4)
    few = tile.sharing(512, 28672, 8192, H200)  # 448 tiles: 3 rounds, and 52 tiles for 132 workers
    assert (few.whole_tiles, few.sharers) == (396, 132)
    assert 3.5 < few.rounds < 3.7
    assert few.sums_bytes == 2 * 132 * 128 * 256 * 4
    assert few.arrivals_bytes == 52 * 2 * 2 * 4
    halves = tile.sharing(768, 8192, 8192, H200)  # 60 tiles remain: each in two halves costs less than in three parts
    assert (halves.whole_tiles, halves.sharers) == (132, 120)
    nearly_all = tile.sharing(1024, 8192, 8192, H200)  # 124 tiles remain: nothing to gain
    assert nearly_all.sharers == 0
    assert nearly_all.whole_tiles == 256
    assert tile.grid(1024, 8192, 8192, H200) == (H200, 1, 1)
    assert tile.grid(256, 128 * H200, 8192, H200) == (H200, 1, 1)
    assert PrefillTile(256, 1, 8, 4, 2, 4, k_cluster=2).sharing(600, 8192, 8192, H200).sharers == 0


def test_few_tiles_are_not_shared_among_all_workers_as_one_adds_up_the_sums_of_a_tile():
    sharing = PrefillTile(208, 1, 8, 4, 2, 4).sharing(2048, 5120, 5120, H200)  # 4 of 400 tiles remain
    assert sharing.whole_tiles == 396
    assert 8 <= sharing.sharers <= 24
    assert choose_hopper(2048, 5120, 5120, H200)[0].tokens == 160  # 208, which came before 256, took 11 % longer


def test_the_longest_products_share_their_tokens_in_clusters():
    assert choose_hopper(8192, 14336, 4096, H200)[0].cluster == 2
    assert choose_hopper(1024, 4096, 5120, H200)[0].cluster == 1


def test_a_last_half_of_a_row_group_is_shared_where_whole_ones_would_leave_multiprocessors_idle():
    assert choose_hopper(64, 28672, 5120, H200)[0].own_groups == 3  # 448 row groups: 3.4 a multiprocessor
    assert choose_hopper(64, 18944, 3584, H200)[0].own_groups == 2  # 296: 2.2


def test_three_warpgroups_are_chosen_where_tiles_of_192_rows_fill_the_multiprocessors():
    tile, _ = choose_hopper(512, 6144, 4096, H200)
    assert (tile.row_groups, tile.tiles(512, 6144)) == (3, 128)  # of 128 rows and as many results: 96
    assert choose_hopper(512, 5760, 2880, H200)[0].row_groups == 3


def test_few_rows_are_shared_by_clusters_of_four_as_far_as_these_fit():
    tile, _ = choose_hopper(64, 1280, 8192, H200)
    assert (tile.k_cluster, tile.grid(64, 1280, 8192, H200)[0]) == (4, 80)
    assert choose_hopper(64, 2112, 7168, H200)[0].k_cluster == 2  # 136 blocks, but clusters of four fill 120


def test_devices_of_few_multiprocessors_get_tiles_whose_clusters_have_room():
    for multiprocessors, m in itertools.product((1, 2, 3, 4, 5, 16), (1, 40, 64, 300)):
        tile, _ = choose_hopper(m, 4096, 4096, multiprocessors)
        assert tile.k_cluster * getattr(tile, "cluster", 1) <= multiprocessors
        assert worth_measuring(m, 4096, 4096, multiprocessors)


def test_the_small_kernel_is_there_for_all_its_tokens_when_asked_for():
    for m, k in itertools.product((1, 96, 121, 128), (16, 256, 4096)):
        assert isinstance(choose_hopper(m, 4096, k, H200, "small")[0], SmallTile)


def test_memory_that_workers_share_has_room_for_three_warpgroups():
    tile = PrefillTile(128, 1, 12, 6, 2, 4, row_groups=3)
    sharing = tile.sharing(1200, 6144, 8192, H200)
    assert sharing.sharers == H200
    assert sharing.sums_bytes == 2 * H200 * 3 * 64 * 128 * 4
    assert sharing.arrivals_bytes == (320 - 264) * 3 * 2 * 4
    assert tile.plan.nbytes == tile.plan.macros["ARRIVALS_AT"] + 3 * 4
    four = SmallTile(2, 4, 1, 4, row_groups=1, k_groups=1, row_blocks=1, fragments=4, k_cluster=4)
    assert [four.can_share(k) for k in (512, 768, 769)] == [False, False, True]


def test_many_rows_are_read_in_few_waves_of_blocks():
    tile, _ = choose_hopper(1, 128256, 4096, H200)
    assert tile.row_tiles >= 8  # single ones would waste the fewest rows, and take twice as long


def test_tiles_are_not_shared_in_more_pieces_than_there_are_column_groups():
    for k in (16, 256, 512, 4096):
        for m, n in ((1, 16), (256, 128), (512, 4096), (4096, 151936)):
            sharing = PrefillTile(64, 1, 8, 8, 3, 4).sharing(m, n, k, H200)
            assert sharing.sharers <= (PrefillTile(64, 1, 8, 8, 3, 4).tiles(m, n) - sharing.whole_tiles) * ceil_div(
                k, 256
            )


def test_tokens_are_divided_evenly_among_tiles():
    assert choose_hopper(300, 8192, 8192, H200)[0].tokens == 160
    assert choose_hopper(600, 8192, 8192, H200)[0].tokens == 160
    assert choose_hopper(700, 28672, 8192, H200)[0].tokens == 240
    assert choose_hopper(2048, 8192, 8192, H200)[0].tokens == 256


def test_a_multiprocessor_takes_one_block_of_a_grid_that_has_one_for_each():
    multiprocessor, reserved = 228 * 1024, 1024
    tiles = [tile for rows in MEASURED.values() for _, tile in rows if tile.k_cluster == 1]
    assert any(tile.plan.nbytes < multiprocessor // 2 - reserved for tile in tiles)
    for tile in tiles:
        shared = tile.spec("bfloat16").shared_bytes
        assert tile.plan.nbytes <= shared <= MAX_SHARED_BYTES
        assert 2 * (shared + reserved) > multiprocessor


def test_places_in_shared_memory_do_not_overlap():
    tile = SmallTile(8, 8, 1, 3, row_groups=2, k_groups=2, row_blocks=1, fragments=2)
    macros = tile.plan.macros
    assert macros["ACTIVATIONS_AT"] >= 8 * 2304
    assert macros["ACTIVATIONS_AT"] % 1024 == 0
    assert macros["STAGE_BYTES"] == macros["ACTIVATIONS_AT"] + 4 * 64 * 128
    assert macros["BARRIERS_AT"] >= 3 * macros["STAGE_BYTES"]
    assert macros["REDUCTION_AT"] >= macros["BARRIERS_AT"] + 2 * 3 * 8
    assert macros["OUT_AT"] == macros["REDUCTION_AT"] + 2 * ceil_div(64, 8) * 4 * 512
    assert tile.plan.nbytes == macros["OUT_AT"] + 16 * 16 * 32  # of each of 16 warps: 16 tokens of 16 rows
