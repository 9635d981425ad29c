"""Runs that are forked from a process that stands by: as started ones, and none is lost where it cannot fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainer.runs import run_process
from trainer.runs import warm_pool as module
from trainer.runs.protocol import EXIT_FAILED, EXIT_FILE, LAUNCHED_VARIABLE, LOG_FILE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from trainer.runs.run_process import SERVICE_SECRETS
from trainer.runs.warm_pool import WarmPool, code_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def broken_run(folder: Path) -> Path:
    """A directory whose run says what is wrong with it and ends at once."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name}))
    return folder


def runs_to_its_end(directory: Path, warm_pool: WarmPool) -> int:
    """The pid of a run of a directory made by :func:`broken_run`, which has said its last word."""
    pid = run_process.launch(directory, warm_pool=warm_pool)
    until(lambda: not run_process.is_alive(directory))
    assert json.loads((directory / EXIT_FILE).read_text())["code"] == EXIT_FAILED
    return pid


def stopped_at_its_start(directory: Path, warm_pool: WarmPool) -> psutil.Process:
    """A run that waits to be named, as one does whose launcher is slow."""
    own = {RUN_DIR_VARIABLE: str(directory), RUN_ID_VARIABLE: "r", LAUNCHED_VARIABLE: "1"}
    environment = {name: value for name, value in os.environ.items() if name not in SERVICE_SECRETS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(module.ROOT), os.environ.get("PYTHONPATH", "")]))
    pid = warm_pool.start(directory, environment, own)
    assert pid is not None
    process = psutil.Process(pid)
    until(lambda: process.environ().get(RUN_DIR_VARIABLE) == str(directory))
    return process


def test_a_forked_run_is_like_a_started_one(tmp_path, warm_pool, monkeypatch):
    secrets = dict.fromkeys(SERVICE_SECRETS, "secret-of-the-service")
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run = stopped_at_its_start(broken_run(tmp_path / "run"), warm_pool)
    assert warm_pool.pid != os.getpid()
    assert run.ppid() == warm_pool.pid
    assert os.getsid(run.pid) == os.getpgid(run.pid) == run.pid != os.getsid(warm_pool.pid)
    environment = run.environ()
    assert not secrets.keys() & environment.keys()
    assert environment["PATH"] == os.environ["PATH"]
    links = {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{run.pid}/fd").iterdir()}
    log = str(tmp_path / "run" / LOG_FILE)
    assert (links[0], links[1], links[2]) == ("/dev/null", log, log)
    assert not any("socket" in target for target in links.values()), "no socket is left open"
    # Found by its marker alone: nothing else says yet that it is this directory's.
    assert [process.pid for process in run_process.processes(tmp_path / "run")] == [run.pid]
    assert not (tmp_path / "run" / EXIT_FILE).exists(), "it begins when it is named, and not before"
    run_process.write_process_file(tmp_path / "run", run.pid)
    until(lambda: not run_process.is_alive(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / EXIT_FILE).read_text())["code"] == EXIT_FAILED
    until(lambda: not psutil.pid_exists(run.pid))  # not a zombie: it was waited for


def test_one_process_forks_run_after_run(tmp_path, warm_pool):
    runs_to_its_end(broken_run(tmp_path / "first"), warm_pool)
    before = warm_pool.pid
    second = run_process.launch(broken_run(tmp_path / "second"), warm_pool=warm_pool)
    assert warm_pool.pid == before
    until(lambda: not run_process.is_alive(tmp_path / "second"))
    assert second != before


def test_a_dead_one_is_replaced(tmp_path, warm_pool):
    runs_to_its_end(broken_run(tmp_path / "first"), warm_pool)
    before = warm_pool.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: warm_pool._process.poll() is not None)
    runs_to_its_end(broken_run(tmp_path / "second"), warm_pool)
    assert warm_pool.pid not in (None, before)


def test_one_of_another_environment_or_other_code_is_replaced(tmp_path, monkeypatch, warm_pool):
    code = tmp_path / "code"
    (code / "inner").mkdir(parents=True)
    (code / "inner" / "module.py").write_text("before = 1\n")
    monkeypatch.setattr(module, "CODE", (code,))
    monkeypatch.setenv("EVENKEEL_TEST_OF_STANDBY", "seen")
    run = stopped_at_its_start(broken_run(tmp_path / "first"), warm_pool)
    assert run.environ()["EVENKEEL_TEST_OF_STANDBY"] == "seen"
    run.kill()
    before, state = warm_pool.pid, code_state()
    (code / "inner" / "module.py").write_text("after = 12\n")
    assert code_state() != state
    runs_to_its_end(broken_run(tmp_path / "second"), warm_pool)
    assert warm_pool.pid not in (None, before)


