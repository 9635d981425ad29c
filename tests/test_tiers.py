"""What tests/conftest.py does for all tests: the tier without processes has none, and groups stay in one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import os, subprocess, sys
import pytest

def test_starts():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.process
def test_starts_and_says_so():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.parametrize("number", range(3))
def test_plain(number):
    with open("workers", "a") as file:
        print(os.environ.get("PYTEST_XDIST_WORKER"), file=file)
"""
pytestmark = pytest.mark.process


def outcome(folder: Path, *options: str) -> str:
    (folder / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}", *options, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in [name for name in environment if name.startswith(("PYTEST_", "COVERAGE_"))]:
        del environment[name]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr


def test_without_processes_one_that_starts_some_fails(tmp_path: Path) -> None:
    said = outcome(tmp_path, "-m", "not process")
    assert "1 failed, 3 passed, 1 deselected" in said
    assert "test_starts starts a process (subprocess.Popen" in said


def test_otherwise_it_may_and_a_file_stays_in_one_worker(tmp_path: Path) -> None:
    said = outcome(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert "5 passed" in said
    assert len(set((tmp_path / "workers").read_text().split())) == 1
