"""Every format gives the prepared columns that Parquet gives, from a file and from folders; what is wrong is told."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as pads
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.figures import profile
from trainer.data.sources.infer import column_names, infer, propose
from trainer.data.sources.readers import json_lines
from trainer.data.sources.readers.base import COMPRESSIONS
from trainer.data.sources.readers.registry import READERS, reader_of
from trainer.data.sources.source import Source
from trainer.inference.predict import default_output

FIELDS: dict[str, Any] = {
    "features": {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "tags": {"type": "id_list"},
        "price": {"type": "dense"},
    },
    "order": "ts",
}


def rows_table(num_rows: int = 400) -> pa.Table:
    generator = np.random.default_rng(3)
    tags = [[f"t{one}" for one in generator.integers(0, 9, count)] for count in generator.integers(0, 4, num_rows)]
    users = [None if one == 0 else f"u{one}" for one in generator.integers(0, 30, num_rows)]
    return pa.table(
        {
            "user": users,
            "item": generator.integers(0, 40, num_rows),
            "tags": tags,
            "price": pa.array(generator.integers(0, 9, num_rows) / 4, mask=generator.random(num_rows) < 0.1),
            "click": generator.integers(0, 2, num_rows),
            "ts": generator.permutation(num_rows),
        }
    )


def write_lines(table: pa.Table, path: Path) -> None:
    lines = ({key: value for key, value in row.items() if value is not None} for row in table.to_pylist())
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with pa.output_stream(path, compression=COMPRESSIONS.get(path.suffix)) as stream:
        stream.write(text)


def write_fields(table: pa.Table, path: Path, delimiter: str) -> None:
    if "tags" in table.column_names:
        place = table.column_names.index("tags")
        table = table.set_column(place, "tags", pc.binary_join(table["tags"], "|"))
    with pa.output_stream(path, compression=COMPRESSIONS.get(path.suffix)) as stream:
        pa.csv.write_csv(table, stream, pa.csv.WriteOptions(delimiter=delimiter))


def write_feather(table: pa.Table, path: Path) -> None:
    pa.feather.write_feather(table, path, chunksize=97)


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=97)


write_tabs = functools.partial(write_fields, delimiter="\t")
WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    "rows.jsonl": write_lines,
    "rows.ndjson.gz": write_lines,
    "rows.feather": write_feather,
    "rows.arrow": write_feather,
    "stream.arrow": write_stream,
    "rows.arrows": write_stream,
    "rows.orc": pa.orc.write_table,
    "rows.tsv": write_tabs,
    "rows.tsv.gz": write_tabs,
    "commas.csv.gz": functools.partial(write_fields, delimiter=","),
    "semicolons.csv": functools.partial(write_fields, delimiter=";"),
    "tabs.csv.zst": write_tabs,
    "pipes.csv": functools.partial(write_fields, delimiter="|"),
    "rows.jsonl.zst": write_lines,
}
every_format = pytest.mark.parametrize("name", WRITERS)


def contents(data: PreparedData) -> dict[str, bytes]:
    return {str(path.relative_to(data.directory)): path.read_bytes() for path in data.directory.rglob("*.bin")}


@every_format
def test_prepared_columns_are_those_of_parquet(name, dataset_spec, job_spec, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 1000)
    table, job = rows_table(), job_spec(model={"kind": "dcnv2"})
    expected = prepare(dataset_spec(table, **FIELDS), job, tmp_path / "expected")
    WRITERS[name](table, tmp_path / name)
    data = prepare(dataset_spec(tmp_path / name, **FIELDS), job, tmp_path / "data")
    assert contents(data) == contents(expected)
    for one in data.tables:
        assert data.vocabulary(one).equals(expected.vocabulary(one))
    again = prepare(dataset_spec(tmp_path / name, **FIELDS), job, tmp_path / "again")
    assert again.dataset_fingerprint == data.dataset_fingerprint != expected.dataset_fingerprint


@every_format
def test_folders_are_columns(name, tmp_path):
    table = rows_table()
    for day in (2, 1):
        (tmp_path / f"day=2026-01-{day:02d}").mkdir()
        WRITERS[name](table.slice(day * 100, 100), tmp_path / f"day=2026-01-{day:02d}" / name)
    source = Source(str(tmp_path))
    chunks = list(source.stream(["day", "item"], 30))
    assert [len(chunk) for chunk in chunks] == [30, 30, 30, 10] * 2 or name.endswith((".feather", ".arrow", ".arrows"))
    items = pa.concat_arrays([chunk.column("item") for chunk in chunks])
    assert items.equals(table["item"].slice(100, 200).combine_chunks())
    assert chunks[0].column("day")[0].as_py() == "2026-01-01"
    assert sum(len(chunk) for chunk in source.stream(["day"])) == 200
    assert source.reader.num_rows() in (200, None)


def test_a_folder_that_arrow_partitioned(dataset_spec, job_spec, tmp_path):
    table = rows_table().append_column("country", pa.array(["de", "fr"] * 200))
    partitioning = pads.partitioning(pa.schema([("country", pa.string())]), flavor="hive")
    pads.write_dataset(table, tmp_path / "rows", format="parquet", partitioning=partitioning)
    fields = {**FIELDS, "features": {**FIELDS["features"], "country": {"type": "id"}}}
    data = prepare(dataset_spec(tmp_path / "rows", **fields), job_spec(model={"kind": "dcnv2"}), tmp_path / "data")
    assert data.vocabulary("country").to_pylist() == ["de", "fr"]
    assert data.num_rows_read == 400


@pytest.mark.parametrize(
    ("folders", "values"),
    [
        (["7", "10"], [10, 7]),  # folders are read in the order of their names
        (["007", "9223372036854775807"], [7, 2**63 - 1]),
        (["1", "99999999999999999999"], ["1", "99999999999999999999"]),
        (["1", "9223372036854775808"], ["1", "9223372036854775808"]),
        (["1", "\u00b2"], ["1", "\u00b2"]),
        (["1", "\u0663"], ["1", "\u0663"]),
        (["1", "__HIVE_DEFAULT_PARTITION__"], [1, None]),
    ],
)
def test_folders_are_integers_where_every_one_is_an_int64(folders, values, tmp_path):
    for one in folders:
        (tmp_path / f"bucket={one}").mkdir()
        pq.write_table(pa.table({"item": [1]}), tmp_path / f"bucket={one}" / "rows.parquet")
    chunks = list(Source(str(tmp_path)).stream(["bucket"]))
    assert [value for chunk in chunks for value in chunk.column("bucket").to_pylist()] == values


@every_format
def test_a_manifest_is_proposed_and_profiled(name, dataset_spec, tmp_path):
    WRITERS[name](rows_table(), tmp_path / name)
    assert sorted(column_names(tmp_path / name)) == sorted(rows_table().column_names)
    document = infer(tmp_path / name)
    assert document["features"]["tags"] == {"type": "id_list"}
    assert profile(dataset_spec(tmp_path / name, **FIELDS))["rows"] == 400


@pytest.mark.parametrize(("name", "says"), [("rows.feather", "Feather: .*write_feather"), ("rows.orc", "ORC: .*again")])
def test_a_file_that_was_cut(name, says, tmp_path):
    WRITERS[name](rows_table(), tmp_path / "whole")
    (tmp_path / name).write_bytes((tmp_path / "whole").read_bytes()[:900])
    with pytest.raises(DataError, match=f"cannot be read as {says}"):
        column_names(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.tsv.zst", "rows.jsonl.zst", "rows.ndjson.gz"])
def test_a_compressed_file_that_was_cut(name, tmp_path):
    write = write_lines if "json" in name else functools.partial(write_fields, delimiter="\t" if "tsv" in name else ",")
    write(rows_table(3000), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read as"):
        infer(tmp_path / name)


def test_a_stream_whose_writer_was_not_closed(tmp_path):
    """It ends where a batch does, which Arrow takes for the end of the stream."""
    path, table = tmp_path / "rows.arrow", rows_table()
    with pa.OSFile(str(path), "wb") as file:
        writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table, max_chunksize=97)
    with pytest.raises(
        DataError, match=r"cannot be read as Feather: .*nor a complete Arrow stream .*writer not closed"
    ):
        column_names(path)
    write_stream(table, path)
    (chunk, *_) = Source(str(path)).stream(["item", "user"], 1000)
    assert chunk.batch.to_pylist() == table.select(["item", "user"]).slice(0, 97).to_pylist()


def test_a_damaged_stream(tmp_path):
    write_stream(pa.table({"user": ["a" * 50, "b"] * 50}), tmp_path / "rows.arrow")
    content = bytearray((tmp_path / "rows.arrow").read_bytes())
    offsets = content.index(np.array([0, 50, 51, 101], np.int32).tobytes())
    content[offsets + 4 : offsets + 8] = np.int32(2**30).tobytes()
    (tmp_path / "rows.arrow").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as Feather"):
        list(Source(str(tmp_path / "rows.arrow")).stream(["user"]))


@pytest.mark.process
def test_a_parquet_footer_that_contradicts_itself(tmp_path):
    """For a histogram of another length than the levels, pyarrow ends the process that asks for statistics."""
    file, spans = tmp_path / "rows.parquet", []
    pq.write_table(pa.table({"user": [1, 2]}), file, row_group_size=1)
    whole = file.read_bytes()
    begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    lists = [at for at in range(begin, len(whole)) if whole[at] == 0x29]  # of eight-byte numbers
    for hostile in (whole, *(whole[:at] + b"\x19" + whole[at + 1 :] for at in lists)):
        file.write_bytes(hostile)
        spans.append(Source(str(file)).reader.integer_span("user"))
    assert spans == [2, *[None] * len(lists)]
    assert lists


def test_hostile_feather_is_refused_or_read(tmp_path):
    """Arrow's scanner ended the process for about one in a hundred of these."""
    file, rng, read = tmp_path / "rows.feather", random.Random(7), 0
    columns = {"user": [1, 2, 3] * 50, "item": ["a", "b", "c"] * 50, "list": [[1, 2], [3], []] * 50}
    pyarrow.feather.write_feather(pa.table(columns), file, compression="lz4", chunksize=50)
    whole = file.read_bytes()
    for _ in range(1000):
        at, some, other = rng.randrange(len(whole)), rng.randrange(1, 40), rng.choice([b"\0", b"\x7f", b"\xff"])
        changed = (some * other, b"", 2 * whole[at : at + some])[rng.randrange(3)]
        file.write_bytes(whole[:at] + changed + whole[at + some :])
        with contextlib.suppress(DataError):
            read += sum(len(chunk) for chunk in Source(str(file)).stream(["user", "item"]))
    assert read > 0


