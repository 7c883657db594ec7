"""The kernel cache never fails a call, never serves what is not asked for, and says once where to look."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
import tempfile
import warnings

import pytest

from fp4rt import cache_folder
from fp4rt.cuda import cache, compiler
from fp4rt.cuda.cache import cached_compile, entry_key
from fp4rt.cuda.compiler import CompiledKernel
from fp4rt.errors import BackendUnavailable

try:
    compiler.nvrtc_version()
except BackendUnavailable as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

SOURCE, DEFINES, ARCH = "kernels/relayout.cu", {"THREADS": 64}, "sm_90a"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4RT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """Counts compilations, and makes them cheap."""
    calls = []

    def compile_kernel(source, defines, arch, *, fmad=False):
        calls.append((source, dict(defines), arch))
        return CompiledKernel(b"\x7fELF" + repr(calls[-1]).encode(), "log of it")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    return calls


def get(**changes):
    call = {"source": SOURCE, "defines": DEFINES, "arch": ARCH, **changes}
    return cached_compile(call["source"], call["defines"], call["arch"])


def entry(folder):
    (only,) = folder.glob("*.kernel")
    return only


def test_the_second_call_reads_the_first_one_s_entry(folder, compilations):
    first, second = get(), get()
    assert first == second
    assert len(compilations) == 1
    assert not list(folder.glob(".new-*"))


def test_every_part_of_the_call_is_part_of_the_key(folder, compilations, monkeypatch):
    get()
    get(arch="sm_89")
    get(defines={"THREADS": 128})
    get(source="kernels/amax.cu")
    cached_compile(SOURCE, DEFINES, ARCH, fmad=True)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (99, 9))
    get()
    assert len(compilations) == 6
    assert len(list(folder.glob("*.kernel"))) == 6


def test_a_change_in_an_included_header_changes_the_key(folder, monkeypatch):
    before = entry_key(SOURCE, DEFINES, ARCH)
    texts = dict(compiler.sources_of(SOURCE))
    texts["num/integers.cuh"] += "// another comment\n"
    monkeypatch.setattr(cache, "sources_of", lambda source: texts)
    assert entry_key(SOURCE, DEFINES, ARCH) != before


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty", "foreign"])
def test_a_damaged_entry_is_compiled_again_and_replaced(folder, compilations, damage):
    wanted = get()
    path = entry(folder)
    content = path.read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    path.write_bytes({"truncated": content[:-5], "flipped bit": flipped, "empty": b"", "foreign": b"hello"}[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get() == wanted
    assert len(compilations) == 2
    assert path.read_bytes() == content


def test_an_entry_under_another_s_name_is_compiled_again(folder, compilations):
    foreign = get(arch="sm_89")
    entry(folder).rename(folder / f"{entry_key(SOURCE, DEFINES, ARCH)}.kernel")
    assert get() != foreign
    assert len(compilations) == 2


def works_with_one_warning(folder, compilations):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = get(), get(defines={"THREADS": 128})
    assert first.image.startswith(b"\x7fELF")
    assert second.image.startswith(b"\x7fELF")
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1, texts
    assert str(folder) in texts[0]
    assert "FP4RT_CACHE_DIR" in texts[0]


def test_a_plain_file_in_the_folder_s_place_costs_one_warning(folder, compilations):
    folder.write_text("in the way")
    works_with_one_warning(folder, compilations)
    assert folder.read_text() == "in the way"


def test_a_folder_that_cannot_be_written_costs_one_warning(folder, compilations, monkeypatch):
    folder.mkdir()
    if os.geteuid() == 0:  # permissions do not bind root: refuse in their place
        opened = type(folder).open

        def refuse(path, *args, **kwargs):
            if path.name.startswith(".new-"):
                raise PermissionError(13, "Permission denied", str(folder))
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(type(folder), "open", refuse)
    else:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    works_with_one_warning(folder, compilations)


def test_an_entry_that_cannot_be_read_costs_one_warning(folder, compilations, monkeypatch):
    get()
    get(defines={"THREADS": 128})
    if os.geteuid() == 0:
        read_bytes = type(folder).read_bytes

        def refuse(path):
            if path.suffix == ".kernel":
                raise PermissionError(13, "Permission denied", str(path))
            return read_bytes(path)

        monkeypatch.setattr(type(folder), "read_bytes", refuse)
    else:
        for path in folder.glob("*.kernel"):
            path.chmod(0)
    works_with_one_warning(folder, compilations)


def test_a_full_disk_leaves_nothing_behind(folder, compilations, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_folder.os, "replace", full)
    works_with_one_warning(folder, compilations)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_decides_who_reads_an_entry(folder, compilations, umask, mode):
    before = os.umask(umask)
    try:
        get()
    finally:
        os.umask(before)
    assert stat.S_IMODE(entry(folder).stat().st_mode) == mode


def test_what_must_be_kept_is_no_mere_warning(folder, compilations):
    folder.write_text("in the way")
    with pytest.raises(OSError, match="Not a directory|File exists"):
        cached_compile(SOURCE, DEFINES, ARCH, must_keep=True)


def test_a_folder_that_cannot_have_files_is_said_to_be_one(tmp_path, monkeypatch):
    for name in ("x" * 300, "missing"):
        monkeypatch.setenv("FP4RT_CACHE_DIR", str(tmp_path / name))
        assert (cache_folder.why_unwritable() is None) == (name == "missing")


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """As in a container that runs under a number without a name."""
    for variable in ("HOME", "XDG_CACHE_HOME", "FP4RT_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)

    def nobody(user):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_folder._homeless_folder.cache_clear()
    yield tmp_path / f"fp4rt-{os.getuid()}"
    cache_folder._homeless_folder.cache_clear()


def test_without_a_home_the_folder_is_the_users_own_among_the_temporary_ones(homeless):
    assert cache_folder.cache_folder() == homeless
    assert stat.S_IMODE(homeless.stat().st_mode) == 0o700
    cache_folder._homeless_folder.cache_clear()
    assert cache_folder.cache_folder() == homeless


@pytest.mark.parametrize("planted", ["open to others", "link"])
def test_a_folder_that_somebody_else_may_have_filled_is_not_read(homeless, tmp_path, planted):
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        homeless.symlink_to(tmp_path / "elsewhere")
    else:
        homeless.mkdir()
        homeless.chmod(0o755)
    found = cache_folder.cache_folder()
    assert found != homeless
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_without_any_place_nothing_is_kept_and_nothing_fails(homeless, compilations, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="FP4RT_CACHE_DIR"):
        assert get().image.startswith(b"\x7fELF")


def test_only_a_chosen_folder_depends_on_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.delenv("FP4RT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder.cache_folder() == tmp_path / ".cache" / "fp4rt"
    monkeypatch.setenv("FP4RT_CACHE_DIR", "~/kept")
    assert cache_folder.cache_folder() == tmp_path / "kept"


RACER = """
import sys, hashlib
from fp4rt.cuda.cache import cached_compile
print(hashlib.sha256(cached_compile("kernels/relayout.cu", {"THREADS": 64}, "sm_90a").image).hexdigest())
"""


def test_processes_that_race_for_one_entry_all_get_it(folder):
    environment = {**os.environ, "FP4RT_CACHE_DIR": str(folder)}
    racers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", RACER], env=environment, stdout=-1, stderr=-1, text=True)
        for _ in range(8)
    ]
    results = [racer.communicate(timeout=120) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers), [r[1] for r in results]
    assert len({out for out, _ in results}) == 1
    assert len(list(folder.iterdir())) == 1


def test_an_entry_holds_the_image_that_nvrtc_gave(folder):
    fresh, read = get(), get()
    assert fresh.image == read.image
    assert fresh.image.startswith(b"\x7fELF")
    headers_at, header_bytes, headers = (
        int.from_bytes(fresh.image[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58))
    )
    assert len(fresh.image) >= headers_at + header_bytes * headers  # the last byte too: CuPy drops one
    assert read.resources() == fresh.resources()
    assert read.resources()[0].registers > 0
