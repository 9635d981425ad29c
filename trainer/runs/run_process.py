"""Start, observation and end of the detached process of a run. Torch-free, as the control plane imports it.

Pids are reused, so ``process.json`` identifies a run by its pid, its start time in ticks since the machine's boot, and
the id of that boot: clock changes do not affect these. A run's processes are found in three ways, because each way
misses some:

- the tree of processes below the run;
- the session that the run leads: processes stay in it if their parent dies, or if they change their process group;
- the marker ``EVENKEEL_RUN_DIR`` in a process's environment, for processes with a session of their own and a dead
  parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from embeddings.durable_files import write_json
from trainer.runs.protocol import LAUNCHED_VARIABLE, LOG_FILE, PROCESS_FILE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE

if TYPE_CHECKING:
    from trainer.runs.warm_pool import WarmPool

COMMAND = (sys.executable, "-m", "trainer.launch.entrypoint")
SERVICE_SECRETS = ("EVENKEEL_DATABASE_URL", "EVENKEEL_STORE_URL", "EVENKEEL_API_KEY", "PGPASSWORD", "PGPASSFILE")
"""Environment variables with secrets of the service, which runs must not get; run.json names a run's store."""

_KILL_SECONDS = 30.0
_POLL_SECONDS = 0.05
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def launch(
    run_dir: Path | str,
    *,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    warm_pool: WarmPool | None = None,
) -> int:
    """Start ``command --run-dir RUN_DIR`` in a session of its own and return its pid at once.

    If there is a warm pool, it forks the run instead, if it can; the fork does the same as the default command.

    The child outlives this process, and appends its stdout and stderr to ``RUN_DIR/log.txt``. The run inherits this
    process's environment, without the secrets of the service (SERVICE_SECRETS) and with the variables ``env``.

    Raises:
        RuntimeError: the run is alive already.
        OSError: the process cannot be started.
    """
    directory = Path(run_dir).resolve()
    if is_alive(directory):
        raise RuntimeError(f"{directory}: its process is still running; end it first")
    run_id = json.loads((directory / "run.json").read_text("utf-8"))["run_id"]
    ours = {RUN_ID_VARIABLE: str(run_id), RUN_DIR_VARIABLE: str(directory), LAUNCHED_VARIABLE: "1"}
    environment = environment_of_runs(env)
    pid = None if warm_pool is None else warm_pool.start(directory, environment, ours)
    if pid is None:
        pid = _start([*command, "--run-dir", str(directory)], directory, environment | ours)
    write_process_file(directory, pid)
    return pid


def environment_of_runs(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the secrets of the service, and with the variables ``more``."""
    environment = {name: value for name, value in os.environ.items() if name not in SERVICE_SECRETS} | {**(more or {})}
    # The code that runs is the code that launches, wherever it was imported from.
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return environment


def _start(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> int:
    with open(directory / LOG_FILE, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    # Nobody else waits for runs whose process.json could not be written, or was removed.
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            _children.pop(pid, None)
    _children[process.pid] = process
    return process.pid


def await_name(run_dir: Path | str, seconds: float = 30.0) -> bool:
    """Wait until ``process.json`` names this process. Every process that :func:`launch` starts calls this first.

    Returns:
        True once the file names this process, or at once if :func:`launch` did not start it. False if the file does not
        name it within ``seconds``, because the launcher died. The process that calls this must then exit, because the
        run will be started again.
    """
    if os.environ.pop(LAUNCHED_VARIABLE, None) is None:
        return True
    directory, own = Path(run_dir).resolve(), _identity(os.getpid())
    deadline = time.monotonic() + seconds
    while _recorded(directory) != own:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def is_alive(run_dir: Path | str) -> bool:
    """Return True if the process that ``process.json`` names still runs.

    A zombie, or another process with the same pid, does not count.
    """
    return _main_process(Path(run_dir).resolve()) is not None


def terminate(run_dir: Path | str, grace_seconds: float = 30.0) -> bool:
    """End the run and all its processes, also those that a dead run has left.

    The run gets SIGTERM, so that it writes a checkpoint and ends as cancelled. After ``grace_seconds`` all remaining
    processes get SIGSTOP until no new processes are found, then SIGKILL. Stopped processes cannot fork, and the run's
    first process, which adopts orphans, cannot lose any.

    Returns:
        True if the run's main process had ended before, or ended by itself within ``grace_seconds``.

    Raises:
        RuntimeError: some processes survive SIGKILL, in uninterruptible sleep; the message names their pids.
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
    stopped: set[psutil.Process] = set()
    while fresh := {process for process in seen if _runs(process)} - stopped:
        for process in fresh:
            _signal(process, signal.SIGSTOP)
        stopped |= fresh
        seen.update(processes(directory))
    while True:
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
    """Return every live process of the run, found in the three ways that the module describes, except this process."""
    directory = Path(run_dir).resolve()
    main, session, marker = _main_process(directory), _session(directory), str(directory)
    ours = [] if main is None else [main]
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():  # listed once: a run may have hundreds
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
            children.setdefault(process.ppid(), []).append(process)
            if os.getsid(process.pid) == session or process.environ().get(RUN_DIR_VARIABLE) == marker:
                ours.append(process)
    candidates: set[psutil.Process] = set()
    while ours:
        process = ours.pop()
        if process not in candidates and process.pid != os.getpid():
            candidates.add(process)
            ours += children.get(process.pid, [])
    return [process for process in candidates if _runs(process)]


_children: dict[int, subprocess.Popen[bytes]] = {}


def _recorded(directory: Path) -> dict[str, Any] | None:
    try:
        return json.loads((directory / PROCESS_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _session(directory: Path) -> int | None:
    """Return the id of the run's session, even if the process that started it has ended; None if it has none.

    A pid is not reused while a session of that number has members. So the session is the run's, unless an unrelated
    live process has the run's old pid.
    """
    recorded = _recorded(directory)
    if recorded is None:
        return None
    now = _identity(recorded["pid"])
    return None if now is not None and now != recorded else recorded["pid"]


def _main_process(directory: Path) -> psutil.Process | None:
    recorded = _recorded(directory)
    if recorded is None:
        return None
    child = _children.get(recorded["pid"])
    if child is not None and child.poll() is not None:
        _children.pop(recorded["pid"], None)  # reaped: no zombie is left
        return None
    if _identity(recorded["pid"]) != recorded:
        return None
    try:
        process = psutil.Process(recorded["pid"])
    except psutil.Error:
        return None
    return process if _runs(process) else None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # gone already
        process.send_signal(number)


def write_process_file(directory: Path, pid: int) -> None:
    """Record that the process ``pid`` is the run."""
    write_json(directory / PROCESS_FILE, _identity(pid) or {"pid": pid, "start_ticks": 0, "boot_id": ""})


def _identity(pid: int) -> dict[str, Any] | None:
    """Return pid, start ticks and boot id of a process, which no other process shares; None if there is no process."""
    try:
        # "PID (NAME) STATE ...", where NAME may hold anything: the 22nd field is when it was started.
        ticks = int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    except OSError:
        return None
    return {"pid": pid, "start_ticks": ticks, "boot_id": _BOOT_ID.read_text("ascii").strip()}
