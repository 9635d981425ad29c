"""CSV as people have it: line breaks in quotes, quotes that are none, encodings, and first lines that are no header."""

from __future__ import annotations

import csv
import gzip
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.sources.readers import csv as reader
from trainer.data.sources.source import Source

BLOCK_BYTES = 200
PIECES = st.sampled_from(["a", 'b"c', "x y", "1", '"', '""', ",", "\n", "\r\n", "é", "u1,i1,1", "u1\ti1", "# "])
CELLS = st.lists(PIECES, max_size=4).map("".join)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(reader, "_BLOCK_BYTES", BLOCK_BYTES)


def rows_of(path, columns):
    source = Source(str(path), text=columns)
    batches = [chunk.batch for chunk in source.stream(columns)]
    return [["" if value is None else value for value in row.values()] for one in batches for row in one.to_pylist()]


def rows_of_python(text, delimiter):
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row][1:]


@given(
    st.integers(1, 4).flatmap(
        lambda count: st.lists(st.lists(CELLS, min_size=count, max_size=count), min_size=1, max_size=12)
    ),
    st.sampled_from([",", "\t", ";"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.booleans(),
)
def test_rows_of_a_writer_are_those_of_python(tmp_path_factory, rows, delimiter, end, quoting, is_closed):
    columns = [f"column {name}" for name in "abcd"[: len(rows[0])]]
    delimiter = "," if len(columns) == 1 and delimiter == ";" else delimiter  # no header says it
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([columns, *rows])
    written = text.getvalue() if is_closed else text.getvalue().removesuffix(end)
    path = tmp_path_factory.mktemp("rows") / ("rows.tsv" if delimiter == "\t" else "rows.csv")
    path.write_bytes(written.encode())
    assert rows_of(path, columns) == rows_of_python(written, delimiter)


@given(st.lists(st.tuples(st.booleans(), CELLS, st.sampled_from(["", "", "tail", 'ta"il'])), min_size=4, max_size=40))
def test_quotes_within_fields_are_text(tmp_path_factory, cells):
    """Some fields are quoted, with text behind the closing quote of those of one line, others have quotes in them."""
    fields = []
    for is_quoted, cell, tail in cells:
        doubled = cell.replace('"', '""')
        plain = cell.replace(",", "").replace("\r", "").replace("\n", "")
        fields.append(f'"{doubled}"{"" if chr(10) in cell else tail}' if is_quoted else f"z{plain}")
    text = "column a,column b\n" + "".join(
        f"{one},{two}\n" for one, two in zip(fields[::2], fields[1::2], strict=False)
    )
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_bytes(text.encode())
    assert rows_of(path, ["column a", "column b"]) == rows_of_python(text, ",")


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_lines_of_a_text_are_no_rows(name, tmp_path):
    text = "\n".join(["first line"] + ["someone,item-x,1,a line of the text"] * 4)
    lines = [f'u{number},i{number},{number % 2},"{text}"' for number in range(60)]
    content = "\n".join(["user,item,click,text", *lines]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = rows_of(tmp_path / name, ["user", "click"])
    assert rows == [[f"u{number}", str(number % 2)] for number in range(60)]


@pytest.mark.parametrize("ahead", [0, 1, 30])
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (['a,"b'], "the quote that opens in line 2 is not closed"),
        (['a,"b', "c,d", 'e,"f"'], "the quote that opens in line 2 closes 2 lines below, with text after it"),
        (['a,"b\nc"', 'd,"e'], "the quote that opens in line 4 is not closed"),
        (['a,"' + "b\n" * BLOCK_BYTES], f"the quote that opens in line 2 is not closed within {BLOCK_BYTES} bytes"),
        (['a,5" pipe', 'b,"c'], "the quote that opens in line 3 is not closed"),
    ],
    ids=["at the end", "up to another", "behind a line break", "longer than a block", "behind another"],
)
def test_a_quote_that_is_not_closed_is_named_by_its_line(rows, says, ahead, tmp_path):
    words = says.split()
    line = words.index("line") + 1
    words[line] = str(int(words[line]) + ahead)
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["user,text", *["u,t"] * ahead, *rows]))
    for columns in (["user"], ["text"]):
        with pytest.raises(DataError, match="cannot be read as CSV: " + " ".join(words)):
            Source(str(path)).require(columns)


