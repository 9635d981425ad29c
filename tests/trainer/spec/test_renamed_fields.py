"""Specs written with a field's old name: read the same, with a warning; both names at once are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from trainer.spec import JobSpec, SpecError, parse_job

JOB: dict[str, Any] = {
    "name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
    "init_from": {"job": "p"},
}  # fmt: skip
DYNAMIC = JOB | {"model": {"kind": "dnn", "embedding_dim": 4}, "init_from": None}


def publish(**fields: Any) -> dict[str, Any]:
    return JOB | {"publish": {"collection": "items", "feature": "item", **fields}}


def table(**fields: Any) -> dict[str, Any]:
    return DYNAMIC | {"tables": {"item": {"capacity": 10, **fields}}}


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (
            publish(compass={"items": "warm"}),
            publish(frozen_context={"items": "warm"}),
            "compass is now frozen_context",
        ),
        (table(admit_after=2), table(admission_threshold=2), "admit_after is now admission_threshold"),
        (table(when_full="refuse"), table(eviction_policy="refuse"), "when_full is now eviction_policy"),
    ],
)
def test_the_old_name_is_read_with_a_warning(old, new, names):
    with pytest.warns(FutureWarning, match=names):
        job = parse_job(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert job == parse_job(new)
        assert JobSpec.model_validate(job.model_dump(mode="json")) == job, "it is written with the new name"


def test_both_names_at_once_are_refused():
    with pytest.raises(SpecError, match=r"publish: compass is the old name of frozen_context, .*leave compass out"):
        parse_job(publish(compass={}, frozen_context={}))
