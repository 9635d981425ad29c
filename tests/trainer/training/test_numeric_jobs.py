"""Jobs with numeric features and bad rows: warm starts keep statistics, a job with too many bad rows fails."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

NUM_ROWS = 300


def make_run(folder, name, *, scale=1.0, bad=0, init=None, transform="standardize"):
    rng = np.random.default_rng(len(name))
    price = rng.lognormal(size=NUM_ROWS)
    click = ((price > 1.0) ^ (rng.random(NUM_ROWS) < 0.1)).astype(np.int64)
    click[:bad] = 7
    columns = {
        "user": rng.integers(0, 9, NUM_ROWS),
        "item": rng.integers(0, 20, NUM_ROWS),
        "price": scale * price,
        "click": click,
    }
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "price": {"type": "dense", "transform": transform}}
    dataset = {
        "name": "rows",
        "uri": str(folder / f"{name}.parquet"),
        "features": features,
        "label": {"column": "click"},
    }
    job = {
        "name": "rows",
        "dataset": {"name": "rows"},
        "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        "dense_optimizer": {"learning_rate": 0.05},
        "epochs": 3,
        "batch_size": 64,
    } | ({} if init is None else {"init_from": {"job": "first"}})
    directory = write_run(
        folder / name,
        run_id=name,
        job=parse_job(job),
        dataset=parse_dataset(dataset | {"max_bad_rows": 0.05}),
        store_url=str(folder / "store"),
        init_checkpoint=init,
    )
    return read_run(directory)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("first"), "first")
    assert execute(run, start_ranks) == 0
    return run


def test_a_number_is_learned_from(first, small):
    """Clicks follow the price alone."""
    assert small.metrics(first.directory, "test")[-1]["auc"] > 0.8
    found = Predictor(first.directory).predict(pa.table({"user": [1, 1], "item": [1, 1], "price": [0.1, 5.0]}))
    assert found["probability"][1].as_py() > found["probability"][0].as_py() + 0.3


def test_a_warm_start_keeps_the_statistics(first, tmp_path):
    """Its tower has learned what a standardized price is: prices of another scale are other prices."""
    second = make_run(tmp_path, "second", scale=10.0, init=str(first.checkpoints))
    assert execute(second, start_ranks) == 0
    mine, theirs = (json.loads((run.data / "numeric.json").read_text()) for run in (second, first))
    assert mine == theirs
    raw = pq.read_table(second.dataset.uri)["price"].to_numpy()
    numbers = PreparedData.open(second.data).numbers("train")[:, 0]
    assert numbers.mean() == pytest.approx((raw.mean() - theirs[0]["mean"]) / theirs[0]["std"], rel=0.2)
    assert numbers.mean() > 3


def test_a_warm_start_with_another_transform_is_refused(first, tmp_path, capsys):
    other = make_run(tmp_path, "other", transform="log1p", init=str(first.checkpoints))
    assert execute(other, start_ranks) == 1
    said = capsys.readouterr().out
    assert "the parent read 'price' with transform standardize, the dataset has transform log1p: use the same" in said


def test_a_job_fails_past_its_limit_of_bad_rows(tmp_path, capsys):
    run = make_run(tmp_path, "many", bad=16)
    assert execute(run, start_ranks) == 1
    said = capsys.readouterr().out
    assert "16 of 300 rows (5.33%) are bad: label that is neither 0 nor 1 16, max_bad_rows allows 5.00%" in said
    assert "many.parquet, row 0: click = 7" in said
    assert len(pq.read_table(run.directory / "bad_rows.parquet")) == 16
    error = json.loads((run.directory / "exit.json").read_text())["error"]
    assert error["code"] == "bad_data"
