"""Blocks, size classes, statistics, limit, trim, errors, and the pool that calls allocate from."""

from __future__ import annotations

import gc
import itertools
import sys
import threading

import numpy as np
import pytest

from fp4rt.device import Device
from fp4rt.errors import BackendUnavailable, DeviceError, DtypeError, LayoutError, OutOfMemoryError, ShapeError
from fp4rt.pool import PaddedPool, PaddingTag, current_pool, data_tag, scale_tag, use_pool
from fp4rt.pool.arena import size_class

KIB = 1024


def test_size_classes_hold_the_request_and_waste_at_most_an_eighth():
    sizes = [*range(20_000), *(2**k + d for k in range(14, 40) for d in (-1, 0, 1))]
    for nbytes in sizes:
        size = size_class(nbytes)
        assert size >= max(nbytes, 1)
        assert size % 512 == 0
        assert size_class(size) == size
        assert size - nbytes <= max(511, size // 8) or nbytes < 512


def test_size_classes_are_few():
    assert len({size_class(n) for n in range(1, 1 << 20, 64)}) <= 16 + 8 * 7


def test_a_dropped_buffer_is_handed_out_again(pool, gpu):
    first = pool.allocate(1000, gpu, 7)
    pointer = first.pointer
    del first
    again = pool.allocate(900, gpu, 7)
    assert again.pointer == pointer
    stats = pool.stats()
    assert (stats.allocations, stats.reuses, stats.upstream_allocations) == (2, 1, 1)


def test_two_living_buffers_never_share_memory(pool, gpu):
    buffers = [pool.allocate(700, gpu, 0) for _ in range(50)]
    pointers = sorted(b.pointer for b in buffers)
    assert all(b - a >= 1024 for a, b in itertools.pairwise(pointers))


def test_another_size_class_or_device_or_stream_gets_other_memory(pool, gpu):
    pointer = pool.allocate(1000, gpu, 1).pointer
    others = [pool.allocate(2000, gpu, 1), pool.allocate(1000, Device("cuda", 1), 1), pool.allocate(1000, gpu, 2)]
    assert pointer not in [b.pointer for b in others]


def test_statistics_add_up(pool, fake, gpu):
    a, b = pool.allocate(512, gpu), pool.allocate(1000, gpu)
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.bytes_held, stats.bytes_peak) == (1536, 1536, 1536)
    del a
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.bytes_held, stats.bytes_peak) == (1024, 1536, 1536)
    del b
    assert pool.trim() == 1536
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.bytes_held, stats.bytes_peak) == (0, 0, 1536)
    assert fake.held == 0
    assert stats["allocations"] == 2
    assert stats.as_dict()["bytes_peak"] == 1536


def test_trim_of_one_device_leaves_the_others(pool, gpu):
    pool.allocate(512, gpu)
    pool.allocate(512, Device("cuda", 1))
    assert pool.trim(Device("cuda", 1)) == 512
    assert pool.stats().bytes_held == 512


def test_nothing_is_a_size_too(pool, gpu):
    buffer = pool.allocate(0, gpu)
    assert buffer.nbytes == 0
    assert buffer.pointer != 0


def test_negative_size_is_an_error_that_says_so(pool, gpu):
    with pytest.raises(ShapeError, match="nbytes >= 0, got -1"):
        pool.allocate(-1, gpu)


def test_a_size_or_limit_that_is_no_integer_is_refused(pool, gpu):
    _ = pool.allocate(1, gpu), pool.allocate(512, gpu)  # sizes that it knows, to which True and 512.0 are equal
    for value in (1.5, 512.0, True, "5", None, [5], np.float64(512)):
        with pytest.raises(DtypeError, match=r"PaddedPool\.allocate needs nbytes as an integer, got"):
            pool.allocate(value, gpu)
        if value is not None:
            with pytest.raises(DtypeError, match="PaddedPool needs limit as an integer or None, got"):
                PaddedPool(limit=value)
    assert pool.allocate(np.int64(512), gpu).nbytes == 512
    assert PaddedPool(limit=np.uint32(512)).limit == 512


@pytest.mark.parametrize("nbytes", [2**62, sys.maxsize - 64, sys.maxsize, 2**63, 10**30])
def test_a_size_beyond_all_memory_is_refused_like_any_other_that_does_not_fit(nbytes):
    with pytest.raises(OutOfMemoryError, match=f"for a request of {nbytes} bytes on cpu"):
        PaddedPool().allocate(nbytes)


def test_limit_first_gives_back_what_is_free_then_refuses_readably(fake, gpu):
    pool = PaddedPool(upstream=fake, limit=8 * KIB)
    pool.allocate(4 * KIB, gpu)  # free at once
    kept = pool.allocate(6 * KIB, gpu)  # needs that memory back: 4 + 6 > 8
    assert fake.calls.count("free") == 1
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(4 * KIB, gpu)
    message = str(caught.value)
    for part in ("4096 bytes", "cuda:0", "in use 6 KiB", "held 6 KiB", "limit 8 KiB", "Drop results", "limit="):
        assert part in message
    assert isinstance(caught.value, MemoryError)
    del kept
    assert pool.allocate(8 * KIB, gpu).nbytes == 8 * KIB


