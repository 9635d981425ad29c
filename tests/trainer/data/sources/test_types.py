"""Columns of one dataset whose files were written by many hands: what reads, and what is said where it does not."""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns import values
from trainer.data.columns.orders import as_order, order_in
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.figures import profile
from trainer.data.sources.infer import as_yaml, infer, propose
from trainer.data.sources.readers.parquet import ParquetReader
from trainer.data.sources.source import Source, Window
from trainer.data.sources.types import common_type, fields_of, plain_type

BASE = {"user": [1, 2, 3] * 3, "item": [4, 5, 6] * 3, "click": [0, 1, 0] * 3}
DICTIONARY = pa.dictionary(pa.int32(), pa.string())


def folder_of(tmp_path, *items):
    """A folder with a Parquet file for each of these columns ``item``."""
    for number, item in enumerate(items):
        pq.write_table(pa.table({**BASE, "item": item}), tmp_path / f"{number}.parquet")
    return tmp_path


def described(dataset_spec, path):
    return dataset_spec(path, features={"user": {}, "item": {}})


def items_of(source):
    kind = values.id_kind(source.column_type("item"), "")
    return [one for chunk in source.stream(["item"]) for one in values.as_ids(chunk.column("item"), kind, "")]


@pytest.mark.parametrize(
    "parts",
    [
        [pa.array(["a", "b", "c"] * 3).cast(DICTIONARY)],
        [pa.array(["a", "b", "c"] * 3).cast(DICTIONARY), pa.array(["d", "b", "c"] * 3).cast(DICTIONARY)],
        [pa.array(["a", "b", "c"] * 3).cast(DICTIONARY), pa.array(["d", "b", "c"] * 3)],
        [pa.array(["a", "b", "c"] * 3, pa.string_view())],
        [pa.array(["a", "b", "c"] * 3, pa.large_string()), pa.array(["d", "b", "c"] * 3)],
        [pa.array([4, 5, 6] * 3), pa.array([4, 5, 7] * 3, pa.int32())],
        [pa.array([4, 5, 6] * 3), pa.array([4.0, None, 7.0] * 3)],
        [pa.nulls(9), pa.array([4, 5, 6] * 3)],
        [pa.array([2**62 + 5, 5, 6] * 3)],
    ],
    ids=lambda parts: " and ".join(str(part.type) for part in parts),
)
def test_types_that_mean_the_same_read(parts, dataset_spec, job_spec, tmp_path):
    folder = folder_of(tmp_path, *parts)
    expected = [one for part in parts for one in part.to_pylist()]
    source = Source(str(folder))
    source.require(["item"])
    assert [one.as_py() for one in items_of(source)] == expected
    assert infer(folder)["features"]["item"] == {"type": "id"}
    spec = described(dataset_spec, folder)
    distinct = {one for one in expected if one is not None}
    assert profile(spec)["features"]["item"] == {
        "column": "item", "nulls": expected.count(None), "distinct": len(distinct)
    }  # fmt: skip
    data = prepare(spec, job_spec(), tmp_path / "data")
    assert data.num_rows_read == len(expected)
    assert 0 < len(data.vocabulary("item")) == len(distinct & set(data.vocabulary("item").to_pylist()))


@pytest.mark.parametrize(
    "second",
    [
        pa.array(["4", "5", "6"] * 3),
        pa.array([[4], [5], []] * 3),
        pa.array([1, 2, 3] * 3).cast(pa.timestamp("us")),
        pa.array([b"4", b"5", b"6"] * 3),
    ],
    ids=lambda second: str(second.type),
)
def test_types_that_are_not_one_another_are_told_by_file_and_column(second, tmp_path):
    folder = folder_of(tmp_path, BASE["item"], second)
    proposal = propose(folder)
    assert set(proposal.document["features"]) == {"user"}
    (note,) = proposal.notes
    written = str(second.type).replace("item:", "element:")
    assert f"1.parquet, column 'item': is {written} here and int64 in {folder}/0.parquet (write the column" in note
    assert f"# {note}" in as_yaml(proposal.document, proposal.notes).splitlines()
    assert list(Source(str(folder)).stream(["user"]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array(BASE["item"]), pa.array([1, 2, 3] * 3).cast(pa.timestamp("us"))),
        (pa.array([1, 2, 3] * 3).cast(pa.timestamp("us")), pa.array([1, 2, 3] * 3).cast(pa.timestamp("us", "UTC"))),
        (pa.array(BASE["item"]), pa.array([b"4", b"5", b"6"] * 3)),
    ],
    ids=str,
)
def test_types_that_cannot_be_read_as_one_are_refused(first, second, dataset_spec, tmp_path):
    folder = folder_of(tmp_path, first, second)
    says = "1.parquet, column 'item': is .* here and .* in .*0.parquet .write the column with one type in every file"
    with pytest.raises(DataError, match=says):
        Source(str(folder)).require(["item"])
    with pytest.raises(DataError, match=says):
        profile(described(dataset_spec, folder))


