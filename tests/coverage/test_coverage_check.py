"""Planted faults are found, by kind, count and place; honest writers are not accused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4rt
from fp4rt import coverage
from fp4rt.coverage import PATTERNS, CoverageError, Output
from fp4rt.errors import DtypeError, ShapeError
from fp4rt.layout import LAYOUTS
from fp4rt.pool import PaddingTag, data_tag, scale_tag

M, N, PADDED_N = 150, 80, 96
TAGS = {name: scale_tag(name, M, N, PADDED_N) for name in LAYOUTS}
PARTS = [(name, part) for name in LAYOUTS for part in ("padding", "valid part")]


def scales_of(tag: PaddingTag) -> Output:
    return Output(np.empty(tag.physical, np.uint8), tag, "scales")


def honest(tag: PaddingTag):
    """A kernel that writes 0x38 to every valid byte and 0 to the padding."""

    def run(out: np.ndarray) -> None:
        out.reshape(-1)[:] = np.where(tag.padding_mask(), 0, 0x38)

    return run


def skip(tag: PaddingTag, offset: int):
    """The same, but for one byte."""

    def run(out: np.ndarray) -> None:
        flat = out.reshape(-1)
        values = np.where(tag.padding_mask(), 0, 0x38)
        flat[:offset], flat[offset + 1 :] = values[:offset], values[offset + 1 :]

    return run


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_an_honest_kernel_is_covered(layout):
    verdict = coverage.check(honest(TAGS[layout]), scales_of(TAGS[layout]))
    assert verdict
    assert verdict.missed == 0
    assert str(verdict).startswith("coverage holds")


@pytest.mark.parametrize("layout, part", PARTS)
@pytest.mark.parametrize("which", [0, 1, -1])
def test_one_missed_byte_is_found_with_its_row_and_column(layout, part, which):
    tag = TAGS[layout]
    offset = int(np.flatnonzero(tag.padding_mask() == (part == "padding"))[which])
    verdict = coverage.check(skip(tag, offset), scales_of(tag))
    found = verdict["scales"].missed
    row, column = LAYOUTS[layout].coordinates(offset, PADDED_N // 16)
    assert not verdict
    assert (found.count, found.in_padding) == (1, part == "padding")
    assert (found.first.offset, found.first.row, found.first.column) == (offset, row, column)
    for words in (f"(row {row}, column {column}), in the {part}", "padding written by the kernel", layout):
        assert words in str(verdict)


@pytest.mark.parametrize("value", PATTERNS)
def test_a_value_equal_to_a_poison_is_no_miss_and_hides_none(value):
    def run(out: np.ndarray) -> None:
        out[:] = value
        out[1, 2] = value ^ 0xFF

    assert coverage.check(run, np.empty((3, 4), np.uint8))

    def run_but_one(out: np.ndarray) -> None:
        out[0], out[2], out[1, :2], out[1, 3:] = value, value, value, value

    verdict = coverage.check(run_but_one, np.empty((3, 4), np.uint8))
    assert verdict["output"].missed.first.offset == 6
    assert verdict.missed == 1


@pytest.mark.parametrize("value", [*PATTERNS, 0])
@pytest.mark.parametrize("offset", [-1, -64, 12, 200])
def test_a_write_outside_is_found_whatever_its_value(value, offset):
    def run(out: np.ndarray) -> None:
        out[:] = 1
        around = np.lib.stride_tricks.as_strided(out.reshape(-1), (1000,), (1,)) if offset >= 0 else before(out)
        around[offset] = value

    def before(out: np.ndarray) -> np.ndarray:
        backwards = np.lib.stride_tricks.as_strided(out.reshape(-1), (1000,), (-1,))
        return backwards[::-1][:-1]  # [-1] is the byte before the array

    verdict = coverage.check(run, np.empty((3, 4), np.uint8))
    assert verdict["output"].outside == (1, offset)
    assert f"outside of the array: 1 byte, first at offset {offset:+d}" in str(verdict)


def test_one_byte_is_said_in_the_singular():
    verdict = coverage.check(lambda out: None, np.empty(1, np.uint8))
    assert "output, 1 byte: \n    never written: 1 byte (0 in the padding, 1 in the valid part)" in str(verdict)
    tag = PaddingTag((1, 1), (1, 2), writer="caller")
    verdict = coverage.check(lambda out: out[:, :1].fill(1), np.empty((1, 2), np.uint8), tag=tag)
    assert "output, 2 bytes: covered; 1 padding byte left to the caller" in str(verdict)
    with pytest.raises(ShapeError, match="output has 1 byte, its tag's extent"):
        coverage.check(lambda out: None, np.empty(1, np.uint8), tag=tag)


def test_writes_between_the_elements_of_a_strided_array_are_outside():
    base = np.empty((6, 8), np.uint16)

    def run(out: np.ndarray) -> None:
        out[:] = 1
        np.lib.stride_tricks.as_strided(out, (6, 8), (16, 2))[2, 5] = 7

    verdict = coverage.check(run, base[:, :4])
    assert verdict["output"].outside == (2, 2 * 16 + 5 * 2)


@pytest.mark.parametrize("change", [lambda old: old, lambda old: old | 1, lambda old: old + 1])
def test_a_value_made_of_what_the_memory_held_is_found(change):
    def run(out: np.ndarray) -> None:
        old = change(out[2].copy())
        out[:] = 5
        out[2, 1:] = old[1:]

    output = coverage.check(run, np.empty((3, 4), np.uint8))["output"]
    assert output.missed.count + output.dependent.count == 3
    assert not output.ok


def test_a_nibble_left_alone_is_found():
    def run(out: np.ndarray) -> None:
        out[:] = 0x77
        out[-1] = (out[-1] & 0xF0) | 0x07  # was written: fine
        out[0] = 0x70

    def half(out: np.ndarray) -> None:
        low = out[3] & 0x0F
        out[:] = 0x77
        out[3] = 0x70 | low

    assert coverage.check(run, np.empty(8, np.uint8))
    assert coverage.check(half, np.empty(8, np.uint8))["output"].dependent.first.offset == 3


def test_padding_written_with_something_else_than_zero_breaks_the_tag():
    tag = TAGS["128x4"]

    def run(out: np.ndarray) -> None:
        out[:] = 0x38

    verdict = coverage.check(run, scales_of(tag))
    assert verdict["scales"].padding_set.count == tag.padding_mask().sum()
    assert verdict.missed == 0
    assert not verdict


@pytest.mark.parametrize("writer", ["pool", "caller"])
def test_padding_that_is_somebody_elses_may_be_left_but_the_valid_part_may_not(writer):
    tag = scale_tag("8x4", 3, 48, 48, writer)
    valid = np.flatnonzero(~tag.padding_mask())

    def run(out: np.ndarray) -> None:
        out.reshape(-1)[valid] = 0x38

    def run_but_one(out: np.ndarray) -> None:
        out.reshape(-1)[valid[:-1]] = 0x38

    verdict = coverage.check(run, scales_of(tag))
    assert verdict
    assert f"23 padding bytes left to the {writer}" in str(verdict)
    assert coverage.check(run_but_one, scales_of(tag))["scales"].missed.in_valid_part == 1


def test_data_and_scales_of_a_quantized_tensor_are_checked_by_their_names():
    fp4rt = pytest.importorskip("fp4rt")
    x = np.ones((3, 50), np.float32)
    q = fp4rt.quantize(x, padded_n=64)

    def forget(out) -> None:
        fp4rt.quantize(x, padded_n=64, out=out)
        out.data[1, 30] = PATTERNS[int((seen := forget.__dict__).setdefault("runs", 0))]
        seen["runs"] += 1

    verdict = coverage.check(forget, q)
    assert verdict["scales"].ok
    assert verdict["global_scale"].ok
    first = verdict["data"].missed.first
    assert (first.row, first.column, first.padding) == (1, 30, True)


def test_mappings_and_sequences_choose_how_the_callable_is_called():
    def run(a: np.ndarray, b: np.ndarray) -> None:
        a[:], b[:-1] = 1, 2

    arrays = np.empty(4, np.uint8), np.empty(5, np.float32)
    by_name = coverage.check(run, {"b": arrays[1], "a": arrays[0]})
    assert (by_name["a"].ok, by_name["b"].missed.count) == (True, 4)
    by_place = coverage.check(run, list(arrays))
    assert (by_place["output 0"].ok, by_place["output 1"].missed.count) == (True, 4)
    with pytest.raises(KeyError, match="no output 'c'; there are b, a"):
        by_name["c"]


@pytest.mark.parametrize(
    "array",
    [
        np.empty((5, 7), np.float64)[::-1, ::3],
        np.empty((3, 4), ml_dtypes.bfloat16),
        np.empty((3, 4), ml_dtypes.float8_e4m3fn),
        np.empty((), np.float32),
        np.empty((0, 4), np.uint8),
        np.asfortranarray(np.empty((3, 4), np.int16)),
    ],
    ids=["reversed and strided", "bfloat16", "float8", "scalar", "empty", "column-major"],
)
def test_the_twin_is_like_the_array(array):
    seen = []

    def run(out: np.ndarray) -> None:
        seen.append((type(out), out.dtype, out.shape, out.strides if out.size else ()))
        out[...] = 1

    assert coverage.check(run, array)
    assert set(seen) == {(np.ndarray, array.dtype, array.shape, array.strides if array.size else ())}


def test_torch_tensors_are_handed_over_as_torch_tensors():
    torch = pytest.importorskip("torch", reason="needs torch")
    like = torch.empty((6, 8), dtype=torch.bfloat16)[:, 1:7:2]

    def run(out) -> None:
        assert (out.dtype, out.shape, out.stride()) == (like.dtype, like.shape, like.stride())
        out[:] = 1
        out[4, 2] = float("nan")

    def run_but_one(out) -> None:
        out[:4], out[5:], out[4, :2] = 1, 1, 1

    assert coverage.check(run, like)
    first = coverage.check(run_but_one, like)["output"].missed
    assert (first.count, first.first.row, first.first.column) == (2, 4, 4)


def test_in_place_checks_the_arrays_themselves_and_says_what_it_cannot_see():
    mine = np.empty((4, 6), np.uint16)[:, ::2]

    def run(out: np.ndarray) -> None:
        assert out is mine
        mine[:] = 3
        mine.base[0, 1] = 9  # between the elements: not seen

    verdict = coverage.check(run, mine, in_place=True)
    assert verdict
    assert "no guard bands" in str(verdict)
    assert coverage.check(lambda out: mine[:3].fill(3), mine, in_place=True).missed == 6


def test_allocations_of_a_call_are_checked_by_the_tags_they_carry():
    from fp4rt.pool import current_pool

    tag = TAGS["8x4"]

    def run() -> None:
        scales = current_pool().allocate(tag.nbytes, tag=tag).numpy(tag.physical)
        honest(tag)(scales)
        current_pool().allocate(100).numpy((100,))[:3] = 1  # a workspace may stay unwritten

    def run_but_one() -> None:
        scales = current_pool().allocate(tag.nbytes, tag=tag).numpy(tag.physical)
        skip(tag, 33)(scales)

    def run_outside() -> None:
        workspace = current_pool().allocate(100).numpy((100,))
        np.lib.stride_tricks.as_strided(workspace, (101,), (1,))[100] = 0

    assert coverage.check(run)
    assert coverage.check(run_but_one)["allocation 0 (8x4)"].missed.first.offset == 33
    assert coverage.check(run_outside)["allocation 0 (workspace)"].outside == (1, 100)


def test_calls_that_cannot_be_watched_are_refused():
    from fp4rt.pool import current_pool

    sizes = iter([100, 200])
    with pytest.raises(CoverageError, match="allocates differently in two runs"):
        coverage.check(lambda: current_pool().allocate(next(sizes)))
    with pytest.raises(CoverageError, match="allocates nothing from the current pool"):
        coverage.check(lambda: None)


def test_outputs_that_nothing_can_write_are_refused():
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        coverage.check(lambda out: None, frozen)
    with pytest.raises(ShapeError, match=r"has 12 bytes, its tag's extent \(8, 4\) has 32"):
        coverage.check(lambda out: None, Output(np.empty((3, 4), np.uint8), scale_tag("8x4", 3, 48, 48)))


def test_jax_arrays_are_refused_with_the_way_to_check_them():
    jax = pytest.importorskip("jax", reason="needs jax")
    with pytest.raises(DtypeError, match=r"JAX arrays cannot be written; check the call's allocations"):
        coverage.check(lambda out: None, jax.numpy.zeros(4))


def test_broken_verdict_raises_its_report_and_goes_to_json():
    verdict = coverage.check(lambda out: None, scales_of(TAGS["128x4"]))
    with pytest.raises(
        CoverageError, match=r"never written: 2048 bytes \(1298 in the padding, 750 in the valid part\)"
    ):
        verdict.raise_if_broken()
    said = json.loads(json.dumps(verdict.as_dict()))
    assert said["ok"] is False
    assert said["outputs"][0]["missed"] == {
        "count": 2048,
        "in_padding": 1298,
        "first": {"offset": 0, "row": 0, "column": 0, "padding": False},
    }


# Partitions.

ROWS = np.empty((10, 4), np.float16)


def rows(first: int, end: int):
    def write(out: np.ndarray) -> None:
        out[first:end] = 1

    return write


def test_disjoint_writers_that_meet_are_a_partition():
    verdict = coverage.check_partition({"decode": rows(0, 4), "prefill": rows(4, 10)}, ROWS)
    assert verdict
    assert "output by decode, 80 bytes: writes 32 of them" in str(verdict)


def test_a_gap_between_writers_is_named():
    verdict = coverage.check_partition({"decode": rows(0, 4), "prefill": rows(5, 10)}, ROWS)
    assert verdict.between == (
        "gap: no writer of decode, prefill writes 8 bytes (0 in the padding, 8 in the valid part), "
        "first byte 32 = (row 4, column 0), in the valid part",
    )


def test_an_overlap_of_writers_is_named_even_where_both_write_the_same():
    writers = {"decode": rows(0, 5), "prefill": rows(4, 8), "rest": rows(8, 10)}
    verdict = coverage.check_partition(writers, ROWS)
    assert len(verdict.between) == 1
    assert verdict.between[0].startswith("overlap: decode and prefill both write 8 bytes")
    assert not verdict


def test_a_writer_of_a_partition_that_leaves_the_buffer_is_named():
    def outside(out: np.ndarray) -> None:
        np.lib.stride_tricks.as_strided(out, (11, 4), out.strides)[4:11] = 1

    verdict = coverage.check_partition({"decode": rows(0, 4), "prefill": outside}, ROWS)
    assert verdict.between == ()
    assert verdict["output by prefill"].outside == (8, 80)
    assert not verdict


def test_partition_of_a_padded_buffer_says_where_the_gap_lies():
    tag = data_tag(4, 20, 32)

    def valid_columns(out: np.ndarray) -> None:
        out[:, :10] = 0x77

    def padding_of_three_rows(out: np.ndarray) -> None:
        out[:3, 10:] = 0

    writers = {"codes": valid_columns, "padding": padding_of_three_rows}
    verdict = coverage.check_partition(writers, np.empty((4, 16), np.uint8), tag=tag)
    assert "6 in the padding, 0 in the valid part" in verdict.between[0]
    assert "(row 3, column 10), in the padding" in verdict.between[0]


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 300),
    columns=st.integers(1, 12),
    layout=st.sampled_from(sorted(LAYOUTS)),
    draw=st.randoms(use_true_random=False),
)
def test_any_missed_byte_of_any_shape_is_found(m, columns, layout, draw):
    tag = scale_tag(layout, m, columns * 16, columns * 16)
    offset = draw.randrange(tag.nbytes)
    found = coverage.check(skip(tag, offset), scales_of(tag))["scales"].missed
    assert (found.count, found.first.offset, found.first.padding) == (1, offset, bool(tag.is_padding(offset)))
    assert coverage.check(honest(tag), scales_of(tag))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, q, tag: coverage.check(lambda a: None, {"a": x}, tag=tag), "tag is that of a single array"),
        (lambda x, q, tag: coverage.check(lambda a: None, q, tag=tag), "tag is that of a single array"),
        (lambda x, q, tag: coverage.check(lambda *a: None, [coverage.Output(x, name="a")] * 2), "have one name"),
        (lambda x, q, tag: coverage.check(lambda a: None, x, guard=-1), "guard is a number of bytes"),
        (lambda x, q, tag: coverage.check_partition({"w": lambda a: None}, q), "check_partition takes one array"),
        (lambda x, q, tag: coverage.check_partition({}, x), "at least one writer"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_and_not_left_out(call, text):
    x = np.zeros((4, 16), np.uint8)
    with pytest.raises(ShapeError, match=text):
        call(x, fp4rt.quantize(np.ones((4, 16), np.float32)), PaddingTag((4, 16), (4, 16)))


def test_what_cannot_be_called_is_refused():
    out = np.zeros(4, np.uint8)
    with pytest.raises(DtypeError, match="check needs run as a callable, got NoneType"):
        coverage.check(None, out)
    with pytest.raises(DtypeError, match="writers as a mapping from names to callables, got list"):
        coverage.check_partition([lambda x: None], out)
    with pytest.raises(DtypeError, match="writer 'a' as a callable, got int"):
        coverage.check_partition({"a": 3}, out)
