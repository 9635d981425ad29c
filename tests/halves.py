"""The whole suite as two pytest processes at once: ``python tests/halves.py [options of pytest]``, as `make test` does.

What runs beside what is fixed by FIRST, so that a failure can be had again. Tests share no port, database schema, key
prefix or directory with one another, so neither do the halves. Ends in 0 where both do.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("tests/service", "tests/end_to_end")
"""As long as all the rest: tests that wait for processes beside tests that compute."""


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


def main(options: list[str]) -> int:
    began = time.monotonic()
    codes = run_at_once([[sys.executable, "-m", "pytest", *paths, *options] for paths in halves()])
    for number, code in enumerate(codes, 1):
        print(f"half {number}: {'passed' if code == 0 else f'FAILED, exit code {code}'}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
