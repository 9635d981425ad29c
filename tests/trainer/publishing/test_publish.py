"""What is published: the rows of the last checkpoint, as every rank together would read them."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.support.gathered import gather_table
from embeddings.refresh.settings import Settings
from embeddings.store import open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, UNCERTAIN, ItemVectors
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing.publish import item_vectors, settings_of, with_held_rows
from trainer.runs.directory import read_run, write_run
from trainer.runs.protocol import EXIT_RETRYABLE
from trainer.spec import Publish, parse_dataset

pytestmark = pytest.mark.slow

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


SETTINGS = {
    "align": False, "ema": {"new_weight": 0.5, "reset_below_cosine": 0.1}, "keep_generations": 5,
    "gate": {"mode": "report", "limits": {"cosine_p5": 0.5}, "max_held": 7, "when_stuck": "hold"},
    "views": (
        {
            "name": "v", "kind": "exponential", "dim": 64, "sigma": 0.5, "seed": 9, "frequencies": "gaussian",
            "materialized": True,
        },
    ),
    "expire": {"after_publications": 3, "after_days": None}, "evidence": {"min_count": 2, "mark_uncertain": True},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, SETTINGS, {"ema": None, "expire": None}])
def test_the_refresh_stage_gets_each_setting_of_the_job(changes):
    spec = Publish.model_validate({"collection": "items", "feature": "item"} | changes)
    assert dataclasses.asdict(settings_of(spec)) == dataclasses.asdict(Settings()) | changes


def gathered(run, decay: bool):
    """The live rows, through the sharded model: another way to the same numbers."""
    checkpoint = latest_valid(run.checkpoints)
    with single_rank_group():
        sharded = build(run.job, PreparedData.open(run.data), alpha=checkpoint.extra["alpha"])
        sharded.load_from(checkpoint)
        table = gather_table(sharded, "item", decay=decay)
    return table.rows[2:, : run.job.model.embedding_dim].numpy(), table.last_update_step[2:].numpy()


@pytest.mark.parametrize("kind", ["two_tower", "bpr"])
def test_vectors_are_rows_without_decay_and_norms_are_with_it(make_run, small, tmp_path, kind):
    uri = small.write_rows(tmp_path / "rare.parquet", num_items=1500)
    model = {"kind": kind, "embedding_dim": 4}
    # Which decays in a single epoch.
    optimizer = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003, "decay": "at_read"}
    run = make_run(uri=uri, model=model, publish=PUBLISH, epochs=1, sse={}, optimizer=optimizer)
    assert execute(run, start_ranks) == 0
    data = PreparedData.open(run.data)
    found = item_vectors(run, latest_valid(run.checkpoints))
    order = np.argsort(data.vocabulary("item").to_numpy(), kind="stable")
    rows, last = gathered(run, decay=False)
    decayed, _ = gathered(run, decay=True)
    assert found.arrow_ids().to_pylist() == sorted(data.vocabulary("item").to_pylist())
    np.testing.assert_array_equal(found.vectors, rows[order])
    np.testing.assert_allclose(found.norms, np.linalg.norm(decayed[order].astype(np.float64), axis=1), rtol=1e-6)
    np.testing.assert_array_equal(found.evidence, last[order] > 0)
    np.testing.assert_array_equal(found.counts, data.row_counts("item")[2:][order])
    assert found.dim == 4
    assert (found.norms < np.linalg.norm(rows[order], axis=1) * 0.999).any()  # some row idled and decayed


def test_rows_that_this_job_did_not_touch_are_no_evidence(make_run, trained_run, small, tmp_path):
    """After a warm start, an id that does not occur any more is served as before, not as it was left behind."""
    first = trained_run("first", publish=PUBLISH, epochs=1)
    uri = small.write_rows(tmp_path / "fewer.parquet", num_items=70)
    second = make_run(
        "second",
        uri=uri,
        publish=PUBLISH,
        epochs=1,
        sse={},
        init_checkpoint=str(first.checkpoints),
        parent_version="v000001",
    )
    assert execute(second, start_ranks) == 0
    found = item_vectors(second, latest_valid(second.checkpoints))
    ids = np.array(found.arrow_ids().to_pylist())
    assert set(ids[found.evidence]) <= set(range(70))
    assert len(ids) > 100
    collection = open_store(second.store_url).collection("items")
    old, new = collection.open("v000001"), collection.open("v000002")
    gone = ids[ids >= 70]
    status, vectors = new.lookup(gone)
    assert set(status.tolist()) == {2}  # carried
    np.testing.assert_array_equal(vectors, old.lookup(gone)[1])


def test_what_sse_alone_touched_is_no_evidence(make_run, trained_run, small, tmp_path):
    """Swaps draw among all rows, also of items that this job's data do not have: their row moved, but not for them."""
    first = trained_run("first", epochs=1)
    uri = small.write_rows(tmp_path / "fewer.parquet", num_items=70)
    second = make_run(
        "second",
        uri=uri,
        publish=PUBLISH,
        epochs=1,
        sse={"item": {"probability": 0.5}},
        init_checkpoint=str(first.checkpoints),
    )
    assert execute(second, start_ranks) == 0
    checkpoint = latest_valid(second.checkpoints)
    found = item_vectors(second, checkpoint)
    gone = np.array(found.arrow_ids().to_pylist()) >= 70
    last = checkpoint.read_rows("item")[1]["last_update_step"].numpy()[2:]
    touched = last > checkpoint.extra["position"]["first_step"]
    order = np.argsort(PreparedData.open(second.data).vocabulary("item").to_numpy(), kind="stable")
    assert touched[order][gone].any()
    assert not found.evidence[gone].any()
    assert found.evidence[~gone].all()


