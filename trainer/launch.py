"""Starts, watches and ends the detached process of a run. Torch-free: the control plane imports it.

A run is identified by its pid *and* creation time (pids are reused), kept in ``process.json``. Its processes are found
in three ways, because each alone misses some: the tree below the run; the session it leads (Ray calls setpgrp, which
leaves the session); and the marker ``EVENKEEL_RUN_DIR`` in a process's environment (a session of its own, parent dead).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

PROCESS_FILE = "process.json"
LOG_FILE = "log.txt"
EXIT_FILE = "exit.json"
RUN_ID_VARIABLE = "EVENKEEL_RUN_ID"
RUN_DIR_VARIABLE = "EVENKEEL_RUN_DIR"
SERVICE_SECRETS = ("EVENKEEL_DATABASE_URL", "EVENKEEL_API_KEY", "PGPASSWORD", "PGPASSFILE")

EXIT_SUCCEEDED = 0
EXIT_FAILED = 1
"""Trying again gives the same failure: bad data, a bad spec, a non-finite loss."""
EXIT_RETRYABLE = 75
"""The machinery failed, not the job (sysexits' EX_TEMPFAIL): a worker died, Ray could not start."""
EXIT_CANCELLED = 130

_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_CLOCK_SECONDS = 0.05
"""Creation times are told in ticks of 10 ms."""


def launch(run_dir: Path | str, *, env: Mapping[str, str] | None = None) -> int:
    """Starts ``python -m trainer.run --run-dir D`` in a session of its own and returns its pid at once.

    The child outlives this process; stdout and stderr are appended to ``D/log.txt``. It inherits this process's
    environment without the credentials of the service (SERVICE_SECRETS), which are none of its business, and with
    ``env``. Raises RuntimeError if the run is alive already, OSError if it cannot be started.
    """
    directory = Path(run_dir).resolve()
    if is_alive(directory):
        raise RuntimeError(f"{directory}: its process is still running; end it first")
    run_id = json.loads((directory / "run.json").read_text("utf-8"))["run_id"]
    inherited = {name: value for name, value in os.environ.items() if name not in SERVICE_SECRETS}
    environment = {**inherited, **(env or {}), RUN_ID_VARIABLE: str(run_id), RUN_DIR_VARIABLE: str(directory)}
    # The code that runs is the code that launches, wherever it was imported from.
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    with open(directory / LOG_FILE, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.run", "--run-dir", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    _children[process.pid] = process
    _write_process_file(directory, process.pid)
    return process.pid


def is_alive(run_dir: Path | str) -> bool:
    """Whether the process that ``process.json`` names still runs (a zombie does not, another with its pid does not)."""
    return _main_process(Path(run_dir).resolve()) is not None


def terminate(run_dir: Path | str, grace_seconds: float = 30.0) -> bool:
    """Ends the run and every process it left: SIGTERM to the run (it writes a checkpoint and cancels itself), then,
    after ``grace_seconds``, SIGKILL to whatever remains, until a fresh look finds nothing.

    Returns True if the run ended by itself within the grace. Also clears what a run that already died left behind.
    Raises RuntimeError naming the pids that survive SIGKILL (uninterruptible sleep).
    """
    directory = Path(run_dir).resolve()
    seen = set(processes(directory))
    main = _main_process(directory)
    gentle = main is None
    if main is not None and grace_seconds > 0:
        _signal(main, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while not (gentle := _main_process(directory) is None) and time.monotonic() < deadline:
            seen.update(processes(directory))
            time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        # A process may have forked between the look and the kill: look again until nothing is left.
        seen.update(processes(directory))
        alive = {process for process in seen if _runs(process)}
        if not alive:
            return gentle
        if time.monotonic() > deadline:
            raise RuntimeError(f"{directory}: processes {sorted(p.pid for p in alive)} survive SIGKILL")
        for process in alive:
            _signal(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def processes(run_dir: Path | str) -> list[psutil.Process]:
    """Every live process of the run: the main one, the tree below it, its session, and all with its marker."""
    directory = Path(run_dir).resolve()
    found: set[psutil.Process] = set()
    main = _main_process(directory)
    if main is not None:
        found.add(main)
        found.update(_descendants(main))
    session = _session(directory)
    marker = str(directory)
    for process in psutil.process_iter():
        try:
            ours = os.getsid(process.pid) == session or process.environ().get(RUN_DIR_VARIABLE) == marker
        except (psutil.Error, OSError):
            continue  # gone, or another user's
        if ours and process.pid != os.getpid():
            found.add(process)
            found.update(_descendants(process))
    return [process for process in found if _runs(process)]


_children: dict[int, subprocess.Popen[bytes]] = {}


def _recorded(directory: Path) -> dict[str, Any] | None:
    try:
        return json.loads((directory / PROCESS_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _session(directory: Path) -> int | None:
    """The session that the run leads or led. No pid is reused while a session of that number has members, so only a
    live stranger with the run's old pid says that the session is not the run's."""
    recorded = _recorded(directory)
    if recorded is None:
        return None
    with contextlib.suppress(psutil.Error):
        if abs(psutil.Process(recorded["pid"]).create_time() - recorded["create_time"]) > _CLOCK_SECONDS:
            return None
    return recorded["pid"]


def _main_process(directory: Path) -> psutil.Process | None:
    recorded = _recorded(directory)
    if recorded is None:
        return None
    child = _children.get(recorded["pid"])
    if child is not None and child.poll() is not None:
        del _children[recorded["pid"]]  # reaped: no zombie is left
        return None
    try:
        process = psutil.Process(recorded["pid"])
        if abs(process.create_time() - recorded["create_time"]) > _CLOCK_SECONDS:
            return None
    except psutil.Error:
        return None
    return process if _runs(process) else None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # gone already
        process.send_signal(number)


def _write_process_file(directory: Path, pid: int) -> None:
    try:
        create_time = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        create_time = 0.0
    write_json(directory / PROCESS_FILE, {"pid": pid, "create_time": create_time})


def write_json(path: Path, document: object) -> None:
    """Writes a JSON file whole: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
