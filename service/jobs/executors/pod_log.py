"""The new lines of a pod's log, whose lines carry their time; Kubernetes gives no offsets, and rotates logs."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """How far a log was read: the time of the last line, and how many lines with that time were read."""

    time: str = ""
    lines: int = 0


def fresh(said: bytes, position: Position) -> tuple[bytes, Position]:
    """Return the lines after a position, without their times, and the position after them.

    Args:
        said: Lines ``TIME TEXT``, from some time at or before the position on. Times are RFC 3339 in UTC with a
            fraction of any length; they do not fall.
        position: How far it was read before.
    """
    reached = _key(position.time)
    skip, text = position.lines, []
    for line in said.splitlines(keepends=True):
        time, _, rest = line.partition(b" ")
        key = _key(when := time.decode("ascii", "replace"))
        if key < reached:
            continue
        if key == reached:
            if skip:
                skip -= 1
                continue
            position = Position(when, position.lines + 1)
        else:
            reached, skip, position = key, 0, Position(when, 1)
        text.append(rest)
    return b"".join(text), position


def _key(time: str) -> tuple[str, str]:
    """Return a sort key of a time: fractions without trailing zeros."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")
