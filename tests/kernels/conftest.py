"""Kernel sources built by g++, two ways.

``build``: device functions and simple kernels as they are, host/ptx/ in place of the instructions. ``emulate``: whole
product and packing kernels, thread by thread, emulation/ in place of what a block shares.

``nvrtc_knows``, ``require_arch``: an older NVRTC than the newest knows fewer architectures.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from fp4rt.cuda.compiler import nvrtc_version, supported_archs
from fp4rt.sources import kernels_root

HOST = Path(__file__).parent / "host"
EMULATION = Path(__file__).parent / "emulation"
# -ffp-contract=off as the kernels are compiled: each product and each sum rounds on its own
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-ffp-contract=off"]
HOST_FLAGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-include", str(HOST / "qualifiers.h")]


def _builder(folder, sources, flags):
    """``folder`` is one for all processes of a test run: what one has built is there for the others."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to build the kernels' sources for the host")

    @cache
    def build(source, *options):
        command = [
            compiler,
            *FLAGS,
            *flags,
            *options,
            "-I",
            str(sources),
            "-I",
            str(kernels_root()),
            str(sources / source),
        ]
        library = folder / f"{hashlib.sha256(repr(command).encode()).hexdigest()}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                done = subprocess.run([*command, "-o", f"{own}/{library.name}"], capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                os.replace(f"{own}/{library.name}", library)
        return ctypes.CDLL(str(library))

    return build


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The folder of what is built in this test run, whose processes have folders of their own beside each other."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    return folder


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
def build(libraries):
    """``build("kernel.cpp", "-O1", "-DNAME=VALUE", ...)`` -> the loaded library; each set of options is built once."""
    return _builder(libraries, HOST, HOST_FLAGS)


@pytest.fixture(scope="session")
def emulate(libraries):
    """``emulate("kernel.cpp", "-DNAME=VALUE", ...)`` -> the loaded library; each set of options is built once."""
    # Threads jump to other stacks, which the longjmp of _FORTIFY_SOURCE, some systems' default, takes for an error
    return _builder(libraries, EMULATION, ["-O1", "-w", "-U_FORTIFY_SOURCE"])
