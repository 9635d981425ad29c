"""Numeric features: values, statistics of training rows alone, transforms, what is missing and what is bad."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.columns.numeric import Numeric, as_floats, fitted, numeric_of
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.figures import profile
from trainer.sizing.estimate import estimate
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.models.base import ModelSpec

NUM_ROWS, HELD = 400, 40


def feature(transform: str = "none", missing: str | float = "mean") -> Numeric:
    return Numeric("price", "price", transform, missing)


def test_transforms_are_their_formulas():
    rng = np.random.default_rng(0)
    values = np.append(rng.lognormal(size=999) - 0.5, np.nan)
    known = values[:-1]
    plain = fitted(feature(), values, "").apply(values)
    np.testing.assert_array_equal(plain[:-1], known.astype(np.float32))
    logs = fitted(feature("log1p"), values, "").apply(values)
    np.testing.assert_allclose(logs[:-1], np.sign(known) * np.log(1 + np.abs(known)), rtol=1e-6)
    assert logs[-1] == pytest.approx(logs[:-1].mean(), rel=1e-6)
    standard = fitted(feature("standardize"), values, "").apply(values)
    np.testing.assert_allclose(standard[:-1], (known - known.mean()) / known.std(), rtol=1e-5, atol=1e-6)
    assert standard[-1] == pytest.approx(0.0, abs=1e-7)
    quantile = fitted(feature("quantile"), values, "")
    shares = quantile.apply(values)[:-1]
    assert (shares.min(), shares.max()) == (0.0, 1.0)
    # The rank of a value, to the width of a quantile.
    np.testing.assert_allclose(shares, known.argsort().argsort() / 998, atol=1.1e-3)
    assert quantile.apply(np.array([-1e9, 1e9])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("transform", ["none", "log1p", "standardize", "quantile"])
def test_the_original_numbers_come_back(transform):
    values = np.random.default_rng(0).normal(3.0, 5.0, 900)
    feature = fitted(Numeric("x", "x", transform, "mean"), values, "here")
    np.testing.assert_allclose(feature.original(feature.apply(values).astype(np.float64)), values, rtol=1e-3, atol=1e-3)


def test_what_is_missing_is_a_number_or_the_mean():
    values = np.array([1.0, 3.0, np.nan])
    assert fitted(feature("none", 7.0), values, "").apply(values).tolist() == [1.0, 3.0, 7.0]
    found = fitted(feature("standardize", 2.0), values, "").apply(values)
    assert found.tolist() == [-1.0, 1.0, 0.0]
    assert fitted(feature("standardize"), np.array([5.0, 5.0]), "").apply(np.array([5.0, np.nan])).tolist() == [
        0.0,
        0.0,
    ]
    with pytest.raises(DataError, match="feature 'price' has no value in any training row"):
        fitted(feature(), np.array([np.nan]), "rows")


@pytest.mark.parametrize(("constant", "number"), [(0.1, 1000), (-0.3, 777), (0.0, 5)])
def test_a_constant_of_training_is_not_divided_by_the_rounding_of_its_mean(constant, number):
    known = fitted(feature("standardize"), np.full(number, constant), "")
    assert known.apply(np.array([constant, constant + 1.0])).tolist() == pytest.approx([0.0, 1.0], abs=1e-6)


def test_many_equal_values_are_one_quantile():
    values = np.array([0.0] * 900 + list(range(1, 101)))
    found = fitted(feature("quantile"), values, "")
    assert len(found.quantiles) == len(set(found.quantiles))
    assert found.apply(np.array([0.0]))[0] == pytest.approx(0.45, abs=0.01)
    assert numeric_of(found.as_json()) == found


@pytest.mark.parametrize(
    ("column", "values", "bad"),
    [
        (pa.array([1, None, 3], pa.int32()), [1, np.nan, 3], [0, 0, 0]),
        (pa.array([1.5, float("inf"), float("nan")]), [1.5, np.inf, np.nan], [0, 1, 0]),
        (pa.array(["1e3", " 2 ", "x", "", None, "nan"]), [1000, 2, np.nan, np.nan, np.nan, np.nan], [0, 0, 1, 0, 0, 0]),
        (pa.array([True, False]), [1, 0], [0, 0]),
        (pa.array([1e300]), [1e300], [1]),
        (pa.array([[1.0]]), [np.nan], [1]),
    ],
)
def test_values_of_columns(column, values, bad):
    found, wrong = as_floats(column)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(wrong, np.array(bad, dtype=bool))


def rows_with_prices(path, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    price = rng.lognormal(size=NUM_ROWS) + shift
    price[NUM_ROWS - 2 * HELD :] += 1e6  # held-out rows must not be seen in the statistics
    click = (price > np.median(price)).astype(np.int64)
    columns = {
        "user": rng.integers(0, 9, NUM_ROWS),
        "item": rng.integers(0, 20, NUM_ROWS),
        "price": pa.array(price, mask=rng.random(NUM_ROWS) < 0.1),
        "age": rng.integers(18, 80, NUM_ROWS),
        "pos": np.arange(NUM_ROWS),
        "click": click ^ (rng.random(NUM_ROWS) < 0.2),
    }
    pq.write_table(pa.table(columns), path)
    return path


def specs(path, **changes):
    dataset = {
        "name": "shop",
        "uri": str(path),
        "features": {
            "user": {"type": "id"},
            "price": {"type": "dense", "transform": "standardize"} | changes.pop("price", {}),
            "item": {"type": "id"},
            "age": {"type": "dense", "transform": "log1p"},
        },
        "label": {"column": "click"},
        "order": "pos",
    }
    job = {
        "name": "shop",
        "dataset": {"name": "shop"},
        "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        "batch_size": 32,
        "evaluation": {"split": {"kind": "time", "validation": HELD / NUM_ROWS, "test": HELD / NUM_ROWS}},
    }
    return parse_dataset(dataset | changes.pop("dataset", {})), parse_job(job | changes)


def test_statistics_are_those_of_the_training_rows(tmp_path):
    path = rows_with_prices(tmp_path / "rows.parquet")
    data = prepare(*specs(path), tmp_path / "data")
    assert data.num_dense == 2
    assert [key.name for key in data.keys] == ["user", "item"]
    raw = pq.read_table(path)["price"].to_numpy()
    train = raw[: NUM_ROWS - 2 * HELD]
    mean, std = np.nanmean(train), np.nanstd(train)
    assert mean < 100
    found = data.numbers("train")
    np.testing.assert_allclose(found[:, 0], np.nan_to_num((train - mean) / std), rtol=1e-5, atol=1e-6)
    age = pq.read_table(path)["age"].to_numpy()
    np.testing.assert_allclose(data.numbers("test")[:, 1], np.log1p(age[-HELD:]), rtol=1e-6)
    validation = raw[NUM_ROWS - 2 * HELD : NUM_ROWS - HELD]
    np.testing.assert_allclose(
        data.numbers("validation")[:, 0], np.nan_to_num((validation - mean) / std), rtol=1e-5, atol=1e-6
    )


def test_batches_have_the_numbers_of_their_rows(tmp_path):
    path = rows_with_prices(tmp_path / "rows.parquet")
    data = prepare(*specs(path), tmp_path / "data")
    for rank in (0, 1):
        for batch in data.train_batches(0, 0, rank, 2, micro_batches=2):
            items = batch.features["item"].values().numpy()
            for place in range(len(batch)):
                same = np.flatnonzero((data.numbers("train") == batch.dense[place].numpy()).all(axis=1))
                assert items[place] in data.column("train", data.keys[1])[same]
    (batch,) = data.eval_batches("test", 1000)
    np.testing.assert_array_equal(batch.dense.numpy(), data.numbers("test"))


def test_bad_values_are_refused_with_their_row(tmp_path):
    path = rows_with_prices(tmp_path / "rows.parquet")
    rows = pq.read_table(path)
    ages = rows["age"].to_pylist()
    pq.write_table(rows.set_column(3, "age", pa.array([str(age) for age in ages[:-1]] + ["old"])), path)
    with pytest.raises(DataError, match=r"column 'age', row 399: feature 'age' is 'old': no finite number"):
        prepare(*specs(path), tmp_path / "data")
    pq.write_table(rows, path)
    missing = rows["price"].to_pylist().index(None)
    with pytest.raises(DataError, match=rf"column 'price', row {missing}: feature 'price' is None: missing"):
        prepare(*specs(path, price={"missing": "error"}), tmp_path / "data")


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ({"type": "id", "transform": "log1p"}, "transform is for dense features"),
        ({"type": "dense", "shares": "user"}, "shares is for ids"),
        ({"type": "dense", "missing": "unknown"}, "missing: unknown is for ids"),
        ({"type": "id", "missing": 3.0}, "missing: 3.0 is for dense features"),
        ({"type": "id_list", "missing": "error"}, "missing: error is for single ids"),
        ({"type": "id", "weights": "w"}, "weights are for an id_list"),
        ({"type": "dense", "missing": float("inf")}, "missing"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, feature, said):
    with pytest.raises(SpecError, match=said):
        specs(tmp_path / "rows.parquet", dataset={"features": {"user": {"type": "id"}, "price": feature}})


def test_models_that_read_no_numbers_refuse_them(tmp_path):
    path = rows_with_prices(tmp_path / "rows.parquet")

    class Plain(ModelSpec):
        kind: Literal["plain"]

    dataset, job = specs(path, model={"kind": "two_tower", "embedding_dim": 4})
    problem = next(Plain(kind="plain").fit_problems(job, dataset))
    assert str(problem).startswith("model.kind: plain reads no numeric features, and 'price' is dense: use one of fm")
    assert prepare(dataset, job, tmp_path / "two-tower").num_dense == 2
    with pytest.raises(SpecError, match=r"label.negatives.of: 'price' is dense, and has no ids"):
        specs(path, dataset={"label": {"negatives": {"of": "price"}}})
    with pytest.raises(SpecError, match="all of them are dense"):
        specs(path, dataset={"features": {"price": {"type": "dense"}}})
    dataset, job = specs(path, model={"kind": "mf", "embedding_dim": 4, "init": {"kind": "hash"}})
    assert prepare(dataset, job, tmp_path / "data").num_dense == 0


def test_specs_without_them_are_what_they_were(tmp_path):
    """A field that is not set is in no dump, so that hashes and checkpoints of earlier jobs stand."""
    dumped = parse_dataset(
        {"name": "a", "uri": "a.parquet", "features": {"item": {"type": "id"}}, "label": {"column": "y"}}
    ).model_dump(mode="json")
    assert set(dumped["features"]["item"]) == {"type", "column", "join", "derive", "shares", "pooling"}
    assert "max_bad_rows" not in dumped


def test_profile_and_estimate_know_them(tmp_path):
    path = rows_with_prices(tmp_path / "rows.parquet")
    dataset, job = specs(path)
    shown = profile(dataset)["features"]
    raw = pq.read_table(path)["price"]
    assert shown["price"]["nulls"] == raw.null_count > 0
    assert (shown["price"]["min"], shown["price"]["bad"]) == (np.nanmin(raw.to_numpy()), 0)
    assert set(shown["item"]) == {"column", "nulls", "distinct"}
    assert set(estimate(job, dataset)["tables"]) == {"user", "item"}
