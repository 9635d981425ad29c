"""Our tables under TorchRec's DistributedModelParallel and its pipeline on one GPU, beside TorchRec's own.

`python -m benchmarks.gpu.torchrec --device cuda --out FILE`. Needs torch, torchrec, fbgemm_gpu, triton and numpy alone:
of :mod:`trainer`, which needs more, it has the few lines that wrap a model. FILE is written after each check, and holds
the end of the traceback of one that failed. `--device cpu` is for trying it out, with few rows.

* ``one_rank``: AdamAR and SSE, tables whole, by gloo and by NCCL: rows and state end as those of plain torch on the
  CPU without TorchRec; they are the same bits in a second run and in TrainPipelineSparseDist.
* ``two_ranks``: both on this GPU, by gloo, rows split or tables on either: they end as on one rank.
* ``steps``: whole steps in TrainPipelineSparseDist, ours and TorchRec's with FBGEMM's fused optimizer, interleaved in
  one process. ``ratio`` is our time for a step over theirs; ``thread_ms`` is the processor time that the thread of the
  loop takes for one (waiting for the device included), ``process_ms`` that of all threads (backward has its own).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fbgemm_gpu
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.streamable import Pipelineable

from embeddings.embedding_tables import Backend, EmbeddingTables
from embeddings.optim import AdamAR, RowOptimizer, RowwiseAdagrad
from embeddings.sharding import ModelTables, TableSettings, TableSharder, embedding_bag_collection
from embeddings.sharding.exchange.collectives import all_reduce
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.tables.config import InitConfig, TableConfig

CHECKS = ("one_rank", "two_ranks", "steps")
TOLERANCE = 1e-3
SECONDS = 30.0
"""How long a rank waits for another."""
DENSE_RATE = 1e-3
MAX_LENGTH = 5
RANK_STEPS = 10
WAYS = ("table_wise", "row_wise")
Rows = dict[str, Tensor]
"""Rows and state of all tables, by ``table/what``, on the CPU."""


# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass
class Batch(Pipelineable):
    """Ids and labels of some samples of a batch; ``share`` is what a sample's loss counts for."""

    features: KeyedJaggedTensor
    labels: Tensor
    share: float

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        features = self.features.to(device, non_blocking=non_blocking)
        return Batch(features, self.labels.to(device, non_blocking=non_blocking), self.share)

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.labels.pin_memory(), self.share)


class Model(nn.Module):
    """Pooled rows and a small dense net: (loss, logits). ``blocks`` are taken by name, in this order; none: as is."""

    def __init__(
        self, tables: nn.Module, blocks: Sequence[str], width: int, hidden: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.tables, self.blocks = tables, tuple(blocks)
        torch.manual_seed(7)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((width, *hidden)):
            # Smooth: at a kink the last bit of a sum would decide whether a unit has a gradient.
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.net = nn.Sequential(*layers, nn.Linear((width, *hidden)[-1], 1)).to(device)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch.features)
        joined = torch.cat([pooled[name] for name in self.blocks], dim=1) if self.blocks else pooled.values()
        logits = self.net(joined).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        return losses * batch.share, logits


class Plain(nn.Module):
    """Tables of plain torch on the CPU, and no TorchRec around them."""

    def __init__(self, settings: TableSettings) -> None:
        super().__init__()
        self.tables = EmbeddingTables(
            list(settings.tables.values()), settings.optimizer, sse=settings.sse, seed=settings.seed,
            backend="reference",
        )  # fmt: skip

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        assert tuple(features.keys()) == self.tables.features
        pooled = self.tables(features.values(), features.offsets())
        dims = [descriptor.dim for descriptor in self.tables.layout.descriptors]
        return dict(zip(self.tables.features, pooled.split(dims, dim=1), strict=True))


class Optimizers:
    """What TorchRec's pipeline takes for an optimizer: torch's of the dense part, then the step of the rows."""

    def __init__(self, dense: torch.optim.Optimizer, tables: ModelTables | None) -> None:
        self._dense, self._tables, self._step = dense, tables, 0

    def zero_grad(self) -> None:
        self._dense.zero_grad()

    def step(self) -> None:
        self._step += 1
        self._dense.step()
        if self._tables is not None:
            self._tables.step(self._step)


