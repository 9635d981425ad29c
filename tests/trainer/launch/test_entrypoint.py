"""One attempt from start to end, in this process: what it tells, how it ends, and every way of failing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.store import open_store
from tests.support import forked, small_disk
from tests.support.trained_runs import lead
from tests.trainer.launch.endings import exit_of, fails_with, states
from trainer.checkpoint.format import latest_valid
from trainer.data.prepare import progress
from trainer.launch import driver
from trainer.launch.driver import execute
from trainer.launch.entrypoint import main
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FAILED, EXIT_FILE, EXIT_RETRYABLE, EXIT_SUCCEEDED
from trainer.training import progress as training_progress
from trainer.training.progress import Reporter

pytestmark = pytest.mark.slow

ADAM_AR = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003}
PUBLISH = {"collection": "items", "feature": "item"}


def test_without_a_directory_it_is_that_of_the_run_in_the_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("EVENKEEL_RUN_ID", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "give --run-dir, or the run's id as EVENKEEL_RUN_ID" in capsys.readouterr().err
    monkeypatch.setenv("EVENKEEL_RUN_ID", "of-the-cache")
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path))
    assert main([]) == EXIT_FAILED
    assert f"{tmp_path}/runs/of-the-cache/driver/run.json: cannot be read" in capsys.readouterr().err


# --- a run that succeeds ----------------------------------------------------------------------------------------------


def test_a_run_tells_its_life(make_run, small, monkeypatch):
    monkeypatch.setattr(driver, "HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr(progress, "REPORT_SECONDS", -1.0)
    run = make_run(publish=PUBLISH)
    assert execute(run, start_ranks) == EXIT_SUCCEEDED
    told = {
        kind: small.events(run.directory, kind)
        for kind in ("state", "metric", "publication", "error", "heartbeat", "info")
    }
    assert states(told["state"]) == ["starting", "running", "publishing", "succeeded"]
    assert [(m["epoch"], m["split"]) for m in told["metric"]] == [
        (epoch, split) for epoch in (1, 2) for split in ("train", "validation", "test")
    ]
    assert small.metrics(run.directory, "test")[-1]["auc"] > 0.8
    assert small.metrics(run.directory, "train")[-1]["loss"] < 0.6
    assert told["error"] == []
    assert told["heartbeat"]
    prepared = small.events(run.directory, "preparation")
    assert [event["stage"] for event in prepared] == ["read", "write"]
    assert all(event["rows"] == event["total_rows"] > 0 for event in prepared)
    phases = [event["name"] for event in small.events(run.directory, "phase")]
    assert (phases[:2], phases[-1]) == (["prepare", "build"], "publish")
    assert set(phases[2:-1]) == {"evaluation", "checkpoint"}
    assert phases.count("evaluation") == 4, "two splits after each epoch"
    opening = next(event for event in told["info"] if "alpha" in event)
    assert opening["alpha"] == 0.003
    assert sum(opening["rows_per_rank"]["item"]) == 122
    (publication,) = told["publication"]
    assert publication["status"] in ("published", "held")
    assert open_store(run.store_url).collection("items").manifest(publication["version"])["job"] == run.run_id
    assert exit_of(run) | {"time": ""} == {
        "code": 0,
        "state": "succeeded",
        "retryable": False,
        "attempt": 1,
        "time": "",
    }


def test_the_heart_beats_until_the_end(make_run, small, monkeypatch):
    monkeypatch.setattr(driver, "HEARTBEAT_SECONDS", 0.001)
    run = make_run()
    events = EventWriter(run.directory)
    with driver._heartbeat(driver._Attempt(run, events, lambda *told, **more: None, None)):
        deadline = time.monotonic() + 300
        while len(small.events(run.directory, "heartbeat")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    beats = len(small.events(run.directory, "heartbeat"))
    events.close()
    assert len(small.events(run.directory, "heartbeat")) == beats


def test_rank_0_beats_until_its_end_and_other_ranks_do_not(make_run, small, monkeypatch):
    monkeypatch.setattr(training_progress, "HEARTBEAT_SECONDS", 0.001)
    run = make_run()
    (run.directory / "events.jsonl").touch()
    Reporter(run, 1).close()
    assert small.events(run.directory, "heartbeat") == []
    with contextlib.closing(Reporter(run, 0)):
        deadline = time.monotonic() + 60
        while len(small.events(run.directory, "heartbeat")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    told = small.events(run.directory, "heartbeat")
    assert {event["rank"] for event in told} == {0}
    time.sleep(0.05)
    assert small.events(run.directory, "heartbeat") == told


def test_rank_0_beats_at_once(make_run, small):
    """The driver beats for it before: were it stopped within the first interval, nobody would ever give it up."""
    run = make_run()
    with contextlib.closing(Reporter(run, 0)):
        assert [event["rank"] for event in small.events(run.directory, "heartbeat")] == [0]


def test_a_driver_falls_silent_while_its_first_rank_beats(make_run, small, monkeypatch):
    """Else a rank that hangs while it evaluates or saves would never be given up."""
    monkeypatch.setattr(driver, "HEARTBEAT_SECONDS", 0.001)
    run = make_run()

    def beats() -> int:
        return len(small.events(run.directory, "heartbeat"))

    seen: list[str] = []

    def start(_run: object) -> None:
        # An error here would only fail the run, so what was seen is asserted below.
        deadline, before = time.monotonic() + 20, beats()
        while beats() < before + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append("beats" if beats() >= before + 3 else "silent")
        with contextlib.closing(EventWriter(run.directory)) as rank:
            rank.write("heartbeat", rank=0)
        before = -1
        while before != (before := beats()) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen.append("silent" if before == beats() else "beats")
        raise RuntimeError("the rank has failed")

    assert execute(run, start) == EXIT_FAILED
    assert seen == ["beats", "silent"]


def test_a_run_that_publishes_nothing_says_so(trained_run, small):
    run = trained_run(epochs=1)
    assert small.events(run.directory, "publication")[0]["status"] == "none"


def test_default_alpha_is_told_and_kept(make_run, small):
    run = make_run(epochs=1, optimizer={"kind": "adam_ar", "alpha": "default", "learning_rate": 0.1})
    execute(run, start_ranks)
    opening = next(event for event in small.events(run.directory, "info") if "alpha" in event)
    assert opening["alpha"] == pytest.approx(1.4 / (0.5 * opening["steps_per_epoch"]) ** 2)
    assert latest_valid(run.checkpoints).extra["alpha"] == opening["alpha"]


# --- runs that fail ---------------------------------------------------------------------------------------------------


def test_bad_data_fails_with_its_place(make_run, small, tmp_path):
    path = tmp_path / "nan.parquet"
    pq.write_table(pa.table({"user": [1, 2, 3], "item": [1, 2, 3], "click": [0.0, np.nan, 1.0]}), path)
    run = make_run(uri=path)
    error = fails_with(run, small, "bad_data")
    assert "nan.parquet" in error["message"]
    assert not run.data.exists()
    assert not run.checkpoints.exists()


def test_a_missing_file_fails(make_run, small, tmp_path):
    error = fails_with(make_run(uri=tmp_path / "nothing.parquet"), small, "bad_data")
    assert "nothing.parquet" in error["message"]


def test_a_loss_that_explodes_names_the_step_and_where(make_run, small):
    run = make_run(optimizer={"kind": "sgd", "learning_rate": 1e30})
    error = fails_with(run, small, "non_finite")
    assert "step " in error["message"]
    assert "learning_rate" in error["remedy"]


def test_a_changed_job_does_not_go_on_from_another_jobs_checkpoint(make_run, trained_run, small):
    run = trained_run(epochs=1)
    changed = make_run(epochs=1, attempt=2, dense_optimizer={"kind": "sgd", "learning_rate": 0.1})
    assert execute(changed, start_ranks) == EXIT_FAILED
    error = small.events(run.directory, "error")[0]
    assert (error["code"], "dense_optimizer" in error["message"]) == ("bad_input", True)


def test_running_out_of_time_is_a_failure_that_keeps_its_work(make_run, small):
    run = make_run(epochs=1000, resources={"num_workers": 1, "timeout_seconds": 1.0})
    error = fails_with(run, small, "timeout")
    assert "timeout_seconds" in error["remedy"]
    assert latest_valid(run.checkpoints) is not None


def spawned_ranks() -> set[psutil.Process]:
    """Live children that multiprocessing spawned: no tracker of its, no rank of tests/support/pool.py. Pids tell no
    age: they start again from low numbers."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.spawn" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child)
    return found