def test_a_pool_without_a_limit_does_not_advise_to_raise_it(make_fake, gpu):
    with pytest.raises(OutOfMemoryError, match=r"no limit\. Drop results .* or trim\(\) other pools$"):
        PaddedPool(upstream=make_fake(capacity=1024)).allocate(4096, gpu)


def test_limit_smaller_than_the_request_names_both(fake, gpu):
    with pytest.raises(OutOfMemoryError, match=r"no 2 MiB .* limit 1 MiB"):
        PaddedPool(upstream=fake, limit=1 << 20).allocate(2 << 20, gpu)
    with pytest.raises(OutOfMemoryError, match="for a request of 1 byte on"):
        PaddedPool(upstream=fake, limit=0).allocate(1, gpu)


def test_full_upstream_gets_the_free_blocks_back_before_the_error(make_fake, gpu):
    fake = make_fake(capacity=10 * KIB)
    pool = PaddedPool(upstream=fake)
    pool.allocate(6 * KIB, gpu)
    big = pool.allocate(8 * KIB, gpu)
    assert fake.held == 8 * KIB
    with pytest.raises(OutOfMemoryError, match="no limit") as caught:
        pool.allocate(4 * KIB, gpu)
    assert "the fake device is full" in str(caught.value.__cause__)
    assert big.nbytes == 8 * KIB


def test_a_failed_allocation_changes_nothing(make_fake, gpu):
    pool = PaddedPool(upstream=make_fake(capacity=KIB))
    with pytest.raises(OutOfMemoryError):
        pool.allocate(4 * KIB, gpu)
    stats = pool.stats()
    assert (stats.allocations, stats.bytes_in_use, stats.bytes_held) == (0, 0, 0)


def test_memory_outlives_the_pools_name_and_goes_when_the_last_buffer_does(fake, gpu):
    pool = PaddedPool(upstream=fake)
    buffer = pool.allocate(512, gpu)
    pool.allocate(512, gpu)
    del pool
    gc.collect()
    assert fake.held == 1024
    fake.work(0, buffer.pointer)
    del buffer
    gc.collect()
    assert fake.held == 0


def test_unknown_fill_and_negative_limit_are_refused():
    with pytest.raises(ValueError, match=r"'zeros'; use one of 'covered', 'zero', 'empty', 'poison'"):
        PaddedPool(fill="zeros")
    with pytest.raises(ShapeError, match="-5"):
        PaddedPool(limit=-5)


def test_upstream_of_one_device_kind_leaves_the_host_to_numpy(pool):
    assert pool.allocate(10).numpy((10,)).nbytes == 10


def test_kind_without_an_upstream_says_what_to_import():
    with pytest.raises(BackendUnavailable, match=r"'tpu' is registered; import fp4rt.tpu first, or pass upstream="):
        PaddedPool().allocate(1, Device("tpu", 0))


def test_object_that_is_no_allocator_is_refused_by_name():
    with pytest.raises(DeviceError, match="upstream of type dict is no allocator; wanted"):
        PaddedPool(upstream={})


def test_a_cupy_pool_serves_devices_and_leaves_the_host_to_numpy():
    cupy = pytest.importorskip("cupy", reason="needs cupy")
    pool = PaddedPool(upstream=cupy.cuda.MemoryPool())
    assert pool.allocate(10).numpy((10,)).nbytes == 10
    assert pool.upstream("cuda").kind == "cuda"


def test_calls_allocate_from_the_innermost_pool_and_threads_from_the_common_one():
    common = current_pool()
    outer, inner = PaddedPool(), PaddedPool()
    seen = []
    with use_pool(outer) as entered:
        assert entered is outer
        with use_pool(inner):
            assert current_pool() is inner
            thread = threading.Thread(target=lambda: seen.append(current_pool()))
            thread.start()
            thread.join()
        assert current_pool() is outer
    assert current_pool() is common
    assert seen == [common]


def test_use_pool_refuses_what_is_no_pool_at_once():
    with pytest.raises(DtypeError, match=r"got 'zero'; make one with fp4rt\.PaddedPool\(fill='zero'\)"):
        use_pool("zero")
    for value in (None, PaddedPool, np.zeros(3)):
        with pytest.raises(DtypeError, match="use_pool needs a PaddedPool, got"):
            use_pool(value)


def test_one_use_pool_may_be_entered_by_threads_whose_blocks_overlap():
    entered, found = use_pool(PaddedPool()), []
    first_in, first_out = threading.Event(), threading.Event()
    common = current_pool()

    def first():
        with entered:
            first_in.set()
            assert second_in.wait(20)
        found.append(current_pool())
        first_out.set()

    def second():
        assert first_in.wait(20)
        with entered as pool:
            second_in.set()
            assert first_out.wait(20)
            found.append(current_pool() is pool)
        found.append(current_pool())

    second_in = threading.Event()
    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [common, True, common]


def test_use_pool_ends_with_an_error_too():
    common, pool = current_pool(), PaddedPool()

    def fail() -> None:
        with use_pool(pool):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert current_pool() is common


