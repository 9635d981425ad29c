"""Persistent pools of gloo ranks for tests: forked once a session for each world size, and again after a failure.

``pool(2).run(function, *arguments)`` calls a module-level function on every rank and returns its results in rank order.
Ranks import it by name, as pickle does. A rank that raises, dies or hangs is a :class:`RankFailure` with its
traceback; the other ranks, which may wait for it in a collective, are ended with it, and the next run starts a fresh
pool.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support import forked

START_TIMEOUT_SECONDS = 300.0
# Ranks that fail together report within this time of each other; past it the others are taken to wait for the dead one.
GRACE_SECONDS = 3.0
STUCK_SECONDS = 60.0


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not answer in time; the message holds their tracebacks."""


class Pool:
    """``world_size`` processes that share one gloo process group."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="evenkeel-pool-")
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            here, there = multiprocessing.Pipe()
            arguments = (rank, world_size, self._directory.name, there)
            self._processes.append(forked.start(_serve, *arguments, log=self._log_of(rank)))
            there.close()
            self._pipes.append(here)
        self._started = False

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300.0) -> list[Any]:
        """``function(*arguments)`` on every rank at once. Arguments and results are pickled."""
        if not self._started:
            self._collect(START_TIMEOUT_SECONDS, "starting")
            self._started = True
        name = f"{function.__module__}.{function.__qualname__}"
        if "<" in function.__qualname__:
            raise TypeError(f"{name} is not a module-level function, so ranks cannot find it")
        call = (function, arguments, timeout_seconds)
        for rank, pipe in enumerate(self._pipes):
            try:
                _send(pipe, call)
            except OSError:
                self.close()
                raise RankFailure(f"rank {rank} died before {name} was called\n{self._log(rank)}") from None
        return self._collect(timeout_seconds, name)

    def _collect(self, timeout_seconds: float, name: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        # A hanging rank dumps its own stacks and ends when the time is over: this is for one that can't even do that.
        deadline = time.monotonic() + timeout_seconds + STUCK_SECONDS
        waiting = dict(enumerate(self._pipes))
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait(list(waiting.values()), remaining)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    succeeded, value = _receive(waiting.pop(rank))
                except (EOFError, OSError):
                    self._processes[rank].join(START_TIMEOUT_SECONDS)
                    code = self._processes[rank].exitcode
                    succeeded, value = False, f"process ended with exit code {code}\n{self._log(rank)}"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures or waiting:
            for rank in waiting:
                failures.setdefault(rank, f"no answer (hung, or waiting for another rank)\n{self._log(rank)}")
            self.close()
            told = "\n".join(f"--- rank {rank} of {self.world_size}\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailure(f"{name} failed\n{told}")
        return [results[rank] for rank in range(self.world_size)]

    def _log_of(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank-{rank}.log"

    def _log(self, rank: int) -> str:
        path = self._log_of(rank)
        return path.read_text("utf-8", "replace")[-8000:] if path.exists() else ""

    def close(self) -> None:
        """Ends every rank. The pool cannot be used again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()
        if _pools.get(self.world_size) is self:
            del _pools[self.world_size]


_pools: dict[int, Pool] = {}


def pool(world_size: int) -> Pool:
    """The session's pool of this world size, started on first use and again after a failure."""
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size]


def close_all() -> None:
    for running in list(_pools.values()):
        running.close()


atexit.register(close_all)


def _send(pipe: Connection, value: Any) -> None:
    # Connection.send would hand tensors over as shared memory, which ends with the process that made it.
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(rank: int, world_size: int, directory: str, pipe: Connection) -> None:
    """A rank's life: join the group, then answer calls until the parent is gone."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=START_TIMEOUT_SECONDS),
        )
        _send(pipe, (True, None))
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))
        return
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(START_TIMEOUT_SECONDS, exit=True, file=sys.__stderr__)
        try:
            function, arguments, timeout_seconds = pickle.loads(call)
            # Again, for the call alone: to import a test module takes seconds on a busy machine.
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=sys.__stderr__)
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            _send(pipe, answer)
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            _send(pipe, (False, f"the result of {function.__qualname__} cannot be pickled: {error}"))
