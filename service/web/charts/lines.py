"""Line charts over epochs or steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from service.web.charts.axes import NUM_COLOURS, nice_ticks, tick_texts, whole_ticks

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 44
MIN_SPAN = 0.01
"""AUCs that differ by less are drawn as close as they are."""
MAX_DOTS = 60
"""Most points of a line that is drawn with a dot at each."""


class Series(NamedTuple):
    """One line: (epoch or step, value)."""

    name: str
    points: Sequence[tuple[int, float]]


def line_chart(series: Sequence[Series], title: str, unit: str = "AUC", axis: str = "epoch") -> Markup:
    """Draw ``series``; each point shows its values under the pointer. The markup has no style of its own.

    Args:
        series: The lines.
        title: What the chart is called to those who do not see it.
        unit: What the values are.
        axis: What they are drawn over.

    Raises:
        ValueError: There are no points.
    """
    values = [value for one in series for _, value in one.points]
    if not values:
        raise ValueError("a chart needs a point")
    places = [place for one in series for place, _ in one.points]
    low, high = min(values), max(values)
    if high - low < MIN_SPAN:
        middle = (low + high) / 2
        low, high = middle - MIN_SPAN / 2, middle + MIN_SPAN / 2
    ticks = nice_ticks(low, high)
    low, high = ticks[0], ticks[-1]
    first, last = min(places), max(places)

    def x(place: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + (width / 2 if first == last else 14 + (place - first) / (last - first) * (width - 28))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    parts.extend(
        f'<text class="tick" x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{place:,}</text>'
        for place in whole_ticks(first, last, 10 if axis == "epoch" else 6)
    )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>')
    for number, one in enumerate(series):
        colour = f"series-{number % NUM_COLOURS + 1}"
        path = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in one.points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for place, value in one.points if len(one.points) <= MAX_DOTS else ():
            shown = f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
            tip = escape(f"{one.name}, {axis} {place}: {unit} {shown}")
            parts.append(
                f'<g class="point {colour}"><title>{tip}</title>'
                f'<circle class="hit" cx="{x(place):.1f}" cy="{y(value):.1f}" r="11"/>'
                f'<circle class="dot" cx="{x(place):.1f}" cy="{y(value):.1f}" r="4"/></g>'
            )
    parts.append("</svg>")
    return Markup("".join(str(part) for part in parts))
