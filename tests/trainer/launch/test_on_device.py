"""Whole jobs whose tables, dense parameters and batches are not on the CPU: every tensor is where it is computed with.

There is no GPU to be had everywhere, so they run on a device that stands in for one (stand_in_device): on one rank and
on two, sharded by TorchRec, evaluated, checkpointed and resumed, and end with the bits of the same jobs on the CPU.
Those with kernel fbgemm have the module for GPUs there, and a cache that keeps rows to itself until it is asked.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support import forked
from trainer.checkpoint.format import latest_valid
from trainer.data.prepare.preparation import prepare
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

# Of half a minute on a quiet machine.
BUSY_SECONDS = 600
pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * BUSY_SECONDS + 120)]
SPLIT = {"split": {"kind": "per_user_last"}}
# Together: whole, split and copied tables, pooled and not, SSE on both sides, dropout, micro-batches, clipping.
JOBS = {
    "two_tower": {
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
        "sse": {"item": {"probability": 0.1}, "label": {"probability": 0.05}},
        "optimizer": {"kind": "adam_ar", "alpha": 0.003, "learning_rate": 0.05, "clip_norm": 0.5},
        "micro_batches": 2,
        "sharding": {"item": "row_wise", "user": "table_wise"},
        "evaluation": {"metrics": ["auc", "gauc", "calibration", "frequency_buckets", "recall_5_full", "hit_rate_10"]},
    },
    "in_batch": {
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8], "loss": "sampled_softmax"},
        "optimizer": {"kind": "adam"},
        "sharding": {"item": "row_wise", "user": "table_wise"},
    },
    "items": {
        "model": {
            "kind": "two_tower",
            "embedding_dim": 4,
            "hidden": [8],
            "loss": "sampled_softmax",
            "normalize": True,
            "temperature": 0.5,
            "item_id_dropout": 0.5,
        },
        "optimizer": {"kind": "adam"},
        "sharding": {"item": "row_wise", "user": "table_wise", "genres": "data_parallel"},
        "evaluation": {"metrics": ["auc", "recall_5_full"]},
    },
    "dnn": {
        "model": {"kind": "dnn", "embedding_dim": 8, "hidden": [8], "init": {"kind": "normal"}},
        "optimizer": {"kind": "adagrad"},
        "sharding": {"item": "column_wise", "user": "data_parallel"},
        "checkpoint": {"asynchronous": False},
    },
    "din": {
        "model": {
            "kind": "din",
            "embedding_dim": 4,
            "hidden": [8],
            "attention_hidden": [6],
            "residual": True,
            "batch_norm": True,
        },
        "optimizer": {"kind": "adam"},
        "sse": {"history": {"probability": 0.1}},
        "sharding": {"item": "row_wise", "user": "table_wise"},
    },
    "mf": {
        "model": {"kind": "mf", "embedding_dim": 4, "loss": "mse"},
        "optimizer": {"kind": "adam"},
        "regularizers": {"l2": 0.01},
        "sharding": {"item": "row_wise", "user": "table_wise"},
    },
    "sasrec": {
        "model": {"kind": "sasrec", "loss": "bce", "embedding_dim": 8, "length": 6, "negatives": 2},
        "optimizer": {"kind": "adamw", "weight_decay": 0.1},
        "sse": {"item": {"probability": 0.1}},
        "regularizers": {"dropout": 0.2},
        "batch_size": 16,
        "evaluation": SPLIT,
        "sharding": {"item": "row_wise"},
    },
    "item2vec": {
        "model": {"kind": "item2vec", "embedding_dim": 4},
        "optimizer": {"kind": "sgd"},
        "evaluation": SPLIT,
        "sharding": {"item": "table_wise"},
    },
}
FUSED = {"kernel": "fbgemm", "dense_optimizer": {"kind": "sgd"}}
# With FBGEMM's module: the same of its three optimizers, and rows that are moved and put back within a step.
FUSED_JOBS = {
    "fused_two_tower": FUSED
    | {
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
        "sse": {"item": {"probability": 0.1}, "label": {"probability": 0.05}},
        "optimizer": {"kind": "adagrad", "clip_norm": 0.5},
        "micro_batches": 2,
        "sharding": {"item": "row_wise", "user": "table_row_wise"},
        "evaluation": {"metrics": ["auc", "recall_5_full"]},
    },
    "fused_dnn": FUSED
    | {
        "model": {"kind": "dnn", "embedding_dim": 8, "hidden": [8], "init": {"kind": "normal"}},
        "optimizer": {"kind": "sgd"},
        "regularizers": {"sam": {"rho": 0.05, "of": "all"}},
        "sharding": {"item": "column_wise", "user": "data_parallel"},
        "checkpoint": {"asynchronous": False},
    },
    "fused_sasrec": FUSED
    | {
        "model": {"kind": "sasrec", "loss": "bce", "embedding_dim": 8, "length": 6, "negatives": 2},
        "optimizer": {"kind": "rowwise_adagrad"},
        "sse": {"item": {"probability": 0.1}},
        "batch_size": 16,
        "evaluation": SPLIT,
        "sharding": {"item": "row_wise"},
    },
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "clicks.parquet"
    rng = np.random.default_rng(2)
    user = np.repeat(np.arange(40), 10)
    columns = {"user": user, "item": rng.integers(0, 50, len(user)), "t": np.tile(np.arange(10), 40)}
    pq.write_table(pa.table({**columns, "click": rng.integers(0, 2, len(user))}), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset(
        {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}, "order": "t"}
    )


def make(folder, name, dataset, num_workers, epochs):
    if name == "din":
        derived = {"previous": "item", "by": "user", "order": "t", "length": 3}
        history = {"type": "id_list", "shares": "item", "derive": derived}
        described = dataset.model_dump(mode="json")
        dataset = parse_dataset(described | {"features": described["features"] | {"history": history}})
    if name == "items":
        genres, price = [[item % 3, item % 7] for item in range(60)], np.linspace(0.0, 1.0, 60)
        items = {"genres": {"type": "id_list"}, "price": {"type": "dense"}}
        pq.write_table(pa.table({"item": range(60), "genres": genres, "price": price}), folder.parent / "items.parquet")
        items = {"uri": str(folder.parent / "items.parquet"), "features": items}
        dataset = parse_dataset(dataset.model_dump(mode="json") | {"items": items})
    document = {
        "name": name,
        "dataset": {"name": "clicks"},
        "batch_size": 48,
        "epochs": epochs,
        **(JOBS | FUSED_JOBS)[name],
    }
    if num_workers == 1:
        document.pop("sharding")
    document["resources"] = {"num_workers": num_workers}
    write_run(folder, run_id=name, job=parse_job(document), dataset=dataset, store_url=str(folder / "store"))
    run = read_run(folder)
    prepare(run.dataset, run.job, run.data)
    return run


def lead(*arguments):
    """In a process of its own: the import registers the device."""
    from tests.trainer.launch import run_on_stand_in

    run_on_stand_in.lead(*arguments)


def train(folder, num_workers, runs):
    """Every run (directory, device) in turn, on one process for each rank."""
    store = folder / f"rendezvous-{len(list(folder.iterdir()))}"
    logs = [folder / f"rank-{rank}.log" for rank in range(num_workers)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            ranks.append(forked.start(lead, rank, num_workers, str(store), runs, log=log))
        deadline = time.monotonic() + BUSY_SECONDS
        while None in (codes := [process.exitcode for process in ranks]) and not any(codes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert codes == [0] * num_workers, "\n".join(log.read_text("utf-8", "replace")[-6000:] for log in logs)


def everything(run):
    """Every tensor and metric of the last checkpoint."""
    checkpoint = latest_valid(run.checkpoints)
    found = checkpoint.read_dense()
    for table in checkpoint.tables:
        weight, state = checkpoint.read_rows(table)
        found |= {f"{table}/weight": weight, **{f"{table}/{name}": value for name, value in state.items()}}
    return found, checkpoint.extra["history"], checkpoint.step


def trained_and_resumed(names, dataset, folder, num_workers):
    """(tensors, metrics) by name and device, after an epoch and another that goes on from its checkpoint."""
    runs = {
        (name, device): make(folder / f"{name}-{device}", name, dataset, num_workers, epochs=1)
        for name in names
        for device in ("cpu", "standin")
    }
    train(folder, num_workers, [(str(run.directory), device) for (_, device), run in runs.items()])
    halfway = {key: latest_valid(run.checkpoints).step for key, run in runs.items()}
    for (name, device), run in runs.items():
        more = dataclasses.replace(run, job=run.job.model_copy(update={"epochs": 2}))
        runs[name, device] = more
        write_run(run.directory, run_id=name, job=more.job, dataset=more.dataset, store_url=run.store_url)
    train(folder, num_workers, [(str(run.directory), device) for (_, device), run in runs.items()])
    found = {}
    for key, run in runs.items():
        tensors, history, step = everything(run)
        assert step == 2 * halfway[key] > 0
        assert len(history) == 6
        found[key] = tensors, history
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_job_is_trained_and_resumed_on_its_device(dataset, tmp_path, num_workers):
    found = trained_and_resumed(JOBS, dataset, tmp_path, num_workers)
    for name in JOBS:
        (tensors, history), (wanted, wanted_history) = found[name, "standin"], found[name, "cpu"]
        assert history == wanted_history
        assert tensors.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_job_of_fbgemm_is_trained_and_resumed_by_its_module(dataset, tmp_path, num_workers):
    """float32 over some fifty steps in the order of the operators on the CPU: 1e-5 of values about 1."""
    found = trained_and_resumed(FUSED_JOBS, dataset, tmp_path, num_workers)
    for name in FUSED_JOBS:
        (tensors, history), (wanted, wanted_history) = found[name, "standin"], found[name, "cpu"]
        assert [entry.keys() for entry in history] == [entry.keys() for entry in wanted_history]
        assert tensors.keys() == wanted.keys()
        for key, value in wanted.items():
            of = f"{name} {key}"
            torch.testing.assert_close(
                tensors[key], value, rtol=1e-5, atol=1e-5, msg=lambda said, of=of: f"{of}: {said}"
            )
