"""Line charts over epochs or steps, and calibration charts: predictions against observed shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from service.web.charts.axes import NUM_COLOURS, dot, grid_line, nice_ticks, path, svg, text, tick_texts, whole_ticks

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 44
MIN_SPAN = 0.01
"""Smallest range of the value axis, so that AUCs that hardly differ are drawn close together."""
MAX_DOTS = 60
"""Most points of a line for which dots are drawn."""


class Series(NamedTuple):
    """One line: (epoch or step, value)."""

    name: str
    points: Sequence[tuple[int, float]]


def line_chart(
    series: Sequence[Series], title: str, unit: str = "AUC", axis: str = "epoch", from_zero: bool = False
) -> Markup:
    """Draw ``series``; each point shows its values under the pointer. The page's style sheet styles the chart.

    ``from_zero``: True if the value axis has 0.

    Raises:
        ValueError: There are no points.
    """
    values = [value for curve in series for _, value in curve.points]
    if not values:
        raise ValueError("a chart needs a point")
    steps = [step for curve in series for step, _ in curve.points]
    low, high = min([*values, 0.0] if from_zero else values), max(values)
    if high - low < MIN_SPAN:
        middle = (low + high) / 2
        low, high = middle - MIN_SPAN / 2, middle + MIN_SPAN / 2
    ticks = nice_ticks(low, high)
    low, high = ticks[0], ticks[-1]
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + (width / 2 if first == last else 14 + (step - first) / (last - first) * (width - 28))

    def y(value: float) -> float:
        return _height(value, low, high)

    parts = _value_axis(ticks)
    whole = whole_ticks(first, last, 10 if axis == "epoch" else 6)
    parts += [text(x(step), HEIGHT - BOTTOM + 20, f"{step:,}", "middle") for step in whole]
    parts.append(text(WIDTH - RIGHT, HEIGHT - 4, axis))
    for number, curve in enumerate(series):
        colour = f"series-{number % NUM_COLOURS + 1}"
        line = path((x(step), y(value)) for step, value in curve.points)
        parts.append(f'<polyline class="line {colour}" points="{line}"/>')
        for step, value in curve.points if len(curve.points) <= MAX_DOTS else ():
            shown = f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
            parts.append(dot(x(step), y(value), f"{curve.name}, {axis} {step}: {unit} {shown}", colour))
    return svg(parts, WIDTH, HEIGHT, title)


def calibration_chart(points: Sequence[tuple[float, float]], title: str) -> Markup:
    """Draw each bin's mean prediction and share of positives, and the diagonal of perfect calibration.

    Both axes have the same range, from 0 to the largest value.
    """
    ticks = nice_ticks(0.0, max([0.01, *(value for point in points for value in point)]))
    top = ticks[-1]

    def x(value: float) -> float:
        return LEFT + value / top * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return _height(value, 0.0, top)

    parts = _value_axis(ticks)
    for tick, words in zip(ticks, tick_texts(ticks), strict=True):
        parts.append(text(x(tick), HEIGHT - BOTTOM + 20, words, "end" if tick == top else "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 4, "prediction"))
    parts.append(grid_line((x(0.0), x(top)), (y(0.0), y(top))))
    line = path((x(prediction), y(share)) for prediction, share in points)
    parts.append(f'<polyline class="line series-1" points="{line}"/>')
    for prediction, share in points:
        parts.append(dot(x(prediction), y(share), f"predicted {prediction:.4f}, observed {share:.4f}", "series-1"))
    return svg(parts, WIDTH, HEIGHT, title)


def _height(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _value_axis(ticks: list[float]) -> list[str]:
    parts = []
    for tick, words in zip(ticks, tick_texts(ticks), strict=True):
        y = _height(tick, ticks[0], ticks[-1])
        parts += [grid_line((LEFT, WIDTH - RIGHT), (y, y)), text(LEFT - 8, y + 4, words)]
    return parts
