"""Lookups, updates and whole steps of the Triton kernel on a GPU, timed by `python -m benchmarks.gpu`.

``bandwidth_ratio`` is the bytes that must be moved for each second, divided by those of a copy within the GPU's memory.
Rows that several samples share count as often as they are looked up, so it can be above 1 if they are cached. Lookups
move each id, row and output once; with AdamAR also each last step, and the moments of rows that momentum still moves.
Updates read and write each distinct row with its state, and read each output gradient; their time includes sorting
(``sort_ms``). Peers are in :mod:`benchmarks.gpu.peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.peers import FUSED, TorchBags, fbgemm
from benchmarks.gpu.timing import DEVICE, Times, interleave, line
from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.layout import Record
from embeddings.optim import SGD, Adagrad, AdamAR, RowwiseAdagrad
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig

# Steps before anything with AdamAR is timed: rows then have the ages and moments that training gives them.
NUM_STEPS = 150
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

    @property
    def output_bytes(self) -> int:
        return 4 * self.num_tables * self.batch_size * self.dim


CASES = [
    Case(distribution, *sizes)
    for sizes in ((8, 200_000, 64, 4096), (26, 1_000_000, 16, 8192), (10, 1_000_000, 128, 5243, 20))
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
    # The frequency of a row must not depend on its position.
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


def moving_share(tables: Any, inputs: list[Any]) -> float:
    """Return the share of looked-up ids whose rows momentum still moves: their moments have to be read."""
    deferred = tables._idle_now()
    last, size = tables.layout.last_steps, inputs[0][0].numel() // len(tables.layout.tables)
    bases = torch.from_numpy(tables.layout.step_base).to(DEVICE).repeat_interleave(size)
    shares = []
    for ids, _ in inputs:
        steps = last[ids + bases]
        shares.append(
            float(((steps > 0) & (deferred.completed_steps - steps < len(deferred.movements))).float().mean())
        )
    return float(np.mean(shares))


def lookups(case: Case, copy: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield lines of lookups: ``plain``, ``sse`` (p = .01; the peer is ours without SSE) and ``training`` (AdamAR)."""
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    moved = case.num_ids * (4 * case.dim + 8) + case.output_bytes
    beside = {"torch": call(TorchBags(case))}
    if (peer := fbgemm(case, "EXACT_ROWWISE_ADAGRAD")) is not None:
        beside["fbgemm"] = call(peer)
    tables, swapping = build(case, SGD(0.1)), build(case, SGD(0.1), sse=0.01)
    yield line("plain", str(case), interleave({"ours": call(tables), **beside}, inputs, rounds), copy, moved)
    times = interleave({"ours": call(swapping), "without_sse": call(tables)}, inputs, rounds)
    yield line("sse", str(case), times, copy, moved + 8 * case.num_ids)
    del swapping, tables
    beside.pop("torch")
    tables = build(case, AdamAR(1e-3, alpha=1e-5))
    train(tables, draw, NUM_STEPS)
    moving = moving_share(tables, inputs)
    yield line(
        "training", f"{case} adam_ar", interleave({"ours": call(tables), **beside}, inputs, rounds), copy,
        moved + case.num_ids * (4 + moving * 8 * case.dim), moving_share=round(moving, 3),
    )  # fmt: skip


