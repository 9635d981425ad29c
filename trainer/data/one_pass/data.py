"""Data of a one-pass job, which trains on rows as they are read: its prepared folder, and its batches."""

from __future__ import annotations

import bisect
import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer.data.batches.batch import Batch
from trainer.data.batches.batches import BatchReader
from trainer.data.batches.loss_shares import LossShares
from trainer.data.batches.order import rank_slice, shuffled
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.hashing import Int64s
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import Numeric, open_numeric
from trainer.data.columns.values import Kind
from trainer.data.errors import DataError
from trainer.data.one_pass.folder_rows import UNSEEN_SECONDS, FolderRows
from trainer.data.one_pass.following import (
    FILES,
    Followed,
    FollowingReader,
    PieceRows,
    finder,
    listener,
    read_pieces,
    write_pieces,
)
from trainer.data.one_pass.position import Place
from trainer.data.one_pass.rows import MISSING, Rows
from trainer.data.one_pass.topic_rows import TopicRows
from trainer.data.one_pass.windows import RowReader, Window, WindowReader
from trainer.data.prefetch import PREFETCH_BATCHES, Prefetched, read_ahead
from trainer.data.prepare.plan import DataPlan, make_plan
from trainer.data.prepare.split import SPLIT_NAMES, TRAIN
from trainer.data.sources.followed_folder import COLUMNS_FILE, FollowedFolder
from trainer.data.sources.source import Source
from trainer.data.sources.topics.followed_topic import FollowedTopic
from trainer.spec import DatasetSpec, Follow, JobSpec

SEGMENTS_SUFFIX = ".segments.jsonl"
"""Suffix of the file, in the parent folder of a run's data, that records the segments of a topic."""
UNKNOWN_STEPS = 1 << 62
"""Placeholder for the number of steps, which is unknown before the last row is read."""


def segments_file(directory: Path) -> Path:
    """Return the path of the file that records the segments of a topic, in the parent folder of a run's data."""
    return directory.with_name(directory.name + SEGMENTS_SUFFIX)


GlobalBatch = tuple[Rows, int, int, Place]
"""A batch of all ranks: some rows, the first to take, how many to take, and where reading continues."""


