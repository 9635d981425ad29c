"""What losses, labels and metrics do not go together is refused, naming the field and the remedy."""

from __future__ import annotations

import re

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.evaluation import (
    METRIC_PATTERN,
    POINTWISE_METRICS,
    RANKING,
    RANKING_METRICS,
    has_chart,
    ranking_parts,
    title_of,
)
from trainer.spec.losses import LOSSES
from trainer.spec.models.registry import MODELS


def job_of(**changes):
    return parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}} | changes)


def dataset_of(label=None, **features):
    own = {"user": {"type": "id"}, "item": {"type": "id"}} | features
    return parse_dataset(
        {
            "name": "rows", "uri": "rows.parquet", "label": label or {"column": "click"}, "order": "at",
            "features": {name: feature for name, feature in own.items() if feature is not None},
        }
    )  # fmt: skip


def test_every_metric_is_of_rows_or_a_ranking():
    assert RANKING_METRICS == ("hit_rate_K", "mrr", "ndcg_K", "precision_K", "recall_K")
    forms = [name.replace("K", str(k)) for name in RANKING_METRICS for k in (1, 7, 999)]
    for name in (*POINTWISE_METRICS, *forms, *(f"{name}_full" for name in forms)):
        assert re.match(METRIC_PATTERN, name)
        parts = ranking_parts(name)
        assert (parts is None) == (name in POINTWISE_METRICS)
        if parts is not None:
            metric, k, full = parts
            assert name == metric + ("" if k is None else f"_{k}") + ("_full" if full else "")
            assert metric in RANKING
    for name in ("ndcg", "mrr_10", "ndcg_0", "ndcg_1000", "auc_10", "auc_full"):
        assert not re.match(METRIC_PATTERN, name)


def test_figures_have_names_in_words_and_charts():
    titles = {
        "auc": "AUC", "logloss": "log loss", "gauc": "AUC within users", "mae/price": "mean absolute error of price",
        "ndcg_10": "NDCG@10", "recall_20_full": "recall@20 of all items", "mrr": "mean reciprocal rank",
        "ece_calibrated": "expected calibration error, after calibration", "auc_low/buy": "AUC of buy, lower bound",
        "hit_rate_5_high": "hit rate@5, upper bound", "min_count": "fewest rows", "of_rows": "of rows", "loss": "loss",
    }  # fmt: skip
    assert {name: title_of(name) for name in titles} == titles
    assert all("_" not in title_of(name) for name in POINTWISE_METRICS)
    charted = ["auc", "auc/click", "gauc", "rmse", "mrr", "ndcg_10_full", "precision_3/buy"]
    assert all(map(has_chart, charted))
    assert not any(map(has_chart, ["logloss", "loss", "auc_low", "epoch", "examples", "frequency_buckets"]))


def test_models_have_the_fields_of_the_losses_they_list():
    for kind, spec in MODELS.items():
        for loss in spec.losses:
            assert set(LOSSES[loss].settings.values()) <= set(spec.model_fields), kind


