"""Settings that were removed: refused by name with the remedy, and dropped where a trained job is only read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.runs.directory import RUN_FILE, read_run, write_run
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.models.base import ModelSpec
from trainer.spec.models.registry import parse_model

JOB: dict[str, Any] = {"name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr", "embedding_dim": 4}}
HARD = {"share": 0.5, "nearest": 6, "skip": 1}


def model(**fields: Any) -> dict[str, Any]:
    return JOB | {"model": JOB["model"] | fields}


def publish(**evidence: Any) -> dict[str, Any]:
    return JOB | {"publish": {"collection": "items", "feature": "item", "evidence": evidence}}


REMOVED = {
    "hard negatives": (
        model(hard_negatives=HARD),
        "model.hard_negatives: was removed: no share of hard negatives improved recall: leave it out",
    ),
    "hard negatives of a kind that had none": (
        model(kind="mf", hard_negatives=HARD),
        "model.hard_negatives: was removed: no share of hard negatives improved recall: leave it out",
    ),
    "recent negatives": (
        model(negative_distribution="recent"),
        "model.negative_distribution: recent was removed: it was no better than popularity: "
        "use popularity with negative_power: 1",
    ),
    "their window": (
        model(negative_distribution="recent", negative_window=7),
        "model.negative_window: was removed: only negative_distribution: recent used it: leave it out",
    ),
    "weights of the rotation": (
        publish(align_half_count=10.0),
        "publish.evidence.align_half_count: was removed: it changed mean cosines by .01 at most: leave it out",
    ),
}


@pytest.mark.parametrize("case", REMOVED)
def test_a_removed_setting_is_refused_with_the_remedy(case: str) -> None:
    document, message = REMOVED[case]
    with pytest.raises(SpecError) as caught:
        parse_job(document)
    assert str(caught.value) == f"job: {message}"


@pytest.mark.parametrize(
    ("document", "same"),
    [
        (model(hard_negatives=None, negative_window=10_000), JOB),
        (publish(min_count=7, align_half_count=None), publish(min_count=7)),
    ],
)
def test_its_former_default_says_nothing(document: dict[str, Any], same: dict[str, Any]) -> None:
    assert parse_job(document) == parse_job(same)


@pytest.mark.parametrize("case", REMOVED)
def test_a_trained_job_that_had_it_is_read(case: str, tmp_path: Any) -> None:
    document, message = REMOVED[case]
    read = parse_job(document, stored=True)
    assert parse_job(read.model_dump(mode="json")) == read
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


@pytest.mark.parametrize("trait", ["publishes_items", "has_dropout", "has_constant_of_loss", "learns_products"])
def test_a_kind_of_another_package_is_told_what_a_removed_trait_became(trait):
    with pytest.raises(TypeError, match=f"Own.{trait} was removed: (leave it out|say multiplies_rows = 'always')"):
        type("Own", (ModelSpec,), {"__module__": "own", trait: True})