def test_counts_are_of_rows_and_not_of_drawn_negatives(small, tmp_path):
    """Else an item of one row would count as well known: it is drawn about as often as any other."""
    uri = small.write_rows(tmp_path / "rows.parquet", num_rows=600)
    document = {
        "name": "clicks",
        "uri": str(uri),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"negatives": {"per_positive": 4, "of": "item"}},
    }
    job = small.job(publish=PUBLISH, epochs=1, sse={}, evaluation={"split": {"kind": "random", "test": 0.2}})
    directory = write_run(
        tmp_path / "run", run_id="run", job=job, dataset=parse_dataset(document), store_url=str(tmp_path / "store")
    )
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    found = item_vectors(run, latest_valid(run.checkpoints))
    assert found.counts.sum() == PreparedData.open(run.data).num_positives["train"] < 600
    of_all = collections.Counter(pq.read_table(uri)["item"].to_pylist())
    assert all(count <= of_all[item] for item, count in zip(found.arrow_ids().to_pylist(), found.counts, strict=True))


def test_an_older_checkpoint_is_not_published_for_the_end(make_run, small):
    """The last one is damaged: the run fails in a way that is tried again, and the retry trains on from the older."""
    run = make_run(publish=PUBLISH, epochs=2, checkpoint={"every_steps": 10})

    def damaged(current):
        start_ranks(current)
        (latest_valid(current.checkpoints).path / "dense.safetensors").write_bytes(b"")

    with pytest.warns(RuntimeWarning, match="passed over"):
        assert execute(run, damaged) == EXIT_RETRYABLE
    (error,) = small.events(run.directory, "error")
    assert "of step 40 of 50" in error["message"]
    assert open_store(run.store_url).collection("items").versions() == []
    run = make_run(publish=PUBLISH, epochs=2, checkpoint={"every_steps": 10}, attempt=2)
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert execute(run, start_ranks) == 0
    assert latest_valid(run.checkpoints).extra["position"]["step"] == 50
    assert len(open_store(run.store_url).collection("items").versions()) == 1


def test_vectors_of_a_split_table_are_those_of_a_whole_one(make_run, pooled_ranks):
    """Two ranks wrote the checkpoint; who reads it does not see that."""
    run = make_run(
        publish=PUBLISH, epochs=1, resources={"num_workers": 2}, sharding={"item": "row_wise", "user": "row_wise"}
    )
    assert execute(run, pooled_ranks) == 0
    found = item_vectors(run, latest_valid(run.checkpoints))
    rows, _ = gathered(run, decay=False)
    order = np.argsort(PreparedData.open(run.data).vocabulary("item").to_numpy(), kind="stable")
    np.testing.assert_array_equal(found.vectors, rows[order])
    assert torch.isfinite(torch.from_numpy(found.vectors)).all()


def test_rows_of_a_held_run_are_evidence_for_the_one_that_goes_on_from_them(tmp_path):
    """Ids that the held version carried, or that have no row any more, are none."""
    held_ids, vectors = np.array([1, 2, 3, 9]), np.eye(4, dtype=np.float32)
    statuses = np.array([FOUND, FOUND, CARRIED, FOUND], dtype=np.uint8)
    collection = open_store(tmp_path).collection("items")
    version = collection.write(ItemVectors(held_ids, vectors, statuses=statuses, counts=np.array([5, 6, 7, 8])))
    now = ItemVectors(
        np.arange(1, 6),
        np.ones((5, 4), dtype=np.float32),
        evidence=np.array([True, False, False, False, True]),
        counts=np.array([10, 0, 0, 0, 20]),
    )
    found = with_held_rows(now, collection.open(version))
    assert found.evidence.tolist() == [True, True, False, False, True]
    assert found.counts.tolist() == [15, 6, 0, 0, 20]
    # Uncertain ones that it trained have a row of its as well; what it carried of them has not.
    statuses, carried_for = np.full(4, UNCERTAIN, dtype=np.uint8), np.array([0, 0, 1, 0])
    columns = {"carried_for": carried_for, "last_found": np.zeros(4)}
    version = collection.write(ItemVectors(held_ids, vectors, statuses=statuses, **columns))
    assert with_held_rows(now, collection.open(version)).evidence.tolist() == [True, True, False, False, True]
    # What the caller has is as it was.
    assert now.evidence.tolist() == [True, False, False, False, True]
    assert now.counts.tolist() == [10, 0, 0, 0, 20]