def test_host_memory_is_aligned_and_typed():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    buffer = PaddedPool().allocate(4 * 6 * 2)
    array = buffer.numpy((4, 6), ml_dtypes.bfloat16)
    array[...] = 1.5
    assert buffer.pointer % 64 == 0
    assert array.ctypes.data == buffer.pointer
    assert array.flags.writeable
    assert (buffer.numpy((24,), np.uint16) == 0x3FC0).all()


def test_array_larger_than_its_buffer_is_refused():
    with pytest.raises(ShapeError, match=r"\(5,\) of float32 needs 20 bytes, the buffer has 16"):
        PaddedPool().allocate(16).numpy((5,), np.float32)
    with pytest.raises(ShapeError, match=r"\(1,\) of uint8 needs 1 byte, the buffer has 0"):
        PaddedPool().allocate(0).numpy((1,), np.uint8)


def test_device_memory_is_no_numpy_array(pool, gpu):
    with pytest.raises(DeviceError, match="host memory, got a buffer on cuda:0"):
        pool.allocate(16, gpu).numpy((16,))


def test_buffer_says_where_it_is_and_what_it_carries(pool, gpu):
    tag = scale_tag("128x4", 3, 48, 48)
    buffer = pool.allocate(512, gpu, 5, tag)
    assert (buffer.device, buffer.stream, buffer.tag, buffer.nbytes) == (gpu, 5, tag, 512)
    assert "512 bytes" in repr(buffer)
    assert "(1 byte at" in repr(pool.allocate(1, gpu))
    assert "cuda:0" in repr(buffer)
    assert "'covered'" in repr(pool)


@pytest.mark.parametrize(
    "layout, physical, padding", [("128x4", (128, 4), 512 - 9), ("8x4", (8, 4), 32 - 9), ("linear", (3, 3), 0)]
)
def test_scale_tag_knows_its_padding(layout, physical, padding):
    tag = scale_tag(layout, 3, 48, 48)
    assert (tag.valid, tag.physical, tag.nbytes) == ((3, 3), physical, physical[0] * physical[1])
    assert tag.padding_mask().sum() == padding
    assert tag.has_padding == bool(padding)


def test_tag_finds_row_and_column_of_a_swizzled_byte():
    tag = scale_tag("128x4", 130, 64, 64)
    offset = 512 + 16 + 2  # second row of tiles; row 1 there, column 2
    assert tag.coordinates(offset) == (129, 2)
    assert not tag.is_padding(offset)
    assert tag.is_padding(offset + 16)  # row 130


def test_data_tag_counts_padded_columns():
    tag = data_tag(2, 50, 64)
    assert (tag.valid, tag.physical) == ((2, 25), (2, 32))
    assert tag.padding_mask().sum() == 2 * 7


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (((3, 3), (2, 4)), ShapeError, "0 <= valid <= physical"),
        (((3, 3), (120, 4), "128x4"), ShapeError, r"pass physical=\(128, 4\)"),
        (((3, 3), (3, 3), "4x4"), LayoutError, "unknown scale layout '4x4'"),
        (((3, 3), (3, 3), "linear", "me"), LayoutError, "unknown writer 'me'; use one of kernel, pool, caller"),
    ],
)
def test_tag_that_cannot_be_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        PaddingTag(*arguments)


def test_tag_larger_than_the_buffer_is_refused_and_the_block_comes_back(pool, gpu):
    with pytest.raises(ShapeError, match=r"extent \(128, 4\) is larger than nbytes = 500"):
        pool.allocate(500, gpu, 0, scale_tag("128x4", 3, 48, 48))
    assert pool.stats().bytes_in_use == 0


@pytest.mark.parametrize("extent", [None, 5, (1,), (1, 1, 1), "ab", (1.0, 1)])
def test_a_tag_of_something_else_than_two_numbers_is_refused(extent):
    with pytest.raises(DtypeError, match=r"valid as \(rows, columns\), got"):
        PaddingTag(extent, (2, 2))
    with pytest.raises(DtypeError, match=r"physical as \(rows, columns\), got"):
        PaddingTag((1, 1), extent)


def test_tags_of_lists_and_tuples_are_one():
    assert PaddingTag([1, 1], np.array([2, 2])) == PaddingTag((1, 1), (2, 2))
    assert len({PaddingTag([1, 1], [2, 2]), PaddingTag((1, 1), (2, 2))}) == 1


def test_an_array_is_no_fill_policy():
    with pytest.raises(ValueError, match="unknown fill"):
        PaddedPool(np.zeros(2))


def test_a_name_of_a_device_is_no_device():
    pool = PaddedPool()
    for call in (
        lambda: pool.allocate(16, "cpu"),
        lambda: pool.trim("cpu"),
        lambda: pool.retire_stream("cpu", 0),
    ):
        with pytest.raises(DeviceError, match=r"needs device as a fp4rt\.device\.Device, .*got 'cpu'"):
            call()
    with pytest.raises(DtypeError, match="capture_id as an integer or None, got 'x'"):
        pool.release_captures("x")
    assert pool.allocate(16).nbytes == 16
