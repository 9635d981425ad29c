"""``python -m trainer.runs.notice``: tell the run of this pod that its machine goes, and wait until it has ended.

Kubernetes runs it before it ends a pod of a run (preStop), within the pod's grace: the ranks write a checkpoint and the
run goes on as the next attempt. Which run that is, and how long it has, says the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from trainer.runs.directory import Run, read_run
from trainer.runs.protocol import ATTEMPT_VARIABLE, EXIT_FILE, RUN_DIR_VARIABLE, STOP_SECONDS_VARIABLE

_POLL_SECONDS = 0.2
_DEFAULT_SECONDS = 60.0


def main() -> int:
    """Return 0 once the attempt has ended or is another one already, 1 if it has not within its time."""
    try:
        run = read_run(Path(os.environ[RUN_DIR_VARIABLE]))
    except (KeyError, ValueError) as error:
        # The pod ends in any case: there is nobody to tell.
        print(f"no run is told that its machine goes: {error}", file=sys.stderr)
        return 0
    deadline = time.monotonic() + float(os.environ.get(STOP_SECONDS_VARIABLE, _DEFAULT_SECONDS))
    if str(run.attempt) != os.environ.get(ATTEMPT_VARIABLE, str(run.attempt)):
        return 0
    if not _has_ended(run):
        run.ask_to_stop("its machine goes")
    while not _has_ended(run):
        if time.monotonic() > deadline:
            return 1
        time.sleep(_POLL_SECONDS)
    return 0


def _has_ended(run: Run) -> bool:
    try:
        return bool(json.loads((run.directory / EXIT_FILE).read_text("utf-8"))["attempt"] == run.attempt)
    except (OSError, ValueError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main())
