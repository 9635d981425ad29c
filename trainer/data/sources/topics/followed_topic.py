"""A topic that is read while messages arrive, segment by segment, with the lag of a reader. Torch-free.

A segment consists of the messages that have arrived when the reader asks for it, up to :data:`SEGMENT_MESSAGES`, taken
evenly from the partitions that have any. A segment's offsets are recorded before it is read, so a later attempt reads
the same messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.sources.topics.kafka import Ends, KafkaTopic, gone
from trainer.data.sources.topics.segments import Journal, Range, Segment
from trainer.spec import Follow
from trainer.spec.messages import Messages

SEGMENT_MESSAGES = 1 << 18
"""Largest number of messages in a segment; a window of rows in one-pass training has the same limit."""


class FollowedTopic:
    """The segments of a topic in the order in which one reader reads them. Safe for use by several threads.

    ``journal``: file that records the segments. ``note`` is called with each message for the job's owner.
    """

    def __init__(self, uri: str, messages: Messages, follow: Follow, journal: Path, note: Callable[[str], None]):
        self.uri, self.follow, self._note = uri, follow, note
        self._kafka = KafkaTopic(uri, messages, follow, note)
        self._journal = Journal(journal)
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._taken: dict[int, Segment] = {}
        self._last: Segment | None = None
        self._is_replayed = False
        self._ends: dict[int, Ends] = {}
        self._seen: deque[tuple[float, int]] = deque()
        """(time, sum of the partitions' end offsets) each time that this sum had grown, to tell unread messages' age.
        """
        self._asked_at = -float("inf")

    def begin(self, segments: Iterable[Segment]) -> None:
        """Continue after the given segments of a checkpoint, the last of them perhaps read in part."""
        with self._lock:
            for segment in sorted(segments, key=lambda one: one.number):
                self._keep(segment)
            self._replay()

    def pieces_until(self, number: int) -> list[Segment]:
        """Return segment ``number``, the segment before it, and the recorded segments after it."""
        with self._lock:
            self._taken = {one: segment for one, segment in self._taken.items() if one >= number - 1}
            self._journal.forget_before(number)
            return list(self._taken.values())

    def next(self, number: int) -> Segment | None:
        """Return the segment of this number; None while no message has arrived for it, or the brokers do not answer.

        Raises:
            DataError: unread messages are gone, or the brokers refuse this run or do not answer for too long.
        """
        with self._lock:
            if not self._is_replayed:
                self._replay()
            if number in self._taken:
                return self._taken[number]
        with self._asking:
            ends = self._ask()
            if ends is None:
                return None
            if self._last is None and not self._begin_at(ends):
                return None
        with self._lock:
            assert self._last is not None
            assert number == self._last.number + 1, "segments are read one after the other"
            self._check(self._last, ends)
            ranges = _ranges(self._last, ends)
            if not ranges:
                return None
            offsets = {partition: one.first for partition, one in ends.items()} | dict(self._last.offsets)
            offsets |= {one.partition: one.end for one in ranges}
            segment = Segment(number, ranges, tuple(sorted(offsets.items())))
            self._journal.append(segment)
            self._keep(segment)
            return segment

    def figures(self, number: int) -> dict[str, float | int]:
        """Return the lag of a reader that is at the segment of this number, for the job's events.

        ``messages_behind`` counts the messages after that segment, and ``seconds_behind`` is the age of the oldest.
        """
        # The reader asks the brokers often, but not while it is ahead of training: ask here then.
        if time.monotonic() - self._asked_at > self.follow.poll_seconds and self._asking.acquire(blocking=False):
            try:
                self._ask()
            finally:
                self._asking.release()
        with self._lock:
            begun = self._taken.get(number) or self._taken.get(number - 1)
            if begun is None:
                return {"messages_behind": 0, "seconds_behind": 0.0}
            offsets, now = dict(begun.offsets), time.monotonic()
            behind = sum(max(0, one.end - offsets.get(partition, one.first)) for partition, one in self._ends.items())
            read = sum(offsets.values())
            while self._seen and self._seen[0][1] <= read:
                self._seen.popleft()
            seconds = now - self._seen[0][0] if behind and self._seen else 0.0
        return {"messages_behind": behind, "seconds_behind": round(seconds, 1)}

    def _keep(self, segment: Segment) -> None:
        self._taken[segment.number] = self._last = segment

    def _replay(self) -> None:
        """Take over the segments that an earlier attempt recorded; from then on only this attempt adds segments."""
        known = self._journal.read()
        if self._last is None and -1 in known:
            self._keep(known[-1])
        while self._last is not None:
            segment = known.get(self._last.number + 1)
            if segment is None or not segment.goes_on_from(self._last):
                break
            self._keep(segment)
        # Later segments that do not follow these are outdated: another host has continued from a checkpoint.
        self._journal.forget_behind(-2 if self._last is None else self._last.number)
        self._is_replayed = True

    def _begin_at(self, ends: Mapping[int, Ends]) -> bool:
        """Record the offsets at which reading begins; return False while the brokers do not answer."""
        start, time_ = self.follow.start, self.follow.start_milliseconds
        offsets: Mapping[int, int] | None
        if time_ is not None:
            offsets = self._kafka.offsets_at(time_, ends)
        else:
            offsets = {partition: one.first if start == "earliest" else one.end for partition, one in ends.items()}
        if offsets is None:
            return False
        first = Segment(-1, (), tuple(sorted(offsets.items())))
        with self._lock:
            self._journal.append(first)
            self._keep(first)
        self._note(f"{self.uri}: reading begins at the offsets {dict(first.offsets)}")
        return True

    def _ask(self) -> dict[int, Ends] | None:
        ends = self._kafka.ends()
        self._asked_at = time.monotonic()
        if ends is not None:
            with self._lock:
                total = sum(one.end for one in ends.values())
                if not self._seen or total > self._seen[-1][1]:
                    self._seen.append((self._asked_at, total))
                if self._last is not None:
                    self._tell_added(self._last, ends)
                self._ends = ends
        return ends

    def _tell_added(self, last: Segment, ends: Mapping[int, Ends]) -> None:
        added = sorted(ends.keys() - dict(last.offsets).keys() - self._ends.keys())
        if added:
            named = ", ".join(map(str, added))
            self._note(f"{self.uri}: partitions {named} were added, and are read from their beginning")

    def _check(self, last: Segment, ends: Mapping[int, Ends]) -> None:
        """Check that the messages after the segment ``last`` still exist."""
        # A partition that was added is read from its beginning.
        for partition, offset in sorted((dict.fromkeys(ends, 0) | dict(last.offsets)).items()):
            there = ends.get(partition)
            if there is None:
                raise _another(self.uri, partition, f"it is not there any more, and offset {offset} comes next")
            if there.first > offset:
                raise gone(self.uri, partition, offset, f"the first one that is there is {there.first}")
            if there.end < offset:
                raise _another(self.uri, partition, f"it ends at offset {there.end}, and {offset} comes next")


def _ranges(last: Segment, ends: Mapping[int, Ends]) -> tuple[Range, ...]:
    offsets = dict(last.offsets)
    waiting = {partition: offsets.get(partition, one.first) for partition, one in ends.items()}
    waiting = {partition: first for partition, first in waiting.items() if first < ends[partition].end}
    share = max(1, SEGMENT_MESSAGES // max(1, len(waiting)))
    return tuple(
        Range(partition, first, min(ends[partition].end, first + share)) for partition, first in sorted(waiting.items())
    )


def _another(uri: str, partition: int, what: str) -> DataError:
    return DataError(
        f"the topic is not the one that was read: {what}",
        where=f"{uri}, partition {partition}",
        remedy="bring it back, or start a new job: a topic created again has other messages at the same offsets",
    )
