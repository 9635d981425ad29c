"""Writes the reports of runs on other machines into the run directory here, as if they had run in it.

The event file is the same, and so is the runner that follows it. The caller must hold the job's row, so that no attempt
writes after the next one has begun.
"""

from __future__ import annotations

import os
from pathlib import Path

from embeddings.durable_files import write_json
from trainer.runs.events import EVENTS_FILE
from trainer.runs.protocol import EXIT_FILE


def append_events(run_dir: Path, offset: int, lines: bytes) -> int:
    """Append whole ``lines`` that belong at byte ``offset`` and return where the file then ends.

    Lines that exist already are skipped, and nothing is written if something before them is missing. The file is
    durable on return; blocking.
    """
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
    """Write the attempt's ``exit.json``; blocking."""
    write_json(run_dir / EXIT_FILE, document)
