"""Grids of trials: killed and gone on with, failed trials, and the small form of each recipe."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.__main__ import RECIPES, main
from benchmarks.papers.data.quick_data import write_quick_data
from benchmarks.papers.data.quick_texts import write_quick_texts
from benchmarks.papers.trials.grid import run_grid
from benchmarks.papers.trials.run_trial import path_of, read_record
from benchmarks.papers.trials.trial import Trial
from tests.support import forked
from trainer.runs import run_process
from trainer.search.records import metrics_of, spent

WHOLE = bool(os.environ.get("EVENKEEL_TEST_PAPERS"))
"""Whether the small form of each recipe is run whole: `make test-long`."""
SMOKES = {
    "adamar": "quick_adam/dnn/AdamAR",
    "alpha": "alpha/quick, batch 512/Adam",
    "sse": "figures",
    "dropout": "quick/dnn/R_approx + xi_approx",
    "language": "lstm/full/none",
    "masked_language": "pretraining/encoder/Pre-training,sentence_polarity/encoder/(SSE-SE*) + Fine-tuning",
    "rff": "item2vec/d8/item2vec/seed-0",
    "generalization": "original/dnn/Adam",
    "towers": "depth/depth 2/shortcuts,stability/linear/one example a step",
}
"""Trials of each recipe that `make test` runs."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "data"
    write_quick_data(folder)
    return folder


def out_with(data: Path, folder: Path) -> Path:
    """A folder of results for ``--quick`` that has its rows already."""
    shutil.copytree(data, folder / "data")
    return folder


