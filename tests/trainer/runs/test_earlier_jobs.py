"""Runs and searches of earlier versions: settings that were removed are passed over, narrower rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embeddings.store import open_store
from trainer.checkpoint.format import MANIFEST_FILE, CheckpointError, _manifest_bytes, latest_valid
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import RUN_FILE, read_run
from trainer.search.folder import SEARCH_FILE, SearchFolder
from trainer.search.spec import parse_search
from trainer.spec import parse_job

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
REMOVED = {"calibrate": "auto", "calibrate_seconds": 60.0}


def with_removed(job: dict[str, Any]) -> dict[str, Any]:
    return job | {"publish": job["publish"] | {"gate": job["publish"]["gate"] | REMOVED}}


@pytest.mark.slow
def test_a_run_trains_and_publishes(make_run):
    directory = make_run(publish=PUBLISH, epochs=1).directory
    document = json.loads((directory / RUN_FILE).read_text())
    (directory / RUN_FILE).write_text(json.dumps(document | {"job": with_removed(document["job"])}))
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    collection = open_store(run.store_url).collection("items")
    assert collection.manifest()["job"] == run.run_id
    assert collection.settings("calibration") == {}


def test_a_search_goes_on(small, rows, tmp_path: Path):
    job, dataset = small.job(publish=PUBLISH), small.dataset(rows)
    search = parse_search({"space": {"optimizer.learning_rate": {"choice": [0.1, 0.01]}}, "num_trials": 2})
    folder = SearchFolder.begin(tmp_path, search, job, dataset)
    document = json.loads((tmp_path / SEARCH_FILE).read_text())
    (tmp_path / SEARCH_FILE).write_text(json.dumps(document | {"job": with_removed(document["job"])}))
    for again in (SearchFolder.begin(tmp_path, search, job, dataset), SearchFolder.open(tmp_path)):
        assert parse_job(again.job.model_dump(mode="json")) == folder.job


def test_rows_without_a_bias_are_refused(trained_run, make_run, small):
    """Rows of two_tower with ``normalize`` had no column of the item's bias, as they have none without it."""
    model = {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]}
    run = trained_run(epochs=1, model=model)
    manifest = latest_valid(run.checkpoints).path / MANIFEST_FILE
    body = json.loads(manifest.read_bytes())["manifest"]
    body["extra"]["job"]["model"]["normalize"] = True
    manifest.write_bytes(_manifest_bytes(body))
    model["normalize"] = True
    again = make_run(epochs=2, attempt=2, model=model)
    refusal = r"'item' has 4 columns, asked for \[0, 5\): if another version of evenkeel wrote it, use that one"
    with pytest.raises(CheckpointError, match=refusal):
        Predictor(again.directory)
    for refused in (again, make_run("warm", model=model, init_checkpoint=str(run.checkpoints))):
        assert execute(refused, start_ranks) != 0
        message = small.events(refused.directory, "error")[-1]["message"]
        assert "'item' has 4 columns, asked for [0, 5): if another version" in message
