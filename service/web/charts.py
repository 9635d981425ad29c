"""Line charts as inline SVG: no script, no library, colours from the page's own style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 44
NUM_COLOURS = 6
MIN_SPAN = 0.01
"""AUCs that differ by less are drawn as close as they are."""


class Series(NamedTuple):
    """One line: (epoch, value) from the first epoch on."""

    name: str
    points: Sequence[tuple[int, float]]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round values that enclose [low, high]: steps of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, 1e-9) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def line_chart(series: Sequence[Series], title: str, unit: str = "AUC") -> Markup:
    """Draw ``series`` over epochs; each point shows its values under the pointer. The markup has no style of its own.

    Args:
        series: The lines.
        title: The heading.
        unit: Label of the vertical axis.

    Raises:
        ValueError: There are no points.
    """
    values = [value for one in series for _, value in one.points]
    if not values:
        raise ValueError("a chart needs a point")
    epochs = [epoch for one in series for epoch, _ in one.points]
    low, high = min(values), max(values)
    if high - low < MIN_SPAN:
        middle = (low + high) / 2
        low, high = middle - MIN_SPAN / 2, middle + MIN_SPAN / 2
    ticks = nice_ticks(low, high)
    low, high = ticks[0], ticks[-1]
    first, last = min(epochs), max(epochs)

    def x(epoch: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + (width / 2 if first == last else 14 + (epoch - first) / (last - first) * (width - 28))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.{decimals}f}</text>'
        )
    parts.extend(
        f'<text class="tick" x="{x(epoch):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{epoch}</text>'
        for epoch in epoch_ticks(first, last)
    )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">epoch</text>')
    for number, one in enumerate(series):
        colour = f"series-{number % NUM_COLOURS + 1}"
        path = " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in one.points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for epoch, value in one.points:
            tip = escape(f"{one.name}, epoch {epoch}: {unit} {value:.4f}")
            parts.append(
                f'<g class="point {colour}"><title>{tip}</title>'
                f'<circle class="hit" cx="{x(epoch):.1f}" cy="{y(value):.1f}" r="11"/>'
                f'<circle class="dot" cx="{x(epoch):.1f}" cy="{y(value):.1f}" r="4"/></g>'
            )
    parts.append("</svg>")
    return Markup("".join(str(part) for part in parts))


def calibration_chart(points: Sequence[tuple[float, float]], title: str) -> Markup:
    """Draw the mean prediction and the share of positives of each bin, and the diagonal of perfect calibration.

    Both axes are the same, from 0 to the largest value.
    """
    ticks = nice_ticks(0.0, max([0.01, *(value for point in points for value in point)]))
    top = ticks[-1]

    def x(value: float) -> float:
        return LEFT + value / top * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in ticks:
        text = f"{tick:.{decimals}f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
        anchor = "end" if tick == top else "middle"
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="{anchor}">{text}</text>'
        )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">prediction</text>')
    diagonal = f'x1="{x(0.0):.1f}" y1="{y(0.0):.1f}" x2="{x(top):.1f}" y2="{y(top):.1f}"'
    parts.append(f'<line class="grid" {diagonal}/>')
    path = " ".join(f"{x(prediction):.1f},{y(share):.1f}" for prediction, share in points)
    parts.append(f'<polyline class="line series-1" points="{path}"/>')
    for prediction, share in points:
        parts.append(
            f'<g class="point series-1"><title>predicted {prediction:.4f}, was {share:.4f}</title>'
            f'<circle class="hit" cx="{x(prediction):.1f}" cy="{y(share):.1f}" r="11"/>'
            f'<circle class="dot" cx="{x(prediction):.1f}" cy="{y(share):.1f}" r="4"/></g>'
        )
    parts.append("</svg>")
    return Markup("".join(str(part) for part in parts))


def epoch_ticks(first: int, last: int, at_most: int = 10) -> list[int]:
    """Return whole epochs as ticks, never more than fit."""
    step = max(1, math.ceil((last - first + 1) / at_most))
    return list(range(first, last + 1, step))
