"""A job of one pass is refused what needs all rows first: the field is named, and what to do."""

from __future__ import annotations

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError


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
        ("optimizer.alpha", {"optimizer": {"kind": "adagrad_ar"}}, "give a number"),
        ("optimizer.decay", {"optimizer": {"kind": "adam_ar", "alpha": 0.1, "decay": "by_epoch"}}, "use at_read"),
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


FOLLOW = {"name": "log", "one_pass": True, "follow": {"until": "_END"}}
NO_SPLIT = {"split": {"validation": 0, "test": 0}}


def test_a_job_that_follows_a_folder_is_accepted():
    publish = {"collection": "items", "feature": "item", "every_seconds": 60}
    job = job_of(dataset=FOLLOW, evaluation=NO_SPLIT | {"progressive_rows": 1000}, publish=publish,
                 model={"kind": "two_tower", "embedding_dim": 4})  # fmt: skip
    job.against(dataset_of())
    assert job.publish.is_repeated
    # A job that follows saves once a minute, others by their steps alone.
    assert (job.checkpoint_seconds, job_of().checkpoint_seconds) == (60.0, None)
    assert job_of(checkpoint={"every_seconds": 5}).checkpoint_seconds == 5


@pytest.mark.parametrize(
    ("field", "changes", "remedy"),
    [
        ("evaluation.split", {"evaluation": {}}, "validation: 0 and test: 0"),
        ("evaluation.split", {"evaluation": {"split": {"kind": "column", "column": "c", "validation": 0}}},
         "progressive"),
        ("dataset.window", {"dataset": FOLLOW | {"window": {"start": "2026-01-01"}}}, "leave one of them out"),
        ("dataset.follow", {"dataset": FOLLOW | {"one_pass": False}}, "set dataset.one_pass"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_without_an_end_is_refused(field, changes, remedy):
    with pytest.raises(SpecError) as refused:
        job_of(**{"dataset": FOLLOW, "evaluation": NO_SPLIT} | changes)
    (problem,) = refused.value.problems
    assert problem.field == field
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("evaluation.progressive_rows", {"evaluation": {"progressive_rows": 1000}}),
        ("publish.every_seconds", {"publish": {"collection": "items", "feature": "item", "every_seconds": 9}}),
        ("publish.every_rows", {"publish": {"collection": "items", "feature": "item", "every_rows": 9}}),
    ],
)  # fmt: skip
def test_what_is_of_one_pass_alone_is_refused_elsewhere(field, changes):
    model = {"kind": "two_tower", "embedding_dim": 4}
    job_of(model=model, **changes)
    with pytest.raises(SpecError) as refused:
        job_of(one_pass=False, model=model, **changes)
    (problem,) = refused.value.problems
    assert (problem.field, problem.remedy) == (field, "set dataset.one_pass, or leave it out")


def test_versions_come_by_time_or_by_rows_and_markers_are_no_files_of_rows():
    publish = {"collection": "items", "feature": "item", "every_seconds": 9, "every_rows": 9}
    with pytest.raises(SpecError, match=r"publish.every_rows: every_seconds is set too: give one of the two"):
        job_of(model={"kind": "two_tower", "embedding_dim": 4}, publish=publish)
    with pytest.raises(SpecError, match=r"dataset.follow.until"):
        job_of(dataset=FOLLOW | {"follow": {"until": "end.parquet"}}, evaluation=NO_SPLIT)
