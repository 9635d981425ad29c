"""The refresh study states what must hold, and each of it can fail."""

from __future__ import annotations

import copy

import pytest

from benchmarks.refresh import conditions

# docs/performance.md, 2026-11-20
LINES = [
    {"case": "day0", "accuracy": 0.585, "majority_class": 0.281, "popularity_probe": 0.312},
    {"case": "warm", "retained": 1.07, "retained_last": 1.08},
    {"case": "unaligned", "retained": 0.39},
]


def test_the_published_figures_pass():
    assert all(condition.holds for condition in conditions(LINES))


@pytest.mark.parametrize(
    ("number", "figure", "value", "says"),
    [
        (0, "accuracy", 0.42, "majority class"),
        (0, "popularity_probe", 0.6, "popularity"),
        (1, "retained", 0.94, "warm refreshes, mean"),
        (1, "retained_last", 0.9, "on the last day"),
        (2, "retained", 0.7, "not aligned"),
    ],
)
def test_each_condition_fails_on_a_figure_that_breaks_it(number: int, figure: str, value: float, says: str):
    lines = copy.deepcopy(LINES)
    lines[number][figure] = value
    (failed,) = [condition for condition in conditions(lines) if not condition.holds]
    assert says in failed.name
    assert str(failed).startswith("FAIL")
