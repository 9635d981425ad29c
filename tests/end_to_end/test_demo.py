"""The demo ends in DEMO OK, and breaking any one of its parts takes that line away."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from embeddings.refresh.publish import Gate, Settings
from tests.service.forked_service import Forked, evenkeel
from trainer.runs import run_process

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = 20_000
DEMO_ROWS = os.environ.get("EVENKEEL_TEST_DEMO_ROWS", "50000")
"""Of the demo itself; `make demo` has 200,000."""

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.timeout(900)]


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


class WithForkedService(demo.Demo):  # type: ignore[name-defined, misc]
    def serve(self, environment: dict[str, str]) -> Any:
        served = Forked(self.home / "service.log", environment, evenkeel_in_one_log, "serve", "--port", "0")
        served.stdout.close()
        return served


def evenkeel_in_one_log(*arguments: str) -> None:
    os.dup2(2, 1)
    evenkeel(*arguments)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A demo whose service runs and has published its first version."""
    started = WithForkedService(tmp_path_factory.mktemp("demo"), num_rows=ROWS)
    started.prepare_data()
    try:
        started.start_service()
        started.register()
        started.publish()
        yield started
    finally:
        started.stop()


def lead(running: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the phases of ``kind`` on a service that already runs, and leaves that alone."""
    broken = kind(running.home, num_rows=ROWS)
    broken.__dict__.update({name: value for name, value in running.__dict__.items() if name != "seconds"})
    monkeypatch.setattr(broken, "stop", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return int(demo.lead(broken, keep=True))


@pytest.mark.long
def test_the_demo_ends_in_demo_ok(tmp_path: Path) -> None:
    """As `make demo` runs it, on fewer rows, with an environment that would lead it astray, and nothing left behind."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "EVENKEEL_URL": "http://127.0.0.1:9", "EVENKEEL_API_KEY": "x"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--rows", DEMO_ROWS], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "DEMO OK"
    assert not list(tmp_path.glob("evenkeel-demo-*"))
    deadline = time.monotonic() + 60  # what was ended may take a moment to be gone
    while left := processes_under(tmp_path):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.1)


def test_what_the_parts_show_when_nothing_is_broken(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Intact(demo.Demo):  # type: ignore[name-defined, misc]
        def run(self) -> None:
            self.hold_broken_refresh()
            self.fetch()

    assert lead(published, Intact, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "DEMO OK"


def test_a_gate_that_is_off_takes_demo_ok_away(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class GateOff(demo.Demo):  # type: ignore[name-defined, misc]
        def run(self) -> None:
            self.hold_broken_refresh()

        def broken_settings(self) -> Settings:
            return Settings(gate=Gate("off"))

    before = published.client.version("items")["version"]
    assert lead(published, GateOff, monkeypatch) == 1
    output = capsys.readouterr().out
    assert "shuffled ids was published, not held" in output
    assert "DEMO OK" not in output
    published.client.promote("items", before, "the test broke it")


def test_an_absent_view_takes_demo_ok_away(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fetch(demo.Demo):  # type: ignore[name-defined, misc]
        def run(self) -> None:
            self.fetch()

    views = published.home / "evenkeel" / "store" / "collections" / "items" / "views"
    aside = views.with_name("aside")
    shutil.move(views, aside)
    views.mkdir()
    try:
        assert lead(published, Fetch, monkeypatch) == 1
    finally:
        views.rmdir()
        shutil.move(aside, views)
    output = capsys.readouterr().out
    assert "items_rff" in output
    assert "DEMO OK" not in output


def test_a_killed_worker_takes_demo_ok_away(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class WorkerKilled(demo.Demo):  # type: ignore[name-defined, misc]
        def run(self) -> None:
            ended = threading.Event()
            killer = threading.Thread(target=kill_workers, args=(self, ended))
            killer.start()
            try:
                self.compare_optimizers()
            finally:
                ended.set()
                killer.join()

        def job(self, name: str, **changes: Any) -> dict[str, Any]:
            job: dict[str, Any] = super().job(name, **changes)
            return job | {"retries": 0, "epochs": 1000}

    assert lead(published, WorkerKilled, monkeypatch) == 1
    output = capsys.readouterr().out
    assert "DEMO FAILED: job demo-adam failed" in output
    assert "DEMO OK" not in output


def kill_workers(running: Any, ended: threading.Event) -> None:
    """SIGKILL to the ranks of the job that trains."""
    killed = False
    while not killed and not ended.wait(0.1):
        for job in running.client.jobs(state="running"):
            if (job["progress"] or {}).get("step"):
                for process in run_process.processes(running.home / "evenkeel" / "runs" / job["id"]):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if process.name().startswith("evenkeel-rank"):
                            process.kill()
                            killed = True


def processes_under(folder: Path) -> list[psutil.Process]:
    """Processes whose environment names a path under ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in " ".join(process.environ().values()):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
