"""Losses by name: what a score that one trained means. Without torch; trainer.models.losses computes them."""

from __future__ import annotations

from typing import NamedTuple

from trainer.spec.evaluation import DEFAULT_METRICS, ORDER_METRICS, POINTWISE_METRICS, VALUE_METRICS


class Loss(NamedTuple):
    """A loss as jobs name it."""

    metrics: tuple[str, ...]
    """Metrics without a ranking that its scores have: only bce makes of a score the log odds of a class."""
    default_metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    """Columns that ``evenkeel predict`` writes."""
    is_logit: bool = False
    """Whether a score is the log odds of the label."""
    has_output_hessian: bool = False
    """Whether its second derivative by the score is the same for every label (regularizers.outputs of training)."""
    of_classes: bool = False
    """Whether its labels are classes, which can be smoothed."""
    of_labels: bool = False
    """Whether each row has a label of its own, and so a loss of its own outside of training too."""


LOSSES: dict[str, Loss] = {
    "bce": Loss(
        POINTWISE_METRICS,
        DEFAULT_METRICS,
        ("logit", "probability"),
        is_logit=True,
        has_output_hessian=True,
        of_classes=True,
        of_labels=True,
    ),
    "mse": Loss(
        (*ORDER_METRICS, *VALUE_METRICS), ("auc", "rmse"), ("prediction",), has_output_hessian=True, of_labels=True
    ),
    "focal": Loss(ORDER_METRICS, ("auc",), ("score",), of_classes=True, of_labels=True),
    "sampled_softmax": Loss(ORDER_METRICS, ("auc",), ("score",)),
    "bpr": Loss(("auc", "logloss", "gauc", "frequency_buckets"), DEFAULT_METRICS, ("score",)),
    "top1": Loss(("auc",), ("auc",), ("score",)),
}