class _NoWrapper(DataParallelWrapper):
    """Wrapper that leaves dense parameters alone, as that of trainer.distributed.sharded_model."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


def parallel(
    model: nn.Module, sharder: Any, shardings: Mapping[str, Any], device: torch.device
) -> DistributedModelParallel:
    """Wrap a model whose ``tables`` are bags on the meta device; all ranks have the same ``device``. Collective."""
    set_gradient_division(False)
    world_size = dist.get_world_size()
    planned = construct_module_sharding_plan(
        model.tables, dict(shardings), sharder, local_size=world_size, world_size=world_size, device_type=device.type
    )
    for sharding in planned.values():
        for shard in sharding.sharding_spec.shards:
            # TorchRec takes GPU i for that of rank i.
            shard.placement = _remote_device(f"rank:{shard.placement.rank()}/{device}")
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.distributed_c10d._get_default_group()),
        device=device,
        plan=ShardingPlan({"tables": planned}),
        sharders=[sharder],
        data_parallel_wrapper=_NoWrapper(),
    )


def sharding_of(name: str, number: int) -> Any:
    """Return TorchRec's way to split table ``number`` over the ranks."""
    if name == "row_wise":
        return row_wise(compute_kernel="fused")
    return table_wise(rank=number % dist.get_world_size(), compute_kernel="fused")


@contextlib.contextmanager
def ranks(backend: str, device: torch.device, rank: int = 0, world_size: int = 1, file: str = "") -> Iterator[None]:
    """Be a rank; ``file`` is where several meet."""
    store = dist.FileStore(file, world_size) if file else dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS),
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- that it is right ------------------------------------------------------------------------------------------------


def small_settings(rows: int, backend: Backend | None) -> TableSettings:
    """Return settings of tables of two widths, one feature of which is a list: AdamAR and SSE, once by a graph."""
    init = InitConfig("normal", 0.1)
    tables = [
        TableConfig("user", rows, 16, ("user",), init=init),
        TableConfig("item", rows, 16, ("item", "history"), pooling={"item": "sum", "history": "mean"}, init=init),
        TableConfig("tag", rows // 2, 8, ("tag",), init=init),
    ]
    live = np.arange(2, rows - 1)
    graph = Graph.from_edges(live, live + 1, rows)
    sse = {"user": SSEConfig(0.1), "item": SSEConfig(0.1, graph=graph, rho=50.0), "history": SSEConfig(0.05)}
    return TableSettings.of(tables, AdamAR(0.01, alpha=1e-4), sse, seed=3, backend=backend)


def small_batch(settings: TableSettings, step: int, size: int, rank: int = 0, world_size: int = 1) -> Batch:
    """Return this rank's samples of the batch of a step, on the CPU."""
    rng = np.random.default_rng([11, step])
    first, end = rank * size // world_size, (rank + 1) * size // world_size
    names, ids, lengths = [], [], []
    for table in settings.tables.values():
        for feature in table.features:
            # Low rows are frequent.
            drawn = (table.num_rows * rng.random((size, MAX_LENGTH)) ** 3).astype(np.int64)
            counts = rng.integers(0, MAX_LENGTH + 1, size) if feature == "history" else np.ones(size, dtype=np.int64)
            kept = np.arange(MAX_LENGTH) < counts[:, None]
            names.append(feature)
            ids.append(drawn[first:end][kept[first:end]])
            lengths.append(counts[first:end])
    labels = torch.from_numpy(rng.integers(0, 2, size)[first:end].astype(np.float32))
    bags = torch.from_numpy(np.concatenate(lengths))
    offsets = torch.cat([bags.new_zeros(1), bags.cumsum(0)])
    features = KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(ids)), lengths=bags, offsets=offsets)
    return Batch(features, labels, 1.0 / size)


def small_model(tables: nn.Module, settings: TableSettings, device: torch.device) -> Model:
    width = sum(table.dim * len(table.features) for table in settings.tables.values())
    blocks = [feature for table in settings.tables.values() for feature in table.features]
    return Model(tables, blocks, width, (32,), device)


def ended(kernels: Sequence[tuple[str, EmbeddingTables]], net: nn.Module | None = None) -> Rows:
    found = {}
    for name, tables in kernels:
        found[f"{name}/weight"] = tables.weight(name)
        found |= {f"{name}/{what}": value for what, value in tables.state(name).items()}
    if net is not None:
        found |= {f"net/{name}": value for name, value in net.named_parameters()}
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def by_reference(settings: TableSettings, num_steps: int, size: int) -> Rows:
    """Train without TorchRec on the CPU, and return rows and state."""
    plain, device = Plain(settings), torch.device("cpu")
    model = small_model(plain, settings, device)
    optimizer = torch.optim.Adam(model.net.parameters(), lr=DENSE_RATE)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        model(small_batch(settings, step, size))[0].backward()
        optimizer.step()
        plain.tables.step(step)
    return ended([(name, plain.tables) for name in settings.tables], model.net)


