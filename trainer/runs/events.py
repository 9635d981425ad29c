"""The event file of a run: ``events.jsonl`` in its run directory, one JSON object per line, fsynced, append-only.

The run writes it, and the control plane follows it. The file is the only channel from a run to the service, so either
side may crash without the other. This module does not import torch. Every event has ``time`` (RFC 3339 UTC),
``attempt`` and ``type``:

=============  ==========================================================================================
type           further fields
=============  ==========================================================================================
state          state: starting | running | publishing | succeeded | failed | cancelled
progress       epoch (from 1), epochs, step (in all), examples, examples_per_second, step_seconds, waited_seconds
               (for batches, this attempt's steps so far), starved (share of the wanted processor time that the rank
               with the least did not get), cores (that the ranks ran on, in the last 10 seconds), memory_bytes
               (resident, summed over the ranks), both absent while unknown, loss (mean of the epoch so far); with
               dataset.follow also files (read), files_behind, seconds_behind, late_files
preparation    stage: read | write, rows (done), total_rows (null where no file says it), rows_per_second
metric         epoch, split: train | validation | test, auc, logloss, ... (trainer.spec.evaluation), examples, users;
               split progressive: epoch is the number of the window;
               NAME_low and NAME_high of an interval; calibration: [{rows, prediction, share}] by bin;
               frequency_buckets: [{bucket, ids, min_count, max_count, norm, examples, auc}]
history        metrics: the metric events' fields of all epochs before the attempt's start; some of these epochs may
               have no metric event, if the host that was to report it is lost
comparison     version (served when the job started), differences: [{metric, slice, rows, served, candidate, low, high,
               popularity}], skipped (why there are none), seconds
publication    status: published | held | none, collection, version, reasons: [str], gate: [...], diagnosis,
               held_in_a_row, held_since, max_held, released, quality, proposed_canary
               (embeddings.refresh.publication.Publication); for a job
               that publishes repeatedly also step: the version's training step
error          code, message, remedy
begin          name of a phase that begins now; no training step is taken during a phase
phase          name of a phase that ends now (see trainer.runs.events.phase), seconds: its duration
lineage        dataset_fingerprint, spec_sha256, packages, git_commit, parent_version, warm_start, inherited,
               start_version, window (trainer.runs.lineage)
workers        number (of ranks, fewer than the attempt was to have), because
heartbeat      rank: 0 if rank 0 writes it, as it does while it exists; absent if the driver does
info           message, and any figures worth keeping (alpha taken, shares per rank, unknown share)
=============  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

EVENTS_FILE = "events.jsonl"
HEARTBEAT_SECONDS = 5.0
TERMINAL_STATES = ("succeeded", "failed", "cancelled")


class Event(NamedTuple):
    """One event and the byte offset just after it, from which reading can continue."""

    end: int
    fields: dict[str, Any]


class EventWriter:
    """Writer that appends events to ``run_dir/events.jsonl``. Safe to call from several threads of one process."""

    def __init__(self, run_dir: Path | str, attempt: int = 1):
        self._path = Path(run_dir) / EVENTS_FILE
        self._attempt = attempt
        self._lock = threading.Lock()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event and wait until it is on disk.

        Raises:
            OSError: the event could not be written, for example to a full disk, and is lost. Later events are intact.
        """
        event = {"time": utc_now(), "attempt": self._attempt, "type": kind, **fields}
        line = (json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if self._torn():
                line = b"\n" + line
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)

    def _torn(self) -> bool:
        """Return True if the file ends inside a line, because a write was interrupted by a kill or a full disk.

        Driver and rank 0 share the file, so its end is read before each write: the other process may have been
        interrupted.
        """
        size = os.fstat(self._descriptor).st_size
        return bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def phase(write: Callable[..., None], name: str) -> Iterator[None]:
    """Write an event ``begin`` before the block, and an event ``phase`` with its duration after it, unless it raises.

    ``name``: prepare, cluster, build (setup of a rank before training), evaluation, checkpoint or publish.
    """
    begun = time.monotonic()
    write("begin", name=name)
    yield
    write("phase", name=name, seconds=round(time.monotonic() - begun, 3))


def read_events(run_dir: Path | str, offset: int = 0) -> Iterator[Event]:
    """Yield the events that start at or after byte ``offset``.

    An unfinished last line is left for the next call; a broken line (a crash in the middle of a write) is skipped.
    """
    try:
        with open(Path(run_dir) / EVENTS_FILE, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(fields, dict) and "type" in fields:
                    yield Event(offset, fields)
    except FileNotFoundError:
        return


def whole_lines(path: Path, offset: int, size: int) -> bytes:
    """Return the whole lines of a file from byte ``offset`` on that fit into ``size`` bytes, but at least one line.

    An unfinished last line is left for the next call. The result is empty if there is no whole line, or no file.
    """
    try:
        with open(path, "rb") as file:
            while True:
                file.seek(offset)
                batch = file.read(size)
                end = batch.rfind(b"\n") + 1
                if end or len(batch) < size:
                    return batch[:end]
                size *= 2
    except FileNotFoundError:
        return b""


def utc_now() -> str:
    """Return the present time, as RFC 3339 in UTC with milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
