"""Real child trees: started detached, recognised by pid and creation time, ended without leaving one orphan."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer.runs import run_process
from trainer.runs.protocol import EXIT_FAILED, EXIT_FILE, LOG_FILE, PROCESS_FILE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE

pytestmark = pytest.mark.process

# A run that ignores SIGTERM, with the children that are hard to find: one in its own process group (as Ray makes them),
# one in its own session whose parent died (it moves to init), one with an empty environment, each with a grandchild.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
         " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"]
subprocess.Popen(sleep, process_group=0)
subprocess.Popen(sleep, env={})
orphan = "import subprocess, sys; subprocess.Popen({!r}, start_new_session=True)".format(sleep)
subprocess.run([sys.executable, "-c", orphan])
print("ready", flush=True)
time.sleep(600)
"""
POLITE = """
import signal, sys, time
def stop(*_):
    print("stopped politely", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(600)
"""


def start(directory: Path, code: str) -> subprocess.Popen[bytes]:
    """A process recorded and marked as launch() does it, running ``code`` instead of a training."""
    environment = {**os.environ, RUN_DIR_VARIABLE: str(directory.resolve())}
    with open(directory / "log.txt", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    run_process.write_process_file(directory, process.pid)
    run_process._children[process.pid] = process
    wait_for(lambda: b"ready" in (directory / "log.txt").read_bytes())
    return process


def wait_for(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def test_terminate_leaves_no_process_of_a_stubborn_tree(tmp_path):
    start(tmp_path, STUBBORN)
    wait_for(lambda: len(run_process.processes(tmp_path)) == 7)
    pids = [process.pid for process in run_process.processes(tmp_path)]
    assert run_process.terminate(tmp_path, grace_seconds=0.3) is False
    assert alive(pids) == []
    assert run_process.processes(tmp_path) == []
    assert not run_process.is_alive(tmp_path)


def test_terminate_lets_a_polite_run_end_itself(tmp_path):
    start(tmp_path, POLITE)
    assert run_process.is_alive(tmp_path)
    assert run_process.terminate(tmp_path, grace_seconds=90) is True
    assert "stopped politely" in (tmp_path / "log.txt").read_text()
    assert not run_process.is_alive(tmp_path)


def test_terminate_ends_a_stopped_run(tmp_path):
    process = start(tmp_path, POLITE)
    os.kill(process.pid, signal.SIGSTOP)
    assert run_process.is_alive(tmp_path)
    assert run_process.terminate(tmp_path, grace_seconds=0.2) is False
    assert not run_process.is_alive(tmp_path)


# No other process of the machine sleeps as long.
SLEEP = f"60.{os.getpid():08}"
ESCAPING = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as trainer.launch.entrypoint does: orphans come to this process
print("ready", flush=True)
for _ in range(300):  # so many at most, should nobody end it
    # Without the marker, in a session of its own, its parent dead; and one more every few milliseconds.
    subprocess.run(["env", "-i", "sh", "-c", "setsid sleep {} & exit"])
    time.sleep(0.003)
time.sleep(60)
"""


def test_terminate_finds_those_who_hide_and_outruns_those_who_fork(tmp_path):
    process = start(tmp_path, ESCAPING.format(SLEEP))
    wait_for(lambda: len(run_process.processes(tmp_path)) > 12)
    hidden = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert run_process.terminate(tmp_path, grace_seconds=0) is False
    assert alive(hidden) == []
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", SLEEP]]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_terminate_clears_what_a_killed_run_left_behind(tmp_path):
    process = start(tmp_path, STUBBORN)
    wait_for(lambda: len(run_process.processes(tmp_path)) == 7)
    marked = [child for child in run_process.processes(tmp_path) if child.pid != process.pid]
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not run_process.is_alive(tmp_path))
    run_process.terminate(tmp_path)
    assert alive([child.pid for child in marked]) == []


def test_another_run_is_left_alone(tmp_path):
    first, second = tmp_path / "run", tmp_path / "run-2"
    first.mkdir()
    second.mkdir()
    start(first, POLITE)
    start(second, POLITE)
    run_process.terminate(first, grace_seconds=90)
    assert run_process.is_alive(second)
    run_process.terminate(second, grace_seconds=90)


def test_a_reused_pid_is_not_the_run(tmp_path):
    run_process.write_process_file(tmp_path, os.getpid())
    assert run_process.is_alive(tmp_path)
    mine = json.loads((tmp_path / PROCESS_FILE).read_text())
    for other in ({"start_ticks": mine["start_ticks"] - 1}, {"boot_id": "before the machine was restarted"}):
        (tmp_path / PROCESS_FILE).write_text(json.dumps(mine | other))
        assert not run_process.is_alive(tmp_path)
    assert run_process.terminate(tmp_path) is True  # and this test lives on


def test_a_run_that_was_never_started_is_not_alive(tmp_path):
    assert not run_process.is_alive(tmp_path)
    assert run_process.terminate(tmp_path) is True
    (tmp_path / PROCESS_FILE).write_text("{half")
    assert not run_process.is_alive(tmp_path)


def test_launch_detaches_marks_and_logs(tmp_path, monkeypatch):
    secrets = {*run_process.SERVICE_SECRETS, "EVENKEEL_DATABASE_URL", "EVENKEEL_STORE_URL", "EVENKEEL_API_KEY"}
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r1"}))  # no job: the run says so and fails
    pid = run_process.launch(tmp_path)
    os.kill(pid, signal.SIGSTOP)  # it fails so soon that it could be gone before it was looked at
    recorded = json.loads((tmp_path / PROCESS_FILE).read_text())
    assert recorded["pid"] == pid
    assert os.getsid(pid) == pid
    environment = psutil.Process(pid).environ()
    assert not secrets & set(environment)
    assert environment[RUN_ID_VARIABLE] == "r1"
    assert environment[RUN_DIR_VARIABLE] == str(tmp_path.resolve())
    with pytest.raises(RuntimeError, match="still running"):
        run_process.launch(tmp_path)
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not run_process.is_alive(tmp_path))
    assert "run.json" in (tmp_path / LOG_FILE).read_text()
    assert json.loads((tmp_path / EXIT_FILE).read_text())["code"] == EXIT_FAILED


def test_a_run_whose_launcher_died_before_it_was_recorded_never_begins(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r1"}))
    run = "import pathlib, sys; from trainer.runs.run_process import await_name; d = pathlib.Path(sys.argv[-1]);"
    # The launcher that lives may be kept from its next line for long.
    run += " print('named' if await_name(d, {}) else 'not named', flush=True)"
    launcher = (
        "import os, sys; from trainer.runs import run_process;"
        " record = run_process.write_process_file;"
        " run_process.write_process_file = (lambda *_: os._exit(9)) if sys.argv[2] == 'dies' else record;"
        " run_process.launch(sys.argv[1], command=(sys.executable, '-c', sys.argv[3]))"
    )
    log = tmp_path / LOG_FILE
    for how, seconds, code, said in (("dies", 0.5, 9, "not named\n"), ("lives", 60, 0, "named\n")):
        log.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-c", launcher, str(tmp_path), how, run.format(seconds)], check=False)
        assert done.returncode == code
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        assert log.read_text() == said


def test_one_that_could_not_be_recorded_is_no_zombie_for_ever(tmp_path, monkeypatch):
    """Its process.json finds no room on the disk; the service goes on."""

    def full(directory, pid):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r"}))
    before = set(run_process._children)
    with monkeypatch.context() as patched:
        patched.setattr(run_process, "write_process_file", full)
        with pytest.raises(OSError, match="No space left"):
            run_process.launch(tmp_path, command=["true"])
    (lost,) = set(run_process._children) - before
    wait_for(lambda: psutil.Process(lost).status() == psutil.STATUS_ZOMBIE)
    run_process.launch(tmp_path, command=["true"])
    assert not psutil.pid_exists(lost)
    wait_for(lambda: not run_process.is_alive(tmp_path))
    assert set(run_process._children) <= before


def test_launch_is_torch_free():
    code = "import sys, trainer.runs.run_process; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
