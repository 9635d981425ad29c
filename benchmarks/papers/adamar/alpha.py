"""``alpha``: the best half-life of an idle row's norm, over data sets and batch sizes.

``optimizer.alpha: default`` with ``decay: at_read`` follows from it (Li and Lyu, Adaptive Regularization, tune alpha on
a grid for each data set).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.data import documents
from benchmarks.papers.data.click_tasks import ClickTask, click_tasks, write_click_log
from benchmarks.papers.data.quick_data import LOG as QUICK_LOG
from benchmarks.papers.pages.figures import Figures
from benchmarks.papers.trials.trial import Column, Recipe, Table
from trainer.distributed.build import DEFAULT_HALF_LIFE
from trainer.report_pages.section import Findings, Panel, Section, Verdict, verdict

HALF_LIVES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.6)
"""Epochs in which an idle row loses half its norm."""
QUICK_HALF_LIVES = (0.05, DEFAULT_HALF_LIFE, 0.8)
TIMES = (1, 4, 16)
"""Batch sizes, as multiples of those of table ``adamar``."""
TRAINING_ROWS = {"amazon_sports": 379_086, "epinions": 616_029, "ml1m": 800_103, "clicklog": 480_000}
NO_DECAY = "Adam"
TABLE = "alpha"
COST = 0.005
"""Largest loss of AUC by a rule against the best half-life of a case."""


def alpha_of(half_life: float, num_rows: int, batch_size: int) -> float:
    """Return alpha with which a row that is idle for ``half_life`` epochs has half its norm.

    After n idle steps P[n] = exp(-alpha n^2 / 2) of the norm is left, and this is 1/2 for the n of ``half_life``
    epochs.
    """
    steps = half_life * math.ceil(num_rows / batch_size)
    return 2.0 * math.log(2.0) / steps**2


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return DNN with AdamAR for each half-life, data set and batch size, and with Adam.

    ``rows``: the folder that the synthetic click log is written to; ``quick``: on a small click log.
    """
    half_lives: tuple[float, ...]
    times: tuple[int, ...]
    if quick:
        cases = {"quick": ClickTask(documents.click_log(data), 128, documents.RANDOM)}
        num_rows, half_lives, times = {"quick": QUICK_LOG.num_rows * 4 // 5}, QUICK_HALF_LIVES, (1, 4)
        dim, hidden = 8, [32]
        prepare = None
    else:
        cases, num_rows, half_lives, times = click_tasks(data, rows), TRAINING_ROWS, HALF_LIVES, TIMES
        dim, hidden = 16, [128, 64]
        prepare = partial(write_click_log, rows)
    trials = []
    for seed, (name, task), factor in itertools.product(range(seeds), cases.items(), times):
        batch_size = task.batch_size * factor
        column = f"{name}, batch {batch_size}"
        for row, optimizer in _optimizers(half_lives, num_rows[name], batch_size).items():
            trials.append(documents.trial(
                TABLE, column, row, task.of, name=f"{column} {row}", optimizer=optimizer, batch_size=batch_size,
                seed=seed, evaluation=task.evaluation | {"metrics": ["auc"]},
                **documents.tower(dim, hidden, {"kind": "zero"}),
            ))  # fmt: skip
    columns = list(dict.fromkeys(trial.column for trial in trials))
    tables = tuple(
        Table(
            TABLE if split == "validation" else f"{TABLE}:{split}",
            f"DNN, Adam and AdamAR by the half-life of an idle row: {split} AUC after epoch 4",
            tuple(Column(column, column, "auc", split) for column in columns),
            "last",
            "auc",
        )
        for split in ("validation", "test")
    )
    return Recipe("alpha", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), tables, (), prepare, findings)


def _optimizers(half_lives: Sequence[float], num_rows: int, batch_size: int) -> dict[str, dict[str, Any]]:
    """Return Adam and AdamAR with each half-life, by row."""
    plain = {"kind": "adam", "learning_rate": 0.001}
    return {NO_DECAY: plain} | {
        _row(one): plain | {"kind": "adam_ar", "alpha": alpha_of(one, num_rows, batch_size), "decay": "at_read"}
        for one in half_lives
    }