@pytest.mark.parametrize("breaks", ["", "\n", "\r\n"])
def test_a_row_of_another_width_is_named_by_its_number(breaks, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(f"user,text\n{f'u,{chr(34)}a{breaks}b{chr(34)}{chr(10)}{chr(10)}' * 50}u\nv,w\n".encode())
    with pytest.raises(DataError, match=r"row 50: Expected 2 columns, got 1"):
        Source(str(path)).require(["text"])


@pytest.mark.parametrize("length", range(BLOCK_BYTES - 40, BLOCK_BYTES - 20))
def test_no_line_feed_in_quotes_is_lost_between_blocks(length, tmp_path):
    text = "x" * length + "\r\n\r\r\ny" * 3
    (tmp_path / "rows.csv").write_bytes(f'user,text\n"u","{text}"\n'.encode())
    assert rows_of(tmp_path / "rows.csv", ["text"]) == [[text]]


def test_a_quote_within_a_field_at_the_end_of_a_block_opens_none(tmp_path):
    for length in range(BLOCK_BYTES - 40, BLOCK_BYTES):
        text = f'user,text\n"u\nv",{"x" * length}"\nw,y\n'
        (tmp_path / "rows.csv").write_text(text)
        assert rows_of(tmp_path / "rows.csv", ["user", "text"]) == rows_of_python(text, ",")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("user,item\n1,é\n".encode("latin-1"), "column 'item': is not UTF-8 text .write the file in UTF-8"),
        ("user,item\n1,é\n".encode("utf-16"), "is UTF-16 text.*iconv -f UTF-16"),
        ("user,item\n1,é\n".encode("utf-16-le"), "is UTF-16 text"),
        (b"user::item\n1::2\n", "has fields separated by '::' .write tabs, and a header"),
        (b"1::2\n3::4\n", "has fields separated by '::'"),
        (b"1,1193,5\n2,3,4\n", "has values in its first line.*: 1, 1193, 5 .put a line of names above it"),
        (b"u1,i5,2026-01-01\nu2,i3,2026-01-02\n", "has values in its first line"),
        (b"5\n6\n7\n", "has values in its first line"),
        (b"a1,NA,3\nb2,4,5\n", "has values in its first line"),
        (b"# by a tool\nuser,item\n1,2\n", "1 fields in its first line and 2 in the next.*no comment and no title"),
        (b"user,item,\n1,2\n", "3 fields in its first line and 2 in the next"),
        (b" user, item\n1,2\n", "no column 'item' .*name the column ' item' in the dataset spec, with its blanks"),
        (b"item,item\n1,2\n", "two columns of this name"),
    ],
)
def test_a_file_that_is_no_such_csv_is_refused_with_the_remedy(content, says, tmp_path):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(DataError, match=says):
        Source(str(tmp_path / "rows.csv")).require(["item"])


def test_a_line_of_names_among_the_rows_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("user,item\nu1,i1\nuser,i2\nuser,item\nu2,i2\n")
    with pytest.raises(DataError, match="row 2 repeats the line of names"):
        Source(str(tmp_path / "rows.csv"), ids=["user", "item"]).require(["user", "item"])


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("\ufeffuser,item\n1,é\n", {"user": ["1"], "item": ["é"]}),
        ('"sep=;"\nuser;item\n1;2,5\n', {"user": ["1"], "item": ["2,5"]}),
        ("\ufeffsep=;\r\nuser;item\r\n1;2\r\n", {"user": ["1"], "item": ["2"]}),
        ('\ufeff"a\nb",c\r"d\re",f\r', {"a\nb": ["d\re"], "c": ["f"]}),
        ("user,2020,2021\nu1,3,4\n", {"user": ["u1"], "2020": ["3"], "2021": ["4"]}),
        ("user,1st\nu1,3\n", {"user": ["u1"], "1st": ["3"]}),
        (",0,1\n0,a,b\n", {"": ["0"], "0": ["a"], "1": ["b"]}),
        ("0,1\n5,b\n", {"0": ["5"], "1": ["b"]}),
        ("user,7\nu,x\n", {"user": ["u"], "7": ["x"]}),
    ],
)
def test_first_lines_that_are_read(content, rows, tmp_path):
    (tmp_path / "rows.csv").write_bytes(content.encode())
    assert Source(str(tmp_path / "rows.csv")).column_names() == list(rows)
    names = [name for name in rows if name]
    found = rows_of(tmp_path / "rows.csv", names)
    assert found == [list(row) for row in itertools.zip_longest(*(rows[name] for name in names))]