@pytest.mark.process
def test_a_worker_killed_is_worth_another_try(make_run, small):
    """Two ranks; one is killed without a word while the other waits for it."""
    run = make_run(epochs=1000, resources={"num_workers": 2})
    (run.directory / "events.jsonl").touch()
    before = spawned_ranks()

    def kill_one() -> None:
        first, _ = sorted(spawned_ranks() - before, key=lambda process: process.pid)
        first.kill()

    with small.meanwhile(lambda: small.events(run.directory, "metric"), kill_one):
        fails_with(run, small, "worker_died", exit_code=EXIT_RETRYABLE)
    assert spawned_ranks() == before


def test_two_processes_cannot_lead_one_run(make_run):
    run = make_run()
    with driver._lock(run.directory), pytest.raises(RuntimeError, match="another process"):
        execute(run, start_ranks)
    assert not (run.directory / EXIT_FILE).exists()


# --- being stopped ----------------------------------------------------------------------------------------------------


def test_sigterm_writes_a_checkpoint_and_cancels_and_the_next_attempt_goes_on(make_run, small):
    handler = signal.getsignal(signal.SIGTERM)
    run = make_run(epochs=1000, checkpoint={"every_steps": 100_000})
    (run.directory / "events.jsonl").touch()
    with small.meanwhile(lambda: small.events(run.directory, "metric"), lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert execute(run, start_ranks) == EXIT_CANCELLED
    assert states(small.events(run.directory, "state")) == ["starting", "running", "cancelled"]
    assert small.events(run.directory, "error") == []
    assert exit_of(run)["state"] == "cancelled"
    step = latest_valid(run.checkpoints).extra["position"]["step"]
    assert step > 0
    assert signal.getsignal(signal.SIGTERM) == handler

    run = make_run(epochs=1 + step // 25, attempt=2)
    assert execute(run, start_ranks) == 0
    opening = [event for event in small.events(run.directory, "info") if "alpha" in event][-1]
    assert opening["resumed_from_step"] == step
    (history,) = small.events(run.directory, "history")
    told = [event for event in small.events(run.directory, "metric") if event["attempt"] == 1]
    assert history["metrics"] == [
        {name: value for name, value in event.items() if name not in ("type", "time", "attempt")} for event in told
    ]


def test_sigterm_while_data_is_prepared_cancels_at_once(make_run, small, monkeypatch):
    run = make_run()

    def interrupted(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        pytest.fail("the signal was not heard")

    monkeypatch.setattr("trainer.launch.prepare_run.prepare", interrupted)
    assert execute(run, start_ranks) == EXIT_CANCELLED
    assert states(small.events(run.directory, "state")) == ["starting", "cancelled"]


# --- run.json ---------------------------------------------------------------------------------------------------------


def test_a_broken_run_file_is_told_and_ends_the_run(tmp_path, small, capsys):
    for text, message in (("{half", "not JSON"), ('{"run_id": "r"}', "is missing"), (None, "cannot be read")):
        directory = tmp_path / (message.replace(" ", "-"))
        directory.mkdir()
        if text is not None:
            (directory / "run.json").write_text(text)
        assert main(["--run-dir", str(directory)]) == EXIT_FAILED
        assert message in capsys.readouterr().err
        assert small.events(directory, "error")[0]["code"] == "bad_spec"
        assert json.loads((directory / EXIT_FILE).read_text())["state"] == "failed"


def test_a_run_file_that_cannot_be_read_ends_the_attempt_that_it_names(make_run, small):
    """The control plane passes over what another attempt than the one it started says."""
    run = make_run(attempt=4)
    document = json.loads((run.directory / "run.json").read_text())
    (run.directory / "run.json").write_text(json.dumps(document | {"job": {"epochs": 0}}))
    assert main(["--run-dir", str(run.directory)]) == EXIT_FAILED
    assert small.events(run.directory, "error")[0]["attempt"] == 4
    assert json.loads((run.directory / EXIT_FILE).read_text())["attempt"] == 4


def test_run_files_round_trip(make_run):
    run = make_run(parent_version="v000007", init_checkpoint="/somewhere", attempt=3, ray_address="127.0.0.1:1")
    assert (run.attempt, run.parent_version, run.init_checkpoint) == (3, "v000007", "/somewhere")
    assert run.job == read_run(run.directory).job
    assert run.still_current()
    write_run(run.directory, run_id=run.run_id, job=run.job, dataset=run.dataset, store_url=run.store_url, attempt=4)
    assert not run.still_current()


# --- a disk that fills up ---------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_full_disk_is_told_and_leaves_no_half_checkpoint(make_run, tmp_path):
    # The data take some 100 KB of the 600, a checkpoint with these vectors more than the rest.
    run = make_run(epochs=1, model={"kind": "two_tower", "embedding_dim": 512, "hidden": [8]})
    disk = tmp_path / "disk"
    disk.mkdir()
    code, said = small_disk.run(disk, "600k", tmp_path / "log.txt", lead_on, disk / "run", run.directory)
    assert code == EXIT_RETRYABLE, said
    assert "error (disk_full)" in said
    assert "free space" in said
    assert "files: []" in said


def lead_on(folder, run_directory):
    """The run, where there is little room."""
    shutil.copytree(run_directory, folder)
    code = lead(folder)
    checkpoints = read_run(folder).checkpoints
    print("files:", sorted(path.name for path in checkpoints.glob("*")) if checkpoints.exists() else [])
    return code


@pytest.mark.process
def test_a_run_that_the_system_gives_no_memory_says_so(make_run, tmp_path):
    run = make_run(epochs=1, model={"kind": "two_tower", "embedding_dim": 2048, "hidden": [2048, 2048]})
    process = forked.start(lead_with_little, run.directory, log=tmp_path / "log.txt")
    process.join()
    said = (tmp_path / "log.txt").read_text()
    assert process.exitcode == EXIT_FAILED, said
    assert "error (out_of_memory)" in said
    assert "fault of evenkeel" not in said


def lead_with_little(directory):
    """The run, where 160 MB may be allocated: enough to prepare, and less than the weights."""
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + 160 * 2**20,) * 2)
    return lead(directory)


# --- what a person sees -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar_and_a_file_does_not(make_run, monkeypatch):
    run = make_run(epochs=1)
    outputs = []
    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", screen)
        reporter = Reporter(run, 0)
        for step in (5, 25):
            reporter.emit("progress", epoch=1, epochs=1, step=step, steps=25, examples=1, examples_per_second=1.0)
        reporter.emit("metric", epoch=1, split="test", auc=0.75, logloss=0.5, examples=10)
        reporter.close()
        outputs.append(screen.getvalue())
    assert "25/25" in outputs[0]
    assert "25/25" not in outputs[1]
    for output in outputs:
        assert "epoch 1 test" in output
        assert "auc 0.75000" in output


def test_only_the_first_rank_speaks(make_run, small, capsys):
    run = make_run(epochs=1)
    (run.directory / "events.jsonl").touch()
    reporter = Reporter(run, 1)
    reporter.emit("info", message="unheard")
    reporter.close()
    assert capsys.readouterr().out == ""
    assert small.events(run.directory, "info") == []