def by_torchrec(
    settings: TableSettings, sharding: str, num_steps: int, size: int, device: torch.device, pipelined: bool = False
) -> Rows:
    """Train this rank's part under DistributedModelParallel, and return what it holds; ``table@row`` names parts."""
    model = small_model(embedding_bag_collection(list(settings.tables.values())), settings, device)
    shardings = {name: sharding_of(sharding, number) for number, name in enumerate(settings.tables)}
    wrapped = parallel(model, TableSharder(settings), shardings, device)
    tables = ModelTables(wrapped.module)
    dense = torch.optim.Adam(model.net.parameters(), lr=DENSE_RATE)
    optimizers, rank, world_size = Optimizers(dense, tables), dist.get_rank(), dist.get_world_size()

    def batches() -> Iterator[Batch]:
        for step in range(1, num_steps + 1):
            tables.set_context(step, rank * size // world_size)
            yield small_batch(settings, step, size, rank, world_size)

    if pipelined:
        pipeline, iterator = TrainPipelineSparseDist(wrapped, optimizers, device), batches()
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(iterator)
        pipeline.detach()
    else:
        for batch in batches():
            optimizers.zero_grad()
            wrapped(batch.to(device))[0].backward()
            if world_size > 1:
                for parameter in model.net.parameters():
                    assert parameter.grad is not None
                    parameter.grad = all_reduce("dense gradients", parameter.grad)
            optimizers.step()
    found: Rows = {}
    for piece in tables.local_pieces():
        assert piece.column_start == 0
        if piece.row_count:
            part = ended([(piece.name, piece.tables)])
            found |= {f"{name}@{piece.row_start}": value for name, value in part.items()}
    return found | ended([], model.net)


def whole(parts: Rows) -> Rows:
    """Return rows and state with the parts of each table one after another."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for name, value in parts.items():
        what, _, row = name.partition("@")
        by_name.setdefault(what, {})[int(row or 0)] = value
    return {name: torch.cat([at[row] for row in sorted(at)]) for name, at in by_name.items()}


def compared(found: Rows, wanted: Rows) -> dict[str, Any]:
    """Return whether the two are close, and the largest difference with its name."""
    if found.keys() != wanted.keys() or any(found[name].shape != wanted[name].shape for name in wanted):
        return {"close": False, "shapes": {name: list(value.shape) for name, value in found.items()}}
    worst = max(wanted, key=lambda name: float((found[name].double() - wanted[name].double()).abs().max()))
    difference = (found[worst].double() - wanted[worst].double()).abs().max()
    close = all(torch.allclose(found[name], wanted[name], rtol=TOLERANCE, atol=TOLERANCE) for name in wanted)
    return {"close": close, "largest_difference": float(difference), "of": worst}


def differing(found: Rows, wanted: Rows) -> list[str]:
    """Return what has not the same bits in both."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def one_rank(options: Any, process_group: str) -> dict[str, Any]:
    """Return how close one rank comes to plain torch, and whether its bits are those of other runs."""
    settings = small_settings(options.small_rows, options.backend)
    begin = ended([(name, Plain(settings).tables) for name in settings.tables])
    with ranks(process_group, options.where):
        run = partial(by_torchrec, settings, "table_wise", options.steps, options.small_batch, options.where)
        parts = run()
        again, pipelined = differing(run(), parts), differing(run(pipelined=True), parts)
    found = whole(parts)
    moved = {name: float((found[f"{name}/weight"] - begin[f"{name}/weight"]).abs().max()) for name in settings.tables}
    outcome = compared(found, by_reference(settings, options.steps, options.small_batch))
    return {
        "passed": outcome["close"] and not again and not pipelined and min(moved.values()) > 0.01,
        "steps": options.steps, "against_reference": outcome, "other_bits_again": again,
        "other_bits_in_pipeline": pipelined, "largest_move": moved,
    }  # fmt: skip


def be_rank(rank: int, options: Any, folder: str) -> None:
    """Be one of two ranks: train, and leave what this one holds in ``folder``, or why it holds nothing."""
    quiet()
    if options.where.type == "cuda":
        torch.cuda.set_device(options.where)
    else:
        torch.set_num_threads(1)
    settings = small_settings(options.small_rows, options.backend)
    for sharding in WAYS:
        end = f"{folder}/{sharding}.{rank}"
        try:
            with ranks("gloo", options.where, rank, 2, f"{folder}/{sharding}"):
                torch.save(by_torchrec(settings, sharding, RANK_STEPS, options.small_batch, options.where), f"{end}.pt")
                dist.barrier()
        except Exception:
            Path(f"{end}.txt").write_text("\n".join(last_lines()), encoding="utf-8")


def two_ranks(options: Any) -> dict[str, Any]:
    """Return how close two ranks on this device come to one, by the way that tables are split."""
    settings = small_settings(options.small_rows, options.backend)
    with ranks("gloo", options.where):
        wanted = whole(by_torchrec(settings, "table_wise", RANK_STEPS, options.small_batch, options.where))
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            be_rank, (options, folder), nprocs=2, join=False, start_method="spawn"
        )
        assert context is not None
        end, done = time.monotonic() + 2.5 * SECONDS, False
        while not done and time.monotonic() < end:
            done = context.join(timeout=1.0)
        for process in context.processes:
            # A rank that waits for ever is an outcome too.
            process.kill()
        found: dict[str, Any] = {way: _ended_as(wanted, Path(folder), way) for way in WAYS}
    return {"passed": all(each["passed"] for each in found.values()), "steps": RANK_STEPS, **found}


