"""Rows without a label, each a positive: for models that find their negatives themselves, and for no other."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import DatasetSpec, SpecError, parse_dataset

SOFTMAX = {"kind": "two_tower", "embedding_dim": 4, "hidden": [8], "loss": "sampled_softmax"}
METRICS = {"metrics": ["auc", "recall_10"], "split": {"kind": "random", "validation": 0.0, "test": 0.2}}


def clicks(rows: Path, small, **label) -> DatasetSpec:
    """The rows of the small log that were clicked, without their column of clicks unless it is named."""
    table = pq.read_table(rows)
    table = table.filter(table.column("click").to_numpy() == 1)
    path = rows.with_name("positives.parquet")
    pq.write_table(table if label.get("column") else table.drop_columns(["click"]), path)
    return parse_dataset(small.dataset(path).model_dump(mode="json") | {"label": label})


@pytest.mark.parametrize("label", [{"positive": "every_row"}, {"column": "click"}])
def test_a_softmax_over_the_batch_learns_of_positives_alone(tmp_path, rows, small, label):
    job = small.job(model=SOFTMAX, sse={}, evaluation=METRICS, epochs=2)
    dataset = clicks(rows, small, **label)
    directory = write_run(tmp_path / "run", run_id="run", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    assert execute(read_run(directory), start_ranks) == 0, small.events(directory, "error")
    (*_, last) = small.metrics(directory, "test")
    assert 0 < last["recall_10"] <= 1
    # One class has no order: nothing is told, or no number is.
    assert last.get("auc") is None or math.isnan(last["auc"])
    losses = [one["loss"] for one in small.metrics(directory, "train")]
    assert losses[-1] < losses[0]


def test_a_loss_of_labels_is_told_what_else_there_is(tmp_path, rows, small):
    dataset = clicks(rows, small, column="click")
    with pytest.raises(DataError, match=r"labels is 1.*two_tower with loss sampled_softmax"):
        prepare(dataset, small.job(sse={}), tmp_path / "data")


def test_of_several_labels_none_is_1_in_every_row():
    document = {"name": "shop", "uri": "shop.parquet", "features": {"user": {}, "item": {}}}
    labels = {"click": {"column": "click"}, "seen": {"positive": "every_row"}}
    with pytest.raises(SpecError, match="a label that is 1 in every row says nothing"):
        parse_dataset(document | {"labels": labels})