def _row(half_life: float) -> str:
    return f"half-life {half_life:g}"


def findings(recipe: Recipe, records: Mapping[str, dict[str, Any]], out: Path) -> Findings:
    """Return each case's best half-life, the cost of one half-life for all cases, and a verdict on the default."""
    figures, table = Figures(recipe, records), recipe.tables[0]
    half_lives = [float(row.split()[-1]) for row in figures.rows(table) if row != NO_DECAY]
    cases = {}
    for column in table.columns:
        cells = {one: figures.cell(table, column, _row(one)) for one in half_lives}
        plain = figures.cell(table, column, NO_DECAY)
        if plain is not None and all(cells.values()):
            cases[column.label] = (plain.mean[0], {one: cell.mean[0] for one, cell in cells.items() if cell})
    if not cases:
        return Findings()
    lines: list[tuple[str, ...]] = []
    claims: list[Verdict] = []
    for label, (plain_auc, auc_by_half_life) in cases.items():
        best = max(auc_by_half_life, key=lambda one: auc_by_half_life[one])
        lost = auc_by_half_life[best] - auc_by_half_life[DEFAULT_HALF_LIFE]
        lines.append(
            (
                label,
                f"{best:g}",
                f"{auc_by_half_life[best]:.4f}",
                f"{lost:.4f}",
                f"{auc_by_half_life[DEFAULT_HALF_LIFE] - plain_auc:+.4f}",
            )
        )
        text = f"{label}: the default's half-life is within {COST:g} of the best after epoch 4"
        claims.append(verdict(text, lost <= COST, f"-{lost:.4f}"))
    each = Section(
        "half-lives",
        f"What each case asks for, and the default's half-life of {DEFAULT_HALF_LIFE:g} epochs (validation AUC)",
        ("", "best half-life", "its AUC", "lost by the default", "the default above Adam"),
        tuple(lines),
        panels=_panels({label: auc_by_half_life for label, (_, auc_by_half_life) in cases.items()}),
    )
    losses = {
        one: [max(auc_by_half_life.values()) - auc_by_half_life[one] for _, auc_by_half_life in cases.values()]
        for one in half_lives
    }
    everywhere = Section(
        "one-for-all",
        f"One half-life for all {len(cases)} cases: how far its AUC is below that of the case's best half-life",
        ("half-life", "mean", "most"),
        tuple((f"{one:g}", f"{statistics.fmean(lost):.4f}", f"{max(lost):.4f}") for one, lost in losses.items()),
    )
    return Findings((each, everywhere), tuple(claims))


def _panels(cases: Mapping[str, Mapping[float, float]]) -> tuple[Panel, ...]:
    """Return one panel for each data set, with a curve for each of its batch sizes."""
    by_name: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for label, auc_by_half_life in cases.items():
        name, _, batch = label.partition(", ")
        best = max(auc_by_half_life.values())
        by_name.setdefault(name, {})[batch] = [
            (half_life, value - best) for half_life, value in auc_by_half_life.items()
        ]
    x, y = "half-life of an idle row, epochs", "validation AUC, less the best"
    return tuple(Panel(name, x, y, curves, log="x") for name, curves in by_name.items())


_TITLE = "alpha of AdamAR: the half-life of an idle row"
_SOURCE = "Li and Lyu, Adaptive Regularization: alpha on a grid"
_PROTOCOL = """\
DNN as in recipe adamar: zero initial rows, dimension 16, tower 128-64, dense moments, learning rate .001, 4 epochs.
alpha is set so that a row which no batch holds loses half its norm in so many epochs, exp(-alpha n^2 / 2) = 1/2 after n
steps. Batch sizes: that of recipe adamar, four and sixteen times as much, at the same learning rate. Judged on
validation after the last epoch; test stands below."""
