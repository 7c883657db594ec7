"""Memory that another library has given back while its work goes on: short of memory, a call waits for it."""

from __future__ import annotations

import pytest

import fp4rt
from fp4rt.cuda.results import new_memory
from fp4rt.errors import OutOfMemoryError
from fp4rt.interop import Device, streams
from fp4rt.pool import PaddedPool
from tests.pool.conftest import FakeUpstream

GPU = Device("cuda", 0)


@pytest.fixture
def full(driver):
    """A pool whose only block is held for JAX."""
    pool = PaddedPool(upstream=FakeUpstream(), limit=1024)
    streams.hold_until_idle(pool.allocate(1024, GPU), GPU)
    with fp4rt.use_pool(pool):
        yield pool


def test_what_jax_gave_back_is_waited_for_where_memory_is_short(full):
    assert new_memory((1024,), "uint8", GPU, 0).nbytes == 1024
    assert full.stats().upstream_allocations == 1


def test_while_a_graph_is_captured_nothing_is_waited_for(full, driver):
    driver.capturing = True
    with pytest.raises(OutOfMemoryError):
        new_memory((1024,), "uint8", GPU, 16)
    assert driver.named("cuCtxRecordEvent", "cuEventSynchronize") == []


def test_where_nothing_was_given_back_the_first_error_stays(driver):
    with (
        fp4rt.use_pool(PaddedPool(upstream=FakeUpstream(), limit=1024)),
        pytest.raises(OutOfMemoryError, match="limit 1 KiB"),
    ):
        new_memory((2048,), "uint8", GPU, 0)
