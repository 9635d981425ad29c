"""Items of highest score by an index: nearly those of the exact search, and never one that is left out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embeddings.store import Collection, build_index, open_store
from embeddings.store.item_scores import ScoreIndex
from embeddings.store.users import _MOST_CANDIDATES, Recommended, Recommender
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import CARRIED, MISSING, ItemVectors, unit_rows
from embeddings.vectors.user_vectors import SeenLists, UserVectors

D, ITEMS, USERS, K = 16, 6_000, 60, 20
GONE = np.arange(0, ITEMS, 50)
"""Rows of items without a vector."""


def publish(
    collection: Collection, *, lengths: float = 0.05, scored: bool = False, dtype: str = "float32", **options: Any
) -> Recommender:
    """Publish items around centres, and users near centres who have seen their best item and 49 others.

    ``lengths``: standard deviation of the logarithm of items' lengths.
    """
    random = np.random.default_rng(0)
    centres = random.standard_normal((100, D))
    rows = unit_rows(centres[random.integers(0, 100, ITEMS)] + 0.5 * random.standard_normal((ITEMS, D)))[0]
    rows *= random.lognormal(sigma=lengths, size=(ITEMS, 1))
    vectors, norms = unit_rows(rows.astype(np.float32))
    biases = 0.1 * random.standard_normal(ITEMS).astype(np.float32)
    users = centres[random.integers(0, 100, USERS)] + 0.5 * random.standard_normal((USERS, D))
    users = users.astype(np.float32)
    own = vectors * norms[:, None]
    if scored:
        own = unit_rows(own + 0.02 * random.standard_normal(own.shape).astype(np.float32))[0] * norms[:, None]
    statuses = np.full(ITEMS, CARRIED, dtype=np.uint8)
    statuses[GONE], own[GONE] = MISSING, 0
    lists = random.integers(0, ITEMS, (USERS, 50))
    lists[:, 0] = (users @ own.T).argmax(axis=1)
    seen = SeenLists(np.arange(ITEMS), np.sort(lists, axis=1).ravel(), np.arange(USERS + 1) * 50)
    items = ItemVectors(np.arange(ITEMS), vectors, statuses=statuses, norms=norms, biases=biases)
    columns = ItemColumns(np.arange(ITEMS), {"half": pa.array(np.arange(ITEMS) % 2)})
    published = UserVectors(
        np.arange(USERS), users, seen, scored=unit_rows(own)[0] if scored else None, columns=columns, **options
    )
    collection.publish(collection.write(items, users=published, dtype=dtype), None)
    return collection.recommender()


def indexed(recommender: Recommender, folder: Path) -> ScoreIndex:
    assert recommender.build_index(folder / "scores.json") >= 0.99
    return ScoreIndex(recommender.items, folder / "scores.json")


@pytest.fixture(
    params=[{}, {"unit_items": True}, {"scored": True}, {"dtype": "float16"}], ids=["norms", "unit", "scored", "half"]
)
def recommender(request: pytest.FixtureRequest, tmp_path: Path) -> Recommender:
    return publish(open_store(tmp_path / "store").collection("items"), **request.param)


def overlap(found: Recommended, exact: Recommended) -> float:
    pairs = zip(found.items, exact.items, strict=True)
    return float(np.mean([len(set(mine) & set(best)) / len(best) for mine, best in pairs]))


def test_an_index_finds_nearly_the_best_items_with_their_scores(recommender: Recommender, tmp_path: Path) -> None:
    index, users = indexed(recommender, tmp_path), np.arange(USERS)
    exact = recommender.top(users, K, exclude=[7, 8], exclude_seen=True)
    found = recommender.top(users, K, exclude=[7, 8], exclude_seen=True, index=index)
    assert (exact.exact, found.exact) == (True, False)
    assert overlap(found, exact) >= 0.99
    for mine, scores, best, values in zip(found.items, found.scores, exact.items, exact.scores, strict=True):
        assert len(mine) == K
        own = dict(zip(best, values, strict=True))
        common = [place for place, item in enumerate(mine) if item in own]
        np.testing.assert_allclose(
            [scores[place] for place in common], [own[mine[place]] for place in common], rtol=1e-4, atol=1e-4
        )


def test_items_left_out_are_not_found_by_an_index(recommender: Recommender, tmp_path: Path) -> None:
    index, users = indexed(recommender, tmp_path), np.arange(USERS)
    plain = recommender.top(users, K, index=index)
    assert not {item for items in plain.items for item in items} & set(GONE.tolist())
    without = [items[1] for items in plain.items][:5]
    found = recommender.top(users, K, exclude=without, exclude_seen=True, index=index)
    seen = recommender.users.seen
    had_among_best = 0
    for user, items in enumerate(found.items):
        had = seen.positions[seen.starts[user] : seen.starts[user + 1]]
        assert not set(items) & {*without, *had.tolist()}
        assert len(items) == K
        had_among_best += bool(set(had.tolist()) & set(plain.items[user]))
    assert had_among_best


def test_filters_and_long_lists_are_searched_exactly(tmp_path: Path) -> None:
    recommender = publish(open_store(tmp_path / "store").collection("items"))
    index = indexed(recommender, tmp_path)
    filtered = recommender.top([3], K, filter={"half": [1]}, index=index)
    assert filtered == recommender.top([3], K, filter={"half": [1]})
    assert recommender.top([3], _MOST_CANDIDATES // 2, index=index).exact
    assert recommender.top([3], K, index=ScoreIndex(recommender.items)).exact
    assert recommender.top([USERS], K, index=index).items == [[]]


def test_an_index_of_other_items_is_refused(tmp_path: Path) -> None:
    recommender = publish(open_store(tmp_path / "store").collection("items"))
    indexed(recommender, tmp_path)
    collection = open_store(tmp_path / "store").collection("others")
    vectors = unit_rows(np.random.default_rng(1).standard_normal((40, D)).astype(np.float32))[0]
    nobody = SeenLists(np.arange(40), np.empty(0, np.int64), np.zeros(2, np.int64))
    users = UserVectors([1], vectors[:1], nobody)
    collection.publish(collection.write(ItemVectors(np.arange(40), vectors), users=users), None)
    with pytest.raises(ValueError, match="not the index of these"):
        ScoreIndex(collection.recommender().items, tmp_path / "scores.json")
    for file, content in (("scores.usearch", b"no index at all"), ("scores.json", b"{}"), ("scores.json", b"")):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match="index"):
            ScoreIndex(recommender.items, tmp_path / "scores.json")


def test_an_index_that_misses_too_many_items_is_not_used(tmp_path: Path) -> None:
    recommender = publish(open_store(tmp_path / "store").collection("items"), lengths=2.0)
    path = tmp_path / "scores.json"
    share = recommender.build_index(path)
    assert share < 0.99
    index = ScoreIndex(recommender.items, path)
    assert (index.is_built, index.exact) == (True, True)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["scores.json"]
    assert recommender.top([3], K, index=index) == recommender.top([3], K)


def test_an_index_built_while_ids_are_erased_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = open_store(tmp_path / "store").collection("items")
    recommender = publish(collection)
    build, path = Recommender.build_index, tmp_path / "indexes" / "scores.json"

    def build_slowly(self: Recommender, path: Path, *, threads: int = 1) -> float:
        share = build(self, path, threads=threads)
        assert path.with_suffix(".usearch").exists()
        collection.erase([7], "they asked")
        return share

    monkeypatch.setattr(Recommender, "build_index", build_slowly)
    monkeypatch.setenv("EVENKEEL_STORE_URL", str(tmp_path / "store"))
    version, identity = recommender.version, recommender.reader.manifest.identity
    monkeypatch.setattr(sys, "argv", ["build_index", "items", version, identity, str(path), "--scores"])
    assert build_index.main() == 0
    assert list(path.parent.iterdir()) == []
