"""Debian's cron, minute by minute: what :mod:`service.schedules.cron` is compared with, written from cron's main loop
alone.

cron wakes every minute. It keeps the wall-clock minute up to which jobs have run, and looks how far the wall clock is
ahead of it. One minute: all jobs that match. Set forward by less than three hours: jobs with ``*`` in minute or hour
that match now, and of the others all that matched in what was left out. Set back by less than three hours: jobs with
``*`` only, until the wall clock has caught up. Further, in either direction: as if cron had just been started.
"""

from __future__ import annotations

import datetime
import functools
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

MINUTE = datetime.timedelta(minutes=1)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
FAR = 180


class Field(NamedTuple):
    """A field of an expression, and the values that it stands for."""

    text: str
    values: frozenset[int]


def firings(fields: tuple[Field, ...], zone: str, start: datetime.datetime, minutes: int) -> list[datetime.datetime]:
    """The instants of ``minutes`` minutes from ``start`` (a whole quarter of an hour) at which cron starts the job."""
    wall, ahead, run_up_to = _clock(zone, start, minutes)
    star = fields[0].text.startswith("*") or fields[1].text.startswith("*")
    matching = _matches(fields, _calendar(zone, start, minutes))
    fires = (ahead == 1) & matching
    for at in np.flatnonzero(ahead != 1):
        if star or abs(ahead[at]) >= FAR:
            fires[at] = matching[at]
        elif ahead[at] > 0:
            fires[at] = _matches(fields, _split(np.arange(run_up_to[at] + 1, wall[at + 1] + 1))).any()
    return [start + int(at) * MINUTE for at in np.flatnonzero(fires)]


def clock_changes(zone: str, start: datetime.datetime, minutes: int) -> list[datetime.datetime]:
    """When the wall clock is set, forward or back."""
    wall = _clock(zone, start, minutes)[0]
    return [start + int(at) * MINUTE for at in np.flatnonzero(np.diff(wall) != 1)]


@functools.lru_cache(1)
def _clock(zone: str, start: datetime.datetime, minutes: int) -> tuple[np.ndarray, ...]:
    """The wall clock in minutes since 1970, from a minute before the start; how far it is ahead of what has been run
    at each minute; and up to which minute that is, from a minute before the start."""
    assert start.minute % 15 == start.second == 0, "offsets are looked up every quarter of an hour"
    quarters = [start + datetime.timedelta(minutes=15 * one) for one in range(minutes // 15 + 2)]
    offsets = [int(one.astimezone(ZoneInfo(zone)).utcoffset() / MINUTE) for one in quarters]  # type: ignore[operator]
    first = int((start - EPOCH) / MINUTE)
    wall = first + np.arange(-1, minutes) + np.concatenate([offsets[:1], np.repeat(offsets, 15)[:minutes]])
    run_up_to = np.maximum.accumulate(wall)
    jumps = np.flatnonzero(np.abs(wall[1:] - run_up_to[:-1]) >= FAR)
    assert len(jumps) <= 1, "of clocks set further than three hours, this knows one at most"
    for jump in jumps:
        run_up_to[jump + 1 :] = np.maximum.accumulate(wall[jump + 1 :])
    return wall, wall[1:] - run_up_to[:-1], run_up_to


@functools.lru_cache(1)
def _calendar(zone: str, start: datetime.datetime, minutes: int) -> tuple[np.ndarray, ...]:
    return _split(_clock(zone, start, minutes)[0][1:])


def _split(wall: np.ndarray) -> tuple[np.ndarray, ...]:
    """Minute, hour, day of month, month, day of week."""
    minutes = wall.astype("datetime64[m]")
    days, months = minutes.astype("datetime64[D]"), minutes.astype("datetime64[M]")
    month_day = (days - months.astype("datetime64[D]")).astype(int) + 1
    week_day = (days.astype(int) + 4) % 7  # 1970 began on a Thursday
    return wall % 60, wall // 60 % 24, month_day, months.astype(int) % 12 + 1, week_day


def _matches(fields: tuple[Field, ...], calendar: tuple[np.ndarray, ...]) -> np.ndarray:
    found = []
    for field, numbers in zip(fields, calendar, strict=True):
        wanted = np.zeros(60, bool)
        wanted[sorted(field.values)] = True
        found.append(wanted[numbers])
    minute, hour, day, month, week = found
    both = fields[2].text.startswith("*") or fields[4].text.startswith("*")
    return minute & hour & month & (day & week if both else day | week)
