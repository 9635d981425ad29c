"""A job of one pass is refused what needs all rows first: the field is named, and what to do."""

from __future__ import annotations

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

TWO_TOWER = {"kind": "two_tower", "embedding_dim": 4}


def job_of(one_pass=True, **changes):
    document = {
        "name": "one-pass", "dataset": {"name": "log", "one_pass": one_pass},
        "model": {"kind": "dnn", "embedding_dim": 4}, "optimizer": {"kind": "adam_ar", "alpha": 0.001},
        "tables": {"user": {"capacity": 9}, "item": {"capacity": 9}},
    }  # fmt: skip
    return parse_job({name: value for name, value in (document | changes).items() if value is not None})


def dataset_of(**changes):
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "price": {"type": "dense", "missing": 0.0}}
    document = {"name": "log", "uri": "rows", "features": features | changes.pop("features", {}), "order": "ts"}
    return parse_dataset(document | {"label": {"column": "click"}} | changes)


def test_what_it_can_do_is_accepted_and_hashes_of_other_jobs_stand():
    job = job_of()
    job.against(dataset_of())
    assert job.dataset.one_pass
    assert "one_pass" not in job_of(one_pass=False).model_dump(mode="json")["dataset"]


@pytest.mark.parametrize(
    ("field", "changes", "remedy"),
    [
        ("epochs", {"epochs": 2}, "use 1"),
        ("evaluation.split.kind", {"evaluation": {"split": {"kind": "time"}}}, "use random, or column"),
        ("evaluation.split.kind", {"evaluation": {"split": {"kind": "per_user_last"}}}, "use random, or column"),
        ("evaluation.split.validation", {"evaluation": {"split": {"kind": "column", "column": "s"}}}, "set it to 0"),
        ("evaluation.training", {"evaluation": {"training": True}}, "leave it out"),
        ("optimizer.alpha", {"optimizer": {"kind": "adam_ar"}}, "give a number"),
        ("optimizer.alpha", {"optimizer": {"kind": "adagrad_ar", "alpha": "auto"}}, "give a number"),
        ("publish", {"model": TWO_TOWER, "publish": {"collection": "items", "feature": "item"}}, "leave it out"),
    ],
)  # fmt: skip
def test_settings_that_need_all_rows_are_refused(field, changes, remedy):
    job_of(one_pass=False, **changes)
    with pytest.raises(SpecError) as refused:
        job_of(**changes)
    (problem,) = refused.value.problems
    assert problem.field == field
    assert remedy in problem.remedy
    assert "leave dataset.one_pass out" in problem.remedy


@pytest.mark.parametrize(
    ("field", "job", "dataset", "remedy"),
    [
        ("tables.user.capacity", {"tables": {"item": {"capacity": 9}}}, {}, "set how many"),
        ("features.past.derive", {},
         {"features": {"past": {"type": "id_list", "shares": "item", "derive":
                                {"previous": "item", "by": "user", "order": "ts", "length": 3}}}}, "into a column"),
        ("features.kind.join", {"tables": {name: {"capacity": 9} for name in ("user", "item", "kind")}},
         {"features": {"kind": {"join": {"uri": "kinds.parquet", "on": "item", "column": "kind"}}}}, "into a column"),
        ("features.price.transform", {},
         {"features": {"price": {"type": "dense", "transform": "standardize", "missing": 0.0}}}, "none or log1p"),
        ("features.price.missing", {}, {"features": {"price": {"type": "dense"}}}, "give a number, or error"),
        ("label.negatives", {}, {"label": {"negatives": {"of": "item"}}}, "column or rule"),
        ("max_bad_rows", {}, {"max_bad_rows": 0.1}, "leave it out"),
        ("evaluation.metrics", {"evaluation": {"metrics": ["auc", "gauc"]}}, {}, "leave it out"),
        ("evaluation.intervals.by", {"evaluation": {"intervals": {"by": "user"}}}, {}, "leave it out"),
    ],
)  # fmt: skip
def test_data_that_need_all_rows_are_refused(field, job, dataset, remedy):
    job_of(one_pass=False, **job).against(dataset_of(**dataset))
    with pytest.raises(InvalidFieldsError) as refused:
        job_of(**job).against(dataset_of(**dataset))
    (problem,) = refused.value.problems
    assert problem.field == field
    assert remedy in problem.remedy
    assert "leave dataset.one_pass out" in problem.remedy
