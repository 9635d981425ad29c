"""Lookups and updates of the Triton kernel on a GPU: what `python -m benchmarks.gpu` times.

Times are of CUDA events, contestants interleaved on the same fresh ids, medians. ``bandwidth_ratio`` is bytes that
have to be moved for each second, over what a copy within the GPU's memory moves. Lookups: each id, row, last step and
output once. Updates: each distinct row with its state read and written, each output gradient read; the time contains
sorting, whose part is ``sort_ms``. Where FBGEMM's CUDA build is not installed, lines have peer ``copy``: the time in
which a copy would move as many bytes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.layout import Record
from embeddings.optim import SGD, Adagrad, AdamAR
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig

DEVICE = "cuda"
COPY_BYTES = 1 << 31
# Steps before training lookups are timed: most rows have then been idle for longer than momentum lives, some not.
NUM_STEPS = 300
INPUT_SETS = 8


@dataclass(frozen=True)
class Case:
    """Tables of one size; every feature has ``length`` ids in each of ``batch_size`` samples."""

    distribution: str
    num_tables: int
    num_rows: int
    dim: int
    batch_size: int
    length: int = 1

    def __str__(self) -> str:
        bags = f" L{self.length}" if self.length > 1 else ""
        return f"{self.distribution} T{self.num_tables} N{self.num_rows} D{self.dim} B{self.batch_size}{bags}"

    @property
    def num_ids(self) -> int:
        return self.num_tables * self.batch_size * self.length


CASES = [
    Case(distribution, *sizes)
    for sizes in (
        (8, 200_000, 64, 4096),
        (26, 50_000, 16, 2048),
        (10, 200_000, 128, 512, 20),
        (10, 1_000_000, 128, 5243, 20),
    )
    for distribution in ("uniform", "zipf")
]


def sampler(case: Case) -> Callable[[], tuple[Any, Any]]:
    """Return a function that draws fresh (indices, offsets) on the GPU. Rows 0 and 1 are never drawn."""
    offsets = torch.arange(0, case.num_ids + 1, case.length, device=DEVICE)
    if case.distribution == "uniform":
        return lambda: (torch.randint(2, case.num_rows, (case.num_ids,), device=DEVICE), offsets)
    live = case.num_rows - 2
    cumulative = torch.arange(1, live + 1, device=DEVICE, dtype=torch.float64).pow(-1.05).cumsum(0)
    cumulative /= cumulative[-1].clone()
    # Which row is frequent has nothing to do with where it lies.
    places = torch.randperm(live, device=DEVICE) + 2

    def draw() -> tuple[Any, Any]:
        ranks = torch.searchsorted(cumulative, torch.rand(case.num_ids, device=DEVICE, dtype=torch.float64))
        return places[ranks.clamp(max=live - 1)], offsets

    return draw


def build(case: Case, optimizer: Any, sse: float = 0.0, dtype: Any = None) -> Any:
    """Return our tables on the GPU, with normal rows."""
    configs = [TableConfig(f"t{t}", case.num_rows, case.dim, (f"f{t}",)) for t in range(case.num_tables)]
    swaps = {f"f{t}": SSEConfig(sse) for t in range(case.num_tables)} if sse else {}
    tables = EmbeddingTables(
        configs, optimizer, sse=swaps, backend="triton", device=DEVICE, dtype=dtype or torch.float32
    )
    tables.layout.weights.normal_(std=0.1)
    return tables


def train(tables: Any, draw: Callable[[], tuple[Any, Any]], num_steps: int) -> None:
    """Train real steps, so that rows have the ages and moments that training gives them."""
    for _ in range(num_steps):
        pooled = tables(*draw())
        pooled.backward(1e-3 * torch.randn_like(pooled))
        tables.step(tables.completed_steps + 1)


def fbgemm(case: Case, optimizer: str) -> Any:
    """Return FBGEMM's table-batched embedding in the GPU's memory; None where it is not installed."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.num_rows, case.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * case.num_tables,
        optimizer=getattr(EmbOptimType, optimizer), learning_rate=1e-3, eps=1e-8,
    )  # fmt: skip
    for weight in peer.split_embedding_weights():
        weight.normal_(std=0.1)
    return peer


