"""Where a toolkit header is found, for a kernel that cannot do without one: the wheels first, then a toolkit.

A folder counts only if its ``cuda.h`` is of NVRTC's major version: headers of one CUDA release do not compile under
the NVRTC of another. The kernels of this project include none.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fp4rt.errors import CompileError

__all__ = ["system_include_folder"]


def _candidates(major: int) -> list[Path]:
    spec = find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    folders = [w / part / "include" for w in wheels for part in ("cuda_runtime", f"cu{major}")]
    toolkits = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME")]
    return folders + [Path(t) / "include" for t in toolkits if t] + [Path("/usr/local/cuda/include")]


def _version(folder: Path) -> int | None:
    try:
        found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"))
    except OSError:
        return None
    return int(found.group(1)) if found else None


@cache
def system_include_folder(header: str, nvrtc_version: tuple[int, int]) -> Path:
    """The folder that has ``header`` for this NVRTC.

    Raises:
        CompileError: nowhere; names the header, each folder with what is wrong there, and the package to install.
    """
    major, minor = nvrtc_version
    seen = []
    for folder in _candidates(major):
        version = _version(folder)
        if version is None:
            seen.append(f"{folder} (no cuda.h)")
        elif version // 1000 != major:
            seen.append(f"{folder} (CUDA {version // 1000}.{version % 1000 // 10})")
        elif not (folder / header).is_file():
            seen.append(f"{folder} (no {header})")
        else:
            return folder
    package = f"nvidia-cuda-runtime-cu{major}" if major < 13 else "nvidia-cuda-runtime"
    raise CompileError(
        f"a kernel needs the CUDA header {header} for NVRTC {major}.{minor}; looked in {'; '.join(seen)}; "
        f"pip install '{package}=={major}.{minor}.*'"
    )
