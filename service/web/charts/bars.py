"""Bars: a histogram."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 170
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 18, 40


def histogram(counts: Sequence[int], edges: Sequence[float], title: str, axis: str) -> Markup:
    """Draw a bar for each count, with the edges of the bins below.

    Args:
        counts: How many fall into each bin.
        edges: The bins' edges, one more than counts.
        title: What the chart is called to those who do not see it.
        axis: What the edges are.
    """
    top = max([1, *counts])
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for number, count in enumerate(counts):
        height = count / top * (HEIGHT - TOP - BOTTOM)
        left = LEFT + number * width
        tip = escape(f"{edges[number]:.3g} to {edges[number + 1]:.3g}: {count:,}")
        parts.append(
            f'<rect class="bar series-1" x="{left + 1:.1f}" width="{width - 2:.1f}" '
            f'y="{HEIGHT - BOTTOM - height:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    line = HEIGHT - BOTTOM
    parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line}" y2="{line}"/>')
    step = max(1, len(counts) // 5)
    for number in range(0, len(edges), step):
        anchor = "start" if number == 0 else "end" if number == len(edges) - 1 else "middle"
        parts.append(
            f'<text class="tick" x="{LEFT + number * width:.1f}" y="{line + 18}" text-anchor="{anchor}">'
            f"{edges[number]:.2g}</text>"
        )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>')
    parts.append("</svg>")
    return Markup("".join(str(part) for part in parts))
