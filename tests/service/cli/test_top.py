"""``evenkeel top`` and the shell's completion, in a terminal of their own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time

import pytest

from service.cli import top
from service.client import Client
from tests.service import serving
from tests.service.serving import EVENKEEL, Run, Served

pytestmark = pytest.mark.process


def read_until(terminal: int, text: str, seconds: float = 60) -> str:
    seen, end = "", time.monotonic() + seconds
    while text not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def test_it_follows_jobs_on_the_screen_until_it_is_told_to_end(served: Served) -> None:
    terminal, side = pty.openpty()
    environment = os.environ | {
        "EVENKEEL_URL": served.url, "EVENKEEL_API_KEY": served.key, "TERM": "xterm", "COLUMNS": "140", "LINES": "40",
    }  # fmt: skip
    command = [EVENKEEL, "top", "--seconds", "0.2"]
    shown = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=environment, close_fds=True)
    os.close(side)
    try:
        assert "Running and waiting" in read_until(terminal, "Recently finished")
        with Client(served.url, served.key) as client:
            job = client.submit(serving.job("followed"))
            assert "followed" in read_until(terminal, "followed")
            client.cancel(job["id"])
        shown.send_signal(signal.SIGINT)
        read_until(terminal, "\x1b[?1049l")
        assert shown.wait(30) == 0
    finally:
        shown.kill()
        shown.wait()
        os.close(terminal)


def test_without_a_terminal_it_prints_once(run: Run, served: Served) -> None:
    with Client(served.url, served.key) as client:
        job = client.submit(serving.job("printed"))
    done = run("top")
    assert done.code == 0
    assert any(line.startswith("printed\t") for line in done.out.splitlines()), done.out
    with Client(served.url, served.key) as client:
        client.cancel(job["id"])


def test_a_held_collection_says_since_when() -> None:
    held = {"in_a_row": 2, "since": "2026-11-24T03:00:00Z", "versions": ["v000002", "v000003"]}
    row = top._held({"name": "items", "current": "v000001", "held": held})
    assert row == {
        "name": "items", "current": "v000001", "held": "v000003 (2 in a row)", "since": "2026-11-24T03:00:00Z",
    }  # fmt: skip


def test_a_service_that_is_not_there_is_an_error_before_the_screen_is_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENKEEL_URL", "http://127.0.0.1:9")
    done = run("top")
    assert done.code == 1
    assert "no service answers" in done.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str) -> None:
    environment = os.environ | {
        "_EVENKEEL_COMPLETE": f"complete_{shell}", "COMP_WORDS": "evenkeel vers", "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "evenkeel vers", "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    done = subprocess.run([EVENKEEL], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "versions" in done.stdout, done.stderr
