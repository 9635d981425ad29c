"""Jobs with vectors, of the rows and of the item table: what batches have, trainings, and models at work."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.item_tables import NUM_CLICKED
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from tests.trainer.vectors import DIM_ABOUT, DIM_MOOD, MODEL, about_of, dataset_at, vector_job, write_vectors
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing.publish import tower_vectors
from trainer.runs.directory import read_run, write_run
from trainer.sizing.estimate import estimate
from trainer.spec import SpecError, parse_job
from trainer.spec.models.dnn import DNNSpec


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_vectors(tmp_path_factory.mktemp("log"))


def unit_about(item):
    vector = about_of(item)
    return np.zeros(DIM_ABOUT) if vector is None else np.array(vector) / np.linalg.norm(vector)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [False, True])
def test_batches_have_the_vectors_of_their_rows_and_items(log, tmp_path, as_given):
    mode = {"mode": "as_given"} if as_given else {}
    dataset = dataset_at(
        log,
        {"mood": {"type": "vector", "dim": DIM_MOOD}, "age": {"type": "dense"}},
        {"about": {"type": "vector", "dim": DIM_ABOUT, "transform": "normalize", **mode}, "price": {"type": "dense"}},
    )
    data = prepare(dataset, vector_job(), tmp_path / "data")
    rows = pq.read_table(log).to_pylist()
    by_split = {split: [row for row in rows if row["part"] == split] for split in ("train", "test")}
    in_table = set(pq.read_table(log.parent / "items.parquet")["item"].to_pylist())

    def expected(row):
        about = unit_about(row["item"]) if row["item"] in in_table else np.zeros(DIM_ABOUT)
        price = row["item"] * 0.01 if row["item"] in in_table else None
        middle = [*about, *row["mood"]] if as_given else [*row["mood"], *about]
        return [row["age"], price, *middle]

    (batch,) = data.eval_batches("test", 10_000)
    for found, row in zip(batch.dense.numpy(), by_split["test"], strict=True):
        for value, wanted in zip(found, expected(row), strict=True):
            assert wanted is None or value == pytest.approx(wanted, abs=1e-6)
    # In training in the global order, on each of two ranks its part.
    order = data.order().rows(0, 0, 128)
    parts = [next(iter(data.train_batches(0, 0, rank, 2))).dense.numpy() for rank in range(2)]
    for found, place in zip(np.concatenate(parts), order, strict=True):
        np.testing.assert_allclose(found[2:], expected(by_split["train"][place])[2:], atol=1e-6)


def test_drawn_negatives_have_the_vector_of_the_drawn_item(log, tmp_path):
    dataset = dataset_at(log, label={"negatives": {"per_positive": 1, "of": "item"}})
    data = prepare(dataset, vector_job(), tmp_path / "data")
    (batch,) = data.eval_batches("test", 10_000)
    ids, places = data.catalogue.ids.to_pylist(), data.item_places("test")
    in_table = data.catalogue.num_in_table
    for found, place in zip(batch.dense.numpy()[:, -DIM_ABOUT:], places, strict=True):
        wanted = unit_about(ids[place]) if place < in_table else np.zeros(DIM_ABOUT)
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (batch.labels == 0).sum() == (batch.labels == 1).sum()


# --- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dnn", "fm", "two_tower"])
def test_a_vector_as_given_is_its_numbers(log, tmp_path, kind):
    """Bit for bit the job whose numbers are columns of their own."""
    model = {"two_tower": {}, "fm": {"kind": "fm", "hidden": []}}.get(kind, {"kind": kind})
    numbers = {f"mood_{column}": {"type": "dense"} for column in range(DIM_MOOD)}
    vector = {"mood": {"type": "vector", "dim": DIM_MOOD, "mode": "as_given"}}
    snapshots = []
    with single_rank_group():
        for name, features in (("numbers", numbers), ("vector", vector)):
            data = prepare(dataset_at(log, features, None), vector_job(model), tmp_path / name)
            trainer = trainer_of(vector_job(model), data)
            trainer.train()
            snapshots.append(snapshot(trainer))
    assert differ(*snapshots) == []


def test_two_ranks_train_and_rank_as_one_does(log, ranks, tmp_path):
    metrics = ["auc", "recall_20_full"]
    evaluation = {"split": {"kind": "column", "column": "part"}, "metrics": metrics}
    job = vector_job(batch_size=100, evaluation=evaluation)
    data = prepare(dataset_at(log, {}), job, tmp_path / "data")
    with single_rank_group():
        expected, scores = train_on_ranks(data.directory, job, 12)
    split = job.model_copy(update={"sharding": {"item": "row_wise"}})
    (found, scored), _ = ranks(2).run(train_on_ranks, data.directory, split, 12)
    assert "vector_fields.projections.of_about.weight" in expected
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(scores, rel=1e-7)
    assert scores["recall_20_full"] > 0


def test_stopping_and_resuming_changes_no_bit(log, tmp_path):
    job = vector_job(batch_size=256)
    data = prepare(dataset_at(log), job, tmp_path / "data")
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [2, data.steps_per_epoch])
        assert differ(snapshot(parts), snapshot(whole)) == []


# --- a run -----------------------------------------------------------------------------------------------------------


def run_of(folder, name, path, init=None, dataset=None, **changes):
    changes = {"publish": {"collection": "items", "feature": "item", "gate": {"mode": "off"}}, **changes}
    directory = write_run(
        folder / name, run_id=name, job=vector_job(**changes), dataset=dataset or dataset_at(path),
        store_url=str(folder / "store"), init_checkpoint=init,
    )  # fmt: skip
    return read_run(directory)


@pytest.fixture(scope="module")
def trained(log, tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("run"), "first", log, epochs=6)
    assert execute(run, start_ranks) == 0
    return run


@pytest.mark.slow
def test_predictions_are_those_of_evaluation_and_exports_say_the_same(trained, log, tmp_path):
    rows = pq.read_table(log)
    predictor = Predictor(trained.directory)
    found = predictor.predict(rows)["score"].to_numpy()
    data = PreparedData.open(trained.data)
    (batch,) = data.eval_batches("test", 10_000)
    evaluated = predictor.model(batch.features, batch.dense).detach().numpy()
    part = np.array(rows["part"].to_pylist())
    np.testing.assert_allclose(found[part == "test"], evaluated, rtol=1e-4, atol=1e-5)
    assert export(trained.directory, tmp_path / "export")["onnx"]["written"]
    # The item table goes along: the export needs neither the run nor the dataset.
    exported = Exported(tmp_path / "export")
    np.testing.assert_allclose(exported.predict(rows)["score"], found, rtol=1e-4, atol=1e-5)
    other = rows.set_column(rows.column_names.index("mood"), "mood", pa.nulls(len(rows)))
    assert not np.allclose(exported.predict(other)["score"], found, atol=1e-3)
    short = rows.set_column(rows.column_names.index("mood"), "mood", pa.array([[1.0, 2.0]] * len(rows)))
    for scorer in (predictor, exported):
        with pytest.raises(DataError, match=r"row 0: feature 'mood' is \[1.0, 2.0\]: no vector of 3 finite numbers"):
            scorer.predict(short)
        with pytest.raises(DataError, match="no column 'mood'"):
            scorer.predict(rows.drop_columns(["mood"]))


def test_a_new_item_has_a_vector_by_what_it_is_about(trained):
    """Items that nobody clicked: those with a vector have evidence, and lie near clicked ones of their genre."""
    items = tower_vectors(trained, latest_valid(trained.checkpoints))
    data = PreparedData.open(trained.data)
    known = dict(zip(data.catalogue.ids.to_pylist(), data.catalogue.is_known(), strict=True))
    for item, is_known in known.items():
        assert is_known == (item < NUM_CLICKED or about_of(item) is not None), item
    assert items.evidence.sum() == sum(known.values())


@pytest.mark.slow
def test_a_warm_start_goes_on_with_the_projections_and_tells_of_drift(trained, small, tmp_path):
    (tmp_path / "log").mkdir()
    later = write_vectors(tmp_path / "log", seed=1, scale=3.0)
    second = run_of(tmp_path, "second", later, str(trained.checkpoints))
    assert execute(second, start_ranks) == 0
    losses = [small.metrics(run.directory, "train")[0]["loss"] for run in (trained, second)]
    assert losses[1] < losses[0]
    moved = {(one["what"], one["name"]): one for one in PreparedData.open(second.data).drift}
    assert moved["vector", "mood"]["moved"]
    assert "the mean of 'mood' has moved by" in moved["vector", "mood"]["message"]
    profile = json.loads((trained.data / "profile.json").read_text())["vectors"]["mood"]
    mood = np.stack(pq.read_table(trained.dataset.uri)["mood"].to_pylist())
    np.testing.assert_allclose(profile["mean"], mood.mean(axis=0), rtol=1e-5)
    assert profile["length"] == pytest.approx(np.linalg.norm(mood, axis=1).mean(), rel=1e-5)
    changed = {"about": {"type": "vector", "dim": DIM_ABOUT}, "price": {"type": "dense"}}
    other = run_of(tmp_path, "other", later, str(trained.checkpoints), dataset_at(later, None, changed))
    assert execute(other, start_ranks) != 0
    said = small.events(other.directory, "error")[-1]["message"]
    assert said.startswith("features.about: the parent read 'about' with transform normalize, the dataset has ")


# --- sizes and specs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dnn", "deepfm", "two_tower"])
def test_the_memory_counts_numbers_vectors_and_the_item_tower(log, tmp_path, kind):
    job = vector_job({} if kind == "two_tower" else {"kind": kind})
    dataset = dataset_at(log, None, "about" if kind == "two_tower" else None)
    data = prepare(dataset, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data)
        parameters = sum(value.numel() for name, value in trainer.sharded._dense_tensors())
    found = estimate(job, dataset).memory
    # Weight, gradient and two moments of each.
    assert found.dense == 4 * 4 * parameters
    assert found.batches > estimate(job, dataset_at(log, {}, None)).memory.batches


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({}, "a vector needs dim, the length of its lists: `evenkeel datasets infer` reads it"),
        ({"dim": 3, "transform": "log1p"}, "transform: log1p is for single numbers: use none or normalize"),
        ({"dim": 3, "missing": 0.5}, "missing: 0.5 is for single numbers: leave it out for zeros, or use error"),
        ({"dim": 3, "shares": "item"}, "shares is for ids: a vector feature reads a column of the rows"),
        ({"type": "dense", "dim": 3}, "dim and mode are for vectors: leave them out, or set type: vector"),
        ({"type": "dense", "transform": "normalize"}, "transform: normalize is for vectors"),
    ],
)
def test_what_does_not_go_with_a_vector(log, feature, message):
    with pytest.raises(SpecError, match=message):
        dataset_at(log, {"mood": {"type": "vector", **feature}})


def test_a_kind_of_another_package_must_say_that_it_reads_them(log, monkeypatch):
    monkeypatch.setattr(DNNSpec, "reads_vectors", False)
    job = vector_job({"kind": "dnn"})
    with pytest.raises(
        ValueError, match=r"model.kind: dnn reads no vectors, and 'mood' is one: use one of fm, wide_deep"
    ):
        job.against(dataset_at(log, None, None))


def test_what_reads_no_vectors_says_so(log):
    only = {"user": {"type": "vector", "dim": 2}, "item": {"type": "vector", "dim": 3}}
    with pytest.raises(SpecError, match=r"features: all of them are vectors: add a feature with ids"):
        dataset_at(log, only, None)
    with pytest.raises(SpecError, match=r"features.user.type: the feature 'user' must have ids"):
        dataset_at(log, {"user": {"type": "vector", "dim": 2}}, None)
    with pytest.raises(SpecError, match=r"features.b.shares: 'mood' is a vector, and has no ids"):
        dataset_at(log, {"mood": {"type": "vector", "dim": 3}, "b": {"shares": "mood"}}, None)
    pairs = parse_job({"name": "j", "dataset": {"name": "clicks"}, "model": {"kind": "mf"}})
    pairs.against(dataset_at(log, None, None))
    split = {"split": {"kind": "column", "column": "part", "validation": 0.0}}
    one_pass = vector_job({"kind": "dnn"}, dataset={"name": "clicks", "one_pass": True}, epochs=1, evaluation=split)
    with pytest.raises(ValueError, match=r"features.mood.type: vectors are not read with dataset.one_pass yet"):
        one_pass.against(dataset_at(log, None, None))
    ranked = vector_job(MODEL, evaluation={"metrics": ["recall_20_full"]})
    with pytest.raises(ValueError, match="two_tower ranks all items for a user only where its features are user, item"):
        ranked.against(dataset_at(log))
