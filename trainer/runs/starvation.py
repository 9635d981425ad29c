"""Processors and memory that a rank uses, and processor time that it lacks. Known on Linux alone. Torch-free."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import NamedTuple

INTERVAL_SECONDS = 10.0
"""Shortest time, in seconds, over which the share is measured."""
STARVED = 0.3
"""Share of the wanted processor time that a rank does not get, from which on its job says that it is starved."""


class Use(NamedTuple):
    """Figures of this process; 0 where unknown.

    ``starved``: share of the processor time that its threads wanted and did not get, from 0 to 1. ``cores``: mean
    number of processors that its threads ran on. ``memory_bytes``: resident memory, shared pages included.
    """

    starved: float = 0.0
    cores: float = 0.0
    memory_bytes: int = 0


class Starvation:
    """This process's use of processors and memory.

    A thread wants a processor while it runs, or waits in the run queue; a thread that sleeps wants none. On a virtual
    machine the starved share is at least the share that its host takes away.
    """

    def __init__(self, proc: Path = Path("/proc")):
        self._proc, self._use = proc, Use(memory_bytes=_resident_bytes(proc))
        self._at, self._threads, self._machine = time.monotonic(), self._read_threads(), self._read_machine()

    def use(self) -> Use:
        """Return the figures of the last interval that has ended."""
        now = time.monotonic()
        if now - self._at >= INTERVAL_SECONDS:
            threads, machine = self._read_threads(), self._read_machine()
            got, waited = (
                sum(max(0, one[field] - self._threads.get(tid, (0, 0))[field]) for tid, one in threads.items())
                for field in (0, 1)
            )
            busy, stolen = (after - before for before, after in zip(self._machine, machine, strict=True))
            share = max(waited / max(got + waited, 1), stolen / max(busy + stolen, 1))
            self._use = Use(share, got / 1e9 / max(now - self._at, 1e-9), _resident_bytes(self._proc))
            self._at, self._threads, self._machine = now, threads, machine
        return self._use

    def _read_threads(self) -> dict[str, tuple[int, int]]:
        """Return, for each thread, the nanoseconds that it ran and those that it waited in the run queue."""
        found = {}
        for folder in (self._proc / "self" / "task").glob("*"):
            try:
                ran, waited, *_ = (folder / "schedstat").read_text("ascii").split()
            except (OSError, ValueError):
                continue  # the thread has ended, or this kernel does not report its waiting time
            found[folder.name] = (int(ran), int(waited))
        return found

    def _read_machine(self) -> tuple[int, int]:
        """Return the ticks for which the machine's processors were busy, and those that its host took away."""
        try:
            figures = [int(one) for one in (self._proc / "stat").read_text("ascii").split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        if len(figures) < 8:
            return 0, 0
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = figures
        return user + nice + system + interrupts + soft_interrupts, stolen


def _resident_bytes(proc: Path) -> int:
    try:
        return int((proc / "self" / "statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def in_words(share: float | None) -> str | None:
    """Return a sentence for a job whose rank is starved; None if it is not."""
    if share is None or share < STARVED:
        return None
    return (
        f"starved: the threads of a rank got {1 - share:.0%} of the processor time that they wanted: stop other "
        "programs of its machine, or ask for fewer resources.num_workers or cpus_per_worker"
    )
