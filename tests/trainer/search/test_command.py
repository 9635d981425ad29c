"""A search in a real Ray: trials on the same prepared rows, ended early, and the best job as a file that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.support.warm_pool import Borrowed
from trainer.runs.events import read_events
from trainer.search.command import main
from trainer.search.tuner import FOLDER, WORKING_DIRECTORY, Trial, TrialError
from trainer.spec import load_documents

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def files(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("search")
    dataset = small.dataset(small.write_rows(folder / "rows.parquet"))
    job = small.job(epochs=3, model={"kind": "dnn", "embedding_dim": 4, "hidden": [8]})
    documents = [one.model_dump(mode="json", exclude_unset=True) for one in (dataset, job)]
    (folder / "spec.yaml").write_text(yaml.safe_dump_all(documents))
    space = {"optimizer.learning_rate": {"choice": [0.1, 1e-9]}, "model.embedding_dim": {"choice": [4, 8]}}
    search = {"space": space, "num_trials": 3, "seed": 1, "reduction_factor": 2}
    (folder / "search.yaml").write_text(yaml.safe_dump(search, sort_keys=False))
    return folder


def command(files, *options):
    paths = [str(files / name) for name in ("spec.yaml", "search.yaml")]
    return [sys.executable, "-m", "trainer.search.command", *paths, "--directory", str(files / "found"), *options]


@pytest.fixture(scope="module")
def found(files):
    shared = {"EVENKEEL_PREPARED_BYTES": str(2**30), "EVENKEEL_CACHE": str(files / "cache")}
    ended = subprocess.run(
        command(files, "--json"), env=os.environ | shared, check=False, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_best_trial_is_that_of_its_run_s_validation_rows(found, files):
    trials, runs = found["trials"], files / "found" / "trials"
    assert len(trials) == 3
    for trial in trials:
        figures = {
            event.fields["epoch"]: event.fields["auc"]
            for event in read_events(runs / trial["trial_id"])
            if event.fields["type"] == "metric" and event.fields["split"] == "validation"
        }
        assert trial["best"] == max(figures.values()) == figures[trial["epoch"]]
        assert len(figures) == trial["epochs"] == 3 or trial["state"] == "stopped"
    assert [trial["best"] for trial in trials] == sorted((trial["best"] for trial in trials), reverse=True)
    assert {trial["state"] for trial in trials} <= {"done", "stopped"}
    dataset, job = load_documents(found["best"])
    assert job.optimizer.learning_rate == trials[0]["values"]["optimizer.learning_rate"]
    job.against(dataset)


def test_trials_share_prepared_rows(found, files):
    places = {path.stat().st_ino for path in (files / "found" / "trials").glob("*/data/**/rows.labels.bin")}
    runs = [path for path in (files / "found" / "trials").glob("*/data") if path.is_dir()]
    assert len(runs) == 3
    assert places
    per_run = len(list(runs[0].glob("**/rows.labels.bin")))
    assert len(places) == per_run


def test_a_finished_search_is_told_again_without_ray(found, files, capsys):
    assert main([str(files / "spec.yaml"), str(files / "search.yaml"), "--directory", str(files / "found")]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = ["trial", "optimizer.learning_rate", "model.embedding_dim", "auc", "epoch", "epochs", "state"]
    assert lines[0].split() == header
    assert lines[1].split()[0] == found["trials"][0]["trial_id"]
    assert lines[-1] == f"best job: {found['best']}"


def test_a_trial_that_begins_again_goes_on_from_its_checkpoint(found, files, warm_pool, monkeypatch):
    monkeypatch.setattr("trainer.search.tuner.WarmPool", lambda: Borrowed(warm_pool))
    monkeypatch.chdir(files)
    values = {"optimizer.learning_rate": 0.05, FOLDER: str(files / "found"), WORKING_DIRECTORY: str(files)}
    first = Trial(dict(values))
    assert first.train()["epoch"] == 1
    first.stop()
    run = files / "found" / "trials" / "default"
    again = Trial(dict(values))
    epochs = []
    while not (result := again.train()).get("done"):
        epochs.append(result["epoch"])
    again.stop()
    assert epochs == [1, 2, 3]
    infos = [event.fields for event in read_events(run) if event.fields["type"] == "info"]
    assert any(one["attempt"] == 2 and "resuming after step" in one["message"] for one in infos)


def test_a_trial_whose_values_do_not_go_together_says_so(found, files, monkeypatch):
    monkeypatch.chdir(files)
    trial = Trial({"model.embedding_dim": 0, FOLDER: str(files / "found"), WORKING_DIRECTORY: str(files)})
    with pytest.raises(TrialError, match=r"the values do not go together: .*embedding_dim"):
        trial.train()
    trial.stop()
