"""The service's command, and what it forks runs from, as forks of one that imported them (tests/support/forked.py).

``evenkeel serve`` that is started takes 2.5 seconds of a processor, most of them imports and route models; the process
from which runs are forked (trainer/runs/warm_pool.py) takes four more. As forks they are the same code in processes of
their own, which take a tenth of it. Tests of the command itself, and of the warm pool, start the real ones.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from service.cli import entrypoint
from tests.support import forked
from trainer.runs import warm_pool

_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 2**20


class Forked:
    """A process that calls the module-level ``function`` with just this environment: what tests use of
    subprocess.Popen. ``log``: its stderr."""

    def __init__(self, log: Path, environment: Mapping[str, str], function: Callable[..., int | None], *arguments: Any):
        log.touch()
        reader, writer = multiprocessing.Pipe(duplex=False)
        self.stdout = os.fdopen(os.dup(reader.fileno()), "r", encoding="utf-8")
        reader.close()
        self._process = forked.start(_serve, writer, {**environment}, function, arguments, log=log)
        writer.close()
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(
    stdout: Connection, environment: dict[str, str], function: Callable[..., int | None], arguments: tuple[Any, ...]
) -> int | None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    return function(*arguments)


def evenkeel(*arguments: str) -> None:
    """The command. One that runs jobs gets its warm pool as a fork."""
    if not {"api", "vectors"}.intersection(arguments):
        fork_warm_pool()
    sys.argv = ["evenkeel", *arguments]
    entrypoint.main()


# --- the process from which runs are forked --------------------------------------------------------------------------


def fork_warm_pool() -> None:
    """Let the warm pool of this one, which has no thread yet, be a fork of it."""
    forker = _Forker()
    warm_pool.start_process = forker.start


class _Forker:
    """A fork of this process as it is now, without threads. It forks warm pools and ends with this one."""

    def __init__(self) -> None:
        self._connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            self._connection.close()
            _serve_forks(remote, parent)
        remote.close()

    def start(self, connection: socket.socket, environment: Mapping[str, str]) -> ForkOfAnother:
        socket.send_fds(self._connection, [json.dumps({**environment}).encode()], [connection.fileno()])
        return ForkOfAnother(int(self._connection.recv(100)))


def _serve_forks(connection: socket.socket, parent: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        silence = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(silence, number)
        while True:
            message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                connection.close()
                be_warm_pool(socket.socket(fileno=fds[0]), json.loads(message))
            os.close(fds[0])
            connection.send(str(pid).encode())
    finally:
        os._exit(0)


def be_warm_pool(connection: socket.socket, environment: dict[str, str]) -> NoReturn:
    """What ``python -m trainer.launch.fork_server`` does once it has imported."""
    try:
        from trainer.launch import fork_server

        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        fork_server.main(connection)
    finally:
        os._exit(0)


class ForkOfAnother:
    """What is used of subprocess.Popen, of a process that another one waits for."""

    def __init__(self, pid: int):
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> int:
        select.select([self._descriptor], [], [])
        return 0


def warm_pool_of_tests(connection: socket.socket, environment: Mapping[str, str]) -> Any:
    """``warm_pool.start_process`` for a service in the tests' own process, which has threads."""
    process = forked.start(be_warm_pool, connection, {**environment}, log=Path(os.devnull))
    process.wait = process.join  # type: ignore[attr-defined]
    process.poll = lambda: process.exitcode  # type: ignore[attr-defined]
    return process
