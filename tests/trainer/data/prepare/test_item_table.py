"""The item table in prepared data: what examples and the catalogue have of an item, against the files themselves."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import forked
from tests.trainer.data.prepare.cases import contents
from tests.trainer.data.prepare.test_part_cache import make_small
from tests.trainer.item_tables import NUM_ABSENT, NUM_CLICKED, NUM_ITEMS, dataset_at, items_table, job_of, prepared_log
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import open_numeric
from trainer.data.errors import DataError
from trainer.data.prepare.part_cache import PartCache
from trainer.data.prepare.preparation import prepare


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return prepared_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def data(log, tmp_path_factory):
    return prepare(dataset_at(log), job_of(), tmp_path_factory.mktemp("data") / "data")


def raw(data, table, rows):
    """Raw ids of table rows, None for special ones."""
    ids = data.vocabulary(table).to_pylist()
    return [ids[row - NUM_SPECIAL_ROWS] if row >= NUM_SPECIAL_ROWS else None for row in rows]


def table_by_id():
    return {row["item"]: row for row in items_table().to_pylist()}


def trained_values(data, log, column):
    """What a column of the item table has for the items of training rows."""
    rows = pq.read_table(log).to_pandas()
    table = table_by_id()
    trained = set(rows.item[rows.part == "train"])
    return {table[item][column] for item in trained if item in table}


def test_the_catalogue_has_every_item_once_with_its_features(data, log):
    catalogue = data.catalogue
    ids = catalogue.ids.to_pylist()
    assert sorted(ids) == list(range(NUM_ITEMS))
    assert ids[: catalogue.num_in_table] == items_table()["item"].to_pylist()
    assert sorted(ids[catalogue.num_in_table :]) == list(range(NUM_ABSENT))
    # Items that nobody clicked read the row of unknown ids, all others their own.
    own = raw(data, "item", catalogue.rows)
    assert own == [item if item < NUM_CLICKED else None for item in ids]
    assert set(catalogue.rows[np.array(ids) >= NUM_CLICKED]) == {UNKNOWN_ROW}
    table = table_by_id()
    genres, brand = catalogue.features["genres"], catalogue.features["brand"]
    assert isinstance(genres, Jagged)
    for place, item in enumerate(ids):
        row = table.get(item, {"genres": None, "brand": None})
        expected = [] if row["genres"] is None else row["genres"].split("|")
        start, end = genres.offsets[place : place + 2]
        assert raw(data, "genres", genres.values[start:end]) == expected
        assert raw(data, "brand", brand[place : place + 1]) == [row["brand"]]


def test_numbers_have_the_statistics_of_training_rows(data, log):
    rows = pq.read_table(log).to_pandas()
    table = table_by_id()
    prices = [table[item]["price"] for item in rows.item[rows.part == "train"] if item in table]
    prices = np.array([price for price in prices if price is not None])
    (numeric,) = open_numeric(data.numeric_path)
    assert numeric.mean == pytest.approx(prices.mean())
    assert numeric.std == pytest.approx(prices.std())
    found = dict(zip(data.catalogue.ids.to_pylist(), data.catalogue.numbers[:, 0].tolist(), strict=True))
    for item in range(NUM_ITEMS):
        price = table.get(item, {"price": None})["price"]
        expected = 0.0 if price is None else (price - prices.mean()) / prices.std()
        assert found[item] == pytest.approx(expected, abs=1e-6), item


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_example_has_what_the_catalogue_has_of_its_item(data, log, split):
    rows = pq.read_table(log).to_pandas()
    catalogue, places = data.catalogue, data.item_places(split)
    assert catalogue.ids.take(pa.array(places)).to_pylist() == rows.item[rows.part == split].tolist()
    keys = {key.name: key for key in data.keys}
    assert [key.name for key in data.keys if key.of_item] == ["genres", "brand"]
    genres, expected = data.column(split, keys["genres"]), catalogue.features["genres"].take(places)
    assert np.array_equal(genres.values, expected.values)
    assert np.array_equal(genres.offsets, expected.offsets)
    assert np.array_equal(data.column(split, keys["brand"]), catalogue.features["brand"][places])
    assert np.array_equal(data.numbers(split)[:, 0], catalogue.numbers[places, 0])


def test_drawn_negatives_have_the_features_of_the_drawn_item(log, tmp_path):
    dataset = dataset_at(log, label={"negatives": {"per_positive": 2, "of": "item"}})
    data = prepare(dataset, job_of(), tmp_path / "data")
    places, labels = np.array(data.item_places("train")), np.array(data.labels("train"))
    keys = {key.name: key for key in data.keys}
    assert (labels == 0).sum() == 2 * (labels == 1).sum()
    items = raw(data, "item", data.column("train", keys["item"]))
    assert data.catalogue.ids.take(pa.array(places)).to_pylist() == items
    assert np.array_equal(data.column("train", keys["brand"]), data.catalogue.features["brand"][places])
    assert np.array_equal(data.numbers("train")[:, 0], data.catalogue.numbers[places, 0])


def test_an_id_of_a_feature_that_no_training_row_has_is_unknown(log, tmp_path):
    table = items_table()
    brand = [900 if row["item"] >= NUM_CLICKED else row["brand"] for row in table.to_pylist()]
    folder = tmp_path / "log"
    folder.mkdir()
    path = prepared_log(folder)
    pq.write_table(table.set_column(2, "brand", pa.array(brand)), folder / "items.parquet")
    data = prepare(dataset_at(path), job_of(), tmp_path / "data")
    assert 900 not in data.vocabulary("brand").to_pylist()
    new = np.array(data.catalogue.ids) >= NUM_CLICKED
    assert set(data.catalogue.features["brand"][new]) == {UNKNOWN_ROW}
    # Their genres occur in training: something is known of all of them but those without genres.
    known = data.catalogue.is_known()
    for item, one in zip(data.catalogue.ids.to_pylist(), known, strict=True):
        assert one == (item < NUM_CLICKED or item % 10 != 0), item


def test_it_is_counted_how_many_examples_lack_their_item(log, tmp_path):
    said = []
    prepare(dataset_at(log), job_of(), tmp_path / "data", log=said.append)
    rows = pq.read_table(log).to_pandas()
    share = (rows.item < NUM_ABSENT).mean()
    (line,) = [one for one in said if one.startswith("item table")]
    assert f"{NUM_ITEMS - NUM_ABSENT} items, {NUM_ITEMS - NUM_CLICKED} of them not trained on" in line
    assert f"{share:.2%} of the examples have items that are not in the table" in line


def test_a_changed_item_table_is_prepared_again(log, tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    path = prepared_log(folder)
    first = prepare(dataset_at(path), job_of(), tmp_path / "data").fingerprint
    assert prepare(dataset_at(path), job_of(), tmp_path / "data").fingerprint == first
    pq.write_table(items_table().slice(0, 40), folder / "items.parquet")
    assert prepare(dataset_at(path), job_of(), tmp_path / "data").fingerprint != first


def test_a_warm_starts_statistics_stay(log, tmp_path):
    first = prepare(dataset_at(log), job_of(), tmp_path / "data")
    (numeric,) = open_numeric(first.numeric_path)
    before, column = first.fingerprint, first.catalogue.numbers[:, 0].copy()
    told = replace(numeric, mean=numeric.mean + numeric.std)
    second = prepare(dataset_at(log), job_of(), tmp_path / "data", base_numeric=[told])
    assert second.fingerprint != before
    is_known = [
        table_by_id().get(item, {"price": None})["price"] is not None for item in second.catalogue.ids.to_pylist()
    ]
    np.testing.assert_allclose(second.catalogue.numbers[is_known, 0], column[is_known] - 1.0, atol=1e-5)


def prepare_and_die(path, directory):
    """Prepare, and be killed after the first save."""
    make_small(setattr)
    save = PartCache.save

    def deadly(self, *args):
        save(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    PartCache.save = deadly
    prepare(dataset_at(path), job_of(), directory, threads=1)


@pytest.mark.process
def test_a_killed_preparation_goes_on_and_threads_change_no_byte(tmp_path, monkeypatch):
    make_small(monkeypatch.setattr)
    path = prepared_log(tmp_path, num_rows=300)
    prepare(dataset_at(path), job_of(), tmp_path / "whole", threads=1)
    expected = contents(tmp_path / "whole")
    assert {"catalogue/genres.values.bin", "catalogue/brand.bin", "train/item.places.bin"} <= expected.keys()
    process = forked.start(prepare_and_die, path, tmp_path / "killed" / "data", log=tmp_path / "killed.log")
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
    said = []
    prepare(dataset_at(path), job_of(), tmp_path / "killed" / "data", threads=2, log=said.append)
    assert any("an earlier attempt" in one for one in said)
    assert contents(tmp_path / "killed" / "data") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns("item"), "no column 'item'"),
        (lambda table: table.drop_columns("brand"), "no column 'brand'"),
        (lambda table: table.drop_columns("price"), "no column 'price'"),
        (lambda table: pa.concat_tables([table, table.slice(0, 2)]), "2 join keys occur more than once"),
        (
            lambda table: table.set_column(0, "item", pa.array([None, *table["item"].to_pylist()[1:]])),
            "a join key is null",
        ),
        (
            lambda table: table.set_column(0, "item", pa.array([f"x{one}" for one in range(len(table))])),
            "an id that is no 64-bit integer",
        ),
        (
            lambda table: table.set_column(2, "brand", pa.array([[1]] * len(table))),
            "holds lists (set type: id_list of items.features.brand)",
        ),
        (lambda table: table.set_column(3, "price", pa.array(["dear"] * len(table))), "no finite number"),
        (lambda table: table.slice(0, 0), "has no rows"),
    ],
)
def test_a_bad_item_table_is_refused(tmp_path, change, message):
    path = prepared_log(tmp_path, num_rows=200)
    pq.write_table(change(items_table()), tmp_path / "items.parquet")
    with pytest.raises(DataError) as caught:
        prepare(dataset_at(path), job_of(), tmp_path / "data")
    assert message in str(caught.value)
    assert "items.parquet" in str(caught.value)
    assert caught.value.remedy


def test_a_missing_item_table_is_refused(tmp_path):
    path = prepared_log(tmp_path, num_rows=200)
    (tmp_path / "items.parquet").unlink()
    with pytest.raises(DataError, match=r"items\.parquet"):
        prepare(dataset_at(path), job_of(), tmp_path / "data")
