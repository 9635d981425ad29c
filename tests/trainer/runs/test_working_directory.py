"""Directories of runs below a host's cache: they last as long as a process works in one of the run's."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from trainer.runs.working_directory import working_directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _work(run_id: str, begun, end) -> None:
    (working_directory(run_id, "ranks") / "file").write_text("of a rank")
    begun.set()
    end.wait(60)


@pytest.mark.process
def test_a_directory_goes_with_the_last_process_that_works_in_the_run(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun, end = context.Event(), context.Event()
    process = context.Process(target=_work, args=("other", begun, end))
    process.start()
    assert begun.wait(60)
    own = working_directory("own", "driver")
    assert own == cache / "runs" / "own" / "driver"
    (own / "file").write_text("kept")
    assert (cache / "runs" / "other" / "ranks" / "file").exists(), "it works there"
    process.kill()
    process.join()
    assert working_directory("own", "ranks") == cache / "runs" / "own" / "ranks"
    assert sorted(path.name for path in (cache / "runs").iterdir()) == ["own", "own.lock"]
    assert (own / "file").read_text() == "kept"
