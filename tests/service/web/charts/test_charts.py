"""Charts: what is drawn lies inside, in its order, and says in words what it shows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.web.charts.axes import nice_ticks, tick_texts, whole_ticks
from service.web.charts.limits import Measured, limit_chart
from service.web.charts.lines import MAX_DOTS, Series, calibration_chart, line_chart
from service.web.charts.movement import SIZE, half_width, histogram, movement_map


@given(st.floats(0, 1), st.floats(1e-3, 1))
def test_ticks_enclose_and_are_round(low: float, span: float):
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= low + span - 1e-9
    step = ticks[1] - ticks[0]
    assert all(abs(tick / step - round(tick / step)) < 1e-4 for tick in ticks)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(3, 10))
def test_whole_ticks_are_few_and_inside(first: int, span: int, at_most: int):
    ticks = whole_ticks(first, first + span, at_most)
    assert 1 <= len(ticks) <= at_most
    assert all(first <= tick <= first + span for tick in ticks)


def test_ticks_as_text():
    assert tick_texts([0.70, 0.72]) == ["0.70", "0.72"]
    assert tick_texts([80_000.0, 100_000.0]) == ["80k", "100k"]
    assert tick_texts([500.0, 1_000.0]) == ["500", "1,000"]


def test_every_epoch_has_its_tick_while_they_fit():
    assert whole_ticks(1, 4) == [1, 2, 3, 4]
    assert whole_ticks(0, 1000, 6) == [0, 200, 400, 600, 800, 1000]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=40), min_size=1, max_size=8))
def test_every_point_lies_inside_the_chart(curves: list[list[float]]):
    svg = line_chart([Series(f"<{number}>", list(enumerate(curve, 1))) for number, curve in enumerate(curves)], "a & b")
    inside = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert inside is not None
    width, height = map(float, inside.groups())
    dots = re.findall(r'class="dot" cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    assert len(dots) == sum(map(len, curves))
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in dots)
    assert "<0>" not in svg
    assert "a &amp; b" in svg


def test_higher_is_drawn_higher():
    svg = line_chart([Series("one", [(1, 0.70), (2, 0.75), (3, 0.72)])], "t")
    heights = [float(y) for y in re.findall(r'class="dot" cx="[-\d.]+" cy="([-\d.]+)"', svg)]
    assert heights[1] < heights[2] < heights[0]


def test_a_long_line_has_no_dots():
    points = [(step, step / 1000) for step in range(MAX_DOTS + 1)]
    assert 'class="dot"' not in line_chart([Series("speed", points)], "t", axis="step")


def test_a_chart_needs_a_point():
    with pytest.raises(ValueError, match="point"):
        line_chart([Series("one", [])], "t")
    with pytest.raises(ValueError, match="version"):
        limit_chart([], "t", at_most=True)


def test_what_a_limit_refuses_is_shaded_on_its_side():
    measured = [Measured("v1", 0.9, 0.85, False), Measured("v2", None, 0.85, True), Measured("v3", 0.2, 0.85, True)]
    below, above = (limit_chart(measured, "t", at_most) for at_most in (False, True))
    assert re.search(r'refused" points="0\.0,84\.0', below)
    assert re.search(r'refused" points="0\.0,0\.0', above)
    dots = re.findall(r'class="point ([\w-]+)"><title>([^<]+)<.*?cy="([\d.]+)"', below)
    assert [(kind, text) for kind, text, _ in dots] == [
        ("series-1", "v1: 0.9, limit 0.85, passed"), ("fail", "v3: 0.2, limit 0.85, failed"),
    ]  # fmt: skip
    assert float(dots[0][2]) < float(dots[1][2])


def test_a_map_shows_where_each_was_and_is():
    before, after = [(0.0, 1.0), (-1.0, 0.0)], [(0.0, -2.0), (-1.0, 0.0)]
    half = half_width(before, after)
    assert half == 2.0
    svg = movement_map(before, after, ["<a>", "b"], half, "t")
    was, now = (re.findall(rf'class="{name}[^"]*" cx="([\d.]+)" cy="([\d.]+)"', svg) for name in ("was", "now"))
    assert was[1] == now[1]
    assert float(was[0][1]) < SIZE / 2 < float(now[0][1])
    assert "&lt;a&gt;" in svg


def test_bars_are_as_high_as_their_counts():
    heights = [
        float(one) for one in re.findall(r'height="([\d.]+)"><title', histogram([1, 4, 0], [0, 1, 2, 3], "t", "x"))
    ]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.01)
    assert heights[2] == 0


def test_calibration_has_a_dot_for_each_bin():
    assert calibration_chart([(0.1, 0.2), (0.5, 0.4)], "t").count('class="dot"') == 2
