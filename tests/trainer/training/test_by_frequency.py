"""Jobs whose rare rows are trained by another optimizer: buckets of the reports, resumed, in any plan, and read."""

from __future__ import annotations

import pytest
import torch

from embeddings.optim import AdamAR, AdamW, ByBucket
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.checkpoint.format import CheckpointError, latest_valid
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, row_buckets
from trainer.distributed.materialize import read_rows
from trainer.launch.on_host import single_rank_group
from trainer.metrics.frequency import NUM_BUCKETS, frequency_buckets
from trainer.spec import optimizer as spec_of_optimizer
from trainer.spec.row_optimizer import row_optimizer

RARE = {"buckets": [1, 2], "kind": "adam_ar", "alpha": 0.003}
BOTH = {"kind": "adamw", "learning_rate": 0.05, "weight_decay": 0.1, "by_frequency": [RARE]}


@pytest.fixture
def data(make_run, small):
    return prepare(small.dataset(make_run().dataset.uri), small.job(), make_run("data").data)


def buckets_of(sharded) -> dict[str, torch.Tensor]:
    return {one.name: one.state["bucket"] for one in sharded.state_for_checkpoint()[0]}


def test_rows_are_in_the_buckets_of_the_reports(data, small):
    job = small.job(optimizer=BOTH)
    with single_rank_group():
        trainer = trainer_of(job, data)
        found = buckets_of(trainer.sharded)
        assert torch.equal(found["item"], torch.from_numpy(row_buckets(data, "item")))
        counts = data.row_counts("item").copy()
        counts[:2] = 0
        assert torch.equal(found["item"], torch.from_numpy(frequency_buckets(counts)))
        assert set(found["item"].tolist()) == {0, *range(1, NUM_BUCKETS + 1)}
        assert spec_of_optimizer.NUM_BUCKETS == NUM_BUCKETS
        # A job without rules keeps nothing of it.
        assert "bucket" not in trainer_of(small.job(), data).sharded.state_for_checkpoint()[0][0].state


def test_stopping_and_resuming_changes_no_bit(data, small, tmp_path):
    job = small.job(optimizer=BOTH)

    def spoil(sharded) -> None:
        for bucket in buckets_of(sharded).values():
            bucket.zero_()

    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [7, data.steps_per_epoch], spoil)
        assert differ(snapshot(parts), snapshot(whole)) == []
        # Without the model: what an export, a prediction and a publication read.
        checkpoint = latest_valid(tmp_path / "parts")
        record = {"alpha": None, "batch_size": job.batch_size, "optimizer": "adamw", "run_id": "one"}
        checkpoint.extra.update(record, job={})
        ((_, rows),) = read_rows(job, checkpoint, "item")
        assert torch.equal(rows, whole.sharded.gather_table("item").rows)
        other = small.job(optimizer={**BOTH, "by_frequency": [{**RARE, "buckets": [1]}]})
        with pytest.raises(CheckpointError, match="its rows were trained with another of_bucket"):
            build(other, data, alpha=None).load_from(latest_valid(tmp_path / "parts"))


def test_two_ranks_train_as_one_does(data, small, ranks):
    job = small.job(optimizer={"kind": "adam_ar", "alpha": 0.003, "by_frequency": [
        {"buckets": [4, 5], "kind": "adamw", "weight_decay": 0.1}
    ]})  # fmt: skip
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, 8)
    split = job.model_copy(update={"sharding": {"item": "row_wise", "user": "data_parallel"}})
    (found, scored), _ = ranks(2).run(train_on_ranks, data.directory, split, 8)
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-7)


def test_the_optimizer_of_each_bucket_has_the_jobs_settings(small):
    spec = small.job(optimizer={**BOTH, "beta1": 0.8}).optimizer
    rare = AdamAR(0.05, beta1=0.8, alpha=0.003)
    assert row_optimizer(spec, None) == ByBucket.of(AdamW(0.05, beta1=0.8, weight_decay=0.1), (rare, (1, 2)))
    by_frequency = [{"buckets": [5], "kind": "adam"}]
    by_epoch = small.job(optimizer={"kind": "adam_ar", "decay": "by_epoch", "by_frequency": by_frequency}).optimizer
    first, other = row_optimizer(by_epoch, 0.1, epoch_steps=7).optimizers
    assert (first.epoch_steps, first.alpha, type(other).__name__) == (7, 0.1, "Adam")
