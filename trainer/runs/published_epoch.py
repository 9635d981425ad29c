"""Held-out metric of the epoch that a job publishes, of its best epoch and of the previous version. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.spec.evaluation import is_lower_better
from trainer.spec.label_tasks import best_by
from trainer.spec.regularizers import EarlyStopping

OVERFIT = 0.002
"""Loss of a metric after its best epoch, in units of the metric, from which on a job counts as overfitting."""


def quality_of(
    history: Sequence[Mapping[str, Any]], epoch: int, stopping: EarlyStopping | None = None, label: str = ""
) -> dict[str, Any] | None:
    """Return the held-out metric of a published epoch; None if it was not evaluated.

    The metric is that which early stopping watches. ``history``: metrics of the epochs, as trainer.training.loop writes
    them. ``epoch`` counts from 1. ``label``: name of the first label if there are several; "" for a single label.

    Returns:
        ``metric``, its values ``validation`` and ``test`` in the published ``epoch`` (None if not measured),
        ``epochs`` (number of evaluated epochs), ``best_epoch`` by validation rows, or by test rows if there are no
        validation rows, and ``overfits``: a sentence, or None.
    """
    rows = {split: [row for row in history if row["split"] == split] for split in ("validation", "test")}
    split = "validation" if rows["validation"] else "test"
    names = list(dict.fromkeys(name for row in rows[split] for name in row))
    metric = (None if stopping is None else stopping.metric) or best_by(names, label)
    if metric is None:
        return None
    # The last row of an epoch is the one of all users, where epochs are compared by a sample of them.
    values = {name: {row["epoch"]: row.get(metric) for row in rows[name]} for name in rows}
    compared: dict[int, float] = {}
    for row in rows[split]:
        if row.get(metric) is not None:
            compared.setdefault(row["epoch"], row[metric])
    if epoch not in compared:
        return None
    sign = -1.0 if is_lower_better(metric) else 1.0
    best = max(compared, key=lambda one: (sign * compared[one], -one))
    return {
        "metric": metric,
        "validation": values["validation"].get(epoch),
        "test": values["test"].get(epoch),
        "epoch": epoch,
        "epochs": max(compared),
        "best_epoch": best,
        "overfits": _overfits(metric, split, compared, epoch, best, sign),
    }


def _overfits(metric: str, split: str, values: Mapping[int, float], epoch: int, best: int, sign: float) -> str | None:
    last = max(values)
    was_best = f"{split} {metric} was best in epoch {best}, with {values[best]:.4f}"
    if sign * (values[best] - values[epoch]) > OVERFIT:
        remedy = "leave regularizers.early_stopping out, and the best epoch is published"
        if split == "test":
            remedy = "set evaluation.split.validation, and the best epoch is published"
        return f"{was_best}, and is {values[epoch]:.4f} in epoch {epoch}, which is published: {remedy}"
    if sign * (values[best] - values[last]) > OVERFIT:
        return f"{was_best}, and fell behind to {values[last]:.4f} in epoch {last}; epoch {epoch} is published"
    return None


def in_words(quality: Mapping[str, Any]) -> str:
    """Return the metric in words, with that of the previous version.

    Example: ``auc 0.7312 (validation), 0.7298 (test) in epoch 3 of 10; v000004, on its own rows: 0.7401 (validation)``.
    """
    before = quality.get("before")
    text = f"{quality['metric']} {_values(quality)} in epoch {quality['epoch']} of {quality['epochs']}"
    if not before:
        return text
    other = "" if before["metric"] == quality["metric"] else f"{before['metric']} "
    return f"{text}; {before['version']}, on its own rows: {other}{_values(before)}"


def beside(quality: Mapping[str, Any]) -> str:
    """Return text such as ``auc 0.7312 (0.7401)``; in brackets is the value of the version before, if any."""
    before = quality.get("before")
    split = "validation" if quality["validation"] is not None else "test"
    same = before is not None and before["metric"] == quality["metric"] and before.get(split) is not None
    return f"{quality['metric']} {quality[split]:.4f}" + (f" ({before[split]:.4f})" if before and same else "")


def _values(quality: Mapping[str, Any]) -> str:
    measured = [(name, quality.get(name)) for name in ("validation", "test")]
    return ", ".join(f"{value:.4f} ({name})" for name, value in measured if value is not None)
