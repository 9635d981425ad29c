"""Figures of held-out rows that have one score each.

They come, on rank 0, from all ranks' rows gathered, or, where they are too many, from their counts in pieces
(:mod:`trainer.metrics.streaming`). Both give the same figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from embeddings.sharding.exchange.collectives import all_reduce
from trainer.metrics import auc, mae, rmse
from trainer.metrics.calibration import Curve, EqualMass, EqualWidth, ece_of
from trainer.metrics.classification import (
    AucSum,
    auc_by_group,
    entropy,
    gauc,
    logloss,
    logloss_sum,
    mean,
    normalized_entropy,
    sigmoid,
)
from trainer.metrics.counts import Blocks, Counts, Int64s, by_score
from trainer.metrics.frequency import NUM_BUCKETS
from trainer.metrics.intervals import bootstrap
from trainer.metrics.streaming import at_owners, packed_rows, pieces
from trainer.spec import Intervals
from trainer.spec.losses import LOSSES

GATHER_ROWS = 2_000_000
"""A split of at most so many rows is gathered (docs/adr/0032 has the measurement)."""
_WITH_INTERVALS = ("auc", "logloss", "normalized_entropy", "rmse", "mae")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Held-out rows with their scores.

    ``scores`` and ``labels`` float32 [n]; where they are asked for ``users`` int32 [n] (a number for each user, -1 for
    none) and ``buckets`` int8 [n], the frequency bucket of each row's item.
    """

    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    users: npt.NDArray[np.int32] | None = None
    buckets: npt.NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def where(self, mask: npt.NDArray[np.bool_]) -> Rows:
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[mask] for name, array in kept.items() if array is not None})


def predictions(scores: npt.NDArray[np.floating], loss: str) -> npt.NDArray[np.float64]:
    """Return what a score predicts of the label: the probability of 1 where it is a logit, else the label itself."""
    return sigmoid(scores) if LOSSES[loss].is_logit else np.asarray(scores, np.float64)


# --- gathered --------------------------------------------------------------------------------------------------------


def gathered(wanted: Iterable[str], rows: Rows, loss: str) -> Figures:
    """Return by name the wanted figures of all rows.

    ``calibration`` is a curve, ``frequency_buckets`` (rows, AUC) by bucket.
    """
    scores, labels = rows.scores, rows.labels
    made = {
        "auc": lambda: auc(scores, labels),
        "logloss": lambda: logloss(scores, labels),
        "normalized_entropy": lambda: normalized_entropy(scores, labels),
        "gauc": lambda: gauc(scores, labels, _given(rows.users)),
        "rmse": lambda: rmse(predictions(scores, loss), labels),
        "mae": lambda: mae(predictions(scores, loss), labels),
        "frequency_buckets": lambda: _by_bucket(rows, lambda own: auc(own.scores, own.labels)),
    }
    found: Figures = {name: make() for name, make in made.items() if name in wanted}
    if not _CALIBRATION.isdisjoint(wanted):
        found |= _calibrated(wanted, [] if np.isnan(scores).any() else [by_score(scores, labels)], len(rows))
    return found


_CALIBRATION = frozenset(("ece", "ece_equal_width", "calibration"))


def _calibrated(wanted: Iterable[str], parts: Iterable[Counts], num_rows: int) -> Figures:
    mass, width = EqualMass(num_rows), EqualWidth()
    for counts in parts:
        predicted = counts._replace(scores=sigmoid(counts.scores))
        mass.add(predicted)
        width.add(predicted)
    curve = mass.curve()
    found: Figures = {"ece": ece_of(curve), "ece_equal_width": ece_of(width.curve()), "calibration": curve}
    return {name: value for name, value in found.items() if name in wanted}


def _by_bucket(rows: Rows, area: Any) -> tuple[Int64s, list[float]]:
    buckets = _given(rows.buckets)
    return (
        np.bincount(buckets, minlength=NUM_BUCKETS + 1).astype(np.int64),
        [area(rows.where(buckets == bucket)) for bucket in range(NUM_BUCKETS + 1)],
    )


