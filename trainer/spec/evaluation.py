"""Evaluation: the split of the rows, and the metrics of held-out rows. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, StringConstraints, model_validator

from trainer.spec.base import Column, Spec, later


class PointwiseMetric(NamedTuple):
    """Properties of a metric that is computed from scores and labels of rows, without ranking items."""

    of_any_score: bool = False
    """True if it depends only on the order of scores."""
    of_values: bool = False
    """True if it compares predictions with real-valued labels."""
    lower_is_better: bool = False
    of_users: bool = False
    """True if it needs the user of each row."""
    of_items: bool = False
    """True if it needs the item of each row, and its number of training rows."""
    is_table: bool = False
    """True if its value is rows of a table, not a number."""
    title: str = ""
    """Its name in words; "": the name itself."""
    has_chart: bool = False
    """True if a job's report has a chart of it, as of every ranking metric."""


class RankingMetric(NamedTuple):
    """Properties of a metric of ranks, such as ``ndcg``."""

    title: str
    """Its name in words."""
    has_cutoff: bool = True
    """True if jobs name it with a cutoff k, such as ``ndcg_10``."""


POINTWISE: dict[str, PointwiseMetric] = {
    "auc": PointwiseMetric(of_any_score=True, title="AUC", has_chart=True),
    "logloss": PointwiseMetric(lower_is_better=True, title="log loss"),
    "gauc": PointwiseMetric(of_any_score=True, of_users=True, title="AUC within users", has_chart=True),
    "normalized_entropy": PointwiseMetric(lower_is_better=True),
    "ece": PointwiseMetric(lower_is_better=True, title="expected calibration error"),
    "ece_equal_width": PointwiseMetric(lower_is_better=True, title="expected calibration error, bins of equal width"),
    "calibration": PointwiseMetric(is_table=True),
    "rmse": PointwiseMetric(of_values=True, lower_is_better=True, title="RMSE", has_chart=True),
    "mae": PointwiseMetric(of_values=True, lower_is_better=True, title="mean absolute error"),
    "frequency_buckets": PointwiseMetric(of_any_score=True, of_items=True, is_table=True),
}
"""Pointwise metrics, keyed by name; the entry of the same name in trainer.metrics.registry computes each."""
RANKING: dict[str, RankingMetric] = {
    "ndcg": RankingMetric("NDCG"),
    "hit_rate": RankingMetric("hit rate"),
    "recall": RankingMetric("recall"),
    "precision": RankingMetric("precision"),
    "mrr": RankingMetric("mean reciprocal rank", has_cutoff=False),
}
"""Ranking metrics, keyed by name without cutoff. The method of trainer.metrics.ranking.Ranking of that name computes
each."""
POINTWISE_METRICS = tuple(POINTWISE)
ORDER_METRICS = tuple(name for name, metric in POINTWISE.items() if metric.of_any_score)
TABLES = tuple(name for name, metric in POINTWISE.items() if metric.is_table)
VALUE_METRICS = tuple(name for name, metric in POINTWISE.items() if metric.of_values)
LOWER_IS_BETTER = frozenset(name for name, metric in POINTWISE.items() if metric.lower_is_better) | {"loss", "mse"}
CALIBRATED = "_calibrated"
"""Suffix of metrics of calibrated probabilities (``output_calibration`` of a job)."""
RANKING_METRICS = tuple(sorted(name + "_K" * metric.has_cutoff for name, metric in RANKING.items()))
"""Forms of the names of ranking metrics, such as ``ndcg_K``."""
_TITLES = {name: metric.title for name, metric in POINTWISE.items() if metric.title}
_TITLES |= {name: metric.title for name, metric in RANKING.items()}
_TITLES |= {"min_count": "fewest rows", "max_count": "most rows"}
_ENDINGS = {CALIBRATED: ", after calibration", "_low": ", lower bound", "_high": ", upper bound"}
DEFAULT_METRICS: tuple[str, ...] = ("auc", "logloss")
SEQUENCE_METRICS = ("auc", "hit_rate_10", "ndcg_10", "hit_rate_10_full", "ndcg_10_full")
WATCHED_METRICS = ("auc", "rmse", "logloss")
"""Pointwise metrics for early stopping without ``metric``, the preferred one first."""
CALIBRATED_METRICS = ("logloss", "ece")
"""Metrics that a job with ``output_calibration`` measures before and after calibration (CALIBRATED)."""
_RANKED = "|".join(RANKING_METRICS).replace("_K", "_[1-9][0-9]{0,2}")
METRIC_PATTERN = rf"^({'|'.join(POINTWISE_METRICS)}|({_RANKED})(_full)?)$"
Metric = Annotated[str, StringConstraints(pattern=METRIC_PATTERN)]
"""Name of a metric (docs/reference/losses_and_metrics.md).

A ranking metric NAME_k, with k up to 999, ranks against 100 negatives; NAME_k_full ranks among all items but those
that the user had before.
"""


def is_table(figure: str) -> bool:
    """Return True if the value of ``figure`` is rows of a table, not a number.

    ``figure`` is a metric's name, followed by the label's if there are several labels (``calibration/click``).
    """
    return figure.partition("/")[0] in TABLES


def title_of(figure: str) -> str:
    """Return a figure's name in words: "recall@20 of all items" for ``recall_20_full``."""
    name, _, label = figure.partition("/")
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    name = name.removesuffix(ending)
    head, k, is_full = ranking_parts(name) or (name, None, False)
    title = name.replace("_", " ")
    if head in _TITLES:
        title = _TITLES[head] + ("" if k is None else f"@{k}") + (" of all items" if is_full else "")
    return title + (f" of {label}" if label else "") + _ENDINGS.get(ending, "")


