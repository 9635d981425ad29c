"""Start and end of the process that sends a run's curves to trackers, called by the driver."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.runs.directory import Run

LAST_WORDS_SECONDS = 10.0
"""Longest time that an ended run's trackers may take for the last points."""
_START_SECONDS = 20.0
"""Further time for the process to start and exit, before it is killed."""


@contextlib.contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Send the curves of the run to its trackers while the block runs. Any failure only writes lines to the log.

    A separate process does it, so that neither the trackers' libraries nor a hanging server can disturb the run.
    """
    if not run.job.tracking:
        yield
        return
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-m", "trainer.runs.trackers.follow", str(run.directory)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    except OSError as error:
        print(f"no tracking: its process cannot be started: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        try:
            process.communicate(b"end\n", timeout=LAST_WORDS_SECONDS + _START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            print("no tracking: its process did not end and was killed", file=sys.stderr, flush=True)
