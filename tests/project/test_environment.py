"""The environment that make creates: which extras a machine gets, and that nothing is installed twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment_tool", ROOT / "tools" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "extra"),
    [((12, 0), "cuda12"), ((12, 9), "cuda12"), ((13, 0), "cuda13"), ((14, 2), "cuda13"), ((11, 8), None), (None, None)],
)
def test_cuda_extra_follows_the_driver(environment, version, extra):
    assert environment.cuda_extra(version)[0] == extra


def test_old_driver_is_named_as_the_reason(environment):
    assert "CUDA 11.8" in environment.cuda_extra((11, 8))[1]


def test_demo_without_a_gpu_installs_no_cuda(environment):
    extras, _ = environment.profile_extras(environment.PROFILES["demo"], None)
    assert extras == ["demo", "plot"]


def test_demo_with_a_gpu_installs_its_cuda_and_cublas(environment):
    extras, _ = environment.profile_extras(environment.PROFILES["demo"], (13, 0))
    assert extras == ["demo", "plot", "demo-cuda13"]


def test_tests_without_a_gpu_still_get_the_kernel_compiler(environment):
    extras, _ = environment.profile_extras(environment.PROFILES["test"], None)
    assert "cuda12" in extras


def test_every_extra_of_a_profile_exists_in_the_project(environment):
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for profile in environment.PROFILES.values():
        for version in (None, (12, 4), (13, 1)):
            for extra in environment.profile_extras(profile, version)[0]:
                assert f"\n{extra} = [" in declared


def test_an_environment_that_is_up_to_date_is_left_alone(environment, tmp_path, monkeypatch):
    installs: list[list[str]] = []
    monkeypatch.setattr(environment, "run", lambda command, log: installs.append(command))
    monkeypatch.setattr(environment, "create", lambda venv, log: venv.mkdir(exist_ok=True))
    monkeypatch.setattr(environment, "pip_command", lambda venv: ["pip"])
    assert environment.ensure("demo", tmp_path / "venv")
    assert installs
    installs.clear()
    assert not environment.ensure("demo", tmp_path / "venv")
    assert installs == []


def test_a_failed_install_shows_the_end_of_its_log_and_leaves_no_stamp(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "create", lambda venv, log: venv.mkdir(exist_ok=True))
    failing = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(1)"]
    monkeypatch.setattr(environment, "pip_command", lambda venv: failing)
    with pytest.raises(environment.EnvironmentProblem, match="no such package"):
        environment.ensure("demo", tmp_path / "venv")
    assert not list((tmp_path / "venv").glob("*.stamp"))


def test_a_python_without_pip_is_told_which_package_to_install(environment, tmp_path, monkeypatch):
    no_pip = tmp_path / "bin" / "python"
    no_pip.parent.mkdir()
    no_pip.write_text("#!/bin/sh\nexit 1\n")
    no_pip.chmod(0o755)
    monkeypatch.setattr(environment.sys, "executable", str(no_pip))
    with pytest.raises(environment.EnvironmentProblem, match="python3-venv"):
        environment.pip_command(tmp_path)


def test_the_oldest_versions_are_those_that_the_project_names(environment):
    project = (
        'dependencies = [\n    "numpy>=1.26",\n    "rich>=13",\n    "tomli>=2; python_version < \'3.11\'",\n]\n'
        '[project.optional-dependencies]\nplot = ["matplotlib>=3.8"]\ncuda12 = ["nvrtc-cu12>=12.8,<13", "a>=1.2.3"]\n'
    )
    assert environment.oldest_versions(project, ["dev", "cuda12"]) == [
        "numpy==1.26.*",
        "rich==13.0.*",
        "tomli==2.0.*; python_version < '3.11'",
        "nvrtc-cu12==12.8.*",
        "a==1.2.3.*",
    ]
    with pytest.raises(environment.EnvironmentProblem, match="no list cuda9"):
        environment.oldest_versions(project, ["cuda9"])


def test_every_version_that_the_project_asks_for_is_among_the_oldest(environment):
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras, _ = environment.profile_extras(environment.PROFILES["oldest"], None)
    found = [requirement.split("==")[0] for requirement in environment.oldest_versions(declared, extras)]
    assert {"numpy", "ml_dtypes", "numba", "safetensors", "typer", "rich", "matplotlib"} <= set(found)
