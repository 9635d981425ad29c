"""``evenkeel predict`` and ``export``: where the run of a job is found, and what is said where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import model
from service.cli.main import app
from service.cli.output import CommandError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "home" / "runs" / "abc"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    return tmp_path / "home"


def test_a_job_is_found_by_its_id_or_as_a_directory(home: Path) -> None:
    assert model.run_dir("abc") == home / "runs" / "abc"
    assert model.run_dir(str(home / "runs" / "abc")) == home / "runs" / "abc"


def test_a_job_that_is_not_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match=r"job 'xyz' has no run directory under .*runs$") as caught:
        model.run_dir("xyz")
    assert "set EVENKEEL_HOME" in caught.value.remedy
    with pytest.raises(CommandError):
        model.run_dir("../runs/xyz")
    monkeypatch.setenv("EVENKEEL_URL", "https://evenkeel.example.org")
    with pytest.raises(CommandError, match=r"evenkeel\.example\.org is another machine") as caught:
        model.run_dir("xyz")
    assert "export the model there and copy the folder" in caught.value.remedy
    monkeypatch.setenv("EVENKEEL_URL", "http://127.0.0.1:8080")
    with pytest.raises(CommandError, match=r"runs$"):
        model.run_dir("xyz")


def test_the_trainer_is_a_child_whose_exit_code_is_ours(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(model.subprocess, "run", run)
    directory = str(home / "runs" / "abc")
    done = CliRunner().invoke(app, ["predict", "abc", "rows.parquet", "--k", "5", "--columns", "a,b", "--json"])
    assert done.exit_code == 1
    done = CliRunner().invoke(app, ["export", "abc", "out", "--checkpoint", "best"])
    assert done.exit_code == 1
    module = [sys.executable, "-m"]
    assert calls == [
        [*module, "trainer.inference.predict", directory, "rows.parquet",
         "--columns", "a,b", "--checkpoint", "last", "--k", "5", "--json"],
        [*module, "trainer.inference.export", directory, "out", "--checkpoint", "best"],
    ]  # fmt: skip
