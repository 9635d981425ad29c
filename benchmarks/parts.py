"""Where the time of an update goes: the compiled update of AdamAR (lazy) of a batch, with one part at a time left out.

No kernel is copied: what it is given differs. ``in caches`` masks the numbers of rows (or the places of gradients) to
so few that all lie in the first-level cache; ``one gradient`` gives the same number of distinct rows one id each;
``by length`` gives rows with many gradients neighbouring numbers, so that the branch at a row's end is predictable.
``bare`` only reads and writes as many rows, state and one gradient each (benchmarks.bare_rows). ``two_sizes``: the bare
pass over as many random rows of 10M and of 1M, in the same huge pages, is what memory alone makes of a larger table.

Times are of the compiled call, without sort and Python, in turns within one process; medians and best, ns for each row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.bare_rows import BareRows
from benchmarks.harness import MIN_ITERATIONS, Workload, cpu, versions
from embeddings.config import TableConfig
from embeddings.kernels.cpu.kernel import Entries
from embeddings.kernels.cpu.update import apply_updates, rule_of
from embeddings.optim import AdamAR
from embeddings.tables import EmbeddingTables

# Rows and samples whose state and gradients stay in a first-level cache.
FEW_ROWS, FEW_SAMPLES = 32, 8
Draw = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Update:
    """The compiled update of some tables, called on entries that may have been changed."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.optimizer = AdamAR(1e-3, alpha=1e-5, moments="lazy")
        self.tables = EmbeddingTables(
            [TableConfig(f"t{t}", workload.num_rows, workload.dim, (f"f{t}",)) for t in range(workload.num_tables)],
            self.optimizer,
        )
        self.grad = 1e-2 * torch.randn(workload.batch_size, workload.num_tables * workload.dim)
        self.kernel: Any = self.tables._kernel

    def entries(self, given: tuple[torch.Tensor, torch.Tensor]) -> Entries:
        indices, offsets = given
        batch_size = (len(offsets) - 1) // self.workload.num_tables
        self.tables(indices, offsets).backward(self.grad[:batch_size])
        records, self.tables._records = self.tables._records, []
        entries: Entries = self.kernel._entries(records)
        return entries

    def masked(self, entries: Entries, rows: bool, gradients: bool) -> Entries:
        """With rows, or places of gradients, folded onto a few; where a row's keys end stays as it is."""
        keys, _, place_bits, *_ = entries.sorted
        bits, total_dim = np.uint64(place_bits), np.uint64(self.tables.layout.total_dim)
        row, place = keys >> bits, keys & np.uint64((1 << place_bits) - 1)
        if rows:
            # Neighbouring runs keep different rows.
            row = row % np.uint64(FEW_ROWS)
        if gradients:
            place = place % total_dim + place // total_dim % np.uint64(FEW_SAMPLES) * total_dim
        keys[:] = row << bits | place
        return entries

    def time(self, entries: Entries) -> float:
        """Seconds of one call, as the next step."""
        tables, kernel = self.tables, self.kernel
        idle = tables._idle_now()
        step = tables.completed_steps + 1
        function = apply_updates(kernel._kind, True, False, kernel._one_dim)
        arguments = (
            *kernel._storage(), entries.grads, kernel._geometry, *entries.sorted, kernel._room("words", 1, np.uint32),
            kernel._rounding, rule_of(self.optimizer, step, (0.0, 1.0)), kernel._fades, step, 1.0,
            *kernel._idle_arguments(idle)[1:],
        )  # fmt: skip
        start = time.perf_counter()
        function(*arguments)
        elapsed = time.perf_counter() - start
        tables.completed_steps = step
        return elapsed