class OnePassData(PreparedData):
    """Batches of rows that are read once, in the order of the files, while they are trained on.

    Every rank reads all rows and takes its slice of each batch; so it has the ids of the whole batch, which dynamic
    tables need. Training rows are shuffled inside a window, and batches may cross the borders of windows.
    """

    place: Place
    """Beginning of the window that has the next row to train on."""
    _windows: RowReader
    followed: Followed | None = None
    """The followed folder or topic; None on other ranks than 0, and for jobs that follow nothing."""
    _pieces: PieceRows

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        super().__init__(directory, manifest)
        self._files = manifest["files"]
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Messages for the job's owner."""

    @classmethod
    def of(cls, directory: Path | str, dataset: DatasetSpec, job: JobSpec) -> OnePassData:
        """Open the folder that :func:`trainer.data.prepare.preparation.prepare` wrote for a one-pass job.

        Raises:
            DataError: the folder holds no prepared data, or the files do not fit the dataset.
        """
        data = cls.open(directory)
        numeric = () if data.numeric_path is None else open_numeric(data.numeric_path)
        if job.dataset.follow is None:
            plan = data._as_begun(make_plan(dataset, job))
            data._windows = WindowReader(plan, data._files, data.keys, numeric)
        else:
            of_folder = dataset.messages is None
            plan = make_plan(dataset, job, Source(str(data.directory / COLUMNS_FILE)) if of_folder else None)
            data._windows = data._following(data._as_begun(plan), job.dataset.follow, numeric)
        data.begin(Place())
        return data

    def _as_begun(self, plan: DataPlan) -> DataPlan:
        """Return the plan with the kinds of ids, integers or strings, that the prepared tables have."""
        kinds: dict[str, Kind] = {name: "string" if self.id_map(name).is_text else "int" for name in self.tables}
        return replace(plan, kinds=plan.kinds | kinds)

    def _following(self, plan: DataPlan, follow: Follow, numeric: Sequence[Numeric]) -> FollowingReader:
        """Return the reader of the followed folder or topic. Rank 0 finds its pieces and announces them."""
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        words = None if is_alone else dist.distributed_c10d._get_default_store()
        listeners = range(1, 1 if is_alone else dist.get_world_size())
        uri, messages = plan.dataset.uri, plan.dataset.messages
        if words is not None and dist.get_rank() > 0:
            self._pieces = FolderRows(plan, UNSEEN_SECONDS) if messages is None else TopicRows(plan)
            take = listener(words, dist.get_rank(), uri, follow)
            return FollowingReader(plan, self.keys, numeric, take, self._pieces)
        if messages is None:
            self._pieces, self.followed = FolderRows(plan, 0.0), FollowedFolder(uri, follow, self.notes.put)
        else:
            self._pieces = TopicRows(plan, self.notes.put)
            self.followed = FollowedTopic(uri, messages, follow, segments_file(self.directory), self.notes.put)
        return FollowingReader(plan, self.keys, numeric, finder(self.followed, words, listeners), self._pieces)

    def begin(self, place: Place) -> None:
        """Set the position from which training continues."""
        self.place = place
        counts = place.examples if place.is_end else (0, 0, 0)
        self.num_examples = dict(zip(SPLIT_NAMES, counts, strict=True))

    def begin_files(self, checkpoint_files: Path | None) -> None:
        """Continue after the pieces in a checkpoint's file :data:`FILES`; has an effect on rank 0 only."""
        if self.followed is not None and checkpoint_files is not None:
            self.followed.begin(read_pieces(checkpoint_files))

    def write_files(self, directory: Path, step: int) -> dict[str, Path]:
        """Write the extra files of a checkpoint after ``step`` steps; return their paths by their names in it."""
        if self.followed is None:
            return {}
        is_begun = self.place.row > 0 or step * self.batch_size > self.place.examples[TRAIN]
        directory.mkdir(parents=True, exist_ok=True)
        write_pieces(self.followed, self.place.file if is_begun else self.place.file - 1, directory / FILES)
        return {FILES: directory / FILES}

    def lag(self) -> dict[str, float | int]:
        """Return figures, for the job's events, on the lag of training behind the followed folder or topic.

        Empty on other ranks than 0, and for jobs that follow nothing.
        """
        if self.followed is None:
            return {}
        bad = {"bad_rows": self.place.bad} if isinstance(self._pieces, TopicRows) else {}
        return self.followed.figures(self.place.file) | bad

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch; :data:`UNKNOWN_STEPS` before the last row is read."""
        return -(-self.num_examples["train"] // self.batch_size) if self.place.is_end else UNKNOWN_STEPS

    def train_batches(
        self, epoch: int, start_step_in_epoch: int = 0, rank: int = 0, world_size: int = 1, micro_batches: int = 1
    ) -> Prefetched[Batch]:
        """Return the batches from a step on; the step's first row must lie in the window that begins at :attr:`place`.

        See :meth:`PreparedData.train_batches`. Reading can continue after a batch at its :attr:`Batch.place`.
        """
        stopped = threading.Event()
        steps = self._global_batches(epoch, start_step_in_epoch, self.place, stopped)
        batches = self._batches_of(steps, start_step_in_epoch, rank, world_size, micro_batches)
        return read_ahead(batches, PREFETCH_BATCHES, on_close=stopped.set)

    def eval_batches(
        self, split: str, batch_size: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Prefetched[Batch]:
        """Return the batches of a held-out split, whose rows are read again.

        Call it only after the last row was trained on.
        """
        return read_ahead(self._held_out(split, batch_size or self.batch_size, rank, world_size), PREFETCH_BATCHES)

    def all_windows(self) -> Iterator[Window]:
        """Yield the windows of all rows, from the first row on."""
        return self._windows.windows(Place(), threading.Event())

    # --- training ----------------------------------------------------------------------------------------------------

    def _batches_of(
        self, steps: Iterator[GlobalBatch], step: int, rank: int, world_size: int, micro_batches: int
    ) -> Iterator[Batch]:
        for rows, start, size, place in steps:
            reader, keys = BatchReader(self, rows), self._id_keys(rows, start, start + size)
            shares = None
            if self.tasks or rows.row_weights is not None:
                shares = LossShares(rows.labels if self.tasks else None, rows.row_weights)
            for part in range(micro_batches):
                begin, end = rank_slice(size, part, micro_batches)
                first, last = (begin + bound for bound in rank_slice(end - begin, rank, world_size))
                mine = np.arange(start + first, start + last)
                batch = reader.batch(mine, first, size, step, step * self.batch_size + first)
                if shares is not None:
                    of_rows = shares.of(mine, np.arange(start, start + size))
                    batch = replace(batch, shares=torch.from_numpy(of_rows))
                yield replace(batch, part_offset=begin, id_keys=keys, place=place, raw_ids=rows.raw_ids)
            step += 1

    def _global_batches(self, epoch: int, step: int, place: Place, stopped: threading.Event) -> Iterator[GlobalBatch]:
        """Yield the global batches from ``step`` on; the window of that step's first row must begin at ``place``."""
        # A batch is yielded once a row after it, or the end, was read, because then the place after it is known.
        if place.is_end:
            return
        size, at = self.batch_size, step * self.batch_size
        rows: Rows | None = None
        places: list[Place] = []
        begin = 0
        with contextlib.closing(read_ahead(self._windows.windows(place, stopped))) as windows:
            for window in windows:
                mine = np.flatnonzero(window.sides == TRAIN)
                train = window.rows.take(mine[shuffled(self.seed, epoch, window.place.window, len(mine))])
                if not places and at > window.place.examples[TRAIN]:
                    train = train.take(np.arange(at - window.place.examples[TRAIN], len(train)))
                places, place = [*places, window.place], window.after
                rows = train if rows is None else Rows.joined([rows.take(np.arange(begin, len(rows))), train])
                begin = 0
                del train, window
                while len(rows) - begin > size:
                    at += size
                    # Windows without training rows begin at the same training row as the next window: take the last.
                    number = bisect.bisect_right(places, at, key=lambda one: one.examples[TRAIN]) - 1
                    places = places[number:]
                    yield rows, begin, size, places[0]
                    begin += size
        if rows is None or not place.examples[TRAIN]:
            raise DataError(
                "has no rows",
                where=f"dataset '{self._windows.name}', training split",
                remedy="check evaluation.split, or add data",
            )
        yield rows, begin, len(rows) - begin, replace(place, is_end=True)

    def _id_keys(self, rows: Rows, start: int, stop: int) -> Mapping[str, Int64s]:
        """Return {table: hashes of all ids in rows ``start`` to ``stop``, excluded}, without missing ids."""
        found: dict[str, list[Int64s]] = {name: [] for name in self.tables}
        for key, column in zip(self.keys, rows.columns, strict=True):
            keys = column.part(start, stop).values if isinstance(column, Jagged) else column[start:stop]
            found[key.table].append(keys[keys != MISSING])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    # --- held-out rows -----------------------------------------------------------------------------------------------

    def _held_out(self, split: str, batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        left, step = self.num_examples[split], 0
        rows: Rows | None = None
        with contextlib.closing(read_ahead(self.all_windows())) as windows:
            while left:
                size = min(batch_size, left)
                while rows is None or len(rows) < size:
                    more = self._of_split(next(windows, None), split)
                    rows = more if rows is None else Rows.joined([rows, more])
                reader = BatchReader(self, rows)
                first, last = rank_slice(size, rank, world_size)
                yield reader.batch(np.arange(first, last), first, size, step, step * batch_size)
                rows = rows.take(np.arange(size, len(rows)))
                left, step = left - size, step + 1

    def _of_split(self, window: Window | None, split: str) -> Rows:
        if window is None:
            raise DataError(
                f"has fewer rows in the split {split} than when they were trained on",
                where=f"dataset '{self._windows.name}'",
                remedy="start the job again, and do not change the files until it has ended",
            )
        return window.rows.take(np.flatnonzero(window.sides == SPLIT_NAMES.index(split)))
