"""Time of backward and row update. Every contestant gets the same ids and the same output gradient.

Peers ``fbgemm_adagrad`` and ``fbgemm_rowwise_adagrad``: backward + update against FBGEMM's fused ones (rowwise Adagrad
keeps one number per row where the other optimizers keep one or two vectors, so it has less work).
``torch_sparse_adam``: lookup + backward + step against torch.nn.EmbeddingBag with torch.optim.SparseAdam. ``copy``:
bytes per second that the update must move, divided by those of a plain copy on the same threads. ``lazy``: lookup +
backward + step of AdamAR, dense moments against lazy moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from benchmarks.support import peers
from benchmarks.support.harness import Workload, interleave, line, main
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import Adagrad, Adam, AdamAR, RMSprop, RowOptimizer, RowwiseAdagrad, RowwiseAdamAR
from embeddings.optim.deferred_update import DeferredUpdateCoefficients

EPS = 1e-8
# SparseAdam adds eps before it corrects the bias of v: with a small eps both compute the same.
SPARSE_EPS = 1e-12
COPY_BYTES = 1 << 28
# Untimed steps: caches are then as in training, and momentum is past its costly first steps.
WARM_UP = 300
OPTIMIZERS: dict[str, RowOptimizer] = {
    "adagrad": Adagrad(0.01, eps=EPS),
    "adam_ar dense": AdamAR(1e-3, alpha=1e-5),
    "adam_ar lazy": AdamAR(1e-3, alpha=1e-5, moments="lazy"),
}
# Only these are compared with FBGEMM's rowwise Adagrad.
SMALL_STATE: dict[str, RowOptimizer] = {
    "rowwise_adagrad": RowwiseAdagrad(0.01, eps=EPS),
    "rmsprop": RMSprop(1e-3),
    "rowwise_adam_ar dense": RowwiseAdamAR(1e-3, alpha=1e-5),
}
# Same update rule as the peer: outputs are compared.
SAME = {"fbgemm_adagrad": "adagrad", "fbgemm_rowwise_adagrad": "rowwise_adagrad"}


def update_of(tables: Any, pooled: dict[int, torch.Tensor], number: int, grad: torch.Tensor) -> Callable[[Any], None]:
    """Return a function that runs backward and update for the output ``pooled[number]``."""

    def update(_: Any) -> None:
        pooled[number].backward(grad)
        if isinstance(tables, EmbeddingTables):
            tables.step(tables.completed_steps + 1)

    return update


def time_updates(draw: Any, grad: torch.Tensor, contestants: list[Any], iterations: int) -> np.ndarray:
    """Return milliseconds of backward + update, [iterations, contestants]."""
    pooled: dict[int, torch.Tensor] = {}

    def prepare() -> None:
        indices, offsets = draw()
        for j, contestant in enumerate(contestants):
            pooled[j] = contestant(indices, offsets)

    updates = [update_of(contestant, pooled, j, grad) for j, contestant in enumerate(contestants)]
    return interleave(prepare, *updates, iterations=iterations, warm_up=WARM_UP)


def bytes_moved(workload: Workload, rows: float, num_vectors: int) -> float:
    """Return the bytes that an update must move.

    Each touched row, its state and its last step are read and written; each output gradient is read.
    """
    row_bytes = 4 * workload.dim
    return rows * (2 * row_bytes * (1 + num_vectors) + 8) + workload.num_tables * workload.batch_size * row_bytes


def copy_bandwidth(repetitions: int = 15) -> float:
    """Return bytes read and written per second by a copy far larger than the caches, on torch's threads."""
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / float(np.median(seconds[1:]))


