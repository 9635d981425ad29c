"""Time that methods take: seconds of an epoch, and of the way to the figure that the plain method ends with at best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.papers.pages.figures import Figures
from benchmarks.papers.trials.trial import Recipe
from trainer.report_pages.section import NOT_RUN, Section


def speed(recipe: Recipe, figures: Figures) -> Section | None:
    """Return the times of every table that is drawn against seconds; None where no run knows its seconds.

    ``plain`` is the first row of a table.
    """
    lines = []
    for table in recipe.tables:
        if not table.seconds:
            continue
        column = table.columns[0]
        sign = -1.0 if table.lower else 1.0
        goal: float | None = None
        for row in figures.rows(table):
            curve = [mean for mean, _ in figures.curve(table, column, row)]
            seconds = figures.seconds(table, column, row)
            if not curve or len(seconds) != len(curve):
                continue
            best = max(range(len(curve)), key=lambda epoch, values=curve: sign * values[epoch])  # type: ignore[misc]
            goal = curve[best] if goal is None else goal
            there = [epoch for epoch, value in enumerate(curve) if sign * value >= sign * goal]
            lines.append(
                (table.title.partition(":")[0], row, str(best + 1), f"{curve[best]:.{table.digits}f}",
                 f"{statistics.fmean(_steps(seconds)):.1f}", f"{seconds[best]:.0f}",
                 f"{seconds[there[0]]:.0f}" if there else NOT_RUN)
            )  # fmt: skip
    if not lines:
        return None
    return Section(
        "speed",
        "Speed: seconds of the run, evaluation included (figure 4 has its epochs)",
        ("", "method", "best epoch", "its test figure", "seconds of an epoch", "seconds to it",
         "seconds to the first row's best"),
        tuple(lines),
        ("Wall-clock seconds: comparable where the runs had the machine to themselves, or shared it alike.",),
    )  # fmt: skip


def _steps(seconds: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip((0.0, *seconds), seconds, strict=False)]
