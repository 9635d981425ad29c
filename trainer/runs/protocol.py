"""Names of files and environment variables, and exit codes, shared by a run and the process that starts it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

RUN_DIR_VARIABLE = "EVENKEEL_RUN_DIR"
PROCESS_FILE = "process.json"
LOG_FILE = "log.txt"
EXIT_FILE = "exit.json"
RUN_ID_VARIABLE = "EVENKEEL_RUN_ID"
LAUNCHED_VARIABLE = "EVENKEEL_RUN_LAUNCHED"
ATTEMPT_VARIABLE = "EVENKEEL_RUN_ATTEMPT"
STOP_SECONDS_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's variable for the seconds between SIGTERM and SIGKILL when it stops a run."""
REPORT_URL_VARIABLE = "EVENKEEL_RUN_URL"
REPORT_TOKEN_VARIABLE = "EVENKEEL_RUN_TOKEN"

EXIT_SUCCEEDED = 0
EXIT_FAILED = 1
"""Exit code of a failure that a retry would repeat: bad data, a bad spec, a non-finite loss."""
EXIT_RETRYABLE = 75
"""Exit code of a failure of the infrastructure, such as a dead worker; a retry may succeed (EX_TEMPFAIL)."""
EXIT_ENVIRONMENT = 78
"""Exit code of a run that a cluster started with a Python that lacks this package or what it needs."""
EXIT_CANCELLED = 130


def leave(code: int) -> NoReturn:
    """End the process without the destructors of loaded libraries.

    All that matters is on disk by now, and one exit in about fifteen of a process that had used gloo was an abort
    ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
