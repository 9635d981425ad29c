"""Buckets of requests, by a clock of the test's own."""

from __future__ import annotations

from service.identity import rate_limit
from service.identity.rate_limit import RateLimit


def test_a_burst_and_then_the_rate() -> None:
    limit = RateLimit(10)
    assert [limit.wait_seconds("a", 0.0) for _ in range(20)] == [0.0] * 20
    assert 0 < limit.wait_seconds("a", 0.0) <= 0.1
    assert limit.wait_seconds("b", 0.0) == 0.0  # another name has its own
    allowed = sum(limit.wait_seconds("a", 1 + number / 1000) == 0.0 for number in range(5000))
    assert 59 <= allowed <= 61  # ten for the second that passed, and ten in each of the five
    assert [limit.wait_seconds("a", 1e6) == 0.0 for _ in range(21)] == [True] * 20 + [False]  # no silence adds to it


def test_zero_is_any_number() -> None:
    limit = RateLimit(0)
    assert not any(limit.wait_seconds("a", 0.0) for _ in range(1000))


def test_names_are_forgotten() -> None:
    limit = RateLimit(1)
    for number in range(rate_limit.SIZE + 10):
        limit.wait_seconds(str(number), 0.0)
    assert len(limit._buckets) == rate_limit.SIZE
