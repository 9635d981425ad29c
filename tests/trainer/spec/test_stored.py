"""What is read of stored specs: fields under old names, left out, of specs that are not valid any more."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trainer.spec import JobSpec, Table, parse_job
from trainer.spec.job import Resources
from trainer.spec.stored_specs import StoredJob, read

JOB: dict[str, Any] = {
    "name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr"}, "init_from": {"job": "job_1"}, "retries": 5,
    "optimizer": {"kind": "sgd"}, "labels": {"team": "ads"}, "resources": {"timeout_seconds": 60, "num_workers": 3},
    "regularizers": {"early_stopping": {"metric": "ndcg_10"}}, "evaluation": {"metrics": ["ndcg_10"]},
}  # fmt: skip
EXPECTED = {
    "dataset_name": "log", "labels": {"team": "ads"}, "optimizer_kind": "sgd", "parent_job": "job_1", "retries": 5,
    "resources": Resources(timeout_seconds=60, num_workers=3), "stopping_metric": "ndcg_10",
}  # fmt: skip


def values(document: dict[str, Any]) -> dict[str, Any]:
    stored = StoredJob(document)
    return {
        name: getattr(stored, name)
        for name, _ in inspect.getmembers(StoredJob, inspect.isdatadescriptor)
        if name[0] != "_"
    }


@pytest.mark.parametrize("document", [JOB, parse_job(JOB).model_dump(mode="json"), JOB | {"gone": 1, "epochs": -3}])
def test_every_version_is_read(document: dict[str, Any]) -> None:
    assert values(document) == EXPECTED


def test_what_was_left_out_has_its_default() -> None:
    least = {name: JOB[name] for name in ("name", "dataset")} | {"model": {"kind": "dnn"}}
    job = parse_job(least)
    assert values(least) == {
        "dataset_name": "log", "labels": {}, "optimizer_kind": job.optimizer.kind, "parent_job": None,
        "retries": job.retries, "resources": Resources(), "stopping_metric": None,
    }  # fmt: skip
    with pytest.raises(KeyError, match="the stored JobSpec has no dataset"):
        _ = StoredJob({}).dataset_name


def test_an_old_name_is_read_as_the_new_one() -> None:
    assert read({"admit_after": 2}, Table, "admission_threshold") == 2
    assert read({"admission_threshold": 3}, Table, "admission_threshold") == 3


def test_a_field_that_there_is_not_is_an_error_wherever_it_is_named() -> None:
    with pytest.raises(KeyError, match="admit_after"):
        read({"admit_after": 2}, Table, "admit_after")
    with pytest.raises(KeyError, match="epoch"):
        parse_job(JOB).model_copy(update={"epoch": 3})
    assert parse_job(JOB).model_copy(update={"epochs": 3}).epochs == 3


@pytest.mark.parametrize("start", ["{firing_date}", "2026-01-31", None])
def test_a_firing_fills_in_its_date(start: str | None) -> None:
    window = None if start is None else {"start": start, "days": 7}
    job = JobSpec.model_validate(JOB | {"dataset": {"name": "log", "window": window}})
    fired = job.fired_on("2026-02-01").dataset.window
    assert (None if fired is None else (fired.start, fired.days)) == (
        None if start is None else ("2026-02-01" if "{" in start else start, 7)
    )
