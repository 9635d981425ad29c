"""What of a refresh's rows moved is told; what cannot be trained on is refused, and nothing else."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.drift import PSI, open_profile, stability_index
from trainer.data.prepare.preparation import prepare

FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}, "price": {"type": "dense"}}


def rows(clicks, seed=0, num_rows=2000):
    generator = np.random.default_rng(seed)
    return clicks(num_rows, seed=seed).append_column("price", pa.array(generator.normal(size=num_rows)))


def column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


@pytest.fixture
def refreshed(clicks, dataset_spec, job_spec, tmp_path):
    """Drift from the rows of a parent run to a table, with the log."""
    parent = prepare(dataset_spec(rows(clicks), features=FEATURES), job_spec(), tmp_path / "parent")

    def refresh(table):
        log = []
        data = prepare(
            dataset_spec(table, features=FEATURES),
            job_spec(),
            tmp_path / "refresh",
            base_vocabulary={name: parent.id_map(name) for name in parent.tables},
            base_profile=open_profile(parent.profile_path),
            log=log.append,
        )
        assert parent.drift is None
        moved = [(one["what"], one["name"]) for one in data.drift if one["moved"]]
        return moved, {(one["what"], one["name"]): one["now"] for one in data.drift}, log

    return refresh


def test_another_day_of_the_same_has_not_moved(clicks, refreshed):
    moved, found, log = refreshed(rows(clicks, seed=1))
    assert moved == []
    assert found["rows", ""] == 2000
    assert 0.0 <= found["numeric", "price"] < 0.05
    assert "rows are like those of the parent run" in log


def test_what_moved_is_told(clicks, refreshed):
    table = rows(clicks, seed=1, num_rows=5000)
    generator = np.random.default_rng(2)
    table = column(table, "price", np.where(generator.random(5000) < 0.1, np.nan, generator.normal(1.0, 1.0, 5000)))
    table = column(table, "click", (generator.random(5000) < 0.8).astype(np.int32))
    items = np.asarray(table["item"])
    table = column(table, "item", np.where(generator.random(5000) < 0.3, items + 10_000, items))
    table = column(table, "user", [None if one else 3 for one in generator.random(5000) < 0.5])
    table = table.drop_columns("ts").append_column("campaign", pa.array(np.zeros(5000)))
    moved, found, log = refreshed(table)
    assert set(moved) == {
        ("columns", "ts"), ("columns", "campaign"), ("type", "click"), ("rows", ""), ("label", ""), ("missing", "user"),
        ("missing", "price"), ("new_ids", "item"), ("numeric", "price"),
    }  # fmt: skip
    assert found["new_ids", "item"] == pytest.approx(0.3, abs=0.1)
    assert found["missing", "user"] == pytest.approx(0.5, abs=0.1)
    assert found["missing", "price"] == pytest.approx(0.1, abs=0.02)
    assert found["label", ""] == pytest.approx(0.8, abs=0.1)
    assert found["numeric", "price"] > PSI
    (line,) = [line for line in log if line.startswith("rows moved since the parent run: ")]
    assert "column 'ts' is gone; column 'campaign' is new; column 'click' was int64 and is int32" in line


def test_each_of_several_labels_is_compared(clicks, dataset_spec, job_spec, tmp_path):
    labels = {"click": {"column": "click"}, "early": {"rule": "ts < 200"}}
    job = job_spec(model={"kind": "shared_bottom"})
    parent = prepare(dataset_spec(rows(clicks), label=None, labels=labels), job, tmp_path / "parent")
    log = []
    data = prepare(
        dataset_spec(rows(clicks, seed=1), label=None, labels=labels | {"early": {"rule": "ts < 1500"}}), job,
        tmp_path / "refresh", base_vocabulary={name: parent.id_map(name) for name in parent.tables},
        base_profile=open_profile(parent.profile_path), log=log.append,
    )  # fmt: skip
    assert {(one["name"], one["moved"]) for one in data.drift if one["what"] == "label"} == {
        ("click", False), ("early", True),
    }  # fmt: skip
    assert any("mean label of 'early' 0.7" in line for line in log), log


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.drop_columns("item"), "no column 'item'"),
        (lambda table: column(table, "item", [f"i{one}" for one in table["item"].to_pylist()]), "the warm start's ids"),
        (lambda table: column(table, "price", ["cheap"] * len(table)), "no finite number"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(clicks, refreshed, change, says):
    with pytest.raises(DataError, match=says):
        refreshed(change(rows(clicks, seed=1)))


def test_the_index_is_that_of_its_formula():
    before = {"edges": [0.0, 1.0], "shares": [0.5, 0.3, 0.2]}
    values = np.array([-1.0] * 2 + [0.0] * 3 + [1.0] * 5)
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2])
    assert stability_index(before, values) == pytest.approx(((p - q) * np.log(p / q)).sum())
    assert stability_index(before, np.empty(0)) == float("inf")
    assert stability_index({"edges": [], "shares": []}, np.empty(0)) == 0.0
