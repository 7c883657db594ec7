"""Compiling without a GPU: what NVRTC is asked, what an error shows, which target a device gets."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp4rt import sources
from fp4rt.cuda import arguments, compiler, describe, headers, kernel, status
from fp4rt.cuda.arch import COMPILED_ARCHS, Target, choose_target, parse_target
from fp4rt.cuda.arguments import argument_struct
from fp4rt.cuda.compiler import compile_kernel, nvrtc_version, options_for, sources_of, supported_archs
from fp4rt.errors import BackendUnavailable, CompileError

try:
    NVRTC = nvrtc_version()
except BackendUnavailable as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

KNOWN = (75, 80, 86, 89, 90, 100, 103, 120)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of sources in place of kernels_src: ``kernels({"kernels/a.cu": text})``."""
    caches = (
        sources.read_source,
        sources.source_names,
        compiler.sources_of,
        compiler.system_headers_of,
        argument_struct,
    )

    def forget():
        for cached in caches:
            cached.cache_clear()

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(sources, "kernels_root", lambda: tmp_path)
        forget()

    yield write
    monkeypatch.undo()
    forget()


# ---- sources and flags


def test_headers_come_from_memory_included_ones_too():
    found = sources_of("kernels/quantize.cu")
    assert "block/quantize_block.cuh" in found
    assert "num/integers.cuh" in found  # five files down


def test_quantizers_are_compiled_without_contraction_and_without_flush_to_zero():
    options = options_for("kernels/quantize.cu", {"A": 1}, "sm_90a", fmad=False)
    assert "--fmad=false" in options
    assert "--ftz=false" in options
    assert "-DA=1" in options
    assert not any("fast" in option for option in options)
    assert all(reason for _, reason in compiler.FLAGS)


def test_a_compile_error_shows_the_line_and_its_file(kernels):
    kernels(
        {
            "kernels/bad.cu": '#include "num/worse.cuh"\nextern "C" __global__ void bad() {}\n',
            "num/worse.cuh": "\n".join(["// fine"] * 9 + ["int broken = no_such_name;"] + ["// fine"] * 9),
        }
    )
    with pytest.raises(CompileError) as caught:
        compile_kernel("kernels/bad.cu", {"TILE": 3}, "sm_90a")
    message = str(caught.value)
    assert "kernels/bad.cu for sm_90a with TILE=3" in message
    assert "--- num/worse.cuh" in message
    assert ">   10 | int broken = no_such_name;" in message
    assert f"{NVRTC[0]}.{NVRTC[1]}" in message


def test_a_missing_source_and_a_missing_include_are_named(kernels):
    kernels({"kernels/a.cu": '#include "num/absent.cuh"\n'})
    with pytest.raises(CompileError, match=r"no CUDA source 'num/absent\.cuh'"):
        compile_kernel("kernels/a.cu", {}, "sm_90a")
    with pytest.raises(CompileError, match=r"no CUDA source 'kernels/b\.cu'"):
        compile_kernel("kernels/b.cu", {}, "sm_90a")


QUANTIZE_DEFINES = {"INPUT": 0, "LAYOUT": 1, "BLOCKS_PER_LANE": 1, "CTAS_PER_SM": 1}


@pytest.mark.parametrize("arch", ["compute_100a", "compute_103a", "compute_120a"])
def test_blackwell_gets_the_hardware_s_fp4_conversion(arch, require_arch):
    require_arch(arch)
    assert b"cvt.rn.satfinite.e2m1x2.f32" in compile_kernel("kernels/quantize.cu", QUANTIZE_DEFINES, arch).image


def test_hopper_and_plain_ptx_get_the_portable_fp4_conversion_and_fp8_s_from_8_9_on():
    for arch in ("compute_80", "compute_90a", "compute_100"):
        assert b"e2m1x2" not in compile_kernel("kernels/quantize.cu", QUANTIZE_DEFINES, arch).image
    assert b"e4m3x2" not in compile_kernel("kernels/quantize.cu", QUANTIZE_DEFINES, "compute_86").image
    assert b"e4m3x2" in compile_kernel("kernels/quantize.cu", QUANTIZE_DEFINES, "compute_89").image


def test_ptx_ends_with_the_nul_that_the_driver_looks_for():
    image = compile_kernel("kernels/relayout.cu", {"THREADS": 64}, "compute_90").image
    assert image.endswith(b"}\n\0") or image.rstrip(b"\0\n").endswith(b"}")
    assert image[-1] == 0


# ---- toolkit headers


HALF_KERNEL = '#include <cuda_fp16.h>\nextern "C" __global__ void half_add(half* x) { x[0] += x[1]; }\n'


