"""Handing our memory to other libraries through DLPack, and when it comes back."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from fp4rt import interop
from fp4rt.interop.export import Export, make_capsule

versions = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason=f"needs NumPy 2.1 for DLPack 1.x, this is {np.__version__}"
)


class Memory:
    """16 KiB of host memory that can be watched dying."""

    def __init__(self) -> None:
        self.array = np.zeros(16384, np.uint8)
        self.pointer = -(-self.array.ctypes.data // 64) * 64


def export(dtype: str = "float32", shape: tuple[int, ...] = (4, 8)) -> tuple[Export, weakref.ref[Memory]]:
    memory = Memory()
    return Export(memory, memory.pointer, interop.CPU, dtype, shape), weakref.ref(memory)


def consumers() -> list[Any]:
    def numpy(x: Any) -> Any:
        return np.from_dlpack(x)

    def torch(x: Any) -> Any:
        return pytest.importorskip("torch").from_dlpack(x)

    def jax(x: Any) -> Any:
        return pytest.importorskip("jax").dlpack.from_dlpack(x)

    return [numpy, torch, jax]


@pytest.mark.parametrize("consume", consumers(), ids=lambda f: f.__name__)
def test_every_library_sees_the_same_memory_and_lets_it_go(consume: Any) -> None:
    exported, alive = export()
    pointer = exported.pointer
    array = consume(exported)
    del exported
    gc.collect()
    assert tuple(array.shape) == (4, 8)
    assert interop.view(array).pointer == pointer
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("versioned", [pytest.param(True, marks=versions), False])
def test_a_capsule_that_nobody_consumes_gives_its_memory_back(versioned: bool) -> None:
    memory = Memory()
    alive = weakref.ref(memory)
    capsule = make_capsule(memory, memory.pointer, interop.CPU, "uint8", (16,), versioned=versioned)
    del memory
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_the_older_struct_is_given_to_who_asks_for_no_version_and_where_numpy_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported, _ = export()
    assert '"dltensor"' in repr(exported.__dlpack__())
    assert '"dltensor"' in repr(exported.__dlpack__(max_version=(0, 8)))
    monkeypatch.setattr("fp4rt.interop.export._NUMPY_HAS_VERSIONS", False)
    assert '"dltensor"' in repr(exported.__dlpack__(max_version=(1, 0)))


@versions
def test_a_version_is_given_to_who_asks_for_it() -> None:
    exported, _ = export()
    assert '"dltensor_versioned"' in repr(exported.__dlpack__(max_version=(1, 0)))
    assert '"dltensor_versioned"' in repr(exported.__dlpack__(max_version=(2, 3)))


def test_what_is_exported_is_read_back_the_same() -> None:
    exported, _ = export("bfloat16", (3, 5))
    view = interop.view(exported)
    assert (view.dtype, view.shape, view.strides, view.pointer) == ("bfloat16", (3, 5), (5, 1), exported.pointer)


def test_a_copy_or_another_device_is_refused() -> None:
    exported, _ = export()
    with pytest.raises(BufferError, match="no copy"):
        exported.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="no other device"):
        exported.__dlpack__(dl_device=(2, 0))
    exported.__dlpack__(dl_device=(1, 0), copy=False)


@pytest.mark.parametrize(
    ("asked", "waits"),
    [(None, 1), (1, 1), (77, 77), (-1, None), (55, None)],
    ids=["default", "legacy", "other stream", "no order asked", "the same stream"],
)
def test_the_consumers_stream_waits_for_ours(driver: Any, asked: int | None, waits: int | None) -> None:
    exported = Export(None, 0x1000, interop.Device("cuda", 0), "uint8", (16,), stream=55)
    capsule = exported.__dlpack__(stream=asked)
    recorded = driver.named("cuEventRecord", "cuStreamWaitEvent")
    expected = [] if waits is None else [("cuEventRecord", 1, 55), ("cuStreamWaitEvent", waits, 1, 0)]
    assert recorded == expected
    assert exported.__dlpack_device__() == (2, 0)
    del capsule


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_that_outlive_the_interpreter_do_not_call_into_it(library: str) -> None:
    """The last references die in the library's C++, after Python is gone."""
    pytest.importorskip(library)
    code = f"""
import builtins, ctypes, numpy as np, {library}
from fp4rt import interop
from fp4rt.interop.export import Export
memory = np.zeros(4096, np.uint8)
pointer = -(-memory.ctypes.data // 64) * 64
consume = {"torch.from_dlpack" if library == "torch" else "jax.dlpack.from_dlpack"}
make = lambda: consume(Export(memory, pointer, interop.CPU, "uint8", (64,)))
builtins.kept = [make(), make()]
leaked = make()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))  # Python never frees it
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_a_tensor_may_die_while_an_exception_is_under_way() -> None:
    """A frame that an exception unwinds drops its tensors with the exception set: their owners die without harm."""
    torch = pytest.importorskip("torch")
    freed: list[bool] = []

    class Owner:
        def __init__(self) -> None:
            self.memory = np.zeros(64, np.uint8)

        def __del__(self) -> None:
            freed.append(True)

    def fail(owner: Owner) -> None:
        tensors = [torch.from_dlpack(make_capsule(owner, owner.memory.ctypes.data, interop.CPU, "uint8", (64,)))]
        tensors.append(tensors[0][1:])
        raise KeyError("the caller's own")

    for _ in range(100):
        with pytest.raises(KeyError, match="the caller's own"):
            fail(Owner())
    gc.collect()
    assert len(freed) == 100


def test_a_tensor_may_die_on_a_thread_that_python_does_not_know() -> None:
    """The deleter takes the interpreter lock itself."""
    import ctypes

    memory = Memory()
    alive = weakref.ref(memory)
    capsule = make_capsule(memory, memory.pointer, interop.CPU, "uint8", (16,))
    del memory
    view = interop.view(capsule)
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(view.owner.deleter)  # ctypes lets go of the lock around it
    deleter(view.owner.address)
    view.owner.deleter = 0
    gc.collect()
    assert alive() is None
