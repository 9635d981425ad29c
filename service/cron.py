"""When a schedule fires. Pure: cron expression, zone and instants in, instants out.

Daylight saving follows Debian's cron (cronsim): a job at a fixed time that the spring change skips runs right after it,
one that the autumn change repeats runs once; jobs with ``*`` in minute or hour follow real time.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

ALL_AT_ONCE = 100
MISSED_KEPT = 1000
MISSED_SEARCHED = 5000
FREQUENT_DAYS = 31

Instant = datetime.datetime


def check_zone(name: str) -> str:
    """The name, if it is an IANA time zone. Raises ValueError."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"'{name}' is not an IANA time zone such as Europe/Berlin or UTC") from None
    return name


def check_cron(expression: str) -> str:
    """The expression, if it has five valid fields and ever fires. Raises ValueError."""
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
    """Instants (UTC) strictly after ``after``, strictly increasing."""
    last = after
    for local in CronSim(expression, after.astimezone(ZoneInfo(timezone))):
        # cronsim thinks in wall-clock time where the clock is set back or forward: an instant may come out again.
        at = local.astimezone(datetime.UTC)
        if at > last:
            last = at
            yield at


def next_firing(expression: str, timezone: str, after: Instant) -> Instant | None:
    return next(firings(expression, timezone, after), None)


def firing_date(at: Instant, timezone: str) -> str:
    """The date on the wall of the schedule's zone, YYYY-MM-DD."""
    return at.astimezone(ZoneInfo(timezone)).date().isoformat()


class Due(NamedTuple):
    """A firing that has come due: ``missed`` says why it does not run, None that it runs."""

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
    """What to do with everything due from ``next_fire_at`` to ``now``, and when to look again.

    ``all`` runs each, oldest first (a hundred at once); ``last`` runs the newest, however late; ``none`` runs the
    newest if it is at most ``misfire_grace_seconds`` late. What does not run is listed as missed, the newest thousand.
    """
    before = next_fire_at - datetime.timedelta(seconds=1)
    if catchup == "all":
        due: list[Instant] = []
        for at in firings(expression, timezone, before):
            if at > now or len(due) == ALL_AT_ONCE:
                return Plan([Due(one, None) for one in due], at)
            due.append(at)
        return Plan([Due(one, None) for one in due], None)
    past, following = _past(expression, timezone, before, now, MISSED_SEARCHED)
    if following is not None and following <= now:
        start = now - datetime.timedelta(days=FREQUENT_DAYS)
        past, following = _past(expression, timezone, start, now, None)
    found = [Due(at, "a later firing was due as well") for at in past]
    if found:
        newest = found[-1].at
        late = (now - newest).total_seconds()
        runs = catchup == "last" or late <= misfire_grace_seconds
        reason = f"{late:.0f} s late, and misfire_grace_seconds is {misfire_grace_seconds:g}"
        found[-1] = Due(newest, None if runs else reason)
    return Plan(found, following)


def _past(
    expression: str, timezone: str, after: Instant, now: Instant, limit: int | None
) -> tuple[list[Instant], Instant | None]:
    """The newest firings up to ``now``, and the first that was not looked at: after ``now``, unless ``limit`` cut."""
    past: deque[Instant] = deque(maxlen=MISSED_KEPT)
    for count, at in enumerate(firings(expression, timezone, after)):
        if at > now or count == limit:
            return list(past), at
        past.append(at)
    return list(past), None
