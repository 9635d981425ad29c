"""One attempt from start to end, in this process: what it tells, how it ends, and every way of failing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.store import open_store
from tests.support import small_disk
from tests.support.trained_runs import lead
from trainer.checkpoint.format import Checkpoint, checkpoints_in, latest_valid
from trainer.checkpoint.warm_start import id_maps
from trainer.data.prepare import progress
from trainer.launch import driver
from trainer.launch.driver import execute
from trainer.launch.entrypoint import main
from trainer.launch.in_process import main as train_command
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FAILED, EXIT_FILE, EXIT_RETRYABLE, EXIT_SUCCEEDED
from trainer.training.progress import Reporter

pytestmark = pytest.mark.slow

ADAM_AR = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003}
PUBLISH = {"collection": "items", "feature": "item"}


def states(events) -> list[str]:
    return [event["state"] for event in events]


def exit_of(run) -> dict:
    return json.loads((run.directory / EXIT_FILE).read_text())


def test_without_a_directory_it_is_that_of_the_run_in_the_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("EVENKEEL_RUN_ID", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "give --run-dir, or the run's id as EVENKEEL_RUN_ID" in capsys.readouterr().err
    monkeypatch.setenv("EVENKEEL_RUN_ID", "of-the-cache")
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path))
    assert main([]) == EXIT_FAILED
    assert f"{tmp_path}/runs/of-the-cache/driver/run.json: cannot be read" in capsys.readouterr().err


# --- a run that succeeds ---------------------------------------------------------------------------------------------


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
    with driver._heartbeat(driver._Attempt(run, events, lambda *told, **more: None)):
        deadline = time.monotonic() + 300
        while len(small.events(run.directory, "heartbeat")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    beats = len(small.events(run.directory, "heartbeat"))
    events.close()
    assert len(small.events(run.directory, "heartbeat")) == beats


def test_a_run_that_publishes_nothing_says_so(trained_run, small):
    run = trained_run(epochs=1)
    assert small.events(run.directory, "publication")[0]["status"] == "none"


def test_default_alpha_is_told_and_kept(make_run, small):
    run = make_run(epochs=1, optimizer={"kind": "adam_ar", "alpha": "default", "learning_rate": 0.1})
    execute(run, start_ranks)
    opening = next(event for event in small.events(run.directory, "info") if "alpha" in event)
    assert opening["alpha"] == pytest.approx(1.4 / (0.3 * opening["steps_per_epoch"]) ** 2)
    assert latest_valid(run.checkpoints).extra["alpha"] == opening["alpha"]


# --- runs that fail --------------------------------------------------------------------------------------------------


def fails_with(run, small, code: str, *, exit_code: int = EXIT_FAILED) -> dict:
    assert execute(run, start_ranks) == exit_code
    (error,) = small.events(run.directory, "error")
    assert error["code"] == code
    assert error["remedy"]
    assert states(small.events(run.directory, "state"))[-1] == "failed"
    document = exit_of(run)
    assert document["code"] == exit_code
    assert document["retryable"] == (exit_code == EXIT_RETRYABLE)
    assert document["error"]["code"] == code
    return error


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


# --- being stopped ---------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr("trainer.data.prepare.preparation.prepare", interrupted)
    assert execute(run, start_ranks) == EXIT_CANCELLED
    assert states(small.events(run.directory, "state")) == ["starting", "cancelled"]


# --- warm start and publishing ---------------------------------------------------------------------------------------


def test_a_warm_start_keeps_old_rows_and_starts_new_ones_from_their_id(make_run, small, tmp_path):
    lazy = {"kind": "adam_ar", "moments": "lazy"}  # only then may the learning rate be another one
    first = make_run("first", epochs=1, optimizer={**lazy, "alpha": 0.003, "learning_rate": 0.1})
    assert execute(first, start_ranks) == 0
    parent = latest_valid(first.checkpoints)
    # Other items, some of them known; nothing moves: learning rates 0.
    uri = small.write_rows(tmp_path / "next.parquet", seed=9, num_items=400)
    still = {
        "optimizer": {**lazy, "alpha": "default", "learning_rate": 0.0},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.0},
    }
    second = make_run("second", uri=uri, epochs=1, init_checkpoint=str(first.checkpoints), **still)
    fresh = make_run("fresh", uri=uri, epochs=1, **still)
    assert execute(second, start_ranks) == 0
    assert execute(fresh, start_ranks) == 0

    child = latest_valid(second.checkpoints)
    assert child.extra["alpha"] == parent.extra["alpha"] == 0.003
    assert child.extra["position"]["first_step"] == parent.step
    assert child.step == parent.step + child.extra["position"]["step"]
    ids = {name: id_maps(checkpoint)["item"].ids.to_pylist() for name, checkpoint in (("old", parent), ("new", child))}
    assert ids["new"][: len(ids["old"])] == ids["old"]
    added = ids["new"][len(ids["old"]) :]
    assert added
    old_weight, old_state = parent.read_rows("item")
    new_weight, new_state = child.read_rows("item")
    known = len(old_weight)
    last = new_state["last_update_step"][:known]
    untouched = last == old_state["last_update_step"]
    assert bool(untouched.any())
    assert bool((new_weight[:known][untouched] == old_weight[untouched]).all())
    assert bool((new_state["m"][:known][untouched] == old_state["m"][untouched]).all())
    # A new id starts from hash(id, seed): the same as in a run that never heard of the old ones.
    alone = latest_valid(fresh.checkpoints)
    row_of = {id_: row + 2 for row, id_ in enumerate(id_maps(alone)["item"].ids.to_pylist())}
    started = alone.read_rows("item")[0]
    references = torch.stack([started[row_of[id_]] for id_ in added])
    # Rows that were touched decayed while they idled; their direction is the initial one.
    torch.testing.assert_close(unit(new_weight[known:]), unit(references))
    assert bool((new_weight[known:] == references).all(dim=1).any())


def test_a_warm_start_decays_by_the_epochs_of_the_tables_first_training(make_run, small, tmp_path):
    by_epoch = {"optimizer": {**ADAM_AR, "decay": "by_epoch"}}
    first = make_run("first", epochs=1, **by_epoch)
    assert execute(first, start_ranks) == 0
    parent = latest_valid(first.checkpoints)
    assert parent.extra["epoch_steps"] == parent.step
    uri = small.write_rows(tmp_path / "next.parquet", seed=9, num_rows=300)
    second = make_run("second", uri=uri, epochs=1, init_checkpoint=str(first.checkpoints), **by_epoch)
    assert execute(second, start_ranks) == 0
    child = latest_valid(second.checkpoints)
    assert child.extra["epoch_steps"] == parent.step != child.step - parent.step


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"kind": "adam", "learning_rate": 0.1}}, "optimizer.kind"),
        ({"optimizer": {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.5}}, "optimizer.alpha"),
        ({"batch_size": 48}, "batch_size"),
        ({"model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [8]}}, "model.embedding_dim: .* with 4"),
        ({"model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [16]}}, "model.hidden"),
        ({"model": {"kind": "bpr", "embedding_dim": 4}}, "model.kind"),
        ({"optimizer": {**ADAM_AR, "learning_rate": 0.05}}, "optimizer.learning_rate: .* with 0.1"),
        ({"optimizer": {**ADAM_AR, "beta1": 0.8}}, "optimizer.beta1"),
        ({"optimizer": {**ADAM_AR, "moments": "lazy"}}, "optimizer.moments"),
        ({"optimizer": {**ADAM_AR, "decay": "by_epoch"}}, "optimizer.decay"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused(make_run, trained_run, small, changes, message):
    first = trained_run("first", epochs=1)
    second = make_run("second", epochs=1, init_checkpoint=str(first.checkpoints), **changes)
    # Not worth another try: it would find the same.
    error = fails_with(second, small, "bad_input")
    assert re.search(message, error["message"]), error
    assert "init_from" in error["message"]


def test_a_warm_start_from_nothing_says_so(make_run, small, tmp_path):
    run = make_run(init_checkpoint=str(tmp_path / "gone"))
    assert execute(run, start_ranks) != 0
    assert "no valid checkpoint" in small.events(run.directory, "error")[0]["message"]


def test_a_warm_start_without_the_ids_of_its_rows_is_refused(make_run, trained_run, small):
    first = trained_run("first", epochs=1)
    *older, newest = checkpoints_in(first.checkpoints)
    for path in older:
        shutil.rmtree(path)
    (newest / "ids-item.arrow").write_bytes(b"other ids")
    second = make_run("second", epochs=1, init_checkpoint=str(first.checkpoints))
    with pytest.warns(RuntimeWarning, match=r"ids-item\.arrow holds 9 bytes"):
        assert execute(second, start_ranks) != 0
    assert "no valid checkpoint" in small.events(second.directory, "error")[0]["message"]


def test_a_refresh_is_published_onto_its_parent(make_run, trained_run):
    gate_off = {"epochs": 1, "publish": PUBLISH | {"gate": {"mode": "off"}}}
    first = trained_run("first", **gate_off)
    collection = open_store(first.store_url).collection("items")
    assert collection.current() == "v000001"
    second = make_run("second", **gate_off, init_checkpoint=str(first.checkpoints), parent_version="v000001")
    assert execute(second, start_ranks) == 0
    assert collection.current() == "v000002"
    manifest = collection.manifest("v000002")
    assert manifest["parent"] == "v000001"
    assert manifest["job"] == "second"
    # Attempted once more (a crash after the switch): the same version, not another one.
    again = make_run("second", attempt=2, **gate_off, init_checkpoint=str(first.checkpoints), parent_version="v000001")
    assert execute(again, start_ranks) == 0
    assert collection.current() == "v000002"


def test_a_run_that_was_overtaken_is_held(make_run, trained_run, small):
    gate_off = PUBLISH | {"gate": {"mode": "off"}}
    trained_run("first", epochs=1, publish=gate_off)
    late = make_run("late", publish=gate_off, epochs=1)  # it started when there was no version yet
    assert execute(late, start_ranks) == 0
    (publication,) = small.events(late.directory, "publication")
    assert publication["status"] == "held"
    assert publication["reasons"]
    assert open_store(late.store_url).collection("items").current() == "v000001"


def test_an_attempt_that_was_given_up_publishes_nothing(make_run, small):
    """It wakes up (SIGSTOP, a long pause) when run.json already belongs to the next attempt."""
    run = make_run(publish=PUBLISH, epochs=1)

    def replaced_meanwhile(current):
        start_ranks(current)
        document = json.loads((run.directory / "run.json").read_text())
        (run.directory / "run.json").write_text(json.dumps(document | {"attempt": 2}))

    assert execute(run, replaced_meanwhile) == EXIT_FAILED
    assert small.events(run.directory, "error")[0]["code"] == "given_up"
    assert open_store(run.store_url).collection("items").versions() == []


# --- run.json and the commands ---------------------------------------------------------------------------------------


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


SPEC = """
name: clicks
uri: {uri}
features: {{user: {{type: id}}, item: {{type: id}}}}
label: {{column: click}}
---
name: small
dataset: {{name: clicks}}
model: {{kind: two_tower, embedding_dim: 4, hidden: [8]}}
optimizer: {{kind: adam_ar, learning_rate: 0.1}}
batch_size: 96
publish: {{collection: items, feature: item, gate: {{mode: "off"}}}}
"""


def test_the_train_command_trains_publishes_and_goes_on_from_a_run(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    assert train_command([str(spec)]) == 0
    printed = capsys.readouterr().out
    directory = tmp_path / "home" / "runs" / "small-1"
    assert str(directory) in printed
    assert "epoch 1 test" in printed
    assert (
        train_command([str(spec), "--init", str(directory), "--set", "epochs=2", "--set", "optimizer.alpha=default"])
        == 0
    )
    collection = open_store(tmp_path / "home" / "store").collection("items")
    assert collection.current() == "v000002"
    assert Checkpoint(latest_valid(tmp_path / "home/runs/small-2/checkpoints").path).extra["position"]["evaluated"] == 2


def test_the_train_command_finds_the_run_behind_what_is_served(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec, runs = tmp_path / "spec.yaml", tmp_path / "home" / "runs"
    spec.write_text(SPEC.format(uri=rows))
    refresh = [str(spec), "--set", "optimizer.alpha=default", "--set", "init_from={collection: items}"]
    assert train_command(refresh) == 1
    assert "leave init_from out for the first training" in capsys.readouterr().err
    assert train_command([str(spec), "--run-dir", str(runs / "of-its-own-name")]) == 0
    assert train_command(refresh) == 0
    assert f"init_from: {runs / 'of-its-own-name' / 'checkpoints'}" in capsys.readouterr().out
    (second,) = (one for one in runs.iterdir() if (one / "run.json").exists() and one.name != "of-its-own-name")
    assert read_run(second).init_checkpoint == str(runs / "of-its-own-name" / "checkpoints")
    assert open_store(tmp_path / "home" / "store").collection("items").current() == "v000002"


def test_a_run_directory_made_anew_is_another_job_to_the_store(tmp_path, rows, monkeypatch):
    """Held, looked at, removed, tried again: the store must not take the second run for a retry of the first."""
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows).replace('gate: {mode: "off"}', "gate: {mode: enforce}"))
    command = [str(spec), "--run-dir", str(tmp_path / "run")]
    collapsed = ["--set", "optimizer.learning_rate=0.0001", "--set", "model.init.kind=zero"]
    assert train_command([*command, *collapsed]) == 0
    collection = open_store(tmp_path / "home" / "store").collection("items")
    assert [manifest["state"] for manifest in collection.versions()] == ["held"]
    shutil.rmtree(tmp_path / "run")
    assert train_command([*command, "--set", "publish.gate.mode=off"]) == 0
    assert collection.current() == "v000002"
    # The same directory, still there: the same job, which has its version already.
    assert train_command([*command, "--set", "publish.gate.mode=off"]) == 0
    assert len(collection.versions()) == 2


def test_a_run_directory_that_is_busy_is_left_as_it_is(tmp_path, rows, make_run, capsys):
    """The command given twice: the first must still be the one that may publish."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    run = make_run()
    with driver._lock(run.directory):
        assert train_command([str(spec), "--run-dir", str(run.directory)]) == 1
        assert run.still_current()
    assert "another process" in capsys.readouterr().err


