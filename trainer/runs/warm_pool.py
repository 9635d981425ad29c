"""Warm pool: a process that has imported torch, and from which runs of this host are forked (docs/adr/0047).

Importing torch and TorchRec takes seconds of processor time at each run's start. So a service keeps a process
``python -m trainer.launch.fork_server``, which has imported them, and forks a run when it gets a run directory. The
process is replaced if it has died, does not answer, or was started with other code or another environment than now. A
run that it cannot fork is started as a new process. This module does not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.runs.protocol import RUN_DIR_VARIABLE

log = logging.getLogger("evenkeel.runner")

READY_SECONDS = 60.0
"""Longest wait for a new process to finish its imports; a run without the pool would take as long."""
ANSWER_SECONDS = 10.0
"""Longest wait for the answer to a request to fork."""
LONGEST_PATH = 4096
MESSAGE_BYTES = 2**16
ROOT = Path(__file__).resolve().parents[2]
CODE = (ROOT / "trainer", ROOT / "embeddings")


class WarmPool:
    """Owner of at most one fork server process, started when first needed. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._warming: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._made_of: Any = None
        self._closed = False

    def warm_up(self, environment: Mapping[str, str]) -> None:
        """Start the process for runs with this environment, and return once it can fork them, or has failed."""
        with self._lock:
            if self._closed:
                return
            try:
                self._renew({**environment}, code_state())
            except (OSError, ValueError) as error:
                if not self._closed:
                    log.warning("the warm pool cannot be started: %s", error)
                self._end()

    def start(self, run_dir: Path, environment: Mapping[str, str], own: Mapping[str, str]) -> int | None:
        """Fork a run of this directory, and return its pid; None if that fails, so that the caller must start the run.

        ``environment``: variables of the process and all its runs. ``own``: variables of this run only.
        """
        if len(os.fsencode(run_dir)) >= LONGEST_PATH:
            return None
        with self._lock:
            if self._closed:
                return None
            try:
                self._renew({**environment}, code_state())
                assert self._connection is not None
                self._connection.settimeout(ANSWER_SECONDS)
                self._connection.send(json.dumps({"run_dir": str(run_dir), "own": {**own}}).encode())
                return int(self._heard()["pid"])
            except (OSError, ValueError) as error:
                log.warning("a run starts without the warm pool: %s", error)
                self._end()
                return None

    def close(self) -> None:
        """End the process for good. Runs that it has forked continue; later calls of :meth:`start` return None."""
        self._closed = True
        if (warming := self._warming) is not None:
            warming.kill()  # otherwise the lock is free only after its imports
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _renew(self, environment: dict[str, str], code: Any) -> None:
        """Start a new process and wait until it is ready, unless the present process has this environment and code."""
        alive = self._process is not None and self._process.poll() is None
        if alive and self._made_of == (environment, code):
            return
        self._end()
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._made_of = local, (environment, code)
        with remote:
            self._process = self._warming = start_process(remote, environment)
        local.settimeout(READY_SECONDS)
        try:
            self._heard()
        finally:
            self._warming = None

    def _heard(self) -> dict[str, Any]:
        assert self._connection is not None
        message = self._connection.recv(MESSAGE_BYTES)
        if not message:
            raise OSError("it has ended")
        return dict(json.loads(message))

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def start_process(connection: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that forks runs on requests from the other end of ``connection``."""
    # Room for a run's directory where /proc shows a process's environment: see show_marker of
    # trainer.launch.fork_server.
    shown = {name: value for name, value in environment.items() if name != RUN_DIR_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.fork_server", str(connection.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=shown | {RUN_DIR_VARIABLE: " " * LONGEST_PATH},
        pass_fds=[connection.fileno()],
        start_new_session=True,
    )


def code_state() -> list[tuple[str, int, int]]:
    """Return a value that changes whenever a file of the code that runs import is changed.

    The state has (path, modification time in ns, size) for each file of CODE and for the folder of installed packages.
    """
    files = []
    pending = [*CODE]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        pending.append(Path(entry.path))
                elif entry.name.endswith((".py", ".so")):
                    files.append((entry.path, entry.stat().st_mtime_ns, entry.stat().st_size))
    installed = sysconfig.get_path("purelib")
    files.append((installed, os.stat(installed).st_mtime_ns, 0))
    return sorted(files)
