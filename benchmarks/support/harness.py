"""Timing of ours and a peer: interleaved in one process, on the same fresh inputs, with the same threads.

One JSON object per line: ``ours_ms`` and ``peer_ms`` are medians, ``ratio`` = ours / peer (below 1 is better), ``iqr``
the interquartile ranges of both in milliseconds, ``best`` their fastest times. If ``iqr`` is as large as the median,
other programs were using the machine, and only ``best`` is meaningful.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ("torch", "fbgemm_gpu-cpu", "numpy")
MIN_ITERATIONS = 15


@dataclass(frozen=True)
class Workload:
    """Tables of one size; each feature of each sample has one id, drawn ``zipf`` or ``uniform``."""

    distribution: str
    num_tables: int
    num_rows: int
    dim: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.distribution} T{self.num_tables} N{self.num_rows} D{self.dim} B{self.batch_size}"

    def sampler(self, seed: int = 0) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that draws fresh (indices, offsets), feature by feature. Row 0 is never drawn."""
        generator = np.random.default_rng(seed)
        count, live = self.num_tables * self.batch_size, self.num_rows - 2
        offsets = torch.arange(count + 1)
        if self.distribution == "uniform":
            return lambda: (torch.from_numpy(generator.integers(2, self.num_rows, count)), offsets)
        # Exponent 1.05, as in click logs; frequent rows are spread at random over the table.
        cumulative = np.cumsum(np.arange(1, live + 1, dtype=np.float64) ** -1.05)
        cumulative /= cumulative[-1]
        places = generator.permutation(live) + 2

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            ranks = np.minimum(np.searchsorted(cumulative, generator.random(count)), live - 1)
            return torch.from_numpy(places[ranks]), offsets

        return draw


# A CTR model's tables with short and with long rows, many small tables, and a step of 100,000 ids.
WORKLOADS = tuple(
    Workload(kind, *shape)
    for kind in ("zipf", "uniform")
    for shape in ((8, 200_000, 16, 4096), (8, 200_000, 64, 4096), (26, 50_000, 16, 2048), (10, 200_000, 128, 10_000))
)
USUAL = "zipf T8 N200000 D64"


def mean_and_deviation(values: Sequence[float] | np.ndarray) -> str:
    """Return the mean of several runs and their sample standard deviation (n - 1); for one run its value."""
    found = np.asarray(values, dtype=np.float64)
    return f"{found.mean():.4f} ± {found.std(ddof=1):.4f}" if len(found) > 1 else f"{found.mean():.4f}"


class Seconds(float):
    """Returned by a contestant that measures its own time."""


def interleave(
    make_input: Callable[[], Any], *contestants: Callable[[Any], Any], iterations: int, warm_up: int = 3
) -> np.ndarray:
    """Return milliseconds [iterations, contestants]; each iteration has a new input, the order rotates.

    If a contestant returns :class:`Seconds`, these count; the others are timed.
    """
    if iterations < MIN_ITERATIONS:
        raise ValueError(f"a median of {iterations} is not reliable: take at least {MIN_ITERATIONS} iterations")
    times = np.empty((iterations, len(contestants)))
    for i in range(-warm_up, iterations):
        given = make_input()
        for j in range(len(contestants)):
            j = (i + j) % len(contestants)
            start = time.perf_counter()
            told = contestants[j](given)
            taken = told if isinstance(told, Seconds) else time.perf_counter() - start
            if i >= 0:
                times[i, j] = 1e3 * taken
    return times


def line(bench: str, case: str, peer: str, times: np.ndarray, **more: Any) -> dict[str, Any]:
    """Print and return the output line of two contestants (ours first). ``more`` adds fields."""
    ours, theirs = np.median(times, axis=0)
    low, high = np.percentile(times, [25, 75], axis=0)
    found = {
        "bench": bench, "case": case, "threads": torch.get_num_threads(),
        "ours_ms": round(float(ours), 4), "peer": peer, "peer_ms": round(float(theirs), 4),
        "ratio": round(float(ours / theirs), 4),
        "iqr": {"ours_ms": round(float(high[0] - low[0]), 4), "peer_ms": round(float(high[1] - low[1]), 4)},
        "best": {"ours_ms": round(float(times[:, 0].min()), 4), "peer_ms": round(float(times[:, 1].min()), 4)},
        **more, "iterations": len(times),
    }  # fmt: skip
    return say(found)


def say(fields: dict[str, Any]) -> dict[str, Any]:
    """Print and return an output line: ``fields`` with the versions and the processor."""
    found = {**fields, "versions": versions(), "cpu": cpu()}
    print(json.dumps(found), flush=True)
    return found


@dataclass(frozen=True)
class Condition:
    """A condition on a benchmark's figures, with the figures that decide it."""

    name: str
    holds: bool
    figures: str

    def __str__(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}  {self.name}: {self.figures}"


def climbed(score: Callable[[int], float], start: int = 0) -> int:
    """Return the n with the highest score, found by hill climbing from ``start`` to a local maximum.

    ``score`` may be called several times with the same n.
    """
    best = start
    while True:
        top = max((best - 1, best, best + 1), key=score)
        if top == best:
            return best
        best = top


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages among ``packages``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu() -> str:
    """Return the CPU model and number of cores, as reported by the kernel."""
    model = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        names = [row.partition(":")[2].strip() for row in path.read_text().splitlines() if row.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} of {len(os.sched_getaffinity(0))} cores"


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **full: Any) -> argparse.Namespace:
    """Return a benchmark's options. Defaults take at most three minutes; with ``--full`` they are ``full``."""
    names = ", ".join(f"{name} {value}" for name, value in full.items())
    parser.add_argument("--full", action="store_true", help=f"the sizes of the reports, up to hours: {names}")
    if parser.parse_known_args(arguments)[0].full:
        parser.set_defaults(**full)
    return parser.parse_args(arguments)


def main(run: Callable[[Workload, int], Iterable[dict[str, Any]]], description: str) -> argparse.Namespace:
    """Run the command line of a kernel benchmark and return its options.

    By default it runs the workload USUAL with one thread: at most three minutes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help="every workload, with 1 and 2 threads: up to half an hour")
    parser.add_argument("--iterations", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="*", help="numbers of threads (default: 1)")
    parser.add_argument("--case", help=f"only workloads whose name contains this (default: {USUAL})")
    options = parser.parse_args()
    if options.threads is None:
        options.threads = [1, 2] if options.full else [1]
    if options.case is None:
        options.case = "" if options.full else USUAL
    for threads in options.threads:
        torch.set_num_threads(threads)
        for workload in WORKLOADS:
            if options.case in str(workload):
                for _ in run(workload, options.iterations):
                    pass
    return options
