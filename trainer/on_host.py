"""Ranks on this host without Ray: one inside this process, several in spawned processes. They speak gloo, and
NCCL where they have GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from trainer.driver import RanksFailed
from trainer.rundir import Run, choose_backend
from trainer.worker import train_rank

_PR_SET_PDEATHSIG = 1


def start_ranks(run: Run) -> None:
    """Trains on ``resources.num_workers`` ranks. Raises RanksFailed."""
    num_workers = run.job.resources.num_workers
    backend = choose_backend(run.job.resources.gpus_per_worker)
    try:
        if num_workers == 1:
            with single_rank_group(backend):
                train_rank(str(run.directory))
            return
        with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
            arguments = (num_workers, backend, str(run.directory), f"file://{folder}/store")
            multiprocessing.spawn(_rank, arguments, num_workers)
    except Exception as error:
        raise RanksFailed(str(error)) from error


@contextlib.contextmanager
def single_rank_group(backend: str = "gloo") -> Iterator[None]:
    """A process group of one, where there is none yet: TorchRec asks for one also on a single rank."""
    if dist.is_initialized():
        yield
        return
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(rank: int, world_size: int, backend: str, directory: str, store: str) -> None:
    """A spawned rank's life. It dies with its parent; Ctrl-C is the parent's to handle."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    train_rank(directory)
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """Ends the process without the destructors of loaded libraries: all that matters is on disk by now, and one exit in
    about fifteen of a process that had used gloo was an abort ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def default_directory(name: str) -> Path:
    """Where ``evenkeel train`` keeps a run that was given no directory: ``$EVENKEEL_HOME/runs/NAME-N``, N fresh."""
    runs = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel")) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with contextlib.suppress(FileExistsError):
            (runs / f"{name}-{number}").mkdir()
            return runs / f"{name}-{number}"
        number += 1