@pytest.mark.parametrize("kind", ["dnn", "two_tower", "bpr", "mf", "sasrec", "item2vec", "din", "wukong"])
def test_some_metrics_are_available_for_every_model(kind):
    allowed = {"sasrec": ["auc", "mrr", "recall_20_full"], "bpr": ["auc", "gauc", "precision_5_full"]}
    job_of(
        model={"kind": kind},
        evaluation={"metrics": allowed.get(kind, ["auc", "gauc" if kind != "item2vec" else "mrr"])},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"metrics": ["auc", "recall_20_full"]}}, "dnn has no recall_20_full, because it cannot rank"),
        ({"evaluation": {"metrics": ["accuracy"]}}, "evaluation.metrics.0: no such metric: use one of auc"),
        ({"evaluation": {"metrics": ["recall_3_full"]}}, "evaluation.metrics: dnn has no recall_3_full"),
        (
            {"model": {"kind": "bpr", "loss": "bpr"}, "evaluation": {"metrics": ["ece"]}},
            "bpr trained by bpr has no ece: use auc",
        ),
        (
            {"model": {"kind": "dnn", "loss": "mse"}, "evaluation": {"metrics": ["calibration"]}},
            "dnn trained by mse has no calibration: use auc, gauc, frequency_buckets, rmse, mae",
        ),
        (
            {"model": {"kind": "sasrec", "loss": "bce"}, "evaluation": {"metrics": ["gauc"]}},
            "sasrec ranks and has no gauc: use auc",
        ),
        (
            {"model": {"kind": "bpr", "loss": "bpr"}, "evaluation": {"training": True}},
            "evaluation.training: bpr trained by bpr has no label of its own for a training row",
        ),
        (
            {"evaluation": {"metrics": ["auc", "gauc"], "training": True}},
            "evaluation.training: metrics of users need held-out rows: gauc",
        ),
        ({"model": {"kind": "dnn", "loss": "sampled_softmax"}}, "dnn has no sampled_softmax: use bce or mse or focal"),
        ({"model": {"kind": "dnn", "loss": "bpr"}}, "dnn has no bpr: use bce or mse or focal"),
        ({"model": {"kind": "mf", "loss": "focal"}}, "mf has no focal: use bce or mse"),
        ({"model": {"kind": "dnn", "focal_gamma": 1.0}}, "model.focal_gamma: bce has none: use loss focal"),
        ({"model": {"kind": "dnn", "loss": "mse", "focal_alpha": None}}, "model.focal_alpha: mse has none"),
        ({"model": {"kind": "dnn", "loss": "focal", "focal_alpha": 1.0}}, "model.focal_alpha: Input should be less"),
        ({"model": {"kind": "dnn", "loss": "focal", "focal_gamma": -1}}, "model.focal_gamma: Input should be greater"),
        (
            {"model": {"kind": "dnn", "loss": "focal"}, "evaluation": {"metrics": ["logloss"]}},
            "dnn trained by focal has no logloss: use auc, gauc",
        ),
        ({"model": {"kind": "bpr", "loss": "mse"}}, "bpr has no mse: use bpr"),
        ({"model": {"kind": "sasrec", "loss": "top1"}}, "sasrec has no top1: use bce or sampled_softmax"),
        ({"model": {"kind": "gru4rec", "loss": "mse"}}, "has no mse: use bce or sampled_softmax or bpr or top1"),
        ({"model": {"kind": "sasrec", "loss": "mse"}}, "sasrec has no mse: use bce or sampled_softmax"),
        (
            {"model": {"kind": "two_tower", "loss": "sampled_softmax"}, "micro_batches": 2},
            "micro_batches: sampled_softmax takes its negatives from the whole batch",
        ),
        (
            {"model": {"kind": "two_tower", "loss": "sampled_softmax"}, "batch_size": 1},
            "batch_size: sampled_softmax takes its negatives from the batch, and a batch of one row has none",
        ),
        (
            {"model": {"kind": "two_tower", "loss": "sampled_softmax"}, "sse": {"label": {"probability": 0.1}}},
            "sse.label: sampled_softmax has no class labels to flip",
        ),
        (
            {"model": {"kind": "sasrec", "loss": "bce"}, "evaluation": {"intervals": {"by": "user"}}},
            "intervals.by: sasrec has one",
        ),
        ({"evaluation": {"split": {"kind": "column"}}}, "kind: column needs the name of a column"),
        ({"evaluation": {"split": {"column": "is_test"}}}, "kind: column needs the name of a column"),
        ({"evaluation": {"split": {"kind": "column", "column": "t", "test": 0.2}}}, "leave test out"),
        ({"evaluation": {"split": {"num_test": 2}}}, "num_test is read by kind: per_user_last"),
        (
            {"evaluation": {"split": {"kind": "per_user_last", "validation": 0, "num_validation": 2}}},
            "num_validation is read by kind: per_user_last, where the share is above 0",
        ),
    ],
)
def test_jobs_that_cannot_be(changes, message):
    with pytest.raises(SpecError) as caught:
        job_of(**changes)
    assert message in str(caught.value)


def test_classes_of_focal_loss_can_be_smoothed_and_its_training_rows_evaluated():
    job_of(model={"kind": "dnn", "loss": "focal"}, regularizers={"label_smoothing": 0.1}, evaluation={"training": True})


