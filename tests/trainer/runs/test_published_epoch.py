"""The held-out metric of the epoch that is published, beside the best epoch's and the version before."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.runs.published_epoch import beside, in_words, quality_of
from trainer.spec.regularizers import EarlyStopping


def history(*values: float | None, split: str = "validation", metric: str = "auc") -> list[dict[str, Any]]:
    return [{"epoch": epoch, "split": split, metric: value} for epoch, value in enumerate(values, 1)]


def test_the_best_epoch_is_published_and_the_last_ones_fell() -> None:
    found = quality_of(history(0.70, 0.72, 0.71) + history(0.69, 0.715, 0.7, split="test"), 2)
    assert found is not None
    assert found | {"overfits": None} == {
        "metric": "auc", "validation": 0.72, "test": 0.715, "epoch": 2, "epochs": 3, "best_epoch": 2, "overfits": None,
    }  # fmt: skip
    assert found["overfits"] == (
        "validation auc was best in epoch 2, with 0.7200, and fell behind to 0.7100 in epoch 3; epoch 2 is published"
    )


@pytest.mark.parametrize(
    ("rows", "epoch", "says"),
    [
        (history(0.70, 0.72, 0.719), 2, None),  # within the tolerance
        (history(0.70, 0.72), 2, None),
        (history(0.72, 0.70), 2, "leave regularizers.early_stopping out, and the best epoch is published"),
        (history(0.72, 0.70, split="test"), 2, "set evaluation.split.validation, and the best epoch is published"),
        (history(0.6, 0.7, metric="rmse"), 2, "validation rmse was best in epoch 1, with 0.6000"),
        (history(0.6, 0.5, metric="rmse"), 2, None),
    ],
)
def test_it_overfits_where_a_later_epoch_is_worse(rows: list[dict[str, Any]], epoch: int, says: str | None) -> None:
    found = quality_of(rows, epoch)
    assert found is not None
    assert (found["overfits"] is None) if says is None else (says in found["overfits"])


def test_the_metric_is_that_of_early_stopping() -> None:
    rows = [{"epoch": 1, "split": "validation", "auc": 0.7, "logloss": 0.5, "ndcg_10_full": 0.1}]
    stopping = EarlyStopping(metric="logloss")
    assert [quality_of(rows, 1, one)["metric"] for one in (None, stopping)] == ["ndcg_10_full", "logloss"]  # type: ignore[index]
    two = [{"epoch": 1, "split": "validation", "auc/buy": 0.7, "auc/click": 0.6}]
    assert quality_of(two, 1, label="click")["metric"] == "auc/click"  # type: ignore[index]


def test_epochs_are_compared_by_the_sample_and_shown_by_all_users() -> None:
    """The last row of the published epoch is of all users, after those of a sample in each epoch."""
    rows = [*history(0.3, 0.4, 0.38, metric="ndcg_10_full"), {"epoch": 2, "split": "validation", "ndcg_10_full": 0.35}]
    found = quality_of(rows, 2)
    assert found is not None
    assert (found["validation"], found["best_epoch"]) == (0.35, 2)
    assert "with 0.4000" in found["overfits"]


@pytest.mark.parametrize("rows", [[], history(None, None), [{"epoch": 1, "split": "train", "loss": 0.5}]])
def test_there_is_none_without_a_value(rows: list[dict[str, Any]]) -> None:
    assert quality_of(rows, 1) is None


def test_it_is_told_beside_the_version_before() -> None:
    found = quality_of(history(0.70, 0.72), 2)
    assert found is not None
    assert (in_words(found), beside(found)) == ("auc 0.7200 (validation) in epoch 2 of 2", "auc 0.7200")
    found["before"] = {"version": "v000004", "metric": "auc", "validation": 0.74, "test": 0.73}
    assert in_words(found).endswith("; v000004, on its own rows: 0.7400 (validation), 0.7300 (test)")
    assert beside(found) == "auc 0.7200 (0.7400)"
    found["before"]["metric"] = "ndcg_10_full"
    assert in_words(found).endswith("on its own rows: ndcg_10_full 0.7400 (validation), 0.7300 (test)")
    assert beside(found) == "auc 0.7200"
