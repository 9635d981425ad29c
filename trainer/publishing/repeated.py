"""Versions published while a job trains: the driver makes them from the newest checkpoint.

Each version belongs to a training step (embeddings.refresh.publish). A job publishes each step at most once, and steps
in ascending order. A new attempt first finishes a publication that an earlier attempt had begun when it was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from embeddings.refresh.publication import last_step
from embeddings.refresh.record import RefreshRecord
from embeddings.store import open_store
from trainer.checkpoint.format import Checkpoint, CheckpointError, checkpoints_in
from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.remote_checkpoints import show
from trainer.publishing.publish import publish_checkpoint
from trainer.runs.directory import Run
from trainer.runs.events import read_events
from trainer.runs.failures import LeaseLostError, classify, keep_traceback
from trainer.runs.uplink import fence

POLL_SECONDS = 0.5
RETRY_SECONDS = 60.0
"""Time until the next try after a failed publication, for jobs that publish by rows."""
PINNED = ".publishing.tmp"
"""File in a run's directory that names the checkpoint being published, so that retention spares it."""

Emit = Callable[..., None]


@contextlib.contextmanager
def publishing(run: Run, emit: Emit) -> Iterator[None]:
    """Publish while the block runs; leaving the block waits for the current publication.

    A failed publication does not end the run: it is reported as an event, and tried again when the next publication is
    due. ``emit`` writes events, from another thread.
    """
    publisher = _Publisher(run, emit)
    ended = threading.Event()
    thread = threading.Thread(target=publisher.work, args=(ended,), name="evenkeel-publications", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Publisher:
    """Publisher of a run's versions while it trains; it knows the step and time of the last version."""

    def __init__(self, run: Run, emit: Emit):
        assert run.job.publish is not None
        self._run, self._emit, self._spec = run, emit, run.job.publish
        self._store = open_store(run.store_url)
        self._step: int | None = None
        self._known: tuple[Path, Position] | None = None
        self._rows = 0
        self._at = time.monotonic()
        self._retry_at = self._at

    def work(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                self.publish_if_due()
            except LeaseLostError:
                return
            except Exception as error:
                keep_traceback(self._run.directory, error, classify(error))
                self._retry_at = time.monotonic() + (self._spec.every_seconds or RETRY_SECONDS)
                # The disk may be full for the event too.
                with contextlib.suppress(OSError):
                    self._emit("info", message=f"a version could not be published ({type(error).__name__}: {error}): "
                               "training continues, and the next due version is tried")  # fmt: skip

    def publish_if_due(self) -> None:
        """Publish the newest checkpoint if a publication is due and its step is later than the last version's."""
        if time.monotonic() < self._retry_at:
            return
        if self._step is None:
            self._go_on()
        if self._spec.every_seconds is not None and time.monotonic() - self._at < self._spec.every_seconds:
            return
        newest = self._newest()
        if newest is None:
            return
        path, position = newest
        if position.step <= (self._step or 0):
            return
        if self._spec.every_rows is not None and position.loss_count - self._rows < self._spec.every_rows:
            return
        with self._pinned(path) as checkpoint:
            if checkpoint is None:
                return
            self._emit("publication", **publish_checkpoint(self._run, checkpoint, self._store))
        self._step, self._rows, self._at = position.step, position.loss_count, time.monotonic()

    def _go_on(self) -> None:
        """Read the versions that earlier attempts have published, and finish an unfinished publication."""
        run = self._run
        fence(run)
        self._step = last_step(self._store, self._spec.collection, run.run_id, fence=lambda: fence(run))
        # All batches but the last are full, so this is the number of published rows.
        self._rows = max(0, self._step) * run.job.batch_size
        self._at = time.monotonic() - self._seconds_since_last()

    def _seconds_since_last(self) -> float:
        """Return the seconds since the job's last version was made; if it has none, since its first attempt began."""
        versions = self._store.collection(self._spec.collection).versions()
        times = [
            str(one["created_at"])
            for one in versions
            if one["job"] == self._run.run_id and RefreshRecord.of(one).training_step is not None
        ]
        if not times:
            times = [str(event.fields["time"]) for event in itertools.islice(read_events(self._run.directory), 1)]
        now = datetime.datetime.now(datetime.UTC)
        ages = [(now - datetime.datetime.fromisoformat(one)).total_seconds() for one in times]
        # An age may be negative, because the clocks of hosts differ.
        return max(0.0, min(ages, default=0.0))

    def _newest(self) -> tuple[Path, Position] | None:
        """Return the newest checkpoint and its position in the training."""
        run = self._run
        show(run.folders(run.checkpoints), run.checkpoints)
        found = checkpoints_in(run.checkpoints)
        if not found:
            return None
        if self._known is None or self._known[0] != found[0]:
            self._known = found[0], TrainingRecord.of(Checkpoint(found[0])).position
        return self._known

    @contextlib.contextmanager
    def _pinned(self, path: Path) -> Iterator[Checkpoint | None]:
        """Yield a verified copy of a checkpoint that retention does not remove; None if the checkpoint is gone."""
        folder = self._run.directory / PINNED
        shutil.rmtree(folder, ignore_errors=True)
        try:
            held: Checkpoint | None = None
            try:
                Checkpoint(path).verify()
                shutil.copytree(path, folder / path.name, copy_function=_link)
                held = Checkpoint(folder / path.name)
            except (CheckpointError, OSError):
                if path.exists():
                    raise
            yield held
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _link(source: str, target: str) -> Any:
    # A link is safe, because files of a checkpoint are never written to again. Copy if the file system has no links.
    try:
        os.link(source, target)
    except OSError:
        if not Path(source).exists():
            raise
        shutil.copy2(source, target)
    return target