def run(workload: Workload, iterations: int) -> Iterator[dict[str, Any]]:
    draw = workload.sampler()
    grad = 1e-2 * torch.randn(workload.batch_size, workload.num_tables * workload.dim)
    for peer_name, kind in {
        "fbgemm_adagrad": EmbOptimType.EXACT_ADAGRAD,
        "fbgemm_rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }.items():
        beside = OPTIMIZERS | (SMALL_STATE if kind == EmbOptimType.EXACT_ROWWISE_ADAGRAD else {})
        for name, optimizer in beside.items():
            tables = peers.ours(workload, optimizer)
            peer = peers.fbgemm(workload, tables, kind, learning_rate=0.01, eps=EPS)
            times = time_updates(draw, grad, [tables, peer], iterations)
            same = SAME[peer_name] == name
            if same:
                for t, weight in enumerate(peer.split_embedding_weights()):
                    torch.testing.assert_close(tables.read(f"t{t}"), weight, rtol=1e-4, atol=1e-5)
            yield line(
                "update", f"{workload} {name}", peer_name, times, equal="outputs" if same else "ids and gradients"
            )
            del tables, peer
    for name, optimizer in OPTIMIZERS.items():
        yield from against_memory(workload, name, optimizer, draw, grad, iterations)
    yield from against_sparse_adam(workload, draw, grad, iterations)
    yield from dense_against_lazy(workload, draw, grad, iterations)


def dense_against_lazy(workload: Workload, draw: Any, grad: torch.Tensor, iterations: int) -> Iterator[dict[str, Any]]:
    """Measure a whole step with dense moments and one with lazy moments, when many rows have been idle for long.

    ``hot``: the share of looked-up rows that were touched within the lifetime of momentum, whose moments are read too.
    It depends on rows and batch, and is close to 1 for small tables.
    """
    optimizers = [AdamAR(1e-3, alpha=1e-6), AdamAR(1e-3, alpha=1e-6, moments="lazy")]
    contestants = [peers.ours(workload, optimizer) for optimizer in optimizers]
    horizon = DeferredUpdateCoefficients(optimizers[0], "float32").horizon
    hot: list[float] = []

    def prepare() -> Any:
        indices, offsets = draw()
        tables = contestants[0]
        for t, rows in enumerate(indices.view(workload.num_tables, -1)):
            last = tables.state(f"t{t}")["last_update_step"][rows]
            hot.append(float(((last > 0) & (last >= tables.completed_steps - horizon)).float().mean()))
        return indices, offsets

    steps = [peers.whole_step(tables, grad) for tables in contestants]
    times = interleave(prepare, *steps, iterations=iterations, warm_up=WARM_UP)
    share = round(float(np.mean(hot[-iterations * workload.num_tables :])), 3)
    yield line("update", f"{workload} whole step adam_ar dense", "lazy", times, equal="ids and gradients", hot=share)


def against_memory(
    workload: Workload, name: str, optimizer: RowOptimizer, draw: Any, grad: torch.Tensor, iterations: int
) -> Iterator[dict[str, Any]]:
    """Measure the bandwidth of a step, its sort included, as a share of a copy's bandwidth."""
    tables, touched = peers.ours(workload, optimizer), []

    def prepare() -> None:
        indices, offsets = draw()
        tables(indices, offsets).backward(grad)
        touched.append(sum(len(torch.unique(rows)) for rows in indices.view(workload.num_tables, -1)))

    def update(_: Any) -> None:
        tables.step(tables.completed_steps + 1)

    times = interleave(prepare, update, iterations=iterations, warm_up=WARM_UP)[:, 0]
    moved = bytes_moved(workload, float(np.mean(touched[-iterations:])), len(optimizer.state_names) - 1)
    copy = copy_bandwidth()
    bandwidth = moved / float(np.median(times)) * 1e3
    against = np.stack([times, np.full(iterations, 1e3 * moved / copy)], axis=1)
    yield line(
        "update", f"{workload} {name}", "copy", against, bandwidth_ratio=round(bandwidth / copy, 4),
        gb_per_second=round(bandwidth / 1e9, 2), copy_gb_per_second=round(copy / 1e9, 2),
    )  # fmt: skip


def against_sparse_adam(workload: Workload, draw: Any, grad: torch.Tensor, iterations: int) -> Iterator[dict[str, Any]]:
    for name, optimizer in {
        "adam lazy": Adam(1e-3, eps=SPARSE_EPS, moments="lazy"),
        "adam dense": Adam(1e-3, eps=SPARSE_EPS),
    }.items():
        tables = peers.ours(workload, optimizer)
        peer = peers.TorchSparseAdam(workload, tables, 1e-3, SPARSE_EPS)

        def theirs(given: Any, peer: peers.TorchSparseAdam = peer) -> None:
            peer.step(given[0], grad)

        times = interleave(draw, peers.whole_step(tables, grad), theirs, iterations=iterations, warm_up=WARM_UP)
        if name == "adam lazy":
            for t, bag in enumerate(peer.bags):
                # When gradients nearly cancel, the result depends on the order of summation.
                off = (tables.weight(f"t{t}") - bag.weight.detach()).abs() > 1e-5
                assert off.float().mean() < 1e-5, f"table {t}: {int(off.sum())} elements differ"
        equal = "outputs" if name == "adam lazy" else "ids and gradients"
        yield line("update", f"{workload} {name}", "torch_sparse_adam", times, equal=equal)


if __name__ == "__main__":
    main(run, __doc__ or "")
