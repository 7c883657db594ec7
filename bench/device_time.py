"""Times on a CUDA device as a caller sees them: events around a call, the L2 cache emptied before each, medians.

Between two calls 512 MiB are set to zero: longer than the host needs to queue the next call, so the time between the
events is the device's own, launch included; and larger than any L2, so nothing of the call before is in it.

Where a launch lies in the device's queue moves its time by up to a microsecond, in a pattern of a few launches. So the
zeros are written in one to eight pieces, a number drawn for each call: all places are met equally often, and a median
is the same in the next run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

from bench.needs import optional

__all__ = [
    "FLUSH_BYTES",
    "both_times",
    "copy_of",
    "device_times",
    "event_pairs",
    "in_turns",
    "median_us",
    "read_bandwidth",
]

cupy = optional("cupy")

EventPair = tuple[Any, Any]

FLUSH_BYTES = 512 << 20
_MOST_PIECES = 8
_DEVICE_TO_DEVICE = 3
_WARM_SECONDS, _TURN_SECONDS = 0.025, 0.1  # of the function itself: the clocks settle
_READ_ALL = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* x, unsigned long long pieces, unsigned* out) {
    unsigned all = 0;
    const unsigned long long step = (unsigned long long)gridDim.x * 512 * 4;
    for (unsigned long long i = blockIdx.x * 2048ull + threadIdx.x; i + 1536 < pieces; i += step) {
        uint4 v[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = __ldg(x + i + 512 * k);
        #pragma unroll
        for (int k = 0; k < 4; ++k) all |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (all == 0x12345678u) *out = all;
}"""


def device_times(
    function: Callable[[], object], repeats: int = 60, warmup: int = 3, events: list[EventPair] | None = None
) -> list[float]:
    """Seconds of each of ``repeats`` calls on the current stream. ``events``, if given, has one pair a call."""
    cache = cupy.empty(FLUSH_BYTES, cupy.uint8)
    drawn = random.Random(0)
    for _ in range(warmup):
        function()
    events = events or event_pairs(repeats)
    for start, end in events:
        pieces = drawn.randint(1, _MOST_PIECES)
        for piece in range(pieces):
            (cache.data + piece * (FLUSH_BYTES // pieces)).memset_async(0, FLUSH_BYTES // pieces)
        start.record()
        function()
        end.record()
    cupy.cuda.get_current_stream().synchronize()
    return [cupy.cuda.get_elapsed_time(start, end) / 1e3 for start, end in events]


def event_pairs(count: int) -> list[EventPair]:
    """New events. Where an event lies decides about some tenths of a microsecond: compare with the same ones."""
    return [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(count)]


def median_us(function: Callable[[], object], repeats: int = 60) -> float:
    """Median of :func:`device_times` in microseconds."""
    return 1e6 * statistics.median(device_times(function, repeats))


def copy_of(nbytes: int) -> Callable[[], object]:
    """A device-to-device copy that moves ``nbytes``, read and written together."""
    half = nbytes // 2
    source, target = cupy.full(half, 0x5A, cupy.uint8), cupy.empty(half, cupy.uint8)

    def copy() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, half, _DEVICE_TO_DEVICE, stream)

    return copy


def in_turns(
    *functions: Callable[[], object], rounds: int = 5, repeats: int = 40, warmup: int = 3
) -> list[list[float]]:
    """Seconds of each function's calls; each has its turn in each round, so that none has a better hour."""
    seconds: list[list[float]] = [[] for _ in functions]
    events = event_pairs(repeats)
    for _ in range(rounds):
        for function, found in zip(functions, seconds, strict=True):
            found += device_times(function, repeats, warmup, events)
    return seconds


def both_times(function: Callable[[], object], twin: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call of both, in three turns, each as ``triton.testing.do_bench`` runs it."""
    once = statistics.median(device_times(function, 5))
    repeats, warmup = (int(min(200, max(8, seconds / once))) for seconds in (_TURN_SECONDS, _WARM_SECONDS))
    return in_turns(function, twin, rounds=3, repeats=repeats, warmup=warmup)


def read_bandwidth(nbytes: int = 4 << 30) -> float:
    """Bytes a second of a kernel that only reads, over ``nbytes``."""
    x, out = cupy.zeros(nbytes, cupy.uint8), cupy.zeros(1, cupy.uint32)
    kernel = cupy.RawKernel(_READ_ALL, "read_all")
    blocks = 4 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    args: tuple[Any, ...] = (x, cupy.uint64(nbytes // 16), out)
    return nbytes / statistics.median(device_times(lambda: kernel((blocks,), (512,), args), 20))
