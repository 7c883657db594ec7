"""Fill policies, and what the pool knows about padding that is still zero."""

from __future__ import annotations

import numpy as np
import pytest

from fp4rt.pool import PaddedPool, PaddingTag, scale_tag
from fp4rt.pool.upstream import host_bytes

TAG = scale_tag("128x4", 3, 48, 48)
POOL_TAG = scale_tag("128x4", 3, 48, 48, "pool")
CALLER_TAG = scale_tag("128x4", 3, 48, 48, "caller")
UNPADDED = scale_tag("linear", 3, 48, 48, "pool")


def content(buffer) -> set[int]:
    """The byte values in the buffer, without the pool's learning of it."""
    return set(np.unique(host_bytes(buffer.contract_pointer, buffer.nbytes)).tolist())


def dirty(fake, gpu, policy: str) -> PaddedPool:
    """A pool that holds one free block full of 0x7F."""
    pool = PaddedPool(policy, upstream=fake)
    buffer = pool.allocate(512, gpu)
    host_bytes(buffer.pointer, 512)[:] = 0x7F
    return pool


@pytest.mark.parametrize(
    "policy, tag, expected",
    [
        ("covered", None, 0x7F),
        ("covered", TAG, 0x7F),  # the kernel writes the padding
        ("covered", POOL_TAG, 0),
        ("covered", CALLER_TAG, 0x7F),
        ("zero", None, 0x7F),
        ("zero", TAG, 0),
        ("zero", POOL_TAG, 0),
        ("zero", CALLER_TAG, 0),
        ("empty", None, 0x7F),
        ("empty", TAG, 0x7F),
        ("empty", POOL_TAG, 0x7F),
        ("poison", None, 0xFF),
        ("poison", TAG, 0xFF),
        ("poison", POOL_TAG, 0xFF),
    ],
)
def test_policy_decides_what_memory_holds(fake, gpu, policy, tag, expected):
    pool = dirty(fake, gpu, policy)
    before = pool.stats()
    buffer = pool.allocate(512, gpu, 0, tag)
    assert content(buffer) == {expected}
    stats = pool.stats()
    assert stats.zero_fills == (expected == 0)
    assert stats.bytes_zeroed == 512 * (expected == 0)
    assert stats.poison_fills - before.poison_fills == (expected == 0xFF)


def test_covered_does_not_fill_what_has_no_padding(fake, gpu):
    pool = dirty(fake, gpu, "covered")
    assert content(pool.allocate(9, gpu, 0, UNPADDED)) == {0x7F}


def test_fill_touches_only_the_bytes_asked_for(fake, gpu):
    pool = dirty(fake, gpu, "zero")
    buffer = pool.allocate(32, gpu, 0, scale_tag("8x4", 3, 48, 48))
    assert content(buffer) == {0}
    assert set(host_bytes(buffer.pointer, 512)[32:].tolist()) == {0x7F}


def test_fill_is_queued_on_the_allocations_stream(fake, gpu):
    pool = PaddedPool("zero", upstream=fake)
    pointer = pool.allocate(512, gpu, 9, TAG).pointer
    assert fake.accesses[pointer] == {9: 1}


@pytest.mark.parametrize("policy, tag", [("zero", TAG), ("zero", POOL_TAG), ("covered", POOL_TAG)])
def test_padding_known_to_be_zero_is_not_zeroed_again(fake, gpu, policy, tag):
    pool = dirty(fake, gpu, policy)
    for _ in range(5):
        buffer = pool.allocate(512, gpu, 0, tag)
        mask = tag.padding_mask()
        memory = host_bytes(buffer.contract_pointer, 512)
        assert not memory[mask].any()
        memory[~mask] = 0x38  # a kernel that keeps the promise
        del buffer, memory
    stats = pool.stats()
    assert (stats.zero_fills, stats.bytes_zeroed, stats.zero_fills_avoided) == (1, 512, 4)


def touch_by_pointer(buffer):
    host_bytes(buffer.pointer, 512)[:] = 0x7F


def touch_on_another_stream(buffer):
    buffer.used_on(5)
    host_bytes(buffer.contract_pointer, 512)[:] = 0x7F


@pytest.mark.parametrize("touch", [touch_by_pointer, touch_on_another_stream])
def test_an_address_that_went_out_ends_the_knowledge(fake, gpu, touch):
    pool = PaddedPool("zero", upstream=fake)
    buffer = pool.allocate(512, gpu, 0, TAG)
    touch(buffer)
    del buffer
    buffer = pool.allocate(512, gpu, 0, TAG)
    assert content(buffer) == {0}
    assert pool.stats().zero_fills_avoided == 0


def test_a_numpy_array_ends_the_knowledge():
    pool = PaddedPool("zero")
    pool.allocate(512, tag=TAG).numpy((512,))[:] = 0x7F
    assert content(pool.allocate(512, tag=TAG)) == {0}
    assert pool.stats().zero_fills_avoided == 0


@pytest.mark.parametrize("between", [None, scale_tag("128x4", 4, 48, 48), scale_tag("8x4", 3, 48, 48)])
def test_use_without_a_tag_or_with_another_ends_the_knowledge(fake, gpu, between):
    pool = PaddedPool("zero", upstream=fake)
    pool.allocate(512, gpu, 0, TAG)
    pool.allocate(512, gpu, 0, between)
    pool.allocate(512, gpu, 0, TAG)
    assert pool.stats().zero_fills_avoided == 0


def test_a_longer_buffer_with_the_same_tag_is_filled_again(fake, gpu):
    pool = PaddedPool("zero", upstream=fake)
    pool.allocate(512, gpu, 0, scale_tag("8x4", 3, 48, 48))
    pool.allocate(400, gpu, 0, scale_tag("8x4", 3, 48, 48))
    assert pool.stats().zero_fills_avoided == 0


def test_a_caller_who_writes_the_padding_promises_nothing(fake, gpu):
    pool = PaddedPool("zero", upstream=fake)
    for _ in range(2):
        pool.allocate(512, gpu, 0, CALLER_TAG)
    assert pool.stats().zero_fills == 2


def test_a_block_with_the_knowledge_is_preferred(fake, gpu):
    pool = PaddedPool("zero", upstream=fake)
    other = PaddingTag((1, 1), (128, 4), "128x4")
    a, b = pool.allocate(512, gpu, 0, TAG), pool.allocate(512, gpu, 0, other)
    del a, b
    pool.allocate(512, gpu, 0, TAG)
    pool.allocate(512, gpu, 0, other)
    assert pool.stats().zero_fills_avoided == 2


def test_a_move_between_streams_keeps_the_knowledge(make_fake, gpu):
    pool = PaddedPool("zero", upstream=make_fake(capacity=512))
    pool.allocate(512, gpu, 1, TAG)
    assert content(pool.allocate(512, gpu, 12, TAG)) == {0}
    stats = pool.stats()
    assert (stats.moves, stats.zero_fills_avoided) == (1, 1)
