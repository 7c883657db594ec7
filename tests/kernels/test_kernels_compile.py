"""Every kernel compiles for every architecture, without a GPU, and spills nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fp4rt.cuda.arch import COMPILED_ARCHS
from fp4rt.cuda.compiler import nvrtc_version, system_headers_of
from fp4rt.cuda.gemm.hopper import PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_choice import worth_measuring
from fp4rt.cuda.gemm.hopper_measured import MEASURED, MEASURED_NVFP4
from fp4rt.cuda.kernel_set import all_kernels
from fp4rt.cuda.kernel_spec import KernelSpec
from fp4rt.errors import BackendUnavailable

try:
    NVRTC = nvrtc_version()
except BackendUnavailable as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)


@pytest.mark.parametrize("arch", COMPILED_ARCHS)
def test_every_kernel_compiles_without_spills(compiled, arch, capsys, require_arch):
    require_arch(arch)
    rows = []
    for (spec, of_arch), future in compiled.items():
        if of_arch == arch:
            found = {row.entry: row for row in future.result().resources()}
            assert spec.entry in found, f"{spec} has no entry {spec.entry} for {arch}: {sorted(found)}"
            rows.append((spec, found[spec.entry]))
    assert rows
    with capsys.disabled():
        print(f"\n{arch}, NVRTC {NVRTC[0]}.{NVRTC[1]}: registers, spilled bytes, stack bytes, static shared bytes")
        for spec, used in rows:
            print(f"{used.registers:6}{used.spill_bytes:6}{used.stack_bytes:6}{used.shared_bytes:7}  {spec}")
    spilled = [str(spec) for spec, used in rows if used.spill_bytes]
    assert not spilled, f"{arch}: {spilled}"


def test_products_of_warpgroups_run_beside_the_warps_and_are_not_serialized(compiled):
    serialized = [f"{spec} for {arch}" for (spec, arch), future in compiled.items() if "C7512" in future.result().log]
    assert not serialized
    assert any("gemm_small.cu" in str(spec) for spec, _ in compiled)  # which ptxas would say it of


def test_tiles_cut_down_to_fewer_tokens_are_not_serialized_either(compilers, require_arch):
    """Each number of tokens is a compilation of its own, for which ptxas may run out of registers."""
    require_arch("sm_90a")
    small, prefill = set(), {PrefillTile(tokens, 1, 8, 4, 2, 2) for tokens in range(144, 257, 32)}
    prefill |= {PrefillTile(tokens, 1, 8, 4, 2, 2, stage_chunks=2) for tokens in range(16, 129, 16)}
    for rows in (*MEASURED.values(), *MEASURED_NVFP4.values()):
        for (fewer, _), (_, tile) in itertools.pairwise([(0, None), *rows]):
            if isinstance(tile, SmallTile):
                small |= {replace(tile, token_tiles=tiles) for tiles in range(fewer // 8 + 1, tile.token_tiles + 1)}
    assert {tile.token_tiles for tile in small} >= set(range(2, 9))
    most_sums = {tile for m in (112, 128) for tile in worth_measuring(m, 28672, 8192, 132, most=99)}
    most_sums = {tile for tile in most_sums if isinstance(tile, SmallTile)}
    specs = [tile.spec("bfloat16") for tile in forms(small | most_sums | prefill)]
    specs += [tile.spec("float16") for tile in forms(small) if tile.token_tiles % 2 == 0]
    found = list(zip(specs, compilers.map(KernelSpec.compile, specs, itertools.repeat("sm_90a")), strict=True))
    assert not [str(spec) for spec, compiled in found if "C7512" in compiled.log]
    spilled = {str(spec) for spec, compiled in found if any(used.spill_bytes for used in compiled.resources())}
    assert not [spec for spec in spilled if "gemm_small" in spec]  # prefill may keep what it computes once


def forms(tiles):
    """Each with a piece of work for each block, as fewer tokens mostly are; and some with several."""
    several = {tile for tile in tiles if isinstance(tile, PrefillTile) and tile.tokens in (64, 112, 208)}
    return several | {replace(tile, one_piece=True) for tile in tiles}


def test_every_kernel_file_is_in_the_set():
    from fp4rt.sources import source_names

    in_files = {name for name in source_names() if name.endswith(".cu")}
    assert in_files == {spec.source for spec in all_kernels()}


def test_no_kernel_needs_a_toolkit_header():
    assert {
        spec.source: system_headers_of(spec.source) for spec in all_kernels() if system_headers_of(spec.source)
    } == {}


def test_a_kernel_below_its_architecture_fails_loudly_instead_of_running_empty():
    from fp4rt.cuda.compiler import compile_kernel
    from fp4rt.errors import CompileError

    for source in {spec.source for spec in all_kernels()}:
        spec = next(s for s in all_kernels() if s.source == source)
        too_old = "sm_89" if spec.archs else "sm_75"
        with pytest.raises(CompileError, match=f"cannot compile {source} for {too_old}"):
            compile_kernel(source, dict(spec.defines), too_old, fmad=spec.fmad)
