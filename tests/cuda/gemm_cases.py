"""Operands and judgement for the tests of products: values are known in fp64, errors are held to a derived bound."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

import fp4rt
from fp4rt import interop
from fp4rt.format import BLOCK, E2M1, E4M3
from fp4rt.layout import LAYOUTS, block_columns, ceil_div, round_up

SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8, "float32": 24}
SMALLEST_STEP = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
WHOLE_RANGE = (0x00, 0x7F)  # of scale bytes: zero, subnormal, normal, the largest; the end is exclusive
KINDS = ("float16", "bfloat16", "nvfp4")
PLAIN, PREPACKED = "plain", "prepacked"
GUARD_BYTES = 1 << 16  # before and behind a result
# (kernel asked for, form of b): what this device has. The Hopper kernels read prepacked weights.
EVERYWHERE = (("reference", PLAIN), ("portable", PLAIN), ("portable", PREPACKED))
HOPPER_KERNELS = ("decode", "small", "prefill")
HOPPER = tuple((kernel, PREPACKED) for kernel in HOPPER_KERNELS)
MOST_TOKENS = {"decode": 16, "small": 128}


@functools.cache
def cupy():
    import cupy

    return cupy


def has_hopper():
    """Whether the Hopper kernels run here."""
    from fp4rt.cuda.gemm.problem import device_measures

    measures = device_measures(0)
    return measures.arch == 90 and measures.specific


def ways():
    """Every (kernel, form of b) that can run here."""
    return EVERYWHERE + (HOPPER if has_hopper() else ())


def takes(kernel, m, a=None):
    """Whether a kernel is for m tokens and, where ``a`` is told, for its rows as they lie."""
    as_it_lies = a is not None and not isinstance(a.given, fp4rt.QuantizedTensor)
    if as_it_lies and kernel in HOPPER_KERNELS and a.given.strides[0] % 16:
        return False  # the copy engine reads rows at multiples of 16 bytes; unforced, other rows are copied first
    return m <= MOST_TOKENS.get(kernel, m)


def random_bytes(rng, shape, low=0, high=256):
    return rng.integers(low, high, shape, dtype=np.uint8)


class Operand:
    """A matrix on the device, and its values in fp64 without the global scale: ``values / global_scale`` are true."""

    def __init__(self, given, values, global_scale=1.0):
        self.given, self.values, self.global_scale = given, values, global_scale

    @functools.cached_property
    def packed(self):
        """The matrix as a prepacked weight."""
        return fp4rt.prepack(self.given)

    def views(self):
        """As the first operand of a product."""
        quantized = isinstance(self.given, fp4rt.QuantizedTensor)
        return self.given.views() if quantized else interop.view(self.given, "a")

    def weight(self, form):
        return self.packed if form == PREPACKED else self.given


def quantized(
    rng,
    rows,
    k,
    layout="128x4",
    *,
    padded=None,
    scales=(0x20, 0x50),
    padding=(0, 0),
    offset=0,
    change=None,
    global_scale=None,
):
    """Random codes and scale bytes in ``scales``; ``padding``: the bytes of (scales, data) that nobody may read.

    Args:
        offset: bytes by which both arrays are moved off their alignment.
        change: called with (codes, row-major scales) before they are packed.
    """
    padded = padded or round_up(k, BLOCK)
    columns, blocks, scheme = block_columns(padded), ceil_div(k, BLOCK), LAYOUTS[layout]
    codes = random_bytes(rng, (rows, padded), 0, 16)
    row_major = random_bytes(rng, (rows, columns), *scales)
    if change is not None:
        change(codes, row_major)
    with np.errstate(invalid="ignore"):
        block = E2M1.values[codes].reshape(rows, columns, BLOCK) * E4M3.values[row_major][..., None]
    values = block.reshape(rows, padded)[:, :k].astype(np.float64)
    codes[:, k:] = padding[1] & 0xF
    row_major[:, blocks:] = padding[0]
    packed = np.full(scheme.shape(rows, columns), padding[0], np.uint8)
    packed.reshape(-1)[scheme.offsets(rows, columns)] = row_major
    data = codes[:, 0::2] | codes[:, 1::2] << 4
    global_scale = np.float32(rng.uniform(0.5, 40.0) if global_scale is None else global_scale)
    tensor = fp4rt.QuantizedTensor(
        on_device(data, offset), on_device(packed, offset), cupy().asarray([global_scale]), (rows, k), layout, padded
    )
    return Operand(tensor, cupy().asarray(values), float(global_scale))


def on_device(array, offset=0):
    """A dense device copy whose address is ``offset`` bytes past a multiple of 256."""
    array = np.ascontiguousarray(array)
    memory = cupy().empty(array.nbytes + offset, np.uint8)
    memory[offset:] = cupy().asarray(array.reshape(-1).view(np.uint8))
    return memory[offset:].view(array.dtype).reshape(array.shape)


def halves(rng, rows, k, kind, values=None):
    """Random fp16 or bf16 activations."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16)
    values = rng.standard_normal((rows, k), np.float32) if values is None else values
    rounded = values.astype(dtype)
    given = on_device(rounded.view(np.uint16)).view(dtype)
    return Operand(given, cupy().asarray(rounded.astype(np.float64)))


