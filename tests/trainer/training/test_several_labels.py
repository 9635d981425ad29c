"""Jobs with several labels, absent ones, and weights of rows: what is learned, measured, resumed and predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.evaluation.evaluator import Evaluator
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.metrics.classification import auc, logloss
from trainer.models.sse_labels import with_swapped_classes
from trainer.output_calibration.registry import fit, of_json
from trainer.runs.directory import read_run, write_run
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

pytestmark = pytest.mark.slow

NUM_ROWS = 1200
LABELS: dict[str, Any] = {
    "click": {"column": "click"},
    "buy": {"column": "buy", "mask": "seen", "weight": 0.5},
    "visits": {"value": "visits", "loss": "poisson", "weight": 0.2},
}
MODELS: dict[str, dict[str, Any]] = {
    "shared_bottom": {"hidden": [8], "tower_hidden": [4]},
    "mmoe": {"experts": 2, "hidden": [8], "tower_hidden": [4]},
    "ple": {"hidden": [8], "tower_hidden": [4], "label_experts": 1, "shared_experts": 1},
    "esmm": {"hidden": [8], "tasks": {"buy": {"given": "click"}}},
}


def rows_of(seed: int = 0) -> dict[str, Any]:
    """user, item, and labels that follow from the item: a click, a purchase that some rows say, a count."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 40, NUM_ROWS), rng.integers(0, 60, NUM_ROWS)
    click = (rng.random(NUM_ROWS) < np.array([0.1, 0.5, 0.9])[item % 3]).astype(np.int64)
    return {
        "user": user,
        "item": item,
        "click": click,
        "buy": click * (rng.random(NUM_ROWS) < np.array([0.2, 0.8])[item % 2]),
        "seen": rng.random(NUM_ROWS) < 0.7,
        "visits": pa.array(rng.poisson(1.0 + 2.0 * (item % 3)), mask=rng.random(NUM_ROWS) < 0.3),
        "w": rng.integers(1, 3, NUM_ROWS).astype(np.float64),
    }


def dataset_at(path: Path, **changes: Any) -> DatasetSpec:
    fields = {"name": "rows", "uri": str(path), "features": {"user": {}, "item": {}}, "labels": LABELS} | changes
    return parse_dataset({name: value for name, value in fields.items() if value is not None})


def written(path: Path, rows: dict[str, Any], **changes: Any) -> DatasetSpec:
    pq.write_table(pa.table(rows), path)
    return dataset_at(path, **changes)


