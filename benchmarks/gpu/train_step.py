"""One rank's whole training step on a GPU: tables, a dense network, their optimizers, and the next batch's copy.

``step_ms``: the time of a step among consecutive steps, host and GPU together, for each way:

* ``eager``: each step waits for the copy of its batch from pinned memory;
* ``overlapped``: the next batch is copied on a stream of its own while a step runs;
* ``dense_graph``: the same, with CUDA graphs for forward and backward of the dense network.

``host_ms`` is the host's time for an eager step with so few samples that the host never waits for the GPU.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.kernels import Case, build, sampler
from benchmarks.gpu.peers import TorchBags, fbgemm
from benchmarks.gpu.timing import DEVICE, ON_GPU
from embeddings.optim import AdamAR

HIDDEN = (512, 256)
FEW_SAMPLES = 32
NUM_BATCHES = 8
NUM_STEPS = 30
UNTIMED_ROUNDS = 2


class Dense(torch.nn.Module):
    """A network over the pooled rows, and its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for before, size in zip((width, HIDDEN[0]), HIDDEN, strict=True):
            layers += [torch.nn.Linear(before, size), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1))

    def forward(self, pooled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self.layers(pooled)[:, 0], labels)


class Trainer:
    """Tables and a dense network, and the steps that train them."""

    def __init__(self, case: Case, tables: Any, dense_graph: bool = False) -> None:
        self.tables = tables
        dense = Dense(case.num_tables * case.dim).to(DEVICE)
        self.optimizer = torch.optim.Adam(dense.parameters(), lr=1e-3, fused=ON_GPU)
        self.dense: Callable[..., Any] = dense
        if dense_graph and ON_GPU:
            pooled = torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE, requires_grad=True)
            labels = torch.zeros(case.batch_size, device=DEVICE)
            self.dense = torch.cuda.make_graphed_callables(dense, (pooled, labels))

    def step(self, ids: Any, offsets: Any, labels: Any) -> None:
        self.dense(self.tables(ids, offsets), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if hasattr(self.tables, "completed_steps"):
            self.tables.step(self.tables.completed_steps + 1)
        elif isinstance(self.tables, TorchBags):
            self.tables.step(0)


def host_batches(case: Case) -> list[list[Any]]:
    """Return batches in pinned memory: ids, offsets, labels."""
    draw = sampler(case)
    batches = [[*draw(), (torch.rand(case.batch_size, device=DEVICE) < 0.3).float()] for _ in range(NUM_BATCHES)]
    return [[part.cpu().pin_memory() if ON_GPU else part for part in batch] for batch in batches]


def copied(batch: list[Any]) -> list[Any]:
    return [part.to(DEVICE, non_blocking=True) for part in batch]


def eager(trainer: Trainer, batches: list[list[Any]], num_steps: int) -> None:
    """Train steps that wait for the copy of their batch."""
    for i in range(num_steps):
        trainer.step(*copied(batches[i % len(batches)]))


def overlapped(trainer: Trainer, batches: list[list[Any]], num_steps: int) -> None:
    """Train steps during each of which the next batch is copied."""
    if not ON_GPU:
        eager(trainer, batches, num_steps)
        return
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        following = copied(batches[0])
    for i in range(num_steps):
        current.wait_stream(side)
        batch = following
        for part in batch:
            part.record_stream(current)
        with torch.cuda.stream(side):
            following = copied(batches[(i + 1) % len(batches)])
        trainer.step(*batch)


def step_ms(steps: Callable[[Trainer, list[Any], int], None], trainer: Trainer, batches: Any) -> float:
    synchronize = torch.cuda.synchronize if ON_GPU else (lambda: None)
    synchronize()
    began = time.perf_counter()
    steps(trainer, batches, NUM_STEPS)
    synchronize()
    return 1e3 * (time.perf_counter() - began) / NUM_STEPS


def train_steps(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield an output line: medians of each contestant's step by way of stepping, contestants in turn."""
    tables = {"ours": build(case, AdamAR(1e-3, alpha=1e-5))}
    for name in ("EXACT_ROWWISE_ADAGRAD", "ADAM"):
        if (peer := fbgemm(case, name)) is not None:
            tables[f"fbgemm_{name.lower()}"] = peer
    tables["torch_sparse_adam"] = TorchBags(case, train=True)
    few = dataclasses.replace(case, batch_size=FEW_SAMPLES)
    batches, few_batches = host_batches(case), host_batches(few)
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for name, each in tables.items():
        plain, graphed = Trainer(case, each), Trainer(case, each, dense_graph=True)
        runs[name, "eager"] = partial(step_ms, eager, plain, batches)
        runs[name, "overlapped"] = partial(step_ms, overlapped, plain, batches)
        runs[name, "dense_graph"] = partial(step_ms, overlapped, graphed, batches)
        runs[name, "host"] = partial(step_ms, eager, plain, few_batches)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for i in range(-UNTIMED_ROUNDS, rounds):
        for key, run in runs.items():
            took = run()
            if i >= 0:
                times[key].append(took)
    medians = {key: round(float(np.median(values)), 4) for key, values in times.items()}
    found = {
        "bench": "train_step", "case": str(case), "rounds": rounds,
        "host_ms": {name: medians[name, "host"] for name in tables},
        "step_ms": {
            name: {way: medians[name, way] for way in ("eager", "overlapped", "dense_graph")} for name in tables
        },
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    yield found
