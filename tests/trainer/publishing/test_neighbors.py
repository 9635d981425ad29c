"""Neighbours of hard negatives: the nearest by cosine, of a version that there is, and a run that goes on with them."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.item_tables import dataset_at, job_of, prepared_log
from tests.trainer.trainings import differ, snapshot, train_in_parts
from trainer.data.batches.hard_negatives import NEIGHBORS_FILE
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing import neighbors
from trainer.publishing.neighbors import nearest
from trainer.runs.directory import read_run, write_run
from trainer.spec import SpecError, parse_job

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}
HARD = {"share": 0.5, "nearest": 6, "skip": 1}
MODEL = {"loss": "sampled_softmax", "normalize": True, "temperature": 0.3}
DRAWN = {"negatives": {"per_positive": 1, "of": "item"}}


@pytest.mark.parametrize("exact", [True, False])
def test_the_nearest_by_cosine(exact, tmp_path, monkeypatch):
    if not exact:
        monkeypatch.setattr(neighbors, "EXACT_ROWS", 10)
    vectors = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    vectors[3] = 0.0
    found = nearest(vectors, 4, 2, tmp_path)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    cosines[:, 3] = -np.inf
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, 2:6]
    expected[3] = -1
    assert np.array_equal(found, expected)


def test_there_are_fewer_where_there_are_fewer_others(tmp_path):
    found = nearest(np.eye(4, dtype=np.float32)[:3], 5, 1, tmp_path)
    assert (found >= 0).sum(1).tolist() == [1, 1, 1]
    assert (found[:, 1:] == -1).all()


def run_of(tmp_path: Any, name: str, log: Any, hard: dict[str, Any] | None, **places: Any) -> Any:
    model = MODEL if hard is None else {**MODEL, "hard_negatives": hard}
    changes = {"init_from": places.pop("init_from")} if "init_from" in places else {}
    return read_run(
        write_run(
            tmp_path / name, run_id=name, job=job_of(model, publish=PUBLISH, epochs=1, **changes),
            dataset=dataset_at(log, label=DRAWN), store_url=str(tmp_path / "store"), **places,
        )
    )  # fmt: skip


def test_a_first_job_is_refused_and_a_later_one_goes_on_with_the_same_neighbors(tmp_path, small):
    log = prepared_log(tmp_path)
    refused = run_of(tmp_path, "refused", log, HARD)
    assert execute(refused, start_ranks) != 0
    message = small.events(refused.directory, "error")[-1]["message"]
    assert "collection 'items' has no version yet to take neighbours from: train a first job without them" in message
    assert not refused.data.exists(), "refused before rows are read"

    assert execute(run_of(tmp_path, "first", log, None), start_ranks) == 0
    run = run_of(tmp_path, "second", log, HARD, parent_version="v000001")
    assert execute(run, start_ranks) == 0
    said = [event["message"] for event in small.events(run.directory, "info")]
    assert any(line.startswith("hard negatives from neighbours of") for line in said)
    found, data = np.load(run.data / NEIGHBORS_FILE), PreparedData.open(run.data)
    trained = data.row_counts("item") > 0
    trained[:2] = False
    assert (found[trained, 0] >= 2).all()
    assert (found[~trained] == -1).all()
    assert trained[found[found >= 0]].all()

    # Without parent_version the version that init_from names counts.
    named = run_of(tmp_path, "named", log, HARD, init_from={"collection": "items", "version": "v000001"})
    assert neighbors.version_of(named).version == "v000001"

    # What is left of the version does not matter to a run that has begun.
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(ValueError, match=r"neighbours cannot be taken from 'items': .* or leave them out"):
        neighbors.version_of(run)
    assert "same neighbours as before" in neighbors.write_neighbors(run, data, run.job.model.hard_negatives)
    with single_rank_group():
        whole, _ = train_in_parts(run.job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(run.job, data, tmp_path / "parts", [3])
        assert differ(snapshot(parts), snapshot(whole)) == []


def test_items_that_the_version_has_not_have_no_neighbors(tmp_path):
    log = prepared_log(tmp_path)
    assert execute(run_of(tmp_path, "first", log, None), start_ranks) == 0
    rows = pq.read_table(log)
    others = rows.set_column(1, "item", pa.array(rows["item"].to_numpy() + 10_000))
    pq.write_table(others, tmp_path / "others.parquet")
    table = pq.read_table(tmp_path / "items.parquet")
    moved = table.set_column(0, "item", pa.array(table["item"].to_numpy() + 10_000))
    pq.write_table(moved, tmp_path / "items.parquet")
    run = run_of(tmp_path, "second", tmp_path / "others.parquet", HARD, parent_version="v000001")
    data = prepare(run.dataset, run.job, run.data)
    with pytest.raises(ValueError, match="0 of the job's items are in version v000001: leave them out until"):
        neighbors.write_neighbors(run, data, run.job.model.hard_negatives)


JOB = {
    "name": "job", "dataset": {"name": "clicks"}, "publish": PUBLISH,
    "model": {"kind": "two_tower", "embedding_dim": 4, "loss": "sampled_softmax", "hard_negatives": HARD},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"publish": None},
            "model.hard_negatives: neighbours come from the collection that the job publishes",
        ),
        ({"model": JOB["model"] | {"loss": "bce"}}, "model.hard_negatives: with bce a row is compared with its own"),
        ({"dataset": {"name": "clicks", "one_pass": True}}, "model.hard_negatives: neighbours are of ids that are"),
        ({"tables": {"item": {"capacity": 100}}}, "model.hard_negatives: rows of 'item' with a capacity come and go"),
        ({"model": {"kind": "mf", "embedding_dim": 4, "hard_negatives": HARD}}, "use two_tower or bpr"),
        (
            {"model": JOB["model"] | {"hard_negatives": {"share": 0}}},
            "hard_negatives.share: Input should be greater than 0",
        ),
    ],
)
def test_what_has_no_hard_negatives(changes, message):
    with pytest.raises(SpecError) as caught:
        parse_job(JOB | changes)
    assert message in str(caught.value)


def test_a_dataset_without_drawn_negatives_has_nothing_to_replace(tmp_path):
    with pytest.raises(ValueError, match=r"they take the place of drawn negatives.* set label: \{negatives"):
        parse_job(JOB).against(dataset_at(tmp_path / "rows.parquet"))


def test_a_job_without_them_is_dumped_as_before():
    assert "hard_negatives" not in job_of(MODEL).model.model_dump(mode="json")
