"""Manifests proposed from files, and the figures of a dataset."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

import trainer.data.sources.infer as infer_module
from trainer.data.errors import DataError
from trainer.data.sources.click_log import ClickLog, generate
from trainer.data.sources.figures import profile
from trainer.data.sources.infer import as_yaml, infer, job_as_yaml, job_of, propose
from trainer.data.sources.source import Source
from trainer.spec import load_documents, parse_dataset, parse_job


def write(tmp_path, name="Clicks 2026.parquet", **columns):
    path = tmp_path / name
    table = pa.table({key: pa.array(values) for key, values in columns.items()})
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_bomb_is_read_in_part(tmp_path, monkeypatch, suffix):
    """The types of columns too: in the part that is not read, ids are not numbers and a line is torn."""
    monkeypatch.setattr(infer_module, "SAMPLE_BYTES", 20_000)
    rows = [(user, f'the "{user}"\nth', user % 2) for user in range(3000)]
    lines = [f'{user},"{text.replace(chr(34), chr(34) * 2)}",{click}\n' for user, text, click in rows]
    if suffix == "jsonl":
        lines = [json.dumps({"user": user, "item": text, "click": click}) + "\n" for user, text, click in rows]
    path = tmp_path / f"rows.{suffix}.gz"
    with gzip.open(path, "wt") as file:
        file.write(("user,item,click\n" if suffix == "csv" else "") + "".join(lines) + "torn \x00 line")
    document = infer(path)
    assert document["label"] == {"column": "click"}
    assert document["features"]["user"] == {"type": "id"}
    with pytest.raises(DataError):
        list(Source(str(path)).stream(["user"]))


def test_click_log_directory(tmp_path):
    generate(ClickLog(num_rows=3000, num_days=3), tmp_path / "log")
    assert infer(tmp_path / "log") == {
        "name": "log",
        "uri": str(tmp_path / "log"),
        "features": {name: {"type": "id"} for name in ("user", "item", "query", "context", "cluster")},
        "label": {"column": "click"},
        "timestamp": "timestamp",
        "partition": "date",
    }


@pytest.mark.parametrize("name", ["ratings.parquet", "ratings.csv"])
def test_ratings(tmp_path, name):
    generator = np.random.default_rng(0)
    path = write(
        tmp_path,
        name,
        userId=generator.integers(0, 9, 200),
        movieId=[f"m{n}" for n in generator.integers(0, 30, 200)],
        rating=generator.integers(1, 6, 200).astype(float),
        timestamp=list(range(200)),
        is_test=generator.integers(0, 2, 200) == 1,
    )
    found = infer(path)
    assert found["features"] == {
        "user": {"type": "id", "column": "userId"},
        "item": {"type": "id", "column": "movieId"},
    }
    assert found["label"] == {"rule": "rating >= 4"}
    assert found["timestamp"] == "timestamp"
    assert found["name"] == "ratings"


def test_implicit_feedback_gets_negatives(tmp_path):
    path = write(tmp_path, user=[1, 1, 2], item=[3, 4, 3], pos=[0, 1, 0])
    found = infer(path, name="mine")
    assert found["name"] == "mine"
    assert found["label"] == {"negatives": {"per_positive": 1, "of": "item"}}
    assert found["order"] == "pos"


def test_any_binary_column_is_the_last_resort(tmp_path):
    found = infer(write(tmp_path, user=[1, 2, 3, 1], page=[5, 6, 7, 8], bounced=[0, 1, 0, 1]))
    assert found["label"] == {"column": "bounced"}
    assert set(found["features"]) == {"user", "page"}


def test_other_columns_named_like_labels_are_noted_and_no_features(tmp_path):
    bits = [[n >> shift & 1 for n in range(16)] for shift in range(4)]
    columns = {"add-to-cart": bits[0], "is_liked": bits[1], "click": bits[2], "is_mobile": bits[3]}
    path = write(tmp_path, user=list(range(16)), page=[n % 5 for n in range(16)], **columns, order=list(range(16)))
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user", "page", "is_mobile"}
    assert proposal.document["label"] == {"column": "click"}
    (note,) = proposal.notes
    assert note.startswith("'add-to-cart' and 'is_liked': named like a label, and no feature here")
    # What it proposes in place of label is a dataset with them.
    text = as_yaml(proposal.document, proposal.notes)
    (line,) = [line for line in text.splitlines() if line.startswith("# labels: ")]
    document = yaml.safe_load(text) | yaml.safe_load(line.removeprefix("# "))
    del document["label"]
    found = parse_dataset(document).labels
    assert {name: label.column for name, label in found.items()} == {
        "click": "click", "add_to_cart": "add-to-cart", "is_liked": "is_liked"
    }  # fmt: skip


def test_an_action_is_a_label_before_a_rating_and_negatives(tmp_path):
    path = write(tmp_path, user=[1, 2, 3, 1], item=[5, 6, 7, 8], rating=[5, 3, 4, 1], bought=[0, 1, 0, 1])
    proposal = propose(path)
    assert proposal.document["label"] == {"column": "bought"}
    assert proposal.notes == ()


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("click", [0, 1, None, 1], 'some rows lack a value, .* set filter: "click is not None"'),
        ("click", [0.0, 1.0, float("nan"), 1.0], 'set filter: "click is not None"'),
        ("bought", [0, 1, None, 1], 'set filter: "bought is not None"'),
        ("click", [-1, 1, -1, 1], "a rule may turn them into a label: label: {rule: 'click >= 1'}"),
        ("click", ["yes", "no", "yes", "no"], r"write it as 0 and 1, in pandas: .* == 'yes'\)"),
        ("click", ["N", "Y", "N", None], r"\(rows\['click'\] == 'Y'\)"),
        ("click", ["not", "clicked", "not", "not"], "== 'clicked'"),
        ("click", ["a", "b", "a", "b"], "== 'WHAT IS POSITIVE'"),
        ("liked", ["true", "false", "true", "false"], "== 'true'"),
        ("liked", [-1, 1, -1, 1], "label: {rule: 'liked >= 1'}"),
        ("click", [0, 100, 0, 100], "label: {rule: 'click >= 100'}"),
        ("click", [1, 5, 3, 4], "label: {rule: 'click >= 4'}"),
        ("click", [0, 5, 3, 4], "label: {rule: 'click > 0'}"),
        (" click", [0, 1, None, 1], "rename it to 'click' to use a filter or a rule"),
    ],
)
def test_a_label_that_is_none_is_no_feature_either(name, values, says, tmp_path):
    path = write(tmp_path, user=[1, 2, 3, 1], item=[5, 6, 7, 8], **{name: values})
    proposal = propose(path)
    assert set(proposal.document["features"]) == {"user", "item"}
    assert proposal.document["label"] == {"negatives": {"per_positive": 1, "of": "item"}}
    (note,) = proposal.notes
    assert re.search(f"left out: '{name}', which is named like a label: .*{says}", note)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["01/31/2026 08:30", "02/01/2026 09:00"], "write ISO 8601, with a zone in every value or in none"),
        (["2026-01-31T08:30:00", "2026-02-01T09:00:00Z"], "with a zone in every value or in none"),
        ([1769848200, None], "some rows lack a value, .* fill it in"),
    ],
    ids=["American", "some with a zone", "null"],
)
def test_a_column_named_like_a_time_that_orders_nothing_is_told(values, says, tmp_path):
    proposal = propose(write(tmp_path, user=[1, 2], item=[5, 6], click=[0, 1], created_at=values))
    assert "timestamp" not in proposal.document
    (note,) = proposal.notes
    assert re.search(f"left out: 'created_at', which is named like a time: .*{says}", note)


def test_names_are_known_with_blanks_and_hyphens(tmp_path):
    """As a header with blanks behind its commas has them."""
    path = write(tmp_path, **{"user id": [1, 2], " item-id": [5, 6], " click": [0, 1], " ts": [8, 9]})
    document = infer(path)
    assert document["features"] == {
        "user": {"type": "id", "column": "user id"},
        "item": {"type": "id", "column": " item-id"},
    }
    assert (document["label"], document["timestamp"]) == ({"column": " click"}, " ts")


def test_integers_that_are_no_int64_order_nothing(tmp_path):
    path = write(tmp_path, user=[1, 2], click=[0, 1], timestamp=pa.array([2**63, 1], pa.uint64()), pos=[0, 1])
    assert infer(path)["order"] == "pos"
    assert "timestamp" not in infer(path)


def test_what_cannot_be_read_is_named_where_nothing_else_is_there(tmp_path):
    path = write(tmp_path, user=pa.array([2**63, 1], pa.uint64()), click=[0, 1])
    with pytest.raises(DataError, match=r"shows no id-like column .*left out: .*column 'user': integers of 2"):
        infer(path)


def test_what_is_no_feature_is_left_out(tmp_path):
    rows = 50
    path = write(
        tmp_path,
        user=list(range(rows)),
        tags=[[n % 3] for n in range(rows)],
        price=[n * 0.37 for n in range(rows)],
        constant=[1] * rows,
        digest=[f"{n:080x}" for n in range(rows)],
        position=[None if n == 5 else n for n in range(rows)],
        **{"app category": [n % 4 for n in range(rows)], "label": [n % 2 for n in range(rows)]},
    )
    found = infer(path)
    assert found["features"] == {
        "user": {"type": "id"},
        "tags": {"type": "id_list"},
        "app_category": {"type": "id", "column": "app category"},
    }
    assert "order" not in found  # its column has a null
    digest, price = propose(path).notes
    assert digest.endswith("column 'digest': strings of about 80 characters without words: neither ids nor texts")
    assert price.startswith("left out: 'price', whose numbers are no ids;")
    number = price.rpartition("read them: ")[2]
    parse_dataset(found | {"features": found["features"] | yaml.safe_load(number)})
    assert found["name"] == "clicks-2026"


def test_strings_of_words_are_proposed_as_texts(tmp_path):
    """Long ones, and short ones of which there are many; few names of several words are categories."""
    rows = 120
    path = write(
        tmp_path,
        item=list(range(rows)),
        review=["a long text of many words " * 5 + str(n % 3) for n in range(rows)],
        title=[None if n == 7 else f"The title {n}" for n in range(rows)],
        shelf=[f"On shelf {n % 99}" for n in range(rows)],
        code=[f"c-{n}" for n in range(rows)],
        click=[n % 2 for n in range(rows)],
    )
    proposal = propose(path)
    kinds = {name: feature["type"] for name, feature in proposal.document["features"].items()}
    assert kinds == {"item": "id", "review": "text", "title": "text", "shelf": "id", "code": "id"}
    assert "'title' has about 3 words: a text, read by its hashed n-grams" in as_yaml({}, proposal.notes)
    found = profile(parse_dataset(proposal.document))["features"]
    assert found["title"]["nulls"] == 1
    assert found["title"]["distinct"] == rows - 1 + 2
    assert found["review"]["distinct"] == 6 + 3


def test_lists_of_numbers_of_one_length_are_proposed_as_vectors(tmp_path):
    rows = 20
    numbers = [None if n == 3 else [0.5 * n, 1.0, 2.0] for n in range(rows)]
    path = write(
        tmp_path,
        item=list(range(rows)),
        fixed=pa.array(numbers, pa.list_(pa.float32(), 3)),
        lists=pa.array(numbers, pa.list_(pa.float64())),
        ragged=[[1.5] * (n % 3) for n in range(rows)],
        tags=[[n % 3, 1] for n in range(rows)],
        click=[n % 2 for n in range(rows)],
    )
    proposal = propose(path)
    vector = {"type": "vector", "dim": 3}
    expected = {"item": {"type": "id"}, "fixed": vector, "lists": vector, "tags": {"type": "id_list"}}
    assert proposal.document["features"] == expected
    (note,) = proposal.notes
    assert note.endswith("column 'ragged': lists of numbers of different lengths, but vectors all have the same length")
    found = profile(parse_dataset(proposal.document))["features"]
    lengths = [np.linalg.norm(one) for one in numbers if one is not None]
    assert found["lists"] == {
        "column": "lists",
        "nulls": 1,
        "bad": 0,
        "dim": 3,
        "mean_length": pytest.approx(np.mean(lengths)),
    }


def test_yaml_reads_back_as_the_same_spec(tmp_path):
    generate(ClickLog(num_rows=3000, num_days=3), tmp_path / "log")
    document = infer(tmp_path / "log")
    text = as_yaml(document)
    assert yaml.safe_load(text) == document
    assert parse_dataset(yaml.safe_load(text)).label.column == "click"


def test_nothing_to_learn_from(tmp_path):
    path = write(tmp_path, price=[0.5, 1.5], weight=[1.0, 2.5])
    with pytest.raises(DataError, match=r"shows no id-like column \(columns: price, weight\)"):
        infer(path)
    with pytest.raises(DataError, match="no 0/1 label, no rating, and no user and item"):
        infer(write(tmp_path, "src.parquet", src=[1, 2, 3], dst=[2, 3, 1]))
    with pytest.raises(DataError, match="has no rows"):
        infer(write(tmp_path, "empty.parquet", user=pa.array([], pa.int64())))
    with pytest.raises(DataError, match="no such file"):
        infer(tmp_path / "absent.csv")


def test_profile(tmp_path):
    path = write(
        tmp_path,
        user=[1, 1, None, 2],
        tags=["a|b", None, "b|c", ""],
        rating=[5, 3, 4, 1],
        when=pa.array([3, 1, 2, 9], pa.timestamp("s")),
    )
    spec = parse_dataset(
        {
            "name": "small",
            "uri": str(path),
            "features": {"user": {"type": "id"}, "tags": {"type": "id_list"}},
            "label": {"rule": "rating >= 4"},
            "timestamp": "when",
        }
    )
    assert profile(spec) == {
        "name": "small",
        "rows": 4,
        "files": 1,
        "bytes": path.stat().st_size,
        "label_rate": 0.5,
        "order": {"column": "when", "min": "1970-01-01T00:00:01", "max": "1970-01-01T00:00:09"},
        "features": {
            "user": {"column": "user", "nulls": 1, "distinct": 2},
            "tags": {"column": "tags", "nulls": 2, "distinct": 3},
        },
    }


def test_profile_of_values_has_their_range(tmp_path):
    path = write(tmp_path, user=[1, 2, 3], rating=[4.5, 1.0, 3.0])
    spec = {"name": "rated", "uri": str(path), "features": {"user": {}}, "label": {"value": "rating"}}
    found = profile(parse_dataset(spec))
    assert found["label_values"] == {"nulls": 0, "bad": 0, "min": 1.0, "max": 4.5}
    assert "label_rate" not in found


def test_profile_of_several_labels_has_each(tmp_path):
    rows = {"user": [1, 2, 3, 4], "click": [1, 0, None, 1], "time": [2.0, 8.5, 1.0, 3.0], "there": [1, 1, 0, 1]}
    pq.write_table(pa.table(rows | {"w": [1.0, 2.0, 1.0, 0.5]}), tmp_path / "rows.parquet")
    document = {
        "name": "rows",
        "uri": str(tmp_path / "rows.parquet"),
        "features": {"user": {}},
        "labels": {"click": {"column": "click"}, "time": {"value": "time", "loss": "exponential", "mask": "there"}},
    }
    times = {"label_values": {"nulls": 0, "bad": 0, "min": 2.0, "max": 8.5}}
    found = profile(parse_dataset(document | {"weight": "w"}))
    assert found["labels"] == {"click": {"rows": 3, "label_rate": 2 / 3}, "time": {"rows": 3, **times}}
    assert "label_rate" not in found
    document["labels"]["click"] = {"column": "time"}
    assert "row 0: the label is 2.0, neither 0 nor 1" in profile(parse_dataset(document))["label_problem"]


@pytest.mark.process
def test_no_torch():
    code = "import sys, trainer.data.sources.infer, trainer.sizing.estimate, trainer.data.sources.click_log\n"
    code += "import trainer.data.sources.figures\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.data
def test_real_files(real_data):
    assert infer(real_data / "epinions.parquet")["label"] == {"rule": "rating >= 4"}
    assert set(infer(real_data / "epinions.parquet")["features"]) == {"user", "item", "category"}
    assert infer(real_data / "ml1m.parquet")["order"] == "pos"  # timestamp is null for half of the users
    assert infer(real_data / "ipinyou_deepctr.parquet")["label"] == {"column": "label"}


def test_ratings_written_as_text_are_no_features(tmp_path):
    rows = {"user": [1, 2, 3] * 4, "item": [5, 6, 7, 8] * 3, "rating": ["4", "5", "1"] * 4}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    proposal = propose(tmp_path / "rows.parquet")
    assert set(proposal.document["features"]) == {"user", "item"}
    assert "a rule can read it: label: {rule: 'rating >= 4'}" in proposal.notes[0]


def shop(tmp_path):
    rows = write(
        tmp_path, "rows.parquet", user_id=["u1", "u2", "u1", "u3"], sku=["a", "b", "b", "a"], click=[0, 1, 1, 0],
        brand=["x", "y", "y", "x"], ts=[10, 20, 30, 40],
    )  # fmt: skip
    items = write(
        tmp_path, "items.parquet", sku=["a", "b", "c"], brand=["x", "y", "y"], kind=["k", "l", "k"],
        price=[1.5, 2.25, 3.75],
    )  # fmt: skip
    return rows, items


def test_an_item_table_and_a_job_are_proposed(tmp_path):
    rows, items = shop(tmp_path)
    proposal = propose(rows, items=items)
    assert set(proposal.document["features"]) == {"user", "item"}
    features = {"brand": {"type": "id"}, "kind": {"type": "id"}, "price": {"type": "dense", "transform": "standardize"}}
    assert proposal.document["items"] == {"uri": str(items), "on": "sku", "features": features}
    assert "'brand' is read from the item table, not from the rows" in proposal.notes
    spec = tmp_path / "mine.yaml"
    text = job_as_yaml(job_of(proposal), proposal.document)
    assert "# The user tower reads user; the item tower item, brand, kind, price.\n" in text
    spec.write_text(as_yaml(proposal.document, proposal.notes) + text)
    dataset, job = load_documents(spec)
    assert (job.against(dataset).model.loss, job.model.normalize) == ("bce", False)
    assert job.against(dataset).model.normalize
    assert (job.publish.collection, job.publish.feature) == ("rows-items", "item")
    assert job.publish.users.feature == "user"
    plain = propose(rows, name="x" * 63)
    assert "users" not in job_of(plain)["publish"]
    assert job_of(plain)["model"] == {"kind": "two_tower", "embedding_dim": 8, "residual": True}
    assert job_of(replace(plain, num_items=250))["model"]["embedding_dim"] == 16
    assert (job_of(plain)["optimizer"]["kind"], "kind" in job_of(proposal)["optimizer"]) == ("adam", False)
    spec.write_text(as_yaml(plain.document) + job_as_yaml(job_of(plain), plain.document))
    assert load_documents(spec)[1].publish.collection == "x" * 57 + "-items"


def test_a_job_without_items_says_why_it_publishes_nothing(tmp_path):
    assert infer(write(tmp_path, user_id=[1, 2, 3], video_id=[7, 8, 7], watched=[0, 1, 1]))["features"]["item"]
    proposal = propose(write(tmp_path, "pages.parquet", user_id=[1, 2, 3], url=["a", "b", "a"], watched=[0, 1, 1]))
    text = job_as_yaml(job_of(proposal), proposal.document)
    assert "# It publishes nothing without features user and item: name them, such as item: {type: id, colu" in text


def test_several_labels_are_proposed_with_a_model_that_publishes_or_without_an_item_table(tmp_path):
    path = write(
        tmp_path, user=[1, 2, 3, 1] * 4, sku=["a", "b", "c", "a"] * 4, click=[0, 1] * 8, bought=[0, 0, 0, 1] * 4
    )
    proposal = propose(path)
    lines = [yaml.safe_load(line) for line in proposal.notes[0].splitlines()[1:]]
    labels, model = (next(line[key] for line in lines if key in line) for key in ("labels", "model"))
    document = {name: part for name, part in proposal.document.items() if name != "label"} | {"labels": labels}
    job = parse_job(job_of(proposal) | {"model": model}).against(parse_dataset(document))
    assert (job.model.kind, job.model.embedding_dim, job.publish.collection) == ("mmoe", 8, "clicks-2026-items")
    items = write(tmp_path, "items.parquet", sku=["a", "b", "c"], brand=["x", "y", "y"])
    (note,) = propose(path, items=items).notes
    assert note == (
        "'bought': named like a label, and no feature here. A model of several labels reads no item table: infer "
        "without --items to train one"
    )


def test_columns_of_items_in_rows_and_tables_of_items_are_named(tmp_path):
    rows, items = shop(tmp_path)
    (note,) = propose(rows).notes
    assert note.startswith("brand has one value per item: two_tower reads features of the rows in its user tower")
    with pytest.raises(DataError, match=r"one row per 'sku', so it is an item table: .* --items THIS_FILE"):
        propose(items)
    with pytest.raises(DataError, match="4 rows and 2 values"):
        propose(rows, items=rows)