def test_feather_1_is_told(tmp_path):
    (tmp_path / "rows.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(DataError, match="it is Feather 1, which Arrow no longer reads"):
        column_names(tmp_path / "rows.feather")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("user;price\n1;2,5\n", {"user": [1], "price": ["2,5"]}),
        ('\ufeff"a,b";c\n1;2\n', {"a,b": [1], "c": [2]}),
        ("\r\nuser|item\r\n1|2\r\n", {"user": [1], "item": [2]}),
        ("user\titem|s\n1\t2\n", {"user": [1], "item|s": [2]}),
        ("user,tags|s;\n1,a|b\n", {"user": [1], "tags|s;": ["a|b"]}),
        ("user\na|b;c\n", {"user": ["a|b;c"]}),
    ],
)
def test_the_header_says_what_separates_fields(text, rows, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    source = Source(str(tmp_path / "rows.csv"))
    assert source.column_names() == list(rows)
    (chunk,) = source.stream(list(rows))
    assert chunk.batch.to_pydict() == rows


def test_fields_of_a_tsv_file_hold_commas_and_quoted_tabs(tmp_path):
    (tmp_path / "rows.tsv").write_text('user\titem\nNA\t1,5\n"a\tb"\t2\n\t3\n')
    (chunk,) = Source(str(tmp_path / "rows.tsv")).stream(["user", "item"])
    assert chunk.batch.to_pydict() == {"user": ["NA", "a\tb", None], "item": ["1,5", "2", "3"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user\titem\n1\t2\n1\n", "cannot be read as TSV: .*Expected 2 columns, got 1.*tab-separated"),
        ("user,item\n1,2\n", "no column 'user'"),
    ],
)
def test_a_bad_tsv_file(text, says, tmp_path):
    (tmp_path / "rows.tsv").write_text(text)
    with pytest.raises(DataError, match=says):
        Source(str(tmp_path / "rows.tsv")).require(["user"])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.csv", "user,größe\n1,2\n", "the name of a column is not UTF-8"),
        ("rows.tsv", "user\tgröße\n1\t2\n", "the name of a column is not UTF-8"),
        ("rows.jsonl", '{"user": 1, "größe": 2}\n', "row 0 is not UTF-8: iconv"),
    ],
)
def test_names_of_columns_are_utf_8(name, text, says, tmp_path):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for look in (infer, column_names):
        with pytest.raises(DataError, match=rf"cannot be read as .*: {says}"):
            look(tmp_path / name)


