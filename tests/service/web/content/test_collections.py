"""What pages say of versions: why one is held, the gate's figures over time, how vectors moved, their map."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.store import Collection, open_store
from embeddings.vectors.item_columns import ItemColumns
from service.web.content import versions
from service.web.content.collections import gate_charts, grown
from service.web.content.held import why_held
from service.web.content.item_words import coloured, words_of
from service.web.content.versions import drift, maps
from tests.service import published

DIM = 8
KINDS = {1: "red", 2: "blue", 3: "green"}


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path / "store").collection("items")


def write(collection: Collection, ids: Any, vectors: np.ndarray, **fields: Any) -> str:
    parent = collection.current()
    version = published.write(collection, ids, vectors.astype(np.float32), parent=parent, **fields)
    collection.publish(version, parent)
    return version


def test_a_reason_is_a_sentence_and_a_table():
    failed = [
        {"metric": "cosine_mean", "value": 0.2, "limit": 0.85, "bound": "at_least", "times": 5.3, "about": "vectors"}
    ]
    sentence = "The rows moved (the label rate is 0.31) and the vectors with them"
    summary = f"{sentence}: cosine_mean is 0.2, at least 0.85 is asked for."
    why = why_held({"diagnosis": {"cause": "data", "summary": summary, "advice": "look", "failed": failed}})
    assert why["summary"] == f"{sentence}."
    assert (why["failed"], why["advice"]) == (failed, "look")
    overtaken = {"diagnosis": {"summary": "The run was overtaken: v2 is served.", "advice": "again", "failed": []}}
    assert why_held(overtaken)["summary"] == "The run was overtaken: v2 is served."


def test_a_version_without_a_diagnosis_is_explained_by_its_gate_or_its_reasons():
    gate = [{"metric": f"m{number}", "value": 0.1, "threshold": 0.85, "verdict": "fail"} for number in range(5)]
    why = why_held({"gate": [*gate, {"metric": "fine", "value": 1, "threshold": 0, "verdict": "pass"}]})
    assert why["summary"] == "5 of 6 checks of the gate failed: m0, m1, m2 and 2 more."
    assert [one["limit"] for one in why["failed"]] == [0.85] * 5
    assert why_held({"reasons": ["it was overtaken"]})["summary"] == "it was overtaken"
    assert why_held({})["failed"] == []


def test_gate_over_time_has_what_failed_first_and_what_never_moved_last():
    def manifest(version: str, cosine: float | None, verdict: str) -> dict[str, Any]:
        return {
            "version": version,
            "gate": [
                {"metric": "finite", "value": 1.0, "threshold": 1.0, "bound": "at_least", "verdict": "pass"},
                {
                    "metric": "rank",
                    "value": 5.0 + len(version),
                    "threshold": 4.0,
                    "bound": "at_least",
                    "verdict": "pass",
                },
                {"metric": "cosine", "value": cosine, "threshold": 0.85, "bound": "at_least", "verdict": verdict},
            ],
        }

    manifests = [manifest("v1", 0.9, "pass"), manifest("v02", 0.95, "pass"), manifest("v3", 0.2, "fail")]
    charts = gate_charts(manifests)
    assert [chart["metric"] for chart in charts] == ["cosine", "rank", "finite"]
    assert [chart["never_moved"] for chart in charts] == [False, False, True]
    assert charts[0]["failed"]
    assert charts[0]["svg"].count('class="dot"') == 3
    assert not any(chart["at_most"] for chart in charts)
    (unknown,) = [chart for chart in gate_charts([manifest("v1", None, "fail")]) if chart["metric"] == "cosine"]
    assert "unknown" in unknown["svg"]


def test_the_map_shows_what_the_alignment_is_for(collection: Collection):
    random = np.random.default_rng(0)
    rows = published.directions(60, 1)
    rotation = np.linalg.qr(random.standard_normal((DIM, DIM)))[0]
    ids = np.arange(60)
    own = rows @ rotation.T  # what the run learnt: the rotation turns it into what is served
    first = write(collection, ids, rows)
    raw = write(collection, ids, own)
    turned = write(collection, ids, rows, rotation=rotation)
    different = float(np.einsum("nd,nd->n", rows, own).mean())
    assert different < 0.9
    for before, aligned, unaligned in ((first, 1.0, different), (raw, different, 1.0)):
        found = maps(collection, collection.open(before), collection.open(turned))
        assert found is not None
        assert found["aligned"]["cosine"] == pytest.approx(aligned, abs=1e-6)
        assert found["unaligned"]["cosine"] == pytest.approx(unaligned, abs=1e-6)
        assert found["aligned"]["svg"].count('class="now series-2"') == 60
        assert (found["num_items"], found["num_found"], found["dim"], found["offered"]) == (60, 60, DIM, [])
        assert 2 / DIM < found["share"] < 1


def columns_for(ids: np.ndarray) -> ItemColumns:
    """A kind, a list and a title of each item; 0 is in no table, and every fifth has no kind."""
    kinds = pa.array([KINDS.get(one % 5 and one % 3 + 1) for one in ids[1:]], pa.large_string())
    lists = pa.array([[one % 2, 7] for one in ids[1:]], pa.large_list(pa.int64()))
    titles = pa.array([f"<title> {one}" for one in ids[1:]], pa.large_string())
    found = {"kind": kinds, "lists": lists, "title": titles, "none": pa.nulls(len(ids) - 1, pa.large_string())}
    return ItemColumns(ids[1:], found).aligned(ids)


def test_items_have_their_words_and_the_colours_of_a_column(collection: Collection, monkeypatch: pytest.MonkeyPatch):
    ids = np.arange(60)
    columns = columns_for(ids)
    assert words_of(columns, [4, 0, 5, 99]) == ["<title> 4 · blue · 0, 7", "", "<title> 5 · 1, 7", ""]
    assert words_of(None, [4, 0]) == ["", ""]
    before = write(collection, ids, published.directions(60, 1))
    after = write(collection, ids, published.directions(60, 1))
    readers = collection.open(before), collection.open(after)
    monkeypatch.setattr(versions, "MAP_ITEMS", 30)
    found = maps(collection, *readers, columns, "kind")
    assert found is not None
    assert (found["num_items"], found["num_found"]) == (30, 60)
    assert (found["offered"], found["colour"]) == (["kind", "lists"], "kind")
    drawn = np.unique(np.linspace(0, 59, 30).astype(int))
    counts = Counter([KINDS.get(one % 5 and one % 3 + 1, "none") for one in drawn])
    assert dict(found["legend"]) == counts
    svg = found["aligned"]["svg"]
    assert [svg.count(f"now series-{place}") for place in range(1, 5)] == [number for _, number in found["legend"]]
    assert f"<title>{drawn[-1]} &lt;title&gt; {drawn[-1]}" in svg
    plain = maps(collection, *readers, columns, "title")  # as many values as items
    assert plain is not None
    assert (plain["colour"], plain["legend"]) == (None, [])
    moved = drift(*readers, columns)
    assert moved is not None
    assert moved["moved"][0][1] == words_of(columns, [moved["moved"][0][0]])[0]


def test_rare_values_share_the_last_colour():
    values = [letter for number, letter in enumerate("abcdefgh", 1) for _ in range(number)]
    legend, colours = coloured(values)
    assert legend == [("h", 8), ("g", 7), ("f", 6), ("e", 5), ("d", 4), ("others", 6)]
    assert [colours[values.index(letter)] for letter in "hgfedcba"] == [1, 2, 3, 4, 5, 6, 6, 6]
    legend, colours = coloured(values[15:])
    assert legend == [("h", 8), ("g", 7), ("f", 6)]
    assert set(colours) == {1, 2, 3}


def test_a_map_says_why_it_has_one_half(collection: Collection):
    ids = np.arange(20)
    before = write(collection, ids, published.directions(20, 1))
    plain = write(collection, ids, published.directions(20, 2))
    found = maps(collection, collection.open(before), collection.open(plain))
    assert found is not None
    assert found["unaligned"] is None
    assert "was not rotated" in found["note"]
    lost = write(collection, ids, published.directions(20, 3), alignment={"kind": "procrustes"})
    found = maps(collection, collection.open(before), collection.open(lost))
    assert found is not None
    assert "is not stored" in found["note"]
    others = write(collection, np.arange(100, 110), published.directions(10, 1))
    assert maps(collection, collection.open(before), collection.open(others)) is None
    assert drift(collection.open(before), collection.open(others)) is None


def test_drift_counts_what_came_and_went_and_finds_what_moved(collection: Collection):
    rows = published.directions(30, 1)
    before = write(collection, np.arange(30), rows)
    moved = rows.copy()
    moved[7] = -moved[7]
    after = write(collection, np.arange(5, 40), np.concatenate([moved[5:], published.directions(10, 5)]))
    found = drift(collection.open(before), collection.open(after))
    assert found is not None
    assert (found["num_items"], found["came"], found["went"]) == (25, 10, 5)
    assert found["moved"][0] == (7, "", pytest.approx(-1.0, abs=1e-6))
    assert found["least"] == pytest.approx(-1.0, abs=1e-6)
    assert found["mean"] == pytest.approx(23 / 25, abs=1e-6)


def test_a_version_is_told_by_how_much_it_grew(collection: Collection):
    random = np.random.default_rng(0)
    sizes = (20, 25, 24, 24)
    versions = [write(collection, np.arange(size), random.standard_normal((size, DIM))) for size in sizes]
    manifests = {manifest["version"]: manifest for manifest in collection.versions()}
    said = [grown(manifests, version) for version in versions]
    first, second, third, _ = versions
    assert said == ["", f"5 more than {first}", f"1 fewer than {second}", f"as many as {third}"]
    assert grown(manifests, None) == ""
