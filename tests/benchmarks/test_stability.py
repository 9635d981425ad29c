"""The faults do what they say, and the study's lines become the tables of a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.stability import broken_promises, usual_of
from benchmarks.stability_tables import BEGIN, END, put_into, tables
from benchmarks.support.faults import Fault, faults_of_rows, shuffled, some
from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.gate_metrics import compare
from embeddings.refresh.procrustes import procrustes, rotate
from embeddings.refresh.publish import Settings, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors

N, D = 2000, 32


def items(seed: int = 0) -> ItemVectors:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((N, D)).astype(np.float32)
    evidence = np.ones(N, dtype=bool)
    evidence[:20] = False
    return ItemVectors(np.arange(N), vectors, evidence=evidence, counts=np.arange(N) % 50)


def made(fault: Fault, severity: float) -> tuple[ItemVectors, ItemVectors]:
    honest = items()
    return honest, fault.make(honest, severity, np.random.default_rng(3))


FAULTS = faults_of_rows(items(9))


def test_there_are_ten_faults_of_rows_and_the_eleventh_is_trained() -> None:
    assert len({fault.name for fault in FAULTS}) == 10
    assert all(list(fault.severities) == sorted(fault.severities) for fault in FAULTS)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.unit == "of the items"], ids=lambda f: f.name)
def test_a_share_of_the_items_is_what_changes(fault: Fault) -> None:
    honest, broken = made(fault, 0.1)
    if fault.name == "truncated collection":
        assert len(broken) == len(honest) - round(0.1 * (N - 20))
        return
    changed = ~np.all(np.asarray(honest.vectors) == np.asarray(broken.vectors), axis=1)
    # Of a permutation, an item may keep its place.
    assert changed.mean() == pytest.approx(0.1, abs=0.005)
    assert np.array_equal(honest.keys, broken.keys)


def test_permutations_lose_nothing() -> None:
    for name in ("shuffled ids", "items swapped", "wrong id map"):
        (fault,) = [fault for fault in FAULTS if fault.name == name]
        honest, broken = made(fault, 1.0)
        assert not np.array_equal(honest.vectors, broken.vectors)
        assert np.array_equal(np.sort(np.asarray(honest.vectors), axis=0), np.sort(np.asarray(broken.vectors), axis=0))


def test_turned_is_a_rotation_that_alignment_takes_back() -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "skipped alignment"]
    honest, broken = made(fault, 1.0)
    rotation = procrustes(broken.vectors, honest.vectors)
    turned_back = rotate(broken.vectors, rotation)
    assert decide(compare(honest, ItemVectors(honest.keys, turned_back))).passed
    little, much = (compare(honest, made(fault, part)[1])["cosine_mean"] for part in (0.05, 0.2))
    assert 1 > little > much > 0.5


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_largest_of_each_fault_is_caught_where_refreshes_are_quiet(fault: Fault) -> None:
    quiet = Limits({"newly_carried": 0.05, "norm_change_p95": 0.1, "cosine_low": 0.005})
    honest, broken = made(fault, fault.severities[-1])
    assert decide(compare(honest, honest), quiet).passed
    assert decide(compare(honest, broken), quiet).failed


def test_items_without_evidence_are_left_alone() -> None:
    honest = items()
    rows = some(honest, 1.0, np.random.default_rng(0))
    assert rows.min() == 20
    assert np.array_equal(shuffled(honest, 1.0, np.random.default_rng(0)).vectors[:20], honest.vectors[:20])


# --- lines and tables ------------------------------------------------------------------------------------------------

NULLS = {"cosine_mean": {"median": 0.98, "spread": 0.001, "refreshes": 5, "limit": 0.95}}


def line(case: str, **fields: Any) -> dict[str, Any]:
    honest = {"refreshes": 20, "held": 0, "held_by": [], "cosine_mean": [0.97, 0.99]}
    return {"model": "bpr", "case": case, **({} if case in ("usual", "fault") else honest), **fields}


LINES = [
    line("usual", metrics=NULLS),
    line("unseen"),
    line("shifted", refreshes=9),
    line("growing", refreshes=3),
    line("retrained", refreshes=3, held=3, held_by=[["cosine_mean"]] * 3),
    *(
        line(
            "fault", fault="NaN rows", severity=severity, unit="of the items", caught_by=caught,
            caught_by_starting_limits=[],
        )
        for severity, caught in ((0.001, []), (0.01, ["finite"]), (0.1, ["finite", "coverage", "carried"]))
    ),
    line("fault", fault="shy", severity=3, unit="axes", caught_by=[], caught_by_starting_limits=[]),
]  # fmt: skip


def test_tables_tell_what_was_caught_and_what_was_not() -> None:
    text = tables(LINES, "today")
    assert "    - bpr: 1 % by `finite`; **let through** 0.1 %; by starting limits none\n" in text
    assert "- **shy (axes)**\n    - bpr: **none** up to 3" in text
    assert "0 of 20 held; mean cosine 0.970 to 0.990" in text
    assert "3 of 3 held by `cosine_mean`" in text
    assert "| `cosine_mean` | 0.98 ± 0.001 (0.95) |" in text


def test_what_is_usual_is_what_the_published_refreshes_of_a_collection_were(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for seed in range(6):
        noise = 0.05 * np.random.default_rng(seed).standard_normal((N, D)).astype(np.float32)
        candidate = ItemVectors(np.arange(N), items().vectors + noise)
        current = store.collection("items").current()
        publish_candidate(store, "items", candidate, Settings(), parent_version=current, model="bpr")
    found = usual_of(store.collection("items"), "bpr")["cosine_mean"]
    assert (found["refreshes"], found["median"] > 0.99) == (5, True)
    assert found["limit"] == pytest.approx(found["median"] - 0.04)


def test_tables_are_put_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "stability.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(document, "new")
    assert document.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    document.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        put_into(document, "new")


@pytest.mark.parametrize(("case", "held", "broken"), [("unseen", 2, True), ("unseen", 1, False), ("growing", 1, True)])
def test_promises_can_be_broken(case: str, held: int, broken: bool) -> None:
    assert not broken_promises(LINES)
    lines = [{**one, "held": held} if one["case"] == case else one for one in LINES]
    assert bool(broken_promises(lines)) == broken
