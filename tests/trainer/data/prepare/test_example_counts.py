"""Rows of training by item: not what histories, features that a model does not read, or drawn negatives add."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from trainer.data.prepare import example_counts
from trainer.data.prepare.preparation import prepare

FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}}
HISTORY = {
    "history": {
        "type": "id_list",
        "shares": "item",
        "derive": {"previous": "item", "by": "user", "order": "ts", "length": 9},
    }
}


def by_id(data, counts, table="item"):
    """Counts of rows as those of raw ids, of which there are any."""
    there = zip(data.vocabulary(table).to_pylist(), counts[2:].tolist(), strict=True)
    return {one: count for one, count in there if count}


@pytest.fixture(params=[1 << 22, 100], ids=["one piece", "pieces"])
def _in_pieces(request, monkeypatch):
    monkeypatch.setattr(example_counts, "_PIECE_EXAMPLES", request.param)


@pytest.mark.usefixtures("_in_pieces")
def test_rows_count_once_whatever_else_has_their_item(clicks, dataset_spec, job_spec, tmp_path):
    table = clicks(900, users=40, items=300)
    label = {"negatives": {"per_positive": 3, "of": "item"}}
    split = {"kind": "time", "validation": 0.1, "test": 0.2}
    dataset = dataset_spec(table, features=FEATURES | HISTORY, label=label, order="ts")
    data = prepare(dataset, job_spec(evaluation={"split": split}), tmp_path / "data")
    held = [{"validation": 90, "test": 180}[name] for name in ("validation", "test")]
    train = np.asarray(table["ts"]) < np.sort(np.asarray(table["ts"]))[-sum(held)]
    for name in ("item", "user"):
        wanted = collections.Counter(one for one, mine in zip(table[name].to_pylist(), train, strict=True) if mine)
        assert by_id(data, data.example_counts(name), name) == wanted
    history = next(key for key in data.keys if key.name == "history")
    column, own = data.column("train", history), np.asarray(data.labels("train")) > 0
    values = [row for i, mine in enumerate(own) if mine for row in column.values[slice(*column.offsets[i : i + 2])]]
    assert np.array_equal(data.example_counts("history"), np.bincount(values, minlength=data.tables["item"].num_rows))
    assert data.row_counts("item").sum() == 4 * train.sum() + len(column.values)


def test_what_bpr_draws_from_does_not_depend_on_a_history_that_it_does_not_read(
    clicks, dataset_spec, job_spec, tmp_path
):
    """Held-out items come into histories of later rows, and often bought ones into many of them."""
    table = clicks(900, users=40, items=700)
    model = {"kind": "bpr", "loss": "bpr", "negative_distribution": "popularity", "negative_power": 1.0}
    job = job_spec(model=model, evaluation={"split": {"kind": "random", "test": 0.3}, "metrics": ["recall_10_full"]})
    found = []
    for name, features in (("without", FEATURES), ("with", FEATURES | HISTORY)):
        data = prepare(dataset_spec(table, features=features, order="ts"), job, tmp_path / name)
        ids = [0, 0, *data.vocabulary("item").to_pylist()]
        rows = data.seen_items[1]
        trained = np.flatnonzero(data.example_counts("item")[2:]) + 2
        assert np.array_equal(rows, trained)
        drawn = [
            [ids[row] for row in one.features["item__negative"].values().tolist()] for one in data.train_batches(0)
        ]
        found.append((sorted(ids[row] for row in rows), drawn))
    assert np.count_nonzero(data.row_counts("item")[2:]) > len(rows)
    assert found[0] == found[1]
