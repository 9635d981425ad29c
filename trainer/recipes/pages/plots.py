"""Curves over epochs and seconds, and the charts of sections, as PNG, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.recipes.pages.figures import Figures
from trainer.recipes.pages.section import Section
from trainer.recipes.trials.trial import Table

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#E69F00", "#000000", "#999999")
"""Of Okabe and Ito: told apart by colour-blind readers too; line styles tell what is more than eight."""
STYLES = ("-", "--")
MOST_TICKS = 8


def can_draw() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(table: Table, figures: Figures, path: Path) -> bool:
    """Draw the metric of each column over epochs, a line for each row.

    A band of one standard deviation is drawn where there are several seeds; below, where the table asks for it, the
    same over the seconds of the run. Returns False, and makes no file, where no run has two epochs.
    """
    rows = figures.rows(table)
    columns = [column for column in table.columns if any(figures.curve(table, column, row) for row in rows)]
    curves = [figures.curve(table, column, row) for column in columns for row in rows]
    if max((len(curve) for curve in curves), default=0) < 2:
        return False
    lines = ("epochs", "seconds") if table.seconds else ("epochs",)
    figure = _figure(max(6.4, 4.2 * len(columns)), 4.2 * len(lines))
    panels = figure.subplots(len(lines), len(columns), squeeze=False)
    for line, over in enumerate(lines):
        for column, axes in zip(columns, panels[line], strict=True):
            for number, row in enumerate(rows):
                curve = figures.curve(table, column, row)
                places = figures.seconds(table, column, row) if over == "seconds" else range(1, len(curve) + 1)
                if curve and len(places) == len(curve):
                    _band(axes, places, curve, number, row)
            if over == "epochs":
                axes.xaxis.set_major_locator(_whole_numbers())
            axes.grid(alpha=0.3, linewidth=0.5)
            what = {"epochs": "epoch", "seconds": "seconds of the run"}[over]
            axes.set(xlabel=what, ylabel=f"{column.split} {column.metric}", title=column.label if line == 0 else "")
    panels[0][-1].legend(loc="best", fontsize="small", frameon=False)
    figure.suptitle(table.title.partition(":")[0], fontsize="medium")
    figure.savefig(path, format="png")
    return True


def draw_section(section: Section, path: Path) -> bool:
    """Draw its panels side by side, four in a line; return False, and make no file, where it has none."""
    if not section.panels:
        return False
    across = min(4, len(section.panels))
    down = -(-len(section.panels) // across)
    figure = _figure(max(6.4, 4.2 * across), 3.8 * down)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(section.panels) :]:
        axes.set_visible(False)
    for panel, axes in zip(section.panels, panels, strict=False):
        for number, (label, curve) in enumerate(panel.curves.items()):
            _band(axes, [x for x, _ in curve], [(y, 0.0) for _, y in curve], number, label)
        axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
        axes.set(**{f"{axis}scale": "log" for axis in panel.log})
        if "x" in panel.log:
            _few_ticks(axes, {x for curve in panel.curves.values() for x, _ in curve})
        axes.grid(alpha=0.3, linewidth=0.5)
        if len(panel.curves) > 1:
            axes.legend(loc="best", fontsize="small", frameon=False)
    figure.suptitle(section.title.partition(":")[0], fontsize="medium")
    figure.savefig(path, format="png")
    return True


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _band(axes: Any, places: Sequence[float], curve: Sequence[tuple[float, float]], number: int, label: str) -> None:
    """Draw curve ``number`` of a chart: means, and a band of one standard deviation where there is one."""
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve) < 12 else None
    means = [mean for mean, _ in curve]
    axes.plot(places, means, color=colour, linestyle=style, marker=marker, markersize=4, label=label)
    if any(sd for _, sd in curve):
        low, high = [mean - sd for mean, sd in curve], [mean + sd for mean, sd in curve]
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _few_ticks(axes: Any, places: set[float]) -> None:
    """Put ticks at the places themselves where they are few, as powers of ten on a logarithmic axis would be fewer."""
    if len(places) <= MOST_TICKS:
        axes.set_xticks(sorted(places), [f"{place:.3g}" for place in sorted(places)])
        axes.minorticks_off()


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)