def runs_of(array):
    """The values as runs of one."""
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(array) + 1), pa.int32()), array)


@pytest.mark.parametrize(
    "written",
    [
        lambda array: array.dictionary_encode(),
        runs_of,
        lambda array: array.cast(pa.string_view()) if pa.types.is_string(array.type) else array,
    ],
    ids=["dictionary", "runs", "view"],
)
def test_how_values_are_written_changes_nothing(written, dataset_spec, tmp_path):
    columns = {
        "user": pa.array([1, 2, 3] * 3),
        "item": pa.array(["a", "b", None] * 3),
        "day": pa.array(["2026-01-01", "2026-01-02", "2026-01-03"] * 3),
        "ts": pa.array(range(9)).cast(pa.timestamp("us")),
        "click": pa.array([0, 1, 0] * 3),
        "hours": pa.array([1.0, float("nan"), 2.0] * 3),
    }
    labels = {"click": {"column": "click"}, "hours": {"value": "hours"}}
    found = {}
    for name, table in (
        ("plain", pa.table(columns)),
        ("written", pa.table({key: written(column) for key, column in columns.items()})),
    ):
        path = tmp_path / f"{name}.arrow"
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
        spec = dataset_spec(path, label=None, labels=labels, timestamp="ts", filter="item == 'a' or click == 1")
        window = Window("day", datetime.date(2026, 1, 1), datetime.date(2026, 1, 2))
        rows = [chunk.batch for chunk in Source(str(path), window, spec.filter).stream(list(columns))]
        found[name] = profile(spec) | {"bytes": 0}, pa.Table.from_batches(rows)["ts"].to_pylist()
    assert found["written"] == found["plain"]
    assert found["plain"][0]["labels"]["hours"]["rows"] == 3


@pytest.mark.parametrize("reverse", [False, True])
def test_ids_of_text_in_one_file_are_text_in_all(reverse, dataset_spec, tmp_path):
    items = [pa.array(BASE["item"]), pa.array(["4", "07", "x"] * 3)]
    folder = folder_of(tmp_path, *(items[::-1] if reverse else items))
    source = Source(str(folder), ids=["item"])
    source.require(["item"])
    assert {one.as_py() for one in items_of(source)} == {"4", "5", "6", "07", "x"}
    assert source.reader.notes == ["column 'item': has text and integers, which are read as text"]
    assert profile(described(dataset_spec, folder))["features"]["item"]["distinct"] == 5


def test_times_are_no_ids_beside_text(dataset_spec, tmp_path):
    folder = folder_of(tmp_path, pa.array(["4", "7", "6"] * 3), pa.array([1, 2, 3] * 3).cast(pa.timestamp("us")))
    with pytest.raises(
        DataError, match=r"1\.parquet, column 'item': holds timestamp\[us\]: ids are integers or strings"
    ):
        profile(described(dataset_spec, folder))


def test_a_column_that_a_file_lacks(dataset_spec, tmp_path):
    folder = folder_of(tmp_path, BASE["item"])
    pq.write_table(pa.table({key: BASE[key] for key in ("user", "click")}), folder / "1.parquet")
    says = r"1.parquet: no column 'item', which .*0.parquet has \(there are click, user\)"
    with pytest.raises(DataError, match=says):
        profile(described(dataset_spec, folder))
    proposal = propose(folder)
    assert set(proposal.document["features"]) == {"user"}
    assert "no column 'item', which" in proposal.notes[0]