def job_of(kind: str = "mmoe", **changes: Any) -> JobSpec:
    document = {
        "name": "several",
        "dataset": {"name": "rows"},
        "model": {"kind": kind, "embedding_dim": 4, "init": {"kind": "hash", "std": 0.3}, **MODELS.get(kind, {})},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.03, "alpha": 1e-4},
        "dense_optimizer": {"learning_rate": 0.03},
        "sse": {"item": {"probability": 0.02}, "label": {"probability": 0.02}},
        "epochs": 2,
        "batch_size": 96,
    }
    return parse_job(document | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("several")
    pq.write_table(pa.table(rows_of()), path / "rows.parquet")
    return path


@pytest.fixture(scope="module")
def prepared(folder) -> PreparedData:
    return prepare(dataset_at(folder / "rows.parquet"), job_of(), folder / "data")


@pytest.fixture(scope="module", autouse=True)
def _alone():
    with single_rank_group():
        yield


# --- what is prepared ------------------------------------------------------------------------------------------------


def test_absent_labels_are_nan(folder, prepared):
    rows = pq.read_table(folder / "rows.parquet")
    labels = np.concatenate([np.asarray(prepared.labels(split)) for split in ("train", "validation", "test")])
    assert labels.shape == (NUM_ROWS, 3)
    counts = (~np.isnan(labels)).sum(axis=0).tolist()
    assert counts == [NUM_ROWS, int(rows["seen"].to_numpy().sum()), NUM_ROWS - rows["visits"].null_count]
    assert np.nansum(labels[:, 2]) == sum(rows["visits"].drop_null().to_pylist())
    assert [task.name for task in prepared.tasks] == list(LABELS)
    assert prepared.tasks == PreparedData.open(prepared.directory).tasks


@pytest.mark.parametrize(
    ("column", "value", "labels", "message"),
    [
        ("click", 2, LABELS, r"row 3.*the label is 2, neither 0 nor 1"),
        ("seen", 0.5, LABELS, r"row 3.*the mask is 0.5, neither 0 nor 1 .write 1 where the label is there"),
        ("seen", None, LABELS, r"row 3.*the mask is None, neither 0 nor 1"),
        ("visits", -1, LABELS, r"row 3.*the label is -1, but its loss needs counts or durations of at least 0"),
        ("w", None, LABELS, r"row 3.*the weight of the row is None, not a number of at least 0"),
        ("w", -1.0, LABELS, r"row 3.*the weight of the row is -1.0, not a number of at least 0"),
        ("click", 1, {"click": {"column": "click", "mask": "there"}, "buy": {"column": "buy"}}, "no column 'there'"),
    ],
)
def test_bad_rows_are_refused_by_file_column_and_row(tmp_path, column, value, labels, message):
    rows = rows_of()
    values = rows[column].to_pylist() if isinstance(rows[column], pa.Array) else rows[column].tolist()
    values[3] = value
    if column == "seen":
        values = [None if one is None else float(one) for one in values]
    rows["w"] = rows["w"].tolist()
    dataset = written(tmp_path / "rows.parquet", rows | {column: values}, labels=labels, weight="w")
    with pytest.raises(DataError, match=message):
        prepare(dataset, job_of(), tmp_path / "data")
    if "no column" in message:
        return
    allowed = dataset_at(tmp_path / "rows.parquet", labels=labels, weight="w", max_bad_rows=0.01)
    found = prepare(allowed, job_of(), tmp_path / "data")
    assert sum(found.num_examples.values()) == NUM_ROWS - 1
    assert sum(found.bad_rows.values()) == 1


def test_a_masked_label_may_hold_anything(tmp_path):
    rows = rows_of()
    rows["buy"] = np.where(rows["seen"], rows["buy"], 99)
    prepare(written(tmp_path / "rows.parquet", rows), job_of(), tmp_path / "data")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, r"no row has label 'buy' .check labels.buy: its source is null, or its mask 0, in every row"),
        (1, r"every one of its \d+ labels 'buy' is 1 .check the label's column or rule"),
    ],
)
def test_a_label_that_says_nothing_is_refused(tmp_path, values, message):
    rows = rows_of() | {"buy": pa.array([values] * NUM_ROWS, pa.int64())}
    with pytest.raises(DataError, match=message):
        prepare(written(tmp_path / "rows.parquet", rows), job_of(), tmp_path / "data")


def test_rows_that_all_weigh_nothing_are_refused(tmp_path):
    dataset = written(tmp_path / "rows.parquet", rows_of() | {"w": np.zeros(NUM_ROWS)}, weight="w")
    with pytest.raises(DataError, match=r"training split: every row weighs 0 .check weight of the dataset"):
        prepare(dataset, job_of(), tmp_path / "data")


# --- the loss of a batch ---------------------------------------------------------------------------------------------


def test_shares_are_of_the_whole_batch_however_it_is_cut(prepared):
    whole = next(iter(prepared.train_batches(0)))
    there = ~whole.labels.isnan()
    torch.testing.assert_close(whole.shares, there * (len(whole) / there.sum(0)), rtol=1e-6, atol=0)
    for world_size, micro_batches in ((3, 1), (2, 3)):
        parts = [prepared.train_batches(0, 0, rank, world_size, micro_batches) for rank in range(world_size)]
        cut = [next(part) for _ in range(micro_batches) for part in parts]
        assert torch.equal(torch.cat([batch.shares for batch in cut]), whole.shares)
    assert next(iter(prepared.eval_batches("test"))).shares is None


def test_class_labels_are_swapped_each_by_its_own_draws(prepared):
    batch, job = next(iter(prepared.train_batches(0))), job_of(sse={"label": {"probability": 0.5}})
    swapped = with_swapped_classes(job, batch, 1, prepared.tasks).labels
    assert torch.equal(swapped.isnan(), batch.labels.isnan())
    flipped = (swapped != batch.labels) & ~batch.labels.isnan()
    assert not flipped[:, 2].any()
    both = ~batch.labels[:, 1].isnan()
    assert flipped[both, 0].any()
    assert not torch.equal(flipped[both, 0], flipped[both, 1])


