"""CUDA source to machine code through NVRTC, without a GPU and without any header outside the project.

``compile_kernel("kernels/quantize.cu", {"LAYOUT": 1}, "sm_90a")`` reads the source and every header that it includes,
directly or not, hands them to NVRTC from memory and returns the image with ptxas's resource report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fp4rt.cuda.headers import system_include_folder
from fp4rt.errors import BackendUnavailable, CompileError
from fp4rt.sources import read_source

__all__ = ["FLAGS", "CompiledKernel", "Resources", "compile_kernel", "nvrtc_version", "sources_of", "supported_archs"]

FLAGS: tuple[tuple[str, str], ...] = (
    ("-std=c++17", "if constexpr, inline constants"),
    ("-default-device", "the bit conversions are plain functions that a host compiler takes too"),
    ("--ftz=false", "the arithmetic keeps subnormals: global_scale * (v * R6) may be one"),
    ("--prec-div=true", "IEEE division"),
    ("--prec-sqrt=true", "IEEE square root"),
    ("--no-source-include", "headers come from memory, never from the current folder"),
    ("--ptxas-options=-v", "registers and spills, kept beside the image"),
)
CONTRACTION = ("--fmad=false", "--fmad=true")  # quantizers: each product and each sum is rounded on its own
Defines = Mapping[str, int | str]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
_DIAGNOSTIC = re.compile(r"^(?P<file>[\w./-]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)
_CONTEXT_LINES = 3
_MOST_EXCERPTS = 3


@dataclass(frozen=True)
class Resources:
    """What ptxas gave one entry: registers a thread, spilled bytes, stack bytes, static shared memory."""

    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """An image (cubin, or PTX for a device newer than NVRTC) and ptxas's report (empty for PTX)."""

    image: bytes
    log: str

    def resources(self) -> list[Resources]:
        """One row an entry, read from the report."""
        rows = []
        for part in self.log.split("Compiling entry function '")[1:]:
            rows.append(
                Resources(
                    entry=part.split("'", 1)[0],
                    registers=_number(r"Used (\d+) registers", part),
                    spill_bytes=_number(r"(\d+) bytes spill stores", part) + _number(r"(\d+) bytes spill loads", part),
                    stack_bytes=_number(r"(\d+) bytes stack frame", part),
                    shared_bytes=_number(r"(\d+) bytes smem", part),
                )
            )
        return rows


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


@cache
def _nvrtc():  # type: ignore[no-untyped-def]  # a Cython module without stubs
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # what an import of CuPy raises depends on what is broken
        raise BackendUnavailable(
            f"compiling CUDA kernels needs CuPy and NVRTC: {error}; pip install 'fp4rt[cuda12]' or 'fp4rt[cuda13]'"
        ) from error
    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that CuPy found.

    Raises:
        BackendUnavailable: CuPy or NVRTC is missing.
    """
    major, minor = _nvrtc().getVersion()
    return major, minor


@cache
def supported_archs() -> tuple[int, ...]:
    """Architecture numbers that this NVRTC compiles for."""
    return tuple(_nvrtc().getSupportedArchs())


@cache
def sources_of(source: str) -> dict[str, str]:
    """``source`` and every project header that it includes, directly or not: name to text, in order of discovery."""
    found: dict[str, str] = {}
    todo = [source]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = read_source(name)
            todo += [included for quote, included in _INCLUDE.findall(found[name]) if quote == '"']
    return found


@cache
def system_headers_of(source: str) -> tuple[str, ...]:
    """Headers in angle brackets that ``source`` or one of its headers includes; none, wherever possible."""
    return tuple(name for text in sources_of(source).values() for quote, name in _INCLUDE.findall(text) if quote == "<")


def options_for(source: str, defines: Defines, arch: str, fmad: bool) -> list[str]:
    """NVRTC's options in full; with the sources and NVRTC's version they decide the image."""
    options = [flag for flag, _ in FLAGS] + [CONTRACTION[fmad], f"-arch={arch}"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    for header in system_headers_of(source):
        option = f"-I{system_include_folder(header, nvrtc_version())}"
        if option not in options:
            options.append(option)
    return options


def compile_kernel(source: str, defines: Defines, arch: str, *, fmad: bool = False) -> CompiledKernel:
    """Compile one source for one target.

    Args:
        source: name under ``kernels_src``, such as ``"kernels/quantize.cu"``.
        defines: macros; values are integers or C tokens.
        arch: NVRTC's spelling, ``sm_90a``; ``compute_90`` gives PTX.
        fmad: let the compiler contract a * b + c. False for everything whose bits are specified.

    Raises:
        CompileError: NVRTC refused; shows its log and the numbered lines around each error.
        BackendUnavailable: CuPy or NVRTC is missing.
    """
    nvrtc = _nvrtc()
    texts = sources_of(source)
    headers = [name for name in texts if name != source]
    program = nvrtc.createProgram(
        texts[source], source, [texts[h].encode() for h in headers], [h.encode() for h in headers]
    )
    try:
        try:
            nvrtc.compileProgram(program, options_for(source, defines, arch, fmad))
        except Exception as error:  # NVRTCError of any CuPy version
            log = nvrtc.getProgramLog(program).strip("\0 \n") or str(error)
            raise CompileError(_explain(source, defines, arch, log, texts)) from error
        image = nvrtc.getCUBIN(program) if arch.startswith("sm_") else nvrtc.getPTX(program)
        # CuPy takes the last byte off both, as if they were strings. PTX needs its NUL, and a cubin its last byte,
        # which belongs to the padding of the ELF file's program headers.
        return CompiledKernel(_as_bytes(image) + b"\0", nvrtc.getProgramLog(program).strip("\0 \n"))
    finally:
        nvrtc.destroyProgram(program)


def _as_bytes(image: bytes | str) -> bytes:
    return image.encode() if isinstance(image, str) else bytes(image)


def _explain(source: str, defines: Defines, arch: str, log: str, texts: Mapping[str, str]) -> str:
    version = ".".join(str(part) for part in nvrtc_version())
    what = f"NVRTC {version} cannot compile {source} for {arch}"
    if defines:
        what += " with " + ", ".join(f"{k}={v}" for k, v in sorted(defines.items()))
    message = [what + ":", log]
    shown: set[tuple[str, int]] = set()
    for found in _DIAGNOSTIC.finditer(log):
        name, line = found["file"], int(found["line"])
        if name in texts and (name, line) not in shown and len(shown) < _MOST_EXCERPTS:
            shown.add((name, line))
            message.append(_numbered(name, texts[name], line))
    if not shown:
        message.append(f"(the source has {len(texts[source].splitlines())} lines; NVRTC supports {supported_archs()})")
    return "\n".join(message)


def _numbered(name: str, text: str, line: int) -> str:
    lines = text.splitlines()
    first, last = max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES)
    rows = [f"{'>' if i == line else ' '} {i:4d} | {lines[i - 1]}" for i in range(first, last + 1)]
    return "\n".join([f"--- {name}", *rows])
