"""Ids are what is written: the same in every format, and two that are written differently are two."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.data.columns import values
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.errors import DataError
from trainer.data.prepare.fingerprint import WarmStart, fingerprint_of
from trainer.data.prepare.plan import make_plan
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.id_types import WrittenIds, are_written_as_integers, is_written_as_integer, number_of
from trainer.data.sources.infer import propose
from trainer.data.sources.join import JoinTable
from trainer.data.sources.readers import csv as csv_reader
from trainer.data.sources.readers import json_lines
from trainer.data.sources.source import Source
from trainer.spec import Join

NASTY = [
    "0108775000", "108775000", "007", "07", "7", "-7", "-0", "0", "+7", "7.0", "7.00", "1e3", "1000", "0x7", " 7", "7 ",
    "1.1", "1.10", "true", "True", "TRUE", "false", "1", "nan", "NaN", "inf", "NA", "null", "2014-01-07",
    "2014-01-07 00:00:00", "2014-1-7", "20140107", "12:30:00", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "18446744073709551616", "1,000", "7|8", "７", "٧", "1_000",
    "000DIV",
]  # fmt: skip


def write_csv(rows: list[dict], path: Path, delimiter: str = ",") -> None:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_tsv(rows: list[dict], path: Path) -> None:
    write_csv(rows, path, "\t")


def write_json(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def table_of(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows)


WRITERS: dict[str, Callable[[list[dict], Path], None]] = {
    "csv": write_csv,
    "csv.gz": write_csv,
    "tsv": write_tsv,
    "jsonl": write_json,
    "parquet": lambda rows, path: pq.write_table(table_of(rows), path),
    "feather": lambda rows, path: pa.feather.write_feather(table_of(rows), path),
    "arrow.csv": lambda rows, path: pa.csv.write_csv(table_of(rows), path),
    "pandas.csv": lambda rows, path: pd.DataFrame(rows).to_csv(path, index=False),
    "pandas.jsonl": lambda rows, path: pd.DataFrame(rows).to_json(path, orient="records", lines=True),
    "pandas.parquet": lambda rows, path: pd.DataFrame(rows).to_parquet(path),
}


def read_ids(path: Path, column: str = "item") -> list:
    """The ids of a column in the order of the rows, as a table has them."""
    source = Source(str(path), ids=[column])
    source.require([column])
    kind = values.id_kind(source.column_type(column), "")
    return [
        one for chunk in source.stream([column]) for one in values.as_ids(chunk.column(column), kind, "").to_pylist()
    ]


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_has_the_ids_that_were_written(ending, tmp_path):
    path = tmp_path / f"rows.{ending}"
    WRITERS[ending]([{"user": "u", "item": one, "click": 1} for one in NASTY], path)
    assert read_ids(path) == NASTY
    # Each beside an integer; 7.0 is how pandas writes one.
    for one in set(NASTY) - {"7.0"}:
        WRITERS[ending]([{"item": one, "click": 1}, {"item": "5", "click": 0}], path)
        assert [str(id_) for id_ in read_ids(path)] == [one, "5"]


texts = st.one_of(
    st.sampled_from(NASTY),
    st.from_regex(r"[-+ 0]{0,2}[0-9]{1,3}(\.[0-9]{1,2})?(e[0-9])?", fullmatch=True),
    st.text(
        st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="\u2028\u2029\x85"), min_size=1, max_size=4
    ),
)


@example(files=[["7", "8"], ["007"]])
@example(files=[["7.0"], ["7"]])
@example(files=[["true", "True"], ["1"]])
@given(files=st.lists(st.lists(texts, min_size=1, max_size=6), min_size=1, max_size=3))
@pytest.mark.parametrize("ending", WRITERS)
def test_what_is_written_differently_stays_apart(ending, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for number, ids in enumerate(files):
        WRITERS[ending]([{"item": one, "click": 1} for one in ids], folder / f"{number}.{ending}")
    written = [one for ids in files for one in ids]
    found = [str(one) for one in read_ids(folder)]
    # A column of integers, some of which pandas wrote as floats, has these integers.
    are_floats = ending != "parquet" and all(is_written_as_integer(one.removesuffix(".0")) for one in written)
    assert found == ([one.removesuffix(".0") for one in written] if are_floats and found != written else written)


@pytest.mark.parametrize(
    ("ids", "type_"),
    [
        (["7", "-7", "0", None], pa.int64()),
        ([str(2**63 - 1), str(-(2**63))], pa.int64()),
        ([str(2**63)], pa.string()),
        (["7", "07"], pa.string()),
        (["7", "8.0"], pa.float64()),
        (["7", "8.5"], pa.string()),
        (["7.0", "1e+16"], pa.float64()),
        (["1e3"], pa.string()),
        (["1e+05"], pa.string()),
        (["-0"], pa.string()),
        (["-0.0"], pa.string()),
        ([None], pa.null()),
    ],
)
def test_types_of_written_ids(ids, type_):
    for parts in ([ids], [[one] for one in ids]):
        written = WrittenIds()
        for part in parts:
            written.add(pa.array(part, pa.string()))
        assert written.type == type_


@given(st.one_of(texts, st.integers(-(2**70), 2**70).map(str)))
def test_one_text_is_written_as_an_integer_as_a_column_is(text):
    assert is_written_as_integer(text) == are_written_as_integers(pa.array([text]))
    if is_written_as_integer(text):
        assert number_of(text) == int(text)


@pytest.mark.parametrize("text", NASTY)
def test_the_number_of_a_text_is_what_a_reader_of_numbers_takes_it_for(text):
    (value,) = pa.csv.read_csv(pa.py_buffer(f'a\n"{text}"\n'.encode())).column(0).to_pylist()
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2**63)
    if value is not None:
        assert number_of(text) == (int(value) if is_whole else None)


def test_integers_that_pandas_writes_as_floats_are_integers(tmp_path):
    frame = pd.DataFrame({"item": [17, None, 5], "click": [0, 1, 0]})
    frame.to_csv(tmp_path / "0.csv", index=False)
    pd.DataFrame({"item": [17, 6], "click": [0, 1]}).to_csv(tmp_path / "1.csv", index=False)
    assert read_ids(tmp_path) == [17, None, 5, 17, 6]
    pd.DataFrame({"item": [2.0**60, None], "click": [0, 1]}).to_csv(tmp_path / "2.csv", index=False)
    with pytest.raises(DataError, match="has the id 1152921504606846976 in a column of double"):
        read_ids(tmp_path)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_column_of_text_in_one_file_is_text_in_all_and_told(ending, tmp_path, dataset_spec, job_spec):
    """Half of the articles of one day are 000DIV; those of the next are integers alone."""
    (tmp_path / "days").mkdir()
    for day, items in enumerate((["000DIV", "0108775000", "5"], [5, 108775000, 5])):
        rows = [{"user": f"u{n % 4}", "item": items[n % 3], "click": n % 2} for n in range(60)]
        WRITERS[ending](rows, tmp_path / "days" / f"{day}.{ending}")
    said: list[str] = []
    data = prepare(dataset_spec(tmp_path / "days"), job_spec(), tmp_path / "data", log=said.append)
    assert data.vocabulary("item").to_pylist() == ["000DIV", "0108775000", "108775000", "5"]
    assert any("column 'item': has text and integers, which are read as text" in line for line in said)


def test_integers_and_text_in_blocks_of_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 60)
    ids = [7, 8, 9, "07", "2014-01-07", "x", 7, 10, 11]
    lines = [json.dumps({"a": {"item": one}, "click": 1}) + "\n" for one in ids]
    # Arrow reads no block with both: empty lines fill one.
    (tmp_path / "rows.jsonl").write_text(("\n" * 70).join("".join(lines[start : start + 3]) for start in (0, 3, 6)))
    assert read_ids(tmp_path / "rows.jsonl", "a.item") == [str(one) for one in ids]
    monkeypatch.setattr(csv_reader, "_BLOCK_BYTES", 20)
    write_csv([{"item": one, "click": 1} for one in ids], tmp_path / "rows.csv")
    assert read_ids(tmp_path / "rows.csv") == [str(one) for one in ids]


def test_booleans_are_no_text_beside_text(tmp_path):
    for number, one in enumerate((True, "true")):
        write_json([{"item": one}], tmp_path / f"{number}.jsonl")
    with pytest.raises(DataError, match="column 'item' is bool in one row and string in another"):
        read_ids(tmp_path)


def test_lists_of_days_are_text(tmp_path):
    write_json([{"item": ["2014-01-07", "2014-01-08"]}, {"item": []}], tmp_path / "rows.jsonl")
    source = Source(str(tmp_path / "rows.jsonl"), ids=["item"])
    (chunk,) = source.stream(["item"])
    assert chunk.column("item").to_pylist() == [["2014-01-07", "2014-01-08"], []]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["007", "7"], ["007", "7"]),
        (["007"], ["007"]),
        (["7", "10"], [10, 7]),
        (["7", "__HIVE_DEFAULT_PARTITION__"], [7, None]),
    ],
)
def test_folders_of_ids(folders, expected, tmp_path):
    for one in folders:
        (tmp_path / f"store={one}").mkdir()
        pq.write_table(pa.table({"click": [1]}), tmp_path / f"store={one}" / "rows.parquet")
    assert read_ids(tmp_path, "store") == expected


def test_other_columns_have_the_types_that_their_values_show(tmp_path):
    write_csv([{"item": "2014-01-07", "day": "2014-01-07", "price": "01.50", "click": "01"}], tmp_path / "rows.csv")
    source = Source(str(tmp_path / "rows.csv"), ids=["item"])
    source.require(["item", "day", "price", "click"])
    assert [str(source.column_type(one)) for one in ("item", "day", "price", "click")] == [
        "string", "date32[day]", "double", "int64"
    ]  # fmt: skip


# --- one dataset in every format -------------------------------------------------------------------------------------


def nasty_rows(num_rows: int = 400) -> list[dict]:
    """Rows with an id, a key of a join, and an order; each id occurs often."""
    order = np.random.default_rng(0).permutation(num_rows)
    return [
        {"user": f"{n % 7:02d}", "item": NASTY[n % len(NASTY)], "click": n % 2, "ts": int(order[n])}
        for n in range(num_rows)
    ]


FEATURES = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "brand": {"type": "id", "join": {"uri": "", "on": "item", "column": "brand"}},
    "past": {
        "type": "id_list",
        "derive": {"previous": "item", "by": "user", "order": "ts", "length": 3},
        "shares": "item",
    },
}


def described(dataset_spec, path: Path, joined: Path):
    brand = {"type": "id", "join": {"uri": str(joined), "on": "item", "column": "brand"}}
    return dataset_spec(path, features=FEATURES | {"brand": brand}, order="ts")


@pytest.mark.parametrize("ending", [one for one in WRITERS if one != "parquet"])
def test_what_is_prepared_is_the_same_from_every_format(ending, dataset_spec, job_spec, tmp_path):
    brands = [{"item": one, "brand": f"0{number % 5}"} for number, one in enumerate(NASTY)]
    job, prepared = job_spec(model={"kind": "dcnv2"}), {}
    for one, joined in (("parquet", ending), (ending, "parquet")):
        WRITERS[joined](brands, tmp_path / f"brands.{joined}")
        WRITERS[one](nasty_rows(), tmp_path / f"rows.{one}")
        dataset = described(dataset_spec, tmp_path / f"rows.{one}", tmp_path / f"brands.{joined}")
        prepared[one] = prepare(dataset, job, tmp_path / f"data-{one}")
    expected, data = prepared["parquet"], prepared[ending]
    assert len(data.vocabulary("item")) == len(NASTY)
    assert data.vocabulary("user").to_pylist() == [f"{n:02d}" for n in range(7)]
    assert data.vocabulary("brand").to_pylist() == [f"{n:02d}" for n in range(5)]
    for table in data.tables:
        assert data.vocabulary(table).equals(expected.vocabulary(table))
    files = sorted(path.relative_to(expected.directory) for path in expected.directory.rglob("*.bin"))
    assert [(data.directory / one).read_bytes() for one in files] == [
        (expected.directory / one).read_bytes() for one in files
    ]


# --- keys of joins, and the tables that several columns have ---------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "keys", "positions"),
    [
        (pa.array(["0108775000", "7"]), ["0108775000", "108775000", "7"], [0, -1, 1]),
        (pa.array([108775000, 7]), ["0108775000", "108775000", "7", "07", "x", None], [-1, 0, 1, -1, -1, -1]),
        (pa.array(["0108775000", "7"]), [108775000, 7, None], [-1, 1, -1]),
        (pa.array([108775000, 7]), [108775000.0, 7.0], [0, 1]),
    ],
)
def test_keys_of_text_and_integers_match_as_they_are_written(on, keys, positions, tmp_path):
    pq.write_table(pa.table({"item": on, "brand": ["a", "b"]}), tmp_path / "brands.parquet")
    join = JoinTable(Join(uri="brands.parquet", on="item", column="brand"), str(tmp_path / "brands.parquet"))
    assert join.positions(pa.array(keys), "rows").tolist() == positions


def test_an_item_table_with_text_makes_the_items_of_the_rows_text(dataset_spec, job_spec, tmp_path):
    write_csv([{"item": one, "price": n / 2} for n, one in enumerate(("7", "007", "8"))], tmp_path / "items.csv")
    items = {"uri": "items.csv", "features": {"price": {"type": "dense"}}}
    rows = [{"user": n % 5, "item": 7 + n % 2, "click": n % 2} for n in range(100)]
    write_csv(rows, tmp_path / "rows.csv")
    said: list[str] = []
    dataset = dataset_spec(tmp_path / "rows.csv", items=items)
    job = job_spec(model={"kind": "two_tower", "embedding_dim": 4, "hidden": [8]})
    data = prepare(dataset, job, tmp_path / "data", log=said.append)
    assert data.vocabulary("item").to_pylist() == ["7", "8"]
    assert data.catalogue is not None
    assert data.catalogue.ids.to_pylist() == ["7", "007", "8"]
    assert "ids of item are text, since one of its columns has values that are no integers" in said


def test_a_column_of_text_makes_the_table_that_it_shares_text(dataset_spec, job_spec, tmp_path):
    rows = [{"item": n % 3, "last": f"{n % 4:02d}", "click": n % 2} for n in range(100)]
    features = {"item": {"type": "id"}, "last": {"type": "id", "shares": "item"}}
    write_csv(rows, tmp_path / "rows.csv")
    data = prepare(dataset_spec(tmp_path / "rows.csv", features=features), job_spec(), tmp_path / "data")
    assert data.vocabulary("item").to_pylist() == ["0", "00", "01", "02", "03", "1", "2"]
    pq.write_table(table_of(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="column 'last': has an id that is no 64-bit integer in its usual form: '00'"):
        prepare(dataset_spec(tmp_path / "rows.parquet", features=features), job_spec(), tmp_path / "data")


# --- warm starts, and what was prepared before -----------------------------------------------------------------------


def rows_with(tmp_path: Path, *items: object) -> Path:
    write_csv([{"item": items[n % len(items)], "click": n // 2 % 2} for n in range(120)], tmp_path / "rows.csv")
    return tmp_path / "rows.csv"


def refreshed(dataset_spec, job_spec, tmp_path, parent, *items):
    dataset = dataset_spec(rows_with(tmp_path, *items), features={"item": {"type": "id"}})
    said: list[str] = []
    base = {"item": IdMap(parent, np.ones(len(parent), np.int32), 1)}
    return prepare(dataset, job_spec(), tmp_path / "data", base_vocabulary=base, log=said.append), said


def test_a_warm_start_of_text_takes_integers_as_text(dataset_spec, job_spec, tmp_path):
    data, said = refreshed(dataset_spec, job_spec, tmp_path, pa.array(["000DIV", "7"], pa.large_string()), "7", "9")
    assert data.vocabulary("item").to_pylist() == ["000DIV", "7", "9"]
    assert data.parent_rows("item").tolist() == [0, 1, 2, 3, -1]
    assert "ids of item: integers are read as text, like those of the job in init_from" in said


def test_a_warm_start_of_integers_goes_on_with_text(dataset_spec, job_spec, tmp_path):
    data, said = refreshed(dataset_spec, job_spec, tmp_path, pa.array([7, 8]), "7", "9", "000DIV", "0108775000")
    assert data.vocabulary("item").to_pylist() == ["7", "8", "000DIV", "0108775000", "9"]
    assert data.parent_rows("item").tolist() == [0, 1, 2, 3, -1, -1, -1]
    assert "ids of item: integers of the job in init_from are text in the rows, and are read as text" in said


@pytest.mark.parametrize(
    ("text", "number"), [("0108775000", 108775000), ("7.0", 7), ("1e3", 1000), ("true", 1), (" 7", 7)]
)
def test_a_warm_start_whose_integers_may_be_several_of_the_ids_is_refused(
    text, number, dataset_spec, job_spec, tmp_path
):
    says = rf"table 'item': 1 ids are text that the warm start has as integers, such as '{text}' as {number}.*init_from"
    with pytest.raises(DataError, match=says):
        refreshed(dataset_spec, job_spec, tmp_path, pa.array([number]), text, "000DIV")


def test_a_warm_start_of_integers_none_of_which_can_be_in_the_text_is_refused(dataset_spec, job_spec, tmp_path):
    with pytest.raises(DataError, match="table 'item': the warm start's ids are int64, this data's are large_string"):
        refreshed(dataset_spec, job_spec, tmp_path, pa.array([7]), "i7", "i8")


def test_prepared_data_are_taken_for_others_where_ids_are_told_apart_by_how_they_are_written(
    dataset_spec, job_spec, tmp_path
):
    def marks(*items):
        return make_plan(dataset_spec(rows_with(tmp_path, *items), features={"item": {}}), job_spec()).ids_as_written

    assert marks("7", "8") == marks("a", "07") == marks("2014-01-07", "x") == marks("7.0", "8") == []
    plan = make_plan(dataset_spec(rows_with(tmp_path, "07", "8"), features={"item": {}}), job_spec())
    assert plan.ids_as_written == ["0 item"]
    base = WarmStart({}, None, None)
    found = fingerprint_of(plan, base, [])
    plan.source.reader.number_like.clear()
    assert fingerprint_of(plan, base, []) != found


# --- proposals -------------------------------------------------------------------------------------------------------


def test_a_proposal_says_what_is_text(tmp_path):
    rows = [
        {
            "user": f"u{n % 7}",
            "sku": f"{n % 5:05d}",
            "count": n % 6,
            "released": f"2014-01-{n % 9 + 1:02d}",
            "click": n % 2,
        }
        for n in range(50)
    ]
    write_csv(rows, tmp_path / "rows.csv")
    proposal = propose(tmp_path / "rows.csv")
    assert set(proposal.document["features"]) == {"user", "item", "count"}
    assert proposal.notes == (
        "'item' is text: not every value is written as an integer is, such as '00000'",
        "left out: 'released', which holds times; to use each text as a category: released: {type: id}",
    )
    proposal.document["features"]["released"] = {"type": "id"}