def distinct(draw: Draw, num_tables: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """As many different ids of each table as a batch has on average, one for each bag."""
    batch = [torch.unique(ids) for ids in draw()[0].view(num_tables, -1)]
    count = min(map(len, batch))
    ids = torch.cat([each[torch.randperm(len(each))[:count]] for each in batch])
    return ids, torch.arange(len(ids) + 1), float(len(ids))


def by_length(indices: torch.Tensor, num_tables: int) -> torch.Tensor:
    """The same rows, as often and at the same places of the batch as some row, but the more often the higher."""
    parts = []
    for ids in indices.view(num_tables, -1):
        rows, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        rank = torch.empty_like(counts)
        rank[torch.argsort(counts, stable=True)] = torch.arange(len(counts))
        parts.append(rows[rank[inverse]])
    return torch.cat(parts)


def line(case: str, workload: Workload, nanoseconds: list[float], **more: Any) -> None:
    found = {
        "bench": "parts", "workload": str(workload), "case": case,
        "ns_per_row": round(float(np.median(nanoseconds)), 1), "best": round(min(nanoseconds), 1),
        **more, "iterations": len(nanoseconds), "versions": versions(), "cpu": cpu(),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


def of_update(workload: Workload, iterations: int) -> None:
    update, draw = Update(workload), workload.sampler()
    bare = BareRows(update.tables)

    def rows_of(indices: torch.Tensor) -> float:
        return float(sum(len(torch.unique(ids)) for ids in indices.view(workload.num_tables, -1)))

    def as_drawn(rows: bool = False, gradients: bool = False, ordered: bool = False) -> tuple[float, float]:
        indices, offsets = draw()
        if ordered:
            indices = by_length(indices, workload.num_tables)
        entries = update.entries((indices, offsets))
        return update.time(update.masked(entries, rows, gradients)), rows_of(indices)

    def one_each(rows: bool = False, gradients: bool = False) -> tuple[float, float]:
        indices, offsets, count = distinct(draw, workload.num_tables)
        return update.time(update.masked(update.entries((indices, offsets)), rows, gradients)), count

    def bare_pass() -> tuple[float, float]:
        places = bare.places(draw()[0])
        start = time.perf_counter()
        bare(places, update.grad)
        return time.perf_counter() - start, float(len(places[0]))

    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        "as it is": as_drawn,
        "by length": lambda: as_drawn(ordered=True),
        "one gradient": one_each,
        "state in caches": lambda: as_drawn(rows=True),
        "gradients in caches": lambda: as_drawn(gradients=True),
        "all in caches": lambda: as_drawn(rows=True, gradients=True),
        "one gradient, all in caches": lambda: one_each(rows=True, gradients=True),
        "bare": bare_pass,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(-3, iterations):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            seconds, rows = contestants[name]()
            if i >= 0:
                times[name].append(1e9 * seconds / rows)
    for name, found in times.items():
        line(name, workload, found)


def of_two_sizes(dim: int, iterations: int) -> None:
    """The bare pass over random rows of ten million and of one million."""
    workloads = [Workload("uniform", 1, rows, dim, 32_768) for rows in (10_000_000, 1_000_000)]
    passes = []
    for workload in workloads:
        update = Update(workload)
        # Every page there is, as in training.
        for each in (update.tables.layout.weights, update.tables.layout.vectors, update.tables.layout.last_steps):
            each.zero_()
        passes.append((workload, BareRows(update.tables), workload.sampler(), update.grad))
    times: list[list[float]] = [[], []]
    for i in range(-3, iterations):
        for j in range(2):
            workload, bare, draw, grad = passes[(i + j) % 2]
            places = bare.places(draw()[0])
            start = time.perf_counter()
            bare(places, grad)
            if i >= 0:
                times[(i + j) % 2].append(1e9 * (time.perf_counter() - start) / len(places[0]))
    ratio = float(np.median(times[0]) / np.median(times[1]))
    for workload, found in zip(workloads, times, strict=True):
        line("bare", workload, found, larger_over_smaller=round(ratio, 3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=31)
    options = parser.parse_args()
    if options.iterations < MIN_ITERATIONS:
        parser.error(f"a median of {options.iterations} is no figure: take at least {MIN_ITERATIONS}")
    torch.set_num_threads(1)
    for kind in ("zipf", "uniform"):
        of_update(Workload(kind, 8, 200_000, 64, 4096), options.iterations)
    of_two_sizes(64, options.iterations)
