"""Names of files and variables, and exit codes, shared by a run and the process that starts it. Without torch."""

from __future__ import annotations

RUN_DIR_VARIABLE = "EVENKEEL_RUN_DIR"
PROCESS_FILE = "process.json"
LOG_FILE = "log.txt"
EXIT_FILE = "exit.json"
RUN_ID_VARIABLE = "EVENKEEL_RUN_ID"
LAUNCHED_VARIABLE = "EVENKEEL_RUN_LAUNCHED"
ATTEMPT_VARIABLE = "EVENKEEL_RUN_ATTEMPT"
STOP_SECONDS_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's: how long a run has from SIGTERM to SIGKILL."""
REPORT_URL_VARIABLE = "EVENKEEL_RUN_URL"
REPORT_TOKEN_VARIABLE = "EVENKEEL_RUN_TOKEN"

EXIT_SUCCEEDED = 0
EXIT_FAILED = 1
"""Trying again gives the same failure: bad data, a bad spec, a non-finite loss."""
EXIT_RETRYABLE = 75
"""The machinery failed, not the job (sysexits' EX_TEMPFAIL): a worker died, a cluster was not reached."""
EXIT_CANCELLED = 130
