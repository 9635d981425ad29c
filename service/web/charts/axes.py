"""What charts share: round ticks, and the numbers beside them."""

from __future__ import annotations

import math

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
