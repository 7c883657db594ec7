"""Device arrays of every type and their way back, for the GPU tests. Everything here is compared as bits."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.cpu.reference import widen

BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32}


class Device:
    """CuPy for fp16, fp32 and bytes; bf16 as a torch tensor, or, with ``like_cupy``, through ml_dtypes."""

    def __init__(self):
        self.cupy = pytest.importorskip("cupy")

    def array(self, bits, dtype):
        """Patterns of ``dtype`` on the device, dense."""
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return self.cupy.asarray(np.ascontiguousarray(bits)).view(kind)

    def floats(self, values):
        return self.cupy.asarray(np.asarray(values, np.float32).reshape(-1))

    def host(self, array):
        """A device array's bytes as NumPy, of the array's shape where its type has one byte."""
        array = self.cupy.asarray(array)
        return array.view(self.cupy.uint8).get() if array.itemsize > 1 else array.get()


@pytest.fixture(scope="session")
def device():
    return Device()


@pytest.fixture(scope="session")
def as_host():
    """Patterns as a host array that fp4rt takes."""

    def as_host(bits, dtype):
        import ml_dtypes

        return bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))

    return as_host


def describe_difference(what, found, wanted):
    wrong = np.flatnonzero(found.reshape(-1) != wanted.reshape(-1))
    at = tuple(int(i) for i in np.unravel_index(wrong[0], wanted.shape))
    got, want = found.reshape(-1)[wrong[0]], wanted.reshape(-1)[wrong[0]]
    return f"{what}: {wrong.size} of {wanted.size} differ, first at {at}: got {got:#x}, wanted {want:#x}"


@pytest.fixture(scope="session")
def assert_equal_bits():
    def assert_equal_bits(what, found, wanted):
        assert found.shape == wanted.shape, f"{what}: shape {found.shape}, wanted {wanted.shape}"
        if not np.array_equal(found, wanted):
            pytest.fail(describe_difference(what, found, wanted))

    return assert_equal_bits


@pytest.fixture(scope="session")
def check_quantize(device, as_host, assert_equal_bits):
    """Quantizes on both backends and compares every byte; ``out`` memory is poisoned. Returns the device's tensor."""

    def check(bits, dtype, global_scale, layout="128x4", padded_n=None, x=None, out=True):
        x = device.array(bits, dtype) if x is None else x
        wanted = fp4rt.quantize(
            as_host(np.ascontiguousarray(bits), dtype), global_scale, layout=layout, padded_n=padded_n
        )
        target = None
        if out:
            arrays = [device.cupy.full(a.shape, 0xA5, np.uint8) for a in (wanted.data, wanted.scales)]
            target = fp4rt.QuantizedTensor(*arrays, device.floats(0), wanted.shape, layout, wanted.padded_n)
        scale = global_scale if global_scale is None or isinstance(global_scale, float) else device.floats(global_scale)
        found = fp4rt.quantize(x, scale, layout=layout, padded_n=padded_n, out=target)
        what = f"{dtype} {bits.shape} {layout} padded_n={padded_n} gs={global_scale}"
        for part in ("data", "scales", "global_scale"):
            got, want = device.host(getattr(found, part)), getattr(wanted, part)
            assert_equal_bits(f"{what} {part}", got, want.view(np.uint8).reshape(got.shape))
        return found

    return check


@pytest.fixture(scope="session")
def random_bits():
    def random_bits(rng, m, n, dtype, special=0.002):
        from fp4rt.cpu.reference import round_to_bits

        values = rng.standard_normal((m, n)) * np.exp2(rng.integers(-8, 5, (m, 1)))
        values[rng.random((m, n)) < special] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 6.0, -1e-7])
        values[rng.random(m) < 0.05] = 0.0
        return round_to_bits(values.astype(np.float32), dtype)

    return random_bits


@pytest.fixture(scope="session")
def numbers():
    """fp32 values of patterns."""
    return widen