def test_a_header_is_found_in_the_wheels_though_cuda_path_is_broken(tmp_path, monkeypatch, kernels):
    include = tmp_path / "with a space" / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").write_text(f"#define CUDA_VERSION {NVRTC[0] * 1000 + NVRTC[1] * 10}\n")  # looks usable
    (include / "cuda_fp16.h").write_text("#error broken\n")
    monkeypatch.setenv("CUDA_PATH", str(include.parent))
    headers.system_include_folder.cache_clear()
    kernels({"kernels/half.cu": HALF_KERNEL})
    assert headers.system_include_folder("cuda_fp16.h", NVRTC) != include
    assert compile_kernel("kernels/half.cu", {}, "sm_90a").resources()[0].entry == "half_add"
    headers.system_include_folder.cache_clear()


def test_a_folder_with_a_space_in_its_name_serves_a_kernel_that_needs_a_header(tmp_path, monkeypatch, kernels):
    wheel = headers.system_include_folder("cuda_fp16.h", NVRTC)
    toolkit = tmp_path / "CUDA toolkit"
    toolkit.mkdir()
    (toolkit / "include").symlink_to(wheel)
    monkeypatch.setattr(headers, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    headers.system_include_folder.cache_clear()
    kernels({"kernels/half.cu": HALF_KERNEL})
    assert compile_kernel("kernels/half.cu", {}, "sm_90a").resources()[0].entry == "half_add"
    headers.system_include_folder.cache_clear()


def test_a_missing_header_names_itself_every_folder_and_the_package(tmp_path, monkeypatch):
    include = tmp_path / "with a space" / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").write_text("#define CUDA_VERSION 11080\n")
    monkeypatch.setattr(headers, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_PATH", str(include.parent))
    headers.system_include_folder.cache_clear()
    with pytest.raises(CompileError) as caught:
        headers.system_include_folder("cuda_fp4.h", (12, 9))
    for part in ("cuda_fp4.h", "NVRTC 12.9", f"{include} (CUDA 11.8)", "nvidia-cuda-runtime-cu12==12.9.*"):
        assert part in str(caught.value)
    headers.system_include_folder.cache_clear()


# ---- targets


@pytest.mark.parametrize("capability, name", [
    ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"),
    ((10, 3), "sm_103a"), ((12, 0), "sm_120a"),
])  # fmt: skip
def test_a_known_device_gets_its_own_target(capability, name):
    assert choose_target(capability, KNOWN, (12, 9)).name == name


def test_a_device_newer_than_nvrtc_gets_ptx_of_the_newest_older_one():
    assert choose_target((99, 0), KNOWN, (12, 9)).name == "compute_120"
    assert choose_target((10, 3), (80, 90, 100, 120), (12, 8)).name == "compute_100"


def test_a_device_that_nothing_fits_is_refused_in_one_message():
    with pytest.raises(BackendUnavailable) as caught:
        choose_target((99, 0), (50, 70, 75), (11, 0))
    for part in ("sm_990", "NVRTC 11.0", "50, 70, 75"):
        assert part in str(caught.value)
    with pytest.raises(BackendUnavailable, match=r"need sm_80 or newer, this device is sm_75"):
        choose_target((7, 5), KNOWN, (12, 9))


def test_targets_are_spelled_as_nvrtc_spells_them():
    for name in (*COMPILED_ARCHS, "compute_90"):
        assert parse_target(name, KNOWN, (12, 9)).name == name
    for bad in ("sm_75", "sm_86a", "sm_990", "hopper", "sm_", "90a", "sm_\N{ARABIC-INDIC DIGIT NINE}0"):
        with pytest.raises(
            BackendUnavailable, match=r"wanted one of sm_80, sm_86, sm_89, sm_90a, .*, sm_120a, or compute"
        ):
            parse_target(bad, KNOWN, (12, 9))
    assert Target(90, specific=True).name == "sm_90a"


@pytest.mark.parametrize("name", COMPILED_ARCHS)
def test_nvrtc_compiles_for_what_the_tests_compile_for(name, require_arch):
    require_arch(name)
    assert parse_target(name, supported_archs(), NVRTC).name == name


# ---- argument structs


def test_arguments_are_packed_as_c_lays_them_out(kernels):
    kernels(
        {
            "a.cuh": """
struct Some {
    const u8* x;  // comment; with a semicolon
    u32 count;
    i64 stride;   // starts at a multiple of 8
    float f;
};
struct Bad { double d; };
"""
        }
    )
    some = argument_struct("a.cuh", "Some")
    assert some.fields == ("x", "count", "stride", "f")
    assert some.nbytes == 32
    packed = some.pack(0x1122334455667788, 7, -5, 1.0)
    assert packed[0:8] == (0x1122334455667788).to_bytes(8, "little")
    assert packed[8:12] == (7).to_bytes(4, "little")
    assert packed[16:24] == (-5).to_bytes(8, "little", signed=True)
    with pytest.raises(CompileError, match="no struct Other"):
        argument_struct("a.cuh", "Other")
    with pytest.raises(CompileError, match="has type double"):
        argument_struct("a.cuh", "Bad")
    assert arguments.__doc__


# ---- kernels, with a driver that only writes down


class FakeDriver:
    def __init__(self):
        self.launches, self.attributes = [], []

    def launchKernel(self, *args):
        self.launches.append(args)

    def funcSetAttribute(self, *args):
        self.attributes.append(args)


class FakeRuntime:
    def __init__(self):
        self.current, self.switches = threading.local(), []

    def getDevice(self):
        return getattr(self.current, "device", 0)

    def setDevice(self, device):
        self.current.device = device
        self.switches.append(device)

    def deviceGetAttribute(self, attribute, device):
        return {75: 9, 76: 0}[attribute]


@contextmanager
def fake_relaxed_capture():
    FakeModule.may_load = True
    yield
    FakeModule.may_load = False


class FakeModule:
    loads, may_load = 0, False

    def load(self, image):
        assert FakeModule.may_load, "while a graph is captured, kernels load only where the thread is allowed to"
        FakeModule.loads += 1

    def get_function(self, name):
        return type("Function", (), {"ptr": 0x1234})


@pytest.fixture
def fake(monkeypatch):
    driver, runtime = FakeDriver(), FakeRuntime()
    monkeypatch.setattr(kernel, "_cuda", lambda: (driver, runtime, FakeModule))
    monkeypatch.setattr(kernel, "relaxed_capture", fake_relaxed_capture)
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_building", {})
    monkeypatch.setattr(kernel, "_thread", kernel._Thread())
    for cached in (kernel.device_attribute, kernel.device_target):
        cached.cache_clear()
    FakeModule.loads = 0
    yield driver, runtime
    for cached in (kernel.device_attribute, kernel.device_target):
        cached.cache_clear()


def test_a_launch_goes_to_the_kernel_s_device_and_the_current_one_is_restored(fake):
    driver, runtime = fake
    k = kernel.get_kernel("kernels/relayout.cu", "relayout", {"THREADS": 64}, 1)
    assert runtime.getDevice() == 0
    runtime.switches.clear()
    k.launch((3, 1, 1), (64, 1, 1), b"\1" * 16, 0xABC)
    assert runtime.switches == [1, 0]
    assert driver.launches[-1][:9] == (0x1234, 3, 1, 1, 64, 1, 1, 0, 0xABC)
    home = kernel.get_kernel("kernels/relayout.cu", "relayout", {"THREADS": 64}, 0)
    home.launch((1, 1, 1), (64, 1, 1), b"", 0)  # gives this thread its context
    runtime.switches.clear()
    home.launch((1, 1, 1), (64, 1, 1), b"", 0)
    assert runtime.switches == []


def test_threads_that_ask_for_one_kernel_compile_and_load_it_once(fake, monkeypatch):
    compiled = []
    gate = threading.Barrier(8)

    def compile_slowly(source, defines, arch, *, fmad=False):
        compiled.append(source)
        return compiler.CompiledKernel(b"image", "")

    monkeypatch.setattr(kernel, "cached_compile", compile_slowly)
    found = []

    def ask():
        gate.wait()
        found.append(kernel.get_kernel("kernels/amax.cu", "amax", {"A": 1}, 0))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == FakeModule.loads == 1
    assert len(set(map(id, found))) == 1


def test_dynamic_shared_memory_is_allowed_before_the_first_launch(fake):
    driver, _ = fake
    kernel.get_kernel("kernels/relayout.cu", "relayout", {"THREADS": 64}, 0, shared_bytes=100_000)
    assert driver.attributes == [(0x1234, 8, 100_000)]


def test_a_refused_launch_names_the_kernel(fake, monkeypatch):
    driver, _ = fake

    def refuse(*args):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

    driver.launchKernel = refuse
    k = kernel.get_kernel("kernels/relayout.cu", "relayout", {"THREADS": 64}, 0)
    with pytest.raises(BackendUnavailable, match=r"relayout of kernels/relayout.cu \[THREADS=64\] .*grid \(0, 1, 1\)"):
        k.launch((0, 1, 1), (64, 1, 1), b"", 0)


# ---- status


def test_backends_says_why_there_is_no_device():
    found = status()
    if not found.usable:
        assert "cuda" in found.reason.lower()
    described = describe()
    assert described["nvrtc"] == f"{NVRTC[0]}.{NVRTC[1]}"
    assert described["headers"] == "none needed"


@pytest.mark.parametrize("status_code", ["cudaErrorInsufficientDriver", "cudaErrorNoDevice"])
def test_no_driver_and_no_device_are_told_apart_from_a_crash(monkeypatch, status_code):
    cupy = pytest.importorskip("cupy")

    def refuse():
        raise cupy.cuda.runtime.CUDARuntimeError(
            {"cudaErrorInsufficientDriver": 35, "cudaErrorNoDevice": 100}[status_code]
        )

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", refuse)
    found = status()
    assert not found.usable
    assert status_code in found.reason


def test_importing_the_backend_needs_neither_a_gpu_nor_cupy():
    code = "import sys; sys.modules['cupy'] = None; import fp4rt.cuda; print(fp4rt.cuda.status().reason)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "CuPy cannot be imported" in done.stdout
