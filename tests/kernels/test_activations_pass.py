"""The pass that decodes NVFP4 activations, thread after thread on the host, launched as the CUDA backend launches it:
every bf16 number, and no byte beside them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from fp4rt.cpu import reference
from fp4rt.cuda.gemm import passes
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.format import BLOCK, E2M1, E4M3
from fp4rt.layout import LAYOUTS, ceil_div

GUARD = 0xA5A5  # no number that the pass writes: it would have more mantissa bits
SHAPES = [(1, 16, 1), (3, 50, 4), (7, 4144, 260), (131, 208, 16), (9, 2064, 129)]  # m, k, block columns in memory
MANY = (257, 4096, 256)  # enough blocks for four pieces a thread


class HostKernel:
    """A kernel of the pass, built for the host."""

    def __init__(self, spec, emulate):
        self.pieces = dict(spec.defines)["PIECES"]
        self.library = emulate("dequantize_activations.cpp", *(f"-D{name}={value}" for name, value in spec.defines))

    def launch_struct(self, grid, threads, arguments, values, stream):
        rows, spans, _ = grid
        self.library.run(rows, spans, ctypes.c_char_p(arguments.pack(*values)))


@pytest.fixture
def launched(emulate, monkeypatch):
    """The kernels that have been asked for."""
    found = []

    def on_host(spec, device):
        found.append(HostKernel(spec, emulate))
        return found[-1]

    monkeypatch.setattr(KernelSpec, "on", on_host)
    passes._prepared.cache_clear()
    yield found
    passes._prepared.cache_clear()


@pytest.mark.parametrize("misalignment", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_value_is_code_times_scale_and_nothing_else_is_written(launched, layout, misalignment):
    rng = np.random.default_rng(5)
    for m, k, columns in (*SHAPES, MANY):
        codes = rng.integers(0, 16, (m, columns * BLOCK), dtype=np.uint8)
        scales = rng.integers(0, 0x80, (m, columns), dtype=np.uint8)  # zeros and NaN among them
        data = np.zeros(codes.size // 2 + misalignment, np.uint8)[misalignment:]
        data[:] = reference.pack_codes(codes).reshape(-1)
        placed = np.full(layout.nbytes(m, columns), 0x7E, np.uint8)
        placed[layout.offsets(m, columns)] = scales
        written = ceil_div(k, BLOCK) * BLOCK
        memory = np.full(m * written + 16, GUARD, np.uint16)
        out = memory[8:-8]  # 16 bytes from its ends
        a = SimpleNamespace(
            data=SimpleNamespace(device=SimpleNamespace(index=0), pointer=data.ctypes.data),
            scales=SimpleNamespace(pointer=placed.ctypes.data),
            shape=(m, k),
            layout=layout,
            columns=columns,
        )
        passes.dequantize_activations(a, out.ctypes.data, 0)
        values = E2M1.values[codes].reshape(m, columns, BLOCK) * E4M3.values[scales][..., None]
        wanted = reference.round_to_bits(values.reshape(m, -1)[:, :written].astype(np.float32), "bfloat16")
        got = out.reshape(m, written)
        numbers = ~np.isnan(reference.widen(wanted, "bfloat16"))
        assert np.array_equal(got[numbers], wanted[numbers]), (m, k)
        assert np.isnan(reference.widen(got, "bfloat16")[~numbers]).all()
        assert (memory[:8] == GUARD).all(), "written before the result"
        assert (memory[-8:] == GUARD).all(), "written past the end"
    assert {kernel.pieces for kernel in launched} == {2, 4}