def test_a_feather_file_damaged_in_the_middle(tmp_path):
    """Its footer is whole; the offsets of its strings lead outside."""
    pa.feather.write_feather(pa.table({"user": ["a" * 50, "b"] * 50}), tmp_path / "rows.feather", "uncompressed")
    content = bytearray((tmp_path / "rows.feather").read_bytes())
    offsets = content.index(np.array([0, 50, 51, 101], np.int32).tobytes())
    content[offsets + 4 : offsets + 8] = np.int32(2**30).tobytes()
    (tmp_path / "rows.feather").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as Feather"):
        list(Source(str(tmp_path / "rows.feather")).stream(["user"]))


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ('{"user": "x"}', "column 'user' is int64 in one row and string in another.*values of one type"),
        ('{"user": true, "user": 1}', "was specified twice in row 99"),
        ('{"user": 1', "in row 99.*one JSON object in each line"),
        ("[1, 2]", "changed from object to array in row 99"),
        ('{"user": "' + "x" * 1000 + '"}', "a line is longer than 100 bytes"),
    ],
)
def test_a_bad_line_is_named_by_its_row(last, says, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 100)
    (tmp_path / "rows.jsonl").write_text('{"user": 1}\n' * 99 + last + "\n")
    with pytest.raises(DataError, match=says):
        Source(str(tmp_path / "rows.jsonl")).require(["user"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'[{"user": 1},\n {"user": 2}]', "is one JSON array, not JSON Lines .write one object in each line: jq -c"),
        (b'\xef\xbb\xbf\n [\n{"user": 1}]', "is one JSON array"),
        ('{"user": 1}\n'.encode("utf-16"), "is UTF-16 text.*iconv"),
    ],
)
def test_json_that_is_no_lines_is_refused_with_the_remedy(content, says, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=says):
        Source(str(tmp_path / "rows.jsonl")).require(["user"])
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(DataError, match=r"rename it to .jsonl; an array of objects: jq -c"):
        Source(str(tmp_path / "rows.json"))