def after_training(dataset: DatasetSpec, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    job = job_of(sse={}, evaluation={"split": {"validation": 0.0, "test": 0.0}}, **changes)
    trainer = trainer_of(job, prepare(dataset, job, folder), backend="reference", dtype=torch.float64)
    trainer.train()
    return snapshot(trainer)


@pytest.mark.parametrize("kind", ["ple", "dnn", "mf", "two_tower"])
def test_a_row_of_weight_2_counts_as_two_rows(tmp_path, kind):
    """In batches of all rows; also with one label."""
    label = {} if kind in MODELS else {"labels": None, "label": {"column": "click"}}
    rows = rows_of()
    twice = np.repeat(np.arange(NUM_ROWS), rows["w"].astype(np.int64))
    repeated = pa.table(rows).take(pa.array(twice))
    weighted = written(tmp_path / "weighted.parquet", rows, weight="w", **label)
    pq.write_table(repeated, tmp_path / "repeated.parquet")
    sgd = {"kind": "sgd", "learning_rate": 0.5}
    changes: dict[str, Any] = {"batch_size": 2 * NUM_ROWS, "epochs": 4, "optimizer": sgd, "dense_optimizer": sgd}
    if kind not in MODELS:
        changes["model"] = {"kind": kind, "embedding_dim": 4, "init": {"kind": "hash", "std": 0.3}}
    found = after_training(weighted, tmp_path / "a", kind=kind, **changes)
    expected, unweighted = (
        after_training(dataset_at(tmp_path / f"{name}.parquet", **label), tmp_path / name, kind=kind, **changes)
        for name in ("repeated", "weighted")
    )
    moved = 0.0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8, msg=name)  # labels and shares are float32
        moved = max(moved, float((unweighted[name].double() - value.double()).abs().max()))
    assert moved > 1e-3


# --- whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_training_ends_with_the_same_bits(prepared, tmp_path, kind):
    job = job_of(kind, micro_batches=2, regularizers={"dropout": 0.1, "label_smoothing": 0.05})
    whole = trainer_of(job, prepared)
    whole.train()
    parts, starts = train_in_parts(job, prepared, tmp_path / "checkpoints", [5, 13])
    assert starts == [0, 5, 13]
    assert not differ(snapshot(whole), snapshot(parts))
    assert whole.history == parts.history


@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_train_and_measure_as_one(prepared, ranks, kind):
    job = job_of(kind, sharding={"item": "row_wise", "user": "table_wise"}, regularizers={"label_smoothing": 0.05})
    (one,) = [found for found in ranks(1).run(train_on_ranks, str(prepared.directory), job, 12) if found]
    (two,) = [found for found in ranks(2).run(train_on_ranks, str(prepared.directory), job, 12) if found]
    assert one[0].keys() == two[0].keys()
    for name, value in one[0].items():
        torch.testing.assert_close(two[0][name], value, rtol=1e-6, atol=1e-9)
    for name, value in one[1].items():
        assert two[1][name] == pytest.approx(value, rel=1e-5), name


def run_of(folder: Path, kind: str, **changes: Any) -> Any:
    directory = write_run(
        folder / kind, run_id=kind, job=job_of(kind, **changes), dataset=dataset_at(folder / "rows.parquet"),
        store_url=str(folder / "store"),
    )  # fmt: skip
    assert execute(read_run(directory), start_ranks) == 0
    return read_run(directory)


@pytest.fixture(scope="module")
def run(folder):
    metrics = ["auc", "logloss", "calibration", "frequency_buckets", "rmse", "mae"]
    return run_of(folder, "esmm", epochs=4, evaluation={"metrics": metrics, "intervals": {"replicates": 20}})