@pytest.mark.parametrize("ending", ["parquet", "feather", "csv"])
def test_a_column_twice(ending, dataset_spec, tmp_path):
    path = tmp_path / f"rows.{ending}"
    arrays = [pa.array(column) for column in (*BASE.values(), BASE["item"])]
    table = pa.Table.from_arrays(arrays, names=[*BASE, "item"])
    if ending == "csv":
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        path.write_text("\n".join(["user,item,click,item", *(",".join(map(str, row)) for row in rows)]))
    else:
        (pq.write_table if ending == "parquet" else pa.feather.write_feather)(table, path)
    with pytest.raises(DataError, match=r"column 'item': the file has two columns of this name .*rename one"):
        profile(described(dataset_spec, path))
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user"}
    assert "two columns of this name" in proposal.notes[0]


def test_integers_of_more_than_63_bits(dataset_spec, tmp_path):
    path = folder_of(tmp_path, pa.array([2**63 + 4, 5, 6] * 3, pa.uint64()))
    with pytest.raises(DataError, match=r"column 'item': .*9223372036854775812 .*write the column as text"):
        profile(described(dataset_spec, path))
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user"}
    assert "column 'item': integers of 2^63 and more (write it as text" in proposal.notes[0]
    folder_of(tmp_path, pa.array([2**63 - 1, 5, 6] * 3, pa.uint64()))
    assert profile(described(dataset_spec, path))["features"]["item"]["distinct"] == 3
    assert propose(path).notes == ()


@pytest.mark.parametrize(
    "item",
    [pa.array([2.0**53, None, 5.0] * 3), pa.array([2**24, 4, None] * 3, pa.int32()).cast(pa.float32())],
    ids=["float64", "float32"],
)
def test_floats_that_may_each_be_several_ids_are_told(item, dataset_spec, tmp_path):
    path = folder_of(tmp_path, item)
    with pytest.raises(DataError, match=r"column 'item': has the id \d+ in a column of .*write the column as integers"):
        profile(described(dataset_spec, path))
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user"}
    assert "column 'item': integers as floats, too large to be exact" in proposal.notes[0]
    folder_of(tmp_path, pa.array([2.0**53 - 1, None, 5.0] * 3))
    assert profile(described(dataset_spec, path))["features"]["item"]["distinct"] == 2
    assert propose(path).notes == ()


def test_integers_of_text_that_are_no_int64(dataset_spec, tmp_path):
    """CSV has them as they are written, JSON Lines as floats."""
    numbers = {number: 2**64 - 2**40 * number for number in (1, 2, 3)}
    path = tmp_path / "rows.csv"
    path.write_text("user,item,click\n" + "".join(f"{one},{item},{one % 2}\n" for one, item in numbers.items()))
    assert profile(described(dataset_spec, path))["features"]["item"]["distinct"] == 3
    assert "item" in propose(path).document["features"]
    path = tmp_path / "rows.jsonl"
    lines = (json.dumps({"user": one, "item": item, "click": one % 2}) for one, item in numbers.items())
    path.write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"column 'item': has an id that is no 64-bit integer: .*write the column as text"
    ):
        profile(described(dataset_spec, path))
    assert "column 'item': integers as floats" in propose(path).notes[0]


def test_decimals_without_a_fraction_are_ids(dataset_spec, tmp_path):
    items = pa.array([4, None, 2**62] * 3)
    path = folder_of(tmp_path, items.cast(pa.decimal128(38, 0)), pa.array([4, 5, 6] * 3).cast(pa.decimal128(20, 0)))
    assert profile(described(dataset_spec, path))["features"]["item"]["distinct"] == 4
    assert propose(path).document["features"] == {"user": {"type": "id"}, "item": {"type": "id"}}
    folder_of(tmp_path, *(pa.array([4, 5, 6] * 3).cast(pa.decimal128(38, scale)) for scale in (1, 2)))
    assert "left out: 'item', whose numbers are no ids" in propose(path).notes[0]
    with pytest.raises(DataError, match=r"column 'item': holds decimal.*: ids are integers or strings"):
        profile(described(dataset_spec, path))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("write", "micros"),
    [
        ("2026-01-01T00:00:{:02d}Z", 0),
        ("2026-01-01T02:00:{:02d}+02:00", 0),
        ("2026-01-01T00:00:{:02d}.250Z", 250_000),
        ("2026-01-01 00:00:{:02d}.250001", 250_001),
        ("2026-01-01T00:00:{:02d}.250001999Z", 250_001),
    ],
)
def test_times_of_text_order_rows(write, micros, ending, dataset_spec, tmp_path):
    times, path = [write.format(second) for second in range(9)], tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({**BASE, "ts": times}), path)
    else:
        rows = [dict(zip((*BASE, "ts"), row, strict=True)) for row in zip(*BASE.values(), times, strict=True)]
        lines = [json.dumps(row) if ending == "jsonl" else ",".join(map(str, row.values())) for row in rows]
        path.write_text("\n".join([*(["user,item,click,ts"] if ending == "csv" else []), *lines]) + "\n")
    assert propose(path).document["timestamp"] == "ts"
    (chunk,) = Source(str(path)).stream(["ts"])
    begin = 1_767_225_600_000_000 + micros
    assert as_order(chunk, "ts", order_in(chunk.column("ts"))).tolist() == [
        begin + 1_000_000 * second for second in range(9)
    ]


