"""A job's figures of a split: from the model's scores by definition, in pieces, on two ranks, through whole runs."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.support.gathered import gather_table
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.pointwise import gathered, intervals, streamed
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.metrics import auc, calibration_curve, ece, gauc, logloss, mae, normalized_entropy, rmse
from trainer.metrics.classification import sigmoid
from trainer.metrics.pointwise import Rows
from trainer.metrics.registry import METRICS
from trainer.runs.directory import read_run, write_run
from trainer.spec import Intervals, parse_dataset
from trainer.spec.evaluation import POINTWISE as METRICS_OF_JOBS
from trainer.spec.label_tasks import metric_names
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

POINTWISE = list(METRICS_OF_JOBS)
ALPHA = 1e-4


@pytest.fixture(scope="module", autouse=True)
def group():
    use_threads(1)
    with single_rank_group():
        yield


@pytest.fixture
def run_of(make_run):
    """A run whose data are prepared, users 55 to 59 and items 110 to 119 held out as a whole."""

    def made(path, name="run", **changes):
        run = make_run(name, uri=path, **changes)
        prepare(run.dataset, run.job, run.data)
        return run

    return made


@pytest.fixture
def split_rows(small, tmp_path):
    path = small.write_rows(tmp_path / "split.parquet", num_rows=4000)
    table = pq.read_table(path)
    rng = np.random.default_rng(3)
    part = rng.choice(["train", "validation", "test"], 4000, p=[0.7, 0.1, 0.2])
    new = (table["user"].to_numpy() >= 55) | (table["item"].to_numpy() >= 110)
    part[new] = "test"
    pq.write_table(table.append_column("part", pa.array(part)), path)
    return path


SPLIT = {"kind": "column", "column": "part"}


def model_of(run):
    data = PreparedData.open(run.data)
    sharded = build(run.job, data, alpha=ALPHA)
    return data, sharded


def trained(run):
    data, sharded = model_of(run)
    trainer = Trainer(run.job, data, sharded, dense_optimizer(run.job, sharded))
    trainer.train()
    return trainer


# --- by definition ---------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_model_s_scores(run_of, split_rows):
    evaluation = {"split": SPLIT, "metrics": POINTWISE}
    run = run_of(split_rows, evaluation=evaluation, epochs=1, sse={})
    trainer = trained(run)
    found = trainer.evaluate("test")
    table = pq.read_table(split_rows).to_pandas()
    train, test = (table[table.part == part] for part in ("train", "test"))
    batches = list(trainer.data.eval_batches("test", 1000))
    with torch.no_grad():
        scores = np.concatenate([trainer.sharded.module(batch.features).double().numpy() for batch in batches])
    labels, p = test.click.to_numpy(), sigmoid(scores)
    assert found["examples"] == len(test)
    expected = {
        "auc": auc(scores, labels), "logloss": logloss(scores, labels),
        # Users that were not trained on are users too, each on its own.
        "gauc": gauc(scores, labels, test.user.to_numpy()),
        "normalized_entropy": normalized_entropy(scores, labels),
        "ece": ece(p, labels), "ece_equal_width": ece(p, labels, equal_mass=False),
        "rmse": rmse(p, labels), "mae": mae(p, labels),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    curve = calibration_curve(p, labels)
    assert [row["share"] for row in found["calibration"]] == pytest.approx(curve.shares.tolist(), rel=1e-6)
    assert sum(row["rows"] for row in found["calibration"]) == pytest.approx(len(test))
    counts = train.item.value_counts()
    rows = {item: row + 2 for row, item in enumerate(trainer.data.vocabulary("item").to_pylist())}
    vectors = gather_table(trainer.sharded, "item").rows.double()
    for bucket in found["frequency_buckets"]:
        if bucket["bucket"] == 0:
            own = ~test.item.isin(counts.index)
        else:
            inside = counts[(counts >= bucket["min_count"]) & (counts <= bucket["max_count"])]
            assert bucket["ids"] == len(inside)
            norms = [float(vectors[rows[item]].norm()) for item in inside.index]
            assert bucket["norm"] == pytest.approx(np.mean(norms), rel=1e-6)
            own = test.item.isin(inside.index)
        assert bucket["examples"] == own.sum()
        assert bucket["auc"] == pytest.approx(auc(scores[own.to_numpy()], labels[own.to_numpy()]), rel=1e-12)
    assert [bucket["bucket"] for bucket in found["frequency_buckets"]] == [0, 1, 2, 3, 4, 5]
    assert sum(bucket["examples"] for bucket in found["frequency_buckets"]) == len(test)


def test_in_pieces_figures_are_the_same(run_of, split_rows):
    run = run_of(split_rows, evaluation={"split": SPLIT, "metrics": POINTWISE}, sse={})
    data, sharded = model_of(run)
    sharded.eval()
    whole = Evaluator(run.job, data, sharded.module).evaluate("test")
    pieces = Evaluator(run.job, data, sharded.module, gather_rows=10).evaluate("test")
    assert list(whole) == list(pieces) == [*POINTWISE, "examples"]
    assert_close(pieces, whole)
    assert pieces["auc"] == whole["auc"]  # integers until the last division


def test_buckets_of_a_model_that_takes_rows_unpooled(small, tmp_path):
    """DIN looks up a row for each id: of the item as of its history."""
    rng = np.random.default_rng(0)
    columns = {"user": np.repeat(np.arange(40), 15), "item": rng.integers(0, 30, 600), "at": np.tile(np.arange(15), 40)}
    path = tmp_path / "history.parquet"
    pq.write_table(pa.table(columns | {"click": rng.integers(0, 2, 600)}), path)
    history = {
        "type": "id_list", "derive": {"previous": "item", "by": "user", "order": "at", "length": 3}, "shares": "item",
    }  # fmt: skip
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "history": history}
    dataset = small.dataset(path).model_dump(mode="json") | {"features": features, "order": "at"}
    job = small.job(
        model={"kind": "din", "embedding_dim": 4, "init": {"kind": "hash", "std": 0.3}}, sse={},
        evaluation={"metrics": ["gauc", "frequency_buckets"]},
    )  # fmt: skip
    data = prepare(parse_dataset(dataset), job, tmp_path / "data")
    sharded = build(job, data, alpha=ALPHA)
    sharded.eval()
    found = Evaluator(job, data, sharded.module).evaluate("test")["frequency_buckets"]
    norms = gather_table(sharded, "item").rows.double().norm(dim=1).numpy()
    counts = data.row_counts("item")
    seen = [bucket for bucket in found if bucket["bucket"]]
    assert len(seen) >= 4
    for bucket in seen:
        own = (counts >= bucket["min_count"]) & (counts <= bucket["max_count"]) & (np.arange(len(counts)) > 1)
        assert bucket["norm"] == pytest.approx(norms[own].mean(), rel=1e-6)


def assert_close(mine, theirs, rel=1e-9):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, list):
            assert len(mine[name]) == len(value)
            for one, other in zip(mine[name], value, strict=True):
                known = {key: figure for key, figure in other.items() if figure is not None}
                assert one.keys() == other.keys()
                assert {key: one[key] for key in known} == pytest.approx(known, rel=rel)
        else:
            assert mine[name] == pytest.approx(value, rel=rel), name


def evaluated(directory: str, gather_rows: int):
    use_threads(1)
    run = read_run(directory)
    data, sharded = model_of(run)
    sharded.eval()
    return Evaluator(run.job, data, sharded.module, gather_rows=gather_rows).evaluate("test")


@pytest.mark.parametrize("gather_rows", [10_000, 10])
def test_two_ranks_have_the_figures_of_one(run_of, ranks, split_rows, gather_rows):
    evaluation = {"split": SPLIT, "metrics": POINTWISE, "intervals": {"replicates": 20, "by": "user"}}
    run = run_of(split_rows, evaluation=evaluation, sse={}, sharding={"item": "row_wise"})
    alone = evaluated(str(run.directory), gather_rows)
    first, second = ranks(2).run(evaluated, str(run.directory), gather_rows)
    assert second == {}
    # Scores may round otherwise where rows are summed in another order; there are no ties that this could break.
    assert_close(first, alone, rel=1e-6)
    assert ("auc_low" in alone) == (gather_rows == 10_000)
    if gather_rows == 10_000:
        assert alone["gauc_low"] < alone["gauc"] < alone["gauc_high"]
        assert alone["auc_low"] < alone["auc"] < alone["auc_high"]


def test_each_metric_that_jobs_name_has_its_class():
    assert list(METRICS) == POINTWISE


# --- odd splits ------------------------------------------------------------------------------------------------------


def rows_of(scores, labels, users=None):
    buckets = np.ones(len(scores), np.int8)
    return Rows(np.float32(scores), np.float32(labels), np.int32(users if users is not None else labels), buckets)


@pytest.mark.parametrize(
    ("rows", "without_value"),
    [
        (rows_of([1, 2, 3], [1, 1, 1]), {"auc", "gauc", "normalized_entropy"}),
        (rows_of([1, np.nan, 3], [1, 0, 1]), set(POINTWISE) - {"calibration", "frequency_buckets"}),
        (rows_of([0, 0, 0, 0], [1, 0, 1, 0], [-1, -1, -1, -1]), {"gauc"}),
        (rows_of([1], [0]), {"auc", "gauc", "normalized_entropy"}),
    ],
    ids=["one class", "nan", "no user", "one row"],
)
def test_what_has_no_value_is_nan_gathered_and_in_pieces(rows, without_value):
    for found in (gathered(POINTWISE, rows), streamed(POINTWISE, rows, None)):
        assert {
            name for name, value in found.items() if isinstance(value, float) and math.isnan(value)
        } == without_value


def test_a_figure_without_value_is_none_and_the_event_can_be_written(run_of, small, tmp_path):
    path = small.write_rows(tmp_path / "one.parquet", num_rows=500)
    table = pq.read_table(path)
    # One test row: a user with one row, one class.
    part = np.where(np.arange(500) == 7, "test", "train")
    pq.write_table(table.append_column("part", pa.array(part)), path)
    evaluation = {"split": SPLIT | {"validation": 0}, "metrics": POINTWISE, "intervals": {}}
    run = run_of(path, evaluation=evaluation, epochs=1)
    found = trained(run).history[-1]
    assert found["examples"] == 1
    assert found["auc"] is found["gauc"] is found["normalized_entropy"] is None
    assert found["auc_low"] is None
    assert found["logloss"] is not None


# --- intervals -------------------------------------------------------------------------------------------------------


def test_rows_of_one_user_are_drawn_together():
    """Where all rows of a user are alike there are as many independent ones as users: intervals must be wider."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 50)
    labels = (rng.random(40) < 0.5)[users].astype(np.float32)
    rows = Rows(np.float32(rng.normal(labels + rng.normal(size=40)[users], 0.1)), labels, users.astype(np.int32))
    asked = Intervals(replicates=200)
    low, high = intervals(["auc"], rows, asked, 0)["auc"]
    wide_low, wide_high = intervals(["auc"], rows, asked.model_copy(update={"by": "user"}), 0)["auc"]
    assert wide_high - wide_low > 3 * (high - low)