def test_predictions_are_what_evaluation_measured(run, small):
    """Of each label, over the rows that have it."""
    metrics = small.metrics(run.directory, "test")[-1]
    data = PreparedData.open(run.data)
    labels = np.asarray(data.labels("test"))
    vocabularies = {name: np.asarray(data.vocabulary(name)) for name in ("user", "item")}
    columns = {
        key.name: vocabularies[key.name][np.maximum(np.asarray(data.column("test", key)) - 2, 0)] for key in data.keys
    }
    found = Predictor(run.directory).predict(pa.table(columns))
    names = ["logit_click", "probability_click", "logit_buy", "probability_buy", "prediction_visits"]
    assert found.column_names == names
    known = np.all([np.asarray(data.column("test", key)) >= 2 for key in data.keys], axis=0)
    assert known.all()
    for number, name in enumerate(("click", "buy")):
        there = ~np.isnan(labels[:, number])
        logits = found[f"logit_{name}"].to_numpy()[there]
        assert metrics[f"auc/{name}"] == pytest.approx(auc(logits, labels[there, number]), abs=1e-6)
        assert metrics[f"logloss/{name}"] == pytest.approx(logloss(logits, labels[there, number]), rel=1e-5)
        assert metrics[f"examples/{name}"] == there.sum()
        assert metrics[f"auc_low/{name}"] <= metrics[f"auc/{name}"] <= metrics[f"auc_high/{name}"]
        assert sum(row["rows"] for row in metrics[f"calibration/{name}"]) == there.sum()
        assert sum(row["examples"] for row in metrics[f"frequency_buckets/{name}"]) == there.sum()
        assert metrics[f"auc/{name}"] > 0.6
    there = ~np.isnan(labels[:, 2])
    errors = found["prediction_visits"].to_numpy()[there] - labels[there, 2]
    assert metrics["rmse/visits"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    assert "auc/visits" not in metrics
    assert "auc" not in metrics
    buy, click = (found[f"probability_{name}"].to_numpy() for name in ("buy", "click"))
    assert (buy <= click).all()
    assert [name for name in metrics if "auc" in name][:3] == ["auc/click", "auc_low/click", "auc_high/click"]


def test_figures_of_a_split_in_pieces_are_those_of_one_array(folder, tmp_path):
    job = job_of(evaluation={"metrics": ["auc", "logloss", "ece", "gauc", "rmse", "frequency_buckets"]})
    prepared = prepare(dataset_at(folder / "rows.parquet"), job, tmp_path / "data")
    trainer = trainer_of(job, prepared)
    trainer.train()
    trainer.sharded.eval()
    whole = trainer.evaluate("validation")
    pieces = Evaluator(trainer.job, prepared, trainer.sharded.module, gather_rows=10).evaluate("validation")
    assert whole.keys() == pieces.keys()
    for name, value in whole.items():
        assert pieces[name] == (value if isinstance(value, list) else pytest.approx(value, rel=1e-6)), name


def test_early_stopping_watches_the_first_label_or_the_one_that_is_named(prepared):
    for metric, watched in ((None, "auc/click"), ("logloss/buy", "logloss/buy"), ("rmse/visits", "rmse/visits")):
        told = []
        stopping = {"patience": 1, "min_delta": 1.0, **({} if metric is None else {"metric": metric})}
        job = job_of(epochs=6, regularizers={"early_stopping": stopping | {"keep": "last"}})
        trainer = trainer_of(job, prepared)
        trainer.hooks = type(trainer.hooks)(emit=lambda kind, told=told, **fields: told.append((kind, fields)))
        trainer.train()
        (ended,) = [fields for kind, fields in told if kind == "info" and "stopped_after_epoch" in fields]
        assert (ended["metric"], ended["best_epoch"], ended["stopped_after_epoch"]) == (watched, 1, 2)


def test_an_unknown_metric_of_a_label_is_named(prepared):
    job = job_of(regularizers={"early_stopping": {"metric": "auc/by"}})
    with pytest.raises(ValueError, match=r"validation has no auc/by \(there are auc/buy, auc/click, "):
        trainer_of(job, prepared).train()


def test_best_is_of_the_first_label(folder):
    done = run_of(folder, "shared_bottom", epochs=3, checkpoint={"every_steps": 11, "keep_last": 9})
    validation = [
        event
        for event in map(json.loads, (done.directory / "events.jsonl").read_text().splitlines())
        if event["type"] == "metric" and event["split"] == "validation"
    ]
    best = max(validation, key=lambda one: one["auc/click"])["epoch"]
    steps = PreparedData.open(done.data).steps_per_epoch
    assert steps == 11
    assert Predictor(done.directory, "best").checkpoint.step == best * steps


def test_a_warm_start_has_the_same_labels_in_the_same_order(run, folder, tmp_path, capsys):
    """Towers are in the order of the labels: in another they would go on as those of another label."""
    turned = {name: LABELS[name] for name in reversed(LABELS)}
    for name, labels, ends_with in (("same", LABELS, 0), ("turned", turned, 1)):
        directory = write_run(
            tmp_path / name, run_id=name, job=job_of("esmm", init_from={"job": "esmm"}),
            dataset=dataset_at(folder / "rows.parquet", labels=labels), store_url=str(tmp_path / "store"),
            init_checkpoint=str(run.checkpoints),
        )  # fmt: skip
        assert execute(read_run(directory), start_ranks) == ends_with
    said = capsys.readouterr().out
    assert "labels: the parent learned click, buy, visits, in this order, the dataset has visits, buy, click" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"training": True}},
        {"tables": {"item": {"capacity": 40}}},
        {"regularizers": {"sam": {"rho": 0.05}, "l2": 1e-4}},
        {"regularizers": {"dropout": 0.2, "dropout_method": {"masks": 0, "explicit": "loss_jacobian"}}},
        {"regularizers": {"meda": True, "dropout": 0.1, "dropout_layers": "both"}},
        # At .03 and .02 the exponential of a count's score overflows, by processor and seed; at .01 they stay below 5.
        {
            "model": {"kind": "ple", "embedding_dim": 4, "residual": True, "batch_norm": True},
            "micro_batches": 3,
            "dense_optimizer": {"learning_rate": 0.01},
        },
    ],
)
def test_what_other_jobs_can_do_goes_with_several_labels(prepared, changes):
    trainer = trainer_of(job_of(**changes), prepared)
    trainer.train()
    measured = [one for one in trainer.history if one["split"] == "validation"]
    assert len(measured) == 2
    assert all(np.isfinite(one[name]) for one in measured for name in ("auc/click", "logloss/buy", "rmse/visits"))
    (_, trained) = [one for one in trainer.history if one["split"] == "train"]
    assert ("auc/buy" in trained) == (changes.get("evaluation") is not None)


