"""Whole steps in TorchRec's pipeline: ours, and TorchRec's with FBGEMM's fused optimizers, in turn in one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.gpu.torchrec.training import DENSE_RATE, Batch, Model, Optimizers, last_lines, parallel, ranks
from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.backends import Backend
from embeddings.optim import AdamAR, RowOptimizer, RowwiseAdagrad
from embeddings.sharding import ModelTables, TableSettings, TableSharder, embedding_bag_collection
from embeddings.tables.config import TableConfig


@dataclass(frozen=True)
class Case:
    """Tables of one size, one feature each, with ``length`` ids in each sample."""

    num_tables: int
    num_rows: int
    dim: int
    batch_size: int
    length: int

    def __str__(self) -> str:
        return f"zipf T{self.num_tables} N{self.num_rows} D{self.dim} B{self.batch_size} L{self.length}"

    @property
    def names(self) -> list[str]:
        return [f"t{number}" for number in range(self.num_tables)]


CASES = (Case(26, 1_000_000, 16, 4096, 1), Case(10, 1_000_000, 128, 2048, 20))
HIDDEN = (512, 256)
NUM_BATCHES = 16
WARM_STEPS = 8


def timed_batches(case: Case, device: torch.device) -> list[Batch]:
    """Return batches in host memory that the device can fetch from, as a loader would hand them over."""
    live = case.num_rows - 2
    cumulative = torch.arange(1, live + 1, device=device, dtype=torch.float64).pow(-1.05).cumsum(0)
    cumulative /= cumulative[-1].clone()
    # The frequency of a row must not depend on its position.
    places = torch.randperm(live, device=device) + 2
    num_bags = case.num_tables * case.batch_size
    lengths = torch.full((num_bags,), case.length, dtype=torch.int64)
    offsets = torch.arange(0, num_bags * case.length + 1, case.length)
    batches = []
    for _ in range(NUM_BATCHES):
        ranks = torch.searchsorted(cumulative, torch.rand(num_bags * case.length, device=device, dtype=torch.float64))
        ids = places[ranks.clamp(max=live - 1)].cpu()
        features = KeyedJaggedTensor([f"f{n}" for n in case.names], ids, lengths=lengths, offsets=offsets)
        # Computed here and cached, so that no timed step waits for it.
        features.offset_per_key()
        labels = torch.randint(0, 2, (case.batch_size,)).float()
        batch = Batch(features, labels, 1.0 / case.batch_size)
        batches.append(batch.pin_memory() if device.type == "cuda" else batch)
    return batches


def ours(case: Case, device: torch.device, backend: Backend | None, optimizer: RowOptimizer) -> Any:
    """Return the wrapped model with our sharder; its rows are drawn on the device."""
    configs = [TableConfig(name, case.num_rows, case.dim, (f"f{name}",)) for name in case.names]
    settings = TableSettings.of(configs, optimizer, backend=backend)
    model = _model_of(embedding_bag_collection(configs), case, device)
    wrapped = parallel(model, TableSharder(settings), _tables_whole(case), device)
    for kernel in ModelTables(wrapped.module).kernels():
        kernel.layout.weights.normal_(std=0.01)
    return wrapped


def theirs(case: Case, device: torch.device, optimizer: str) -> Any:
    """Return the wrapped model with TorchRec's sharder, and FBGEMM's fused optimizer of this name."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=case.dim, num_embeddings=case.num_rows, feature_names=[f"f{name}"])
        for name in case.names
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    fused = {"optimizer": getattr(EmbOptimType, optimizer), "learning_rate": 1e-3, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    return parallel(_model_of(bags, case, device), sharder, _tables_whole(case), device)


def _model_of(tables: nn.Module, case: Case, device: torch.device) -> Model:
    return Model(tables, (), case.num_tables * case.dim, HIDDEN, device)


def _tables_whole(case: Case) -> dict[str, Any]:
    return {name: table_wise(rank=0, compute_kernel="fused") for name in case.names}


class Contestant:
    """A wrapped model in TorchRec's pipeline, with batches without end."""

    def __init__(self, wrapped: Any, batches: Sequence[Batch], device: torch.device) -> None:
        is_ours = any(isinstance(module, EmbeddingTables) for module in wrapped.modules())
        dense = torch.optim.Adam(wrapped.module.net.parameters(), lr=DENSE_RATE)
        optimizers = Optimizers(dense, ModelTables(wrapped.module) if is_ours else None)
        self.wrapped, self._device, self._batches = wrapped, device, itertools.cycle(batches)
        self._pipeline = TrainPipelineSparseDist(wrapped, optimizers, device)

    def run(self, num_steps: int) -> tuple[float, float, float]:
        """Return seconds by the clock, of this thread and of the process, for each step."""
        self._wait()
        began = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(num_steps):
            self._pipeline.progress(self._batches)
        self._wait()
        done = time.perf_counter(), time.thread_time(), time.process_time()
        wall, thread, process = ((end - start) / num_steps for start, end in zip(began, done, strict=True))
        return wall, thread, process

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Unchecked:
    """Our contestant without its check of each batch's ids before they are distributed."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._collection = contestant.wrapped.module.tables

    def run(self, num_steps: int) -> tuple[float, float, float]:
        before = self._collection.settings
        self._collection.settings = replace(before, bounds="ignore")
        try:
            return self._contestant.run(num_steps)
        finally:
            self._collection.settings = before


PAIRS = {
    "ours_adam_ar": "fbgemm_adam",
    "ours_adam_ar_unchecked": "fbgemm_adam",
    "ours_rowwise_adagrad": "fbgemm_rowwise_adagrad",
}


def steps(options: Any, case: Case) -> dict[str, Any]:
    """Return times of a step of each contestant that could be built, why others could not, and ratios."""
    device, backend = options.where, options.backend
    builders: dict[str, Callable[[], Any]] = {
        "ours_adam_ar": lambda: ours(case, device, backend, AdamAR(1e-3, alpha=1e-5)),
        "ours_rowwise_adagrad": lambda: ours(case, device, backend, RowwiseAdagrad(1e-3)),
        "fbgemm_rowwise_adagrad": lambda: theirs(case, device, "EXACT_ROWWISE_ADAGRAD"),
    }
    if device.type == "cuda":
        # FBGEMM has no fused Adam for the CPU.
        builders["fbgemm_adam"] = lambda: theirs(case, device, "ADAM")
    contestants: dict[str, Contestant | Unchecked] = {}
    missing: dict[str, list[str]] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ranks("nccl" if device.type == "cuda" else "gloo", device):
        batches = timed_batches(case, device)
        for name, builder in builders.items():
            try:
                contestant = Contestant(builder(), batches, device)
                contestant.run(options.warm_steps)
                contestants[name] = contestant
            except Exception:
                missing[name] = last_lines()
        first = contestants.get("ours_adam_ar")
        if isinstance(first, Contestant):
            contestants["ours_adam_ar_unchecked"] = Unchecked(first)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
        names = list(contestants)
        for i in range(options.rounds):
            for j in range(len(names)):
                name = names[(i + j) % len(names)]
                times[name].append(contestants[name].run(options.round_steps))
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        contestants.clear()
        batches.clear()
    return {
        "passed": not missing, "case": str(case), "rounds": options.rounds, "steps_of_a_round": options.round_steps,
        "contestants": {name: _summary(np.array(values)) for name, values in times.items()},
        "ratios": {
            f"{own} / {peer}": _ratios(np.array(times[own]), np.array(times[peer]))
            for own, peer in PAIRS.items() if own in times and peer in times
        },
        "memory_gb": round(memory / 1e9, 2), "missing": missing,
    }  # fmt: skip


def _summary(seconds: np.ndarray) -> dict[str, float]:
    wall, thread, process = 1e3 * np.median(seconds, axis=0)
    spread = 1e3 * float(np.subtract(*np.percentile(seconds[:, 0], [75, 25])))
    return {
        "steps_per_second": round(1e3 / wall, 2), "step_ms": round(wall, 4), "iqr_ms": round(spread, 4),
        "thread_ms": round(thread, 4), "process_ms": round(process, 4),
    }  # fmt: skip


def _ratios(own: np.ndarray, peer: np.ndarray) -> dict[str, float]:
    ratio = np.median(own, axis=0) / np.median(peer, axis=0)
    return dict(zip(("step", "thread", "process"), (round(float(each), 4) for each in ratio), strict=True))