def has_chart(figure: str) -> bool:
    """Return True if a job's report has a chart of ``figure``."""
    name = figure.partition("/")[0]
    metric = POINTWISE.get(name)
    return metric.has_chart if metric else re.match(METRIC_PATTERN, name) is not None


def figures_named(metric: str, figures: Iterable[str]) -> list[str]:
    """Return those names in ``figures`` that are ``metric`` or ``metric/LABEL``, each once, in the given order."""
    return [name for name in dict.fromkeys(figures) if name.partition("/")[0] == metric]


def is_lower_better(figure: str) -> bool:
    """Return True if a smaller value of ``figure`` is better; its name may end with a label's (``rmse/price``)."""
    return figure.partition("/")[0].removesuffix(CALIBRATED) in LOWER_IS_BETTER


def ranking_parts(metric: str) -> tuple[str, int | None, bool] | None:
    """Return (name, cutoff k, True if it ranks among all items) of a ranking metric; None for other metrics.

    ``recall_20_full`` -> ("recall", 20, True), ``mrr`` -> ("mrr", None, False).
    """
    if metric in POINTWISE_METRICS:
        return None
    name = metric.removesuffix("_full")
    head, _, k = name.rpartition("_")
    return (head, int(k), name != metric) if k.isdigit() else (name, None, name != metric)


def metrics_of_users(metrics: Iterable[str]) -> list[str]:
    """Return the names in ``metrics`` of pointwise metrics that need the user of each row."""
    return [name for name in metrics if name in POINTWISE and POINTWISE[name].of_users]


def metrics_of_items(metrics: Iterable[str]) -> list[str]:
    """Return the names in ``metrics`` of pointwise metrics that need the item of each row."""
    return [name for name in metrics if name in POINTWISE and POINTWISE[name].of_items]


class Split(Spec):
    """Split of the rows into training, validation and test.

    ``validation`` and ``test`` are shares of the rows. ``random``: a hash of (user, item) chooses them. ``time``: they
    are the latest rows, with test last. ``per_user_last``: each user's last ``num_test`` rows are for test, and the
    ``num_validation`` rows before them for validation; a share of 0 means none.

    ``column``: rows whose ``column`` is 1, true or ``test`` are for test, and rows with ``validation`` for validation.
    If the column says ``validation`` for no row, a hash chooses validation rows among those that are not for test, with
    the share ``validation``. The share ``test`` is not read.
    """

    kind: Literal["random", "per_user_last", "time", "column"] = "random"
    validation: float = Field(default=0.1, ge=0.0, lt=1.0)
    test: float = Field(default=0.1, ge=0.0, lt=1.0)
    column: Column | None = later(None)
    num_validation: int = later(1, ge=1, le=1000)
    num_test: int = later(1, ge=1, le=1000)

    @model_validator(mode="after")
    def _leaves_rows(self) -> Split:
        if self.validation + self.test >= 1.0:
            raise ValueError("validation + test must stay below 1, or no row is left to train on")
        if (self.column is None) == (self.kind == "column"):
            raise ValueError("kind: column needs the name of a column, such as column: is_test")
        if self.kind == "column" and self.test != type(self).model_fields["test"].default:
            raise ValueError("with kind: column, the column names the test rows: leave test out")
        for name, share in (("num_validation", self.validation), ("num_test", self.test)):
            if getattr(self, name) != 1 and (self.kind != "per_user_last" or not share):
                raise ValueError(f"{name} is read by kind: per_user_last, where the share is above 0: leave it out")
        return self


class Intervals(Spec):
    """Bootstrap intervals of the metrics, as ``NAME_low`` and ``NAME_high``.

    The intervals come from ``replicates`` resamples of rows, or of users with all their rows (``by``). GAUC and ranking
    metrics always resample users. ECE has no interval, because resampling adds to its bias. A split that is too large
    to be gathered (trainer.evaluation.pointwise.GATHER_ROWS) has intervals of ranking metrics only.
    """

    replicates: int = Field(default=200, ge=10, le=10_000)
    level: float = Field(default=0.95, gt=0.5, lt=1.0)
    by: Literal["row", "user"] = "row"


class Evaluation(Spec):
    """Split of the rows, and metrics of the held-out rows.

    ``metrics`` defaults to all that the model has: AUC and logloss, or RMSE and MAE of real-valued labels; for sequence
    models AUC, hit rate and NDCG at 10 against 100 negatives, and both among all items (``full``). ``training``: after
    each epoch the training rows are evaluated too, with the same metrics, under split ``train``, from which the
    generalization gap is computed. ``progressive_rows``: for a one-pass job, the number of rows in each window of
    which metrics are computed, under split ``progressive``; a batch is scored before it is trained on.
    ``sample_users``: number of users of the validation split to rank after each epoch; at the end, all users of both
    splits are ranked by the final parameters. ``slices``: features by whose values the comparison with the served model
    is broken down (trainer.evaluation.model_comparison). Slices are the most frequent values of a feature of single
    ids, and quarters of a numeric feature.
    """

    split: Split = Split()
    metrics: tuple[Metric, ...] = DEFAULT_METRICS
    intervals: Intervals | None = later(None)
    training: bool = later(False)
    progressive_rows: int | None = later(None, ge=100, le=10_000_000)
    sample_users: int | None = later(None, ge=100, le=10_000_000)
    slices: Annotated[tuple[str, ...], Field(max_length=8)] = later(())

    @property
    def needs_users(self) -> bool:
        by_user = self.intervals is not None and self.intervals.by == "user"
        return by_user or bool(metrics_of_users(self.metrics))
