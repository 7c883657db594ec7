"""Kernel sources built by g++, two ways.

``build``: device functions and simple kernels as they are, host/ptx/ in place of the instructions. ``emulate``: whole
product and packing kernels, thread by thread, emulation/ in place of what a block shares.

``nvrtc_knows``, ``require_arch``: an older NVRTC than the newest knows fewer architectures.

``compilers``, ``compiled``: processes that compile, and all kernels for all architectures.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from fp4rt.cuda.arch import COMPILED_ARCHS, parse_target
from fp4rt.cuda.compiler import nvrtc_version, supported_archs
from fp4rt.cuda.kernel_set import kernels_for
from fp4rt.errors import BackendUnavailable
from fp4rt.sources import kernels_root

COMPILING = "test_kernels_compile.py"
HOST = Path(__file__).parent / "host"
EMULATION = Path(__file__).parent / "emulation"
# -ffp-contract=off as the kernels are compiled: each product and each sum rounds on its own
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-ffp-contract=off"]
HOST_FLAGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-include", str(HOST / "qualifiers.h")]


def _builder(folder, sources, flags):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to build the kernels' sources for the host")
    built = {}
    number = itertools.count()

    def build(source, *options):
        key = (source, options)
        if key not in built:
            library = folder / f"{next(number)}.so"
            includes = ["-I", str(sources), "-I", str(kernels_root())]
            command = [compiler, *FLAGS, *flags, *options, *includes, str(sources / source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[key] = ctypes.CDLL(str(library))
        return built[key]

    return build


@pytest.fixture(scope="session")
def nvrtc_knows():
    """``nvrtc_knows("sm_103a")``: whether NVRTC compiles for it; 12.8 does not."""
    numbers = set(map(str, supported_archs()))
    return lambda arch: arch.partition("_")[2].removesuffix("a") in numbers


@pytest.fixture(scope="session")
def require_arch(nvrtc_knows):
    """``require_arch("sm_103a")``: skip where NVRTC does not compile for it."""

    def require(arch):
        if not nvrtc_knows(arch):
            major, minor = nvrtc_version()
            pytest.skip(f"needs an NVRTC that compiles for {arch}, this is {major}.{minor}")

    return require


@pytest.fixture(scope="session")
def compilers():
    """As many processes as there are cores: in threads of one, NVRTC compiles little side by side."""
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    yield pool
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def compiled(request):
    """(spec, arch) -> future of the compilation, where its tests run.

    All begin before the folder's first test, and use the cores that other tests leave idle.
    """
    if not any(item.path.name == COMPILING for item in request.session.items):
        return {}
    try:
        version = nvrtc_version()
    except BackendUnavailable:
        return {}
    archs, compilers = supported_archs(), request.getfixturevalue("compilers")
    known = [arch for arch in COMPILED_ARCHS if request.getfixturevalue("nvrtc_knows")(arch)]
    specs = [(spec, arch) for arch in known for spec in kernels_for(parse_target(arch, archs, version))]
    return {(spec, arch): compilers.submit(spec.compile, arch) for spec, arch in specs}


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build("kernel.cpp", "-O1", "-DNAME=VALUE", ...)`` -> the loaded library; each set of options is built once."""
    return _builder(tmp_path_factory.mktemp("host"), HOST, HOST_FLAGS)


@pytest.fixture(scope="session")
def emulate(tmp_path_factory):
    """``emulate("kernel.cpp", "-DNAME=VALUE", ...)`` -> the loaded library; each set of options is built once."""
    return _builder(tmp_path_factory.mktemp("emulation"), EMULATION, ["-O1", "-w"])
