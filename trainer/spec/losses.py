"""Losses by name: what a score that one trained means. Without torch; trainer.models.losses computes them."""

from __future__ import annotations

from typing import NamedTuple

from trainer.spec.evaluation import DEFAULT_METRICS, POINTWISE_METRICS


class Loss(NamedTuple):
    """A loss as jobs name it."""

    metrics: tuple[str, ...]
    """Metrics without a ranking that its scores have: only bce makes of a score the log odds of a class."""
    default_metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    """Columns that ``evenkeel predict`` writes."""
    of_classes: bool = False
    """Whether its labels are classes, which can be smoothed."""
    of_labels: bool = False
    """Whether each row has a label of its own, and so a loss of its own outside of training too."""


LOSSES: dict[str, Loss] = {
    "bce": Loss(POINTWISE_METRICS, DEFAULT_METRICS, ("logit", "probability"), of_classes=True, of_labels=True),
    "mse": Loss(("auc", "gauc", "rmse", "mae", "frequency_buckets"), ("auc", "rmse"), ("prediction",), of_labels=True),
    "focal": Loss(("auc", "gauc", "frequency_buckets"), ("auc",), ("score",), of_classes=True, of_labels=True),
    "sampled_softmax": Loss(("auc", "gauc", "frequency_buckets"), ("auc",), ("score",)),
    "bpr": Loss(("auc", "logloss", "gauc", "frequency_buckets"), DEFAULT_METRICS, ("score",)),
    "top1": Loss(("auc",), ("auc",), ("score",)),
}
