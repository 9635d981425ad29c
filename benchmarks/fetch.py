"""Fetching over HTTP: 1000 random ids of a million, from ``evenkeel serve --role vectors``, decoded by the client.

Case ``arrow`` and ``json``: the published vectors (128 numbers each) through an identity view; the peer is the same
lookup in the store itself, without HTTP. Case ``arrow rff computed``: random Fourier features of 64 numbers, computed
for the request; the peer is case ``arrow``, which sends equally many numbers, so that ``adds_ms`` is the cost of
computing. Answers are compared. Service and client each have a process: with one core they take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.support.harness import interleave, line
from benchmarks.support.serving import serving
from embeddings.store import Collection, default_view, open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.client import Client

DIM = 128
NUM_IDS = 1000

Fetch = Callable[[np.ndarray], np.ndarray]


def publish(folder: Path, name: str, num_items: int, dim: int) -> Collection:
    """Publish a collection of random directions, with its default view, and return it."""
    generator = np.random.default_rng(dim)
    vectors = generator.standard_normal((num_items, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = np.sort(np.random.default_rng(0).choice(10 * num_items, num_items, replace=False))
    collection = open_store(folder / "store").collection(name)
    collection.create_view(default_view(name), dim_in=dim, anchor_generation=1)
    collection.publish(collection.write(ItemVectors(ids, vectors)), None)
    return collection


def fetch_json(client: Client, view: str) -> Fetch:
    """Return the fetch of a caller that uses orjson and no Arrow."""

    def fetch(ids: np.ndarray) -> np.ndarray:
        answer = client.request("POST", f"/views/{view}/vectors", json={"ids": ids.tolist()})
        return np.array([item["vector"] for item in orjson.loads(answer.content)["items"]], dtype=np.float32)

    return fetch


def report(
    case: str, peer: str, draw: Callable[[], np.ndarray], ours: Fetch, theirs: Fetch, iterations: int
) -> dict[str, Any]:
    times = interleave(draw, ours, theirs, iterations=iterations, warm_up=10)
    p50, p99 = np.percentile(times[:, 0], [50, 99]).round(3).tolist()
    adds = round(float(np.median(times[:, 0] - times[:, 1])), 3)
    return line("fetch", case, peer, times, p50_ms=p50, p99_ms=p99, adds_ms=adds)


def run(folder: Path, num_items: int, iterations: int) -> None:
    wide = publish(folder, "wide", num_items, DIM)
    narrow = publish(folder, "narrow", num_items, DIM // 2)
    wide.create_view("wide_raw", kind="identity")
    generator = np.random.default_rng(1)
    keys = np.array(wide.open().keys)  # those of the narrow one too
    of = f"{NUM_IDS} of {num_items}"
    with serving(folder, "--role", "vectors") as service, Client(service.url, service.key) as client:

        def draw() -> np.ndarray:
            return generator.choice(keys, NUM_IDS)

        def arrow(ids: np.ndarray) -> np.ndarray:
            return client.vectors(view="wide_raw", ids=ids).vectors

        def computed(ids: np.ndarray) -> np.ndarray:
            return client.vectors("narrow", ids).vectors

        def embedded(ids: np.ndarray) -> np.ndarray:
            return wide.open().lookup(ids)[1]

        probe = draw()
        json = fetch_json(client, "wide_raw")
        np.testing.assert_array_equal(arrow(probe), embedded(probe))
        np.testing.assert_array_equal(json(probe), embedded(probe))
        expected = narrow.view_lookup(default_view("narrow"), probe)[1]
        np.testing.assert_allclose(computed(probe), expected, atol=1e-6)  # another build's order of summing

        report(f"arrow {of} D{DIM}", "embedded", draw, arrow, embedded, iterations)
        report(f"json {of} D{DIM}", "embedded", draw, json, embedded, max(iterations // 3, 15))
        report(f"arrow rff computed {of} {DIM // 2}->{DIM}", "arrow", draw, computed, arrow, iterations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=300, help="requests of an Arrow case; JSON has a third")
    parser.add_argument("--folder", type=Path, help="where the store is made (default: the system's folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="evenkeel-bench-") as folder:
        run(Path(folder), options.items, options.iterations)


if __name__ == "__main__":
    main()
