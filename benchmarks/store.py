"""The embedded feature store against SQLite: 1000 random ids of a million, and the publication of a version.

Case ``embedded get``: ours is what a request does, the check for a switch included; the peer selects the same ids by
primary key and puts them in the same order. Case ``publish``: ours writes, fsyncs, verifies and switches; the peer
inserts the same rows and commits. Answers are compared.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import interleave, line
from embeddings.store import Collection, open_store
from embeddings.vectors import ItemVectors

DIM = 128
NUM_IDS = 1000
NUM_PUBLISHED = 100_000


def make_items(num_items: int, seed: int = 0) -> ItemVectors:
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((num_items, DIM), dtype=np.float32)
    return ItemVectors(np.sort(generator.choice(10 * num_items, num_items, replace=False)), vectors)


def publish(collection: Collection, items: ItemVectors) -> None:
    parent = collection.current()
    collection.publish(collection.write(items, parent=parent), parent)
    collection.retain(1)


class SQLite:
    """A table of id and vector bytes, written in one transaction."""

    def __init__(self, path: Path):
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, vector BLOB NOT NULL)")

    def write(self, items: ItemVectors) -> None:
        rows = zip(items.keys.tolist(), map(bytes, items.vectors.view(f"V{4 * DIM}").reshape(-1)), strict=True)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM items")
        self._connection.executemany("INSERT INTO items VALUES (?, ?)", rows)
        self._connection.execute("COMMIT")

    def get(self, ids: np.ndarray) -> np.ndarray:
        marks = ",".join("?" * len(ids))
        found = dict(self._connection.execute(f"SELECT id, vector FROM items WHERE id IN ({marks})", ids.tolist()))
        empty = bytes(4 * DIM)
        return np.frombuffer(b"".join(found.get(one, empty) for one in ids.tolist()), np.float32).reshape(-1, DIM)


def get(folder: Path, num_items: int, iterations: int) -> dict[str, Any]:
    items = make_items(num_items)
    collection = open_store(folder / "store").collection("items")
    publish(collection, items)
    peer = SQLite(folder / "get.sqlite")
    peer.write(items)
    generator = np.random.default_rng(1)

    def draw() -> np.ndarray:
        # One in ten is not there.
        ids = generator.choice(items.keys, NUM_IDS)
        ids[:: NUM_IDS // 100] += 1
        return ids

    probe = draw()
    np.testing.assert_array_equal(collection.open().lookup(probe)[1], peer.get(probe))
    times = interleave(draw, lambda ids: collection.open().lookup(ids), peer.get, iterations=iterations)
    p50, p99 = np.percentile(times[:, 0], [50, 99]).round(4).tolist()
    peer_p50, peer_p99 = np.percentile(times[:, 1], [50, 99]).round(4).tolist()
    case = f"embedded get {NUM_IDS} of {num_items} D{DIM}"
    return line("store", case, "sqlite", times, p50_ms=p50, p99_ms=p99, peer_p50_ms=peer_p50, peer_p99_ms=peer_p99)


def put(folder: Path, iterations: int) -> dict[str, Any]:
    collection = open_store(folder / "published").collection("items")
    peer = SQLite(folder / "put.sqlite")
    seeds = iter(range(1_000_000))
    times = interleave(
        lambda: make_items(NUM_PUBLISHED, next(seeds)),
        lambda items: publish(collection, items),
        peer.write,
        iterations=iterations,
        warm_up=1,
    )
    ours, theirs = 1e3 * NUM_PUBLISHED / np.median(times, axis=0)
    case = f"publish {NUM_PUBLISHED} D{DIM}"
    figures = {"rows_per_second": round(float(ours)), "peer_rows_per_second": round(float(theirs))}
    return line("store", case, "sqlite", times, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=300, help="of get; publish takes a twentieth, at least 15")
    parser.add_argument("--folder", type=Path, help="where the stores are made (default: the system's folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="evenkeel-bench-") as folder:
        get(Path(folder), options.items, options.iterations)
        put(Path(folder), max(options.iterations // 20, 15))


if __name__ == "__main__":
    main()
