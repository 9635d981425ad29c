"""Lists written as text, in every spelling, are the lists of Parquet: ids, weights, vectors, joins and scored rows."""

from __future__ import annotations

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns import values
from trainer.data.columns.ids import ListColumn
from trainer.data.columns.row_encoder import RowEncoder
from trainer.data.columns.text_lists import split
from trainer.data.columns.vectors import Vector, require_lists, vector_problems
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.infer import propose
from trainer.data.sources.join import JoinTable
from trainer.data.sources.source import Source
from trainer.spec import Join

TAGS = [["27", "9"], [], ["3"], None, ["9", "27", "9"], ["it's"], ['a "b"', "c|d", "e, f"], ["é", "\\", "[x]"]]
CODES = [["27", "9"], [], ["3"], None, ["9", "27", "9"], ["a-b"], ["c.d", "#e"], ["é"]]


def braces(tags):
    return "{" + ",".join('"' + tag.replace("\\", "\\\\").replace('"', '\\"') + '"' for tag in tags) + "}"


def bare(opening, comma, closing):
    return lambda tags: opening + comma.join(tags) + closing


SPELLINGS = {
    "JSON": (TAGS, json.dumps),
    "JSON without escapes": (TAGS, lambda tags: json.dumps(tags, ensure_ascii=False, separators=(",", ":"))),
    "Python": (TAGS, str),
    "Python's tuples": (TAGS, lambda tags: str(tuple(tags))),
    "PostgreSQL": (TAGS, braces),
    "numbers": (CODES, bare("[", ", ", "]")),
    "braces": (CODES, bare("{", ",", "}")),
    "pipes": (CODES, bare("", "|", "")),
    "blanks around": (CODES, bare(" [ ", " , ", " ] ")),
}
spellings = pytest.mark.parametrize("spelling", SPELLINGS)


def columns_of(tags):
    rows = len(tags)
    return {
        "user": [f"u{number % 3}" for number in range(rows)],
        "item": [f"i{number % 2}" for number in range(rows)],
        "tags": tags,
        "click": [number % 2 for number in range(rows)],
    }


def write(columns, path):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


@spellings
@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl", "rows.parquet"])
def test_every_spelling_is_read_as_the_list(name, spelling, tmp_path):
    tags, spelled = SPELLINGS[spelling]
    path = write(columns_of([None if one is None else spelled(one) for one in tags]), tmp_path / name)
    (chunk,) = Source(str(path)).stream(["tags"])
    elements, lengths = values.as_lists(chunk, "tags")
    assert elements.to_pylist() == [tag for one in tags if one is not None for tag in one]
    assert lengths.tolist() == [len(one or []) for one in tags]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_prepared_lists_are_those_of_parquet(name, dataset_spec, job_spec, tmp_path):
    features = {"user": {"type": "id"}, "tags": {"type": "id_list"}}
    path = write(columns_of([None if one is None else str(one) for one in TAGS]), tmp_path / name)
    data = prepare(dataset_spec(path, features=features), job_spec(), tmp_path / "data")
    expected = prepare(dataset_spec(pa.table(columns_of(TAGS)), features=features), job_spec(), tmp_path / "expected")
    assert data.vocabulary("tags").equals(expected.vocabulary("tags"))
    for file in expected.directory.rglob("*.bin"):
        assert (data.directory / file.relative_to(expected.directory)).read_bytes() == file.read_bytes()


@spellings
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_every_spelling_is_proposed_as_lists(name, spelling, tmp_path):
    tags, spelled = SPELLINGS[spelling]
    path = write(columns_of([None if one is None else spelled(one) for one in tags]), tmp_path / name)
    proposal = propose(path)
    assert proposal.document["features"]["tags"] == {"type": "id_list"}
    assert proposal.notes == ()


@given(
    st.lists(st.text(st.characters(blacklist_categories=("Cs",)), max_size=5), max_size=4),
    st.sampled_from([json.dumps, repr]),
)
def test_lists_of_any_text_are_read_back(texts, spelled):
    found, unreadable = split(pa.array([spelled(texts)]))
    assert found.to_pylist() == [[text or None for text in texts]]
    assert not unreadable.any()


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("[1, None, null, nan, 'None']", ["1", None, None, None, "None"]),
        ('{a,NULL,"b c"}', ["a", None, "b c"]),
        ("(27,)", ["27"]),
        ("(27)", ["27"]),
        ("[007, 7, 1.0]", ["007", "7", "1.0"]),
        ("()", []),
        ("[ ]", []),
        ("(no genres listed)", ["(no genres listed)"]),
        ("(none)", ["(none)"]),
        ("[Sale] shoes|[New]", ["[Sale] shoes", "[New]"]),
        ('["a]|", "|"]', ["a]|", "|"]),
        ("[Sale]|[New]", ["[Sale]", "[New]"]),
        ("Film Noir|", ["Film Noir", None]),
        ("|27||9|", [None, "27", None, "9", None]),
        (" 27 | 9 ", ["27", "9"]),
        ("set()", []),
        ("Film Noir", ["Film Noir"]),
        ("[x", ["[x"]),
        ("", None),
    ],
)
def test_what_a_text_is(text, elements):
    found, unreadable = split(pa.array([text, None]))
    assert found.to_pylist() == [elements, None]
    assert not unreadable.any()


