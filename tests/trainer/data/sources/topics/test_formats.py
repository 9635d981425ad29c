"""Messages to rows: whole batches at once, and each message that cannot be read by itself."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.sources.topics.formats import FORMATS, format_of, schema_of
from trainer.spec.messages import Messages

COLUMNS = {"user": "int64", "item": "string", "recent": "list<string>", "price": "float64"}


def format_named(name):
    return format_of(Messages(format=name, columns=COLUMNS))


def as_json(*rows):
    return b"\n".join(json.dumps(row).encode() for row in rows)


def as_arrow(*rows, columns=COLUMNS, schema=None):
    table = pa.Table.from_pylist(list(rows), schema or schema_of(Messages(columns=columns)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


ROW = {"user": 3, "item": "a", "recent": ["b", "c"], "price": 0.5}
BARE = {"user": None, "item": None, "recent": None, "price": None}
UNREADABLE = {
    "json_lines": [
        b"", b" \n", b"{", b"[]", b"3", b'{"user": "three"}', b'{"item": 3}', b'{"user": 1}{"user": 2}',
        b'{"user": 1}\n{"user"', b'{"item": "\xff"}', b'{"user": 1,', b'"item": "x"}', b"[" * 5000, b'{"user": 1.5}',
        b'{"recent": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    "arrow": [
        b"", b"ARROW1", as_arrow(ROW)[:-30], as_arrow({"user": 1}, schema=pa.schema([("user", pa.int64())])),
        as_arrow({**ROW, "user": "x"}, schema=schema_of(Messages(columns={**COLUMNS, "user": "string"}))),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "write"), [("json_lines", as_json), ("arrow", as_arrow)])
def test_messages_hold_any_number_of_rows_and_bad_ones_none(name, write):
    more = [ROW, {**ROW, "user": None, "recent": []}]
    good = [write(ROW), None, write(*more)]
    bad = UNREADABLE[name]
    values = [value for number, one in enumerate(bad) for value in (one, good[number % 3])]
    decoded = format_named(name).decode(values)
    assert sorted(decoded.problems) == list(range(0, 2 * len(bad), 2))
    assert all(decoded.problems.values())
    expected = [row for number in range(len(bad)) for row in ([ROW], [], more)[number % 3]]
    assert decoded.batch.to_pylist() == expected
    assert decoded.num_rows.tolist() == [n for number in range(len(bad)) for n in (0, (1, 0, 2)[number % 3])]
    assert decoded.batch.schema == format_named(name).schema


def test_other_keys_are_passed_over_and_missing_ones_are_null():
    decoded = format_named("json_lines").decode([b'{"other": {"deep": [1]}, "price": 2}\r\n', b"{}"])
    assert decoded.batch.to_pylist() == [{**BARE, "price": 2.0}, BARE]
    assert not decoded.problems


def test_arrow_of_another_type_that_holds_the_same_is_read():
    types = [pa.int32(), pa.dictionary(pa.int8(), pa.string()), pa.large_list(pa.string()), pa.float32(), pa.bool_()]
    schema = pa.schema(list(zip([*COLUMNS, "more"], types, strict=True)))
    decoded = format_named("arrow").decode([as_arrow(ROW, schema=schema)])
    assert decoded.batch.to_pylist() == [ROW]
    # Bytes in the middle that say where strings end.
    broken = bytearray(as_arrow(*[ROW] * 50))
    at = broken.index((2).to_bytes(4, "little") + (3).to_bytes(4, "little") + (4).to_bytes(4, "little"))
    broken[at : at + 4] = (1 << 30).to_bytes(4, "little")
    assert format_named("arrow").decode([bytes(broken)]).problems


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*COLUMNS, "x"]), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.none() | st.binary(max_size=40) | JSON.map(lambda one: json.dumps(one).encode()), max_size=8),
)
def test_what_becomes_of_a_message_does_not_depend_on_those_beside_it(name, values):
    together = format_named(name).decode(values)
    alone = [format_named(name).decode([value]) for value in values]
    assert together.batch.to_pylist() == [row for one in alone for row in one.batch.to_pylist()] or any(
        row["price"] != row["price"] for row in together.batch.to_pylist()
    )
    assert together.num_rows.tolist() == [int(one.num_rows[0]) for one in alone]
    assert set(together.problems) == {number for number, one in enumerate(alone) if one.problems}


def test_digits_of_times_behind_microseconds_are_cut_as_in_files():
    """Some loggers write nanoseconds, with a zone or without."""
    texts = ["2026-11-25T09:00:00.123456789Z", "2026-11-25T10:00:00+01:00", "2026-11-25", None, "today", 7]
    read = format_of(Messages(columns={"at": "timestamp"})).decode([as_json({"at": text}) for text in texts])
    assert [str(row["at"]) for row in read.batch.to_pylist()] == [
        "2026-11-25 09:00:00.123456", "2026-11-25 09:00:00", "2026-11-25 00:00:00", "None",
    ]  # fmt: skip
    assert list(read.problems) == [4, 5]


@pytest.mark.parametrize(("name", "write"), [("json_lines", as_json), ("arrow", as_arrow)])
def test_an_empty_text_is_null(name, write):
    numbers = {"user": "", "price": ""} if name == "json_lines" else {"user": None, "price": None}
    decoded = format_named(name).decode([write({**numbers, "item": "", "recent": ["", "b"]}, ROW)])
    assert decoded.problems == {}
    assert decoded.batch.to_pylist() == [{**BARE, "recent": [None, "b"]}, ROW]
