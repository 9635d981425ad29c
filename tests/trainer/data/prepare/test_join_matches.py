"""A joined file, an item table or a graph that has few of the ids is told of, and one that has none is refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare

IDS = np.arange(17, 57)
ITEMS = np.add.outer(np.arange(10), np.arange(40)).ravel() % 40
JOIN = {"uri": "brands.parquet", "on": "item", "column": "brand"}
FEATURES = {"user": {"type": "id"}, "brand": {"type": "id", "join": JOIN}}
WRITTEN = {
    "plain": str,
    "spaces": lambda one: f"{one} ",
    "upper": lambda one: f"A{one}",
    "lower": lambda one: f"a{one}",
    "zeros": lambda one: f"00{one}",
    "fraction": lambda one: f"{one}.0",
    "quotes": lambda one: f'"{one}"',
    "prefix": lambda one: f"item_{one}",
    "letters": lambda one: f"i{one}",
    "suffix": lambda one: f"{one}-red",
    "hash": lambda one: hashlib.md5(str(one).encode()).hexdigest(),
    "others": lambda one: f"x{one + 1000}",
}


@pytest.fixture
def joined(tmp_path, dataset_spec):
    """``joined(here, there)``: rows whose items are written in one way, and a file of brands in another."""

    def make(here, there, num_rows=400, num_brands=40, **fields):
        drawn = np.random.default_rng(0).integers(0, len(IDS), num_rows)
        items = pa.array([here(one) for one in IDS])
        pq.write_table(
            pa.table(
                {
                    "item": [there(one) for one in IDS[:num_brands]],
                    "brand": IDS[:num_brands] % 4,
                    "sku": IDS[:num_brands],
                }
            ),
            tmp_path / "brands.parquet",
        )
        rows = {"user": drawn % 30, "item": items.take(pa.array(drawn)), "click": drawn % 2}
        return dataset_spec(pa.table(rows), **{"features": FEATURES, **fields})

    return make


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("plain", "spaces", "white space"),
        ("upper", "lower", "upper and lower case"),
        ("plain", "zeros", "zeros in front"),
        ("zeros", "plain", "zeros in front"),
        ("plain", "fraction", "a fraction of zeros"),
        ("quotes", "plain", "quotes"),
        ("prefix", "plain", "a prefix"),
        ("plain", "letters", "a prefix of letters"),
        ("suffix", "plain", "a suffix"),
        ("plain", "hash", "the latter look like hashes"),
        ("hash", "plain", "the former look like hashes"),
        ("plain", "others", "its column 'sku' has them"),
        ("upper", "others", "they name different things"),
    ],
)
def test_a_join_that_finds_nothing_is_refused_with_ids_of_both_and_the_reason(
    joined, job_spec, tmp_path, here, there, reason
):
    here, there = WRITTEN[here], WRITTEN[there]
    with pytest.raises(DataError, match=reason) as refused:
        prepare(joined(here, there), job_spec(), tmp_path / "out")
    assert refused.value.where.endswith("brands.parquet, column 'item'")
    assert "joins 0 of 400 rows (brand)" in refused.value.what
    for one in IDS[:3]:
        assert repr(there(one)) in refused.value.what
    assert "(string)" in refused.value.what
    assert "max_unmatched" in refused.value.remedy


def test_an_integer_beside_text_with_zeros_is_refused(joined, job_spec, tmp_path):
    with pytest.raises(DataError, match=r"\(int64\), the file has '0017', .* \(string\).*zeros in front"):
        prepare(joined(int, WRITTEN["zeros"]), job_spec(), tmp_path / "out")


def test_an_item_table_that_has_no_item_is_refused_once_for_all_its_features(joined, job_spec, tmp_path):
    items = {"uri": "brands.parquet", "features": {"brand": {"type": "id"}, "sku": {"type": "dense"}}}
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = joined(WRITTEN["upper"], WRITTEN["lower"], features=features, items=items)
    with pytest.raises(DataError, match=r"joins 0 of 400 rows \(brand, item table\).*upper and lower case"):
        prepare(dataset, job_spec(model={"kind": "two_tower"}), tmp_path / "out")


def test_more_unmatched_rows_than_the_limit_are_a_warning_and_fewer_are_none(joined, job_spec, tmp_path):
    log: list[str] = []
    data = prepare(joined(str, str, num_brands=10), job_spec(), tmp_path / "few", log=log.append)
    (warning,) = data.warnings
    assert "rows (brand): 'item' of the rows is " in warning
    assert f"warning: {warning}" in log
    assert prepare(joined(str, str, num_brands=30), job_spec(), tmp_path / "most").warnings == []
    assert len(prepare(joined(str, str, num_brands=30, max_unmatched=0), job_spec(), tmp_path / "all").warnings) == 1


def test_who_says_that_few_are_right_trains_without_a_word(joined, job_spec, tmp_path):
    data = prepare(joined(str, WRITTEN["others"], max_unmatched=1), job_spec(), tmp_path / "out")
    assert data.warnings == []


def test_rows_without_a_key_are_no_unmatched_ones(joined, job_spec, tmp_path):
    """Most orders of a shop may have no coupon; a column that is null everywhere joins nothing, which is told."""

    def some(one):
        return str(one) if one < 20 else None

    assert prepare(joined(some, str), job_spec(), tmp_path / "some").warnings == []
    (warning,) = prepare(joined(lambda one: None, str), job_spec(), tmp_path / "none").warnings
    assert "column 'item': is null in every row" in warning


def test_a_handful_of_rows_says_nothing(joined, job_spec, tmp_path):
    split = {"split": {"kind": "random", "validation": 0, "test": 0}}
    data = prepare(joined(str, WRITTEN["others"], num_rows=19), job_spec(evaluation=split), tmp_path / "out")
    assert data.warnings == []


@pytest.mark.parametrize(("kept", "is_refused"), [(0, True), (1, True), (20, False)])
def test_edges_of_ids_that_the_table_lacks(tmp_path, dataset_spec, job_spec, clicks, kept, is_refused):
    """Raw users are 3, 10, ... 206: of 3,000 edges some join two of them, the others have text in front."""
    users = np.arange(30) * 7 + 3
    edges = [(f"u{one}", f"u{one + 7}") for one in np.resize(users, 3000)]
    edges += [(str(users[one]), str(users[one + 1])) for one in range(kept)]
    pq.write_table(pa.table({"a": [a for a, _ in edges], "b": [b for _, b in edges]}), tmp_path / "trust.parquet")
    table = clicks(2000, users=300).append_column("name", pa.array([""] * 2000))
    names = pa.array([str(one) for one in table["user"].to_pylist()])
    table = table.set_column(table.schema.get_field_index("user"), "user", names)
    graphs = {"trust": {"uri": "trust.parquet", "source": "a", "target": "b", "of": "user"}}
    dataset = dataset_spec(table, graphs=graphs)
    job = job_spec(sse={"user": {"graph": "trust", "rho": 10}})
    if is_refused:
        with pytest.raises(DataError, match=r"it has 'u3', 'u10', 'u17', the table .*a prefix of letters"):
            prepare(dataset, job, tmp_path / "out")
        return
    (warning,) = prepare(dataset, job, tmp_path / "out").warnings
    assert "3,000 of 3,020 edges are left out" in warning
    assert "'u3', 'u10', 'u17'" in warning


@pytest.fixture
def refreshed(dataset_spec, job_spec, tmp_path, clicks):
    """``refreshed(**columns)``: a run on rows with these columns that goes on from one on users and items 0 to 39."""
    table = pa.table({"user": [f"u{one}" for one in range(40)] * 10, "item": ITEMS, "click": [0, 1] * 200})
    parent = prepare(dataset_spec(table), job_spec(), tmp_path / "parent")

    def make(**columns):
        rows = pa.table({name: columns.get(name, table[name]) for name in table.column_names})
        base = {name: parent.id_map(name) for name in parent.tables}
        return prepare(dataset_spec(rows), job_spec(), tmp_path / "refresh", base_vocabulary=base)

    return make


def test_a_warm_start_without_an_id_of_its_parent_is_refused(refreshed):
    with pytest.raises(DataError, match=r"0 of 80 ids .*user has 'U0', .* the parent 'u0', .*upper and lower case"):
        refreshed(user=[f"U{one}" for one in range(40)] * 10, item=ITEMS + 5000)


def test_a_warm_start_whose_users_are_written_otherwise_is_told(refreshed):
    (warning,) = refreshed(user=[f"U{one}" for one in range(40)] * 10).warnings
    assert "0 of 40 ids are the parent's: user has 'U0', " in warning


def test_a_warm_start_of_new_items_alone_is_no_fault(refreshed):
    """News of another day are such; drift tells of them."""
    assert refreshed(item=ITEMS + 5000).warnings == []
