"""Predictions against what preparing really makes."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.click_log import ClickLog, generate
from trainer.sizing import estimate as module
from trainer.sizing.estimate import estimate
from trainer.sizing.memory import PUBLISHED_ID_BYTES
from trainer.spec import Optimizer, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

JOB = {
    "name": "job",
    "dataset": {"name": "log"},
    "model": {"kind": "dnn", "embedding_dim": 8},
    "optimizer": {"kind": "adam"},
    "batch_size": 100,
    "epochs": 3,
    "resources": {"num_workers": 2},
}


@pytest.fixture
def dataset(tmp_path):
    generate(ClickLog(num_rows=5000, num_days=5), tmp_path / "log")
    features = {name: {"type": "id"} for name in ("user", "item", "query")}
    history = {"previous": "item", "by": "user", "order": "timestamp", "length": 4}
    features["history"] = {"type": "id_list", "derive": history, "shares": "item"}
    document = {"name": "log", "uri": str(tmp_path / "log"), "features": features, "label": {"column": "click"}}
    return parse_dataset({**document, "timestamp": "timestamp", "partition": "date"})


def test_rows_are_an_upper_bound_and_exact_without_held_out_rows(dataset, tmp_path):
    job = parse_job({**JOB, "evaluation": {"split": {"validation": 0, "test": 0}}})
    predicted = estimate(job, dataset)
    data = prepare(dataset, job, tmp_path / "data")
    assert {name: table["rows"] for name, table in predicted["tables"].items()} == {
        name: table.num_rows for name, table in data.tables.items()
    }
    assert predicted["steps_per_epoch"] == data.steps_per_epoch
    assert predicted["steps"] == 3 * data.steps_per_epoch
    held = parse_job(JOB)
    data = prepare(dataset, held, tmp_path / "data")
    predicted = estimate(held, dataset)
    assert all(predicted["tables"][name]["rows"] >= table.num_rows for name, table in data.tables.items())
    assert predicted["steps_per_epoch"] == pytest.approx(data.steps_per_epoch, rel=0.05)


@pytest.mark.parametrize("kind", ["item2vec", "sasrec", "gru4rec", "hstu"])
def test_models_of_sequences_have_the_item_table_alone(dataset, tmp_path, kind):
    """Rows that are no positives cannot be told from here: steps are an upper bound."""
    model = {"kind": kind, "embedding_dim": 8, **({} if kind == "item2vec" else {"length": 5})}
    job = parse_job({**JOB, "model": model, "evaluation": {"split": {"validation": 0, "test": 0}}})
    positives = parse_dataset({**dataset.model_dump(mode="json"), "label": {"rule": "click >= 0"}})
    predicted, data = estimate(job, positives), prepare(positives, job, tmp_path / "data")
    assert {name: table["rows"] for name, table in predicted["tables"].items()} == {
        "item": data.tables["item"].num_rows
    }
    # Weight and two moments, for item2vec of an input and an output vector, and the step of the last touch.
    dim = 16 if kind == "item2vec" else 8
    assert predicted["tables"]["item"]["bytes"] == data.tables["item"].num_rows * (4 * 3 * dim + 4)
    if kind == "item2vec":
        assert predicted["steps_per_epoch"] == data.steps_per_epoch
    else:
        assert predicted["steps_per_epoch"] <= data.steps_per_epoch <= 2 * predicted["steps_per_epoch"]


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("sgd", 8),
        ("adagrad", 16),
        ("adagrad_ar", 16),
        ("rowwise_adagrad", 9),
        ("rmsprop", 16),
        ("rmsprop_ar", 16),
        ("adam", 24),
        ("adamw", 24),
        ("adam_ar", 24),
        ("rowwise_adam", 17),
        ("rowwise_adam_ar", 17),
    ],
)
def test_bytes_follow_the_optimizer(kind, numbers, dataset):
    """dim 8: weights, state vectors, one number for each row, and the step of the last touch."""
    job = parse_job(JOB).model_copy(update={"optimizer": Optimizer(kind=kind)})
    predicted = estimate(job, dataset)
    for table in predicted["tables"].values():
        assert table["bytes"] == table["rows"] * (4 * numbers + 4)
        assert table["bytes_per_rank"] == -(-table["rows"] // 2) * (4 * numbers + 4)
    assert predicted["table_bytes_per_rank"] == sum(table["bytes_per_rank"] for table in predicted["tables"].values())
    assert predicted["peak_memory_bytes_per_rank"] > 2 * predicted["table_bytes_per_rank"]
    assert predicted["peak_memory_bytes"] > 2 * predicted["peak_memory_bytes_per_rank"]
    assert json.loads(json.dumps(predicted)) == predicted  # goes over REST
    item = predicted["tables"]["item"]
    said = next(line for line in predicted["arithmetic"] if line.startswith("table item: "))
    assert f"{item['rows']:,} rows" in said
    assert said.endswith(
        f"= {item['bytes']:,} bytes, left to the planner, counted as split by rows over 2: {item['bytes_per_rank']:,}"
    )


def test_window_and_negatives(dataset):
    window = parse_job({**JOB, "dataset": {"name": "log", "window": {"start": "2026-01-02", "days": 2}}})
    assert estimate(window, dataset)["rows"] == 2000
    assert "have no rows" not in estimate(window, dataset)["arithmetic"][-1]
    late = parse_job({**JOB, "dataset": {"name": "log", "window": {"start": "2026-02-02", "days": 32}}})
    assert "of 32 days of the window" in estimate(late, dataset)["arithmetic"][-1]
    beyond = parse_job({**JOB, "dataset": {"name": "log", "window": {"start": "2026-03-02", "days": 2}}})
    with pytest.raises(DataError, match=r"no rows with .* in \[2026-03-01, 2026-03-02\]; it holds 2026-"):
        estimate(beyond, dataset)
    document = dataset.model_dump(mode="json")
    # Without a partition column, days are those of the timestamp.
    timed = parse_dataset({**document, "partition": None})
    assert estimate(window.against(timed), timed)["rows"] == 2000
    with pytest.raises(InvalidFieldsError, match="has neither partition nor timestamp"):
        window.against(parse_dataset({**document, "partition": None, "timestamp": None}))
    drawn = parse_dataset({**document, "label": {"negatives": {"of": "item", "per_positive": 3}}})
    assert estimate(parse_job(JOB), drawn)["steps_per_epoch"] == 160  # 5000 x 4 x 0.8 / 100


def test_the_features_of_each_tower_are_named(dataset):
    two_tower = parse_job({**JOB, "model": {"kind": "two_tower", "embedding_dim": 8}})
    said = "the user tower reads user, query, history; an item is the row of its id"
    assert estimate(two_tower, dataset)["arithmetic"][-1] == said
    assert "tower" not in " ".join(estimate(parse_job(JOB), dataset)["arithmetic"])


def test_large_files_are_bounded_from_statistics(dataset, monkeypatch):
    exact = estimate(parse_job(JOB), dataset)
    monkeypatch.setattr(module, "EXACT_ROWS", 1000)
    bound = estimate(parse_job(JOB), dataset)
    assert bound["rows"] == exact["rows"] == 5000
    for name, table in exact["tables"].items():
        assert table["rows"] <= bound["tables"][name]["rows"] <= 5002
    # item: the catalogue's ids span no more than the catalogue
    assert bound["tables"]["item"]["rows"] <= ClickLog(num_rows=5000).num_items + 2
    assert "file statistics" in bound["arithmetic"][0]


def test_bad_data_are_found_without_a_run(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": [1], "click": [1]}), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = parse_dataset({"name": "log", "uri": str(path), "features": features, "label": {"column": "click"}})
    with pytest.raises(DataError, match="no column 'item'"):
        estimate(parse_job(JOB), dataset)


def test_what_is_kept_of_published_ids_is_of_their_table_whichever_feature_names_it(dataset):
    document = dataset.model_dump(mode="json")
    document["features"]["history"] = {"type": "id", "column": "item", "shares": "item"}
    found, sizes = [], {name: {"capacity": 100_000} for name in ("user", "item", "query")}
    for feature in ("item", "history"):
        job = JOB | {"model": {"kind": "dnn", "embedding_dim": 8, "init": {"kind": "hash", "std": 0.1}}}
        job |= {"dataset": {"name": "log", "one_pass": True}, "tables": sizes, "epochs": 1}
        job |= {"evaluation": {"split": {"validation": 0, "test": 0}}}
        job |= {"publish": {"collection": "c", "feature": feature}}
        found.append(estimate(parse_job(job), parse_dataset(document)).memory.ids)
    assert found[0] == found[1] > 100_000 * PUBLISHED_ID_BYTES
