"""What pages say of versions: why one is held, the gate's figures over time, how vectors moved, their map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import Collection, open_store
from service.web.content.collections import gate_charts, grown
from service.web.content.held import why_held
from service.web.content.versions import drift, maps
from tests.service import published

DIM = 8


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
        bound = {} if version == "v1" else {"bound": "at_least"}
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
                {"metric": "cosine", "value": cosine, "threshold": 0.85, "verdict": verdict, **bound},
            ],
        }

    manifests = [manifest("v1", 0.9, "pass"), manifest("v02", 0.95, "pass"), manifest("v3", 0.2, "fail")]
    charts = gate_charts(manifests)
    assert [chart["metric"] for chart in charts] == ["cosine", "rank", "finite"]
    assert [chart["never_moved"] for chart in charts] == [False, False, True]
    assert charts[0]["failed"]
    assert charts[0]["svg"].count('class="dot"') == 3
    (older,) = [chart for chart in gate_charts(manifests[:1]) if chart["metric"] == "cosine"]
    assert not older["at_most"]  # it has no bound, and 0.9 passed 0.85
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
        assert found["aligned"]["svg"].count('class="now"') == 60


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
    assert found["moved"][0][0] == 7
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