def test_lines_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"user": 1}\n{"user": 2}')
    assert [chunk.column("user").to_pylist() for chunk in Source(str(tmp_path / "rows.jsonl")).stream(["user"])] == [
        [1],
        [2],
    ]


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"}}}":', '{"}\\"}\\\\":', "\n[1,"])
def test_lines_that_would_exhaust_the_stack(opening, tmp_path):
    """A hundred thousand levels end the process where Arrow parses them."""
    (tmp_path / "rows.jsonl").write_text('{"user": [' + opening * 100_000)
    with pytest.raises(DataError, match="nested more than 256 deep"):
        column_names(tmp_path / "rows.jsonl")


def test_brackets_in_strings_are_no_depth(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"user": ":[ {\\"[[["}\n' * 1000)
    (chunk,) = Source(str(tmp_path / "rows.jsonl")).stream(["user"])
    assert chunk.column("user").unique().to_pylist() == [':[ {"[[[']


def test_types_of_lines_are_found_over_all_blocks_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 64)
    lines = [{"a": None, "b": [], "c": "2026-01-01", "d": None}] * 5 + [{"a": 1, "b": [2], "c": "x", "d": None}] * 5
    lines += [{"a": 2.5, "b": [2.5], "c": "2026-01-01"}]
    lines = [line | {"e": []} for line in lines]
    last = {"a": 3, "b": [4], "c": "y", "d": None, "e": ["z"]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(last))
    source = Source(str(tmp_path))
    source.require(list("abcde"))
    types = [pa.float64(), pa.list_(pa.float64()), pa.string(), pa.int64(), pa.list_(pa.string())]
    assert [source.column_type(name) for name in "abcde"] == types
    batches = [chunk.batch for chunk in source.stream(list("abcde"))]
    assert pa.Table.from_batches(batches).to_pylist() == [{"d": None} | line for line in [*lines, last]]


@pytest.mark.parametrize("name", ["ROWS.JSONL.ZST", "Semicolons.CSV", "Rows.Orc"])
def test_endings_are_known_in_upper_case_too(name, dataset_spec, tmp_path):
    (tmp_path / "rows").mkdir()
    WRITERS[name.lower()](rows_table(), tmp_path / name.lower())
    path = (tmp_path / name.lower()).rename(tmp_path / "rows" / name)
    for place in (path, path.parent):
        assert profile(dataset_spec(place, **FIELDS))["rows"] == 400
    assert default_output(Source(str(path))).name == f"{name.partition('.')[0]}.scores.parquet"


def test_files_that_no_reader_knows_are_told(tmp_path):
    pq.write_table(rows_table(), tmp_path / "a.parquet")
    for other in ("b.csv.bz2", "part-0001", "_SUCCESS", ".a.parquet.crc"):
        (tmp_path / other).write_text("rows?")
    assert "passed over: 2 files whose endings belong to no format: b.csv.bz2, part-0001" in propose(tmp_path).notes
    (tmp_path / "b.csv.bz2").unlink()
    (tmp_path / "part-0001").unlink()
    assert not any("passed over" in note for note in propose(tmp_path).notes)


def test_formats_are_not_mixed_in_a_folder(tmp_path):
    write_lines(rows_table(), tmp_path / "a.jsonl")
    pq.write_table(rows_table(), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="mixes Parquet and JSON Lines files"):
        Source(str(tmp_path))


def test_no_ending_is_of_two_readers():
    suffixes = [suffix for reader in READERS for suffix in reader.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    assert all(reader_of(f"rows{suffix}") is reader for reader in READERS for suffix in reader.suffixes)


@pytest.mark.parametrize("name", [*WRITERS, "rows.parquet"])
def test_reading_goes_on_after_any_chunk(name, tmp_path):
    """From the end of a chunk on come the chunks that follow it in a stream from the beginning."""
    folder = tmp_path / "rows"
    folder.mkdir()
    write = WRITERS.get(name, functools.partial(pq.write_table, row_group_size=23))
    for number, part in enumerate((rows_table(70), rows_table(50))):
        write(part, folder / f"{number}.{name.partition('.')[2]}")
    source = Source(str(folder))
    chunks = list(source.stream(["user", "item"], 16))
    said = [(one.file, one.rows.tolist(), one.end, one.batch.to_pylist()) for one in chunks]
    for number, chunk in enumerate(chunks):
        rest = source.stream(["user", "item"], 16, start=(source.files.index(chunk.file), chunk.end))
        assert [(one.file, one.rows.tolist(), one.end, one.batch.to_pylist()) for one in rest] == said[number + 1 :]
