"""Comparison of tables under TorchRec with plain torch: on one rank, in its pipeline, on two ranks of one GPU."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.gpu.torchrec.training import (
    DENSE_RATE,
    SECONDS,
    Batch,
    Model,
    Optimizers,
    Plain,
    last_lines,
    parallel,
    quiet,
    ranks,
    sharding_of,
)
from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.backends import Backend
from embeddings.optim import AdamAR
from embeddings.sharding import ModelTables, TableSettings, TableSharder, embedding_bag_collection
from embeddings.sharding.exchange.collectives import all_reduce
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.tables.config import InitConfig, TableConfig

TOLERANCE = 1e-3
MAX_LENGTH = 5
RANK_STEPS = 10
WAYS = ("table_wise", "row_wise")
Rows = dict[str, Tensor]
"""Rows and state of all tables, by ``table/what``, on the CPU."""


def small_settings(rows: int, backend: Backend | None) -> TableSettings:
    """Return settings for tables of two widths, with a feature that is a list: AdamAR and SSE, once by a graph."""
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
            # Rows with low numbers occur more often.
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
    """Return rows and state with the parts of each table joined in order."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for name, value in parts.items():
        what, _, row = name.partition("@")
        by_name.setdefault(what, {})[int(row or 0)] = value
    return {name: torch.cat([at[row] for row in sorted(at)]) for name, at in by_name.items()}


def compared(found: Rows, wanted: Rows) -> dict[str, Any]:
    """Return ``close`` (True if all rows are equal within TOLERANCE), and the largest difference and its tensor."""
    if found.keys() != wanted.keys() or any(found[name].shape != wanted[name].shape for name in wanted):
        return {"close": False, "shapes": {name: list(value.shape) for name, value in found.items()}}
    worst = max(wanted, key=lambda name: float((found[name].double() - wanted[name].double()).abs().max()))
    difference = (found[worst].double() - wanted[worst].double()).abs().max()
    close = all(torch.allclose(found[name], wanted[name], rtol=TOLERANCE, atol=TOLERANCE) for name in wanted)
    return {"close": close, "largest_difference": float(difference), "of": worst}


def differing(found: Rows, wanted: Rows) -> list[str]:
    """Return the names of tensors that differ in any bit."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def one_rank(options: Any, process_group: str) -> dict[str, Any]:
    """Return differences of one rank from plain torch, and True if its bits are those of other runs."""
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
    """Be one of two ranks: train, and write this rank's tensors, or its error, to ``folder``."""
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
    """Return differences of two ranks on this device from one rank, keyed by the way that tables are split."""
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
            # A rank that waits for ever counts as a failure.
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
