"""Splits that a column says, leave-last-n-out, real-valued labels, and what evaluation asks preparation to keep."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.spec import parse_dataset, parse_job

ROWS = 400


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return {
        "user": rng.integers(0, 25, ROWS), "item": rng.integers(0, 40, ROWS), "when": rng.permutation(ROWS),
        "rating": rng.integers(1, 6, ROWS).astype(np.float64), "click": rng.integers(0, 2, ROWS),
        "is_test": rng.random(ROWS) < 0.25,
    }  # fmt: skip


def prepared(tmp_path, table, *, label=None, model=None, evaluation=None, **job) -> PreparedData:
    path = tmp_path / "rows.parquet"
    if table is not None:  # else that of the call before
        pq.write_table(pa.table(table), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = {
        "name": "rows", "uri": str(path), "features": features, "label": label or {"column": "click"}, "order": "when",
    }  # fmt: skip
    document = {
        "name": "job", "dataset": {"name": "rows"}, "model": model or {"kind": "two_tower"}, "batch_size": 64,
        "evaluation": evaluation or {}, **job,
    }  # fmt: skip
    return prepare(parse_dataset(dataset), parse_job(document), tmp_path / "data")


def rows_of(data, split):
    """(user, item, label) by raw id of each example."""
    columns = []
    for key in data.keys[:2]:
        ids = np.append([-1, -1], data.vocabulary(key.table).to_numpy(zero_copy_only=False))
        columns.append(ids[np.asarray(data.column(split, key))])
    return sorted(zip(*(column.tolist() for column in columns), np.asarray(data.labels(split)).tolist(), strict=True))


def expected(table, mask, known=None):
    users, items = table["user"], table["item"]
    if known is not None:
        users = np.where(np.isin(users, table["user"][known]), users, -1)
        items = np.where(np.isin(items, table["item"][known]), items, -1)
    return sorted(zip(users[mask].tolist(), items[mask].tolist(), table["click"][mask].tolist(), strict=True))


# --- a column --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["bool", "int", "float", "text", "dictionary"])
def test_a_column_says_which_rows_test(tmp_path, table, of):
    test = table["is_test"]
    column = {
        "bool": pa.array(test), "int": pa.array(test.astype(np.int32)), "float": pa.array(test.astype(np.float64)),
        "text": pa.array(np.where(test, "test", "train")),
        "dictionary": pa.array(np.where(test, "test", "train")).dictionary_encode(),
    }[of]  # fmt: skip
    split = {"kind": "column", "column": "is_test", "validation": 0}
    data = prepared(tmp_path, table | {"is_test": column}, evaluation={"split": split})
    assert rows_of(data, "train") == expected(table, ~test)
    assert rows_of(data, "test") == expected(table, test, ~test)
    assert data.num_examples["validation"] == 0


def test_what_the_column_names_validates_and_else_a_share_of_pairs_does(tmp_path, table):
    named = np.where(table["is_test"], "test", np.where(table["when"] < 40, "validation", "train"))
    split = {"kind": "column", "column": "part", "validation": 0.3}
    data = prepared(tmp_path, table | {"part": named}, evaluation={"split": split})
    assert rows_of(data, "train") == expected(table, named == "train")
    assert rows_of(data, "validation") == expected(table, named == "validation", named == "train")
    data = prepared(tmp_path, table | {"part": table["is_test"]}, evaluation={"split": split})
    assert data.num_examples["test"] == table["is_test"].sum()
    share = data.num_examples["validation"] / (~table["is_test"]).sum()
    assert 0.2 < share < 0.4
    pairs = [{row[:2] for row in rows_of(data, name) if -1 not in row} for name in ("train", "validation")]
    assert not pairs[0] & pairs[1]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.where(np.arange(ROWS) == 17, 2, 0), "2 names no split"),
        (np.where(np.arange(ROWS) == 17, "tset", "train"), "'tset' names no split"),
        ([None if row == 17 else True for row in range(ROWS)], "None names no split"),
        (pa.array([[1]] * ROWS), "which names no split"),
    ],
)
def test_a_value_that_names_no_split_is_an_error_with_its_row(tmp_path, table, column, message):
    evaluation = {"split": {"kind": "column", "column": "is_test"}}
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, table | {"is_test": column}, evaluation=evaluation)
    assert "names no split" in str(caught.value)
    assert "row 17" in str(caught.value) or isinstance(column, pa.Array)


def test_a_column_that_is_not_there_is_named(tmp_path, table):
    with pytest.raises(DataError, match="no column 'holdout'"):
        prepared(tmp_path, table, evaluation={"split": {"kind": "column", "column": "holdout"}})


# --- leave last n out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_test", "num_validation"), [(1, 1), (2, 3), (5, 1)])
def test_the_last_rows_of_each_user_are_held_out(tmp_path, table, num_test, num_validation):
    split = {"kind": "per_user_last", "num_test": num_test, "num_validation": num_validation}
    data = prepared(tmp_path, table, evaluation={"split": split})
    sides = np.full(ROWS, "train", dtype=object)
    for user in np.unique(table["user"]):
        own = np.flatnonzero(table["user"] == user)
        own = own[np.argsort(table["when"][own])]
        for place, row in enumerate(own[::-1]):
            if place == len(own) - 1:
                continue  # a user's first row trains
            if place < num_test:
                sides[row] = "test"
            elif place < num_test + num_validation:
                sides[row] = "validation"
    for name in ("train", "validation", "test"):
        assert rows_of(data, name) == expected(table, sides == name, sides == "train")


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_real_valued_label_is_kept_as_float32(tmp_path, table):
    table["rating"] += 0.25
    data = prepared(
        tmp_path, table, label={"value": "rating"}, model={"kind": "mf", "loss": "mse"},
        evaluation={"split": {"kind": "column", "column": "is_test", "validation": 0}},
    )  # fmt: skip
    assert data.labels("train").dtype == np.float32
    assert data.labels("train").tolist() == table["rating"][~table["is_test"]].tolist()
    batches = list(data.eval_batches("test", 50))
    assert np.concatenate([batch.labels.numpy() for batch in batches]).tolist() == (
        table["rating"][table["is_test"]].tolist()
    )


@pytest.mark.parametrize(("value", "message"), [(np.inf, "is inf"), (1e39, "is 1e"), (np.nan, "NaN")])
def test_a_value_that_is_no_float32_is_an_error_with_its_row(tmp_path, table, value, message):
    table["rating"][31] = value
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, table, label={"value": "rating"}, model={"kind": "mf", "loss": "mse"})
    assert "row 31" in str(caught.value)


def test_values_that_are_all_one_are_refused(tmp_path, table):
    table["rating"][:] = 3
    with pytest.raises(DataError, match="labels is 3"):
        prepared(tmp_path, table, label={"value": "rating"}, model={"kind": "mf", "loss": "mse"})


# --- what evaluation asks for ----------------------------------------------------------------------------------------


def test_users_are_kept_for_gauc_also_those_that_were_not_trained_on(tmp_path, table):
    new = table["user"] >= 20
    table["is_test"] |= new
    split = {"kind": "column", "column": "is_test", "validation": 0}
    data = prepared(tmp_path, table, evaluation={"split": split, "metrics": ["auc", "gauc"]})
    raw, codes = table["user"][table["is_test"]], np.asarray(data.user_codes("test"))
    assert (
        len(set(zip(raw.tolist(), codes.tolist(), strict=True))) == len(set(raw.tolist())) == len(set(codes.tolist()))
    )


def test_what_evaluation_keeps_makes_other_data_and_nothing_else_does(tmp_path, table):
    plain = prepared(tmp_path, table).fingerprint
    assert prepared(tmp_path, None, evaluation={"metrics": ["auc", "ece"]}).fingerprint == plain
    ranking = {"metrics": ["recall_20_full"]}
    with_users = prepared(tmp_path, None, evaluation={"metrics": ["gauc"]}).fingerprint
    with_seen = prepared(tmp_path, None, evaluation=ranking).fingerprint
    assert len({plain, with_users, with_seen}) == 3
    bpr = prepared(tmp_path, None, model={"kind": "bpr", "loss": "bpr"}).fingerprint
    assert prepared(tmp_path, None, model={"kind": "bpr", "loss": "bpr"}, evaluation=ranking).fingerprint == bpr


def test_new_fields_leave_documents_as_they_were(tmp_path):
    job = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "two_tower"}})
    evaluation = job.model_dump(mode="json")["evaluation"]
    assert evaluation == {
        "split": {"kind": "random", "validation": 0.1, "test": 0.1}, "metrics": ["auc", "logloss"],
    }  # fmt: skip
    label = parse_dataset(
        {"name": "rows", "uri": "x", "features": {"user": {}}, "label": {"column": "click"}}
    ).model_dump(mode="json")["label"]
    assert label == {"column": "click", "rule": None, "negatives": None}


@pytest.mark.parametrize(("label", "loss"), [({"column": "click"}, "bce"), ({"value": "rating"}, "mse")])
def test_a_feature_named_labels_leaves_the_labels_alone(tmp_path, table, label, loss):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(table), path)
    found = {}
    for name in ("labels", "x"):
        features = {"user": {"type": "id"}, name: {"type": "id", "column": "item"}}
        dataset = parse_dataset({"name": "rows", "uri": str(path), "features": features, "label": label})
        job = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn", "loss": loss}})
        data = prepare(dataset, job, tmp_path / name)
        key = next(key for key in data.keys if key.name == name)
        found[name] = [
            np.asarray(array).tolist()
            for split in ("train", "validation", "test")
            for array in (data.labels(split), data.column(split, key))
        ]
    assert found["labels"] == found["x"]
