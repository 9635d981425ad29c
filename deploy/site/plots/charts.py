"""The kinds of plots: curves, bars, dots, parts of a whole, shares in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.site.plots.figure import INK
from deploy.site.plots.tables import Measured

BAR = 0.8
"""Share of a chart row's height that its bars fill."""


CARD = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.4}
"""Background of a figure's text, which hides lines that cross it."""


def curves(axes: Any, x: Sequence[float], lines: dict[str, tuple[str, list[Measured]]], *, gap: float = 0.075) -> None:
    """Draw lines with error bars, each with its name at its end.

    Args:
        axes: Axes to draw on.
        x: Positions of the points.
        lines: Colour and figures keyed by name.
        gap: Smallest distance between two names, as a share of the axis' height.
    """
    for colour, figures in lines.values():
        values = [figure.value for figure in figures]
        axes.errorbar(
            x,
            values,
            _spread(figures),
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
        )
    axes.margins(x=0.03)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    low, high = axes.get_ylim()
    ends = {name: (figures[-1].value - low) / (high - low) for name, (_, figures) in lines.items()}
    for name, place in _apart(ends, gap).items():
        axes.annotate(
            name, (1.02, place), xycoords="axes fraction", va="center", color=lines[name][0], fontsize=8.5,
            annotation_clip=False,
        )  # fmt: skip


def _apart(places: dict[str, float], gap: float) -> dict[str, float]:
    """Return each name's new position: near the given one, in the same order, and at least ``gap`` apart."""
    names = sorted(places, key=lambda name: places[name])
    # Blocks of names that touch, each around the mean of where its names want to be.
    blocks: list[tuple[list[str], float]] = []
    for name in names:
        block, middle = [name], places[name]
        while blocks and middle - gap * (len(block) - 1) / 2 < blocks[-1][1] + gap * (len(blocks[-1][0]) - 1) / 2 + gap:
            block = blocks.pop()[0] + block
            middle = sum(places[member] for member in block) / len(block)
        blocks.append((block, middle))
    return {
        name: middle + gap * (number - (len(block) - 1) / 2)
        for block, middle in blocks
        for number, name in enumerate(block)
    }


def bars(
    axes: Any,
    labels: Sequence[str],
    series: dict[str, tuple[str, list[Measured | None]]],
    *,
    form: str = "{:g}",
    colours: Sequence[str] | None = None,
) -> None:
    """Draw bars from 0 to the right, each with its figure at its end.

    Args:
        axes: Axes to draw on.
        labels: Labels of the rows, from the top.
        series: Colour and figures, keyed by name; the caller draws a legend of several series.
        form: Format of the figures at the bars' ends.
        colours: Colours of the rows of a single series.
    """
    thick = BAR / len(series)
    for number, (name, (colour, figures)) in enumerate(series.items()):
        there = [(row, figure) for row, figure in enumerate(figures) if figure is not None]
        places = [row - BAR / 2 + thick * (number + 0.5) for row, _ in there]
        axes.barh(
            places, [figure.value for _, figure in there], thick * 0.92, label=name,
            color=[colours[row] for row, _ in there] if colours else colour,
            xerr=_spread([figure for _, figure in there]), error_kw={"elinewidth": 1, "capsize": 2, "ecolor": INK},
        )  # fmt: skip
        for place, (_, figure) in zip(places, there, strict=True):
            axes.annotate(
                form.format(figure.value), (figure.value + (figure.deviation or 0), place), (4, 0),
                textcoords="offset points", va="center", fontsize=8,
                bbox=CARD,
            )  # fmt: skip
    _rows(axes, labels)
    axes.set_xlim(left=0)
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0)


def dots(axes: Any, labels: Sequence[str], series: dict[str, tuple[str, str, list[list[Measured]]]]) -> None:
    """Draw points of rows, with error bars; several points of a row and series are seeds or runs.

    Args:
        axes: Axes to draw on.
        labels: Labels of the rows, from the top.
        series: Colour, marker and the figures of each row, keyed by name.
    """
    for number, (name, (colour, marker, rows)) in enumerate(series.items()):
        # Shift each series a little, so that points at the same place are all visible.
        shift = (number - (len(series) - 1) / 2) * 0.16
        points = [(row + shift, figure) for row, figures in enumerate(rows) for figure in figures]
        axes.errorbar(
            [figure.value for _, figure in points], [place for place, _ in points],
            xerr=_spread([figure for _, figure in points]), color=colour, marker=marker, markersize=5.5,
            linestyle="none", elinewidth=1.2, capsize=2.5, label=name,
        )  # fmt: skip
    _rows(axes, labels)
    axes.grid(axis="both", alpha=0.3, linewidth=0.5)
    axes.margins(x=0.08)


def parts(axes: Any, labels: Sequence[str], series: dict[str, tuple[str, list[float]]], *, form: str = "{:g}") -> None:
    """Draw stacked horizontal bars with their totals at the end.

    Args:
        axes: Axes to draw on.
        labels: Labels of the rows, from the top.
        series: Colour, and the length of each row's segment, keyed by name.
        form: Format of the totals.
    """
    ends = [0.0] * len(labels)
    for name, (colour, figures) in series.items():
        axes.barh(range(len(labels)), figures, 0.6, left=ends, color=colour, label=name)
        ends = [end + figure for end, figure in zip(ends, figures, strict=True)]
    for row, end in enumerate(ends):
        axes.annotate(form.format(end), (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    _rows(axes, labels)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)


def reference(axes: Any, value: float, text: str, *, top: bool = True) -> None:
    """Draw a vertical line at a value, with a label above the panel, or at its foot if ``top`` is false."""
    axes.axvline(value, color=INK, linewidth=1, linestyle="--", zorder=0)
    place = ((value, 1.0), (0, 3)) if top else ((value, 0.0), (4, 4))
    axes.annotate(
        text, place[0], place[1], xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center" if top else "left", va="bottom", fontsize=8,
    )  # fmt: skip


def tell_start(axes: Any, axis: str = "x") -> None:
    """Add \"not from 0\" to the label of a linear axis that begins above 0."""
    low = (axes.get_xlim if axis == "x" else axes.get_ylim)()[0]
    scale = (axes.get_xscale if axis == "x" else axes.get_yscale)()
    if scale == "linear" and low > 0:
        label = (axes.get_xlabel if axis == "x" else axes.get_ylabel)()
        axes.set(**{f"{axis}label": f"{label}, not from 0" if label else "axis not from 0"})


def _spread(figures: Sequence[Measured]) -> list[float] | None:
    """Return the lengths of the error bars; None if no figure has a deviation, so that no bars are drawn."""
    if all(figure.deviation is None for figure in figures):
        return None
    return [figure.deviation or 0 for figure in figures]


def _rows(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
