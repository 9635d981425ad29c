"""Settings that were removed: refused by name with the remedy, and no obstacle to reading what was trained with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.runs.directory import RUN_FILE, read_run, write_run
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.models.registry import parse_model

JOB: dict[str, Any] = {"name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr", "embedding_dim": 4}}
HARD = {"share": 0.5, "nearest": 6, "skip": 1}


def model(**fields: Any) -> dict[str, Any]:
    return JOB | {"model": JOB["model"] | fields}


REMOVED = {
    "hard negatives": (
        model(hard_negatives=HARD),
        "model.hard_negatives: was removed: no share of hard negatives improved recall: leave it out",
    ),
    "hard negatives of a kind that had none": (
        model(kind="mf", hard_negatives=HARD),
        "model.hard_negatives: was removed: no share of hard negatives improved recall: leave it out",
    ),
}


@pytest.mark.parametrize("case", REMOVED)
def test_a_removed_setting_is_refused_with_the_remedy(case: str) -> None:
    document, message = REMOVED[case]
    with pytest.raises(SpecError) as caught:
        parse_job(document)
    assert str(caught.value) == f"job: {message}"


@pytest.mark.parametrize("document", [model(hard_negatives=None)])
def test_its_former_default_says_nothing(document: dict[str, Any]) -> None:
    assert parse_job(document) == parse_job(JOB)


@pytest.mark.parametrize("case", REMOVED)
def test_a_trained_job_that_had_it_is_read(case: str, tmp_path: Any) -> None:
    document, message = REMOVED[case]
    read = parse_job(document, stored=True)
    assert "hard_negatives" not in read.model_dump(mode="json")["model"]
    assert parse_model(document["model"], stored=True) == read.model

    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    rows = parse_dataset({"name": "log", "uri": "log.parquet", "features": features, "label": {"column": "click"}})
    directory = write_run(tmp_path / "run", run_id="run", job=read, dataset=rows, store_url=str(tmp_path / "store"))
    written = json.loads((directory / RUN_FILE).read_text("utf-8"))
    (directory / RUN_FILE).write_text(json.dumps(written | {"job": document}), "utf-8")
    assert read_run(directory, stored=True).job == read
    # Training on without it would be another job than was asked for.
    with pytest.raises(SpecError) as caught:
        read_run(directory)
    assert message in str(caught.value)
