"""When schedules fire: daylight saving as Debian's cron has it, and what is done with firings that were missed."""

from __future__ import annotations

import datetime
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.schedules import cron

UTC = datetime.UTC


def at(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_every_minute_against_a_brute_force_calendar() -> None:
    """A week of 07:30 on weekdays, found by trying every minute."""
    start = at("2026-03-02T00:00")
    minutes = (start + datetime.timedelta(minutes=one) for one in range(7 * 1440))
    expected = [one for one in minutes if (one.hour, one.minute) == (7, 30) and one.weekday() < 5]
    found = cron.firings("30 7 * * 1-5", "UTC", start - datetime.timedelta(seconds=1))
    assert list(islice(found, len(expected))) == expected


@given(
    minute=st.sampled_from(["0", "30", "*/15", "*"]),
    hour=st.sampled_from(["2", "1-3", "*", "*/6"]),
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
    start=st.datetimes(datetime.datetime(2025, 1, 1), datetime.datetime(2027, 1, 1), timezones=st.just(UTC)),
)
def test_instants_increase_and_lie_after(minute: str, hour: str, zone: str, start: datetime.datetime) -> None:
    """From any moment, in the repeated hour of autumn too, the next firing lies in the future."""
    last = start
    for one in islice(cron.firings(f"{minute} {hour} * * *", zone, start), 20):
        assert one > last
        assert one.tzinfo is UTC
        last = one


def test_autumn_fires_once_and_spring_not_never() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    autumn = list(islice(cron.firings("30 2 * * *", "Europe/Berlin", at("2026-10-24T12:00")), 3))
    assert [one.astimezone(berlin).day for one in autumn] == [25, 26, 27]
    # Asked from inside the second 02:xx, the firing of the first is over.
    inside = at("2026-10-25T01:10")
    assert cron.next_firing("30 2 * * *", "Europe/Berlin", inside) == at("2026-10-26T01:30")
    spring = list(islice(cron.firings("30 2 * * *", "Europe/Berlin", at("2026-03-28T12:00")), 2))
    assert [one.astimezone(berlin).day for one in spring] == [29, 30]
    hourly = list(islice(cron.firings("0 * * * *", "Europe/Berlin", at("2026-10-24T23:30")), 4))
    assert [b - a for a, b in pairwise(hourly)] == [datetime.timedelta(hours=1)] * 3


def test_the_firings_date_is_the_zones() -> None:
    assert cron.firing_date(at("2026-01-01T23:30"), "Asia/Tokyo") == "2026-01-02"
    assert cron.firing_date(at("2026-01-01T23:30"), "UTC") == "2026-01-01"


@pytest.mark.parametrize("text", ["", "* * * *", "* * * * * *", "61 * * * *", "0 0 30 2 *", "@daily", "a b c d e"])
def test_bad_expressions(text: str) -> None:
    with pytest.raises(ValueError, match=r"field|bad|never"):
        cron.check_cron(text)


# --- missed firings --------------------------------------------------------------------------------------------------


def plan(now: str, catchup: str, grace: float = 3600, since: str = "2026-01-01T03:00") -> cron.Plan:
    return cron.plan("0 3 * * *", "UTC", at(since), at(now), catchup, grace)  # type: ignore[arg-type]


def runs(found: cron.Plan) -> list[str]:
    return [one.at.date().isoformat() for one in found.due if one.missed is None]


@pytest.mark.parametrize("catchup", ["none", "last", "all"])
def test_on_time_each_runs(catchup: str) -> None:
    found = plan("2026-01-01T03:00:02", catchup)
    assert runs(found) == ["2026-01-01"]
    assert found.next_fire_at == at("2026-01-02T03:00")


def test_after_an_outage_of_days() -> None:
    late = "2026-01-04T12:00"
    none, last, every = plan(late, "none"), plan(late, "last"), plan(late, "all")
    assert runs(none) == []
    assert "misfire_grace_seconds" in str(none.due[-1].missed)
    assert runs(last) == ["2026-01-04"]
    assert runs(every) == ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]
    for found in (none, last, every):
        assert len(found.due) == 4
        assert found.next_fire_at == at("2026-01-05T03:00")
    within = plan("2026-01-04T03:59:59", "none")
    assert runs(within) == ["2026-01-04"]


def test_a_long_outage_of_a_frequent_schedule_is_bounded() -> None:
    now = at("2027-01-01T00:00:30")
    found = cron.plan("* * * * *", "UTC", at("2026-01-01T00:00"), now, "last", 0)
    assert len(found.due) == cron.MISSED_KEPT
    assert [one.at for one in found.due if one.missed is None] == [at("2027-01-01T00:00")]
    assert found.next_fire_at == at("2027-01-01T00:01")
    every = cron.plan("* * * * *", "UTC", at("2026-01-01T00:00"), now, "all", 0)
    assert len(every.due) == cron.ALL_AT_ONCE
    assert every.next_fire_at == every.due[-1].at + datetime.timedelta(minutes=1)


def test_a_yearly_firing_missed_long_ago_is_still_the_last() -> None:
    found = cron.plan("0 0 1 1 *", "UTC", at("2026-01-01T00:00"), at("2026-11-01T00:00"), "last", 0)
    assert [one.at for one in found.due] == [at("2026-01-01T00:00")]
    assert found.due[0].missed is None


@given(
    st.sampled_from(["*/7 * * * *", "0 3 * * *", "15 */5 * * 1"]),
    st.sampled_from(["none", "last", "all"]),
    st.lists(st.integers(1, 400_000), min_size=1, max_size=12),
)
def test_however_time_is_cut_each_instant_is_planned_once(expression: str, catchup: str, gaps: list[int]) -> None:
    """Looks at irregular moments plan exactly the instants of the expression, each once, in order."""
    start = at("2026-01-01T00:00")
    due, following, now = [], cron.next_firing(expression, "UTC", start), start
    for gap in gaps:
        now += datetime.timedelta(seconds=gap)
        while following is not None and following <= now:
            found = cron.plan(expression, "UTC", following, now, catchup, 3600)  # type: ignore[arg-type]
            due += [one.at for one in found.due]
            following = found.next_fire_at
    expected = []
    for one in cron.firings(expression, "UTC", start):
        if one > now:
            break
        expected.append(one)
    assert due == expected
