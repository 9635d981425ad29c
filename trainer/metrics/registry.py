"""Pointwise metrics, keyed by the name that jobs use; trainer.spec.evaluation.POINTWISE has their properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.metrics.calibration import Curve, EqualMass, EqualWidth, ece_of
from trainer.metrics.classification import (
    NAN,
    AucSum,
    auc,
    auc_by_group,
    entropy,
    gauc,
    logloss,
    logloss_sum,
    mean,
    normalized_entropy,
    sigmoid,
)
from trainer.metrics.counts import Counts, Int64s
from trainer.metrics.frequency import NUM_BUCKETS
from trainer.metrics.pointwise import CountsMetric, Metric, Resampled, Rows, RowsMetric
from trainer.metrics.regression import mae, rmse

if TYPE_CHECKING:
    from trainer.metrics.streaming import RankGroup

# --- metrics of the order of scores ----------------------------------------------------------------------------------


class Auc(CountsMetric[AucSum]):
    def sums(self, num_rows: int) -> AucSum:
        return AucSum()

    def value(self, sums: AucSum) -> float:
        return sums.value()

    def resampled(self, rows: Rows) -> Resampled:
        return Resampled(lambda weights: self.value(AucSum().add(rows.blocks.counts(weights))))


class Gauc(RowsMetric):
    """:func:`gauc`. Bootstrap replicates resample only the users with both classes."""

    def of_rows(self, rows: Rows) -> float:
        return gauc(rows.scores, rows.labels, rows.known_users)

    def resampled(self, rows: Rows) -> Resampled:
        _, values, impressions = auc_by_group(rows.scores, rows.labels, rows.known_users)
        return Resampled(lambda times: mean(values, impressions * times), len(values))

    def streamed(self, rows: Rows, ranks: RankGroup) -> float:
        own = ranks.rows_by_user(rows)
        _, values, impressions = auc_by_group(own.scores, own.labels, own.known_users)
        weighted, weight = ranks.total([float((values * impressions).sum()), float(impressions.sum())])
        return weighted / weight if weight else NAN


class FrequencyBuckets(RowsMetric):
    """(Numbers of rows, AUCs) of the frequency buckets of items, each [NUM_BUCKETS + 1]."""

    nothing = ([0] * (NUM_BUCKETS + 1), [NAN] * (NUM_BUCKETS + 1))

    def of_rows(self, rows: Rows) -> tuple[Int64s, list[float]]:
        return self._by_bucket(rows, lambda own: auc(own.scores, own.labels))

    def streamed(self, rows: Rows, ranks: RankGroup) -> tuple[Int64s, list[float]]:
        def auc_over_ranks(own: Rows) -> float:
            area = AucSum()
            for counts in ranks.pieces(own):
                area.add(counts)
            return area.value()

        num_rows, aucs = self._by_bucket(rows, auc_over_ranks)
        return np.array(ranks.total(num_rows.tolist()), np.int64), aucs

    def _by_bucket(self, rows: Rows, auc_of: Callable[[Rows], float]) -> tuple[Int64s, list[float]]:
        buckets = rows.known_buckets
        num_rows = np.bincount(buckets, minlength=NUM_BUCKETS + 1).astype(np.int64)
        return num_rows, [auc_of(rows.where(buckets == bucket)) for bucket in range(NUM_BUCKETS + 1)]


# --- metrics of logits -----------------------------------------------------------------------------------------------


class LoglossSum:
    """Running sums over counted rows, for :func:`logloss` and :func:`normalized_entropy`."""

    def __init__(self) -> None:
        self.loss, self.num_rows, self.num_positives = 0.0, 0, 0

    def add(self, counts: Counts) -> None:
        self.loss += logloss_sum(counts)
        self.num_rows += counts.num_rows
        self.num_positives += counts.num_positives


class Logloss(CountsMetric[LoglossSum]):
    def of_rows(self, rows: Rows) -> float:
        return logloss(rows.scores, rows.labels)

    def resampled(self, rows: Rows) -> Resampled:
        return Resampled(lambda weights: logloss(rows.scores, rows.labels, weights))

    def sums(self, num_rows: int) -> LoglossSum:
        return LoglossSum()

    def value(self, sums: LoglossSum) -> float:
        return sums.loss / max(sums.num_rows, 1)


class NormalizedEntropy(Logloss):
    def of_rows(self, rows: Rows) -> float:
        return normalized_entropy(rows.scores, rows.labels)

    def resampled(self, rows: Rows) -> Resampled:
        return Resampled(lambda weights: normalized_entropy(rows.scores, rows.labels, weights))

    def value(self, sums: LoglossSum) -> float:
        return super().value(sums) / entropy(sums.num_positives / max(sums.num_rows, 1))


class ProbabilityBins:
    """Bins of predicted probabilities, to which rows are added with logits as scores."""

    def __init__(self, bins: EqualMass | EqualWidth):
        self._bins = bins

    def add(self, counts: Counts) -> None:
        self._bins.add(counts._replace(scores=sigmoid(counts.scores)))

    def curve(self) -> Curve:
        return self._bins.curve()


class Calibration(CountsMetric[ProbabilityBins]):
    """The calibration curve by bins of equal mass, as a table with a row for each bin."""

    nothing: Any = []

    def sums(self, num_rows: int) -> ProbabilityBins:
        return ProbabilityBins(EqualMass(num_rows))

    def value(self, sums: ProbabilityBins) -> list[dict[str, float]]:
        return [
            {"rows": float(rows), "prediction": float(prediction), "share": float(share)}
            for rows, prediction, share in zip(*sums.curve(), strict=True)
        ]


class Ece(CountsMetric[ProbabilityBins]):
    """:func:`ece` by bins of equal mass. This metric has no interval, because resampling adds to its bias."""

    def sums(self, num_rows: int) -> ProbabilityBins:
        return ProbabilityBins(EqualMass(num_rows))

    def value(self, sums: ProbabilityBins) -> float:
        return ece_of(sums.curve())


class EceEqualWidth(Ece):
    """:func:`ece` by bins of equal width."""

    def sums(self, num_rows: int) -> ProbabilityBins:
        return ProbabilityBins(EqualWidth())


# --- metrics of predictions ------------------------------------------------------------------------------------------


class ErrorMetric(RowsMetric):
    """:func:`rmse` (``power`` 2) or :func:`mae` (``power`` 1): (mean |error|^power)^(1 / power)."""

    def __init__(self, of_predictions: Callable[..., float], power: int):
        self._of_predictions, self._power = of_predictions, power

    def of_rows(self, rows: Rows) -> float:
        return self._of_predictions(rows.predictions, rows.labels)

    def resampled(self, rows: Rows) -> Resampled:
        return Resampled(lambda weights: self._of_predictions(rows.predictions, rows.labels, weights))

    def streamed(self, rows: Rows, ranks: RankGroup) -> float:
        powers = np.abs(rows.predictions - rows.labels) ** self._power
        total, num_rows = ranks.total([float(powers.sum()), len(rows)])
        return float((total / num_rows) ** (1 / self._power))


METRICS: dict[str, Metric] = {
    "auc": Auc(),
    "logloss": Logloss(),
    "gauc": Gauc(),
    "normalized_entropy": NormalizedEntropy(),
    "ece": Ece(),
    "ece_equal_width": EceEqualWidth(),
    "calibration": Calibration(),
    "rmse": ErrorMetric(rmse, power=2),
    "mae": ErrorMetric(mae, power=1),
    "frequency_buckets": FrequencyBuckets(),
}
