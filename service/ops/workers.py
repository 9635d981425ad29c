"""Several processes behind one listening socket; they are forked, so that they share imports and mapped vectors.

A worker that dies is replaced. SIGTERM and Ctrl-C end all workers properly; workers whose parent is killed end too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger("evenkeel")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
QUICK_SECONDS = 5.0
"""Lifetime below which a worker that dies counts as a failed start."""
MAX_QUICK_DEATHS = 5
"""Failed starts in a row after which all workers end."""
_PR_SET_PDEATHSIG = 1


def run(num_workers: int, work: Callable[[], int]) -> int:
    """Keep ``num_workers`` processes running ``work`` until a signal comes; return 0, or 1 if they fail to start."""
    started: dict[int, float] = {}
    stopping = False
    quick_deaths = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for pid in started:
            # A worker that has just ended is still in the list for a moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    # The garbage collector does not touch frozen objects, so workers continue sharing their memory.
    gc.collect()
    gc.freeze()
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        while started or not stopping:
            while len(started) < num_workers and not stopping:
                # A signal between the fork and the entry in the list would miss the new worker.
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    _work(work, parent)
                started[pid] = time.monotonic()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            if not started:
                break
            pid, status = os.wait()
            if pid not in started:  # an orphan, adopted because this is the first process of a container
                continue
            lived = time.monotonic() - started.pop(pid)
            if stopping:
                continue
            log.error("worker %d ended with %d after %.0f s", pid, os.waitstatus_to_exitcode(status), lived)
            quick_deaths = quick_deaths + 1 if lived < QUICK_SECONDS else 0
            if quick_deaths > MAX_QUICK_DEATHS:
                log.error("workers end as soon as they start: the log lines above have the reason")
                stop(signal.SIGTERM, None)
                for worker in started:
                    os.waitpid(worker, 0)
                return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _work(work: Callable[[], int], parent: int) -> None:
    """Run a worker, from the fork to its exit."""
    code = 1
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            code = work()
    except BaseException:
        log.exception("a worker failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
