"""A collection's first job takes the gate's limits from halves of its own rows, whatever happens on the way."""

from __future__ import annotations

import os
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.calibration import calibrated_by_halves, calibration_of
from embeddings.store import open_store
from tests.trainer.launch.detached_runs import wait_for
from trainer.data.prepare.preparation import prepare
from trainer.launch import halves
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs import run_process
from trainer.runs.protocol import EXIT_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BPR = {"model": {"kind": "bpr", "embedding_dim": 4}, "optimizer": {"kind": "adam", "learning_rate": 0.02}, "sse": {},
       "epochs": 1, "evaluation": {"split": {"validation": 0.0, "test": 0.0}}}  # fmt: skip
PUBLISH = {"collection": "items", "feature": "item"}


def job_of(**gate):
    return BPR | {"publish": PUBLISH | {"gate": gate}, "init_from": {"collection": "items"}}


def said(small, run):
    return [event for event in small.events(run.directory, "info") if "calibrate" in event["message"]]


def found(run):
    collection = open_store(run.store_url).collection("items")
    return calibration_of(collection, run.job.model.kind, run.job.model.embedding_dim)


def test_halves_share_no_pair_and_are_all_that_trains(make_run, rows, tmp_path):
    run = make_run(**BPR)
    parts = [prepare(run.dataset, run.job, tmp_path / str(half), half=half) for half in (None, 0, 1)]
    whole, first, second = (data.row_counts("item")[2:].sum() for data in parts)
    assert whole == pq.read_table(rows)["click"].to_numpy().sum() == first + second
    assert 0.4 < first / whole < 0.6
    # Prepared for one half, a directory is not taken for the other.
    again = prepare(run.dataset, run.job, tmp_path / "0", half=1)
    assert again.row_counts("item")[2:].sum() == second


def test_the_first_job_sets_limits_and_later_ones_are_judged_by_them(make_run, small, capsys):
    run = make_run("first", **job_of())
    assert execute(run, start_ranks) == 0
    assert capsys.readouterr().out.count("training from initial values") == 1, "halves have logs of their own"
    calibration = found(run)
    assert (calibration.kind, calibration.num_nulls, calibration.model) == ("halves", 2, "bpr")
    assert calibration.source == ["first/halves-0", "first/halves-1"]
    assert {"cosine_mean", "knn_overlap", "effective_rank"} <= calibration.nulls.keys()
    beginning, end = said(small, run)
    assert beginning["message"] == "publish.gate.calibrate: training on halves of the rows"
    assert end["limits"] == calibration.limits
    assert end["seconds"] > 0
    assert not (run.directory / halves.FOLDER).exists()
    # The publication is told before: who waits for the version does not wait for the limits.
    (publication,) = small.events(run.directory, "publication")
    assert publication["time"] <= beginning["time"]

    later = make_run("later", parent_version="v000001", init_checkpoint=str(run.checkpoints),
                     **job_of(mode="report"))  # fmt: skip
    assert execute(later, start_ranks) == 0
    assert said(small, later) == []
    manifest = open_store(run.store_url).collection("items").manifest("v000002")
    assert manifest["calibration"]["limits"] == calibration.limits
    limits = {check["metric"]: check["threshold"] for check in manifest["gate"]}
    assert calibration.limits.items() <= limits.items()
    assert found(later) == calibration


@pytest.mark.parametrize("gate", [{"calibrate": "off"}, {"mode": "off"}])
def test_a_job_that_does_not_ask_trains_nothing_more(make_run, small, gate):
    run = make_run("plain", **job_of(**gate))
    assert execute(run, start_ranks) == 0
    assert found(run) is None
    assert said(small, run) == []


def test_halves_go_on_from_one_another_though_the_job_begins_anew(make_run):
    """A first job has nothing to begin from, and the refreshes after it do."""
    asked = job_of()
    calibrations = []
    for name, job in (("from", asked), ("anew", {key: asked[key] for key in asked if key != "init_from"})):
        run = make_run(name, **job | {"publish": PUBLISH | {"collection": name}})
        assert execute(run, start_ranks) == 0
        calibration = open_store(run.store_url).collection(name).settings("calibration")["bpr"]
        calibrations.append((calibration["limits"], calibration["nulls"]))
    assert calibrations[0] == calibrations[1]


