"""Firing times of a schedule: pure functions of cron expression, time zone and instants.

Clock changes are handled as by Debian's cron. If the spring change skips a fixed time, its job runs right after the
change; if the autumn change repeats the time, the job runs once. Jobs with ``*`` in minute or hour follow real time.
cronsim parses expressions and knows the calendar; local time is computed here (docs/adr/0027-schedules-and-clocks.md).
"""

from __future__ import annotations

import datetime
import math
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from trainer.spec.zones import zone_of

ALL_AT_ONCE = 100
MISSED_KEPT = 1000
MISSED_SEARCHED = 5000
FREQUENT_DAYS = 31

SET_FAR = datetime.timedelta(hours=3)
"""Smallest clock change that does not count as daylight saving: firings that it skips are dropped."""
CHANGES_APART = datetime.timedelta(days=1)
SECOND = datetime.timedelta(seconds=1)
UTC = datetime.UTC
Instant = datetime.datetime


def check_cron(expression: str) -> str:
    """Return the expression if it has five valid fields and ever fires.

    Raises:
        ValueError: The expression is invalid or never fires.
    """
    if len(expression.split()) != 5:
        raise ValueError(f"'{expression}' does not have five fields: minute, hour, day of month, month, day of week")
    try:
        CronSim(expression, datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)).__next__()
    except CronSimError as error:
        raise ValueError(f"'{expression}': {str(error).lower()}") from None
    except StopIteration:
        raise ValueError(f"'{expression}' never fires") from None
    return expression


def firings(expression: str, timezone: str, after: Instant) -> Iterator[Instant]:
    """Yield the firings (UTC) strictly after ``after``, strictly increasing.

    Raises:
        ValueError: The time zone is unknown.
    """
    zone = zone_of(timezone)
    minute, hour = expression.split()[:2]
    follows_real_time = minute.startswith("*") or hour.startswith("*")
    last = after
    for at in (_at_matching_minutes if follows_real_time else _once_each)(expression, zone, after):
        if at > last:
            last = at
            yield at


def _once_each(expression: str, zone: ZoneInfo, after: Instant) -> Iterator[Instant]:
    """Yield, for each matching calendar minute, the moment at which clocks first show this or a later minute.

    The first may lie before ``after``.
    """
    # Begin a few hours earlier: a firing in minutes that a clock change skips or repeats may belong after ``after``.
    for wall in CronSim(expression, _wall(after, zone) - SET_FAR):
        at = (wall.replace(tzinfo=zone)).astimezone(UTC)
        if _wall(at, zone) != wall:
            shown = wall.replace(tzinfo=zone, fold=1).utcoffset()
            assert shown is not None
            change = _change(zone, wall - shown, at)
            if _wall(change, zone) - _wall(change - SECOND, zone) >= SET_FAR:
                continue  # a country skipped a whole day, so its firings are dropped
            at = change
        yield at


def _at_matching_minutes(expression: str, zone: ZoneInfo, after: Instant) -> Iterator[Instant]:
    """Yield each minute after ``after`` at which the local time matches the expression."""
    begin = checked = after
    offset = _offset(after, zone)
    while True:
        # Between two clock changes the offset from UTC is constant.
        for wall in CronSim(expression, begin + offset):
            at = wall - offset
            while checked < at:
                until = min(checked + CHANGES_APART, at)
                if _offset(until, zone) != offset:
                    break
                checked = until
            if checked < at:
                break
            yield at
        else:
            return
        change = _change(zone, checked, until)
        offset, begin, checked = _offset(change, zone), change - SECOND, change


def _offset(at: Instant, zone: ZoneInfo) -> datetime.timedelta:
    offset = at.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _wall(at: Instant, zone: ZoneInfo) -> Instant:
    """Return the zone's local time, labelled as UTC so that differences ignore clock changes."""
    return at + _offset(at, zone)


def _change(zone: ZoneInfo, before: Instant, after: Instant) -> Instant:
    """Return the second at which the clock changes; it must change exactly once between ``before`` and ``after``."""
    changed = _offset(after, zone)
    low, high = math.floor(before.timestamp()), math.ceil(after.timestamp())
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(Instant.fromtimestamp(middle, UTC), zone) == changed:
            high = middle
        else:
            low = middle
    return Instant.fromtimestamp(high, UTC)


def next_firing(expression: str, timezone: str, after: Instant) -> Instant | None:
    return next(firings(expression, timezone, after), None)


def firing_date(at: Instant, timezone: str) -> str:
    """Return the local date in the schedule's time zone, YYYY-MM-DD.

    Raises:
        ValueError: The time zone is unknown.
    """
    return at.astimezone(zone_of(timezone)).date().isoformat()


class Due(NamedTuple):
    """A firing that has come due; ``missed`` is the reason why it does not run, or None if it runs."""

    at: Instant
    missed: str | None


class Plan(NamedTuple):
    due: list[Due]
    next_fire_at: Instant | None


def plan(
    expression: str,
    timezone: str,
    next_fire_at: Instant,
    now: Instant,
    catchup: Literal["none", "last", "all"],
    misfire_grace_seconds: float,
) -> Plan:
    """Decide which firings due from ``next_fire_at`` to ``now`` run, and when the schedule is due next.

    By ``catchup``, ``all`` runs each firing, oldest first (a hundred per call); ``last`` runs the newest, however late;
    ``none`` runs the newest if it is at most ``misfire_grace_seconds`` late. Firings that do not run are listed as
    missed, the newest thousand.
    """
    before = next_fire_at - datetime.timedelta(seconds=1)
    if catchup == "all":
        due: list[Instant] = []
        for at in firings(expression, timezone, before):
            if at > now or len(due) == ALL_AT_ONCE:
                return Plan([Due(at_due, None) for at_due in due], at)
            due.append(at)
        return Plan([Due(at_due, None) for at_due in due], None)
    past, following = _past(expression, timezone, before, now, MISSED_SEARCHED)
    if following is not None and following <= now:
        start = now - datetime.timedelta(days=FREQUENT_DAYS)
        past, following = _past(expression, timezone, start, now, None)
    missed = [Due(at, "a later firing was due as well") for at in past]
    if missed:
        newest = missed[-1].at
        late = (now - newest).total_seconds()
        runs = catchup == "last" or late <= misfire_grace_seconds
        reason = f"{late:.0f} s late, and misfire_grace_seconds is {misfire_grace_seconds:g}"
        missed[-1] = Due(newest, None if runs else reason)
    return Plan(missed, following)


def _past(
    expression: str, timezone: str, after: Instant, now: Instant, limit: int | None
) -> tuple[list[Instant], Instant | None]:
    """Return the newest firings up to ``now``, and the first firing that was not examined.

    The latter is after ``now`` unless ``limit`` was reached.
    """
    past: deque[Instant] = deque(maxlen=MISSED_KEPT)
    for count, at in enumerate(firings(expression, timezone, after)):
        if at > now or count == limit:
            return list(past), at
        past.append(at)
    return list(past), None