def test_the_same_directory_again_goes_on_from_the_parent_it_began_with(tmp_path, rows, monkeypatch, small):
    """Killed before its first checkpoint, and started again without --init."""
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    parent, child = tmp_path / "parent", tmp_path / "child"
    assert train_command([str(spec), "--run-dir", str(parent)]) == 0
    command = [str(spec), "--run-dir", str(child)]
    assert train_command([*command, "--init", str(parent), "--set", "resources.timeout_seconds=0.0001"]) == 1
    shutil.rmtree(child / "checkpoints")
    assert train_command([str(spec), "--run-dir", str(tmp_path / "other")]) == 0  # what is served is another's by now
    assert train_command(command) == 0
    opening = [event for event in small.events(child, "info") if "alpha" in event][-1]
    assert f"warm start from {parent}" in opening["message"]
    assert small.events(child, "publication")[-1]["status"] == "held"


def test_a_warm_start_on_other_ranks_and_another_plan_is_the_same(make_run, small, tmp_path, pooled_ranks):
    two = {"num_workers": 2}
    first = make_run("first", epochs=1, resources=two, sharding={"item": "row_wise"})
    assert execute(first, pooled_ranks) == 0
    next_day = {"uri": small.write_rows(tmp_path / "next.parquet", seed=9, num_items=400), "epochs": 1}
    next_day["init_checkpoint"] = str(first.checkpoints)
    split = make_run("two", resources=two, sharding={"item": "table_wise", "user": "row_wise"}, **next_day)
    assert execute(split, pooled_ranks) == 0
    whole = make_run("one", **next_day)
    assert execute(whole, start_ranks) == 0
    ours, alone = (latest_valid(run.checkpoints) for run in (split, whole))
    for table in ("item", "user"):
        rows, state = ours.read_rows(table)
        expected, expected_state = alone.read_rows(table)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)  # float32 sums in another order
        assert torch.equal(state["last_update_step"], expected_state["last_update_step"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.kind=adm"], "optimizer.kind"),
        (["optimiser.kind=adam"], "check the spelling"),
        (["epochs"], "not PATH=VALUE"),
        (["epochs.x=1"], "not a part with fields"),
        (["epochs=["], "--set epochs=.: the value is not YAML"),
        (["publish.feature=history"], "publish.feature"),
    ],
)
def test_a_change_that_is_wrong_is_named(tmp_path, rows, changes, message):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    with pytest.raises(ValueError, match=message):
        read_spec(spec, changes)


def test_the_train_command_needs_both_documents(tmp_path, rows, capsys):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows).split("---")[0])
    assert train_command([str(spec)]) == 1
    assert "holds no job" in capsys.readouterr().err


# --- a disk that fills up --------------------------------------------------------------------------------------------


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


# --- what a person sees ----------------------------------------------------------------------------------------------


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
