"""Cost of SSE: the lookup with swapped ids (p = .01), compared with unswapped ids and with a separate pass.

``separate_pass`` is the usual way to add such swaps: masks and random rows from torch's generator, then a lookup.

Bench ``row_wise``: a whole training step (forward, backward, gradient all-reduce, steps of tables and dense part) of a
DNN on two gloo ranks of one thread each, tables split by rows, with and without SSE. There ids are swapped before they
are sent to the ranks of their rows. ``B`` is the global batch; a step lasts until both ranks have ended it. With
``--threads`` and no number only this bench runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.support import peers
from benchmarks.support.harness import WORKLOADS, Workload, interleave, line, main
from embeddings.optim import SGD, AdamAR

PROBABILITY = 0.01
NUM_RANKS = 2
HIDDEN = (128, 64)
# For a rank that hangs; one that dies is noticed at once. The first step may compile kernels.
TIMEOUT = timedelta(minutes=5)


def separate_pass(indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the ids, each swapped for another row with probability p, by whole-tensor operations."""
    drawn = torch.randint(2, num_rows - 1, indices.shape)
    drawn += drawn >= indices
    return torch.where(torch.rand(indices.shape) < PROBABILITY, drawn, indices)


def run(workload: Workload, iterations: int) -> Iterator[dict[str, Any]]:
    draw = workload.sampler()
    plain = peers.ours(workload, SGD(0.1))
    swapping = peers.ours(workload, SGD(0.1), sse=PROBABILITY)
    # Both share the same rows, so that neither has a warmer cache.
    swapping.layout.weights = plain.layout.weights
    given = draw()
    different = (plain(*given) != swapping(*given)).any(dim=1).float().mean().item()
    expected = 1.0 - (1.0 - PROBABILITY) ** workload.num_tables
    assert 0.5 * expected < different < 2.0 * expected, (different, expected)
    with torch.no_grad():
        times = interleave(
            draw,
            lambda x: swapping(*x),
            lambda x: plain(*x),
            lambda x: plain(separate_pass(x[0], workload.num_rows), x[1]),
            iterations=iterations,
        )
    yield line("sse", str(workload), "without", times[:, :2], probability=PROBABILITY)
    yield line("sse", str(workload), "separate_pass", times[:, [0, 2]], probability=PROBABILITY)


class Batch(NamedTuple):
    """A rank's part of a batch: the samples from ``start`` on."""

    features: Any
    labels: torch.Tensor
    start: int
    shares: torch.Tensor | None = None  # shares of the loss; None without sample weights


class Training:
    """A DNN over sharded tables with its optimizers, on this rank. All ranks must create it together.

    ``plan``: the sharding of every table; with ``planner`` the planner chooses it.
    """

    def __init__(self, workload: Workload, sse: float | None, plan: str = "row_wise"):
        # Only the ranks pay for TorchRec.
        from trainer.distributed.sharded_model import PlanRequest, TableSettings, embedding_bag_collection, shard_model

        tables = peers.table_configs(workload)
        features = [feature for table in tables for feature in table.features]
        model = peers.dnn(embedding_bag_collection(tables), tables, HIDDEN)
        asked = {} if plan == "planner" else {table.name: plan for table in tables}
        settings = TableSettings.of(tables, AdamAR(1e-3, alpha=1e-5), peers.swaps(workload, sse))
        self.model = shard_model(model, settings, PlanRequest(asked))
        assert plan == "planner" or self.model.plan() == asked
        self.module: Any = self.model.module
        self.dense = torch.optim.Adam([parameter for _, parameter in self.model.dense_parameters()], lr=1e-3)
        self.features, self.batch_size = features, workload.batch_size

    def pooled(self, batch: Batch) -> torch.Tensor:
        """Return the rows that the next training forward reads, [b, features, dim]."""
        from trainer.models.base import pooled_rows

        self.model.set_context(self.model.completed_steps + 1, batch.start, self.batch_size)
        with torch.no_grad():
            rows = pooled_rows(self.module.embeddings(batch.features), self.features)
        return rows.view(len(batch.labels), len(self.features), -1)

    def step(self, batch: Batch) -> None:
        k = self.model.completed_steps + 1
        self.model.set_context(k, batch.start, self.batch_size)
        self.dense.zero_grad()
        (self.module.loss(batch).sum() / self.batch_size).backward()
        self.model.all_reduce_gradients()
        self.dense.step()
        self.model.step_tables(k)
        dist.barrier()


