"""Faults that other software of this kind had, on the device: one small input each, and the right bytes."""

from __future__ import annotations

import numpy as np
import pytest

import fp4rt
from fp4rt.format import INPUT_DTYPES
from fp4rt.layout import LAYOUTS

pytestmark = pytest.mark.gpu


def parts(device, q):
    return device.host(q.data), device.host(q.scales)


def test_b01_padding_is_zero_though_the_memory_held_nans(device):
    x = device.cupy.ones((3, 48), np.float32)
    wanted = np.zeros(512, np.uint8)
    wanted[[0, 1, 2, 16, 17, 18, 32, 33, 34]] = 0x23
    with fp4rt.use_pool(fp4rt.PaddedPool(fill="poison")):
        for _ in range(20):
            q = fp4rt.quantize(x, 1.0)
            data, scales = parts(device, q)
            assert (data == 0x77).all()
            np.testing.assert_array_equal(scales.reshape(-1), wanted)
            assert (fp4rt.dequantize(q) == 1.03125).all()
            device.cupy.asarray(q.scales)[...] = 0x7F  # what the pool gives out next


@pytest.mark.parametrize("fill", ["covered", "zero", "empty", "poison"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b01_every_fill_gives_the_same_bytes(device, fill, layout):
    x = device.cupy.random.standard_normal((150, 80)).astype(np.float16)
    wanted = parts(device, fp4rt.quantize(x, 1.0, layout=layout, padded_n=96))
    with fp4rt.use_pool(fp4rt.PaddedPool(fill=fill)):
        for _ in range(3):
            found = parts(device, fp4rt.quantize(x, 1.0, layout=layout, padded_n=96))
            assert all(f.tobytes() == w.tobytes() for f, w in zip(found, wanted, strict=True))


def test_b07_column_slices_and_broadcast_rows_equal_their_copies(device):
    cupy = device.cupy
    base = cupy.full((2, 64), 96, np.float16)
    base[0, :32], base[1, :32] = 6, 3
    data, scales = parts(device, fp4rt.quantize(base[:, :32], 1.0, layout="linear"))
    assert scales.tolist() == [[0x38, 0x38], [0x30, 0x30]]
    assert (data == 0x77).all()
    for view in (base[:, ::2], base[::-1], cupy.broadcast_to(base[0], (3, 64))):
        found = parts(device, fp4rt.quantize(view, 1.0))
        wanted = parts(device, fp4rt.quantize(cupy.ascontiguousarray(view), 1.0))
        assert all(f.tobytes() == w.tobytes() for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b11_all_zeros_have_a_finite_scale_and_zero_bytes(device, dtype, layout):
    x = device.array(np.zeros((2, 32), np.uint32 if dtype == "float32" else np.uint16), dtype)
    q = fp4rt.quantize(x, layout=layout)
    assert device.host(q.global_scale).view(np.float32).tolist() == [1.0]
    assert not any(part.any() for part in parts(device, q))
    assert (device.host(fp4rt.dequantize(q)) == 0).all()


def test_b13_each_expert_has_its_own_rows_of_tiles(device):
    experts = [device.cupy.full((130, 64), value, np.float16) for value in (6, 3)]
    joined = np.concatenate([device.host(fp4rt.quantize(w, 1.0).scales).reshape(-1) for w in experts])
    assert joined.size == 2048
    assert joined[1024] == 0x30
    assert joined[520] == 0


def test_b23_the_even_element_is_the_low_nibble_and_minus_zero_is_kept(device):
    values = [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0]
    for kind in (np.float16, np.float32):
        q = fp4rt.quantize(device.cupy.asarray([values], kind), 1.0, layout="linear")
        data, scales = parts(device, q)
        assert scales.tolist() == [[0x38]]
        assert data.tobytes().hex() == "21436507a9cbed8f"
        assert device.host(fp4rt.dequantize(q)).view(np.float32).tolist() == [values]


def test_b25_bf16_is_read_as_bf16(device):
    torch = pytest.importorskip("torch")
    wanted = fp4rt.quantize(device.cupy.asarray([[1.5, -1.5] * 8], np.float32), 1.0, layout="linear")
    for x in (
        torch.tensor([[1.5, -1.5] * 8], dtype=torch.bfloat16, device="cuda"),
        device.array(np.array([[0x3FC0, 0xBFC0] * 8], np.uint16), "bfloat16"),
    ):
        q = fp4rt.quantize(x, 1.0, layout="linear")
        data, scales = parts(device, q)
        assert (data == 0xF7).all()
        assert scales.tolist() == [[0x28]]
        assert data.tobytes() == device.host(wanted.data).tobytes()


def test_b26_nothing_is_written_past_the_end(device):
    cupy, guard = device.cupy, 64 * 1024
    for m in (1, 7, 1024, 1025, 1030, 1151):
        for n in (16, 48, 512, 528):
            x = cupy.asarray(np.full((m, n), 6, np.float16))
            for layout in LAYOUTS:
                shapes = [(m, n // 2), LAYOUTS[layout].shape(m, n // 16)]
                blocks = [cupy.asarray(np.full(2 * guard + a * b, 0xA5, np.uint8)) for a, b in shapes]
                inner = [
                    block[guard : guard + a * b].reshape(a, b) for block, (a, b) in zip(blocks, shapes, strict=True)
                ]
                q = fp4rt.QuantizedTensor(*inner, device.floats(1), (m, n), layout)
                fp4rt.quantize(x, 1.0, layout=layout, out=q)
                data, scales = (block.get() for block in blocks)
                assert (data[guard:-guard] == 0x77).all()
                assert (scales[guard:-guard] == 0x38).sum() == m * n // 16
                for block in (data, scales):
                    assert (block[:guard] == 0xA5).all()
                    assert (block[-guard:] == 0xA5).all()


def test_b28_a_small_global_scale_saturates_and_the_automatic_one_does_not(device):
    x = device.cupy.zeros((1, 16), np.float32)
    x[0, :4] = device.cupy.asarray([5376, 2688, 1344, -448])
    q = fp4rt.quantize(x, 1.0, layout="linear")
    data, scales = parts(device, q)
    assert scales.tolist() == [[0x7E]]
    assert data[0, :2].tolist() == [0x77, 0xA5]
    assert device.host(fp4rt.dequantize(q)).view(np.float32)[0, :4].tolist() == [2688, 2688, 1344, -448]
    x = device.cupy.full((1, 32), 6, np.float16)
    x[0, 0] = -2688
    q = fp4rt.quantize(x, layout="linear")
    assert device.host(q.global_scale).view(np.float32).tolist() == [1.0]
    assert device.host(q.scales).tolist() == [[0x7E, 0x38]]
    y = device.host(fp4rt.dequantize(q)).view(np.float32)[0]
    assert (y[0], y[16]) == (-2688, 6)


def test_b30_ties_go_to_the_even_code(device):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    row = [6, *ties, -6, *(-t for t in ties)]
    data, scales = parts(device, fp4rt.quantize(device.cupy.asarray([row], np.float32), 1.0, layout="linear"))
    assert scales.tolist() == [[0x38]]
    assert data.tobytes().hex() == "072244668faaccee"
    for step, wanted in ((-1, [0, 1, 2, 3, 4, 5, 6]), (1, [1, 2, 3, 4, 5, 6, 7])):
        moved = (np.array(ties, np.float32).view(np.int32) + step).view(np.float32)
        x = np.array([[6, *moved, -6, *-moved]], np.float32)
        codes = device.host(fp4rt.quantize(device.cupy.asarray(x), 1.0, layout="linear").data)[0]
        found = [int(codes[i // 2] >> 4 * (i % 2) & 0xF) for i in range(16)]
        assert found[1:8] == wanted
        assert found[9:] == [8 | code for code in wanted]


def test_b33_contiguous_does_not_mean_aligned(device):
    cupy = device.cupy
    for kind in (np.float16, np.float32):
        for start in range(1, 9):
            x = cupy.full(2 * 32 + 16, 6, kind)[start : start + 64].reshape(2, 32)
            for global_scale in (1.0, None):
                q = fp4rt.quantize(x, global_scale)
                if global_scale:
                    data, scales = parts(device, q)
                    assert (data == 0x77).all()
                    assert scales.reshape(-1)[[0, 1, 16, 17]].tolist() == [0x38] * 4
    large = cupy.full(2048 * 4096 + 16, 6, np.float16)
    for start in (1, 2, 4, 8):
        q = fp4rt.quantize(large[start : start + 2048 * 4096].reshape(2048, 4096), 1.0, layout="linear")
        assert bool((q.scales == 0x38).all())
        assert bool((q.data == 0x77).all())


@pytest.mark.parametrize("m", [65537, 262145])
def test_b34_more_rows_than_a_grid_is_high(device, m):
    cupy = device.cupy
    x = cupy.zeros((m, 16), np.float16)
    x[-1] = 6
    last = {"linear": m - 1, "128x4": (m - 1) // 128 * 512, "8x4": (m - 1) // 8 * 32}
    size = {"linear": m, "128x4": -(-m // 128) * 512, "8x4": -(-m // 8) * 32}
    for layout in LAYOUTS:
        q = fp4rt.quantize(x, 1.0, layout=layout)
        flat = q.scales.reshape(-1)
        assert flat.size == size[layout]
        assert int(flat[last[layout]]) == 0x38
        assert int(flat.sum(dtype=np.int64)) == 0x38
        assert device.host(q.data[-1]).tolist() == [0x77] * 8
        y = fp4rt.dequantize(q, "float16")
        assert y.shape == (m, 16)
        assert bool((y == x).all())
        moved = fp4rt.relayout(q, "linear").scales
        assert int(moved.reshape(-1)[m - 1]) == 0x38
        assert int(moved.sum(dtype=np.int64)) == 0x38


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b35_no_rows_give_empty_results_without_a_launch(device, layout):
    for library in ("cupy", "torch"):
        if library == "torch":
            x = pytest.importorskip("torch").empty((0, 64), device="cuda")
        else:
            x = device.cupy.empty((0, 64), np.float32)
        for global_scale, wanted in ((None, 1.0), (3.5, 3.5), (device.floats(2.5), 2.5)):
            q = fp4rt.quantize(x, global_scale, layout=layout)
            assert tuple(q.data.shape) == (0, 32)
            assert tuple(q.scales.shape) == ((0, 4) if layout == "linear" else LAYOUTS[layout].shape(0, 4))
            assert float(q.global_scale[0]) == wanted
            assert tuple(fp4rt.dequantize(q, "float16").shape) == (0, 64)
            assert fp4rt.relayout(q, "8x4").layout == "8x4"
        assert float(fp4rt.global_scale(x)[0]) == 1.0


def test_more_than_two_to_the_32_bytes(device):
    """Offsets beyond 32 bits: 4.3 GB of input; the last block is at the end of everything."""
    cupy = device.cupy
    if cupy.cuda.runtime.memGetInfo()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    for m, n in ((135000, 16384), (2, 1 << 30)):
        x = cupy.zeros((m, n), np.float16)
        x[-1, -16:] = 6
        for layout in ("linear", "128x4"):
            q = fp4rt.quantize(x, 1.0, layout=layout)
            where = LAYOUTS[layout].offset(m - 1, n // 16 - 1, n // 16)
            assert int(q.scales.reshape(-1)[where]) == 0x38
            assert int(cupy.count_nonzero(q.scales)) == 1
            assert int(cupy.count_nonzero(q.data)) == 8
            assert device.host(q.data[-1, -8:]).tolist() == [0x77] * 8
            assert device.host(fp4rt.dequantize(q, "float16")[-1, -17:]).view(np.float16).tolist() == [0, *[6] * 16]
        assert float(fp4rt.global_scale(x)[0]) == 448.0
        del x, q
        cupy.get_default_memory_pool().free_all_blocks()
