"""Threads: any number of callers, any number of workers, forks, and callers that switched subnormals off."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

import fp4rt
from fp4rt.cpu import threads
from tests.cpu.comparison import assert_same_bits, assert_same_tensor

OF_X86_64 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="needs the floating-point environment of x86-64"
)


def in_new_process(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


DIGEST = """
import hashlib, numpy, fp4rt
x = numpy.random.default_rng(0).standard_normal((2049, 1000)).astype(numpy.float16)
q = fp4rt.quantize(x, padded_n=1008)
e = fp4rt.quantization_error(x, q)
parts = [q.data, q.scales, q.global_scale, q.dequantize(), q.relayout("8x4").scales]
print(hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest(), e.sqnr_db.hex(), e.max_abs_error.hex())
"""


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit() -> None:
    digests = {in_new_process(DIGEST, FP4RT_NUM_THREADS=count) for count in ("1", "2", "7")}
    assert len(digests) == 1


def test_the_environment_decides_the_number_of_threads() -> None:
    code = "from fp4rt.cpu.threads import thread_count; print(thread_count())"
    assert in_new_process(code, FP4RT_NUM_THREADS="3").strip() == "3"
    said = "from fp4rt.cpu import status; print(status().reason)"
    assert [in_new_process(said, FP4RT_NUM_THREADS=n).strip() for n in "12"] == ["1 thread", "2 threads"]
    assert int(in_new_process(code, FP4RT_NUM_THREADS="")) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\u00b2"])
def test_an_impossible_number_of_threads_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.THREADS_VARIABLE, value)
    with pytest.raises(threads.ThreadCountError, match="FP4RT_NUM_THREADS"):
        threads.thread_count.__wrapped__()


def test_many_callers_at_once_each_get_their_own_result() -> None:
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((1100 + i, 1008)).astype(np.float16) for i in range(24)]
    wanted = [fp4rt.quantize(x) for x in inputs]
    with ThreadPoolExecutor(8) as callers:
        for _ in range(4):
            for got, want in zip(callers.map(fp4rt.quantize, inputs), wanted, strict=True):
                assert_same_tensor(got, want, "concurrent call")
        values = list(callers.map(fp4rt.dequantize, wanted))
    for got, want in zip(values, wanted, strict=True):
        assert_same_bits(got, want.dequantize(), "concurrent dequantize")


def test_an_error_in_one_range_is_raised_after_all_ranges_have_ended() -> None:
    ended = []

    def run(first: int, end: int) -> None:
        if first == 0:
            raise RuntimeError("planted")
        ended.append(end)

    with pytest.raises(RuntimeError, match="planted"):
        threads.map_rows(run, 1000, 1 << 16)
    assert max(ended) == 1000


def test_an_error_holds_no_array_when_it_has_been_seen_to() -> None:
    gc.disable()
    try:
        for rows, columns in ((5, 16), (1000, 1 << 20)):  # one range, and several
            array = np.zeros(10)
            held = weakref.ref(array)

            def run(first: int, end: int, array: np.ndarray = array) -> None:
                raise RuntimeError(f"planted beside {array.size}")

            with contextlib.suppress(RuntimeError):
                threads.map_rows(run, rows, columns)
            del run, array
            end_of_patience = time.monotonic() + 10  # a thread may be about to put its part down
            while held() is not None and time.monotonic() < end_of_patience:
                time.sleep(0.001)
            assert held() is None
    finally:
        gc.enable()


def test_an_interrupt_ends_the_work() -> None:
    begun = []

    def run(first: int, end: int) -> None:
        begun.append(first)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.map_rows(run, 1000, 1 << 20)
    assert len(begun) <= threads.thread_count()


@OF_X86_64
def test_an_interrupt_counts_more_than_an_error_and_comes_after_all_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: 3)
    own, ended = threading.get_ident(), list[int]()

    def run(first: int, end: int) -> None:
        if threading.get_ident() == own:
            time.sleep(0.02)
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(first)
        raise ValueError("planted")

    with pytest.raises(KeyboardInterrupt):
        threads.map_rows(run, 1000, 1 << 20)
    written = len(ended)
    time.sleep(0.15)
    assert len(ended) == written


def test_an_interrupt_of_a_caller_that_waits_comes_after_all_writing() -> None:
    code = """
import os, signal, threading, time
from fp4rt.cpu import threads
threads._has_default_floating_point = lambda: False
ended = []

def run(first, end):
    time.sleep(0.2)
    ended.append(first)

threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    threads.map_rows(run, 1000, 1 << 20)
except KeyboardInterrupt:
    written = len(ended)
    time.sleep(0.5)
    print(written == len(ended) <= threads.thread_count())
