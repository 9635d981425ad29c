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
from trainer.failures import classify
from trainer.launch import EXIT_FAILED, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from trainer.rundir import attempt_named, read_run

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.run", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path, help="the run directory, with run.json in it")
    directory = parser.parse_args(arguments).run_dir.resolve()
    # Children of children that die move to this process and not to init, so that a walk down the tree finds them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        run = read_run(directory)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return give_up(directory, classify(error), attempt_named(directory))
    os.environ.setdefault(RUN_ID_VARIABLE, run.run_id)
    os.environ[RUN_DIR_VARIABLE] = str(directory)
    from trainer.on_ray import start_ranks

    try:
        return execute(run, start_ranks)
    except RunBusyError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED


if __name__ == "__main__":
    code = main()
    # Ray is shut down by now: no exit hook, and no signal that comes during one, may change the code that was decided.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
