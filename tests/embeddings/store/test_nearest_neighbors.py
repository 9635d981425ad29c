"""Nearest items: the exact search against a plain sort, the index against the exact search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embeddings.store import open_store
from embeddings.store.nearest_neighbors import NeighborSearch, build_index
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors


def clustered(num_items: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows about centres, as item vectors lie, of any length. float32 [num_items, dim]."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((num_items // 50, dim), dtype=np.float32)
    rows = centers[generator.integers(0, len(centers), num_items)]
    rows += 0.7 * generator.standard_normal((num_items, dim), dtype=np.float32)
    return rows * generator.uniform(0.1, 10, (num_items, 1)).astype(np.float32)


def reference(vectors: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    rows = vectors.astype(np.float64)
    cosines = rows @ query / np.maximum(np.linalg.norm(rows, axis=1) * np.linalg.norm(query), 1e-300)
    return np.argsort(-cosines, kind="stable")[:k].tolist()


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray, Path]:
    """8,000 rows, of which every 97th is missing and every 101st zero; their index."""
    vectors = clustered(8_000, 32)
    statuses = np.full(len(vectors), FOUND, dtype=np.uint8)
    statuses[::97] = MISSING
    vectors[::101] = 0
    path = tmp_path_factory.mktemp("index") / "items.usearch"
    build_index(vectors, statuses, path)
    return vectors, statuses, path


def test_exact_search_is_a_sort_by_cosine() -> None:
    vectors = clustered(500, 16)
    search = NeighborSearch(vectors, np.full(500, FOUND, dtype=np.uint8))
    for row in (0, 7, 499):
        rows, cosines = search.search(vectors[row], 20, leave_out=row)
        assert [row, *rows.tolist()] == reference(vectors, vectors[row], 21)
        norms = np.linalg.norm(vectors[rows], axis=1) * np.linalg.norm(vectors[row])
        np.testing.assert_allclose(cosines, vectors[rows] @ vectors[row] / norms, rtol=1e-5)  # another order of summing
    assert search.exact
    assert len(search.search(vectors[0], 10_000)[0]) == 500


def test_rows_stored_in_half_precision() -> None:
    vectors = clustered(300, 16).astype(np.float16)
    search = NeighborSearch(vectors, np.full(300, FOUND, dtype=np.uint8))
    assert search.search(vectors[9], 12)[0].tolist() == reference(vectors, vectors[9].astype(np.float64), 12)


def test_ties_are_settled_by_row() -> None:
    vectors = np.ones((64, 4), dtype=np.float32)
    search = NeighborSearch(vectors, np.full(64, FOUND, dtype=np.uint8))
    assert search.search(vectors[0], 5, leave_out=2)[0].tolist() == [0, 1, 3, 4, 5]


def test_extreme_queries_keep_their_direction() -> None:
    vectors = clustered(200, 8)
    search = NeighborSearch(vectors, np.full(200, FOUND, dtype=np.uint8))
    expected = search.search(vectors[3], 5)[0].tolist()
    for scale in (1e-38, 1e37):
        assert search.search(vectors[3] * np.float32(scale), 5)[0].tolist() == expected


def test_recall_of_the_index(indexed: tuple[np.ndarray, np.ndarray, Path]) -> None:
    vectors, statuses, path = indexed
    exact, approximate = NeighborSearch(vectors, statuses), NeighborSearch(vectors, statuses, path)
    assert not approximate.exact
    hits = 0
    queries = [row for row in range(3, 8_000, 40) if statuses[row] != MISSING and vectors[row].any()]
    for row in queries:
        wanted, found = exact.search(vectors[row], 10, row), approximate.search(vectors[row], 10, row)
        assert row not in found[0]
        hits += len(set(wanted[0].tolist()) & set(found[0].tolist()))
        assert len(found[0]) == 10
        # What is found is ranked by exact cosines.
        shared = np.isin(wanted[0], found[0])
        np.testing.assert_allclose(found[1][np.isin(found[0], wanted[0])], wanted[1][shared], rtol=1e-5)
    # Seen: .998 and more; a graph that is cut or rows that are mixed up come out far below.
    assert hits / (10 * len(queries)) > 0.97


@pytest.mark.parametrize("indexed_search", [False, True])
def test_missing_and_zero_rows_are_never_found(
    indexed: tuple[np.ndarray, np.ndarray, Path], indexed_search: bool
) -> None:
    vectors, statuses, path = indexed
    search = NeighborSearch(vectors, statuses, path if indexed_search else None)
    gone = np.flatnonzero((statuses == MISSING) | ~vectors.any(axis=1))
    for row in gone[1:40]:
        query = vectors[row] if vectors[row].any() else vectors[row + 1]
        assert not np.isin(search.search(query, 100)[0], gone).any()
    if not indexed_search:
        assert len(search.search(vectors[1], 8_000)[0]) == 8_000 - len(gone)


def test_an_index_of_other_vectors_or_a_damaged_one_is_refused(
    indexed: tuple[np.ndarray, np.ndarray, Path], tmp_path: Path
) -> None:
    vectors, statuses, path = indexed
    with pytest.raises(ValueError, match="not the index of these"):
        NeighborSearch(vectors[:-5], statuses[:-5], path)
    for content in (b"", b"no index at all"):
        damaged = tmp_path / "damaged.usearch"
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match="index"):
            NeighborSearch(vectors, statuses, damaged)


@pytest.mark.parametrize("query", [np.zeros(32), np.full(32, np.nan), np.ones(31), np.ones((1, 32))])
def test_queries_that_are_no_direction(indexed: tuple[np.ndarray, np.ndarray, Path], query: np.ndarray) -> None:
    vectors, statuses, path = indexed
    for search in (NeighborSearch(vectors, statuses), NeighborSearch(vectors, statuses, path)):
        with pytest.raises(ValueError, match="32 finite coordinates"):
            search.search(query, 3)
        with pytest.raises(ValueError, match="at least 1"):
            search.search(vectors[1], 0)


@pytest.mark.process
def test_the_builder_builds_once(tmp_path: Path) -> None:
    collection = open_store(tmp_path / "store").collection("items")
    vectors = clustered(400, 8)
    version = collection.write(ItemVectors(np.arange(400), vectors))
    path = tmp_path / "out" / "items.usearch"
    identity = collection.open(version).manifest.identity
    command = [sys.executable, "-m", "embeddings.store.build_index", "items", version]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "EVENKEEL_STORE_URL": str(tmp_path / "store")}

    def build(identity: str) -> None:
        subprocess.run([*command, identity, str(path)], check=True, timeout=300, env={**os.environ, **environment})

    build("of another store")
    assert not path.exists()
    for _ in range(2):
        build(identity)
        written = path.stat().st_mtime_ns, path.stat().st_ino
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    assert [one.name for one in path.parent.iterdir()] == ["items.usearch"]
    reader = collection.open(version)
    found, _ = NeighborSearch(reader.vectors, reader.statuses, path).search(vectors[5], 1)
    assert found.tolist() == [5]
