"""Maps: points before and after, each with a line from where it was to where it is."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

SIZE, MARGIN = 360, 14
Point = tuple[float, float]


def frame_of(*clouds: Sequence[Point]) -> float:
    """Return the half-width of the square around 0 that holds every point, so that maps beside each other compare."""
    return max([1e-9, *(abs(value) for cloud in clouds for point in cloud for value in point)])


def movement_map(
    before: Sequence[Point], after: Sequence[Point], names: Sequence[str], half: float, title: str
) -> Markup:
    """Draw where each point was, where it is, and the way between.

    Args:
        before: The points as they were.
        after: The same points as they are.
        names: What each is called.
        half: The half-width of the square that is drawn (:func:`frame_of`).
        title: What the map is called to those who do not see it.
    """

    def place(point: Point) -> Point:
        scale = (SIZE - 2 * MARGIN) / (2 * half)
        return SIZE / 2 + point[0] * scale, SIZE / 2 - point[1] * scale

    old, new = [place(point) for point in before], [place(point) for point in after]
    ways = "".join(f"M{was[0]:.1f} {was[1]:.1f}L{now[0]:.1f} {now[1]:.1f}" for was, now in zip(old, new, strict=True))
    parts = [
        f'<svg class="chart map" viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{escape(title)}">',
        f'<line class="grid" x1="{SIZE / 2}" x2="{SIZE / 2}" y1="0" y2="{SIZE}"/>',
        f'<line class="grid" x1="0" x2="{SIZE}" y1="{SIZE / 2}" y2="{SIZE / 2}"/>',
        f'<path class="way" d="{ways}"/>',
    ]
    parts += [f'<circle class="was" cx="{left:.1f}" cy="{top:.1f}" r="2.5"/>' for left, top in old]
    parts += [
        f'<circle class="now" cx="{left:.1f}" cy="{top:.1f}" r="2.5"><title>{escape(name)}</title></circle>'
        for (left, top), name in zip(new, names, strict=True)
    ]
    parts.append("</svg>")
    return Markup("".join(str(part) for part in parts))
