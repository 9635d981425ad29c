"""``python -m trainer.launch.entrypoint --run-dir D``: one attempt at a job, in a process of its own.

What starts it and the exit codes: see trainer.runs.run_process. Events go to ``D/events.jsonl``; the final state is in
``D/exit.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.driver import RunBusyError, StartRanks, execute, give_up
from trainer.runs.directory import Run, attempt_named, read_run
from trainer.runs.failures import LeaseLostError, ServiceAwayError, classify
from trainer.runs.protocol import (
    ATTEMPT_VARIABLE,
    EXIT_FAILED,
    EXIT_RETRYABLE,
    REPORT_TOKEN_VARIABLE,
    REPORT_URL_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    leave,
)
from trainer.runs.run_process import await_name
from trainer.runs.uplink import fetch_run
from trainer.runs.working_directory import working_directory

if TYPE_CHECKING:
    from trainer.data.prepare.by_tasks.tasks import Hosts

PROCESS_NAME = "evenkeel-run"
"""Name of the driver's process in `ps -o comm` and `top`; its ranks are called evenkeel-rank0 and so on."""
_PR_SET_CHILD_SUBREAPER, _PR_SET_NAME = 36, 15


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.launch.entrypoint", description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, help="the run directory, with run.json in it (default: one of this host's cache)"
    )
    given = parser.parse_args(arguments).run_dir
    if given is None and RUN_ID_VARIABLE not in os.environ:
        parser.error(f"give --run-dir, or the run's id as {RUN_ID_VARIABLE}")
    directory = (given or working_directory(os.environ[RUN_ID_VARIABLE], "driver")).resolve()
    if not await_name(directory):
        print(f"{directory}: the launcher died before it confirmed the start; exiting", file=sys.stderr)
        return EXIT_RETRYABLE
    libc = ctypes.CDLL(None)
    # This process, not init, adopts children of children that die, so that a walk down the process tree finds them.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
    try:
        _take_up(directory)
        run = read_run(directory)
    except LeaseLostError as error:
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
    try:
        run.fence()
        with _ranks(run) as start_ranks:
            return execute(run, start_ranks, _hosts(run))
    except (RunBusyError, LeaseLostError) as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED


def _ranks(run: Run) -> contextlib.AbstractContextManager[StartRanks]:
    """Return a context manager of the function that starts the ranks.

    For a run on this host it forks ranks, which wait, before this process has any thread.
    """
    from trainer.distributed.light_imports import import_torchrec

    import_torchrec()
    if run.ray_address is None:
        from trainer.launch.on_host import forked_ranks

        return forked_ranks(run)
    from trainer.launch.on_ray import start_ranks

    return contextlib.nullcontext(start_ranks)


def _hosts(run: Run) -> Hosts | None:
    """Return the hosts of the cluster that may prepare parts of the rows; None if the run has only this host."""
    if run.ray_address is None:
        return None
    from trainer.launch.tasks_on_ray import HostsOfCluster

    return HostsOfCluster(run)


def _take_up(directory: Path) -> None:
    """Fetch run.json from the service if the environment names a service, and check that it names the expected attempt.

    A cluster may start an attempt long after it was submitted.
    """
    if REPORT_URL_VARIABLE in os.environ:
        fetch_run(directory, os.environ[REPORT_URL_VARIABLE], os.environ[REPORT_TOKEN_VARIABLE])
    expected = os.environ.get(ATTEMPT_VARIABLE)
    if expected is not None and attempt_named(directory) != int(expected):
        raise LeaseLostError(f"{directory}: attempt {expected} was given up, run.json names another")


if __name__ == "__main__":
    # No exit hook, and no signal during one, may change the exit code.
    leave(main())