"""
    assert in_new_process(code).strip() == "True"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_threads_work_than_were_asked_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: count)
    lock, working, most = threading.Lock(), set[int](), [0]

    def run(first: int, end: int) -> None:
        with lock:
            working.add(threading.get_ident())
            most[0] = max(most[0], len(working))
        time.sleep(0.005)
        with lock:
            working.discard(threading.get_ident())

    threads.map_rows(run, 1000, 1 << 20)
    assert most[0] <= count


@OF_X86_64
def test_a_caller_waits_for_no_work_but_its_own() -> None:
    """Where all threads are busy for others it does the whole of it."""
    release, busy = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        busy.release()
        release.wait(60)

    held: list[Future[None]] = [Future() for _ in range(threads.thread_count())]
    for each in held:
        threads._hand_over(each, hold)
    for _ in held:
        busy.acquire()
    try:
        array = np.zeros(10)
        kept = weakref.ref(array)
        found = threads.map_rows(lambda first, end, array=array: threading.get_ident(), 1000, 1 << 20)
        assert set(found) == {threading.get_ident()}
        del array
        assert kept() is None, "a job that nobody needs holds arrays"
    finally:
        release.set()
    for each in held:
        each.result()


def test_ranges_cover_all_rows_once_and_in_order() -> None:
    for rows in (1, 2, 3, 127, 1000):
        ranges = threads.map_rows(lambda first, end: (first, end), rows, 1 << 16)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == rows
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert threads.map_rows(lambda first, end: end, 0, 16) == []


@OF_X86_64
def test_the_caller_does_its_part_itself() -> None:
    def thread(first: int, end: int) -> int:
        return threading.get_ident()

    assert threads.map_rows(thread, 5, 16) == [threading.get_ident()]
    assert threading.get_ident() in threads.map_rows(thread, 1000, 1 << 20)
    assert threads.on_thread(threading.get_ident) == threading.get_ident()


@OF_X86_64
@pytest.mark.parametrize(
    ("place", "changed"),
    [
        ("mxcsr", 0x8000),  # results are flushed
        ("mxcsr", 0x0040),  # subnormals are taken for zero
        ("mxcsr", 0x2000),  # rounds down
        ("mxcsr", 0x4000),  # rounds up
        ("mxcsr", 0x0080),  # traps
        ("x87", 0x0400),
        ("x87", 0x0100),  # fewer bits
        ("x87", 0x0001),
    ],
)
def test_a_caller_in_another_mode_does_none(place: str, changed: int) -> None:
    where = "28:32" if place == "mxcsr" else "0:2"
    code = f"""
import ctypes, threading
from fp4rt.cpu import threads

def is_own(first=0, end=0):
    return threading.get_ident() == own

own, libc, environment = threading.get_ident(), ctypes.CDLL(None), ctypes.create_string_buffer(32)
libc.fegetenv(environment)
before = threads.map_rows(is_own, 5, 16)
control = environment.raw[{where}]
environment[{where}] = (int.from_bytes(control, "little") ^ {changed}).to_bytes(len(control), "little")
libc.fesetenv(environment)
after = threads.map_rows(is_own, 5, 16), threads.on_thread(is_own), any(threads.map_rows(is_own, 1000, 1 << 20))
print(before, after)
"""
    assert in_new_process(code).strip() == "[True] ([False], False, False)"


def test_however_rows_are_divided_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(2).standard_normal((150, 80)).astype(np.float16)
    w = np.random.default_rng(3).standard_normal((37, 80)).astype(np.float16)

    def everything() -> list[np.ndarray]:
        found = [fp4rt.global_scale(x)]
        for layout in ("linear", "128x4", "8x4"):
            q, b = fp4rt.quantize(x, layout=layout, padded_n=96), fp4rt.quantize(w, 3.0, layout=layout)
            found += [q.data, q.scales, q.global_scale, q.dequantize("float32"), q.relayout("linear").scales]
            found += [fp4rt.matmul(x, b), fp4rt.matmul(q, fp4rt.prepack(b), out_dtype="float32")]
            found.append(np.float64(fp4rt.quantization_error(x, q).sqnr_db))
        return found

    whole = everything()
    monkeypatch.setattr(threads, "SMALLEST_PART", 1)
    monkeypatch.setattr(threads, "thread_count", lambda: 3)
    assert len(threads.map_rows(lambda first, end: None, 150, 80)) == 12
    for got, want in zip(everything(), whole, strict=True):
        assert_same_bits(got, want, "divided")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import os, warnings, numpy, fp4rt
warnings.simplefilter("ignore")  # newer Pythons warn about forking a threaded process; that is the point here
x = numpy.ones((2000, 512), numpy.float16)
before = fp4rt.quantize(x, 1.0)
child = os.fork()
if child == 0:
    os._exit(0 if (fp4rt.quantize(x, 1.0).data == before.data).all() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_new_process(code).strip() == "0"


AT_THE_END = """
import atexit, threading, numpy, sys, fp4rt
x = numpy.random.default_rng(0).standard_normal((2048, 1024)).astype(numpy.float16)

def work():
    q = fp4rt.quantize(x)
    digest = sum(int(part.astype(numpy.int64).sum()) for part in (q.data, q.scales))
    print(digest, float(fp4rt.matmul(q, q, out_dtype="float32")[:8, :8].sum()))

def late():
    threading.main_thread().join()
    work()