def test_users_count_by_their_impressions_in_the_interval_too():
    """Twenty users with 200 rows and an AUC of 1, twenty with 2 rows and an AUC of 0."""
    sizes = np.repeat([200, 2], 20)
    users = np.repeat(np.arange(40), sizes).astype(np.int32)
    labels = (np.arange(len(users)) % 2).astype(np.float32)
    scores = np.where(users < 20, labels, -labels).astype(np.float32)
    low, high = intervals(["gauc"], Rows(scores, labels, users), Intervals(), 0)["gauc"]
    assert 0.97 < low < high <= 1.0


def test_rows_without_a_user_are_drawn_one_by_one():
    rng = np.random.default_rng(1)
    labels = (rng.random(300) < 0.5).astype(np.float32)
    rows = Rows(np.float32(rng.normal(labels)), labels, np.full(300, -1, np.int32))
    by_row = intervals(["auc"], rows, Intervals(), 0)
    assert intervals(["auc"], rows, Intervals(by="user"), 0) == by_row


def test_of_no_rows_every_figure_in_pieces_is_that_of_all_rows():
    nothing = np.empty(0, np.float32)
    rows = Rows(nothing, nothing, users=np.empty(0, np.int32), buckets=np.empty(0, np.int8))
    for name in METRICS_OF_JOBS:
        (whole,), (pieces,) = gathered((name,), rows).values(), streamed((name,), rows, None).values()
        np.testing.assert_equal(pieces, whole, err_msg=name)