def test_text_that_is_no_time_orders_nothing(tmp_path):
    path = folder_of(tmp_path, BASE["item"])
    several = ["2026-01-01T00:00:00Z", "2026-01-01T00:00:01", "2026-01-01T00:00:02"] * 3
    for times, what in ((["01/02/2026"] * 9, "not a number or time, as the order"), (several, "no time with a zone")):
        pq.write_table(pa.table({**BASE, "ts": times}), path / "0.parquet")
        assert "timestamp" not in propose(path).document
        (chunk,) = Source(str(path)).stream(["ts"])
        with pytest.raises(DataError, match=f"column 'ts', row [01]: '.*' is {what}"):
            as_order(chunk, "ts", order_in(chunk.column("ts")), "order")


def test_a_column_without_a_name_is_no_feature(tmp_path):
    path = folder_of(tmp_path, BASE["item"])
    pq.write_table(pa.table({**BASE, "": BASE["item"]}), path / "0.parquet")
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user", "item"}
    assert "a column has no name" in proposal.notes[0]


@pytest.mark.parametrize(
    "item",
    [
        pa.array([b"a", b"b", b"c"] * 3),
        pa.array([[("a", 1)]] * 9, pa.map_(pa.string(), pa.int64())),
        pa.array([[{"a": 1}], [], None] * 3),
        pa.array([[[1]], [[2]], []] * 3),
    ],
    ids=lambda item: str(item.type),
)
def test_types_that_no_feature_reads_are_not_proposed(item, dataset_spec, tmp_path):
    path = folder_of(tmp_path, item)
    with pytest.raises(DataError, match="ids are integers or strings"):
        profile(described(dataset_spec, path))
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user"}
    assert "column 'item': holds" in proposal.notes[0]


NESTED = [{"id": 4, "tags": ["x"], "shop": {"city": "a.b"}}, None, {"id": None, "tags": [], "shop": None}] * 3
FIELDS = {
    "user": {},
    "item": {"column": "item.id"},
    "tags": {"type": "id_list", "column": "item.tags"},
    "city": {"column": "item.shop.city"},
}


def write_nested(table, path):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=4)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=4)
    elif path.suffix == ".orc":
        pa.orc.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.feather", "rows.orc", "rows.jsonl"])
def test_fields_of_structs_are_columns(name, dataset_spec, job_spec, tmp_path):
    path = tmp_path / name
    write_nested(pa.table({**BASE, "item": pa.array(NESTED)}), path)
    source = Source(str(path))
    assert sorted(source.column_names()) == ["click", "item.id", "item.shop.city", "item.tags", "user"]
    columns = ["item.shop.city", "user", "item.id", "item.tags"]
    batches = [chunk.batch for chunk in source.stream(columns, 4, start=(0, 3))]
    read = pa.Table.from_batches(batches).to_pydict()
    assert read == {
        "item.shop.city": ["a.b", None, None] * 2,
        "user": [1, 2, 3] * 2,
        "item.id": [4, None, None] * 2,
        "item.tags": [["x"], None, []] * 2,
    }
    spec = dataset_spec(path, features=FIELDS)
    assert profile(spec)["features"]["city"] == {"column": "item.shop.city", "nulls": 6, "distinct": 1}
    assert prepare(spec, job_spec(), tmp_path / "data").vocabulary("city").to_pylist() == ["a.b"]
    assert infer(path)["features"]["item_tags"] == {"type": "id_list", "column": "item.tags"}
    with pytest.raises(DataError, match=r"no column 'item' \(there are click, item.id, item.shop.city"):
        source.require(["item"])


