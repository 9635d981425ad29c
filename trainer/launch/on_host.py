"""Ranks on this host: in this process, in spawned processes, or in forked processes.

For ``evenkeel train`` one rank trains in this process, and several ranks in spawned processes. For a run of the service
each rank is forked from the run's process. Ranks use gloo, and NCCL if they have GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from trainer.launch.driver import RanksFailed, StartRanks
from trainer.launch.worker import train_rank
from trainer.runs.directory import Run, choose_backend, read_run
from trainer.runs.protocol import leave

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore

NICENESS_VARIABLE = "EVENKEEL_RANK_NICENESS"
DEFAULT_NICENESS = 0
"""Niceness of a service's ranks. If it is higher, other programs starve the ranks (docs/reports/control_plane.md)."""
KILLED_FIRST = "1000"
"""A rank's oom_score_adj: the kernel's out-of-memory killer takes ranks before the service and other processes."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def start_ranks(run: Run) -> None:
    """Train on ``resources.num_workers`` ranks.

    Raises:
        RanksFailed: a rank ended with an error.
    """
    if run.job.resources.num_workers == 1:
        with _told_as_failed(), single_rank_group(choose_backend(run.job.resources.gpus_per_worker)):
            train_rank(str(run.directory))
        return
    with _waiting_ranks(run, "spawn", None) as go:
        go(run)


def forked_ranks(run: Run) -> contextlib.AbstractContextManager[StartRanks]:
    """Return a context manager that starts waiting ranks, and yields the function that lets them train.

    Forked ranks need no imports of their own. All ranks end with the block, also if the function was not called.

    Call it before this process has started a thread: a fork copies only the calling thread. A forked process cannot use
    CUDA if its parent has initialized it, as libraries do when they are imported. So ranks with GPUs are spawned
    instead, and do their imports while the rows are prepared.
    """
    niceness = int(os.environ.get(NICENESS_VARIABLE, DEFAULT_NICENESS))
    return _waiting_ranks(run, "spawn" if run.job.resources.gpus_per_worker else "fork", niceness)


@contextlib.contextmanager
def _waiting_ranks(run: Run, method: str, niceness: int | None) -> Iterator[StartRanks]:
    """Start ranks that wait, and yield the function that lets them train.

    ``method``: start method of multiprocessing. ``niceness``: see :func:`_give_way`; None: the same as this process.
    """
    resources, store = run.job.resources, run.directory / f"ranks-{run.attempt}"
    for left in run.directory.glob("ranks-*"):  # left by an attempt that was killed
        left.unlink(missing_ok=True)
    # A semaphore, because an event's set() waits for ever if a waiting process was killed.
    begin = multiprocessing.get_context(method).Semaphore(0)
    backend = choose_backend(resources.gpus_per_worker)
    arguments = (resources.num_workers, backend, str(run.directory), f"file://{store}", begin, niceness)
    ranks = multiprocessing.start_processes(_rank, arguments, resources.num_workers, join=False, start_method=method)

    def go(_run: Run) -> None:
        for _ in ranks.processes:
            begin.release()
        with _told_as_failed():
            # If a rank fails, the others are not waited for: they would take SIGTERM for a preemption.
            while not ranks.join(grace_period=0):
                pass

    try:
        yield go
    finally:
        for rank in ranks.processes:
            rank.kill()
            rank.join()
        store.unlink(missing_ok=True)


@contextlib.contextmanager
def _told_as_failed() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        died = isinstance(error, multiprocessing.ProcessExitedException)
        raise RanksFailed(str(error), died) from error


@contextlib.contextmanager
def single_rank_group(backend: str = "gloo") -> Iterator[None]:
    """Make a process group of one rank for the block, unless there is a group: TorchRec needs one even for one rank."""
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(
    rank: int, world_size: int, backend: str, directory: str, store: str, begin: Semaphore, niceness: int | None
) -> None:
    """Run a rank in its own process, which dies with its parent, and ignores Ctrl-C, which the parent handles."""
    parent = multiprocessing.parent_process()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, f"evenkeel-rank{rank}".encode(), 0, 0, 0)
    if parent is not None and parent.pid != os.getppid():
        leave(1)  # the parent died before this process asked to die with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A service manager sends SIGTERM to every process of a group: write a checkpoint first, as the driver asks for.
    signal.signal(signal.SIGTERM, lambda number, frame: read_run(directory).ask_to_stop("SIGTERM"))
    if niceness is not None:
        _give_way(niceness)
    begin.acquire()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    train_rank(directory)
    dist.destroy_process_group()
    leave(0)


def _give_way(niceness: int) -> None:
    """Lower this process's priority by ``niceness``, and make it the first to be killed if memory runs out."""
    if niceness:
        os.nice(niceness)
        with contextlib.suppress(OSError):
            # With sched_autogroup the kernel shares processors among sessions, and niceness only counts within one.
            Path("/proc/self/autogroup").write_text(str(min(niceness, 19)), "ascii")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(KILLED_FIRST, "ascii")


def default_directory(name: str) -> Path:
    """Make and return a new default directory of a run, ``$EVENKEEL_HOME/runs/NAME-N`` with the first unused N."""
    runs = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel")) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with contextlib.suppress(FileExistsError):
            (runs / f"{name}-{number}").mkdir()
            return runs / f"{name}-{number}"
        number += 1
