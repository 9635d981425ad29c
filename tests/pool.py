"""Persistent pools of gloo ranks for tests: importing torch takes seconds, so each world size pays it once per session.

``pool(2).run(function, *arguments)`` calls a module-level function on every rank and returns its results in rank order.
Ranks find the function by its file and name, so a test module needs no importable package. A rank that raises, dies or
hangs is a :class:`RankFailure` with its traceback; the other ranks, which may wait for it in a collective, are ended
with it, and the next run starts a fresh pool.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import inspect
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_SECONDS = 300.0
# Ranks that fail together report within this time of each other; past it the others are taken to wait for the dead one.
GRACE_SECONDS = 3.0
STUCK_SECONDS = 60.0


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not answer in time; the message holds their tracebacks."""


class Pool:
    """``world_size`` spawned processes that share one gloo process group."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="evenkeel-pool-")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Not multiprocessing.Process: a spawned one must import this file by name, and tests are not a package.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        # Ranks share the cores: one thread each.
        environment |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        for rank in range(world_size):
            here, there = socket.socketpair()
            command = [sys.executable, __file__, str(rank), str(world_size), self._directory.name, str(there.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, cwd=ROOT))
            there.close()
            self._pipes.append(Connection(here.detach()))
        self._started = False

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 300.0) -> list[Any]:
        """``function(*arguments)`` on every rank at once. Arguments and results are pickled."""
        if not self._started:
            self._collect(START_TIMEOUT_SECONDS, "starting")
            self._started = True
        name = f"{function.__module__}.{function.__qualname__}"
        if "<" in function.__qualname__:
            raise TypeError(f"{name} is not a module-level function, so ranks cannot find it")
        call = (inspect.getsourcefile(function), function.__qualname__, arguments, timeout_seconds)
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
                    code = self._processes[rank].wait(START_TIMEOUT_SECONDS)
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

    def _log(self, rank: int) -> str:
        path = Path(self._directory.name) / f"rank-{rank}.log"
        return path.read_text("utf-8", "replace")[-8000:] if path.exists() else ""

    def close(self) -> None:
        """Ends every rank. The pool cannot be used again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
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
    # Connection.send would hand tensors over as shared memory, which needs both ends to be multiprocessing's children.
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(rank: int, world_size: int, directory: str, pipe: Connection) -> None:
    """A rank's life: join the group, then answer calls until the parent is gone."""
    log = os.open(os.path.join(directory, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            path, name, arguments, timeout_seconds = _receive(pipe)
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(START_TIMEOUT_SECONDS, exit=True, file=sys.__stderr__)
        try:
            function: Any = _load(path, modules)
            for part in name.split("."):
                function = getattr(function, part)
            # Again, for the call alone: to load a test module takes seconds on a busy machine.
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=sys.__stderr__)
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            _send(pipe, answer)
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            _send(pipe, (False, f"the result of {name} cannot be pickled: {error}"))


def _load(path: str, modules: dict[str, ModuleType]) -> ModuleType:
    if path not in modules:
        spec = importlib.util.spec_from_file_location(f"rank_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Connection(int(sys.argv[4])))
