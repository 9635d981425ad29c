"""Charts of how vectors moved: a histogram, and a map of points before and after."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from service.web.charts.axes import grid_line, svg, text

WIDTH, HEIGHT = 560, 170
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 18, 40
SIZE, MARGIN = 360, 14
Point = tuple[float, float]


def histogram(counts: Sequence[int], edges: Sequence[float], title: str, axis: str) -> Markup:
    """Draw a bar for each count above an axis named ``axis``, labelled with the bins' edges (one more than counts)."""
    top = max([1, *counts])
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    parts = []
    for number, count in enumerate(counts):
        height = count / top * (HEIGHT - TOP - BOTTOM)
        left = LEFT + number * width
        tip = escape(f"{edges[number]:.3g} to {edges[number + 1]:.3g}: {count:,}")
        parts.append(
            f'<rect class="bar series-1" x="{left + 1:.1f}" width="{width - 2:.1f}" '
            f'y="{HEIGHT - BOTTOM - height:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    line = HEIGHT - BOTTOM
    parts.append(grid_line((LEFT, WIDTH - RIGHT), (line, line)))
    for number in range(0, len(edges), max(1, len(counts) // 5)):
        anchor = "start" if number == 0 else "end" if number == len(edges) - 1 else "middle"
        parts.append(text(LEFT + number * width, line + 18, f"{edges[number]:.2g}", anchor))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 4, axis))
    return svg(parts, WIDTH, HEIGHT, title)


def half_width(*clouds: Sequence[Point]) -> float:
    """Return the half-width of the square around 0 that holds every point, to draw several maps at one scale."""
    return max([1e-9, *(abs(value) for cloud in clouds for point in cloud for value in point)])


def movement_map(
    before: Sequence[Point],
    after: Sequence[Point],
    names: Sequence[str],
    half: float,
    title: str,
    colours: Sequence[int] | None = None,
) -> Markup:
    """Draw each item's points before and after a refresh, joined by a line.

    ``half``: the half-width of the square that is drawn (:func:`half_width`). ``colours``: the number of each item's
    colour, from 1 on; None: the second for all.
    """

    def on_map(point: Point) -> Point:
        scale = (SIZE - 2 * MARGIN) / (2 * half)
        return SIZE / 2 + point[0] * scale, SIZE / 2 - point[1] * scale

    old, new = [on_map(point) for point in before], [on_map(point) for point in after]
    ways = "".join(f"M{was[0]:.1f} {was[1]:.1f}L{now[0]:.1f} {now[1]:.1f}" for was, now in zip(old, new, strict=True))
    middle, whole = (SIZE / 2, SIZE / 2), (0, SIZE)
    parts = [grid_line(middle, whole), grid_line(whole, middle), f'<path class="way" d="{ways}"/>']
    parts += [f'<circle class="was" cx="{left:.1f}" cy="{top:.1f}" r="2.5"/>' for left, top in old]
    parts += [
        f'<circle class="now series-{colour}" cx="{left:.1f}" cy="{top:.1f}" r="2.5">'
        f"<title>{escape(name)}</title></circle>"
        for (left, top), name, colour in zip(new, names, colours or [2] * len(names), strict=True)
    ]
    return svg(parts, SIZE, SIZE, title, "chart map")
