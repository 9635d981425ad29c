"""The whole suite as two pytest processes at once: ``python tests/halves.py [options of pytest]``, as `make test` does.

What runs beside what is fixed by FIRST, so that a failure can be had again. Tests share no port, database schema, key
prefix or directory with one another, so neither do the halves.

A test that waits for processes can fail because the machine is busy. What failed, if it is little, is therefore tried
once more when both halves have ended and nothing runs beside it, and is named UNSTEADY where it passes then: it is to
be mended, but tells of the machine and not of the change. What fails twice fails the whole. The last lines name all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("tests/service", "tests/end_to_end")
"""As long as all the rest: tests that wait for processes beside tests that compute."""
MOST_TRIED_AGAIN = 12
"""More failures than that in one half are no chance."""


def halves() -> list[list[str]]:
    """For each half the paths that pytest is given: what FIRST names, and all but that."""
    return [list(FIRST), ["tests", *(f"--ignore={path}" for path in FIRST)]]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip


def run_at_once(commands: list[list[str]]) -> list[int]:
    """Their exit codes. What they print is printed line by line, each with the number of its command before it. SIGTERM
    ends them as Ctrl-C does: tests still end what they have started."""
    processes: list[subprocess.Popen[str]] = []
    handlers = {
        signal.SIGTERM: lambda *_: [process.send_signal(signal.SIGINT) for process in processes],
        signal.SIGINT: lambda *_: None,  # from a terminal it goes to all of them
    }
    # Before the processes start: what they find ignored, as by a job in the background, they would ignore too.
    before = {kind: signal.signal(kind, handler) for kind, handler in handlers.items()}

    def print_lines(number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                print(f"{number}| {line}", end="", flush=True)

    try:
        processes.extend(start(command) for command in commands)
        # Daemons: whoever still holds a pipe when its command has ended keeps nobody waiting.
        printers = [threading.Thread(target=print_lines, args=one, daemon=True) for one in enumerate(processes, 1)]
        for printer in printers:
            printer.start()
        codes = [process.wait() for process in processes]
        for printer in printers:
            printer.join(10)
        return codes
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def cache_of(number: int) -> Path:
    """Where pytest notes what has failed in a half: in one directory they would overwrite each other's."""
    return ROOT / ".pytest_cache" / f"half_{number}"


def failed(number: int) -> list[str]:
    """What failed in a half whose run was made to its end; empty where pytest did not get to write it."""
    file = cache_of(number) / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def pytest_of(number: int, paths: list[str], *options: str) -> list[str]:
    cache = f"cache_dir={cache_of(number)}"
    return [sys.executable, "-m", "pytest", "-o", cache, *options, *paths]


def try_again(number: int, paths: list[str]) -> tuple[list[str], list[str]]:
    """(unsteady, failed) of a half in which tests failed, after what failed was run with nothing beside it."""
    names = failed(number)
    if not 0 < len(names) <= MOST_TRIED_AGAIN:
        return [], names or [f"half {number}, which did not end"]
    print(f"{number}| once more, alone: {', '.join(names)}", flush=True)
    command = pytest_of(number, paths, "--last-failed", "--last-failed-no-failures=none")
    if run_at_once([command]) == [0]:
        return names, []
    still = set(failed(number)) or set(names)
    return [name for name in names if name not in still], sorted(still)


def main(options: list[str]) -> int:
    began = time.monotonic()
    parts = list(enumerate(halves(), 1))
    codes = run_at_once([pytest_of(number, paths, "--cache-clear", *options) for number, paths in parts])
    unsteady: list[str] = []
    broken: list[str] = []
    for (number, paths), code in zip(parts, codes, strict=True):
        print(f"half {number}: {'passed' if code == 0 else f'exit code {code}'}", flush=True)
        # 1: tests failed, and no more than that. Options may have left tests out or stopped at the first failure.
        if code == 1 and not options:
            passed_now, failed_twice = try_again(number, paths)
            unsteady += passed_now
            broken += failed_twice
        elif code:
            broken += failed(number) or [f"half {number}, exit code {code}"]
    for name in unsteady:
        print(f"UNSTEADY, passed alone: {name}")
    for name in broken:
        print(f"FAILED: {name}")
    print(f"{'FAILED' if broken else 'passed'}, {(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
