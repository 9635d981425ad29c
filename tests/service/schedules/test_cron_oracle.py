"""Firings over two years against Debian's cron done by brute force, where the clock changes in the oddest ways."""

from __future__ import annotations

import datetime
from bisect import bisect_left, bisect_right
from itertools import islice, takewhile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.schedules import cron
from tests.service.schedules.cron_oracle import MINUTE, Field, clock_changes
from tests.service.schedules.cron_oracle import firings as by_brute_force

# Years of minutes.
pytestmark = pytest.mark.slow

TWO_YEARS = 2 * 365 * 1440
LIMIT = 300


def values_of(low: int, high: int) -> st.SearchStrategy[Field]:
    """Values by comma."""
    found = st.lists(st.integers(low, high), min_size=1, max_size=4, unique=True)
    return found.map(lambda ones: Field(",".join(map(str, ones)), frozenset(ones)))


def field(low: int, high: int, *more: Field) -> st.SearchStrategy[Field]:
    """A field of an expression: a star, steps, a range, a range in steps, or values."""
    everything = range(low, high + 1)
    value = st.integers(low, high)
    pair = st.tuples(value, value).filter(lambda ends: ends[0] < ends[1])
    return st.one_of(
        st.just(Field("*", frozenset(everything))),
        st.sampled_from([2, 5, 7, 15]).map(lambda step: Field(f"*/{step}", frozenset(everything[::step]))),
        pair.map(lambda ends: Field(f"{ends[0]}-{ends[1]}", frozenset(range(ends[0], ends[1] + 1)))),
        pair.map(lambda ends: Field(f"{ends[0]}-{ends[1]}/3", frozenset(range(ends[0], ends[1] + 1, 3)))),
        values_of(low, high),
        *map(st.just, more),
    )


def star(low: int, high: int) -> Field:
    return Field("*", frozenset(range(low, high + 1)))


def at(minute: str, hour: str) -> tuple[Field, ...]:
    """Every day; ``minute`` and ``hour`` are ``*`` or values by comma."""
    values = [
        star(0, high) if text == "*" else Field(text, frozenset(map(int, text.split(","))))
        for text, high in ((minute, 59), (hour, 23))
    ]
    return (*values, star(1, 31), star(1, 12), star(0, 6))


EXPRESSIONS = st.tuples(
    field(0, 59),
    st.one_of(field(0, 23), values_of(0, 4)),  # clocks change at night
    st.one_of(st.just(star(1, 31)), field(1, 31)),
    st.one_of(st.just(star(1, 12)), field(1, 12)),
    st.one_of(st.just(star(0, 6)), field(0, 6, Field("7", frozenset([0])), Field("sun", frozenset([0])))),
)
# The first day of two years in which something happens there.
ZONES = {
    "UTC": "2025-01-01",
    "Europe/Berlin": "2025-01-01",
    "America/New_York": "2025-01-01",
    "America/Santiago": "2025-01-01",  # changes at midnight
    "Africa/Cairo": "2024-01-01",  # changes at midnight
    "Australia/Lord_Howe": "2025-01-01",  # by half an hour
    "Africa/Casablanca": "2025-01-01",  # back for Ramadan
    "Pacific/Apia": "2011-01-01",  # had no 2011-12-30
    "Asia/Kathmandu": "2025-01-01",  # 5:45 ahead
    "America/Caracas": "2015-06-01",  # by half an hour, for good
    "Antarctica/Troll": "2025-01-01",  # by two hours
}


@pytest.mark.parametrize("zone", ZONES)
@settings(max_examples=settings.default.max_examples // 4)
@given(fields=EXPRESSIONS)
@example(fields=at("30", "2"))
@example(fields=at("0,15,30,45", "0,1,2,3"))
@example(fields=at("30", "*"))
@example(fields=at("*", "2"))
@example(fields=at("0", "0"))
@example(fields=at("10", "23,0"))
def test_two_years_as_debians_cron(zone: str, fields: tuple[Field, ...]) -> None:
    expression = " ".join(one.text for one in fields)
    start = datetime.datetime.fromisoformat(ZONES[zone]).replace(tzinfo=datetime.UTC)
    end = start + TWO_YEARS * MINUTE
    expected = by_brute_force(fields, zone, start, TWO_YEARS)
    try:
        cron.check_cron(expression)
    except ValueError:  # a 31st of June
        assert expected == []
        return
    # Two years of every minute are a million: the first of all, those around each change, those asked for from within.
    changes = clock_changes(zone, start, TWO_YEARS)
    windows = [(start - MINUTE, end), *((change - 60 * MINUTE, change + 1440 * MINUTE) for change in changes)]
    windows += [(change + 17 * MINUTE, change + 240 * MINUTE) for change in changes]
    for begin, close in windows:
        following = expected[bisect_right(expected, begin) : bisect_left(expected, close)][:LIMIT]
        found = takewhile(lambda one, close=close: one < close, cron.firings(expression, zone, begin))
        assert list(islice(found, LIMIT)) == following, begin
