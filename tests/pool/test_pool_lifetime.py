"""A block is never handed out while any array made of it lives, exported or not, and comes back when the last dies."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

from fp4rt.errors import DtypeError
from fp4rt.pool import PaddedPool

ROUNDS = 200
NBYTES = 4096


def array_in(library: str, pool: PaddedPool):
    """An array of ``library`` over pool memory, full of 0x38; nothing else refers to the buffer."""
    array = pool.allocate(NBYTES).numpy((NBYTES,))
    array[:] = 0x38
    if library == "numpy":
        return array
    torch = pytest.importorskip("torch", reason="needs torch")
    return torch.from_numpy(array)


def in_use(pool: PaddedPool) -> int:
    return pool.stats().bytes_in_use


@pytest.fixture(params=["numpy", "torch"])
def library(request):
    return request.param


def scribble(pool: PaddedPool) -> None:
    """Takes and overwrites whatever the pool would hand out next."""
    for _ in range(2):
        pool.allocate(NBYTES).numpy((NBYTES,))[:] = 0x7F


def test_array_alone_keeps_its_memory(library):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        array = array_in(library, pool)
        scribble(pool)
        assert (array == 0x38).all()
        del array
    assert in_use(pool) == 0
    assert pool.stats().upstream_allocations == 2


def test_view_of_a_view_keeps_the_memory(library):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        part = array_in(library, pool).reshape(64, 64)[3:5, ::2]
        scribble(pool)
        assert (part == 0x38).all()
        del part
    assert in_use(pool) == 0


def test_export_keeps_the_memory_after_the_producer_is_dropped(library):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        consumer = np.from_dlpack(array_in(library, pool))
        scribble(pool)
        assert in_use(pool) == NBYTES
        assert (consumer == 0x38).all()
        del consumer
        assert in_use(pool) == 0


def test_two_exports_keep_it_until_both_are_gone(library):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        producer = array_in(library, pool)
        first, second = np.from_dlpack(producer), np.from_dlpack(producer)
        del producer, first
        scribble(pool)
        assert (second == 0x38).all()
        del second
        assert in_use(pool) == 0


def test_export_that_nobody_consumes_gives_the_memory_back(library):
    pool = PaddedPool()
    for _ in range(ROUNDS):
        capsule = array_in(library, pool).__dlpack__()
        scribble(pool)
        assert in_use(pool) == NBYTES
        del capsule
        assert in_use(pool) == 0


def test_export_from_torch_back_to_torch_keeps_the_memory():
    torch = pytest.importorskip("torch", reason="needs torch")
    pool = PaddedPool()
    for _ in range(ROUNDS):
        consumer = torch.from_dlpack(array_in("numpy", pool))
        scribble(pool)
        assert bool((consumer == 0x38).all())
        del consumer
        assert in_use(pool) == 0


def test_array_in_a_cycle_comes_back_with_the_collector():
    pool = PaddedPool()
    cycle = [array_in("numpy", pool)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert in_use(pool) == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_buffer_has_no_copies_that_would_give_its_memory_back_twice(duplicate):
    pool = PaddedPool()
    buffer = pool.allocate(1000)
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(buffer)
    del buffer
    assert pool.stats().bytes_in_use == 0


def test_memory_has_no_objects():
    with pytest.raises(DtypeError, match="holds references"):
        PaddedPool("poison").allocate(64).numpy((8,), object)
