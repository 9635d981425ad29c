"""``python -m trainer.launch.fork_server``: imports the modules of a run, then forks a run for each request.

Its owner is trainer.runs.warm_pool. The fork server has no threads and runs nothing itself, so a fork copies nothing of
an earlier run.

A forked run is like a run started by a command: it has its own session, log and marker, and survives its parent. The
fork server ends when its owner has ended, or after an hour without requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pandas  # type: ignore[import-untyped]  # noqa: F401  # pyarrow does, with its first array
import pyarrow.pandas_compat  # noqa: F401

from trainer.distributed.light_imports import import_torchrec

import_torchrec()

import trainer.data.batches.batches  # noqa: E402
import trainer.data.prepare.preparation  # noqa: E402
import trainer.launch.entrypoint  # noqa: E402
import trainer.launch.on_host  # noqa: E402
import trainer.publishing.anchor  # noqa: E402
import trainer.publishing.publish  # noqa: E402
import trainer.sizing.estimate  # noqa: E402
from trainer.runs.protocol import LOG_FILE, RUN_DIR_VARIABLE, leave  # noqa: E402
from trainer.runs.warm_pool import MESSAGE_BYTES  # noqa: E402

IDLE_SECONDS = 3600.0


def main(connection: socket.socket) -> None:
    """Fork a run for each message, until the owner closes the connection or sends none for IDLE_SECONDS."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for runs; this keeps them from becoming zombies
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"ready": True}).encode())
    connection.settimeout(IDLE_SECONDS)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while message := connection.recv(MESSAGE_BYTES):
            request = json.loads(message)
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(Path(request["run_dir"]), request["own"])
            connection.send(json.dumps({"pid": pid}).encode())


def _become(directory: Path, own: Mapping[str, str]) -> NoReturn:
    """Set up this forked process as :func:`trainer.runs.run_process.launch` would, then execute the run."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(directory / LOG_FILE, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(own)
        show_marker(directory)
        code = trainer.launch.entrypoint.main(["--run-dir", str(directory)])
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def show_marker(directory: Path) -> None:
    """Write the marker EVENKEEL_RUN_DIR into the memory that /proc/PID/environ shows for this process.

    So other processes find it by its marker, like a run that was started with the variable. The memory was laid out
    when the program started; trainer.runs.warm_pool has reserved room in the variable.
    """
    fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    offset = ctypes.string_at(start, end - start).rindex(b"\0" + os.fsencode(RUN_DIR_VARIABLE) + b"=") + 1
    marker = os.fsencode(f"{RUN_DIR_VARIABLE}={directory}")
    if len(marker) >= end - start - offset:
        raise ValueError(f"{directory}: no room for it in the environment of this process")
    ctypes.memset(start + offset, 0, end - start - offset)
    ctypes.memmove(start + offset, marker, len(marker))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