NO_LISTS = [
    "[27 9]",
    "[[1], [2]]",
    '{"a": 1}',
    "[a,,b]",
    "['a' 'b']",
    "[1, 2, ..., 9]",
    "[New York, Rome]",
    '["a]',
    '["\\ud83d"]',
]


@pytest.mark.parametrize("text", NO_LISTS)
def test_brackets_around_no_list_are_refused(text, dataset_spec, job_spec, tmp_path):
    features = {"user": {"type": "id"}, "tags": {"type": "id_list"}}
    rows = pa.table(columns_of(["[a]", "[b, c]", text, "[]"]))
    says = r"rows.parquet, column 'tags', row 2: .* is no list of texts or numbers with commas .*write lists as"
    with pytest.raises(DataError, match=says):
        prepare(dataset_spec(rows, features=features), job_spec(), tmp_path / "data")
    allowed = dataset_spec(rows, features=features, max_bad_rows=0.5)
    assert prepare(allowed, job_spec(), tmp_path / "data").vocabulary("tags").to_pylist() == ["a", "b", "c"]
    (note,) = propose(tmp_path / "rows.parquet").notes
    assert "column 'tags': " in note
    assert "is no list of texts or numbers with commas" in note


@pytest.mark.parametrize("text", ["27,9", "27 9", "a, b", "a;b", "N1 N2", "array([1, 2])"])
def test_what_may_be_a_list_or_one_id_is_refused(text, dataset_spec, job_spec, tmp_path):
    features = {"user": {"type": "id"}, "tags": {"type": "id_list"}}
    says = r"column 'tags', row 2: .* may be a list or one id, and no value has '\|' .write lists as"
    for others in (["a", "b"], ["[a, b]", "[c d]"][:1] * 2):
        rows = pa.table(columns_of([*others, text, text, None]))
        with pytest.raises(DataError, match=says):
            prepare(dataset_spec(rows, features=features), job_spec(), tmp_path / "data")
    rows = columns_of(["a", "b|c", text, None])
    data = prepare(dataset_spec(pa.table(rows), features=features), job_spec(), tmp_path / "pipes")
    assert data.vocabulary("tags").to_pylist() == sorted(["a", "b", "c", text])
    join = {"uri": "tags.parquet", "on": "item", "column": "tags", "take": "all"}
    pq.write_table(pa.table({"item": ["i0", "i1"], "tags": ["a", text]}), tmp_path / "tags.parquet")
    with pytest.raises(DataError, match=r"tags.parquet, column 'tags', row 1: .* may be a list or one id"):
        JoinTable(Join(**join), str(tmp_path / "tags.parquet"))


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        (["27 9", "3", "4"], "'tags' has values such as '27 9', each of which is read as one id; write lists as"),
        (["a, b", "c", "d"], "'tags' has values such as 'a, b', each of which is read as one id"),
        (["27,9", "3,4", "5"], "column 'tags': '27,9' is a number with a comma, or a list"),
        (["1,234.5", "3", "5"], "column 'tags': '1,234.5' is a number with a comma"),
    ],
)
def test_what_may_be_a_list_or_one_id_is_proposed_with_a_note(tags, says, tmp_path):
    proposal = propose(write(columns_of(tags), tmp_path / "rows.csv"))
    assert proposal.document["features"].get("tags", {"type": "id"}) == {"type": "id"}
    assert ("tags" in proposal.document["features"]) == ("one id" in says)
    (note,) = proposal.notes
    assert says in note


@pytest.mark.parametrize("tags", [["Film Noir", "Drama", "x"], ["On shelf 5", "On shelf 6", "x"]])
def test_names_of_several_words_are_ids_without_a_note(tags, tmp_path):
    proposal = propose(write(columns_of(tags), tmp_path / "rows.csv"))
    assert proposal.document["features"]["tags"] == {"type": "id"}
    assert proposal.notes == ()


def test_lists_of_a_joined_file(tmp_path):
    path = write({"item": ["i0", "i1", "i2"], "tags": ["[a, b]", "[]", "['c d']"]}, tmp_path / "items.csv")
    join = JoinTable(Join(uri=str(path), on="item", column="tags", take="all"), str(path))
    ids, lengths = join.ids(join.positions(pa.array(["i2", "i0", "i1"]), ""))
    assert (ids.to_pylist(), lengths.tolist()) == (["c d", "a", "b"], [1, 2, 0])


@pytest.mark.parametrize("tags", ["a|b", "[a, b]", ["a", "b"]])
def test_of_a_joined_list_one_is_taken(tags, tmp_path):
    pq.write_table(pa.table({"item": ["i0"], "tags": [tags]}), tmp_path / "items.parquet")
    for take, one in (("last", "b"), ("first", "a")):
        join = Join(uri="items.parquet", on="item", column="tags", take=take)
        table = JoinTable(join, str(tmp_path / "items.parquet"), ListColumn(join.column, "tags"))
        assert table.ids(table.positions(pa.array(["i0"]), ""))[0].to_pylist() == [one]


