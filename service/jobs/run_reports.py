"""What runs on other machines report, written into the run directory here as if they had run in it: the same event
file, followed by the same runner. Who calls holds the job's row: no attempt writes after the next one has begun."""

from __future__ import annotations

import os
from pathlib import Path

from embeddings.durable_files import write_json
from trainer.runs.events import EVENTS_FILE
from trainer.runs.protocol import EXIT_FILE


def append_events(run_dir: Path, offset: int, lines: bytes) -> int:
    """Appends whole ``lines`` that belong at byte ``offset``; what of them is there already is left out, and nothing is
    written where something before them is missing. Returns where the file ends then. Durable on return; blocking."""
    descriptor = os.open(run_dir / EVENTS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = os.fstat(descriptor).st_size
        if offset > end:
            return end
        fresh = lines[end - offset :]
        while fresh:
            written = os.write(descriptor, fresh)
            end, fresh = end + written, fresh[written:]
        os.fsync(descriptor)
        return end
    finally:
        os.close(descriptor)


def write_exit(run_dir: Path, document: dict[str, object]) -> None:
    """The attempt's last word. Blocking."""
    write_json(run_dir / EXIT_FILE, document)