def test_fields_of_structs_are_told_by_name_where_a_file_lacks_them(tmp_path):
    folder_of(tmp_path, pa.array([{"id": 1, "at": 2}] * 9), pa.array([{"id": 1}] * 9))
    Source(str(tmp_path)).require(["item.id"])
    with pytest.raises(DataError, match=r"1\.parquet: no column 'item\.at', which .*0.parquet has"):
        Source(str(tmp_path)).require(["item.at"])


def test_a_column_whose_name_has_a_dot_is_not_a_field(tmp_path):
    pq.write_table(pa.table({"a.b": [1], "a": [{"c": 2}]}), tmp_path / "rows.parquet")
    (chunk,) = Source(str(tmp_path / "rows.parquet")).stream(["a.b", "a.c"])
    assert chunk.batch.to_pydict() == {"a.b": [1], "a.c": [2]}
    pq.write_table(pa.table({"a.b": [1], "a": [{"b": 2}]}), tmp_path / "both.parquet")
    with pytest.raises(DataError, match=r"column 'a\.b': the file has two columns of this name"):
        Source(str(tmp_path / "both.parquet")).require(["a.b"])


def test_fields_of_lines_are_found_over_all_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"item": {"id": 1, "at": null}}\n')
    (tmp_path / "b.jsonl").write_text('{"item": {"id": 2.5, "at": "x", "more": 1}}\n')
    (tmp_path / "c.jsonl").write_text('{"item": {"id": 3, "at": null}}\n')
    source = Source(str(tmp_path))
    source.require(["item.id", "item.at"])
    assert [source.column_type(name) for name in ("item.id", "item.at")] == [pa.float64(), pa.string()]
    rows = [row for chunk in source.stream(["item.at", "item.id"]) for row in chunk.batch.to_pylist()]
    assert rows == [
        {"item.at": None, "item.id": 1.0},
        {"item.at": "x", "item.id": 2.5},
        {"item.at": None, "item.id": 3.0},
    ]


@pytest.mark.process
@pytest.mark.slow
def test_too_little_memory_is_not_blamed_on_the_file(tmp_path):
    """A row group of 400 MB of one byte each, in a process that may have so much at all."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"item": pa.array(["x" * 100_000_000] * 4)}), path)
    code = f"""if True:
        import resource, sys
        import pyarrow
        from trainer.data.errors import DataMemoryError
        from trainer.data.sources.source import Source, Window
        source = Source({str(path)!r})
        source.require(["item"])
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 300_000_000, resource.RLIM_INFINITY))
        try:
            list(source.stream(["item"]))
        except DataMemoryError as error:
            print(error.code, error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"out_of_memory {path}: there is not enough memory to read it as Parquet: ")
    assert "give the process more memory" in done.stdout
    assert "truncated" not in done.stdout


def test_what_the_system_says_of_memory_is_not_blamed_on_the_file_either(tmp_path):
    reader = ParquetReader([tmp_path])
    with pytest.raises(DataError, match="not enough memory to read it as Parquet"), reader.reading(tmp_path):
        raise OSError(12, "Cannot allocate memory")
    with pytest.raises(DataError, match="may be truncated"), reader.reading(tmp_path):
        raise OSError(5, "Input/output error")


TYPES = st.sampled_from(
    [
        pa.null(), pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64(),
        pa.string(), pa.large_string(), pa.string_view(), DICTIONARY, pa.date32(), pa.date64(), pa.timestamp("s"),
        pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.decimal128(20, 0), pa.binary(),
        pa.time32("s"),
    ]
)  # fmt: skip
TYPES_OR_LISTS = TYPES | TYPES.map(pa.list_) | TYPES.map(pa.large_list)


@given(st.lists(TYPES_OR_LISTS, min_size=2, max_size=4))
def test_a_common_type_is_that_of_any_order(types):
    found = set()
    for order in itertools.permutations(types):
        common = order[0]
        for one in order[1:]:
            common = None if common is None else common_type(common, one)
        found.add(None if common is None else plain_type(common))
    # Offsets of 32 or of 64 bits are the same to who reads.
    assert len({str(one).replace("large_", "") for one in found}) == 1


