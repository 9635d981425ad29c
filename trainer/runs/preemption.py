"""``python -m trainer.runs.preemption``: ask the run of this pod to stop, and wait until it has ended.

Kubernetes calls it before it ends a pod of a run (preStop hook), within the pod's grace period. The ranks write a
checkpoint, and the run continues in its next attempt. Environment variables name the run and the grace period.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from trainer.runs.directory import Run, read_run
from trainer.runs.events import EVENTS_FILE
from trainer.runs.protocol import ATTEMPT_VARIABLE, EXIT_FILE, RUN_DIR_VARIABLE, STOP_SECONDS_VARIABLE

_POLL_SECONDS = 0.2
_DEFAULT_SECONDS = 60.0
_SILENT_SECONDS = 30.0
"""Seconds without an event after which a run counts as dead; heartbeats come every 5 s."""


def main() -> int:
    """Ask the attempt to stop; return 0 once it has ended or been replaced, 1 if it still works after its time."""
    try:
        run = read_run(Path(os.environ[RUN_DIR_VARIABLE]))
    except (KeyError, ValueError) as error:
        # The pod ends in any case, so a message is enough.
        print(f"no run was asked to stop before its machine shuts down: {error}", file=sys.stderr)
        return 0
    deadline = time.monotonic() + float(os.environ.get(STOP_SECONDS_VARIABLE, _DEFAULT_SECONDS))
    if str(run.attempt) != os.environ.get(ATTEMPT_VARIABLE, str(run.attempt)):
        return 0
    if _is_at_work(run):
        run.ask_to_stop("its machine shuts down")
    while _is_at_work(run):
        if time.monotonic() > deadline:
            return 1
        time.sleep(_POLL_SECONDS)
    return 0


def _is_at_work(run: Run) -> bool:
    """Return True if the attempt has begun, has recent heartbeats of its driver, and has not ended."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads((run.directory / EXIT_FILE).read_text("utf-8"))["attempt"] == run.attempt:
            return False
    try:
        silent_seconds = time.time() - (run.directory / EVENTS_FILE).stat().st_mtime
    except OSError:
        return False
    return silent_seconds < _SILENT_SECONDS and run.still_current()


if __name__ == "__main__":
    sys.exit(main())
