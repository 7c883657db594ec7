"""Device code built by g++: num/, layout/, block/ and kernels/ as they are, host/ptx/ in place of the instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from fp4rt.sources import kernels_root

HOST = Path(__file__).parent / "host"
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
FLAGS += ["-ffp-contract=off"]  # as the kernels are compiled: each product and each sum rounds on its own


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """``build("kernel.cpp", "-O1", "-DNAME=VALUE", ...)`` -> the loaded library; each set of options is built once."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to build the device functions for the host")
    folder = tmp_path_factory.mktemp("host")
    built = {}

    def build(source, *options):
        key = (source, options)
        if key not in built:
            library = folder / f"{len(built)}.so"
            includes = ["-include", str(HOST / "qualifiers.h"), "-I", str(HOST), "-I", str(kernels_root())]
            command = [compiler, *FLAGS, *options, *includes, str(HOST / source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[key] = ctypes.CDLL(str(library))
        return built[key]

    return build
