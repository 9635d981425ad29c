"""The charts of sections as PNG, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.report_pages.section import Curve, Panel, Section

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#E69F00", "#000000", "#999999")
"""Colours of Okabe and Ito, which colour-blind readers tell apart; line styles tell more than eight curves apart."""
STYLES = ("-", "--")
MOST_TICKS = 8


def can_draw() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(section: Section, path: Path) -> bool:
    """Draw the panels of a section; return False, and make no file, where it has none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not section.panels:
        return False
    across = min(section.across, len(section.panels))
    down = -(-len(section.panels) // across)
    figure = Figure(figsize=(max(6.4, 4.2 * across), 4.0 * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(down, across, squeeze=False).ravel()
    for axes in places[len(section.panels) :]:
        axes.set_visible(False)
    told: list[str] = []
    for panel, axes in zip(section.panels, places, strict=False):
        _panel(axes, panel)
        # Panels of the same curves share one legend.
        if list(panel.curves) != told and len(panel.curves) > 1:
            axes.legend(loc="best", fontsize="small", frameon=False)
        told = list(panel.curves)
    figure.suptitle(section.title.partition(":")[0], fontsize="medium")
    figure.savefig(path, format="png")
    return True


def _panel(axes: Any, panel: Panel) -> None:
    for number, (label, curve) in enumerate(panel.curves.items()):
        if curve and not panel.joined:
            axes.plot(*zip(*curve, strict=True), ".", color=COLOURS[number % len(COLOURS)], markersize=3, alpha=0.5)
        elif curve:
            _band(axes, curve, number, label)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    axes.set(**{f"{axis}scale": "log" for axis in panel.log})
    axes.grid(alpha=0.3, linewidth=0.5)
    ticks = sorted({x for curve in panel.curves.values() for x, *_ in curve})
    if "x" in panel.log and len(ticks) <= MOST_TICKS:
        # At the places themselves: powers of ten would be fewer.
        axes.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
        axes.minorticks_off()
    elif panel.x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)


def _band(axes: Any, curve: Curve, number: int, label: str) -> None:
    """Draw curve ``number`` of a chart: means, and a band of one standard deviation where there is one."""
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve) < 12 else None
    x, means, *spread = zip(*curve, strict=True)
    axes.plot(x, means, color=colour, linestyle=style, marker=marker, markersize=4, label=label)
    if spread and any(spread[0]):
        ends = [[mean + sign * sd for mean, sd in zip(means, spread[0], strict=True)] for sign in (-1, 1)]
        axes.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)