"""


@pytest.mark.slow
def test_work_goes_on_when_the_main_thread_has_ended() -> None:
    """In functions of ``atexit`` and in threads that outlive the main one, whether they call first or not."""
    wanted = in_new_process(AT_THE_END + "work()")
    for end in ("atexit.register(work)", "threading.Thread(target=late).start()"):
        assert in_new_process(AT_THE_END + end) == wanted, end
        assert in_new_process(AT_THE_END + "work()\n" + end) == wanted * 2, end


@pytest.mark.slow
@OF_X86_64
def test_a_caller_that_works_itself_keeps_its_own_floating_point() -> None:
    code = f"""
import numpy, fp4rt
from fp4rt.cpu import threads
threads._started = lambda: None  # as where no thread can be started
{FLUSH}
{SUBNORMALS}
assert numpy.float32(1e-40) * numpy.float32(1) == 0, "the caller's mode has changed"
"""
    assert in_new_process(code) == in_new_process("import numpy, fp4rt\n" + SUBNORMALS)


FLUSH = """
import ctypes
libc = ctypes.CDLL(None)
environment = ctypes.create_string_buffer(32)  # fenv_t of x86-64: MXCSR is its last word
libc.fegetenv(environment)
mxcsr = int.from_bytes(environment.raw[28:32], "little") | 0x8040  # flush results, take subnormals for zero
libc.fesetenv(ctypes.create_string_buffer(environment.raw[:28] + mxcsr.to_bytes(4, "little"), 32))
assert numpy.float32(1e-40) * numpy.float32(1) == 0
"""
SUBNORMALS = """
x = (numpy.arange(1, 33, dtype=numpy.uint32) << 17).view(numpy.float32).reshape(1, 32)
q = fp4rt.quantize(x)
print(q.data.tobytes().hex(), q.scales.tobytes().hex(), q.global_scale.tobytes().hex(), q.dequantize().tobytes().hex())
print(fp4rt.quantize(x, 2.0**127).data.tobytes().hex())
print(fp4rt.quantize(numpy.full((1, 16), 2.0**-24, numpy.float16)).dequantize("float16").tobytes().hex())
"""


@OF_X86_64
@pytest.mark.parametrize("first_call", ["", "fp4rt.quantize(numpy.ones((1, 16), numpy.float32))\n"], ids=["new", "old"])
def test_a_caller_that_flushes_subnormals_changes_no_bit(first_call: str) -> None:
    """As torch.set_flush_denormal(True), and anything linked with -ffast-math, does to its caller's thread."""
    start = "import numpy, fp4rt\n" + first_call
    kept = in_new_process(start + SUBNORMALS)
    assert in_new_process(start + FLUSH + SUBNORMALS) == kept
    assert "07" in kept or "77" in kept


# A number that a call converts; tensors whose scales, and products whose terms, are subnormal numbers.
SUBNORMAL_SCALES = """
import ml_dtypes
tiny, factor = numpy.array([1784060, 107044], numpy.uint32).view(numpy.float32)  # 2.5e-39 and 1.5e-40
x = (numpy.arange(1, 65) * 1e36).astype(numpy.float32).reshape(1, 64)
for scale in (2.5e-39, tiny, tiny.reshape(1)):
    q = fp4rt.quantize(x, scale, layout="linear")
    print(q.data.tobytes().hex(), q.scales.tobytes().hex(), q.global_scale.tobytes().hex())
    print(fp4rt.matmul(numpy.full((1, 64), 1e-3, numpy.float16), q, out_dtype="float32").tobytes().hex())
    print(fp4rt.quantization_error(x, q).clipped_blocks)
w = fp4rt.quantize(numpy.full((5, 64), 1000, numpy.float32))
a = numpy.full((1, 64), 1e4, numpy.float16)
for alpha in (1.5e-40, factor, factor.reshape(1)):
    print(fp4rt.matmul(a, w, alpha=alpha, out_dtype="float32").tobytes().hex())
a = numpy.full((1, 64), 11, numpy.uint16).view(ml_dtypes.bfloat16)  # 1e-39
print(fp4rt.matmul(a, w, out_dtype="float32").tobytes().hex())
y = numpy.full((1, 16), 2e-38, numpy.float32)
print(fp4rt.quantization_error(y, fp4rt.quantize(y, 3.4e38)).clipped_blocks)
"""


@OF_X86_64
def test_a_caller_that_flushes_subnormals_has_scales_that_are_subnormal() -> None:
    kept = in_new_process("import numpy, fp4rt\n" + SUBNORMAL_SCALES)
    assert in_new_process("import numpy, fp4rt\n" + FLUSH + SUBNORMAL_SCALES) == kept


@OF_X86_64
def test_a_number_is_remembered_as_it_is_and_not_as_one_thread_has_seen_it() -> None:
    code = """
import threading
x = numpy.ones((1, 16), numpy.float32)
def flushing():
    exec(FLUSH)
    fp4rt.quantize(x, 3e-40)
    fp4rt.matmul(x.astype("f2"), fp4rt.quantize(x), alpha=3e-40)
thread = threading.Thread(target=flushing)
thread.start()
thread.join()
print(fp4rt.quantize(x, 3e-40).global_scale.view(numpy.uint32)[0])
"""
    assert int(in_new_process(f"import numpy, fp4rt\nFLUSH = {FLUSH!r}\n" + code)) == 214087