def activations(rng, rows, k, kind, **options):
    return quantized(rng, rows, k, **options) if kind == "nvfp4" else halves(rng, rows, k, kind)


def run(a, b, kernel, form=PLAIN, out_dtype="float32", alpha=None, bias=None, out=None, stream=None):
    """The product by one kernel; ``b`` an Operand. None lets selection decide, through the public door."""
    weight = b.weight(form)
    if kernel is None:
        return fp4rt.matmul(a.given, weight, out_dtype=out_dtype, alpha=alpha, bias=bias, out=out, stream=stream)
    from fp4rt.cuda.gemm.matmul import matmul

    left, right = a.views(), weight.views()
    first = left.data if isinstance(a.given, fp4rt.QuantizedTensor) else left
    views = {name: interop.view(v) for name, v in (("bias", bias), ("out", out)) if v is not None}
    factor = alpha if alpha is None or isinstance(alpha, float) else interop.view(alpha)
    handle = interop.stream_handle(stream, first)
    found = matmul(left, right, out_dtype, factor, views.get("bias"), views.get("out"), handle, kernel=kernel)
    return out if out is not None else found


def plan_of_tile(a, b, tile):
    """(plan, views of a, weight) of a product by a Hopper tile, which selection need not have taken."""
    from fp4rt.cuda.gemm.matmul import Weight, make_plan, problem_of
    from fp4rt.cuda.gemm.selection import with_hopper_tile

    left, weight = a.views(), Weight(b.packed.views())
    problem = problem_of(left, weight)
    choice = with_hopper_tile(problem, tile, "asked for")
    if getattr(tile, "decodes", False):  # selection asks for more than that it can
        choice = replace(choice, tile=replace(choice.tile, decodes=True), activations="beside")
    return make_plan(left, weight, problem, choice), left, weight


def run_tile(a, b, tile, out_dtype="float32"):
    """(product by a Hopper tile, what lies before it, what lies behind it): these hold 0xFF, which is a NaN."""
    import ml_dtypes

    from fp4rt.cuda.gemm.matmul import launch

    plan, left, weight = plan_of_tile(a, b, tile)
    dtype = np.dtype(ml_dtypes.bfloat16 if out_dtype == "bfloat16" else out_dtype)
    shape = a.values.shape[0], b.values.shape[0]
    memory = cupy().full(2 * GUARD_BYTES + dtype.itemsize * shape[0] * shape[1], 0xFF, np.uint8)
    out = memory[GUARD_BYTES:-GUARD_BYTES].view(dtype).reshape(shape)
    launch(plan, left, weight, out_dtype, None, None, out.data.ptr, 0)
    return out, memory[:GUARD_BYTES], memory[-GUARD_BYTES:]


def check_tile(what, a, b, tile, out_dtype="float32"):
    out, *sides = run_tile(a, b, tile, out_dtype)
    assert_close(f"{what} {tile} {out_dtype}", out, *expected(a, b), out_dtype)
    for side in sides:
        assert bool((side == 0xFF).all()), f"{what} {tile} {out_dtype}: writes outside of the result"


def expected(a, b, alpha=None, bias=None):
    """(fp64 result, bound of the fp32 work): k * 2^-24 * sum |a b| |alpha|, and the roundings of alpha and bias."""
    xp = cupy()
    factor = 1.0 / (a.global_scale * b.global_scale) if alpha is None else float(xp.asarray(alpha).reshape(()))
    true = a.values @ b.values.T * factor
    size = xp.abs(a.values) @ xp.abs(b.values).T * abs(factor)
    added = 0.0 if bias is None else xp.asarray(bias).astype(xp.float64)[None, :]
    k = a.values.shape[1]
    return true + added, (k + 2) * 2.0**-24 * size + 2.0**-24 * xp.abs(true + added)


def assert_close(what, got, true, bound, out_dtype):
    """Every element within the bound and half a step of its type."""
    xp = cupy()
    found = xp.asarray(got).astype(xp.float64)
    allowed = bound + (xp.abs(true) + bound) * 2.0 ** -SIGNIFICAND_BITS[out_dtype] + SMALLEST_STEP[out_dtype]
    bad = ~(xp.abs(found - true) <= allowed)
    if bool(bad.any()):
        row, column = (int(i) for i in xp.argwhere(bad)[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} out of bounds, first at ({row}, {column}): got "
            f"{float(found[row, column])!r}, wanted {float(true[row, column])!r} +- {float(allowed[row, column])!r}"
        )


def check(what, a, b, kernel, form=PLAIN, out_dtype="float32", alpha=None, bias=None):
    got = run(a, b, kernel, form, out_dtype, alpha, bias)
    true, bound = expected(a, b, alpha, bias)
    assert_close(f"{what} {kernel} {form} {out_dtype}", got, true, bound, out_dtype)
    return got


def bits(array):
    """A device array's bytes on the host."""
    return cupy().ascontiguousarray(cupy().asarray(array)).view(np.uint8).get()
