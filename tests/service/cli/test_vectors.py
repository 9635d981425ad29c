"""Versions and vectors on the command line: list, fetch, promote."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.vectors.item_columns import ItemColumns
from tests.service import published
from tests.service.serving import Run, Served
from tests.support.query_towers import tower_of

pytestmark = pytest.mark.process


def test_versions_fetch_and_promote(run: Run, served: Served, tmp_path: Path):
    first, _ = published.publish(served.settings, "films", seed=1)
    second, _ = published.publish(served.settings, "films", seed=2)
    held = published.hold(served.settings, "films")
    lines = run("versions", "films").lines
    assert [line[:3] for line in lines[1:]] == [
        ["", held, "held"],
        ["*", second, "published"],
        ["", first, "superseded"],
    ]
    assert "mean_cosine 0.10 is below 0.85" in lines[1][-1]
    done = run("fetch", "films", "10", "11", "10")
    assert [line[:2] for line in done.lines[1:]] == [["10", "found"], ["11", "missing"], ["10", "found"]]
    assert f"version {second}, view films_rff, 16 coordinates" in done.err
    items = run("fetch", "films_rff", "10", "11", "--version", first, "--json").json
    assert (items["version"], items["view"]) == (first, "films_rff")
    assert len(items["items"][0]["vector"]) == 16
    assert items["items"][1] == {"id": 11, "status": "missing", "vector": None}
    refused = run("fetch", "films", "10", "--raw")
    assert (refused.code, "'films' has no identity view" in refused.err) == (1, True)
    published.store_at(served.settings).collection("films").create_view("films_raw", kind="identity")
    raw = run("fetch", "films", "10", "--raw", "--json").json
    assert (raw["view"], len(raw["items"][0]["vector"])) == ("films_raw", published.DIM)
    refused = run("promote", "films", held, "--reason", "trying")
    assert refused.code == 1
    assert "--override-gate" in refused.err
    assert "override_gate" not in refused.err
    assert run("promote", "films", first, "--reason", "rollback", "--if-current", first).code == 1
    assert run("promote", "films", first, "--reason", "rollback", "--if-current", second).code == 0
    assert run("versions", "films", "--json").json[-1]["state"] == "published"
    for ending in (".parquet", ".arrow"):
        file = tmp_path / f"vectors{ending}"
        done = run("fetch", "films", "10", "11", "-o", str(file))
        assert done.code == 0
        assert done.err == f"2 rows, version {first}, view films_rff, 16 coordinates, written to {file}\n"
        table = pq.read_table(file) if ending == ".parquet" else pa.ipc.open_file(file).read_all()
        assert table.column("id").to_pylist() == [10, 11]
    assert run("fetch", "films", "10", "-o", str(tmp_path / "vectors.csv")).code == 2
    (line,) = [line for line in run("collections").lines[1:] if line[0] == "films"]
    assert line[1] == first
    near = run("neighbors", "films", "10", "-k", "3").lines[1:]
    assert len(near) == 3
    assert "10" not in [line[0] for line in near]
    assert run("neighbors", "films", "ten").code == 2


def test_recommend_writes_items_for_the_users_of_a_file(
    run: Run, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = published.users_of([f"u{number}" for number in range(5)], [10, 20])
    version, vectors = published.publish(served.settings, "songs", users=everybody)
    file, out = tmp_path / "users.parquet", tmp_path / "items.parquet"
    pq.write_table(pa.table({"user": ["u3", "nobody", "u0", "u1", "u3"], "age": [1, 2, 3, 4, 5]}), file)
    monkeypatch.setattr("service.cli.vectors.BLOCK_USERS", 2)
    done = run("recommend", "songs", str(file), "--k", "4", "--exclude-seen", "--out", str(out), "--json").json
    assert done == {"collection": "songs", "version": version, "file": str(out), "users": 5, "unknown": 1}
    table = pq.read_table(out)
    assert table.schema.metadata[b"evenkeel.version"] == version.encode()
    scores = np.asarray(everybody.vectors @ vectors.T)
    scores[0, :2] = -np.inf  # the first has seen these
    order = np.argsort(-scores, axis=1)[:, :4]
    expected = [(10 * (order[number] + 1)).tolist() for number in (3, 0, 1)]
    assert table.column("user").to_pylist() == ["u3", "nobody", "u0", "u1", "u3"]
    assert table.column("items").to_pylist() == [expected[0], [], expected[1], expected[2], expected[0]]
    np.testing.assert_allclose(table.column("scores")[2].as_py(), scores[0][order[0]], rtol=1e-5)
    pq.write_table(pa.table({"id": ["u3"]}), file)
    refused = run("recommend", "songs", str(file), "--out", str(tmp_path / "none.parquet"))
    assert (refused.code, "has no column 'user' (there are id)" in refused.err) == (1, True)
    assert run("recommend", "songs", str(file), "--column", "id", "-o", str(out)).code == 0
    assert len(pq.read_table(out).column("items")[0]) == 10
    published.publish(served.settings, "alone")
    refused = run("recommend", "alone", str(file), "--column", "id", "--out", str(tmp_path / "none.parquet"))
    assert (refused.code, "has no users" in refused.err) == (1, True)
    assert not (tmp_path / "none.parquet").exists()


def test_recommend_by_histories_and_features_and_the_tower(run: Run, served: Served, tmp_path: Path) -> None:
    tower, rows = published.tower_of_items()
    version, vectors = published.publish(served.settings, "tunes", users=published.users_of([1], tower=tower))
    file, out = tmp_path / "histories.parquet", tmp_path / "items.parquet"
    pq.write_table(pa.table({"item": [[10, 30], [7]], "note": [1, 2]}), file)
    arguments = ("recommend", "tunes", str(file), "--k", "3", "--out", str(out))
    done = run(*arguments, "--by", "histories", "--exclude-seen", "--json").json
    assert done == {"collection": "tunes", "version": version, "file": str(out), "users": 2, "unknown": 1}
    table = pq.read_table(out)
    assert table.column_names == ["item", "items", "scores"]
    order = [10 * int(row + 1) for row in np.argsort(-(vectors @ (rows[0] + rows[2]))) if row not in (0, 2)]
    assert table.column("items").to_pylist() == [order[:3], []]
    said = run("tower", "tunes", str(tmp_path / "tower.onnx")).out
    assert "which reads histories (item)" in said
    assert (tmp_path / "tower.onnx").read_bytes() == tower.data
    refused = run(*arguments, "--by", "features")
    assert (refused.code, "reads histories, not features" in refused.err) == (1, True)
    assert run(*arguments, "--by", "names").code == 2

    of_features = tower_of({"country": (["de", "fr"], rows[:2])})
    published.publish(served.settings, "tunes", users=published.users_of([1], tower=of_features))
    refused = run(*arguments, "--by", "features")
    assert (refused.code, "has none of the features country" in refused.err) == (1, True)
    pq.write_table(pa.table({"country": ["fr", None], "note": [1, 2]}), file)
    assert run(*arguments, "--by", "features").code == 0
    table = pq.read_table(out)
    assert table.column_names == ["country", "items", "scores"]
    best = [10 * int(row + 1) for row in np.argsort(-(vectors @ rows[1]))[:3]]
    assert table.column("items").to_pylist() == [best, []]
    columns = ItemColumns(np.arange(1, 51) * 10, {"brand": pa.array(np.arange(1, 51) % 4)})
    everybody = dataclasses.replace(published.users_of([1]), columns=columns)
    published.publish(served.settings, "tunes", users=everybody)
    pq.write_table(pa.table({"user": [1]}), file)
    arguments = ("recommend", "tunes", str(file), "--k", "50", "--out", str(out))
    assert run(*arguments, "--filter", "brand=2,3").code == 0
    assert sorted(pq.read_table(out)["items"][0].as_py()) == [10 * key for key in range(1, 51) if key % 4 in (2, 3)]
    assert run(*arguments, "--filter", "brand").code == 2
    published.publish(served.settings, "alone")
    refused = run("tower", "alone", str(tmp_path / "none.onnx"))
    assert (refused.code, "has no users" in refused.err) == (1, True)
    assert not (tmp_path / "none.onnx").exists()


def test_versions_and_promote_say_how_the_model_does(run: Run, served: Served):
    first, _ = published.publish(served.settings, "books", seed=1)
    held = published.hold(served.settings, "books", extra={"comparison": published.COMPARISON})
    lines = run("versions", "books").lines
    column = lines[0].index("MODEL (SERVED)")
    assert {line[1]: line[column] for line in lines[1:]} == {held: "auc 0.7517 (0.7877)", first: ""}
    done = run("promote", "books", held, "--reason", "all the same", "--override-gate")
    assert "compared with the model of v000001" in done.out
    (row,) = (line for line in done.lines if line[0] == "country=de")
    assert row == ["country=de", "auc", "0.6517", "0.7877", "-0.0411", "-0.0309", "", "5000"]
    assert "compared with" not in run("promote", "books", first, "--reason", "back").out


def test_an_earlier_generation_is_fetched_by_its_name(run: Run, served: Served):
    old, vectors = published.publish(served.settings, "albums", seed=1)
    new, _ = published.change_model(served.settings, "albums")
    items = run("fetch", "albums@g1", "10", "11", "--json").json
    assert (items["version"], items["view"], items["items"][1]["status"]) == (new, "albums@g1", "missing")
    assert float(np.dot(items["items"][0]["vector"], vectors[0])) > 0.9
    assert "view albums_rff@g1, 16 coordinates" in run("fetch", "albums_rff@g1", "10").err
    assert f"{new}: views @g1 are served, with a mean cosine of" in run("versions", "albums").err
    assert "views @g1 are served" in run("promote", "albums", new, "--reason", "again").err
    refused = run("fetch", "albums@g7", "10")
    assert (refused.code, "has no map to generation 7" in refused.err) == (1, True)
    assert run("promote", "albums", old, "--reason", "back").code == 0
    assert run("fetch", "albums@g1", "10", "--json").json["items"][0]["vector"] == pytest.approx(vectors[0].tolist())


def test_the_metric_of_a_model_stands_beside_that_of_the_version_before(run: Run, served: Served):
    """In versions, collections, promotions and the collection's JSON; a canary is proposed until there is one."""
    first, _ = published.publish(served.settings, "judged", num_items=400)
    extra = {"quality": published.QUALITY, "proposed_canary": "no canary watches judged: add one"}
    second, _ = published.publish(served.settings, "judged", num_items=400, seed=1, extra=extra)
    done = run("versions", "judged")
    column = done.lines[0].index("MODEL (SERVED)")
    assert {line[1]: line[column] for line in done.lines[1:]} == {second: "auc 0.7312 (0.7401) overfits", first: ""}
    told = "model: auc 0.7312 (validation) in epoch 10 of 10; v000001, on its own rows: 0.7401 (validation)"
    overfits = f"overfits: {published.QUALITY['overfits']}"
    assert done.err.splitlines() == [told, overfits, extra["proposed_canary"]]
    listed = run("collections").lines
    assert next(row for row in listed if row[0] == "judged")[listed[0].index("MODEL (BEFORE)")].startswith("auc 0.7312")
    held = published.hold(served.settings, "judged", extra=extra)
    assert overfits in run("promote", "judged", held, "--reason", "all the same", "--override-gate").err
    labels = served.data / "judged.parquet"
    pq.write_table(pa.table({"id": np.arange(1, 401) * 10, "label": np.arange(400) % 2}), labels)
    run("promote", "judged", second, "--reason", "back")
    assert run("canaries", "add", "judged", "half", str(labels)).code == 0
    assert run("versions", "judged").err.splitlines() == [told, overfits]


def test_fetch_of_what_is_not_there(run: Run, served: Served):
    published.publish(served.settings, "songs")
    done = run("fetch", "nothing", "1")
    assert done.code == 1
    assert "there is no collection 'nothing'" in done.err
    assert "'evenkeel collections' lists them" in done.err
    assert run("fetch", "songs", "x").code == 2
    assert run("versions", "nothing").code == 1
