"""Time of a whole step: its growth with the table, and the speed-up by a second rank.

Case ``rows``: lookup, backward and step of AdamAR (dense moments) on a table of 3 million rows (``--full``: 10 million,
which needs 9 GB) and on one of 1 million, dim 64, with the same number of ids: the table's size then matters only
through caches and page tables. Rows have state as if they had been trained.

Case ``ranks``: a whole step (distribution, lookup, MLP, backward, all-reduce, update) of 2 ranks with one thread each,
and of 1 rank with one thread, on the same batches, without Ray; making the batches is not timed. Both setups stay alive
and take turns. ``speedup`` is the time of one rank / that of two; ``cpu_ms`` and ``best_cpu_ms`` are the processor time
of a step on the busiest rank, median and best, which show the speed-up on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
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


class Trained:
    """One table of ``num_rows`` rows that were all trained before, read by all features, and its next steps."""

    def __init__(self, distribution: str, num_rows: int):
        features = tuple(f"f{number}" for number in range(NUM_FEATURES))
        self.tables = EmbeddingTables([TableConfig("t", num_rows, DIM, features)], OPTIMIZER)
        generator = torch.Generator().manual_seed(0)
        state = self.tables.state("t")
        for start in range(0, num_rows, 1 << 20):
            rows = slice(start, start + (1 << 20))
            for value in (self.tables.weight("t"), state["m"]):
                value[rows].normal_(0, 0.01, generator=generator)
            state["v"][rows].uniform_(1e-6, 1e-4, generator=generator)
            state["last_update_step"][rows].random_(1, COMPLETED_STEPS + 1, generator=generator)
        self.tables.completed_steps = COMPLETED_STEPS
        self.draw = Workload(distribution, NUM_FEATURES, num_rows, DIM, BATCH_SIZE).sampler()
        self.grad = torch.randn(BATCH_SIZE, NUM_FEATURES * DIM, generator=generator)

    def step(self, given: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.tables(*given).backward(self.grad)
        self.tables.step(self.tables.completed_steps + 1)


def rows(distribution: str, threads: int, iterations: int, many: int = MANY, few: int = FEW) -> dict[str, Any]:
    """Return the output line of case ``rows``."""
    torch.set_num_threads(threads)
    large, small = Trained(distribution, many), Trained(distribution, few)
    times = interleave(
        lambda: (large.draw(), small.draw()),
        lambda given: large.step(given[0]),
        lambda given: small.step(given[1]),
        iterations=iterations,
    )
    assert large.tables.completed_steps == small.tables.completed_steps
    return line(
        "scaling", f"rows {distribution} D{DIM} {NUM_FEATURES * BATCH_SIZE} ids N{many}", f"N{few}", times,
        optimizer="adam_ar dense", num_rows=many, bytes=many * DIM * 4 * 3,
    )  # fmt: skip


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
    """``world_size`` processes that train on request, one thread each, until :meth:`close` or this process ends."""

    def __init__(self, world_size: int, workload: Workload, plan: str, folder: str):
        context = multiprocessing.get_context("spawn")
        self.losses: list[float] = []
        self.cpu_seconds: list[float] = []
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (rank, world_size, f"file://{folder}/{world_size}-{plan}", there, workload, plan)
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
def _both(workload: Workload, plan: str) -> Iterator[tuple[Ranks, Ranks]]:
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        two, one = Ranks(2, workload, plan, folder), Ranks(1, workload, plan, folder)
        try:
            yield two, one
        finally:
            two.close()
            one.close()


def ranks(workload: Workload, plan: str, iterations: int) -> dict[str, Any]:
    """Return the output line of case ``ranks``."""
    torch.set_num_threads(1)
    with _both(workload, plan) as (two, one):

        def prepare() -> None:
            two.prepare()
            one.prepare()

        times = interleave(
            prepare,
            lambda _: two.step(),
            lambda _: one.step(),
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
    speedup = float(np.median(times[:, 1]) / np.median(times[:, 0]))
    return line(
        "scaling", f"ranks {plan} {workload}", "1 rank", times, speedup=round(speedup, 4), cpu_ms=cpu_ms,
        best_cpu_ms=best_cpu_ms, ranks=2, model=f"dnn {'-'.join(map(str, HIDDEN))}", optimizer="adam_ar dense",
        equal="losses",
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="*", default=[1], help="numbers of threads of case rows")
    parser.add_argument("--case", default="", choices=["", "rows", "ranks"])
    parser.add_argument("--many", type=int, default=3_000_000, help="rows of the large table")
    options = parse(parser, threads=[1, 2], many=MANY)
    if options.case != "rows":
        for plan_ in PLANS:
            ranks(Workload("zipf", NUM_FEATURES, 200_000, DIM, BATCH_SIZE), plan_, options.iterations)
    if options.case != "ranks":
        for threads_ in options.threads:
            for distribution_ in ("zipf", "uniform"):
                rows(distribution_, threads_, options.iterations, options.many)