# --- losses through runs ---------------------------------------------------------------------------------------------


def test_default_figures_follow_loss_and_label(small):
    def job(**model):
        return small.job(model={"kind": "two_tower", **model})

    assert metric_names(job(), False) == ("auc", "logloss")
    assert metric_names(job(loss="mse"), False) == ("auc", "rmse")
    assert metric_names(job(loss="mse"), True) == ("rmse", "mae")
    assert metric_names(job(loss="sampled_softmax"), False) == ("auc",)
    assert metric_names(small.job(model={"kind": "bpr", "loss": "bpr"}), False) == ("auc", "logloss")
    assert metric_names(small.job(model={"kind": "dnn", "loss": "focal"}), False) == ("auc",)


@pytest.mark.parametrize("kind", ["mf", "dnn", "two_tower"])
def test_real_valued_labels_are_learned_by_squared_error(small, tmp_path, kind):
    path = small.write_rows(tmp_path / "rated.parquet", num_rows=3000)
    table = pq.read_table(path)
    rating = 2.5 + (table["item"].to_numpy() % 3) + 0.1 * np.random.default_rng(0).normal(size=3000)
    pq.write_table(table.append_column("rating", pa.array(rating)), path)
    dataset = small.dataset(path).model_dump(mode="json") | {"label": {"value": "rating"}}
    job = small.job(
        model={"kind": kind, "loss": "mse", "embedding_dim": 4}, sse={}, epochs=6,
        optimizer={"kind": "adam", "learning_rate": 0.05}, evaluation={"metrics": ["rmse", "mae"]},
    )  # fmt: skip
    data = prepare(parse_dataset(dataset), job, tmp_path / "data")
    trainer = Trainer(job, data, sharded := build(job, data, alpha=None), dense_optimizer(job, sharded))
    trainer.train()
    losses = [one["loss"] for one in trainer.history if one["split"] == "train"]
    last = trainer.history[-1]
    assert losses[-1] < losses[0]
    assert last["rmse"] < 0.35  # the labels' own deviation is 0.82, the noise 0.1
    assert 0 < last["mae"] <= last["rmse"]
    assert list(last) == ["epoch", "split", "rmse", "mae", "examples"]


