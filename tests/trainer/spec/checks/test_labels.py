"""Several labels and weights of rows: what has no meaning is refused by name, with the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.spec import SpecError, load_documents, parse_dataset, parse_job
from trainer.spec.label_tasks import label_tasks, watched_metric

CLICK_AND_BUY = {"click": {"column": "click"}, "buy": {"column": "buy"}}
COUNT = {"value": "count", "loss": "poisson"}
GIVEN = {"tasks": {"buy": {"given": "click"}}}


def dataset_of(**changes: Any):
    fields = {"name": "rows", "uri": "rows.parquet", "features": {"user": {}, "item": {}}, "labels": CLICK_AND_BUY}
    document = fields | changes
    return parse_dataset({name: value for name, value in document.items() if value is not None})


def job_of(**changes: Any):
    return parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "mmoe"}} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": {"column": "click"}}, "labels: label is set too: leave one of the two out"),
        ({"labels": None}, "label: Field required: give label, or labels by name"),
        ({"labels": {}}, "label: Field required: give label, or labels by name"),
        ({"labels": {"a b": {"column": "click"}}}, "String should match pattern"),
        ({"labels": {"click": {}}}, "labels.click: give exactly one of column, rule, negatives, value and positive"),
        ({"labels": {"click": {"column": "c", "weight": 0}}}, "labels.click.weight: Input should be greater than 0"),
        ({"labels": {"click": {"column": "c", "wieght": 1}}}, "click.wieght: no such field: did you mean weight"),
        ({"labels": {"click": {"column": "c", "metrics": ["ac"]}}}, "labels.click.metrics.0: no such metric"),
        ({"labels": {"click": {"column": "c", "loss": "bpr"}}}, "labels.click.loss: Input should be 'bce', 'mse'"),
        (
            {"labels": {"click": {"negatives": {"of": "item"}}}},
            "labels.click.negatives: drawn negatives have only one label: use label, not labels",
        ),
        (
            {"labels": {"time": {"value": "time", "loss": "bce"}}},
            "labels.time.loss: bce needs classes, but the label is a value: use mse or poisson or exponential",
        ),
        (
            {"labels": {"click": {"column": "c", "loss": "poisson"}}},
            "labels.click.loss: poisson needs counts or durations: give value: COLUMN, or use bce",
        ),
        (
            {"labels": {"click": {"column": "c", "focal_gamma": 1.0}}},
            "labels.click.focal_gamma: bce has none: use loss focal, or leave it out",
        ),
        (
            {"labels": {"count": {**COUNT, "metrics": ["auc"]}}},
            "labels.count.metrics: a label of poisson has no auc: use rmse, mae",
        ),
    ],
)
def test_datasets_that_contradict_themselves(changes, message):
    with pytest.raises(SpecError) as caught:
        dataset_of(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "dataset", "message"),
    [
        (
            {"model": {"kind": "dnn"}}, {},
            "model.kind: dnn learns one label, and dataset 'rows' has labels click, buy: use one of shared_bottom, "
            "mmoe, ple, esmm, or give the dataset one label",
        ),
        (
            {}, {"labels": None, "label": {"column": "click"}},
            "model.kind: mmoe learns several labels, and dataset 'rows' has one: give the dataset labels: {NAME",
        ),
        (
            {"model": {"kind": "mmoe", "tasks": {"by": {"given": "click"}}}}, {},
            "model.tasks.by: no such label (there are click, buy): name one of them",
        ),
        (
            {"model": {"kind": "ple", "tasks": {"buy": {"given": "cart"}}}}, {},
            "model.tasks.buy.given: no label 'cart' (there are click, buy): name one of them",
        ),
        (
            {"model": {"kind": "esmm", "tasks": {"buy": {"given": "click"}, "click": {"given": "buy"}}}}, {},
            "model.tasks: given forms a cycle: buy, click: leave one of them out",
        ),
        (
            {"model": {"kind": "esmm", "tasks": {"buy": {"given": "buy"}}}}, {},
            "model.tasks: given forms a cycle: buy: leave",
        ),
        (
            {"model": {"kind": "esmm", "tasks": {"count": {"given": "click"}}}},
            {"labels": {**CLICK_AND_BUY, "count": COUNT}},
            "model.tasks.count.given: 'count' is learned by poisson, and has no probability: use bce for both, or",
        ),
        (
            {"evaluation": {"metrics": ["auc", "rmse"]}}, {"labels": {"count": COUNT, "time": {"value": "time"}}},
            "evaluation.metrics: none of the labels count, time has auc: leave it out",
        ),
        (
            {"sse": {"label": {"probability": 0.1}}}, {"labels": {"count": COUNT}},
            "sse.label: the labels count have no classes to flip: leave it out",
        ),
        (
            {"regularizers": {"label_smoothing": 0.1}}, {"labels": {"count": COUNT}},
            "regularizers.label_smoothing: the labels count have no classes to smooth: leave it 0",
        ),
        (
            {"evaluation": {"metrics": ["gauc"]}}, {"features": {"item": {}}},
            "evaluation: users need a feature named 'user'",
        ),
        (
            {}, {"features": {"user": {}}, "labels": {"click": {"column": "c", "metrics": ["frequency_buckets"]}}},
            "frequency_buckets need a feature named 'item'",
        ),
        (
            {"model": {"kind": "bpr", "loss": "bpr"}}, {"labels": None, "label": {"column": "click"}, "weight": "w"},
            "model.kind: bpr trained by bpr does not weigh rows: leave weight of the dataset out",
        ),
        (
            {"model": {"kind": "two_tower", "loss": "sampled_softmax"}},
            {"labels": None, "label": {"column": "click"}, "weight": "w"},
            "two_tower trained by sampled_softmax does not weigh rows",
        ),
        (
            {"model": {"kind": "sasrec", "loss": "bce"}},
            {"labels": None, "label": {"column": "click"}, "order": "t", "weight": "w"},
            "sasrec trained by bce does not weigh rows",
        ),
    ],
)  # fmt: skip
def test_jobs_that_do_not_fit_the_labels(changes, dataset, message):
    with pytest.raises(ValueError) as caught:
        job_of(**changes).against(dataset_of(**dataset))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"kind": "esmm"}},
            "model.tasks: esmm multiplies conditional probabilities, but no label is conditional",
        ),
        (
            {"model": {"kind": "mmoe", "loss": "mse"}},
            "model.loss: each label of mmoe has its own: set labels.NAME.loss instead",
        ),
        ({"model": {"kind": "mmoe", "hidden": []}}, "model.hidden: Tuple should have at least 1 item"),
        ({"model": {"kind": "dnn", "experts": 3}}, "model.experts: dnn has none: use mmoe, or leave it out"),
        (
            {"evaluation": {"metrics": ["recall_20_full"]}},
            "mmoe has no recall_20_full, because it cannot rank all items",
        ),
        (
            {"regularizers": {"dropout": 0.1, "dropout_method": {"masks": 0, "explicit": "identity"}}},
            "regularizers.dropout_method.explicit: the loss of mmoe depends on several outputs: use loss_jacobian",
        ),
        ({"publish": {"collection": "items", "feature": "item"}}, "the loss of mmoe does not determine its vectors"),
    ],
)
def test_jobs_that_contradict_themselves(changes, message):
    with pytest.raises(SpecError) as caught:
        job_of(**changes)
    assert message in str(caught.value)


def test_a_label_named_twice_is_refused(tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text(
        "name: rows\nuri: rows.parquet\nfeatures: {user: {}}\nlabels:\n  buy: {column: a}\n  buy: {column: b}\n"
    )
    with pytest.raises(SpecError, match="the key 'buy' occurs twice: remove one"):
        load_documents(path)


def test_what_is_measured_of_each_label():
    labels = {
        "click": {"column": "click"},
        "count": COUNT,
        "rank": {"rule": "x > 1", "loss": "focal"},
        "own": {"column": "o", "metrics": ["calibration", "ece"]},
    }
    tasks = label_tasks(dataset_of(labels=labels))
    asked = [job_of(evaluation={"metrics": m}).evaluation.metrics for m in (["auc", "logloss"], ["gauc", "ece", "mae"])]
    measured = [{task.name: task.measured(metrics) for task in tasks} for metrics in asked]
    own = ("calibration", "ece")
    assert measured[0] == {"click": ("auc", "logloss"), "count": ("rmse", "mae"), "rank": ("auc",), "own": own}
    assert measured[1] == {"click": ("gauc", "ece", "mae"), "count": ("mae",), "rank": ("gauc",), "own": own}
    assert watched_metric(job_of(), dataset_of(labels=labels)) == "auc/click"


def test_specs_of_one_label_are_dumped_as_before():
    dumped = dataset_of(labels=None, label={"column": "click"}).model_dump(mode="json")
    assert not {"labels", "weight"} & dumped.keys()
    assert "label" not in dataset_of().model_dump(mode="json")
    assert parse_dataset(dataset_of().model_dump(mode="json")) == dataset_of()


@pytest.mark.parametrize(
    ("metric", "labels", "message"),
    [
        ("auc/buy", CLICK_AND_BUY, None),
        ("logloss", None, None),
        ("ndcg_10", None, "ndcg_10 is not measured: use one of auc, logloss, or name ndcg_10 in evaluation.metrics"),
        ("calibration", None, "calibration is a table, which cannot compare epochs: use one of auc, log"),
        ("rmse/buy", CLICK_AND_BUY, "rmse/buy is not measured: use one of auc/click, logloss/click, auc/buy, logloss"),
        (
            "logloss_calibrated/click",
            CLICK_AND_BUY,
            "logloss_calibrated/click is not measured: use one of auc/click, logloss/click, auc/buy, logloss/buy, or "
            "set output_calibration",
        ),
        ("auc", CLICK_AND_BUY, "auc belongs to none of the labels click, buy: write METRIC/LABEL, such as auc/click"),
        (
            "auc/by",
            CLICK_AND_BUY,
            "auc/by belongs to none of the labels click, buy: write METRIC/LABEL, such as auc/click",
        ),
        ("acu/buy", CLICK_AND_BUY, "no metric is called acu: use one of evaluation.metrics"),
        ("auc/click", None, "the dataset has one label, without a name such as click: write auc"),
    ],
)
def test_what_early_stopping_watches_is_known_before_an_epoch_ends(metric, labels, message):
    one = {} if labels else {"label": {"column": "click"}, "labels": None}
    changes = {} if labels else {"model": {"kind": "dnn"}}
    job = job_of(regularizers={"early_stopping": {"metric": metric}}, **changes)
    if message is None:
        job.against(dataset_of(**one))
        return
    with pytest.raises(ValueError, match=re.escape(f"regularizers.early_stopping.metric: {message}")):
        job.against(dataset_of(**one))


def test_early_stopping_that_names_nothing_has_something_to_watch():
    changes = {"regularizers": {"early_stopping": {}}}
    said = "early_stopping.metric: it is left out, and none of auc/click, rmse/click, logloss/click is measured: use"
    job_of(**changes).against(dataset_of())
    with pytest.raises(ValueError, match=re.escape(f"{said} one of gauc/click, ece/click, gauc/buy, ece/buy")):
        job_of(evaluation={"metrics": ["gauc", "ece"]}, **changes).against(dataset_of())


@pytest.mark.parametrize(
    ("metric", "metrics", "message"),
    [
        (None, None, "it is left out, and none of auc, rmse, logloss has a meaning if every row is a positive: name "
         "one of rankings, such as recall_20_full, in evaluation.metrics"),
        (None, ["auc", "recall_20_full"], None),
        ("logloss", ["logloss", "recall_20_full"], "logloss has no meaning if every row is a positive: use one of"),
        ("recall_20_full", ["auc", "recall_20_full"], None),
    ],
)  # fmt: skip
def test_where_every_row_is_a_positive_rankings_are_watched(metric, metrics, message):
    dataset = dataset_of(labels=None, label={"positive": "every_row"}, order="time")
    evaluation = {} if metrics is None else {"metrics": metrics}
    job = job_of(
        model={"kind": "bpr", "loss": "bpr"}, evaluation=evaluation, regularizers={"early_stopping": {"metric": metric}}
    )
    if message is not None:
        with pytest.raises(ValueError, match=re.escape(message)):
            job.against(dataset)
        return
    assert watched_metric(job.against(dataset), dataset) == "recall_20_full"


@pytest.mark.parametrize(
    "model", [{"kind": "dnn"}, {"kind": "mf"}, *({"kind": "two_tower", "loss": loss} for loss in ("bce", "mse"))]
)
def test_a_loss_of_labels_needs_both_classes(model):
    dataset = dataset_of(labels=None, label={"positive": "every_row"}, order="time")
    for finds_negatives in (
        {"kind": "two_tower", "loss": "sampled_softmax"},
        {"kind": "bpr", "loss": "bpr"},
        {"kind": "item2vec"},
    ):
        job_of(model=finds_negatives).against(dataset)
    with pytest.raises(ValueError, match=r"^label.positive: .* learns from labels of both classes, .*sampled_softmax$"):
        job_of(model=model).against(dataset)


def test_a_label_has_no_frequency_buckets_where_tables_are_dynamic():
    """Rows of a dynamic table are no items of their own."""
    dataset = dataset_of(labels={"click": {"column": "click", "metrics": ["auc", "frequency_buckets"]}})
    job_of().against(dataset)
    with pytest.raises(ValueError, match=r"labels.click.metrics: frequency_buckets needs a row for each item"):
        job_of(tables={"item": {"capacity": 10}}).against(dataset)


def test_early_stopping_watches_calibrated_probabilities_of_a_job_that_has_them():
    stopping = {"early_stopping": {"metric": "logloss_calibrated/click"}}
    job_of(regularizers=stopping, output_calibration="platt").against(dataset_of())


@pytest.mark.parametrize(
    ("evaluation", "model", "label", "watched"),
    [
        ({}, {"kind": "dnn"}, {"column": "click"}, "auc"),
        ({}, {"kind": "mf", "loss": "mse"}, {"value": "rating"}, "rmse"),
        ({}, {"kind": "dnn", "loss": "poisson"}, {"value": "visits"}, "rmse"),
        ({"metrics": ["mae", "rmse"]}, {"kind": "mf", "loss": "mse"}, {"value": "rating"}, "mae"),
        ({"metrics": ["calibration", "ece", "auc"]}, {"kind": "dnn"}, {"column": "click"}, "ece"),
        ({"metrics": ["calibration"]}, {"kind": "dnn"}, {"column": "click"}, None),
        ({"metrics": ["logloss", "auc"]}, {"kind": "sasrec", "loss": "bce"}, {"column": "click"}, "auc"),
        ({}, {"kind": "sasrec"}, {"column": "click"}, "ndcg_10_full"),
    ],
)
def test_the_best_epoch_is_that_of_a_ranking_of_all_items_or_of_the_first_number(evaluation, model, label, watched):
    job, dataset = job_of(evaluation=evaluation, model=model), dataset_of(labels=None, label=label, order="time")
    assert watched_metric(job.against(dataset), dataset) == watched
