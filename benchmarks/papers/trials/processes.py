"""Trials in processes of their own on this host: one CPU and one gloo rank each."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.papers.trials.run_trial import Stopped, machine, path_of, read_record, run_trial
from benchmarks.papers.trials.trial import AnyTrial
from embeddings.durable_files import write_json
from trainer.launch.on_host import leave
from trainer.runs.events import utc_now

_PR_SET_PDEATHSIG = 1


def run_in_processes(trials: Sequence[AnyTrial], out: Path, workers: int, command: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each trial as it ends, ``workers`` at a time.

    A trial whose process dies has failed. Those that run end with this generator, or with this process.
    """
    # Libraries read it when they are loaded: a trial has one CPU.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A process for each: what one leaves behind in memory or in threads is not the next one's.
    context = multiprocessing.get_context("spawn")
    waiting = deque(trials)
    running: dict[Any, tuple[Any, AnyTrial]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.popleft()
                process = context.Process(target=_run, args=(trial, out.resolve(), command))
                process.start()
                running[process.sentinel] = process, trial
            for sentinel in wait(list(running)):
                process, trial = running.pop(sentinel)
                process.join()
                record = read_record(trial, out) if process.exitcode == 0 else None
                yield _lost(trial, out, command, process.exitcode) if record is None else record
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _run(trial: AnyTrial, out: Path, command: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != os.getppid():
        leave(1)  # it died before this process said that it would follow it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which asks this one to stop
    with contextlib.suppress(Stopped):
        run_trial(trial, out, command)
        leave(0)
    leave(1)


def _lost(trial: AnyTrial, out: Path, command: str, code: int) -> dict[str, Any]:
    """Write and return the record of a trial whose process could not write its own."""
    record: dict[str, Any] = {
        "name": trial.name, "key": trial.key, "state": "failed", "error": f"its process ended with exit code {code}",
        "metrics": [], "alpha": None, "seconds": 0.0, "finished_at": utc_now(), "command": command,
        "machine": machine(), "packages": {}, "git_commit": None, "dataset_fingerprint": None,
    }  # fmt: skip
    path_of(trial, out).parent.mkdir(parents=True, exist_ok=True)
    write_json(path_of(trial, out), record)
    return record
