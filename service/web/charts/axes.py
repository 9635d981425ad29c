"""Parts shared by charts: round ticks, their numbers, and pieces of SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

NUM_COLOURS = 6


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round values that enclose [low, high]: steps of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, 1e-9) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def tick_texts(ticks: list[float]) -> list[str]:
    """Return the ticks as text, with as many decimals as their step needs; tens of thousands as ``20k``."""
    if max(map(abs, ticks)) >= 10_000 and all(tick % 1000 == 0 for tick in ticks):
        return [f"{tick / 1000:,.0f}k" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def whole_ticks(first: int, last: int, at_most: int = 10) -> list[int]:
    """Return whole numbers as ticks, never more than fit, at round steps."""
    raw = max(1, math.ceil((last - first + 1) / at_most))
    power = 10 ** (len(str(raw)) - 1)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    begin = first if step == 1 else math.ceil(first / step) * step
    return list(range(begin, last + 1, step)) or [first]


def svg(parts: Iterable[str], width: int, height: int, title: str, kind: str = "chart") -> Markup:
    """Return a chart as an ``svg`` element made of ``parts``; screen readers read ``title``."""
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(head + "".join(parts) + "</svg>")


def text(x: float, y: float, words: str, anchor: str = "end") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def grid_line(x: tuple[float, float], y: tuple[float, float]) -> str:
    return f'<line class="grid" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'


def path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def dot(x: float, y: float, tip: str, kind: str, radius: int = 4, reach: int = 11) -> str:
    """Draw a point that shows ``tip`` while the pointer is within ``reach`` pixels."""
    return (
        f'<g class="point {kind}"><title>{escape(tip)}</title>'
        f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="{reach}"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/></g>'
    )
