"""Whole jobs on GPUs against the same jobs on the CPU: what `make gpu-check` runs where Evenkeel is installed.

They are no stand-ins: without a GPU there is nothing here to run, and test_on_device has what can be known before.
"""

from __future__ import annotations

import pytest
import torch

from embeddings.kernels.fbgemm import module
from tests.support.module_tables import ON_GPU, SCARCE_BYTES
from trainer.checkpoint.format import latest_valid
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks

pytestmark = [
    pytest.mark.skipif(not ON_GPU, reason="needs a GPU, and `make gpu-check`, which has kernels compiled for it"),
    pytest.mark.timeout(1200),
]
JOB = {
    "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [8]},
    "optimizer": {"kind": "adagrad", "learning_rate": 0.1, "clip_norm": 0.5},
    "dense_optimizer": {"kind": "sgd"},
    "sse": {"item": {"probability": 0.05}, "label": {"probability": 0.05}},
    "micro_batches": 2,
}


def ended(make_run, small, name, num_gpus, num_workers=1, **changes):
    """(tensors of the last checkpoint, losses) of a run of two epochs, the second of which is another attempt."""
    resources = {"num_workers": num_workers, "gpus_per_worker": num_gpus}
    for attempt, epochs in ((1, 1), (2, 2)):
        run = make_run(name, attempt=attempt, epochs=epochs, resources=resources, **JOB | changes)
        assert execute(run, start_ranks) == 0, (run.directory / "events.jsonl").read_text()[-3000:]
    checkpoint = latest_valid(run.checkpoints)
    found = checkpoint.read_dense()
    for table in checkpoint.tables:
        weight, state = checkpoint.read_rows(table)
        found |= {f"{table}/weight": weight, **{f"{table}/{key}": value for key, value in state.items()}}
    losses = [metric["loss"] for metric in small.metrics(run.directory, "train")]
    return found, [*losses, *(metric["auc"] for metric in small.metrics(run.directory, "validation"))]


def close(found, wanted):
    """float32 over fifty steps, sums of GPU and CPU in different orders: 1e-3 of values about 1."""
    (tensors, figures), (others, other_figures) = found, wanted
    assert tensors.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(
            tensors[name].cpu(), value, rtol=1e-3, atol=1e-3, msg=lambda said, name=name: f"{name}: {said}"
        )
    assert figures == pytest.approx(other_figures, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kernel", ["evenkeel", "fbgemm"])
def test_a_job_on_a_gpu_ends_as_on_the_cpu(make_run, small, kernel, optimizer):
    settings = {"kernel": kernel, "optimizer": JOB["optimizer"] | {"kind": optimizer}}
    wanted = ended(make_run, small, "cpu", 0, **settings)
    close(ended(make_run, small, "gpu", 1, **settings), wanted)


def test_tables_that_the_gpu_only_caches_end_the_same(make_run, small, monkeypatch):
    wanted = ended(make_run, small, "cpu", 0, kernel="fbgemm")
    monkeypatch.setattr(module, "bytes_for_tables", lambda device: SCARCE_BYTES)
    close(ended(make_run, small, "gpu", 1, kernel="fbgemm"), wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two ranks")
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("kernel", ["evenkeel", "fbgemm"])
def test_two_ranks_that_speak_nccl_end_as_one(make_run, small, kernel, sharding):
    wanted = ended(make_run, small, "one", 1, kernel=kernel)
    split = {"user": sharding, "item": sharding}
    close(ended(make_run, small, "two", 1, num_workers=2, kernel=kernel, sharding=split), wanted)
