"""Which kernel and tile a product gets, without a GPU."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from fp4rt.cuda.gemm import autotune, passes
from fp4rt.cuda.gemm.hopper import DecodeTile, PrefillTile
from fp4rt.cuda.gemm.portable import Alignment, PortableTile, alignment_of
from fp4rt.cuda.gemm.portable_choice import candidates
from fp4rt.cuda.gemm.problem import DeviceMeasures, Problem, can_bulk_load
from fp4rt.cuda.gemm.selection import HOPPER_KERNELS, REPACK_TOKENS, choose
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import BackendUnavailable, ShapeError
from fp4rt.interop import CPU, ArrayView

A100 = DeviceMeasures(80, False, 108, 163 * 1024, 164 * 1024)
RTX_4090 = DeviceMeasures(89, False, 128, 99 * 1024, 100 * 1024)
H200 = DeviceMeasures(90, True, 132, 227 * 1024, 228 * 1024)
RTX_5090 = DeviceMeasures(120, True, 170, 99 * 1024, 100 * 1024)
DEVICES = (A100, RTX_4090, H200, RTX_5090)
SIZES = (
    (28672, 8192),
    (8192, 28672),
    (8192, 8192),
    (4096, 4096),
    (16, 16),
    (48, 7152),
    (7152, 80),
    (1, 1),
    (10**6, 16),
)
TOKENS = (1, 8, 9, 16, 17, 64, 65, 128, 129, 1000, 4096, 262145)


def product(device=H200, m=1, n=4096, k=4096, a_kind="bfloat16", b_kind="nvfp4", align=None, bulk=True):
    return Problem(device, m, n, k, a_kind, b_kind, align or Alignment(), bulk)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("b_kind", ["nvfp4", "prepacked"])
def test_every_product_gets_a_kernel_that_fits_the_device(device, b_kind):
    for n, k in SIZES:
        for m in TOKENS:
            for a_kind in ("float16", "bfloat16", "nvfp4"):
                choice = choose(product(device, m, n, k, a_kind, b_kind))
                assert choice.why
                if choice.kernel == "portable":
                    kind = "bfloat16" if choice.activations == "bf16" else a_kind
                    assert choice.tile.shared_bytes(kind) <= device.shared_bytes
                    assert choice.tile.threads <= 1024
                    assert 1 <= choice.splits <= choice.tile.max_splits(k)
                else:
                    assert device is H200
                    assert choice.kernel in HOPPER_KERNELS


def test_prepacked_weights_go_to_the_hopper_kernels_there_and_to_the_portable_one_elsewhere():
    for m in TOKENS:
        assert choose(product(H200, m, b_kind="prepacked")).kernel in HOPPER_KERNELS
        for device in (A100, RTX_4090, RTX_5090):
            choice = choose(product(device, m, b_kind="prepacked"))
            assert choice.kernel == "portable"
            assert f"sm_{device.arch}" in choice.why


def test_plain_weights_are_repacked_only_for_many_tokens_on_hopper():
    few, many = product(H200, REPACK_TOKENS - 1), product(H200, REPACK_TOKENS)
    assert (choose(few).kernel, choose(few).repack) == ("portable", False)
    assert choose(many).kernel in HOPPER_KERNELS
    assert choose(many).repack
    assert choose(many).workspace(many)["weights"] == 4096 * 4096 * 9 // 16
    assert not choose(product(A100, 4096)).repack


def test_quantized_activations_become_bf16_unless_they_are_few():
    assert choose(product(m=16, a_kind="nvfp4")).activations == "as given"
    assert choose(product(m=17, a_kind="nvfp4")).activations == "bf16"
    assert choose(product(m=1, a_kind="nvfp4", k=4095)).activations == "bf16"  # half a byte is padding
    hopper = [choose(product(m=m, a_kind="nvfp4", b_kind="prepacked")) for m in (1, 8, 9)]
    assert [choice.activations for choice in hopper] == ["as given", "as given", "bf16"]
    assert [choice.tile.activation_warps for choice in hopper] == [8, 8, 0]
    misaligned = choose(product(m=1, a_kind="nvfp4", b_kind="prepacked", align=Alignment(a=1)))
    assert (misaligned.activations, misaligned.tile.activation_warps) == ("bf16", 0)
    problem = product(A100, m=33, k=50, a_kind="nvfp4")
    assert choose(problem).workspace(problem)["activations"] == 33 * 64 * 2


def test_blocks_with_one_large_tile_decode_activations_among_themselves():
    both = {"a_kind": "nvfp4", "b_kind": "prepacked"}
    choice = choose(product(m=1024, **both))
    assert (choice.activations, choice.tile.decodes) == ("beside", True)
    assert "decode the activations among themselves" in choice.why
    assert choice.workspace(product(m=1024, **both)) == {"activations": 1024 * 4096 * 2}
    repacked = choose(product(m=1024, a_kind="nvfp4"))
    assert (repacked.activations, repacked.repack) == ("beside", True)
    others = (
        product(m=512, **both),  # tiles of 128 tokens, which are multiplied too fast
        product(m=4096, **both),  # several tiles a block
        product(m=1024, k=256, **both),  # nothing after the first column group
        product(m=1024, align=Alignment(8, 4), **both),
        product(m=1024, align=Alignment(16, 1), **both),
        product(m=1024, n=1024, k=10**6, **both),  # few blocks
    )
    for each in others:
        assert choose(each).activations == "bf16", each
        assert not choose(each).tile.decodes
    assert choose(product(m=1024, **{**both, "a_kind": "bfloat16"})).activations == "as given"


def test_a_tile_that_cannot_decode_is_refused_where_it_shall():
    for fault in ({"one_piece": False}, {"row_groups": 3, "row_tiles": 12}, {"tokens": 160}, {"activation_stages": 3}):
        with pytest.raises(ShapeError, match="NVFP4 activations to decode"):
            PrefillTile(**{**asdict(PrefillTile(128, 1, 8, 4, 2, 4, one_piece=True, decodes=True)), **fault})


def test_activations_that_the_copy_engine_cannot_fetch_go_to_the_portable_kernel_and_it_says_why():
    choice = choose(product(H200, 4096, b_kind="prepacked", bulk=False))
    assert choice.kernel == "portable"
    assert "multiples of 16 bytes" in choice.why
    assert choose(product(H200, 4096, a_kind="nvfp4", b_kind="prepacked", bulk=False)).kernel in HOPPER_KERNELS


@pytest.mark.parametrize("kernel", HOPPER_KERNELS)
def test_a_kernel_asked_for_in_vain_says_what_is_missing(kernel):
    with pytest.raises(BackendUnavailable, match="need sm_90a, this device is sm_80"):
        choose(product(A100, 4, b_kind="prepacked"), kernel)


def test_unknown_and_unfit_kernels_are_refused():
    with pytest.raises(BackendUnavailable, match="there are reference, portable, decode, small, prefill"):
        choose(product(), "fastest")
    with pytest.raises(BackendUnavailable, match="plain weights"):
        choose(product(b_kind="prepacked"), "reference")
    with pytest.raises(BackendUnavailable, match="at most 16 tokens, got m = 17"):
        choose(product(m=17, b_kind="prepacked"), "decode")


def test_a_product_of_more_blocks_than_a_launch_has_is_refused():
    with pytest.raises(ShapeError, match="cut a into parts"):
        choose(product(A100, m=2**31, n=2**21), "reference")


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"sm_{d.arch}")
@pytest.mark.parametrize("n, k", [(28672, 8192), (8192, 8192), (8192, 28672), (4096, 4096)])
def test_few_tokens_occupy_most_multiprocessors(device, n, k):
    for m in (1, 16):
        choice = choose(product(device, m, n, k), "portable")
        blocks = choice.tile.blocks(m, n, choice.splits)
        assert blocks >= 0.7 * device.multiprocessors, (choice, blocks)


def test_the_choice_is_the_cheapest_candidate():
    problem = product(A100, 5, 4096, 4096)
    choice = choose(problem, "portable")
    prices = {(tile, splits): us for us, tile, splits in candidates(problem, "bfloat16")}
    assert prices[choice.tile, choice.splits] == min(prices.values())
    assert len(prices) > 5


@pytest.mark.parametrize(
    "m, n, k, warps, pieces, splits",  # fastest when measured
    [(16, 28672, 8192, 4, 2, 1), (16, 8192, 28672, 4, 1, 2), (16, 8192, 8192, 16, 1, 1), (32, 4096, 4096, 8, 1, 1)],
)
def test_the_estimate_finds_what_was_measured_fastest(m, n, k, warps, pieces, splits):
    choice = choose(product(H200, m, n, k), "portable")
    assert (choice.tile.warps_n * choice.tile.warps_k, choice.tile.pieces, choice.splits) == (warps, pieces, splits)


@pytest.mark.parametrize(
    "address, useful, wanted",
    [(0, (16, 8, 1), 16), (8, (16, 8, 1), 8), (12, (16, 8, 1), 1), (4, (4, 1), 4), (6, (16, 2), 2), (-16, (16, 2), 16)],
)
def test_alignment_is_the_widest_useful_divisor(address, useful, wanted):
    assert alignment_of(address, useful) == wanted


def test_what_a_kernel_does_not_read_does_not_make_it_another_kernel():
    tile = PortableTile(2, 4, 2, 1, 1, 4, 1)
    assert tile.spec("bfloat16", "nvfp4", Alignment(16, 1, 16, 4)) == tile.spec("bfloat16", "nvfp4", Alignment())
    assert tile.spec("bfloat16", "prepacked", Alignment(16, 4, 16, 1)) == tile.spec(
        "bfloat16", "prepacked", Alignment()
    )
    assert tile.spec("nvfp4", "nvfp4", Alignment(16, 1, 16, 4)) != tile.spec("nvfp4", "nvfp4", Alignment())


@pytest.fixture
def tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4RT_CACHE_DIR", str(tmp_path))


def test_the_fastest_measured_tile_is_remembered_for_its_token_range_only(tuning):
    problem = product(A100, 5)
    tried = autotune.choices(problem)
    assert len(tried) > 5
    favourite = tried[3]
    best, microseconds = autotune.tune(problem, lambda choice: 10.0 if choice == favourite else 20.0)
    assert (best, microseconds) == (favourite, 10.0)
    found = autotune.remembered(problem._replace(m=8))
    assert (found.tile, found.splits) == (favourite.tile, favourite.splits)
    assert "measured: 10.0 us" in found.why
    for other in (product(A100, 9), product(RTX_4090, 5), product(A100, 5, n=4112), product(A100, 5, a_kind="nvfp4")):
        assert autotune.remembered(other) is None
    assert autotune.remembered(problem, "reference") is None


def test_a_decode_tile_is_remembered_for_more_tokens_than_the_kernel_is_asked_for(tuning):
    problem = product(H200, 20, b_kind="prepacked")
    best, _ = autotune.tune(problem, lambda choice: 10.0 if choice.kernel == "decode" else 20.0)
    found = autotune.remembered(problem)
    assert (found.kernel, found.tile, found.repack) == ("decode", best.tile, False)
    assert autotune.remembered(problem, "decode") == found
    assert autotune.remembered(problem, "small") is None
    assert autotune.remembered(problem._replace(bulk=False)) is None


@pytest.mark.parametrize("m", [17, 40, 90])
def test_a_tile_measured_for_fewer_tokens_is_not_used_for_more(tuning, m):
    problem = product(H200, m, b_kind="prepacked")
    best, _ = autotune.tune(problem, lambda choice: 10.0)
    most = best.tile.max_tokens  # within the range of m that one entry is for
    assert autotune.entry_key(problem._replace(m=most + 1)) == autotune.entry_key(problem)
    assert autotune.remembered(problem._replace(m=most)).tile == best.tile
    assert autotune.remembered(problem._replace(m=most + 1)) is None


def entry_of(problem):
    """What is kept of a measurement of the problem."""
    autotune.tune(problem, lambda choice: 10.0)
    assert autotune.remembered(problem) is not None
    return json.loads(autotune.tuning_file(problem).read_text())


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', "[" * 200000, "7", None])
def test_a_broken_file_of_tiles_is_as_good_as_none(tuning, content):
    problem = product(A100, 5)
    entry_of(problem)
    path = autotune.tuning_file(problem)
    path.unlink() if content is None else path.write_text(content)
    assert autotune.remembered(problem) is None


DECODE = asdict(DecodeTile(1, 2, 2, 3, row_warps=2, k_warps=4, warp_tiles=1))
ENTRY_FAULTS = [
    (A100, {"us": None}),
    (A100, {"us": "3.0"}),
    (A100, {"tile": "Gone"}),
    (A100, {"fields": {"warps_n": 1}}),
    (A100, {"fields": {"pieces": 0}}),
    (A100, {"fields": {"pieces": "1"}}),
    (A100, {"fields": {"pieces": 1.0}}),
    (A100, {"fields": {"stages": 1}}),
    (A100, {"fields": {"stages": 99}}),
    (A100, {"splits": 0}),
    (A100, {"splits": -3}),
    (A100, {"splits": 1000}),
    (A100, {"splits": "1"}),
    (A100, {"key": "another problem"}),
    (A100, {"tile": "DecodeTile", "fields": DECODE}),  # a kernel that the device has not
    (H200, {"tile": "PortableTile", "fields": asdict(PortableTile(2, 4, 2, 1, 1, 4, 1))}),  # one that cannot read b
    (H200, {"fields": {"row_warps": 1, "row_tiles": 2}}),
    (A100, {"splits": True}),
    (A100, {"fields": {"pieces": True}}),  # a macro would say so
    (H200, {"fields": {"token_tiles": 33}}),  # a copy brings at most 256 rows
    (H200, {"tile": "PrefillTile", "fields": asdict(PrefillTile(256, 1, 8, 4, 2, 4)) | {"raster_tokens": 130150525}}),
]


@pytest.mark.parametrize(("device", "change"), ENTRY_FAULTS, ids=[str(change)[:40] for _, change in ENTRY_FAULTS])
def test_an_edited_entry_is_as_good_as_none(tuning, device, change):
    problem = product(device, 5, b_kind="prepacked" if device is H200 else "nvfp4")
    entry = entry_of(problem)
    whole = "tile" in change or change.get("fields", {}).keys() == {"warps_n"}
    edited = entry | change
    if "fields" in change and not whole:
        edited["fields"] = entry["fields"] | change["fields"]
    autotune.tuning_file(problem).write_text(json.dumps(edited))
    assert autotune.remembered(problem) is None


def test_a_candidate_that_the_device_has_no_room_for_is_passed_over(tuning):
    problem = product(A100, 5)
    first, hopeless, *_ = autotune.choices(problem)

    def measure(choice):
        if choice == hopeless:
            raise MemoryError("out of memory")
        return 10.0 if choice == first else 20.0

    assert autotune.tune(problem, measure)[0] == first
    with pytest.raises(MemoryError):
        autotune.tune(problem, measure, [hopeless])


def test_an_empty_product_is_explained():
    explain = importlib.import_module("fp4rt.cuda.gemm.explain").explain
    for m, n in ((0, 16), (65, 0)):
        a, b = SimpleNamespace(shape=(m, 64)), SimpleNamespace(shape=(n, 64))
        for measure in (False, True):
            assert explain(a, b, measure, 0).why == f"m = {m}, n = {n}: nothing is launched"


def test_sizes_that_a_kernel_cannot_count_are_refused(monkeypatch):
    with pytest.raises(ShapeError, match="k = 2147483648 columns"):
        choose(product(H200, 1, n=16, k=2**31))
    assert choose(product(H200, 2**31 + 256, n=8, k=16, b_kind="prepacked")).kernel == "portable"
    with pytest.raises(ShapeError, match="columns: these operands may have 268431360"):
        choose(product(H200, 32, n=16, k=2**28, a_kind="nvfp4"))
    assert choose(product(H200, 32, n=16, k=268431360, a_kind="nvfp4")).activations == "bf16"
    monkeypatch.setattr(KernelSpec, "on", lambda spec, device: None)
    _, (_, spans, _), _ = passes._prepared.__wrapped__(0, 0, (32, 268431360), 268431360 // 16, "linear")
    assert spans <= 65535


def test_entries_of_many_processes_do_not_write_over_each_other(tuning):
    problems = [product(A100, 5, n=16 * i) for i in range(1, 9)]
    for problem in problems:
        autotune.remember(problem, choose(problem), 10.0)
    assert len({autotune.tuning_file(problem) for problem in problems}) == len(problems)
    assert all(autotune.remembered(problem) for problem in problems)


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_measurement(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP4RT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="FP4RT_CACHE_DIR"):
        best, microseconds = autotune.tune(product(A100, 5), lambda choice: 10.0)
    assert best.kernel == "portable"
    assert microseconds == 10.0


def test_a_remembered_tile_that_no_longer_fits_shared_memory_is_measured_again(tuning):
    problem = product(H200, 300, b_kind="prepacked")
    entry = entry_of(problem)
    assert entry["tile"] == "PrefillTile"
    entry["fields"]["activation_stages"] = 16
    autotune.tuning_file(problem).write_text(json.dumps(entry))
    assert autotune.remembered(problem) is None


def test_a_remembered_cluster_is_not_used_where_k_has_nothing_for_its_second_block(tuning):
    problem = product(H200, 5, k=512, b_kind="prepacked")
    entry = entry_of(problem)
    entry["fields"] |= {"k_cluster": 2, "stage_groups": 1}
    autotune.tuning_file(problem).write_text(json.dumps(entry))
    assert autotune.remembered(problem).tile.k_cluster == 2
    short = problem._replace(k=256)
    autotune.tuning_file(short).write_text(json.dumps(entry | {"key": autotune.entry_key(short)}))
    assert autotune.remembered(short) is None


def test_remembered_splits_whose_sums_take_more_blocks_than_a_launch_has_are_not_used(tuning):
    problem = product(A100, 2**21, n=2**20)
    once = choose(problem)
    autotune.remember(problem, once, 10.0)
    assert autotune.remembered(problem).splits == once.splits == 1
    autotune.remember(problem, replace(once, splits=2), 10.0)
    assert autotune.remembered(problem) is None
    fewer = problem._replace(m=2**21 - 1)
    assert autotune.entry_key(fewer) == autotune.entry_key(problem)
    assert autotune.remembered(fewer).splits == 2


@pytest.mark.parametrize("change", [{"stages": 1}, {"pieces": 0}, {"warps_n": 16}, {"pieces": 3}], ids=str)
def test_what_the_portable_kernel_cannot_compute_is_refused(change):
    with pytest.raises(ShapeError, match="choose another tile"):
        replace(PortableTile(2, 4, 2, 1, 1, 4, 1), **change)


def test_rows_that_repeat_or_overlap_are_not_for_the_copy_engine():
    rows = np.zeros((8, 64), np.float16)
    steps = {(8, 64): rows, (1, 64): rows[:1], (4, 32): rows[::2, :32]}
    for shape, array in steps.items():
        assert can_bulk_load(ArrayView(array, "cupy", CPU, "float16", shape, [s // 2 for s in array.strides], 1024))
    assert not can_bulk_load(ArrayView(rows, "cupy", CPU, "float16", (8, 64), (0, 1), 1024))
    assert not can_bulk_load(ArrayView(rows, "cupy", CPU, "float16", (8, 64), (8, 1), 1024))
    assert not can_bulk_load(ArrayView(rows, "cupy", CPU, "float16", (8, 64), (-64, 1), 1024))
    assert not can_bulk_load(ArrayView(rows, "cupy", CPU, "float16", (8, 64), (64, 1), 1026))
