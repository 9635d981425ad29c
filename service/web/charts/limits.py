"""Small charts of one metric over versions, with the limit that the gate applies to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from service.web.charts.axes import dot, path, svg

WIDTH, HEIGHT = 240, 84
LEFT, RIGHT, TOP, BOTTOM = 8, 8, 10, 10


class Measured(NamedTuple):
    """A metric of one version: its value, its limit, and True if it failed."""

    version: str
    value: float | None
    limit: float
    failed: bool


def limit_chart(measured: Sequence[Measured], title: str, at_most: bool) -> Markup:
    """Draw the values as a line with a dot per version. The limit is a dashed line, with its failing side shaded.

    ``at_most``: the limit is the largest value that passes, otherwise the smallest.

    Raises:
        ValueError: ``measured`` is empty.
    """
    if not measured:
        raise ValueError("a chart needs a version")
    values = [point.value for point in measured if point.value is not None] + [point.limit for point in measured]
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.12
    low, high = low - margin, high + margin

    def x(number: int) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + (width / 2 if len(measured) == 1 else number / (len(measured) - 1) * width)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    limits = [(x(number), y(point.limit)) for number, point in enumerate(measured)]
    edge = [(0.0, limits[0][1]), *limits, (float(WIDTH), limits[-1][1])]
    beyond = 0 if at_most else HEIGHT
    refused = path([(0.0, beyond), *edge, (float(WIDTH), beyond)])
    drawn = [(x(number), y(point.value), point) for number, point in enumerate(measured) if point.value is not None]
    parts = [
        f'<polygon class="refused" points="{refused}"/>',
        f'<polyline class="limit" points="{path(edge)}"/>',
        f'<polyline class="line series-1" points="{path((left, top) for left, top, _ in drawn)}"/>',
    ]
    for left, top, point in drawn:
        tip = f"{point.version}: {point.value:.4g}, limit {point.limit:.4g}, {'failed' if point.failed else 'passed'}"
        kind, radius = ("fail", 4) if point.failed else ("series-1", 3)
        parts.append(dot(left, top, tip, kind, radius, reach=9))
    return svg(parts, WIDTH, HEIGHT, title, "chart small")
