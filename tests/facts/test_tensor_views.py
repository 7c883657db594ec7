"""A QuantizedTensor remembers how its arrays lie, and notices when they no longer do."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest

import fp4rt
from fp4rt import interop
from fp4rt.backend import QuantizedViews
from fp4rt.errors import ShapeError
from fp4rt.interop.arrays import dense_strides
from fp4rt.layout import get_layout


def in_pool_memory(pool):
    """A tensor (4, 32) over a host pool's memory, as the CUDA backend makes them."""

    def part(shape, dtype, name):
        buffer = pool.allocate(512)
        buffer.numpy((512,))[:] = 0
        strides = dense_strides(shape)
        return interop.ArrayView(buffer, "torch", interop.CPU, dtype, shape, strides, buffer.pointer, False, name)

    return fp4rt.QuantizedTensor.in_memory(
        QuantizedViews(
            part((4, 16), "uint8", "data"),
            part((4, 2), "uint8", "scales"),
            part((1,), "float32", "global_scale"),
            (4, 32),
            get_layout("linear"),
            32,
        )
    )


def test_arrays_over_pool_memory_are_made_when_asked_for_and_once():
    torch = pytest.importorskip("torch")
    q = in_pool_memory(fp4rt.PaddedPool())
    views = q.views()
    assert q.views() is views
    assert q.scales.shape == (4, 2)
    assert q.data.dtype == torch.uint8
    assert q.global_scale.dtype == torch.float32
    assert [q.data.data_ptr(), q.scales.data_ptr(), q.global_scale.data_ptr()] == [view.pointer for view in views[:3]]
    assert q.data is q.data
    assert copy.copy(q).data is q.data
    q.data.data = torch.ones_like(q.data)  # an array in the user's hands can move
    assert q.views().data.pointer == q.data.data_ptr() != views.data.pointer
    with pytest.raises(AttributeError, match="no attribute 'scale'"):
        _ = q.scale


def test_memory_goes_back_to_the_pool_with_the_last_array_or_tensor():
    pytest.importorskip("torch")
    pool = fp4rt.PaddedPool()
    q = in_pool_memory(pool)
    assert pool.stats().bytes_in_use == 3 * 512
    data = q.data
    del q
    assert pool.stats().bytes_in_use == 512
    del data
    assert pool.stats().bytes_in_use == 0
    q = in_pool_memory(pool)
    del q
    assert pool.stats().bytes_in_use == 0


def test_threads_that_ask_for_an_array_get_the_same_one():
    pytest.importorskip("torch")
    for _ in range(20):
        q, gate, found = in_pool_memory(fp4rt.PaddedPool()), threading.Barrier(8), []

        def ask(q=q, gate=gate, found=found):
            gate.wait()
            found.append(q.data)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(array is q.data for array in found)


def test_torch_memory_is_looked_at_once_until_it_moves():
    torch = pytest.importorskip("torch")
    q = fp4rt.quantize(torch.full((4, 32), 6.0), 1.0, layout="linear")
    first = q.views()
    assert q.views() is first
    q.data.set_(torch.zeros_like(q.data))
    assert q.views() is not first
    assert q.views().data.pointer == q.data.data_ptr()
    assert fp4rt.dequantize(q).abs().max() == 0


def test_an_array_that_became_read_only_is_refused_as_out():
    x = np.full((4, 32), 6, np.float32)
    q = fp4rt.quantize(x, 1.0)
    fp4rt.quantize(x, 1.0, out=q)
    q.scales.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        fp4rt.quantize(x, 1.0, out=q)
