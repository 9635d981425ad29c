"""Versions of Python, torch and TorchRec: pyproject.toml and the locks say them, all else reads them there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from service.ops.doctor import abi_partner

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ADMITTED = SpecifierSet(PROJECT["requires-python"])
PINS = {
    "cpu": [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]],
    "cuda": [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cuda"]],
}


def pinned(extra: str) -> dict[str, str]:
    """Exactly pinned requirements of an extra."""
    found = {}
    for requirement in map(Requirement, PINS[extra]):
        (version,) = [one.version for one in requirement.specifier if one.operator == "=="] or [None]
        if version is not None:
            found[requirement.name] = version
    return found


@pytest.mark.parametrize("file", ["README.md", "deploy/Dockerfile"])
def test_a_file_that_must_name_a_version_of_python_names_one_that_is_admitted(file: str) -> None:
    named = re.findall(r"(?:ARG PYTHON=|Python )(3\.\d+)", (ROOT / file).read_text("utf-8"))
    assert named
    assert all(ADMITTED.contains(version) for version in named), f"{file}: {named}, requires-python is {ADMITTED}"


def test_the_readme_names_each_python_that_is_admitted() -> None:
    (named,) = re.findall(r"(?m)^Python (3\.\d+(?:(?:, | or )3\.\d+)*)", (ROOT / "README.md").read_text("utf-8"))
    assert re.split(", | or ", named) == list(ADMITTED.filter(f"3.{minor}" for minor in range(30)))


def test_scripts_and_settings_name_none() -> None:
    paths = [ROOT / "Makefile", ROOT / ".pre-commit-config.yaml", *ROOT.glob(".ci/*"), *ROOT.glob("deploy/*.sh")]
    for path in paths:
        named = re.findall(r"python3\.\d+|py3\d+|torch==\d|\b[Pp]ython 3\.\d+", path.read_text("utf-8"))
        assert not named, f"{path}: {named}: read pyproject.toml (deploy/versions.sh)"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    assert "target-version" not in settings["ruff"], "ruff reads requires-python"
    assert "python_version" not in settings["mypy"], "mypy takes the Python that it runs on"


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_locks_have_the_pins(extra: str) -> None:
    lock = (ROOT / "deploy" / f"requirements-{extra}.lock").read_text("utf-8")
    locked = dict(re.findall(r"(?m)^([a-z0-9-]+)(?:\[[^]]*\])?==(\S+)", lock))
    pins = pinned(extra)
    torch = pins.pop("torch")  # installed before the lock
    assert {name: locked[name] for name in pins} == pins, "make lock"
    (fbgemm,) = [version for name, version in pins.items() if name.startswith("fbgemm")]
    assert torch.startswith(f"{abi_partner(fbgemm)}.")


UV = """\
#!/bin/bash
# Stands for uv, and writes down what it is asked for.
printf '%s ' "$@" >> asked
while [ $# -gt 0 ]; do [ "$1" = --override ] && cat "$2" >> asked; shift; done
"""


def tree(into: Path, requires: str = str(PROJECT["requires-python"]), torch: str = "torch==") -> Path:
    """A copy of what set-up and lock read, with other versions."""
    (into / "deploy").mkdir()
    for name in ("setup.sh", "lock.sh", "versions.sh", "requirements-cpu.lock"):
        shutil.copy(ROOT / "deploy" / name, into / "deploy" / name)
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    text = text.replace(f'"{PROJECT["requires-python"]}"', f'"{requires}"').replace('"torch==', f'"{torch}')
    (into / "pyproject.toml").write_text(text, "utf-8")
    return into


def run(directory: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [directory / "deploy" / script], env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.process
def test_set_up_refuses_a_python_that_is_not_admitted(tmp_path: Path) -> None:
    done = run(tree(tmp_path, ">=3.98,<3.99"), "setup.sh", PYTHON=sys.executable)
    assert done.returncode == 1
    assert "Python >=3.98,<3.99 is needed" in done.stderr
    assert "set PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.process
def test_the_locks_are_resolved_for_the_lowest_python_and_the_torch_of_the_project(tmp_path: Path) -> None:
    tree(tmp_path, ">=3.98,<3.99", "torch==9.")
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    done = run(tmp_path, "lock.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    torch = re.escape("9." + pinned("cpu")["torch"])
    assert asked.count("--python-version 3.98 ") == 2
    assert re.search(rf"torch=={torch}\+cpu\n(.|\n)*torch=={torch}\n", asked)


@pytest.mark.process
@pytest.mark.parametrize("broken", [{"requires": ">=3.11"}, {"torch": "torch>="}])
def test_versions_that_cannot_be_read_are_named(tmp_path: Path, broken: dict[str, str]) -> None:
    done = run(tree(tmp_path, **broken), "setup.sh")
    assert done.returncode == 1
    assert 'write requires-python = ">=LOWEST,<BELOW", and "torch==VERSION"' in done.stderr