@given(TYPES_OR_LISTS, TYPES_OR_LISTS)
def test_a_common_type_takes_what_both_hold(left, right):
    common = common_type(left, right)
    for type_ in (left, right):
        if common is not None and not pa.types.is_null(common):
            assert pc.cast(pa.nulls(2, plain_type(type_)), plain_type(common)).null_count == 2
        assert common_type(type_, pa.null()) in (type_, plain_type(type_))


def test_numbers_keep_their_values():
    for type_ in (pa.int8(), pa.uint8(), pa.int32(), pa.float32()):
        for other in (pa.int64(), pa.float64()):
            numbers = np.array([0, 1, 100])
            common = common_type(type_, other)
            assert pa.array(numbers, type_).cast(common).to_pylist() == numbers.tolist()


def test_fields_keep_their_order():
    schema = pa.schema(
        [("a", pa.struct([("b", pa.int8()), ("c", pa.struct([("d", pa.string())]))])), ("e", pa.int64())]
    )
    assert list(fields_of(schema)) == [
        (("a", "b"), pa.int8()),
        (("a", "c", "d"), pa.string()),
        (("e",), pa.int64()),
    ]


DAY = [datetime.date(2026, 1, 3)] * 9
TIME = [datetime.datetime(2026, 1, 2, 3)] * 9
TEXT = ["2026-01-01T00:00:00.5"] * 9


@pytest.mark.parametrize(
    ("parts", "low", "high"),
    [
        ([DAY, TIME], "2026-01-02T03:00:00", "2026-01-03T00:00:00"),
        ([TIME, DAY], "2026-01-02T03:00:00", "2026-01-03T00:00:00"),
        ([TEXT, TIME], "2026-01-01T00:00:00.500000", "2026-01-02T03:00:00"),
        ([TIME, TEXT], "2026-01-01T00:00:00.500000", "2026-01-02T03:00:00"),
        ([TEXT, TEXT], "2026-01-01T00:00:00.500000", "2026-01-01T00:00:00.500000"),
        ([DAY, DAY], "2026-01-03", "2026-01-03"),
        ([[5] * 9, [1.5] * 9], 1.5, 5),
        ([[1, 2, 3] * 3, pa.nulls(9)], 1, 3),
        ([pa.nulls(9), TIME], "2026-01-02T03:00:00", "2026-01-02T03:00:00"),
    ],
)
def test_the_range_of_an_order_of_many_types(parts, low, high, dataset_spec, tmp_path):
    for number, part in enumerate(parts):
        pq.write_table(pa.table({**BASE, "ts": part}), tmp_path / f"{number}.parquet")
    spec = dataset_spec(tmp_path, features={"user": {}, "item": {}}, order="ts")
    assert profile(spec)["order"] == {"column": "ts", "min": low, "max": high}


@pytest.mark.parametrize(
    "order",
    [
        pa.array([1, 2, 3] * 3, pa.duration("s")),
        pa.array([[("a", 1)]] * 9, pa.map_(pa.string(), pa.int64())),
        pa.array([[1]] * 9),
        pa.array([b"\xff"] * 9),
    ],
    ids=lambda order: str(order.type),
)
def test_an_order_of_no_numbers_and_no_times_is_told(order, dataset_spec, tmp_path):
    pq.write_table(pa.table({**BASE, "ts": order}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"column 'ts'.*is not a number or time"):
        profile(dataset_spec(tmp_path / "rows.parquet", features={"user": {}, "item": {}}, order="ts"))


def test_ids_of_floats_are_missing_where_they_are_nan(dataset_spec, tmp_path):
    pq.write_table(pa.table({**BASE, "item": [1.0, float("nan"), None] * 3}), tmp_path / "rows.parquet")
    found = profile(described(dataset_spec, tmp_path / "rows.parquet"))["features"]["item"]
    assert found == {"column": "item", "nulls": 6, "distinct": 1}


def test_times_of_96_bits_are_those_that_were_written(tmp_path):
    times = [datetime.datetime(2026, 3, 1), datetime.datetime(9999, 12, 31)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ts": pa.array(times, pa.timestamp("us"))}), path, use_deprecated_int96_timestamps=True)
    (chunk,) = Source(str(path)).stream(["ts"])
    assert chunk.column("ts").to_pylist() == times


def test_json_lines_of_another_coding_are_refused_with_the_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"user": "a"}\n{"user": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"row 1 is not UTF-8.*iconv -f LATIN1"):
        Source(str(path)).require(["user"])
