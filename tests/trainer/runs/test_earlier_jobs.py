"""Runs and searches that an earlier version began with settings that were removed go on without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embeddings.store import open_store
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