def interleave(
    contestants: Mapping[str, Callable[[Any], Any]],
    inputs: Sequence[Any],
    iterations: int,
    prepare: Mapping[str, Callable[[Any], Any]] | None = None,
) -> dict[str, np.ndarray]:
    """Return milliseconds for one input of each contestant, [iterations], by CUDA events; 3 rounds are not timed.

    A round is all inputs one after the other, so that the host's work for one is hidden behind the GPU's work for the
    one before, as in training. ``prepare`` makes, untimed, what a contestant is given instead of an input.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(-3, iterations):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            given = [prepare[name](each) for each in inputs] if prepare else inputs
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for each in given:
                contestants[name](each)
            end.record()
            end.synchronize()
            if i >= 0:
                times[name].append(start.elapsed_time(end) / len(inputs))
    return {name: np.array(values) for name, values in times.items()}


def copy_bandwidth(iterations: int = 15) -> float:
    """Return bytes read and written for each second by a copy within the GPU's memory, far larger than its cache."""
    source = torch.ones(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    times = interleave({"copy": lambda _: target.copy_(source)}, [None], iterations)["copy"]
    return 2 * COPY_BYTES / (float(np.median(times)) / 1e3)


def line(bench: str, case: str, times: dict[str, Any], copy: float, moved: float, **more: Any) -> dict[str, Any]:
    """Return the line of ours against its peer, or against the time that a copy of as many bytes would take."""
    medians = {name: float(np.median(values)) for name, values in times.items()}
    iqr = {name: float(np.subtract(*np.percentile(values, [75, 25]))) for name, values in times.items()}
    peer = next((name for name in times if name != "ours"), "copy")
    peer_ms = medians.get(peer, 1e3 * moved / copy)
    found = {
        "bench": bench, "case": case, "ours_ms": round(medians["ours"], 4), "peer": peer,
        "peer_ms": round(peer_ms, 4), "ratio": round(medians["ours"] / peer_ms, 4),
        "iqr": {name: round(value, 4) for name, value in iqr.items()},
        "gb_per_second": round(moved / medians["ours"] / 1e6, 1),
        "bandwidth_ratio": round(moved / (medians["ours"] / 1e3) / copy, 4), "iterations": len(times["ours"]), **more,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def lookups(case: Case, copy: float, iterations: int) -> Iterator[dict[str, Any]]:
    """Yield lines of lookups: ``plain``, ``training`` and ``sse``.

    ``training`` is AdamAR: decay, idle momentum at read. ``sse`` has p = .01; its peer is ours without.
    """
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    moved = case.num_ids * (4 * case.dim + 8) + 4 * case.num_tables * case.batch_size * case.dim
    peer = fbgemm(case, "EXACT_ADAGRAD")
    beside = {} if peer is None else {"fbgemm": call(peer)}
    tables, swapping = build(case, SGD(0.1)), build(case, SGD(0.1), sse=0.01)
    with torch.no_grad():
        yield line("plain", str(case), interleave({"ours": call(tables), **beside}, inputs, iterations), copy, moved)
        times = interleave({"ours": call(swapping), "without_sse": call(tables)}, inputs, iterations)
        yield line("sse", str(case), times, copy, moved + 8 * case.num_ids)
    del swapping
    tables = build(case, AdamAR(1e-3, alpha=1e-5))
    train(tables, draw, NUM_STEPS)
    with torch.no_grad():
        times = interleave({"ours": call(tables), **beside}, inputs, iterations)
        yield line("training", f"{case} adam_ar dense", times, copy, moved + 4 * case.num_ids)


def updates(case: Case, copy: float, iterations: int) -> Iterator[dict[str, Any]]:
    """Yield lines of backward and update of outputs made before.

    FBGEMM's is its fused backward with the optimizer that the peer names.
    """
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    grad = 1e-3 * torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE)
    parts = [part for ids, _ in inputs for part in ids.split(case.batch_size * case.length)]
    distinct = sum(len(torch.unique(part)) for part in parts) / len(inputs)
    for name, optimizer, num_vectors, peer_name, dtype in (
        ("adagrad", Adagrad(1e-3), 1, "EXACT_ADAGRAD", torch.float32),
        ("adam_ar dense", AdamAR(1e-3, alpha=1e-5), 2, "ADAM", torch.float32),
        ("adam_ar dense bfloat16", AdamAR(1e-3, alpha=1e-5), 2, "", torch.bfloat16),
    ):
        tables = build(case, optimizer, dtype=dtype)
        peer = fbgemm(case, peer_name) if peer_name else None
        modules = {"ours": tables} if peer is None else {"ours": tables, f"fbgemm_{peer_name.lower()}": peer}
        times = interleave(
            {key: updating(module, grad) for key, module in modules.items()}, inputs, iterations,
            prepare={key: call(module) for key, module in modules.items()},
        )  # fmt: skip
        row_bytes = 2 * case.dim * (4 * num_vectors + dtype.itemsize) + 8
        records = [[Record(ids, offsets, None, grad)] for ids, offsets in inputs]
        sorting = interleave({"sort": tables._kernel._sorted}, records, iterations)["sort"]
        yield line(
            "update", f"{case} {name}", times, copy, distinct * row_bytes + grad.numel() * 4,
            sort_ms=round(float(np.median(sorting)), 4),
        )  # fmt: skip


def call(module: Any) -> Callable[[Any], Any]:
    return lambda given: module(*given)


def updating(module: Any, grad: Any) -> Callable[[Any], None]:
    """Return a function that runs backward and update of an output of ``module``."""

    def update(pooled: Any) -> None:
        pooled.backward(grad)
        if isinstance(module, EmbeddingTables):
            module.step(module.completed_steps + 1)

    return update
