"""Processes forked from one that has imported torch and the trainer, which takes seconds; a fork takes none.

The one they are forked from is started on first use and ends with the session. It computes nothing, so it has no
threads that a fork would lose. Its environment is that of the first use; a fork takes the caller's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from trainer.runs.protocol import RUN_DIR_VARIABLE
from trainer.runs.warm_pool import LONGEST_PATH

_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = [
    "pytest", "hypothesis", "torch.distributed", "torchrec", "trainer.launch.on_host", "trainer.launch.driver",
    # What forks of tests/service/forked_service.py need: no more than two seconds for both.
    "trainer.launch.fork_server", "tests.service.service_imports",
]  # fmt: skip
_started: weakref.WeakSet[ForkServerProcess] = weakref.WeakSet()
# They share the cores: one thread each. Read when torch is imported.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Room where /proc shows a process's environment, for what marks one as a run's (trainer.launch.fork_server). Last.
_ROOM = {RUN_DIR_VARIABLE: " " * LONGEST_PATH}


def start(function: Callable[..., Any], *arguments: Any, log: Path) -> ForkServerProcess:
    """A process that calls the module-level ``function``, with one thread, and writes what it says to ``log``."""
    ensure_running()
    sys.audit("os.fork")  # tests/conftest.py counts who starts processes
    process = _CONTEXT.Process(target=_call, args=(log, dict(os.environ), function, arguments))
    process.start()
    _started.add(process)
    return process


def ensure_running() -> None:
    """Start the process that others are forked from, if there is none yet."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    with _set(_ENVIRONMENT | _ROOM):
        forkserver.ensure_running()


def _end_all() -> None:
    """What a test that failed has left would be waited for, for ever, when the session ends."""
    for process in [*_started]:
        if process.is_alive():
            process.kill()


atexit.register(_end_all)


def barrier(parties: int) -> Barrier:
    """For this process and what it starts here."""
    return _CONTEXT.Barrier(parties)


def _call(log: Path, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # Held by this process, it would keep the one that it is forked from when the session was killed. Both end then.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    gc.freeze()  # a collection does not touch what was imported before: it stays shared, and takes no time
    os.environ.clear()
    os.environ.update(environment | _ENVIRONMENT)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = function(*arguments)
    sys.stdout.flush()
    if isinstance(code, int):
        sys.exit(code)


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
