"""Segments of a topic: the messages that are read together, by the offsets of each partition. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.durable_files import appearing, fsync_path


class Range(NamedTuple):
    """Messages of one partition, from ``first`` up to, but without, ``end``."""

    partition: int
    first: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Messages that are read together: partition by partition, each in the order of its offsets.

    Attributes:
        number: number of segments before this segment; -1 for the starting point, which has no messages.
        ranges: the messages of this segment, by partition.
        offsets: (partition, offset to continue from after this segment), for each partition known so far, in order.
    """

    number: int
    ranges: tuple[Range, ...]
    offsets: tuple[tuple[int, int], ...]

    @staticmethod
    def of_json(document: Mapping[str, Any]) -> Segment:
        """Return the segment that ``dataclasses.asdict`` gave."""
        ranges = tuple(Range(*one) for one in document["ranges"])
        return Segment(document["number"], ranges, tuple((one, offset) for one, offset in document["offsets"]))

    def goes_on_from(self, before: Segment) -> bool:
        """Return True if this segment directly follows ``before``: offsets of all partitions match, read or not."""
        there, after = dict(before.offsets), dict(self.offsets)
        ends = {one.partition: one.end for one in self.ranges}
        return (
            self.number == before.number + 1
            and all(there.get(one.partition, one.first) == one.first for one in self.ranges)
            and all(after.get(partition) == ends.get(partition, offset) for partition, offset in before.offsets)
        )


class Journal:
    """File of the segments of a topic, to which each segment is written before it is read.

    An attempt that is killed may have trained on batches after its last checkpoint: the next attempt reads the same
    segments again, so it takes the same steps. A line that a crash cut off is ignored.
    """

    KEPT = 1000
    """Segments kept before the newest checkpoint's, for older checkpoints."""

    def __init__(self, path: Path):
        self._path = path
        self._num_lines = 0

    def read(self) -> dict[int, Segment]:
        """Return the segments by number; the last one counts if several have a number. A torn last line is cut off."""
        if not self._path.exists():
            return {}
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self._path, len(whole))
        lines = whole.splitlines()
        self._num_lines = len(lines)
        return {one.number: one for one in (Segment.of_json(json.loads(line)) for line in lines)}

    def append(self, segment: Segment) -> None:
        """Append a segment to the file; when this returns, it is on disk."""
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.write(_line(segment))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            fsync_path(self._path.parent)
        self._num_lines += 1

    def forget_before(self, number: int) -> None:
        """Drop segments long before ``number``, now and then."""
        if self._num_lines >= 10 * self.KEPT:
            self._write([one for one in self.read().values() if one.number >= number - self.KEPT])

    def forget_behind(self, number: int) -> None:
        """Remove the segments after ``number``, if there are any; their offsets will be chosen again."""
        known = self.read().values()
        kept = [one for one in known if one.number <= number]
        if len(kept) < len(known):
            self._write(kept)

    def _write(self, segments: Sequence[Segment]) -> None:
        with appearing(self._path) as path:
            path.write_bytes(b"".join(map(_line, segments)))
        self._num_lines = len(segments)


def _line(segment: Segment) -> bytes:
    return json.dumps(asdict(segment), separators=(",", ":")).encode() + b"\n"
