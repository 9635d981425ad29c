"""Kernel alignment and Nadaraya-Watson against their sums written out, and in a version's report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from embeddings.refresh import probe
from embeddings.refresh.kernel_alignment import MAX_PAIRED, diagnostics, kernel_alignment, nadaraya_watson
from embeddings.refresh.publish import Gate, RefreshRequest, Settings, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors

N, D, C = 60, 6, 3
rng = np.random.default_rng(0)
CLASSES = rng.integers(0, C, N)
VECTORS = 2.0 * np.eye(C, D)[CLASSES] + rng.standard_normal((N, D))


def k(left: np.ndarray, right: np.ndarray, sigma: float) -> float:
    distance = left / np.linalg.norm(left) - right / np.linalg.norm(right)
    return math.exp(-(sigma**2) * float(distance @ distance) / 2)


def test_alignment_is_the_sum_of_the_paper() -> None:
    pairs = [(i, j) for i in range(N) for j in range(N) if i != j]
    wanted = sum(k(VECTORS[i], VECTORS[j], 0.7) for i, j in pairs if CLASSES[i] == CLASSES[j]) / (N * (N - 1))
    same = [k(VECTORS[i], VECTORS[j], 0.7) for i, j in pairs if CLASSES[i] == CLASSES[j]]
    everything = [k(VECTORS[i], VECTORS[j], 0.7) for i, j in pairs]
    aligned, lift = kernel_alignment(VECTORS, CLASSES, 0.7)
    assert aligned == pytest.approx(wanted, rel=1e-12)
    assert lift == pytest.approx(np.mean(same) / np.mean(everything), rel=1e-12)
    assert lift > 1.05
    assert all(math.isnan(one) for one in kernel_alignment(VECTORS[:C], np.arange(C)))


def test_nadaraya_watson_is_the_vote_of_the_paper() -> None:
    known, asked = slice(0, 40), slice(40, N)
    wanted = []
    for row in VECTORS[asked]:
        votes = np.zeros(C)
        for other, label in zip(VECTORS[known], CLASSES[known], strict=True):
            votes[label] += k(row, other, 2.0)
        wanted.append(votes.argmax())
    answers = nadaraya_watson(VECTORS[known], CLASSES[known], VECTORS[asked], C, sigmas=(2.0,))
    assert answers.tolist() == wanted


def test_the_bandwidth_is_the_one_that_the_known_items_want() -> None:
    # So wide a kernel that all items vote alike finds the frequent class alone.
    frequent = np.where(np.arange(N) % 4 == 0, CLASSES, 0)
    wide = nadaraya_watson(VECTORS, frequent, VECTORS, C, sigmas=(0.01,))
    chosen = nadaraya_watson(VECTORS, CLASSES, VECTORS, C, sigmas=(0.01, 3.0))
    assert set(wide.tolist()) == {0}
    assert (chosen == CLASSES).mean() > 0.7


def test_neither_changes_with_a_rotation_and_both_know_when_there_is_nothing_to_know() -> None:
    turned = VECTORS @ np.linalg.qr(rng.standard_normal((D, D)))[0]
    held_out = np.arange(N) % 4 == 0
    found, again = (diagnostics(rows, CLASSES, held_out, C) for rows in (VECTORS, turned))
    assert again == pytest.approx(found, rel=1e-9)
    many = rng.standard_normal((3 * MAX_PAIRED, D))
    nothing = diagnostics(many, rng.integers(0, C, len(many)), rng.random(len(many)) < 0.25, C)
    assert nothing["alignment_lift"] == pytest.approx(1, abs=0.02)
    # Of some 750 guesses among three: five standard deviations.
    assert nothing["nw_accuracy"] == pytest.approx(1 / C, abs=0.09)
    assert math.isnan(diagnostics(VECTORS, CLASSES, np.zeros(N, dtype=bool), C)["nw_accuracy"])


def test_they_stand_in_the_report_of_a_version_and_hold_nothing(tmp_path: Path) -> None:
    classes = np.random.default_rng(1).integers(0, C, 600)
    rows = (2.0 * np.eye(C, D)[classes] + np.random.default_rng(2).standard_normal((600, D))).astype(np.float32)
    store = open_store(tmp_path)

    def publish(vectors: np.ndarray) -> dict[str, float]:
        items = ItemVectors(np.arange(600), vectors)
        parent = store.collection("items").current()
        end = publish_candidate(
            store, "items", RefreshRequest(items, Settings(gate=Gate("report")), parent_version=parent)
        )
        judged = {check["metric"] for check in end.gate}
        assert not [name for name in judged if "alignment" in name or "nw_accuracy" in name]
        return end.metrics

    publish(rows)
    probe.register(store.collection("items"), "kind", np.arange(600), classes.tolist())
    honest, shuffled = publish(rows), publish(rows[np.random.default_rng(3).permutation(600)])
    (manifest,) = [one for one in store.collection("items").versions() if one["version"] == "v000003"]
    assert manifest["metrics"]["canary_nw_accuracy[kind]"] == shuffled["canary_nw_accuracy[kind]"]
    assert honest["canary_nw_accuracy[kind]"] > 0.7 > 0.45 > shuffled["canary_nw_accuracy[kind]"]
    assert honest["canary_alignment_lift[kind]"] > 1.02 > shuffled["canary_alignment_lift[kind]"]
    assert 0 < shuffled["canary_alignment[kind]"] < honest["canary_alignment[kind]"] < 1
