"""Every kernel compiles for every architecture, without a GPU, and spills nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from fp4rt.cuda.arch import COMPILED_ARCHS, Target
from fp4rt.cuda.compiler import nvrtc_version, system_headers_of
from fp4rt.cuda.gemm.hopper import PrefillTile, SmallTile
from fp4rt.cuda.gemm.hopper_choice import worth_measuring
from fp4rt.cuda.gemm.hopper_measured import MEASURED, MEASURED_NVFP4
from fp4rt.cuda.kernel_set import all_kernels, kernels_for
from fp4rt.errors import BackendUnavailable

try:
    nvrtc_version()
except BackendUnavailable as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)


# Others run one of these four's instructions: of a kernel with many forms, a few are compiled for them.
IN_FULL = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
assert set(IN_FULL) < set(COMPILED_ARCHS)


def compiled_for(arch):
    """Source to what is compiled of it."""
    target = Target(int(arch.removeprefix("sm_").removesuffix("a")), specific=arch.endswith("a"))
    found = defaultdict(list)
    for spec in kernels_for(target):
        found[spec.source].append(spec)
    return found if arch in IN_FULL else {source: specs[::5] for source, specs in found.items()}


KERNELS = [(arch, source, specs) for arch in COMPILED_ARCHS for source, specs in compiled_for(arch).items()]


@pytest.mark.parametrize(("arch", "source", "specs"), KERNELS, ids=[f"{arch}-{source}" for arch, source, _ in KERNELS])
def test_every_kernel_compiles_without_spills_or_serialized_products(arch, source, specs, require_arch):
    require_arch(arch)
    for spec in specs:
        compiled = spec.compile(arch)
        used = {row.entry: row for row in compiled.resources()}
        assert spec.entry in used, f"{spec} has no entry {spec.entry}: {sorted(used)}"
        assert used[spec.entry].spill_bytes == 0, spec
        assert "instructions are serialized" not in compiled.log, spec


def test_products_of_warpgroups_are_among_them():
    assert {"kernels/gemm_small.cu", "kernels/gemm_prefill.cu"} <= {source for _, source, _ in KERNELS}
    assert all(len(compiled_for(arch)) == len(compiled_for("sm_80")) for arch in COMPILED_ARCHS if arch != "sm_90a")


def forms(tiles):
    """Each with a piece of work for each block, as fewer tokens mostly are; and some with several."""
    several = {tile for tile in tiles if isinstance(tile, PrefillTile) and tile.tokens in (64, 112, 208)}
    tails = {replace(tile, k_tail=True) for tile in several if tile.stage_chunks == 1}
    return several | tails | {replace(tile, one_piece=True) for tile in tiles}


def fewer_small_tiles():
    """The measured ones cut down to every number of tokens, and those with the most sums."""
    found = set()
    for rows in (*MEASURED.values(), *MEASURED_NVFP4.values()):
        for (fewer, _), (_, tile) in itertools.pairwise([(0, None), *rows]):
            if isinstance(tile, SmallTile):
                found |= {replace(tile, token_tiles=tiles) for tiles in range(fewer // 8 + 1, tile.token_tiles + 1)}
    assert {tile.token_tiles for tile in found} >= set(range(2, 9))
    return found, {tile for tile in worth_measuring(128, 28672, 8192, 132, most=99) if isinstance(tile, SmallTile)}


def fewer_tiles():
    """(name, specs) of products with fewer tokens than a measured tile has."""
    small, most_sums = fewer_small_tiles()
    prefill = {PrefillTile(tokens, 1, 8, 4, 2, 4) for tokens in (144, 208, 240)}
    prefill |= {PrefillTile(tokens, 1, 12, 6, 2, 4, row_groups=3) for tokens in (64, 112, 128, 160)}
    prefill |= {PrefillTile(tokens, 1, 8, 4, 2, 4, stage_chunks=2) for tokens in (16, 48, 64, 112)}
    fours = {tile for tile in worth_measuring(64, 1280, 8192, 132, most=99) if tile.k_cluster == 4}
    assert {type(tile) for tile in fours} == {SmallTile}
    yield "clusters of four", [tile.spec("bfloat16") for tile in forms(fours)]
    yield "small", [tile.spec("bfloat16") for tile in forms(small) if tile.token_tiles % 2 == 1]
    yield "small, fp16", [tile.spec("float16") for tile in forms(small) if tile.token_tiles in (2, 6, 8, 10, 14)]
    yield "small, most sums", [tile.spec("bfloat16") for tile in forms(most_sums)]
    yield "prefill", [tile.spec("bfloat16") for tile in forms(prefill)]


@pytest.mark.parametrize(("name", "specs"), [pytest.param(*each, id=each[0]) for each in fewer_tiles()])
def test_tiles_cut_down_to_fewer_tokens_are_not_serialized_either(name, specs, require_arch):
    """Each number of tokens is a compilation of its own, for which ptxas may run out of registers."""
    require_arch("sm_90a")
    assert specs
    for spec in specs:
        compiled = spec.compile("sm_90a")
        assert "instructions are serialized" not in compiled.log, spec
        if name != "prefill":  # which may keep what it computes once
            assert not any(used.spill_bytes for used in compiled.resources()), spec


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
