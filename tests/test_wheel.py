"""The wheel that an installation is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from embeddings.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.process
def test_a_wheel_is_for_this_platform_and_holds_the_compiled_kernel(tmp_path: Path):
    source = tmp_path / "source"
    for folder in ("embeddings", "trainer", "service", "benchmarks", "deploy"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert "none-any" not in wheel.name
    assert "linux" in wheel.name
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    script = (
        "from embeddings.kernels.cpu.build import library_path; from embeddings.kernels.cpu.library import library; "
        "library(); print(library_path())"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(installed))
    assert len(list((installed / "embeddings/kernels/cpu/src").glob("*.so"))) == len(build.levels())
