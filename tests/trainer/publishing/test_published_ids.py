"""What ids a run cannot publish is said after its preparation, before any of its training."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors, keys_of
from trainer.data.batches.prepared import PreparedData
from trainer.launch.driver import execute
from trainer.publishing.publish import settings_of

JOB = {"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}, "sse": {}}
PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


def rows_of(path, *ids):
    """Rows whose items are these texts, or these integers."""
    users, clicks = np.arange(400) % 20, np.arange(400) % 3 > 0
    items = [ids[number % len(ids)] for number in range(400)]
    pq.write_table(pa.table({"user": users, "item": items, "click": clicks.astype(np.int64)}), path)
    return path


def reached_training(run):
    """Whether a run was to start its ranks."""
    started = []

    def start(current):
        started.append(current)
        raise ValueError("enough")

    assert execute(run, start) != 0
    return bool(started)


@pytest.mark.parametrize("odd", ["i" * 513, "i\0i"])
def test_an_id_that_cannot_be_published_is_said_before_training(make_run, small, tmp_path, odd):
    uri = rows_of(tmp_path / "rows.parquet", "a", "b", odd, "c")
    run = make_run("publishes", uri=uri, publish=PUBLISH, **JOB)
    assert not reached_training(run)
    (error,) = small.events(run.directory, "error")
    assert f"{uri}, column 'item': has an id that cannot be published" in error["message"]
    assert reached_training(make_run("does-not", uri=uri, **JOB))
    # What another run has prepared is as bad.
    assert not reached_training(make_run("publishes", uri=uri, publish=PUBLISH, attempt=2, **JOB))


def test_ids_of_512_bytes_are_published(make_run, tmp_path):
    uri = rows_of(tmp_path / "rows.parquet", "a", "ü" * 256, "b")
    assert reached_training(make_run("longest", uri=uri, publish=PUBLISH, **JOB))


def run_beside(make_run, tmp_path, served, ids):
    """A run with these ids, to publish beside a version with those that are served."""
    run = make_run(uri=rows_of(tmp_path / "rows.parquet", *ids), publish=PUBLISH, parent_version="v000001", **JOB)
    vectors = np.eye(3, 4, dtype=np.float32)
    candidate = ItemVectors(keys_of(served), vectors, norms=np.ones(3, np.float32), evidence=np.ones(3, bool))
    publish_candidate(
        open_store(run.store_url),
        "items",
        RefreshRequest(candidate, settings_of(run.job.publish), job_id="first", parent_version=None),
    )
    return run


def test_text_is_refused_before_training_where_integers_are_served(make_run, small, tmp_path):
    run = run_beside(make_run, tmp_path, [1, 2, 3], ["a", "b"])
    assert not reached_training(run)
    (error,) = small.events(run.directory, "error")
    assert "publish.collection: the ids of 'items' are integers, those of" in error["message"]
    assert "publish to another collection, or write the ids as integers" in error["message"] + error["remedy"]
    assert "text" in error["message"]
    same = rows_of(tmp_path / "same.parquet", 1, 2, 3)
    assert reached_training(make_run("same", uri=same, publish=PUBLISH, parent_version="v000001", **JOB))


def test_integers_are_text_where_text_is_served(make_run, tmp_path):
    run = run_beside(make_run, tmp_path, ["007", "7", "c"], [7, 2])
    assert reached_training(run)
    assert PreparedData.open(run.data).vocabulary("item").to_pylist() == ["2", "7"]