def trained_on_ranks(directory: str):
    use_threads(1)
    run = read_run(directory)
    trainer = trained(run)
    return [one for one in trainer.history if one["split"] != "test"]


def test_in_batch_softmax_learns_and_two_ranks_learn_the_same(small, tmp_path, ranks):
    """Users like the items of their own third; negatives come from the batch alone."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 60, 4000)
    item = (rng.random(4000) ** 2 * 40).astype(int) * 3 + np.where(
        rng.random(4000) < 0.9, user % 3, rng.integers(0, 3, 4000)
    )
    path = tmp_path / "likes.parquet"
    pq.write_table(pa.table({"user": user, "item": item, "click": (rng.random(4000) < 0.9).astype(int)}), path)
    job = small.job(
        model={"kind": "two_tower", "loss": "sampled_softmax", "embedding_dim": 8, "hidden": [8]}, sse={}, epochs=4,
        optimizer={"kind": "adam", "learning_rate": 0.02},
        evaluation={"metrics": ["auc", "recall_20_full", "hit_rate_10"]},
    )  # fmt: skip
    dataset = small.dataset(path)
    directory = write_run(tmp_path / "run", run_id="run", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    data = prepare(dataset, job, read_run(directory).data)
    trainer = Trainer(job, data, build(job, data, alpha=None), None)
    before = trainer.evaluate("validation")
    alone = trained_on_ranks(str(directory))
    first, _ = ranks(2).run(trained_on_ranks, str(directory))
    losses = [one["loss"] for one in alone if one["split"] == "train"]
    assert losses[-1] < losses[0] - 0.3
    last = alone[-1]
    assert last["recall_20_full"] > 1.5 * before["recall_20_full"]
    for mine, theirs in zip(first, alone, strict=True):
        # Sums of float32 in another order, over 120 steps; a figure of ranks moves by steps of one user.
        for name in ("loss",):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4)
    assert first[-1]["recall_20_full"] == pytest.approx(last["recall_20_full"], abs=0.03)