@pytest.mark.parametrize("sickness", ["stopped", "ends"])
def test_a_run_starts_by_itself_where_none_can_be_forked(tmp_path, monkeypatch, caplog, sickness):
    sick = WarmPool()
    if sickness == "stopped":
        stopped_at_its_start(broken_run(tmp_path / "first"), sick).kill()
        os.kill(sick.pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    else:
        # What it imports is not there.
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(sys, "executable", "/bin/false")
    before = sick.pid
    pid = run_process.launch(broken_run(tmp_path / "run"), warm_pool=sick)
    assert "starts without the warm pool" in caplog.text
    assert sick.pid is None
    assert before is None or not psutil.pid_exists(before)
    until(lambda: not run_process.is_alive(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / EXIT_FILE).read_text())["code"] == EXIT_FAILED
    assert len(run_process.processes(tmp_path / "run")) == 0
    assert pid > 0


QUICK = """#!{python} -S
import json, os, socket, sys
connection = socket.socket(fileno=int(sys.argv[-1]))
connection.send(json.dumps({{"ready": True}}).encode())
while connection.recv(2**16):
    connection.send(json.dumps({{"pid": os.getpid()}}).encode())
"""


@pytest.fixture
def quick(tmp_path, monkeypatch) -> WarmPool:
    """One whose process is there at once, and forks nothing."""
    script = tmp_path / "quick"
    script.write_text(QUICK.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return WarmPool()


def held() -> tuple[int, list[psutil.Process]]:
    """Open descriptors and children, zombies too, of this process."""
    return len(os.listdir("/proc/self/fd")), psutil.Process().children()


def test_those_that_are_replaced_leave_nothing(tmp_path, monkeypatch, quick):
    before, started = held(), set()
    for number in range(12):
        if quick.pid is not None and number % 3 == 0:
            os.kill(quick.pid, signal.SIGKILL)
        elif quick.pid is not None and number % 3 == 1:
            os.kill(quick.pid, signal.SIGSTOP)
            with monkeypatch.context() as patched:
                patched.setattr(module, "ANSWER_SECONDS", 0.05)
                assert quick.start(tmp_path, {"NUMBER": str(number - 1)}, {}) is None
        started.add(quick.start(tmp_path, {"NUMBER": str(number)}, {}))
        assert len(held()[1]) == len(before[1]) + 1
    assert None not in started
    quick.close()
    assert held() == before


def test_one_that_was_closed_starts_none(tmp_path, quick):
    """As where a run is being started in a thread while the service ends."""
    before = held()
    assert quick.start(tmp_path, {}, {}) is not None
    quick.close()
    assert quick.start(tmp_path, {}, {}) is None
    assert held() == before


def test_one_that_was_warmed_up_is_the_one_that_forks(tmp_path, quick):
    quick.warm_up({})
    before = quick.pid
    assert before is not None
    assert quick.start(tmp_path, {}, {}) == before  # the stand-in answers with its own pid
    quick.close()


def test_a_service_that_ends_does_not_wait_for_imports(tmp_path, monkeypatch, caplog):
    script, before = tmp_path / "slow", held()
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    slow = WarmPool()
    warming = threading.Thread(target=slow.warm_up, args=({},))
    warming.start()
    until(lambda: slow._warming)
    slow.close()
    warming.join()
    assert (slow.pid, held(), caplog.text) == (None, before, "")


OWNER = """
import os, sys, time
from pathlib import Path
from trainer.runs import run_process
from trainer.runs.warm_pool import WarmPool
warm_pool = WarmPool()
print(run_process.launch(Path(sys.argv[1]), warm_pool=warm_pool), warm_pool.pid, flush=True)
time.sleep(600)
"""


def test_a_run_outlives_the_service_and_the_warm_pool_does_not(tmp_path, make_run, small):
    run = make_run(epochs=1000)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(run.directory)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        pid, forker = map(int, owner.stdout.readline().split())
    (run.directory / "events.jsonl").touch()
    until(lambda: small.events(run.directory, "progress"))
    owner.kill()
    owner.wait()
    until(lambda: not psutil.pid_exists(forker) or psutil.Process(forker).status() == psutil.STATUS_ZOMBIE)
    epochs = len(small.events(run.directory, "metric"))
    until(lambda: len(small.events(run.directory, "metric")) > epochs)
    # Who comes after the service finds it, and ends it with all that it has.
    assert run_process.is_alive(run.directory)
    assert pid in [process.pid for process in run_process.processes(run.directory)]
    assert len(run_process.processes(run.directory)) == 2, "the run and its rank"
    assert run_process.terminate(run.directory, grace_seconds=200) is True
    assert json.loads((run.directory / EXIT_FILE).read_text())["state"] == "cancelled"
    assert run_process.processes(run.directory) == []
