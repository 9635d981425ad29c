"""The best epoch that the command line shows, and the AUC of that epoch."""

from __future__ import annotations

from typing import Any

import pytest

from service.cli.job_status import auc, best_epoch
from trainer.spec.regularizers import EarlyStopping


def job(*epochs: dict[str, float], split: str = "validation", **fields: Any) -> dict[str, Any]:
    return {"metrics": [{"epoch": number, "split": split, **one} for number, one in enumerate(epochs, 1)], **fields}


@pytest.mark.parametrize(
    ("shown", "best"),
    [
        (job({"auc": 0.9, "ndcg_10_full": 0.1}, {"auc": 0.8, "ndcg_10_full": 0.2}), 2),
        (job({"auc": 0.7}, {"auc": 0.9}, {"auc": 0.8}), 2),
        (job({"auc": 0.7}, {"auc": 0.7}), 1),
        (job({"rmse": 0.7}, {"rmse": 0.6}), 2),
        (job({"logloss/buy": 0.5, "auc/buy": 0.6}, {"logloss/buy": 0.4, "auc/buy": 0.5}), 1),
        (job({"auc": 0.9}, split="test"), None),
        ({}, None),
        (
            job(
                {"auc": 0.9, "logloss": 0.5}, {"auc": 0.8, "logloss": 0.4},
                spec={"regularizers": {"early_stopping": {"metric": "logloss"}}},
            ),
            2,
        ),
    ],
)  # fmt: skip
def test_it_is_that_of_early_stopping(shown: dict[str, Any], best: int | None) -> None:
    assert best_epoch(shown) == best


def test_the_metric_of_early_stopping_is_read_under_its_old_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyStopping, "old_names", {"watch": "metric"})
    spec = {"regularizers": {"early_stopping": {"watch": "logloss"}}}
    assert best_epoch(job({"auc": 0.9, "logloss": 0.5}, {"auc": 0.8, "logloss": 0.4}, spec=spec)) == 2


def test_the_auc_is_that_of_the_best_epoch_with_its_split() -> None:
    watched, tested = job({"auc": 0.7}, {"auc": 0.9}, {"auc": 0.8}), job({"auc": 0.6}, {"auc": 0.5}, split="test")
    assert auc(watched) == "0.9000 validation 2"
    assert auc({"metrics": watched["metrics"] + tested["metrics"]}) == "0.5000 test 2"
    assert auc({}) == ""