def trials_of(name: str, data: Path) -> list[Trial]:
    return list(RECIPES[name](data, 1, True).jobs)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_the_small_form_of_each_recipe_is_reported(
    name: str, data: Path, tmp_path: Path, trials_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, it shows the direction of each claim; else some of its trials end and are reported."""
    out = out_with(data, tmp_path)
    code = main([name, "--quick", "--out", str(out), *([] if WHOLE else ["--part", SMOKES[name]])])
    said = capsys.readouterr().out
    assert "## Failed" not in said
    if WHOLE:
        assert code == 0, said
        assert ("| holds |" in said) == ("language" not in name)  # these claim nothing of their small texts
        assert said.count("| holds |") >= len(RECIPES[name](data, 1, True).claims)
        assert list(out.glob("*.png"))
    for file in ("report.md", "report.html"):
        assert (out / file).stat().st_size
    assert not list((out / "runs").glob("*"))
    for path in (out / "points").iterdir():
        assert json.loads(path.read_text())["state"] == "done"


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_grid_goes_on_where_it_was(data: Path, tmp_path: Path, trials_run: None) -> None:
    """kill -9 of the grid and of the run in the middle of the second trial: the first is not run again, the second ends
    with the same bits as one that nobody killed."""
    whole, killed = out_with(data, tmp_path / "whole"), out_with(data, tmp_path / "killed")
    part = ["dropout", "--quick", "--part", "quick/dnn/none,quick/dnn/DROPOUT_1"]
    main([*part, "--out", str(whole)])
    trials = trials_of("dropout", killed / "data")
    first, second = (trial for trial in trials if trial.name in ("quick/dnn/none/seed-0", "quick/dnn/DROPOUT_1/seed-0"))
    process = forked.start(main, [*part, "--out", str(killed)], log=tmp_path / "log.txt")
    while not _epochs(killed, second):
        assert process.exitcode is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.002)
    process.kill()
    process.join()
    run_process.terminate(killed / "runs" / second.key, grace_seconds=0)
    assert read_record(second, killed) is None
    record = read_record(first, killed)
    assert record is not None
    assert record["state"] == "done"
    before = path_of(first, killed).stat().st_mtime_ns
    main([*part, "--out", str(killed)])
    assert path_of(first, killed).stat().st_mtime_ns == before
    for trial in (first, second):
        ended, other = read_record(trial, killed), read_record(trial, whole)
        assert ended is not None
        assert other is not None
        assert _without_clock(ended["metrics"]) == _without_clock(other["metrics"])
    times = [path_of(trial, killed).stat().st_mtime_ns for trial in (first, second)]
    main([*part, "--out", str(killed)])
    assert [path_of(trial, killed).stat().st_mtime_ns for trial in (first, second)] == times


def _without_clock(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != "seconds"} for one in metrics]


def _epochs(out: Path, trial: Trial) -> list[dict[str, Any]]:
    return metrics_of(out / "runs" / trial.key)


@pytest.mark.process
def test_a_failed_trial_is_recorded_and_tried_again(data: Path, tmp_path: Path, trials_run: None) -> None:
    """Its rows are not there: the others run. Again, it is tried, and they are not."""
    away = tmp_path / "away"
    missing = trials_of("sse", away)[0]
    there = trials_of("sse", data)[0]
    records = run_grid([missing, there], tmp_path, workers=1, command="x")
    assert [record["state"] for record in records] == ["failed", "done"]
    assert "clicklog" in records[0]["error"]
    assert "Remedy" in records[0]["error"]
    again = run_grid([missing, there], tmp_path, workers=1, command="y")
    assert again[0]["command"] == "y"
    assert again[1]["command"] == "x"


@pytest.mark.usefixtures("trials_run")
def test_a_trial_on_texts_is_run_and_recorded_as_a_job_is(tmp_path: Path) -> None:
    """It fails with a remedy where its text is not there, and is tried again; without jobs and runs."""
    trials = [trial for trial in RECIPES["language"](tmp_path, 1, True).trials if trial.row == "none"]
    (record, _) = run_grid(trials, tmp_path, workers=1, command="x")
    assert record["state"] == "failed"
    assert "brown.parquet is not there" in record["error"]
    before = {trial.key for trial in trials}
    write_quick_texts(tmp_path)
    assert before.isdisjoint(trial.key for trial in trials)  # other files are another trial
    for record in run_grid(trials, tmp_path, workers=1, command="x"):
        assert record["state"] == "done"
        assert {(one["epoch"], one["split"]) for one in record["metrics"]} == {
            (epoch, split) for epoch in (1, 2) for split in ("train", "validation", "test")
        }


def test_the_seconds_of_a_run_are_those_of_all_its_attempts(tmp_path: Path) -> None:
    """Two that were killed, after 1,000 and 200 seconds, an hour between them."""
    with open(tmp_path / "events.jsonl", "w", encoding="utf-8") as events:
        for attempt, time_of_day in (
            (1, "03:00:00"),
            (1, "03:10:00"),
            (1, "03:16:40"),
            (2, "04:16:40"),
            (2, "04:20:00"),
        ):
            event = {"time": f"2026-01-02T{time_of_day}.000Z", "attempt": attempt, "type": "heartbeat"}
            events.write(json.dumps(event) + "\n")
    assert spent(tmp_path) == 1200


def test_two_grids_do_not_train_the_same_trials(data: Path, tmp_path: Path) -> None:
    with open(tmp_path / "grid.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another"):
            run_grid(trials_of("sse", data), tmp_path, workers=1, command="x")


def test_a_broken_record_is_none(data: Path, tmp_path: Path) -> None:
    trial = trials_of("sse", data)[0]
    path_of(trial, tmp_path).parent.mkdir()
    path_of(trial, tmp_path).write_text('{"state": "do')
    assert read_record(trial, tmp_path) is None


@pytest.mark.process
@pytest.mark.slow
def test_a_trial_whose_process_dies_has_failed(data: Path, tmp_path: Path, trials_run: None) -> None:
    """A record of before does not hide it."""
    trial = trials_of("sse", data)[0]
    path_of(trial, tmp_path).parent.mkdir()
    path_of(trial, tmp_path).write_text(json.dumps({"state": "failed", "error": "of before"}))

    def kill() -> None:
        while not run_process.processes(run):
            time.sleep(0.01)
        run_process.terminate(run, grace_seconds=0)

    run = tmp_path / "runs" / trial.key
    killer = threading.Thread(target=kill)
    killer.start()
    (record,) = run_grid([trial], tmp_path, workers=2, command="x")
    killer.join()
    assert record["state"] == "failed"
    assert "its process has ended as one that was killed" in record["error"]
    assert read_record(trial, tmp_path) == record


@pytest.mark.process
@pytest.mark.slow
def test_trials_run_two_at_a_time(data: Path, tmp_path: Path, trials_run: None) -> None:
    out = out_with(data, tmp_path)
    part = "quick/fifth/none,quick/dnn/none"
    assert main(["dropout", "--quick", "--workers", "2", "--part", part, "--out", str(out)]) == 0
    records = [json.loads(path.read_text()) for path in (out / "points").iterdir()]
    assert {(record["name"], record["state"]) for record in records} == {
        (f"quick/{column}/none/seed-0", "done") for column in ("fifth", "dnn")
    }
