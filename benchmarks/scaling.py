"""Time of a whole step: its growth with the table, and the speed-up by a second rank.

Case ``rows``: a step of AdamAR (dense moments) on a table of 3 million rows (``--full``: 10 million, which needs 9 GB)
and on one of 1 million, dim ``--dim``, with the same number of ids: the table's size then matters only through caches
and page tables. Rows have state as if they had been trained. ``whole``: with an MLP behind the table, else lookup,
backward and step of the table alone. ``bytes_per_row``: growth of resident memory while the large table is filled.

Case ``ranks``: a whole step (distribution, lookup, MLP, backward, all-reduce, update) of 2 ranks with one thread each,
and of 1 rank with one thread, on the same batches, without Ray; making the batches is not timed. All setups stay alive
and take turns. ``speedup``: time of one rank / that of two. ``limit``: time of one rank / that of two processes that
train on half a batch each and exchange nothing, which is what the machine's caches and memory allow. ``cpu_ms`` and
``best_cpu_ms``: processor time of a step on the busiest rank, median and best.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing

from benchmarks.sse import HIDDEN, Batch, Training, batches, rank_process
from benchmarks.support.harness import Workload, interleave, line, parse
from embeddings import EmbeddingTables, TableConfig
from embeddings.optim import AdamAR

FEW, MANY = 1_000_000, 10_000_000
NUM_FEATURES, DIM, BATCH_SIZE = 8, 64, 4096
COMPLETED_STEPS = 1000
STEPS_AT_ONCE = 5
OPTIMIZER = AdamAR(1e-3, alpha=1e-5)
PLANS = ("planner", "row_wise")


# --- rows ------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Trained:
    """One table of ``num_rows`` rows that were all trained before, read by all features, and its next steps."""

    def __init__(self, distribution: str, num_rows: int, dim: int):
        features = tuple(f"f{number}" for number in range(NUM_FEATURES))
        before = resident_bytes()
        self.tables = EmbeddingTables([TableConfig("t", num_rows, dim, features)], OPTIMIZER)
        generator = torch.Generator().manual_seed(0)
        state = self.tables.state("t")
        for start in range(0, num_rows, 1 << 20):
            rows = slice(start, start + (1 << 20))
            for value in (self.tables.weight("t"), state["m"]):
                value[rows].normal_(0, 0.01, generator=generator)
            state["v"][rows].uniform_(1e-6, 1e-4, generator=generator)
            state["last_update_step"][rows].random_(1, COMPLETED_STEPS + 1, generator=generator)
        self.tables.completed_steps = COMPLETED_STEPS
        self.bytes_per_row = (resident_bytes() - before) / num_rows
        self.draw = Workload(distribution, NUM_FEATURES, num_rows, dim, BATCH_SIZE).sampler()
        self.grad = torch.randn(BATCH_SIZE, NUM_FEATURES * dim, generator=generator)
        sizes = (NUM_FEATURES * dim, *HIDDEN)
        layers = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], 1))
        self.dense = torch.optim.Adam(self.mlp.parameters(), lr=1e-3)

    def step(self, given: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.tables(*given).backward(self.grad)
        self.tables.step(self.tables.completed_steps + 1)

    def whole_step(self, given: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.dense.zero_grad()
        self.mlp(self.tables(*given)).mean().backward()
        self.dense.step()
        self.tables.step(self.tables.completed_steps + 1)


def rows(
    distribution: str, threads: int, iterations: int, many: int = MANY, few: int = FEW, dim: int = DIM
) -> list[dict[str, Any]]:
    """Return the output lines of case ``rows``: only the table, and whole steps."""
    torch.set_num_threads(threads)
    large, small = Trained(distribution, many, dim), Trained(distribution, few, dim)
    times = interleave(
        lambda: (large.draw(), small.draw(), large.draw(), small.draw()),
        lambda given: large.step(given[0]),
        lambda given: small.step(given[1]),
        lambda given: large.whole_step(given[2]),
        lambda given: small.whole_step(given[3]),
        iterations=iterations,
    )
    assert large.tables.completed_steps == small.tables.completed_steps
    return [
        line(
            "scaling", f"rows {distribution} D{dim} {NUM_FEATURES * BATCH_SIZE} ids N{many} {part}", f"N{few}", taken,
            optimizer="adam_ar dense", num_rows=many, bytes_per_row=round(large.bytes_per_row, 1),
        )
        for part, taken in (("table", times[:, :2]), ("whole", times[:, 2:]))
    ]  # fmt: skip


# --- ranks -----------------------------------------------------------------------------------------------------------


class SummedTraining(Training):
    """Training as in a job: each step ends with the loss of all ranks."""

    def step_with_loss(self, batch: Batch) -> float:
        """Train on the batch, and return the mean loss of the global batch."""
        from embeddings.sharding.exchange.collectives import all_reduce

        k = self.model.completed_steps + 1
        self.model.set_context(k, batch.start, self.batch_size)
        self.dense.zero_grad()
        loss = self.module.loss(batch).sum() / self.batch_size
        loss.backward()
        self.model.all_reduce_gradients()
        total = all_reduce("loss", loss.detach())
        self.dense.step()
        self.model.step_tables(k)
        return float(total)


class Ranks:
    """``world_size`` processes that train on request, one thread each, until :meth:`close` or this process ends.

    ``apart``: each is the only rank of a training of its own.
    """

    def __init__(self, world_size: int, workload: Workload, plan: str, folder: str, apart: bool = False):
        context = multiprocessing.get_context("spawn")
        self.losses: list[float] = []
        self.cpu_seconds: list[float] = []
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            group = (0, 1, f"apart-{rank}") if apart else (rank, world_size, str(world_size))
            arguments = (*group[:2], f"file://{folder}/{group[2]}", there, workload, plan)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def prepare(self) -> None:
        """Make the batches of the next :meth:`step`."""
        self._ask("prepare")

    def step(self) -> None:
        """Run STEPS_AT_ONCE steps on all ranks; record the losses and the busiest rank's processor seconds."""
        answers = self._ask("step")
        self.losses.extend(answers[0][0])
        self.cpu_seconds.append(max(seconds for _, seconds in answers))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join()

    def _ask(self, what: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]


