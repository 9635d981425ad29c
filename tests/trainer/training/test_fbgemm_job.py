"""A job with ``kernel: fbgemm`` lives the whole life of a run: trains, checkpoints, resumes, evaluates, publishes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embeddings.kernels import backends
from embeddings.kernels.fbgemm.module import FbgemmModuleKernel
from embeddings.store import open_store
from tests.support.module_tables import CachedKernel
from trainer.checkpoint.format import latest_valid
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks

# Whole jobs.
pytestmark = pytest.mark.slow

JOB = {
    "kernel": "fbgemm",
    "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
    "dense_optimizer": {"kind": "sgd"},
    "sse": {"item": {"probability": 0.05}},
}
PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


def everything(run) -> dict[str, torch.Tensor]:
    checkpoint, found = latest_valid(run.checkpoints), {}
    for table in checkpoint.tables:
        weight, state = checkpoint.read_rows(table)
        found |= {f"{table}.weight": weight, **{f"{table}.{key}": value for key, value in state.items()}}
    return found


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_resumed_run_ends_with_the_same_bits_and_publishes(make_run, small, kind):
    settings = {**JOB, "optimizer": {"kind": kind, "learning_rate": 2.0 if kind == "sgd" else 0.1}}
    whole = make_run("whole", epochs=3, **settings)
    assert execute(whole, start_ranks) == 0
    assert execute(make_run("cut", epochs=1, **settings), start_ranks) == 0
    cut = make_run("cut", attempt=2, epochs=3, publish=PUBLISH, **settings)
    assert execute(cut, start_ranks) == 0
    expected, ended = everything(whole), everything(cut)
    # Items of bpr have a bias: 5 columns, which FBGEMM's own module would not take.
    assert expected["item.weight"].shape[1] == 5
    shapes = {
        "sgd": None,
        "adagrad": expected["item.weight"].shape,
        "rowwise_adagrad": expected["item.weight"].shape[:1],
    }
    assert (expected["item.sum"].shape if "item.sum" in expected else None) == shapes[kind]
    assert expected.keys() == ended.keys()
    assert [name for name in ended if not torch.equal(ended[name], expected[name])] == []
    losses = [metric["loss"] for metric in small.metrics(whole.directory, "train")]
    assert losses == sorted(losses, reverse=True)  # it learns
    assert all(0.0 < metric["auc"] < 1.0 for metric in small.metrics(whole.directory, "validation"))
    version = open_store(cut.store_url).collection("items").open("v000001")
    _, vectors = version.lookup(np.array([1, 2, 3]))
    assert vectors.shape == (3, 4)
    assert np.abs(vectors).max() > 0


def test_a_warm_start_takes_rows_and_state_over(make_run):
    settings = {**JOB, "optimizer": {"kind": "rowwise_adagrad", "learning_rate": 0.1}, "epochs": 1}
    first = make_run("first", **settings)
    assert execute(first, start_ranks) == 0
    second = make_run("second", init_checkpoint=str(first.checkpoints), **settings)
    assert execute(second, start_ranks) == 0
    before, after = everything(first), everything(second)
    assert bool((after["item.sum"] >= before["item.sum"]).all())
    assert float(after["item.sum"].sum()) > 1.2 * float(before["item.sum"].sum())
    assert int(after["item.last_update_step"].max()) == 2 * int(before["item.last_update_step"].max())


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad"])
def test_the_kernels_agree(make_run, kind):
    """The same job on both kernels, over 25 steps of float32: 1e-4 of rows about 1."""
    tables = []
    for kernel in ("evenkeel", "fbgemm"):
        job = {**JOB, "kernel": kernel, "optimizer": {"kind": kind, "learning_rate": 0.1}}
        run = make_run(kernel, epochs=1, **job)
        assert execute(run, start_ranks) == 0
        tables.append(everything(run))
    ours, theirs = tables
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            theirs[name], value, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("kernel", [FbgemmModuleKernel, CachedKernel], ids=["held", "cached"])
def test_the_module_for_gpus_ends_where_the_operators_do(make_run, monkeypatch, kernel):
    """Over host memory, and behind a cache that keeps rows to itself: trained, resumed, published, and a warm start of
    that. float32 in the same order of sums: 1e-5."""
    settings = {
        **JOB,
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
        "optimizer": {"kind": "adagrad", "learning_rate": 0.1, "clip_norm": 0.5},
        "micro_batches": 2,
        "regularizers": {"sam": {"rho": 0.05, "of": "all"}},
        "evaluation": {"metrics": ["auc", "recall_5_full"]},
    }
    found, layouts = [], []
    for name in ("operators", "module"):
        if name == "module":
            monkeypatch.setattr(backends, "fbgemm_kernel", lambda *of: layouts.append(of[0]) or kernel(*of))
        assert execute(make_run(name, epochs=1, **settings), start_ranks) == 0
        run = make_run(name, attempt=2, epochs=2, publish=PUBLISH | {"collection": name}, **settings)
        assert execute(run, start_ranks) == 0
        warm = make_run(f"{name}-warm", init_checkpoint=str(run.checkpoints), epochs=1, **settings)
        assert execute(warm, start_ranks) == 0
        _, vectors = open_store(run.store_url).collection(name).open().lookup(np.array([1, 2, 3]))
        found.append({**everything(run), **{f"warm {key}": value for key, value in everything(warm).items()}})
        found[-1]["published"] = torch.from_numpy(np.array(vectors))
    assert all(layout.on_access is not None for layout in layouts)
    assert len(layouts) >= 3
    wanted, ended = found
    assert wanted.keys() == ended.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(ended[key], value, rtol=1e-5, atol=1e-5, msg=lambda said, key=key: f"{key}: {said}")
