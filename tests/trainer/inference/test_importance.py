"""Permutation importance: what the model uses loses, what it does not use loses nothing, whatever kind of feature."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.inference.importance import _read, importance, main, shuffled
from trainer.inference.parquet_scoring import chunk_of
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import SpecError, parse_dataset, parse_job

NUM_ROWS = 2000
FEATURES = {
    "item": {"type": "id"},
    "noise": {"type": "id"},
    "tags": {"type": "id_list", "weights": "shares"},
    "price": {"type": "dense", "transform": "standardize"},
    "seen": {"type": "vector", "dim": 2, "mode": "as_given"},
    "image": {"type": "vector", "dim": 3},
}


def rows_of(seed: int) -> pa.Table:
    """Clicks by all but noise; price counts twice as much as tags and as each of the vectors."""
    rng = np.random.default_rng(seed)
    item, noise, price = rng.integers(0, 9, NUM_ROWS), rng.integers(0, 9, NUM_ROWS), rng.normal(size=NUM_ROWS)
    tags = [list(rng.integers(0, 4, rng.integers(1, 4))) for _ in range(NUM_ROWS)]
    seen, image = rng.normal(size=(NUM_ROWS, 2)), rng.normal(size=(NUM_ROWS, 3))
    logit = 3.0 * (item % 3 - 1) + 2.0 * price + np.array([1.0 if 0 in one else -1.0 for one in tags])
    logit += seen[:, 1] + image[:, 2]
    return pa.table(
        {
            "item": item, "noise": noise, "tags": tags, "price": price, "seen": list(seen), "image": list(image),
            "shares": [[1.0] * len(one) for one in tags],
            "click": (rng.random(NUM_ROWS) < 1 / (1 + np.exp(-logit))).astype(np.int64),
            "seconds": np.exp(0.3 * logit),
        }
    )  # fmt: skip


def trained(folder: Path, label: dict[str, Any], **changes: Any) -> Path:
    pq.write_table(rows_of(1), folder / "rows.parquet")
    dataset = parse_dataset({"name": "rows", "uri": str(folder / "rows.parquet"), "features": FEATURES, **label})
    job = parse_job(
        {
            "name": "rows", "dataset": {"name": "rows"}, "epochs": 5, "batch_size": 64,
            "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 0.1}},
            "optimizer": {"kind": "adam", "learning_rate": 0.02},
            "dense_optimizer": {"kind": "adam", "learning_rate": 0.01},
        }
        | changes
    )  # fmt: skip
    store = str(folder / "store")
    directory = write_run(folder / "run", run_id="rows-1", job=job.against(dataset), dataset=dataset, store_url=store)
    assert execute(read_run(directory), start_ranks) == 0
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("rows"), {"label": {"column": "click"}})


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("later") / "rows.parquet"
    pq.write_table(rows_of(2), path)
    return str(path)


def test_a_feature_loses_what_the_model_had_of_it(run: Path, later: str) -> None:
    found = importance(run, later, repeats=3)
    loss = {one["feature"]: one["loss"] for one in found["features"]}
    assert found["rows"] == NUM_ROWS
    assert found["value"] > 0.85
    assert list(loss) == sorted(loss, key=lambda name: -loss[name])
    assert loss["item"] > 0.1
    assert loss["price"] > loss["tags"] > 0.02
    assert min(loss["seen"], loss["image"]) > 0.02
    assert abs(loss["noise"]) < 0.01
    assert importance(run, later, repeats=3) == found  # by the seed
    assert importance(run, later, repeats=3, seed=1)["features"] != found["features"]


def test_ids_that_the_model_does_not_know_are_told(run: Path, tmp_path: Path) -> None:
    rows = rows_of(2)
    items = pa.array([item + 1000 for item in rows["item"].to_pylist()])
    pq.write_table(rows.set_column(rows.column_names.index("item"), "item", items), tmp_path / "rows.parquet")
    (note,) = importance(run, str(tmp_path / "rows.parquet"), repeats=2)["notes"]
    assert note.startswith(f"warning: item: 0 of {NUM_ROWS:,} ids are known")


def test_it_is_the_score_of_rows_that_were_shuffled_themselves(run: Path, later: str) -> None:
    """Shuffling coded rows is shuffling the columns: scores are the same, of every kind of feature."""
    predictor, rows = Predictor(run), rows_of(2)
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    coded = predictor.encode(chunk_of(rows))
    for feature in FEATURES:
        columns = ["tags", "shares"] if feature == "tags" else [feature]
        table = rows
        for column in columns:
            table = table.set_column(table.column_names.index(column), column, rows[column].take(order))
        expected = predictor.predict(table)["logit"].to_numpy()
        assert np.array_equal(predictor.scores(shuffled(coded, feature, order, predictor))[:, 0], expected), feature
        assert not np.array_equal(predictor.scores(coded)[:, 0], expected), feature


def test_of_one_of_several_labels_and_of_values(tmp_path: Path, later: str) -> None:
    labels = {"click": {"column": "click"}, "stay": {"value": "seconds", "loss": "mse"}}
    run = trained(tmp_path, {"labels": labels}, model={"kind": "shared_bottom", "embedding_dim": 4, "hidden": [8]})
    with pytest.raises(ValueError, match="--label is needed because rows have several labels: click, stay"):
        importance(run, later)
    with pytest.raises(ValueError, match="--label buy: no such label"):
        importance(run, later, label="buy")
    with pytest.raises(ValueError, match="--metric auc does not suit this label: use rmse or mae"):
        importance(run, later, label="stay", metric="auc")
    found = importance(run, later, label="stay", repeats=2, max_rows=1000)
    assert (found["metric"], found["rows"]) == ("rmse", 1000)
    assert found["features"][-1]["feature"] == "noise"
    assert importance(run, later, label="click", repeats=2, max_rows=1000)["metric"] == "auc"


@pytest.mark.parametrize("loss", ["poisson", "exponential"])
def test_errors_of_counts_and_durations_are_those_of_what_is_predicted(tmp_path: Path, later: str, loss: str) -> None:
    model = {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "loss": loss}
    run = trained(tmp_path, {"label": {"value": "seconds"}}, model=model, epochs=1)
    predicted = Predictor(run).predict(rows_of(2))["prediction"].to_numpy()
    errors = predicted - rows_of(2)["seconds"].to_numpy()
    for metric, expected in (("rmse", np.sqrt(np.mean(errors**2))), ("mae", np.mean(np.abs(errors)))):
        assert importance(run, later, repeats=2, metric=metric)["value"] == pytest.approx(expected, rel=1e-6)


def test_rows_without_a_metric_are_refused(run: Path, tmp_path: Path) -> None:
    one_class = rows_of(2).set_column(
        rows_of(2).column_names.index("click"), "click", pa.array(np.ones(NUM_ROWS, dtype=np.int64))
    )
    pq.write_table(one_class, tmp_path / "ones.parquet")
    with pytest.raises(DataError, match=r"has no auc .give rows of both classes, or --metric logloss"):
        importance(run, str(tmp_path / "ones.parquet"), repeats=2)
    assert importance(run, str(tmp_path / "ones.parquet"), repeats=2, metric="logloss")["value"] > 0
    focal = {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "loss": "focal"}
    focused = trained(tmp_path, {"label": {"column": "click"}}, epochs=1, model=focal)
    with pytest.raises(DataError, match=r"has no auc .give rows of both classes\)"):
        importance(focused, str(tmp_path / "ones.parquet"))
    pq.write_table(rows_of(2).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        importance(run, str(tmp_path / "none.parquet"))
    with pytest.raises(ValueError, match="--repeats and --rows are at least 2, not 1 and"):
        importance(run, str(tmp_path / "none.parquet"), repeats=1)


def test_rows_that_training_does_not_read_are_not_read_here(tmp_path: Path) -> None:
    """What a filter leaves out, and, where some rows may be bad, bad ones."""
    run = trained(tmp_path, {"label": {"column": "click"}, "filter": "noise != 8", "max_bad_rows": 0.5}, epochs=1)
    rows = rows_of(2)
    passing = rows["noise"].to_numpy() != 8
    price = np.where(np.arange(NUM_ROWS) % 50, rows["price"].to_numpy(), np.inf)
    # Rows that do not pass would be the opposite of what was learnt.
    click = np.where(passing, rows["click"].to_numpy(), 1 - rows["click"].to_numpy())
    dirty = pa.table({**{name: rows[name] for name in rows.column_names}, "price": price, "click": click})
    pq.write_table(dirty, tmp_path / "all.parquet")
    pq.write_table(rows.filter(pa.array(passing & np.isfinite(price))), tmp_path / "read.parquet")
    found, expected = (importance(run, str(tmp_path / f"{name}.parquet"), repeats=2) for name in ("all", "read"))
    assert found == expected
    assert found["rows"] == (passing & np.isfinite(price)).sum()


def test_rows_of_positives_alone_have_nothing_to_lose(tmp_path: Path) -> None:
    document = {"name": "rows", "uri": "r", "features": {"user": {}, "item": {}}, "label": {"positive": "every_row"}}
    predictor = SimpleNamespace(run=SimpleNamespace(dataset=parse_dataset(document)))
    with pytest.raises(DataError, match=r"every row is a positive .give a job whose rows have labels of both classes"):
        _read(predictor, "rows.parquet", 0, 10)


def test_the_command(run: Path, later: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), later, "--rows", "500", "--repeats", "2"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("on 500 rows; without a feature it loses")
    assert {line.split()[0] for line in lines} == set(FEATURES)
    assert main([str(run), later, "--rows", "500", "--repeats", "2", "--json"]) == 0
    assert {one["feature"] for one in json.loads(capsys.readouterr().out)["features"]} == set(FEATURES)
    assert main([str(tmp_path), later]) == 1
    assert "is no run directory" in capsys.readouterr().err


def test_a_model_that_ranks_has_no_score_for_a_row(tmp_path: Path, later: str) -> None:
    rows = pa.table({"user": np.arange(200) % 10, "item": np.arange(200) % 7, "pos": np.arange(200)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    ids = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = parse_dataset(
        {
            "name": "rows",
            "uri": str(tmp_path / "rows.parquet"),
            "features": ids,
            "label": {"rule": "item >= 0"},
            "order": "pos",
        }
    )
    job = parse_job(
        {
            "name": "next", "dataset": {"name": "rows"}, "epochs": 1, "batch_size": 16,
            "model": {"kind": "gru4rec", "loss": "bce", "embedding_dim": 4, "length": 5}, "optimizer": {"kind": "adam"},
            "evaluation": {"split": {"kind": "per_user_last"}},
        }
    )  # fmt: skip
    run = write_run(
        tmp_path / "run", run_id="next-1", job=job.against(dataset), dataset=dataset, store_url=str(tmp_path / "store")
    )
    assert execute(read_run(run), start_ranks) == 0
    with pytest.raises(SpecError, match="gru4rec ranks items and has no score for a row"):
        importance(run, later)


def test_what_the_item_table_says_is_shuffled_in_its_own_place(tmp_path: Path, later: str) -> None:
    """The numbers of items lie behind the vectors of rows, and their projected vectors behind all."""
    items = np.arange(9)
    table = {"item": items, "size": items / 9.0, "look": [[float(one), 1.0] for one in items]}
    pq.write_table(pa.table(table), tmp_path / "items.parquet")
    known = {
        "uri": "items.parquet",
        "features": {"size": {"type": "dense"}, "look": {"type": "vector", "dim": 2}},
    }
    features = {
        "user": {"type": "id", "column": "noise"},
        **{name: FEATURES[name] for name in ("item", "seen", "image")},
    }
    run = trained(
        tmp_path, {"label": {"column": "click"}, "features": features, "items": known},
        epochs=1, model={"kind": "two_tower", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 0.1}},
    )  # fmt: skip
    predictor = Predictor(run)
    coded = predictor.encode(chunk_of(rows_of(2)))
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    assert coded.dense is not None
    for feature, columns in {"seen": [0, 1], "size": [2], "image": [3, 4, 5], "look": [6, 7]}.items():
        dense = shuffled(coded, feature, order, predictor).dense
        assert dense is not None
        changed = np.flatnonzero((dense != coded.dense).any(axis=0)).tolist()
        assert changed == [one for one in columns if len(np.unique(coded.dense[:, one])) > 1], feature
        assert np.array_equal(dense[:, columns], coded.dense[order][:, columns])
    found = {one["feature"] for one in importance(run, later, repeats=2)["features"]}
    assert found == {"user", *(name for name in features if name != "user"), "size", "look"}
