"""``python -m trainer.run --run-dir D``: one attempt at a job, in Ray, in a process of its own (see trainer.launch).

Exit codes: see trainer.launch. What happens is told in ``D/events.jsonl``; the last word is ``D/exit.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

from trainer.driver import RunBusyError, execute, give_up
from trainer.failures import GivenUpError, ServiceAwayError, classify
from trainer.launch import (
    ATTEMPT_VARIABLE,
    EXIT_FAILED,
    EXIT_RETRYABLE,
    REPORT_TOKEN_VARIABLE,
    REPORT_URL_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    await_name,
)
from trainer.rundir import attempt_named, read_run
from trainer.uplink import fetch_run

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.run", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path, help="the run directory, with run.json in it")
    directory = parser.parse_args(arguments).run_dir.resolve()
    if not await_name(directory):
        print(f"{directory}: who launched this process died before it could say so: it leaves", file=sys.stderr)
        return EXIT_RETRYABLE
    # Children of children that die move to this process and not to init, so that a walk down the tree finds them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        _take_up(directory)
        run = read_run(directory)
    except GivenUpError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED
    except ServiceAwayError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_RETRYABLE
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return give_up(directory, classify(error), attempt_named(directory))
    os.environ.setdefault(RUN_ID_VARIABLE, run.run_id)
    os.environ[RUN_DIR_VARIABLE] = str(directory)
    from trainer.on_ray import start_ranks

    try:
        return execute(run, start_ranks)
    except (RunBusyError, GivenUpError) as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED


def _take_up(directory: Path) -> None:
    """What the environment says of an attempt that a cluster starts, perhaps long after it was submitted. Raises
    GivenUpError where another attempt, or none, has its place; ServiceAwayError where the service cannot be asked."""
    if REPORT_URL_VARIABLE in os.environ:
        fetch_run(directory, os.environ[REPORT_URL_VARIABLE], os.environ[REPORT_TOKEN_VARIABLE])
    expected = os.environ.get(ATTEMPT_VARIABLE)
    if expected is not None and attempt_named(directory) != int(expected):
        raise GivenUpError(f"{directory}: attempt {expected} was given up, run.json names another")


if __name__ == "__main__":
    code = main()
    # Ray is shut down by now: no exit hook, and no signal that comes during one, may change the code that was decided.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
