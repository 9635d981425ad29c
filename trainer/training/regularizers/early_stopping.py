"""Early stopping: a decision that depends only on the metrics so far, so that a resumed run decides the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.spec.evaluation import is_lower_better
from trainer.spec.label_tasks import best_by
from trainer.spec.regularizers import EarlyStopping


class Decision(NamedTuple):
    """Decision of early stopping after an epoch.

    ``best_epoch``: the best epoch so far, counted from 1; 0 if no epoch has a value. ``best``: its value of ``metric``,
    NaN if there is none. ``stop``: True if ``patience`` epochs have passed since the best, so training is to stop.
    """

    best_epoch: int
    best: float
    stop: bool
    metric: str


def decide(stopping: EarlyStopping, history: Sequence[Mapping[str, Any]], label: str = "") -> Decision:
    """Return the decision for the metrics of the epochs so far.

    Each entry of ``history`` has ``epoch``, ``split`` and metrics (name -> value), as trainer.training.loop writes it.
    An epoch is a new best if its metric is better than the best by more than ``min_delta``. If ``stopping`` names no
    metric, it is the one of ``best_by`` (trainer.spec.label_tasks) that the validation split has.
    ``label``: name of the first of several labels, whose metric is watched then; "" if there is one label.

    Raises:
        ValueError: the validation split has no such metric.
    """
    epochs = [metrics for metrics in history if metrics["split"] == "validation"]
    name = stopping.metric or best_by(epochs[0] if epochs else (), label)
    if name is None:
        return Decision(0, float("nan"), False, "")
    best_epoch, best, waited = 0, float("nan"), 0
    sign = -1.0 if is_lower_better(name) else 1.0
    for metrics in epochs:
        if name not in metrics:
            there = ", ".join(sorted(key for key in metrics if key not in ("epoch", "split", "examples")))
            raise ValueError(f"regularizers.early_stopping.metric: validation has no {name} (there are {there})")
        value = metrics[name]
        if value is not None and (not best_epoch or sign * (value - best) > stopping.min_delta):
            best_epoch, best, waited = metrics["epoch"], value, 0
        else:
            waited += 1
    return Decision(best_epoch, best, waited >= stopping.patience, name)
