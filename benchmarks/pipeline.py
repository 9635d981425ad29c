"""From Parquet to a trained model: examples read and trained per second, by the job's own code.

A click log of 26 features of 500,000 ids each is written as Parquet, prepared (ids to rows of tables), read as shuffled
batches, and trained on by ``trainer.launch.in_process``, as ``evenkeel train`` does: MLP 256-128, AdamAR with dense
moments, batch 2048. One JSON object per line, ``examples_per_second`` in each:

==============  =====================================================================================================
case            what is timed
==============  =====================================================================================================
``prepare``     from Parquet to coded, split columns on disk, once for all epochs
``read``        reading the job's batches by the loop's iterator without using them; one thread makes them
``end_to_end``  training: the rate between progress events, with reading, without evaluation and checkpoints;
                ``waited`` is the share of that time in which a step waited for its batch; ``whole`` counts every second
                of the process's work, with preparation, evaluation and the last checkpoint; AUC is checked
``dense``       forward, loss and backward of the dense part alone, beside the same modules in plain torch, layer by
                layer, in processor ms; ``gemm_share``: what its matrix products take alone, as a share of ours
==============  =====================================================================================================

Half of the ids are Zipf (exponent 1.05) and half a permutation of all ids, so that every row of every table is trained;
clicks follow planted weights of the ids.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import tempfile
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from benchmarks.support import harness
from embeddings.kernels.cpu import product
from trainer.data.batches.keys import Key
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.launch.in_process import train
from trainer.launch.worker import quiet, steady_memory, use_threads
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job
from trainer.spec.models.registry import parse_model

DIM, BATCH_SIZE, HIDDEN = 16, 2048, (256, 128)
EXPONENT = 1.05
LOWEST_AUC = 0.6
"""Lowest accepted AUC: the planted weights give it within an epoch; a model that learned nothing stays below."""


# --- the training data -----------------------------------------------------------------------------------------------


def write_log(path: Path, num_rows: int, num_features: int, num_ids: int, seed: int = 0) -> None:
    """Write the columns ``f0``, ``f1`` ... int64, and ``click`` int8; every id of every feature occurs.

    Needs num_rows >= 2 num_ids.
    """
    generator = np.random.default_rng(seed)
    weights = np.arange(1, num_ids + 1, dtype=np.float64) ** -EXPONENT
    cumulative = np.cumsum(weights) / weights.sum()
    logit = np.zeros(num_rows)
    columns: dict[str, Any] = {}
    for feature in range(num_features):
        ids = np.searchsorted(cumulative, generator.random(num_rows)).clip(max=num_ids - 1)
        once = generator.random(num_rows).argsort()[: num_rows // 2]
        ids[once] = np.resize(np.arange(num_ids), len(once))
        ids = generator.permutation(num_ids)[ids]
        logit += generator.normal(0.0, 2.0 / np.sqrt(num_features), num_ids)[ids]
        columns[f"f{feature}"] = ids
    columns["click"] = (generator.random(num_rows) < 1.0 / (1.0 + np.exp(-logit))).astype(np.int8)
    pq.write_table(pa.table(columns), path, row_group_size=1 << 17)


def specs(path: Path, num_features: int, workers: int, threads: int, epochs: int) -> tuple[DatasetSpec, JobSpec]:
    dataset = {
        "name": "log",
        "uri": str(path),
        "features": {f"f{feature}": {"type": "id"} for feature in range(num_features)},
        "label": {"column": "click"},
    }
    job = {
        "name": "pipeline",
        "dataset": {"name": "log"},
        "model": {"kind": "dnn", "embedding_dim": DIM, "hidden": list(HIDDEN)},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.001, "decay": "at_read"},
        "batch_size": BATCH_SIZE,
        "epochs": epochs,
        "evaluation": {"split": {"kind": "random", "validation": 0.02, "test": 0.0}, "metrics": ["auc", "logloss"]},
        "checkpoint": {"every_steps": 1_000_000, "keep_last": 1},
        "resources": {"num_workers": workers, "cpus_per_worker": threads},
    }
    return parse_dataset(dataset), parse_job(job)


# --- ours ------------------------------------------------------------------------------------------------------------


def read(data: PreparedData, steps: int) -> float:
    """Return the examples read per second over ``steps`` steps, read as the loop reads them."""
    count, start = 0, time.perf_counter()
    with contextlib.closing(data.train_batches(0)) as batches:
        for _ in range(steps):
            count += len(next(batches))
    return count / (time.perf_counter() - start)


def trained(directory: Path) -> dict[str, Any]:
    """Return figures from the run's events; the rate leaves out the first progress event (with compilation)."""
    events = [json.loads(text) for text in (directory / "events.jsonl").read_text().splitlines()]
    progress = [event for event in events if event["type"] == "progress" and event["epoch"] == 1]
    first, last = progress[0], progress[-1]
    seconds = (_time(last) - _time(first)).total_seconds()
    examples = last["examples"] - first["examples"]
    aucs = [event["auc"] for event in events if event["type"] == "metric" and event["split"] == "validation"]
    found = {"examples_per_second": round(examples / seconds), "step_ms": round(
        1e3 * seconds / (last["step"] - first["step"]), 3), "validation_auc": aucs}  # fmt: skip
    # Each event covers a second; if other programs use the machine, only the best one is meaningful.
    found["best"] = round(max(event["examples_per_second"] for event in progress[1:]))
    waited = [event.get("waited_seconds", 0.0) for event in progress]
    return found | {"waited": round((waited[-1] - waited[0]) / seconds, 4)}