@pytest.mark.parametrize("values_", [[[7, None], [8]], [[7.0, float("nan")], [8.0]], ["[7, nan]", "8"]])
def test_an_element_that_is_missing_is_left_out_in_every_type(values_, tmp_path):
    pq.write_table(pa.table({"tags": pa.array(values_, from_pandas=False)}), tmp_path / "rows.parquet")
    source = Source(str(tmp_path / "rows.parquet"))
    (chunk,) = source.stream(["tags"])
    elements, lengths = values.as_lists(chunk, "tags")
    assert values.as_ids(elements, "int", "").to_pylist() == [7, 8]
    assert lengths.tolist() == [1, 1]


@pytest.mark.parametrize("ids", [["27", "9"], [27, 9]])
@pytest.mark.parametrize("text", ["[27, 9]", "['27', '9']", "27|9", "{27,9}", "27", "[]"])
def test_scored_rows_have_the_lists_of_training(text, ids, dataset_spec, tmp_path):
    spec = dataset_spec(pa.table(columns_of([text])), features={"tags": {"type": "id_list"}})
    (chunk,) = Source(spec.uri).stream(["tags"])
    encoded = RowEncoder(spec, spec.features, {"tags": pa.array(ids)}).encode(chunk)
    assert encoded.rows["tags"].values.tolist() == {"27": [2], "[]": []}.get(text, [2, 3])
    assert encoded.unknown == {"tags": 0}


def test_scored_rows_whose_lists_are_written_otherwise_are_refused(dataset_spec):
    spec = dataset_spec(pa.table(columns_of(["27", "27 9", "9"])), features={"tags": {"type": "id_list"}})
    (chunk,) = Source(spec.uri).stream(["tags"])
    with pytest.raises(DataError, match="'27 9' is not an id that the model knows, but a list of ids that it knows"):
        RowEncoder(spec, spec.features, {"tags": pa.array(["27", "9"])}).encode(chunk)
    for known in (["27", "8"], ["27", "9", "27 9"]):
        encoded = RowEncoder(spec, spec.features, {"tags": pa.array(known)}).encode(chunk)
        assert encoded.rows["tags"].lengths.tolist() == [1, 1, 1]


def test_weights_are_text_too(dataset_spec, job_spec, tmp_path):
    features = {"user": {"type": "id"}, "tags": {"type": "id_list", "weights": "w"}}
    native = {"tags": [["a", "b"], [], ["c"], ["a", None]], "w": [[0.5, 2.0], [], [3.0], [1.0, 9.0]]}
    texts = {"tags": ["['a', 'b']", "[]", "c", "[a, null]"], "w": ["[0.5, 2.0]", "()", "3", "{1.0,9}"]}
    contents = []
    for number, columns in enumerate((native, texts)):
        rows = dataset_spec(pa.table(columns_of(columns["tags"]) | {"w": columns["w"]}), features=features)
        data = prepare(rows, job_spec(), tmp_path / str(number))
        contents.append({file.name: file.read_bytes() for file in data.directory.rglob("*.bin")})
    assert contents[0] == contents[1]
    for tags, weights in (
        ("['a', 'b']", "[0.5]"),
        ("['a', 'b']", "[0.5 1]"),
        ("[a b]", "[0.5, 1]"),
        ("[a b]", "[1 2]"),
    ):
        rows = dataset_spec(pa.table(columns_of([tags]) | {"w": [weights]}), features=features)
        with pytest.raises(DataError, match=r"column '(w|tags)', row 0: "):
            prepare(rows, job_spec(), tmp_path / "bad")


def test_vectors_are_text_too(tmp_path):
    texts = ["[0.1, 0.2]", "(1, -2e3)", "0.5|1", None, "", "[]", "[0.1 0.2]", "[0.1, x]", "[1, None]", "[1, 2, 3]"]
    vector = Vector("v", "v", 2)
    require_lists(pa.string(), vector, "rows")
    found, missing, bad = vector_problems(vector, pa.array(texts))
    assert found[:3].tolist() == [[np.float32(0.1), np.float32(0.2)], [1, -2000], [0.5, 1]]
    assert missing.tolist() == [text in ("", None) for text in texts]
    assert bad.tolist() == [False] * 5 + [True] * 5
    write(columns_of(["[0.5, 1.0]", "[2, 3.5]", "[1.5, -1]"]), tmp_path / "rows.csv")
    assert propose(tmp_path / "rows.csv").document["features"]["tags"] == {"type": "vector", "dim": 2}
    (chunk,) = Source(str(tmp_path / "rows.csv")).stream(["tags"])
    assert Vector("tags", "tags", 2).read(chunk).tolist() == [[0.5, 1.0], [2.0, 3.5], [1.5, -1.0]]