def _ended_as(wanted: Rows, folder: Path, sharding: str) -> dict[str, Any]:
    places = [folder / f"{sharding}.{rank}" for rank in range(2)]
    reasons = [place.with_name(f"{place.name}.txt") for place in places]
    failed = [reason.read_text("utf-8").splitlines() for reason in reasons if reason.exists()]
    held = [torch.load(path) for place in places if (path := place.with_name(f"{place.name}.pt")).exists()]
    if failed or len(held) < 2:
        return {"passed": False, "failed": failed or f"{len(held)} of 2 ranks came to the end in time"}
    first, second = ({name: value for name, value in one.items() if name.startswith("net/")} for one in held)
    outcome, dense = compared(whole(held[0] | held[1]), wanted), differing(first, second)
    counts = [sum(len(value) for name, value in one.items() if "/weight@" in name) for one in held]
    return {
        "passed": outcome["close"] and not dense and min(counts) > 0, "against_one_rank": outcome,
        "other_dense_bits": dense, "rows_by_rank": counts,
    }  # fmt: skip


# --- how fast it is --------------------------------------------------------------------------------------------------


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
    # Which row is frequent has nothing to do with where it lies.
    places = torch.randperm(live, device=device) + 2
    num_bags = case.num_tables * case.batch_size
    lengths = torch.full((num_bags,), case.length, dtype=torch.int64)
    offsets = torch.arange(0, num_bags * case.length + 1, case.length)
    batches = []
    for _ in range(NUM_BATCHES):
        ranks = torch.searchsorted(cumulative, torch.rand(num_bags * case.length, device=device, dtype=torch.float64))
        ids = places[ranks.clamp(max=live - 1)].cpu()
        features = KeyedJaggedTensor([f"f{n}" for n in case.names], ids, lengths=lengths, offsets=offsets)
        # Counted here and carried along: nobody's step has to wait for it.
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
    """Our contestant without the look at each batch's ids that it takes before they are distributed."""

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


# --- the whole -------------------------------------------------------------------------------------------------------


def last_lines(count: int = 14) -> list[str]:
    """Return the end of the traceback of the exception at hand."""
    return traceback.format_exc().strip().splitlines()[-count:]


def quiet() -> None:
    """Let the log have results: TorchRec and torch warn of what they will change in themselves, at each model."""
    for name in ("torchrec", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def versions() -> dict[str, str]:
    """Return versions as the packages say them: they need not be installed by a name."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "torchrec", "triton", "numpy"):
        with contextlib.suppress(ImportError):
            found[package] = str(importlib.import_module(package).__version__)
    found["fbgemm"] = f"{fbgemm_gpu.__version__} {getattr(fbgemm_gpu, '__variant__', '')}".strip()
    return found


def plan_of(options: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the checks that are asked for, by name."""
    if "one_rank" in options.only:
        for process_group in ("gloo", "nccl") if options.where.type == "cuda" else ("gloo",):
            yield f"one_rank {process_group}", partial(one_rank, options, process_group)
    if "two_ranks" in options.only:
        yield "two_ranks gloo", partial(two_ranks, options)
    if "steps" in options.only:
        for case in CASES:
            sized = replace(case, num_rows=options.rows or case.num_rows, batch_size=options.batch or case.batch_size)
            yield f"steps {sized}", partial(steps, options, sized)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("triton", "cpu", "reference"), help="left out: that of the device")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--steps", type=int, default=30, help="of one rank")
    parser.add_argument("--small-rows", type=int, default=2000, help="rows where results are compared")
    parser.add_argument("--small-batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=0, help="rows of a table where steps are timed")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-steps", type=int, default=20)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    quiet()
    options.where = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    if options.where.type == "cuda":
        torch.cuda.set_device(options.where)
    for library in ("GLOO", "NCCL"):
        # All ranks are here: no address of the machine need be found.
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": versions(), "checks": {},
    }  # fmt: skip
    for name, check in plan_of(options):
        began = time.perf_counter()
        try:
            found = check()
        except Exception:
            found = {"passed": False, "failed": last_lines()}
        found["seconds"] = round(time.perf_counter() - began, 1)
        report["checks"][name] = found
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: found}), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 0 if all(found["passed"] for found in report["checks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