def intervals(wanted: Iterable[str], rows: Rows, loss: str, asked: Intervals, seed: int) -> dict[str, Any]:
    """Return (low, high) of the gathered rows' figures that have intervals; GAUC always resamples users."""
    names = [name for name in _WITH_INTERVALS if name in wanted]
    settings: dict[str, Any] = {"replicates": asked.replicates, "seed": seed, "level": asked.level}
    found: dict[str, Any] = {}
    scores, labels = rows.scores, rows.labels
    missing = np.isnan(scores).any()
    if names and not missing:
        blocks = Blocks(scores, labels) if "auc" in names else None
        predicted = predictions(scores, loss) if {"rmse", "mae"} & set(names) else scores

        def statistic(weights: Int64s) -> dict[str, float]:
            made = {
                "auc": lambda: AucSum().add(_given(blocks).counts(weights)).value(),
                "logloss": lambda: logloss(scores, labels, weights),
                "normalized_entropy": lambda: normalized_entropy(scores, labels, weights),
                "rmse": lambda: rmse(predicted, labels, weights),
                "mae": lambda: mae(predicted, labels, weights),
            }
            return {name: made[name]() for name in names}

        if asked.by == "row":
            found = bootstrap(statistic, len(rows), **settings)
        else:
            unit = _units(_given(rows.users))
            found = bootstrap(lambda times: statistic(times[unit]), int(unit.max(initial=-1)) + 1, **settings)
    if "gauc" in wanted and not missing:
        _, values, impressions = auc_by_group(scores, labels, _given(rows.users))
        found |= bootstrap(lambda times: {"gauc": mean(values, impressions * times)}, len(values), **settings)
    return found


def _units(users: npt.NDArray[np.int32]) -> Int64s:
    """Return a number from 0 for each user; a row without one is a user of its own."""
    known = users >= 0
    units = np.empty(len(users), np.int64)
    _, units[known] = np.unique(users[known], return_inverse=True)
    units[~known] = int(units[known].max(initial=-1)) + 1 + np.arange(int((~known).sum()))
    return units


# --- in pieces -------------------------------------------------------------------------------------------------------


def streamed(wanted: Sequence[str], rows: Rows, loss: str, group: dist.ProcessGroup | None) -> Figures:
    """Return :func:`gathered` of all ranks' rows, of which ``rows`` are this rank's; right on rank 0. Collective.

    ``group``: None for one rank alone.
    """
    num_rows, num_nan = _total([len(rows), int(np.isnan(rows.scores).sum())], group)
    found: Figures = {}
    if "rmse" in wanted or "mae" in wanted:
        errors = predictions(rows.scores, loss) - rows.labels
        squares, distances = _total([float((errors**2).sum()), float(np.abs(errors).sum())], group)
        found |= {"rmse": (squares / num_rows) ** 0.5, "mae": distances / num_rows}
    if num_nan:
        nothing = Curve(*(np.empty(0) for _ in Curve._fields))
        empty = ([0] * (NUM_BUCKETS + 1), [float("nan")] * (NUM_BUCKETS + 1))
        nan = dict.fromkeys(wanted, float("nan"))
        return {**nan, "calibration": nothing, "frequency_buckets": empty, **found}
    area, mass, width, losses = AucSum(), EqualMass(int(num_rows)), EqualWidth(), 0.0
    if {"auc", "logloss", "normalized_entropy", *_CALIBRATION} & set(wanted):
        for counts in pieces(packed_rows(rows.scores, rows.labels), group):
            area.add(counts)
            losses += logloss_sum(counts)
            predicted = counts._replace(scores=sigmoid(counts.scores))
            mass.add(predicted)
            width.add(predicted)
        loss_mean = losses / max(area.num_rows, 1)
        found |= {
            "auc": area.value(),
            "logloss": loss_mean,
            "normalized_entropy": loss_mean / entropy(area.num_positives / max(area.num_rows, 1)),
            "ece": ece_of(mass.curve()),
            "ece_equal_width": ece_of(width.curve()),
            "calibration": mass.curve(),
        }
    if "gauc" in wanted:
        found["gauc"] = _gauc_over_ranks(rows, group)
    if "frequency_buckets" in wanted:
        examples, aucs = _by_bucket(rows, lambda own: _auc_over_ranks(own, group))
        found["frequency_buckets"] = np.array(_total(examples.tolist(), group), np.int64), aucs
    return found


def _auc_over_ranks(rows: Rows, group: dist.ProcessGroup | None) -> float:
    area = AucSum()
    for counts in pieces(packed_rows(rows.scores, rows.labels), group):
        area.add(counts)
    return area.value()


def _gauc_over_ranks(rows: Rows, group: dist.ProcessGroup | None) -> float:
    users = _given(rows.users)
    scores, labels = rows.scores, rows.labels
    if group is not None:
        known = users >= 0
        users = users[known].astype(np.int64)
        columns = [scores[known].view(np.int32), labels[known].view(np.int32), users]
        found = at_owners("rows of users", np.stack(columns).astype(np.int64), users, group)
        scores, labels = (found[row].astype(np.int32).view(np.float32) for row in (0, 1))
        users = found[2]
    _, values, impressions = auc_by_group(scores, labels, users)
    weighted, weight = _total([float((values * impressions).sum()), float(impressions.sum())], group)
    return weighted / weight if weight else float("nan")


def _total(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    if group is None:
        return list(numbers)
    return all_reduce("sums over a split", torch.tensor(numbers, dtype=torch.float64), group).tolist()


def _given(column: Any) -> Any:
    assert column is not None, "a column that the metrics need was not collected"
    return column
