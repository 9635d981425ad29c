"""The figures of table cells from the records of trials: candidates chosen on validation, means over seeds, claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table

Record = dict[str, Any]
Runs = dict[int, Record]
"""Ended runs by seed."""


@dataclass(frozen=True)
class Cell:
    """Means over ``seeds`` and sample standard deviations (n - 1), one of each for every figure of the cell.

    ``tried``: the candidate chosen on the validation split; ``records``: its runs.
    """

    mean: tuple[float, ...]
    sd: tuple[float, ...] | None
    seeds: tuple[int, ...]
    tried: str
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Judgement:
    """The judgement of a claim.

    ``gain``: by how much left is better than right; None if no seed was run for both.
    """

    claim: Claim
    gain: float | None
    seeds: tuple[int, ...] = ()

    @property
    def holds(self) -> bool | None:
        return None if self.gain is None else self.gain >= self.claim.at_least


class Figures:
    """Figures of a recipe's tables. ``records``: the record of each trial, by the trial's key."""

    def __init__(self, recipe: Recipe, records: Mapping[str, Record]):
        self.recipe = recipe
        self._runs: dict[tuple[str, str, str], dict[str, Runs]] = {}
        self._rows: dict[str, list[str]] = {}
        for trial in recipe.trials:
            rows = self._rows.setdefault(trial.table, [])
            if trial.row not in rows:
                rows.append(trial.row)
            record = records.get(trial.key)
            if record is not None and record["state"] == "done":
                settings = self._runs.setdefault((trial.table, trial.column, trial.row), {})
                settings.setdefault(trial.tried, {})[trial.seed] = record

    def rows(self, table: Table) -> list[str]:
        """Return the rows in the recipe's order, also those that were not run."""
        return self._rows.get(table.trials_of, [])

    def runs(self, table: Table, column: Column, row: str) -> tuple[str, Runs]:
        """Return (candidate, its runs) for the candidate with the best mean over seeds at its best validation epoch.

        ("", {}) where nothing has ended.
        """
        candidates = self._runs.get((table.trials_of, column.column, row), {})
        if not candidates:
            return "", {}
        sign = -1.0 if table.lower else 1.0

        def score(tried: str) -> float:
            best = [value for record in candidates[tried].values() if (value := _validated(table, record)) is not None]
            return sign * statistics.fmean(best) if best else -math.inf

        taken = max(candidates, key=score)
        return taken, candidates[taken]

    def cell(self, table: Table, column: Column, row: str, seeds: Collection[int] | None = None) -> Cell | None:
        """Return the cell of all seeds that have ended, or only of those in ``seeds``."""
        tried, runs = self.runs(table, column, row)
        asked = {seed: record for seed, record in runs.items() if seeds is None or seed in seeds}
        by_seed = {seed: values for seed, record in asked.items() if (values := shown(table, column, record))}
        if not by_seed:
            return None
        by_figure = list(zip(*by_seed.values(), strict=False))
        mean = tuple(statistics.fmean(values) for values in by_figure)
        sd = tuple(statistics.stdev(values) for values in by_figure) if len(by_seed) > 1 else None
        return Cell(mean, sd, tuple(sorted(by_seed)), tried, tuple(runs[seed] for seed in by_seed))

    def curve(self, table: Table, column: Column, row: str) -> list[tuple[float, float]]:
        """Return (mean, sd or 0) of the metric for each epoch that every seed has reached."""
        _, runs = self.runs(table, column, row)
        curves = [_curve(record, column.split, column.metric) for record in runs.values()]
        places = zip(*(list(curve.values()) for curve in curves), strict=False) if curves else ()
        return [(statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for v in places]

    def judge(self, claim: Claim) -> Judgement:
        """Judge a claim by the seeds that both sides have; different seeds would add a difference of their own."""
        table = next(table for table in self.recipe.tables if table.name == claim.table)
        column = next(column for column in table.columns if column.column == claim.column)
        sides = (claim.left, claim.right)
        ended = [set(cell.seeds) for row, _ in sides if (cell := self.cell(table, column, row)) is not None]
        seeds = ended[0] & ended[1] if len(ended) == len(sides) else set()
        values = []
        for row, which in sides:
            cell = self.cell(table, column, row, seeds)
            if cell is None:
                return Judgement(claim, None)
            best = min(cell.mean) if table.lower else max(cell.mean)
            values.append({"first": cell.mean[0], "last": cell.mean[-1], "best": best}[which])
        gain = (values[1] - values[0]) if table.lower else (values[0] - values[1])
        return Judgement(claim, gain, tuple(sorted(seeds)))


def shown(table: Table, column: Column, record: Record) -> tuple[float, ...]:
    """Return the figures of one run that a table cell shows.

    The shown figures are those of every epoch, of the last epoch, or of the epoch that is best on validation.
    """
    curve = _curve(record, column.split, column.metric)
    if not curve:
        return ()
    if table.when == "epochs":
        return tuple(curve.values())
    if table.when == "last":
        return (curve[max(curve)],)
    validation = {
        epoch: value for epoch, value in _curve(record, "validation", table.chosen_by).items() if epoch in curve
    }
    if not validation:
        return ()
    pick = min if table.lower else max
    return (curve[pick(validation, key=lambda epoch: validation[epoch])],)


def _curve(record: Record, split: str, metric: str) -> dict[int, float]:
    """Return the metric by epoch."""
    return {
        metrics["epoch"]: float(metrics[metric])
        for metrics in record["metrics"]
        if metrics["split"] == split and metrics.get(metric) is not None
    }


def _validated(table: Table, record: Record) -> float | None:
    values = _curve(record, "validation", table.chosen_by).values()
    return (min(values) if table.lower else max(values)) if values else None
