"""The wheel, the sdist and the editable install carry the kernels and run, each in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None:
    pytest.skip("needs the packages build and hatchling (the dev extra)", allow_module_level=True)

# Run in the fresh environment, in an empty folder: the package must not be found by accident of the current folder.
USE = """
import json, pathlib, sys
import numpy as np
import fp4rt, fp4rt.sources
q = fp4rt.quantize(np.full((2, 32), 6, np.float32), 1.0, layout="linear")
assert q.data.tolist() == [[0x77] * 16] * 2 and q.scales.tolist() == [[0x38] * 2] * 2
names = fp4rt.sources.source_names()
print(json.dumps({
    "package": str(pathlib.Path(fp4rt.__file__).parent),
    "kernels": str(fp4rt.sources.kernels_root()),
    "names": names,
    "text": len(fp4rt.sources.read_source(names[0])),
    "typed": (pathlib.Path(fp4rt.__file__).parent / "py.typed").is_file(),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of this tree, and the wheel built from that sdist, as ``python -m build`` makes them."""
    out = tmp_path_factory.mktemp("artefacts")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl"))}


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """An environment without fp4rt. Its dependencies are those of the running one, by path: nothing is downloaded.

    The folder is added as a plain path, so that the running environment's own editable fp4rt stays out.
    """
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *arguments: str | Path) -> None:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    )
    run(*pip, *arguments, cwd=python.parent)


def use(python: Path, tmp_path: Path) -> dict[str, object]:
    import json

    empty = tmp_path / "empty"
    empty.mkdir()
    return json.loads(run(python, "-c", USE, cwd=empty))


def kernel_names() -> list[str]:
    root = ROOT / "kernels_src"
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".inc"))


def test_wheel_installs_and_finds_its_kernels_inside_the_package(artefacts, fresh_python, tmp_path):
    install(fresh_python, artefacts["wheel"])
    seen = use(fresh_python, tmp_path)
    assert str(tmp_path / "venv") in seen["package"]
    assert seen["kernels"] == f"{seen['package']}/kernels_src"
    assert seen["names"] == kernel_names()
    assert seen["text"] > 0
    assert seen["typed"]


def test_sdist_installs_and_finds_its_kernels_inside_the_package(artefacts, fresh_python, tmp_path):
    install(fresh_python, artefacts["sdist"])
    seen = use(fresh_python, tmp_path)
    assert str(tmp_path / "venv") in seen["package"]
    assert seen["kernels"] == f"{seen['package']}/kernels_src"
    assert seen["names"] == kernel_names()


def test_editable_install_of_the_sdist_uses_the_kernels_of_the_tree(artefacts, fresh_python, tmp_path):
    with tarfile.open(artefacts["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = next(tmp_path.glob("fp4rt-*"))
    install(fresh_python, "--editable", tree)
    seen = use(fresh_python, tmp_path)
    assert seen["package"] == str(tree / "fp4rt")
    assert seen["kernels"] == str(tree / "kernels_src")
    assert seen["names"] == kernel_names()


def test_installed_command_answers(artefacts, fresh_python, tmp_path):
    install(fresh_python, artefacts["wheel"])
    assert "quantize" in run(fresh_python.parent / "fp4rt", "--help", cwd=tmp_path)


def test_wheel_holds_the_package_and_nothing_else(artefacts):
    with zipfile.ZipFile(artefacts["wheel"]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fp4rt"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_the_tests_and_the_makefile(artefacts):
    with tarfile.open(artefacts["sdist"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for wanted in ("Makefile", "LICENSE", "README.md", "tests/conftest.py", "tools/environment.py", "fp4rt/py.typed"):
        assert wanted in names
