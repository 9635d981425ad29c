"""Rows of the segments of a followed topic, without bad rows. Torch-free.

``max_bad_rows`` limits the share of bad rows in each block of :data:`BLOCK_ROWS` rows, because a stream has no end. A
message that cannot be read counts as one row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from trainer.data.errors import DataError
from trainer.data.one_pass.position import Place
from trainer.data.prepare.bad_rows import bad_values, with_numbers
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.source import Chunk
from trainer.data.sources.topics.segments import Segment
from trainer.data.sources.topics.topic_source import MessageChunk, SegmentRows

BLOCK_ROWS = 100_000
NUM_EXAMPLES = 3


class TopicRows:
    """Reader of the rows of a topic's segments.

    ``note`` is called with each message for the job's owner.
    """

    def __init__(self, plan: DataPlan, note: Callable[[str], None] = lambda message: None):
        self._plan, self._note = plan, note
        self._rows: SegmentRows | None = None
        self._told: list[str] = []

    def close(self) -> None:
        """Close the connection to the brokers."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def chunks(self, segment: Segment, place: Place, stopped: threading.Event) -> Iterator[Chunk]:
        """Yield the rows of a segment from ``place`` on, without bad rows.

        Raises:
            DataError: messages were deleted, or the brokers refuse this run or do not answer.
            Stopped: ``stopped`` was set in the meantime.
        """
        plan, follow = self._plan, self._plan.job.dataset.follow
        assert follow is not None
        if self._rows is None:
            self._rows = SegmentRows(plan.dataset, follow, self._note)
        num_bad = 0
        for chunk in self._rows.chunks(segment, plan.columns(), stopped):
            if place.row and chunk.end <= place.row:
                continue
            good = self._good(chunk)
            num_bad += good.num_bad
            yield good
        if num_bad and plan.dataset.max_bad_rows is not None:
            shown = "; ".join(self._told)
            self._note(f"{plan.dataset.uri}: {num_bad:,} bad rows of segment {segment.number} were left out: {shown}")

    def count(self, place: Place, num_rows: int, num_bad: int) -> Place:
        """Return the place after ``num_rows`` more good rows and ``num_bad`` more bad rows.

        Raises:
            DataError: more rows are bad than ``max_bad_rows`` allows.
        """
        dataset = self._plan.dataset
        before, after = place.rows + place.bad, place.rows + place.bad + num_rows + num_bad
        is_same = before // BLOCK_ROWS == after // BLOCK_ROWS
        of_block = num_bad + (place.bad_of_block if is_same else 0)
        shown = "; ".join(self._told)
        if num_bad and dataset.max_bad_rows is None:
            raise DataError(
                f"a row is bad: {shown}",
                where=dataset.uri,
                remedy="register the dataset with max_bad_rows, so that such rows are left out, and start a new job "
                "(dataset.follow.start, init_from)",
            )
        if num_bad and of_block > (dataset.max_bad_rows or 0.0) * BLOCK_ROWS:
            raise DataError(
                f"{of_block:,} rows since row {after - after % BLOCK_ROWS:,} are bad, max_bad_rows allows "
                f"{dataset.max_bad_rows:.2%} of each {BLOCK_ROWS:,}: {shown}",
                where=dataset.uri,
                remedy="see what writes them; register the dataset with a higher max_bad_rows, and start a new job "
                "(dataset.follow.start, init_from)",
            )
        return replace(place, rows=place.rows + num_rows, bad=place.bad + num_bad, bad_of_block=of_block)

    def _good(self, chunk: MessageChunk) -> MessageChunk:
        """Return the chunk without its bad rows, whose number is added to ``num_bad``."""
        bad = np.zeros(len(chunk), dtype=bool)
        topic = self._plan.dataset.uri
        told = [
            f"{topic}, partition {chunk.partition}, offset {offset}: cannot be read: {why}"
            for offset, why in chunk.problems[:NUM_EXAMPLES]
        ]
        for column, reason, mask in bad_values(self._plan, chunk):
            for position in np.flatnonzero(mask & ~bad)[:NUM_EXAMPLES]:
                where = chunk.where(column, int(position))
                told.append(f"{where}: {reason} ({chunk.column(column)[int(position)].as_py()!r})")
            bad |= mask
        if told:
            self._told = told[:NUM_EXAMPLES]
        batch = with_numbers(self._plan, chunk)
        if not bad.any():
            return replace(chunk, batch=batch)
        rows, batch = chunk.rows[~bad], batch.filter(pa.array(~bad))
        return replace(chunk, rows=rows, batch=batch, num_bad=chunk.num_bad + int(bad.sum()))