@pytest.mark.parametrize("loss", ["poisson", "exponential"])
def test_one_label_of_counts_or_durations(tmp_path, small, loss):
    rows = rows_of()
    mean = 1.0 + 2.0 * (rows["item"] % 3)
    rng = np.random.default_rng(1)
    rows["amount"] = rng.poisson(mean) if loss == "poisson" else rng.exponential(mean)
    dataset = written(tmp_path / "rows.parquet", rows, labels=None, label={"value": "amount"})
    job = job_of("dnn", sse={}, epochs=6, model={"kind": "dnn", "embedding_dim": 4, "hidden": [8], "loss": loss})
    directory = write_run(tmp_path / "run", run_id=loss, job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    assert execute(read_run(directory), start_ranks) == 0
    constant = float(np.std(rows["amount"]))
    assert small.metrics(directory, "test")[-1]["rmse"] < 0.95 * constant
    found = Predictor(directory).predict(pa.table({"user": rows["user"], "item": rows["item"]}))
    assert found.column_names == ["prediction"]
    predictions = found["prediction"].to_numpy()
    by_kind = [predictions[rows["item"] % 3 == kind].mean() for kind in range(3)]
    assert np.abs(np.log(by_kind / np.array([1.0, 3.0, 5.0]))).max() < 0.4
    rows["amount"] = rows["amount"].astype(np.float64)
    rows["amount"][7] = -1.0
    with pytest.raises(DataError, match=r"row 7: the label is -1.0, but its loss needs counts or durations of at"):
        prepare(written(tmp_path / "bad.parquet", rows, labels=None, label={"value": "amount"}), job, tmp_path / "data")


# --- calibrated outputs ----------------------------------------------------------------------------------------------


def test_each_label_with_probabilities_is_calibrated_on_the_rows_that_have_it(prepared):
    trainer = trainer_of(job_of(output_calibration="platt", epochs=1), prepared)
    trainer.train()
    stored = trainer.position.calibration
    assert list(stored) == ["click", "buy"]
    trainer.sharded.eval()
    with torch.no_grad():
        columns = trainer.evaluator.in_order(trainer.evaluator._rows("validation"))
    for number, name in enumerate(stored):
        there = ~np.isnan(columns.labels[:, number])
        fitted = fit("platt", columns.scores[there, number], columns.labels[there, number])
        assert of_json(stored[name]) == fitted
    figures = trainer.history[-1]
    assert figures["split"] == "test"
    assert {"logloss_calibrated/click", "ece_calibrated/buy"} <= figures.keys()
    assert "logloss_calibrated/visits" not in figures
