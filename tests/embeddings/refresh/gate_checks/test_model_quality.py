"""A model that got worse is held, whatever its vectors look like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.gate_checks.model_quality import MARGIN, ModelQuality
from embeddings.refresh.model_comparison import ModelComparison, ModelDifference
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.store import Store
from embeddings.vectors.item_vectors import ItemVectors
from tests.embeddings.refresh.gate_checks.test_registry import comparison

N, D = 400, 8
OF_ALL = ModelDifference("auc", "all", 1000, 0.70, 0.71, low=0.0, high=0.02, served_error=0.01, candidate_error=0.009)
OF_NEWEST = replace(OF_ALL, slice="newest", served=0.65, candidate=0.68)
OF_SLICE = ModelDifference("auc", "country=DE", 100, served=0.60, candidate=0.58, low=-0.04, high=-0.01)


def compared(*differences: ModelDifference, skipped: str = "") -> Comparison:
    return replace(comparison(), models=ModelComparison("v000001", differences, skipped))


def refresh(
    store: Store, seed: int, difference: ModelDifference | None = OF_ALL, *more: ModelDifference
) -> Publication:
    vectors = np.random.default_rng(0).standard_normal((N, D))
    vectors += 0.1 * np.random.default_rng(1 + seed).standard_normal((N, D))
    models = None if difference is None else ModelComparison("v000001", (difference, *more))
    parent = store.collection("items").current()
    return publish_candidate(
        store,
        "items",
        RefreshRequest(
            ItemVectors(np.arange(N), vectors.astype(np.float32)),
            Settings(),
            parent_version=parent,
            models=models,
        ),
    )


def failed(end: Publication) -> list[str]:
    return [check["metric"] for check in end.gate if check["verdict"] == "fail"]


def test_gains_are_the_upper_ends_and_metrics_have_their_errors() -> None:
    assert ModelQuality.measure(compared(OF_ALL, OF_NEWEST, OF_SLICE)) == {
        "model_gain[all]": 0.02, "model_gain[newest]": 0.02, "model_gain[country=DE]": -0.01,
        "model_metric": 0.71, "model_metric_se": 0.009, "model_metric_before": 0.70, "model_metric_before_se": 0.01,
        "model_metric[newest]": 0.68, "model_metric_se[newest]": 0.009,
        "model_metric_before[newest]": 0.65, "model_metric_before_se[newest]": 0.01,
        "model_metric_before[country=DE]": 0.60, "model_metric_before_se[country=DE]": 0.0,
    }  # fmt: skip
    ranked = replace(OF_ALL, metric="ndcg_20_full", candidate=0.1, low=-0.03, high=-0.02)
    measured = ModelQuality.measure(compared(OF_ALL, ranked))
    assert measured["model_gain[ndcg_20_full]"] == -0.02
    assert measured["model_gain[all]"] == 0.02
    assert measured["model_metric"] == 0.71
    assert decide(measured).failed == ["model_gain[ndcg_20_full]"]
    # An error is good where it is small: its negative is large.
    error = replace(OF_ALL, metric="logloss", served=0.5, candidate=0.4, lower_is_better=True)
    measured = ModelQuality.measure(compared(error))
    assert (measured["model_metric"], measured["model_metric_before"]) == (-0.4, -0.5)


def test_models_that_were_not_compared_are_not_judged() -> None:
    assert ModelQuality.measure(compared(skipped="no rows were left to compare on")) == {}
    assert ModelQuality.measure(replace(comparison(), models=None)) == {}


def test_a_slice_alone_holds_and_a_job_may_say_how_much_it_may_lose() -> None:
    measured = ModelQuality.measure(compared(OF_ALL, OF_SLICE))
    assert decide(measured).failed == ["model_gain[country=DE]"]
    assert decide(measured, Limits({"model_gain": -0.02})).passed
    assert decide(measured, Limits({"model_gain[all]": 0.03})).failed == ["model_gain[all]", "model_gain[country=DE]"]


@pytest.mark.parametrize(("high", "status"), [(-MARGIN + 1e-4, "published"), (-MARGIN - 1e-4, "held")])
def test_worse_is_what_the_whole_interval_lies_below(store: Store, high: float, status: str) -> None:
    refresh(store, 0)
    end = refresh(store, 1, replace(OF_ALL, low=high - 0.02, high=high))
    assert (end.status, failed(end)) == (status, ["model_gain[all]"] if status == "held" else [])
    if status == "held":
        assert end.diagnosis is not None
        assert end.diagnosis["summary"].startswith("The model is worse: model_gain[all] is ")


@pytest.mark.parametrize("field", ["candidate", "served"])
def test_rows_that_no_model_can_read_are_held_though_neither_model_is_worse(store: Store, field: str) -> None:
    """Shuffled items make both models equally bad: their difference says nothing."""
    refresh(store, 0, None)
    metric = {"candidate": "model_metric", "served": "model_metric_before"}[field]
    assert refresh(store, 1).status == "published"
    end = refresh(store, 2, replace(OF_ALL, **{field: 0.49}))
    assert (end.status, failed(end)) == ("held", [metric])
    # Better than ever is no fault.
    assert refresh(store, 3, replace(OF_ALL, candidate=0.95, served=0.9)).status == "published"


def test_labels_that_changed_in_one_slice_are_held_though_the_new_model_is_the_better_one_there(store: Store) -> None:
    """It was trained on them: the served model alone says that they are unlike those before."""
    refresh(store, 0, None)
    usual = replace(OF_SLICE, served=0.7, candidate=0.71, high=0.03)
    for seed in range(1, 3):
        assert refresh(store, seed, OF_ALL, usual).status == "published"
    flipped = replace(usual, served=0.3, candidate=0.71, low=0.35, high=0.45)
    end = refresh(store, 3, OF_ALL, flipped)
    assert (end.status, failed(end)) == ("held", ["model_metric_before[country=DE]"])
    # Of few rows, whose figure says little, it is within the error.
    assert refresh(store, 4, OF_ALL, replace(flipped, served_error=0.11)).status == "published"


@pytest.mark.parametrize("field", ["candidate", "served"])
def test_the_newest_rows_are_judged_by_both_models(store: Store, field: str) -> None:
    refresh(store, 0, None)
    assert refresh(store, 1, OF_ALL, OF_NEWEST).status == "published"
    metric = {"candidate": "model_metric[newest]", "served": "model_metric_before[newest]"}[field]
    end = refresh(store, 2, OF_ALL, replace(OF_NEWEST, **{field: 0.4}))
    assert (end.status, failed(end)) == ("held", [metric])
