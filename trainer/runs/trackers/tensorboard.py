"""Tracker that writes event files of TensorBoard with the package ``tensorboardX``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.runs.directory import Run
from trainer.runs.trackers.base import Point, TrackerUnusableError, parameters_of
from trainer.spec.tracking import TensorBoardTracking

FOLDER_VARIABLE = "EVENKEEL_TENSORBOARD_DIR"
FILES = "events.out.tfevents.*"
_LENGTH_BYTES, _CHECKSUM_BYTES = 8, 4


class TensorBoardTracker:
    """Tracker that writes a new file in each attempt. TensorBoard shows all files of a folder as one run."""

    def __init__(self, run: Run, spec: TensorBoardTracking):
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter
        except ImportError as error:
            raise TrackerUnusableError(f"{error.name} is not installed: pip install 'evenkeel[tensorboard]'") from error
        self._event = Event
        self.folder = folder_of(run)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._last = {
            value.tag: event.step
            for path in sorted(self.folder.glob(FILES))
            for event in _read(path, Event)
            for value in event.summary.value
            if value.HasField("simple_value")
        }
        # TensorBoard reads the files of a run in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{os.uname().nodename}.{os.getpid()}"
        self._writer = RecordWriter(str(self.folder / name))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not self._last:
            self._tell("job", yaml.safe_dump(parameters_of(run)))
        self._writer.flush()

    def last_steps(self) -> dict[str, int]:
        return dict(self._last)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            event = self._event(wall_time=point.time, step=point.step)
            event.summary.value.add(tag=point.name, simple_value=point.value)
            self._write(event)
        self._writer.flush()

    def end(self, state: str | None, tags: Mapping[str, str]) -> None:
        self._tell("end", yaml.safe_dump({"state": state or "killed", **tags}))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _tell(self, tag: str, text: str) -> None:
        from tensorboardX.summary import text as text_summary

        summary = text_summary(tag, f"```\n{text}\n```")
        self._write(self._event(wall_time=time.time(), summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def folder_of(run: Run) -> Path:
    """Return the folder of a run's event files, below FOLDER_VARIABLE of the environment or the run's directory."""
    below = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(below, run.job.name, run.run_id) if below else run.directory / "tensorboard"


def _read(path: Path, event: Any) -> Iterator[Any]:
    """Yield the complete events of a file. Its last event may be cut off, if a process was killed."""
    with open(path, "rb") as file:
        while len(head := file.read(_LENGTH_BYTES + _CHECKSUM_BYTES)) == _LENGTH_BYTES + _CHECKSUM_BYTES:
            size = int.from_bytes(head[:_LENGTH_BYTES], "little")
            record = file.read(size + _CHECKSUM_BYTES)
            if len(record) < size + _CHECKSUM_BYTES:
                return
            yield event.FromString(record[:size])