def _time(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["time"])


# --- the dense part --------------------------------------------------------------------------------------------------


class _Rows(nn.Module):
    """Stand-in for a model's tables: the same leaf for each batch."""

    def __init__(self, names: list[str], columns: int) -> None:
        super().__init__()
        self.names = names
        self.leaf = nn.Parameter(0.1 * torch.randn(BATCH_SIZE, len(names) * columns))

    def forward(self, _: Any) -> Any:
        return SimpleNamespace(keys=lambda: self.names, values=lambda: self.leaf)


def dense_part(kind: str, num_features: int, iterations: int = 101) -> dict[str, Any]:
    """Time a model's forward, loss and backward, fused and layer by layer, and only the matrix products.

    All are processor milliseconds: other work on the machine moves them less.
    """
    names = [f"f{feature}" for feature in range(num_features)]
    more = {"structure": "parallel", "cross_layers": 2} if kind == "dcnv2" else {}
    spec = parse_model({"kind": kind, "embedding_dim": DIM, "hidden": list(HIDDEN), **more})
    torch.manual_seed(0)
    rows = _Rows(names, spec.table_columns(names[0]))
    ours = MODELS[kind](rows, spec, ModelInputs(tuple(Key(name, name, False, "sum") for name in names)))
    # Out of training nothing is fused.
    plain = copy.deepcopy(ours).eval()
    batch: Any = SimpleNamespace(features=None, labels=(torch.rand(BATCH_SIZE) < 0.3).float(), shares=None)

    def step(model: Any) -> harness.Seconds:
        start = time.process_time()
        model.zero_grad()
        (model.loss(batch).sum() / BATCH_SIZE).backward()
        return harness.Seconds(time.process_time() - start)

    weights = [parameter for name, parameter in ours.dense_parameters() if parameter.dim() == 2]
    products: list[tuple[torch.Tensor, torch.Tensor]] = []
    for weight in weights:
        x, y = torch.randn(BATCH_SIZE, weight.shape[1]), torch.randn(BATCH_SIZE, weight.shape[0])
        value = weight.detach()
        products += (x, value.T), (y.T, x), (y, value)

    def multiply(_: Any) -> harness.Seconds:
        start = time.process_time()
        for factors in products:
            product(*factors)
        return harness.Seconds(time.process_time() - start)

    with steady_memory():
        times = harness.interleave(
            lambda: None, lambda _: step(ours), lambda _: step(plain), multiply, iterations=iterations, warm_up=10
        )
    medians, best = np.median(times, axis=0), times.min(axis=0)
    return harness.line(
        "pipeline", f"dense {kind}", "plain torch", times[:, :2], gemm_ms=round(float(medians[2]), 4),
        gemm_share=round(float(medians[2] / medians[0]), 3), best_gemm_share=round(float(best[2] / best[0]), 3),
    )  # fmt: skip


def say(case: str, options: argparse.Namespace, **figures: Any) -> dict[str, Any]:
    return harness.say({
        "bench": "pipeline", "case": case, "threads": options.threads * options.workers, **figures,
        "features": options.features, "ids": options.ids, "dim": DIM, "batch": BATCH_SIZE, "rows": options.rows,
    })  # fmt: skip


def main(options: argparse.Namespace, folder: Path) -> int:
    quiet()
    if options.case in ("", "dense"):
        use_threads(options.threads)
        for kind in ("dnn", "dcnv2", "deepfm"):
            dense_part(kind, options.features)
        if options.case:
            return 0
    path, run_dir = folder / "log.parquet", folder / "run"
    if not path.exists():
        write_log(path, options.rows, options.features, options.ids)
    dataset, job = specs(path, options.features, options.workers, options.threads, options.epochs)
    start = time.perf_counter()
    data = prepare(dataset, job, folder / "data" if options.case != "end_to_end" else run_dir / "data")
    seconds = time.perf_counter() - start
    use_threads(options.threads)
    if options.case in ("", "prepare"):
        size = path.stat().st_size
        say(
            "prepare", options, examples_per_second=round(options.rows / seconds), bytes=size, seconds=round(seconds, 2)
        )
    if options.case in ("", "read"):
        rates = [read(data, min(options.steps, data.steps_per_epoch)) for _ in range(3)]
        say("read", options, examples_per_second=round(float(np.median(rates))))
    if options.case in ("", "end_to_end"):
        begun = time.perf_counter()
        code = train(dataset, job, run_dir=run_dir, store=str(folder / "store"))
        seconds = time.perf_counter() - begun
        figures = trained(run_dir)
        whole = options.epochs * data.num_examples["train"] / seconds
        say("end_to_end", options, **figures, whole=round(whole))
        assert code == 0
        assert figures["validation_auc"][0] > LOWEST_AUC, figures
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=500_000)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--steps", type=int, default=400, help="steps of case read")
    parser.add_argument("--case", default="", choices=["", "prepare", "read", "end_to_end", "dense"])
    parser.add_argument("--folder", type=Path, help="where the log and the run are kept (default: a temporary one)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        leave(main(arguments, arguments.folder))
    with tempfile.TemporaryDirectory(prefix="evenkeel-pipeline-") as temporary:
        main(arguments, Path(temporary))
    leave(0)