def _rank(rank: int, world_size: int, store: str, pipe: Connection, workload: Workload, plan: str) -> None:
    from trainer.launch.worker import steady_memory

    with rank_process(rank, world_size, store):
        training, source, ready = SummedTraining(workload, None, plan), batches(workload), []
        with steady_memory():
            while (what := pipe.recv()) != "end":
                if what == "prepare":
                    ready = [next(source)[0] for _ in range(STEPS_AT_ONCE)]
                    pipe.send(None)
                else:
                    start = time.process_time()
                    losses = [training.step_with_loss(batch) for batch in ready]
                    pipe.send((losses, time.process_time() - start))


@contextlib.contextmanager
def _contestants(workload: Workload, plan: str) -> Iterator[tuple[Ranks, Ranks, Ranks]]:
    """Yield two ranks, one rank, and two processes with half a batch each that exchange nothing."""
    half = dataclasses.replace(workload, batch_size=workload.batch_size // 2)
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder, contextlib.ExitStack() as stack:
        started = (
            Ranks(2, workload, plan, folder),
            Ranks(1, workload, plan, folder),
            Ranks(2, half, plan, folder, apart=True),
        )
        for each in started:
            stack.callback(each.close)
        yield started


def ranks(workload: Workload, plan: str, iterations: int) -> dict[str, Any]:
    """Return the output line of case ``ranks``."""
    torch.set_num_threads(1)
    with _contestants(workload, plan) as (two, one, apart):

        def prepare() -> None:
            for each in (two, one, apart):
                each.prepare()

        times = interleave(
            prepare,
            lambda _: two.step(),
            lambda _: one.step(),
            lambda _: apart.step(),
            iterations=iterations,
        )
    # The ranks sum float32 in another order, over a few hundred steps.
    torch.testing.assert_close(torch.tensor(two.losses), torch.tensor(one.losses), rtol=1e-2, atol=1e-3)
    cpu_ms, best_cpu_ms = (
        {
            name: round(1e3 * float(statistic(each.cpu_seconds[-iterations:])) / STEPS_AT_ONCE, 4)
            for name, each in (("two", two), ("one", one))
        }
        for statistic in (np.median, np.min)
    )
    times /= STEPS_AT_ONCE
    two_ms, one_ms, apart_ms = np.median(times, axis=0)
    return line(
        "scaling", f"ranks {plan} {workload}", "1 rank", times[:, :2], speedup=round(float(one_ms / two_ms), 4),
        limit=round(float(one_ms / apart_ms), 4), cpu_ms=cpu_ms,
        best_cpu_ms=best_cpu_ms, ranks=2, model=f"dnn {'-'.join(map(str, HIDDEN))}", optimizer="adam_ar dense",
        equal="losses",
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="*", default=[1], help="numbers of threads of case rows")
    parser.add_argument("--case", default="", choices=["", "rows", "ranks"])
    parser.add_argument("--many", type=int, default=3_000_000, help="rows of the large table")
    parser.add_argument("--dim", type=int, default=DIM, help="dimension of case rows")
    options = parse(parser, threads=[1, 2], many=MANY)
    if options.case != "rows":
        for plan_ in PLANS:
            ranks(Workload("zipf", NUM_FEATURES, 200_000, DIM, BATCH_SIZE), plan_, options.iterations)
    if options.case != "ranks":
        for threads_ in options.threads:
            for distribution_ in ("zipf", "uniform"):
                rows(distribution_, threads_, options.iterations, options.many, dim=options.dim)