def test_what_the_first_training_says_of_the_others_is_heard(make_run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(halves.time, "monotonic", lambda: now[0])
    budget = halves._Budget(make_run(**BPR), seconds=600)
    now[0] += 150
    budget.require(1)
    now[0] += 10
    with pytest.raises(halves.StoppedEarly, match="some 640 seconds, more than calibrate_seconds"):
        budget.require(1)
    budget.require(3)
    assert budget.notice() is None
    now[0] += 450
    assert budget.notice() == "not done after 600 seconds"


def test_a_driver_that_is_killed_amid_the_halves_leaves_them_to_the_next_attempt(make_run, small, standby):
    asked = job_of(calibrate="auto")
    whole = make_run("whole", **asked | {"publish": PUBLISH | {"collection": "whole", "gate": {"calibrate": "auto"}}})
    assert execute(whole, start_ranks) == 0
    expected = open_store(whole.store_url).collection("whole").settings("calibration")["bpr"]

    run = make_run("killed", **asked)
    pid = run_process.launch(run.directory, standby=standby)
    half = run.directory / halves.FOLDER / "row-0" / "today"
    wait_for(half.exists, run.directory)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not run_process.processes(run.directory), run.directory)
    assert not (run.directory / EXIT_FILE).exists()
    assert found(run) is None
    trained = (run.directory / halves.FOLDER / "row-0" / "yesterday" / "events.jsonl").read_bytes()

    run = make_run("killed", attempt=2, **asked)
    assert execute(run, start_ranks) == 0
    calibration = found(run)
    assert (calibration.limits, calibration.nulls) == (expected["limits"], expected["nulls"])
    assert len(trained) > 0
    publications = small.events(run.directory, "publication")
    assert [one["version"] for one in publications] == ["v000001", "v000001"]


@pytest.mark.parametrize(
    ("gate", "changes", "reason"),
    [
        ({"calibrate_seconds": 1e-6}, {}, "seconds, more than calibrate_seconds: the limits stay"),
        ({}, {"uri": "few"}, "items, 48 are needed to align them"),
    ],
)  # fmt: skip
def test_limits_that_are_not_found_do_not_fail_the_job(make_run, small, tmp_path, capfd, gate, changes, reason):
    if changes.get("uri") == "few":
        changes = {"uri": small.write_rows(tmp_path / "few.parquet", num_items=30)}
    run = make_run("given-up", **job_of(calibrate="auto", **gate) | changes)
    assert execute(run, start_ranks) == 0
    assert found(run) is None
    assert reason in said(small, run)[-1]["message"]
    assert "evenkeel calibrate" in said(small, run)[-1]["message"]
    assert small.events(run.directory, "state")[-1]["state"] == "succeeded"
    # A small first version is no fault of the program.
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_run_that_is_asked_to_stop_amid_the_halves_has_published_and_succeeds(make_run, small):
    run = make_run("stopped", **job_of(calibrate="auto") | {"epochs": 3})

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    half = run.directory / halves.FOLDER / "row-0" / "yesterday" / "data"
    with small.meanwhile(half.exists, stop):
        assert execute(run, start_ranks) == 0
    assert "the run was asked to stop" in said(small, run)[-1]["message"]
    assert small.events(run.directory, "publication")[-1]["status"] == "published"
    assert found(run) is None


def test_what_cannot_be_halved_is_left_to_calibrate_by_hand(make_run):
    one_pass = {"dataset": {"name": "clicks", "one_pass": True}, "epochs": 1,
                "tables": {"user": {"capacity": 100}, "item": {"capacity": 200}}}  # fmt: skip
    assert "no examples" in halves.unsupported(make_run("one-pass", **one_pass), 1.0, 600.0)
    run = make_run("two", **job_of(calibrate="auto") | {"resources": {"num_workers": 2}})
    assert "one rank of this host" in halves.unsupported(run, 1.0, 600.0)
    one = make_run("one", **job_of())
    cold = {key: value for key, value in job_of().items() if key != "init_from"}
    anew = make_run("anew", **cold | {"regularizers": {"meda": True}, "epochs": 2})
    assert halves.unsupported(anew, 1.0, 600.0) == "regularizers.meda takes no warm starts, which halves would be"
    assert halves.unsupported(one, 299.0, 600.0) is None
    assert halves.unsupported(one, 301.0, 600.0) == "halves would take some 602 seconds, more than calibrate_seconds"


def test_limits_of_halves_are_never_tighter_than_starting_ones_that_bind():
    quiet = {"dim": 16.0, "cosine_mean": 0.99, "cosine_low": 0.0, "knn_overlap": 0.9, "kernel_rms": 0.1}
    assert calibrated_by_halves([quiet, quiet]).limits == {}
    noisy = quiet | {"cosine_mean": 0.82, "cosine_low": 0.08, "kernel_rms": 0.9, "cosine_mean_traffic": 0.84}
    calibration = calibrated_by_halves([quiet | {"cosine_mean_traffic": 0.9}, noisy])
    expected = {"cosine_mean": 0.77, "cosine_low": 0.11, "kernel_rms": 1.09, "cosine_mean_traffic": 0.82}
    assert calibration.limits == pytest.approx(expected)
    assert calibration.unstable == []
    # Trainings that agree on nothing set no limit that lets everything through.
    lost = quiet | {"cosine_mean": 0.3, "cosine_low": 0.9}
    calibration = calibrated_by_halves([quiet, lost])
    assert calibration.limits == pytest.approx({"cosine_mean": 0.75, "cosine_low": 0.2})
    assert calibration.unstable == ["cosine_mean", "cosine_low"]
    assert np.isfinite(list(calibration.limits.values())).all()
    with pytest.raises(ValueError, match="1 nulls: at least 2"):
        calibrated_by_halves([quiet])