def updates(case: Case, copy: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield lines of backward and update of outputs made before; FBGEMM's is its fused backward."""
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    grad = 1e-3 * torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE)
    distinct = num_distinct(case, inputs)
    for name, optimizer, num_vectors, peers, dtype in (
        ("rowwise_adagrad", RowwiseAdagrad(1e-3), 0, ("EXACT_ROWWISE_ADAGRAD",), torch.float32),
        ("adagrad", Adagrad(1e-3), 1, ("EXACT_ADAGRAD",), torch.float32),
        ("adam_ar", AdamAR(1e-3, alpha=1e-5), 2, ("ADAM", "EXACT_ROWWISE_ADAGRAD"), torch.float32),
        ("adam_ar bfloat16", AdamAR(1e-3, alpha=1e-5), 2, (), torch.bfloat16),
    ):
        tables = build(case, optimizer, dtype=dtype)
        train(tables, draw, NUM_STEPS if num_vectors == 2 else 3)
        modules = {"ours": tables}
        for peer_name in peers:
            if (peer := fbgemm(case, peer_name)) is not None:
                modules[f"fbgemm_{peer_name.lower()}"] = peer
        times = interleave(
            {key: updating(module, grad) for key, module in modules.items()}, inputs, rounds,
            prepare={key: call(module) for key, module in modules.items()},
        )  # fmt: skip
        row_bytes = 2 * case.dim * (4 * num_vectors + dtype.itemsize) + (8 if num_vectors else 16)
        records = [[Record(ids, offsets, None, grad)] for ids, offsets in inputs]
        sorting = interleave({"sort": tables._kernel._sorted}, records, rounds)["sort"]
        yield line(
            "update", f"{case} {name}", times, copy, distinct * row_bytes + grad.numel() * 4,
            sort_ms=round(sorting.median, 4),
        )  # fmt: skip
        del tables, modules, times


def steps(case: Case, copy: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a line of lookup, backward and update with AdamAR, compared with peers' whole steps.

    Our lookup and update are timed separately and added: the update waits for the lookup, so with a GPU that is kept
    waiting the host would be timed. ``bytes_ratio``: bytes that ours has to move, over those of a step of rowwise
    Adagrad; a ratio of times below it means that ours uses the memory better than that peer.
    """
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    grad = 1e-3 * torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE)
    distinct = num_distinct(case, inputs)
    read = case.num_ids * (4 * case.dim + 8) + case.output_bytes + 4 * grad.numel()
    least = read + distinct * (8 * case.dim + 8)
    tables = build(case, AdamAR(1e-3, alpha=1e-5))
    train(tables, draw, NUM_STEPS)
    peers: dict[str, Any] = {"torch_sparse_adam": TorchBags(case, train=True)}
    for name in ("EXACT_ROWWISE_ADAGRAD", "ADAM"):
        if (peer := fbgemm(case, name)) is not None:
            peers[f"fbgemm_{name.lower()}"] = peer
    moving = moving_share(tables, inputs)
    moved = read + case.num_ids * (4 + moving * 8 * case.dim) + distinct * (24 * case.dim + 8)
    times = interleave({key: stepping(module, grad) for key, module in peers.items()}, inputs, rounds)
    lookup = interleave({"ours": call(tables)}, inputs, rounds)["ours"]
    update = interleave({"ours": updating(tables, grad)}, inputs, rounds, prepare={"ours": call(tables)})["ours"]
    times["ours"] = Times(lookup.gpu + update.gpu, lookup.host + update.host)
    yield line("step", f"{case} adam_ar", times, copy, moved, bytes_ratio=round(moved / least, 3))


BENCHES = {"lookups": lookups, "updates": updates, "steps": steps}


def num_distinct(case: Case, inputs: list[Any]) -> float:
    """Return the mean number of distinct rows of an input."""
    parts = [part for ids, _ in inputs for part in ids.split(case.batch_size * case.length)]
    return sum(len(torch.unique(part)) for part in parts) / len(inputs)


def call(module: Any) -> Callable[[Any], Any]:
    return lambda given: module(*given)


def updating(module: Any, grad: Any) -> Callable[[Any], None]:
    """Return a function that runs backward and update of an output of ``module``."""

    def update(pooled: Any) -> None:
        pooled.backward(grad)
        if not isinstance(module, FUSED):
            module.step(getattr(module, "completed_steps", 0) + 1)

    return update


def stepping(module: Any, grad: Any) -> Callable[[Any], None]:
    """Return a function that looks up ids, and runs backward and update."""
    update = updating(module, grad)
    return lambda given: update(module(*given))
