"""Charts of calibration: predictions beside what came true."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from service.web.charts.axes import nice_ticks, tick_texts
from service.web.charts.lines import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH


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

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
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
