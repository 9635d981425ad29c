"""Processor time that a rank's threads wanted and did not get. The times are known only on Linux. Torch-free."""

from __future__ import annotations

import time
from pathlib import Path

INTERVAL_SECONDS = 10.0
"""Shortest time, in seconds, over which the share is measured."""
STARVED = 0.3
"""Share of the wanted processor time that a rank does not get, from which on its job says that it is starved."""


class Starvation:
    """Share of the processor time that this process's threads wanted and did not get.

    A thread wants a processor while it runs, or waits in the run queue; a thread that sleeps wants none. On a virtual
    machine the share is at least that which its host takes away.

    Args:
        proc: folder of the kernel's figures.
    """

    def __init__(self, proc: Path = Path("/proc")):
        self._proc, self._share = proc, 0.0
        self._at, self._threads, self._machine = time.monotonic(), self._read_threads(), self._read_machine()

    def share(self) -> float:
        """Return the share, from 0 to 1, measured over the last interval that has ended; 0 if it is unknown."""
        now = time.monotonic()
        if now - self._at >= INTERVAL_SECONDS:
            threads, machine = self._read_threads(), self._read_machine()
            got, waited = (
                sum(max(0, one[field] - self._threads.get(tid, (0, 0))[field]) for tid, one in threads.items())
                for field in (0, 1)
            )
            busy, stolen = (after - before for before, after in zip(self._machine, machine, strict=True))
            self._share = max(waited / max(got + waited, 1), stolen / max(busy + stolen, 1))
            self._at, self._threads, self._machine = now, threads, machine
        return self._share

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


def in_words(share: float | None) -> str | None:
    """Return a sentence for a job whose rank is starved; None if it is not."""
    if share is None or share < STARVED:
        return None
    return (
        f"starved: the threads of a rank got {1 - share:.0%} of the processor time that they wanted: stop other "
        "programs of its machine, or ask for fewer resources.num_workers or cpus_per_worker"
    )
