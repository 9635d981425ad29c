"""What is published with an item table: the item tower's output of every item, clicked or not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.store import open_store
from tests.trainer.item_tables import (
    NUM_ABSENT,
    NUM_CLICKED,
    NUM_ITEMS,
    dataset_at,
    items_table,
    job_of,
    prepared_log,
)
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build
from trainer.distributed.towers import tower_outputs
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing.publish import tower_vectors
from trainer.runs.directory import read_run, write_run

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


def run_of(folder, path, name="run", model=None, items=None, **places):
    directory = write_run(
        folder / name, run_id=name, job=job_of({"loss": "sampled_softmax", **(model or {})}, publish=PUBLISH),
        dataset=dataset_at(path, items), store_url=str(folder / "store"), **places,
    )  # fmt: skip
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    return run


def test_longer_vectors_of_a_tower_begin_with_zeros(tmp_path):
    """In the product with what is new of the user's vector, so that scores are the parent's."""
    path = prepared_log(tmp_path)
    first = run_of(tmp_path, path, "first")
    still = {"optimizer": {"kind": "adam", "learning_rate": 0.0}, "dense_optimizer": {"learning_rate": 0.0}}
    job = job_of(
        {"loss": "sampled_softmax", "embedding_dim": 7, "hidden": [9, 8]},
        publish=PUBLISH | {"collection": "longer"}, init_from={"job": "first"}, **still, epochs=1,
    )  # fmt: skip
    directory = write_run(
        tmp_path / "longer", run_id="longer", job=job, dataset=dataset_at(path), store_url=first.store_url,
        init_checkpoint=str(first.checkpoints),
    )  # fmt: skip
    assert execute(read_run(directory), start_ranks) == 0
    rows = pq.read_table(path)
    before, after = (Predictor(one).predict(rows)["score"].to_numpy() for one in (first.directory, directory))
    np.testing.assert_allclose(after, before, atol=1e-6)
    served, now = (open_store(first.store_url).collection(name).open("v000001").items() for name in ("items", "longer"))
    assert now.dim == 7
    np.testing.assert_allclose(now.vectors[:][:, :4], served.vectors[:], atol=1e-6)
    assert not now.vectors[:][:, 4:].any()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with an item of which nothing is known: new, with a brand and genres of its own."""
    folder = tmp_path_factory.mktemp("published")
    path = prepared_log(folder)
    strange = pa.table({"item": [999], "genres": ["none such"], "brand": [12345], "price": [3.0]})
    pq.write_table(pa.concat_tables([items_table(), strange]), folder / "items.parquet")
    return run_of(folder, path)


def test_every_item_of_the_table_has_the_towers_output(run):
    data, checkpoint = PreparedData.open(run.data), latest_valid(run.checkpoints)
    found = tower_vectors(run, checkpoint)
    ids = found.arrow_ids().to_pylist()
    assert ids == [*range(NUM_ITEMS), 999]
    with single_rank_group():
        sharded = build(run.job, data, alpha=checkpoint.extra["alpha"])
        sharded.load_from(checkpoint)
        sharded.eval()
        places = np.arange(len(data.catalogue))
        outputs = tower_outputs(sharded.module, data, places, torch.device("cpu")).numpy()
    expected = outputs[np.argsort(data.catalogue.ids.to_numpy())]
    np.testing.assert_allclose(found.vectors, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.norms, np.linalg.norm(expected, axis=1), rtol=1e-5)
    # New items differ by their features: they do not all have the vector of the unknown id.
    assert len(np.unique(expected[NUM_CLICKED:], axis=0)) > 10


def test_an_item_is_evidence_by_its_id_or_by_its_features(run):
    found = tower_vectors(run, latest_valid(run.checkpoints))
    ids = np.array(found.arrow_ids().to_pylist())
    assert ids[~found.evidence].tolist() == [999]
    assert (found.counts[ids >= NUM_CLICKED] == 0).all()
    assert (found.counts[ids < NUM_CLICKED] > 0).all()


def test_a_new_item_is_served_on_its_first_day(run):
    version = open_store(run.store_url).collection("items").open("v000001")
    status, vectors = version.lookup(np.array([0, NUM_ABSENT, NUM_CLICKED, NUM_ITEMS - 1, 999]))
    assert status.tolist() == [1, 1, 1, 1, 0]  # found, and missing
    assert (np.linalg.norm(vectors[:4], axis=1) > 0).all()


def test_an_item_that_leaves_the_table_is_carried_and_one_that_lost_its_row_is_not_erased(tmp_path):
    """An id that no run has had for so long loses its row and would leave a tombstone; its features still speak."""
    path = prepared_log(tmp_path)
    first = run_of(tmp_path, path, "first")
    later = tmp_path / "later"
    later.mkdir()
    rows = prepared_log(later, seed=1, last=50)
    kept = items_table().filter(pa.array([item != 70 for item in items_table()["item"].to_pylist()]))
    pq.write_table(kept, later / "items.parquet")
    job = job_of(
        {"loss": "sampled_softmax"}, publish=PUBLISH, init_from={"job": "first", "retire_after_runs": 1}
    )  # fmt: skip
    directory = write_run(
        tmp_path / "second", run_id="second", job=job, dataset=dataset_at(rows), store_url=first.store_url,
        init_checkpoint=str(first.checkpoints), parent_version="v000001",
    )  # fmt: skip
    second = read_run(directory)
    assert execute(second, start_ranks) == 0
    assert 55 not in PreparedData.open(second.data).vocabulary("item").to_pylist()
    collection = open_store(first.store_url).collection("items")
    status, _ = collection.open("v000002").lookup(np.array([10, 55, 65, 70]))
    assert status.tolist() == [1, 1, 1, 2]


def test_predictions_are_products_with_the_published_vectors(run):
    """Rows have user and item alone: features and numbers come from the table, for new items too."""
    vectors = tower_vectors(run, latest_valid(run.checkpoints))
    rows = pa.table({"user": [7] * len(vectors), "item": vectors.arrow_ids()})
    scores = Predictor(run.directory).predict(rows)["score"].to_numpy().astype(np.float64)
    # One user's scores are <u, v> + c of all items: 5 unknowns, 81 equations.
    matrix = np.column_stack([vectors.vectors, np.ones(len(vectors))])
    solved, *_ = np.linalg.lstsq(matrix, scores, rcond=None)
    np.testing.assert_allclose(matrix @ solved, scores, atol=1e-4)
    assert scores.std() > 0.01


def test_an_export_has_the_numbers_of_the_item_table(run, tmp_path):
    """It scores as the run does, and needs its table no more."""
    export(run.directory, tmp_path / "export")
    rows = pa.table({"user": [7] * 80 + [3] * 80, "item": [*range(80)] * 2})
    expected = Predictor(run.directory).predict(rows)["score"]
    np.testing.assert_allclose(Exported(tmp_path / "export").predict(rows)["score"], expected, rtol=1e-4, atol=1e-5)
    assert pq.read_schema(tmp_path / "export" / "items.parquet").names == ["item", "genres", "brand", "price"]
