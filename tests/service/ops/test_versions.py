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
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from service.app import create_app
from service.cli.main import app as cli
from service.core.settings import Settings
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


def test_what_names_the_version_of_the_project_names_that_of_pyproject() -> None:
    """Those that read it, and those that cannot: chart, compose file and changelog."""
    version = PROJECT["version"]
    assert CliRunner().invoke(cli, ["--version"]).output == f"evenkeel {version}\n"
    assert create_app(Settings(home=Path("unused"))).openapi()["info"]["version"] == version
    chart = yaml.safe_load((ROOT / "deploy/helm/evenkeel/Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    compose = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert re.findall(r"image: evenkeel:\$\{EVENKEEL_TAG:-(.*)\}", compose) == [version]
    released = re.findall(r"(?m)^## (\d\S*) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert released[0] == version


@pytest.mark.process
def test_images_are_labelled_and_tagged_with_the_version(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for name in ("images.sh", "versions.sh"):
        shutil.copy(ROOT / "deploy" / name, tmp_path / "deploy" / name)
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (tmp_path / "pyproject.toml").write_text(text.replace(f'version = "{PROJECT["version"]}"', 'version = "9.8.7"'))
    (tmp_path / "podman").write_text('#!/bin/bash\necho "$@" >> asked\necho 1000000\n')
    (tmp_path / "podman").chmod(0o755)
    done = run(tmp_path, "images.sh", PATH=f"{tmp_path}:{os.environ['PATH']}", KINDS="cpu")
    assert done.returncode == 0, done.stderr
    (build,) = [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("build ")]
    assert build.endswith("--build-arg EXTRA=cpu --build-arg VERSION=9.8.7 -t evenkeel:9.8.7 .")
    assert "image.version=$VERSION" in (ROOT / "deploy" / "Dockerfile").read_text("utf-8")


SERIES = sorted((ROOT / "deploy").glob("torch-*.txt"))


@pytest.mark.parametrize("series", SERIES, ids=lambda path: path.stem)
def test_the_lock_of_a_later_torch_has_its_versions_and_else_those_of_the_cpu_lock(series: Path) -> None:
    own = {one.name: one.specifier for one in map(Requirement, series.read_text("utf-8").splitlines())}
    lock, usual = [
        dict(re.findall(r"(?m)^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==(\S+)", (ROOT / "deploy" / name).read_text("utf-8")))
        for name in (f"requirements-cpu-{series.stem}.lock", "requirements-cpu.lock")
    ]
    (torch,) = own.pop("torch")
    assert torch.operator == "=="
    assert abi_partner(next(iter(own["fbgemm-gpu-cpu"])).version) == torch.version.rpartition(".")[0]
    assert series.stem == f"torch-{torch.version.rpartition('.')[0]}"
    assert all(specifier.contains(lock[name]) for name, specifier in own.items()), "make lock"
    assert {name: one for name, one in lock.items() if name not in own} == {
        name: one for name, one in usual.items() if name not in own
    }


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
    (tmp_path / "deploy" / "torch-9.9.txt").write_text("torch==9.9.1\ntorchrec==4.4\n")
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    done = run(tmp_path, "lock.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    torch = re.escape("9." + pinned("cpu")["torch"])
    assert asked.count("--python-version 3.98 ") == 3
    assert "torch==9.9.1\ntorchrec==4.4\n" in asked
    assert (tmp_path / "deploy" / "requirements-cpu-torch-9.9.lock").exists()
    assert re.search(rf"torch=={torch}\+cpu\n(.|\n)*torch=={torch}\n", asked)


@pytest.mark.process
def test_set_up_names_the_locks_that_there_are(tmp_path: Path) -> None:
    tree(tmp_path)
    for name in ("cuda", "cpu-torch-9.9", "compiler"):
        (tmp_path / "deploy" / f"requirements-{name}.lock").touch()
    done = run(tmp_path, "setup.sh", EXTRA="cpu-torch-1.0", LC_ALL="C")
    assert done.returncode == 1
    assert "EXTRA must be one of cpu-torch-9.9 cpu cuda, not 'cpu-torch-1.0'" in done.stderr


TORCH = """\
#!/bin/bash
# Stands for Python: makes an environment of itself, and writes down what pip is to install.
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/evenkeel" && chmod +x "$3/bin/evenkeel" ;;
  *" install "*) echo "$*" >> asked ;;
esac
"""


@pytest.mark.process
def test_set_up_takes_the_torch_of_the_lock_that_is_chosen(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "deploy" / "requirements-cpu-torch-9.9.lock").touch()
    (tmp_path / "deploy" / "torch-9.9.txt").write_text("torch==9.9.1\ntorchrec==4.4\n")
    (tmp_path / "python").write_text(TORCH)
    (tmp_path / "python").chmod(0o755)
    later, usual = ("cpu-torch-9.9", "9.9.1"), ("cpu", pinned("cpu")["torch"])
    # Without EXTRA the choice before stands, also where the last set-up was cut off.
    for chosen, (extra, torch) in (("", usual), (later[0], later), ("", later), ("cpu", usual), ("", usual)):
        (tmp_path / "asked").unlink(missing_ok=True)
        (tmp_path / ".venv" / ".evenkeel-stamp").unlink(missing_ok=True)
        if chosen == "" and extra == later[0]:
            (tmp_path / ".venv" / ".evenkeel-unfinished").touch()
        done = run(tmp_path, "setup.sh", PYTHON=str(tmp_path / "python"), VENV=".venv", EXTRA=chosen)
        assert done.returncode == 0, done.stderr
        asked = (tmp_path / "asked").read_text()
        assert re.findall(r"torch==(\S+)", asked) == [f"{torch}+cpu"]
        lock = tmp_path / "deploy" / f"requirements-{extra}.lock"
        halves = [tmp_path / name for name in re.findall(r"-r (\S+)", asked)][:2]
        lines = [line for half in halves for line in half.read_text().splitlines()]
        assert sorted(lines) == sorted(lock.read_text().splitlines())


@pytest.mark.process
@pytest.mark.parametrize("half", ["half-0", "half-1"])
def test_a_set_up_of_which_one_half_fails_has_failed(tmp_path: Path, half: str) -> None:
    tree(tmp_path)
    (tmp_path / "python").write_text(TORCH.replace('*" install "*)', f'*{half}*) exit 3 ;;\n  *" install "*)'))
    (tmp_path / "python").chmod(0o755)
    assert run(tmp_path, "setup.sh", PYTHON=str(tmp_path / "python"), VENV=".venv").returncode == 1
    assert not (tmp_path / ".venv" / ".evenkeel-stamp").exists()


@pytest.mark.process
@pytest.mark.parametrize("broken", [{"requires": ">=3.11"}, {"torch": "torch>="}])
def test_versions_that_cannot_be_read_are_named(tmp_path: Path, broken: dict[str, str]) -> None:
    done = run(tree(tmp_path, **broken), "setup.sh")
    assert done.returncode == 1
    assert 'write requires-python = ">=LOWEST,<BELOW", and "torch==VERSION"' in done.stderr
