"""SSE in runs: graphs and both sides reach the batches, with the same draws for any ranks, plans and cuts of a run."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from tests.trainer.trainings import trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.record import Position
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import sse_configs
from trainer.launch.on_host import single_rank_group
from trainer.models.sse_labels import target_configs, with_swapped_classes
from trainer.spec import parse_dataset, parse_job
from trainer.training.loop import Trainer

P_LABEL = 0.2
SSE = {
    "user": {"probability": 0.3, "graph": "friends", "rho": 20},
    "item": {"probability": 0.2, "include_unknown": True},
    "label": {"probability": P_LABEL},
}


@pytest.fixture(scope="module")
def dataset(rows, tmp_path_factory):
    """The small click log with a ring of its sixty users."""
    path = tmp_path_factory.mktemp("ring") / "friends.parquet"
    ring = np.arange(60)
    pq.write_table(pa.table({"a": ring, "b": (ring + 1) % 60}), path)
    return parse_dataset(
        {
            "name": "clicks", "uri": str(rows), "label": {"column": "click"},
            "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "graphs": {"friends": {"uri": str(path), "source": "a", "target": "b", "of": "user"}},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(dataset, small, tmp_path_factory):
    job = small.job(sse=SSE)
    return prepare(dataset, job, tmp_path_factory.mktemp("data") / "prepared"), job


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    shards, dense = trainer.sharded.state_for_checkpoint()
    return {name: value.clone() for name, value in dense.items()} | {s.name: s.weight.clone() for s in shards}


# --- class labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_labels_flip_alike_for_any_number_of_ranks(prepared, world_size):
    """Slices of uneven batches; the flips are as many as asked for."""
    data, job = prepared

    def labels(ranks):
        """(swapped, true) labels of an epoch, by step."""
        slices = [list(data.train_batches(1, 0, rank, ranks)) for rank in range(ranks)]
        found = []
        for step, parts in enumerate(zip(*slices, strict=True), start=11):
            swapped = torch.cat([with_swapped_classes(job, part, step).labels for part in parts])
            found.append((swapped, torch.cat([part.labels for part in parts])))
        return found

    alone, split = labels(1), labels(world_size)
    for (one, true), (many, same) in zip(alone, split, strict=True):
        assert torch.equal(true, same)
        assert torch.equal(one, many)
    flipped = torch.cat([one != true for one, true in alone]).double()
    # Four standard deviations of 2,400 flips.
    assert abs(float(flipped.mean()) - P_LABEL) < 4 * (P_LABEL * (1 - P_LABEL) / len(flipped)) ** 0.5


def test_without_label_side_the_batch_is_the_same_object(prepared, small):
    data, _ = prepared
    batch = next(iter(data.train_batches(0)))
    for sse in ({}, {"label": {"probability": 0.0}}, {"item": {"probability": 0.5}}):
        assert with_swapped_classes(small.job(sse=sse), batch, 1) is batch


# --- items as labels -------------------------------------------------------------------------------------------------


def test_items_of_bpr_are_swapped_on_both_sides_of_a_pair(dataset, small, tmp_path):
    """``item`` and its drawn negatives are swapped by p_x under ``item``, or by p_y under ``label``; labels are not."""
    for sse, expected in (
        ({"item": {"probability": 0.3}}, {"item": 0.3, "item__negative": 0.3}),
        ({"label": {"probability": 0.4}}, {"item": 0.4, "item__negative": 0.4}),
        ({"user": {"probability": 0.1}}, {"user": 0.1}),
    ):
        job = small.job(model={"kind": "bpr", "loss": "bpr", "embedding_dim": 4}, sse=sse)
        data = prepare(dataset, job, tmp_path / "bpr")
        configs = sse_configs(job, data)
        assert {name: config.probability for name, config in configs.items()} == expected
        assert set(target_configs(job)) == ({"item", "item__negative"} if "label" in sse else set())
        batch = next(iter(data.train_batches(0)))
        assert with_swapped_classes(job, batch, 1) is batch


def test_a_graph_of_items_is_that_of_the_negatives_too(dataset, small, tmp_path):
    pq.write_table(pa.table({"a": [1, 2], "b": [2, 3]}), tmp_path / "alike.parquet")
    graph = {"uri": str(tmp_path / "alike.parquet"), "source": "a", "target": "b", "of": "item"}
    dataset = parse_dataset(dataset.model_dump(mode="json") | {"graphs": {"alike": graph}})
    job = small.job(
        model={"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
        sse={"item": {"probability": 0.3, "graph": "alike", "rho": 7}},
    )
    data = prepare(dataset, job, tmp_path / "bpr")
    configs = sse_configs(job, data)
    assert configs["item"] is configs["item__negative"]
    assert (configs["item"].rho, len(configs["item"].graph.neighbours)) == (7, 4)
    walk = {"item": {"probability": 0.3, "graph": "alike", "walk": {"restart": 0.25}}}
    assert sse_configs(job.model_copy(update={"sse": small.job(sse=walk).sse}), data)["item"].restart == 0.25


# --- whole steps -----------------------------------------------------------------------------------------------------


def train_on_ranks(directory, document, num_steps, plan):
    """Tables after some steps of the job on these ranks (rank 0), in float64."""
    job = parse_job(document | {"sharding": plan})
    trainer = trainer_of(job, PreparedData.open(directory), backend="reference", dtype=torch.float64)
    trainer.sharded.train()
    for batch, _ in zip(trainer.batches(), range(num_steps), strict=False):
        trainer.train_step(batch)
    assert trainer.sharded.plan() == plan
    tables = {name: gather_table(trainer.sharded, name) for name in ("user", "item")}
    return {name: whole.rows for name, whole in tables.items()} if dist.get_rank() == 0 else None


@pytest.mark.parametrize("kind", ["two_tower", "bpr"])
def test_steps_are_those_of_one_rank_in_every_plan(ranks, dataset, small, tmp_path, kind):
    """One draw that differed, of an id or a label, would move some row by more than rounding does."""
    sse = SSE if kind == "two_tower" else {key: SSE[key] for key in ("user", "label")}
    job = small.job(
        model={"kind": kind, "embedding_dim": 4}, sse=sse, optimizer={"kind": "sgd", "learning_rate": 0.5},
        dense_optimizer={"kind": "sgd", "learning_rate": 0.05},
    )  # fmt: skip
    directory, document = tmp_path / "prepared", job.model_dump(mode="json")
    prepare(dataset, job, directory)
    split = [{"user": a, "item": b} for a, b in (("table_wise", "row_wise"), ("row_wise", "table_wise"))]
    expected = ranks(1).run(train_on_ranks, directory, document, 6, split[0])[0]
    for world_size, plan in ((1, split[1]), (2, split[0]), (2, split[1]), (4, split[1])):
        found = ranks(world_size).run(train_on_ranks, directory, document, 6, plan)[0]
        for name, rows in expected.items():
            torch.testing.assert_close(found[name], rows, rtol=1e-5, atol=1e-7)
    plain = ranks(1).run(train_on_ranks, directory, document | {"sse": {}}, 6, split[0])[0]
    assert all((plain[name] - rows).abs().max() > 1e-4 for name, rows in expected.items())
    # No row of training has an unknown id: the row that such ids share learns where others are swapped for it.
    learns = {name for name, rows in expected.items() if not torch.equal(rows[1], plain[name][1])}
    assert learns == ({"item"} if kind == "two_tower" else set())


def test_a_run_that_was_cut_and_resumed_draws_as_one_that_was_not(prepared, tmp_path):
    """Graph, both sides, and a cut in the middle of the second epoch."""
    data, job = prepared
    with single_rank_group():
        whole = trainer_of(job, data)
        whole.train()
        first = trainer_of(job, data)
        first.sharded.train()
        for batch, _ in zip(first.batches(), range(data.steps_per_epoch + 7), strict=False):
            first.train_step(batch)
            first.evaluate_if_due()
        first.sharded.save(
            tmp_path, dense_optimizer=first.dense_optimizer, extra={"position": asdict(first.position)}, keep_last=1
        )
        second = trainer_of(job, data)
        saved = latest_valid(tmp_path)
        second.sharded.load_from(saved, dense_optimizer=second.dense_optimizer)
        second.position = Position(**saved.extra["position"])
        second.train()
        ended, expected = weights(second), weights(whole)
        assert [name for name in expected if not torch.equal(ended[name], expected[name])] == []
        unswapped = trainer_of(job.model_copy(update={"sse": {}}), data)
        unswapped.train()
        assert all(not torch.equal(value, expected[name]) for name, value in weights(unswapped).items())


def test_metrics_are_of_true_labels(prepared):
    """With every label flipped in training, what is learned is the opposite of what is evaluated."""
    data, job = prepared
    document = job.model_dump(mode="json")
    flipped = parse_job(document | {"sse": {"label": {"probability": 1.0}}})
    with single_rank_group():
        trainer = trainer_of(flipped, data)
        trainer.train()
    told = [metric for metric in trainer.history if metric["split"] == "test"]
    assert told[-1]["auc"] < 0.3