def batches(workload: Workload) -> Iterator[tuple[Batch, ...]]:
    """Yield fresh batches of this rank, each in two copies, since TorchRec caches results within a batch."""
    from torchrec import KeyedJaggedTensor

    draw = workload.sampler()
    generator = torch.Generator().manual_seed(0)
    start, stop = (workload.batch_size * (dist.get_rank() + i) // dist.get_world_size() for i in (0, 1))
    keys = [f"f{t}" for t in range(workload.num_tables)]
    lengths = torch.ones(len(keys) * (stop - start), dtype=torch.int64)
    while True:
        # Every rank draws the whole batch and keeps its part.
        ids = draw()[0].view(len(keys), -1)[:, start:stop].reshape(-1)
        labels = (torch.rand(workload.batch_size, generator=generator) < 0.3).float()[start:stop]
        yield tuple(
            Batch(KeyedJaggedTensor(keys, ids.clone(), lengths=lengths.clone(), stride=stop - start), labels, start)
            for _ in range(2)
        )


def time_row_wise(workload: Workload, iterations: int) -> tuple[np.ndarray, int]:
    """Return milliseconds [iterations, 2] of a whole step with and without SSE, and how many ids a batch swaps.

    Collective.
    """
    swapping, plain = Training(workload, PROBABILITY), Training(workload, None)
    source = batches(workload)
    given = next(source)
    # Both still have the same rows, so each pooled row that differs is from a swapped id.
    different = (swapping.pooled(given[0]) != plain.pooled(given[1])).any(dim=2).sum()
    dist.all_reduce(different)
    num_ids = workload.num_tables * workload.batch_size
    expected, deviation = PROBABILITY * num_ids, (PROBABILITY * (1 - PROBABILITY) * num_ids) ** 0.5
    assert abs(int(different) - expected) < 5 * deviation, (int(different), expected)
    times = interleave(
        lambda: next(source), lambda x: swapping.step(x[0]), lambda x: plain.step(x[1]), iterations=iterations
    )
    assert swapping.model.completed_steps == plain.model.completed_steps
    assert all(bool(p.isfinite().all()) for each in (swapping, plain) for _, p in each.model.dense_parameters())
    return times, int(different)


def row_wise(workloads: Sequence[Workload], iterations: int) -> None:
    """Print the lines of bench ``row_wise``. The ranks end with this call, or when this process ends in any way."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
        arguments = (f"file://{folder}/store", list(workloads), iterations)
        multiprocessing.spawn(_rank, arguments, nprocs=NUM_RANKS, daemon=True)


@contextlib.contextmanager
def rank_process(rank: int, world_size: int, store: str) -> Iterator[None]:
    """Make this process a rank of one thread in a gloo group for the duration of the block."""
    # The process dies with its parent (PR_SET_PDEATHSIG); the parent handles Ctrl-C.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    from trainer.launch.worker import quiet, use_threads
    from trainer.runs.protocol import leave

    use_threads(1)
    quiet()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()
    leave(0)


def _rank(rank: int, store: str, workloads: list[Workload], iterations: int) -> None:
    from trainer.launch.worker import steady_memory

    with rank_process(rank, NUM_RANKS, store):
        for workload in workloads:
            with steady_memory():
                times, num_swaps = time_row_wise(workload, iterations)
            if rank == 0:
                line(
                    "row_wise", str(workload), "without", times, probability=PROBABILITY, ranks=NUM_RANKS,
                    model=f"dnn {'-'.join(map(str, HIDDEN))}", optimizer="adam_ar dense",
                    swaps_per_step=num_swaps, equal="ids and labels",
                )  # fmt: skip


if __name__ == "__main__":
    options = main(run, __doc__ or "")
    chosen = [workload for workload in WORKLOADS if options.case in str(workload)]
    if chosen and (1 in options.threads or not options.threads):
        row_wise(chosen, options.iterations)