VALUE = {"value": "rating"}
MF = {"kind": "mf", "loss": "mse"}


@pytest.mark.parametrize(
    ("changes", "dataset", "message"),
    [
        (
            {},
            {"label": VALUE},
            "model.loss: a real-valued label needs mse or poisson or exponential: set model.loss: mse, or use label: "
            "{rule:",
        ),
        (
            {"model": {"kind": "dnn", "loss": "poisson"}},
            {},
            "model.loss: poisson needs counts or durations: use label: {value: COLUMN}, or loss bce",
        ),
        ({"model": {"kind": "dnn", "loss": "focal"}}, {"label": VALUE}, "model.loss: a real-valued label needs mse"),
        ({"model": {"kind": "bpr", "loss": "bpr"}}, {"label": VALUE}, "bpr cannot learn a real-valued label"),
        ({"model": {"kind": "sasrec", "loss": "bce"}}, {"label": VALUE}, "sasrec cannot learn a real-valued label"),
        ({"model": MF, "evaluation": {"metrics": ["auc"]}}, {"label": VALUE}, "label has no auc: use rmse and mae"),
        (
            {"model": MF, "evaluation": {"metrics": ["recall_20_full"]}}, {"label": VALUE},
            "a real-valued label has no recall_20_full",
        ),
        (
            {"model": {"kind": "dnn", "loss": "mse"}, "sse": {"label": {"probability": 0.1}}}, {"label": VALUE},
            "sse.label: a real-valued label has no classes to flip",
        ),
        ({"evaluation": {"metrics": ["gauc"]}}, {"user": None}, "evaluation: users need a feature named 'user'"),
        (
            {"evaluation": {"metrics": ["gauc"]}}, {"user": {"type": "id_list"}},
            "evaluation: users need a feature named 'user' of type id",
        ),
        ({"evaluation": {"intervals": {"by": "user"}}}, {"user": None}, "need a feature named 'user'"),
        (
            {"evaluation": {"metrics": ["frequency_buckets"]}}, {"item": None},
            "frequency_buckets need a feature named 'item'",
        ),
        (
            {"model": {"kind": "two_tower"}, "evaluation": {"metrics": ["recall_20_full"]}}, {"hour": {"type": "id"}},
            "two_tower ranks all items for a user only where its features are user, item, and joins on the user: "
            "leave hour out",
        ),
    ],
)  # fmt: skip
def test_jobs_that_do_not_fit_the_dataset(changes, dataset, message):
    with pytest.raises(ValueError) as caught:
        job_of(**changes).against(dataset_of(**dataset))
    assert message in str(caught.value)


def test_labels_have_one_source():
    with pytest.raises(SpecError, match="exactly one of column, rule, negatives, value and positive"):
        dataset_of(label={"value": "rating", "column": "click"})
    assert dataset_of(label=VALUE).label.value == "rating"
    job_of(model=MF).against(dataset_of(label=VALUE))


PUBLISH = {"collection": "items", "feature": "item"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slices": ["color"]}, "'color' is no feature of single ids or numbers that two_tower reads"),
        ({"slices": ["tags"]}, "name some of user, item, price"),
        ({"slices": ["user"], "publish": None}, "the job has no gate"),
        ({"slices": ["user"], "publish": PUBLISH | {"gate": {"mode": "off"}}}, "the job has no gate"),
        ({"slices": ["price"], "model": {"kind": "bpr", "loss": "bpr"}}, "name some of user, item"),
        ({"slices": ["user", "price"]}, None),
    ],
)
def test_slices_are_columns_that_the_model_reads(changes, says):
    dataset = dataset_of(price={"type": "dense"}, tags={"type": "id_list"})
    changes = {"publish": PUBLISH, "model": {"kind": "two_tower"}} | changes
    publish = {} if changes["publish"] is None else {"publish": changes["publish"]}
    job = job_of(model=changes["model"], evaluation={"slices": changes["slices"]}, **publish)
    if says is None:
        job.against(dataset)
        return
    with pytest.raises(ValueError, match="slices") as caught:
        job.against(dataset)
    assert says in str(caught.value)
