"""The feature store, embedded and in Redis, against LMDB and SQLite: reading random ids of a million, and publishing.

Vectors are 128 x float16 everywhere; answers are float32 in the requested order, and are compared. Cases ``embedded
get`` and ``redis get``: our store works as for a request, and checks for a new current version. Case ``publish``: ours
writes a new version (to disk with fsync, or to Redis), checks it and switches to it, and keeps the previous version;
the peers replace the same rows in one transaction. ``rows_per_second`` is ours, next to the peer's. Case ``redis get,
large pages``: the server's memory uses pages of 2 MB, as described in docs/guides/store.md.

Case ``feast``, where EVENKEEL_FEAST_PYTHON names the interpreter of an environment with Feast (docs/guides/store.md):
the first ``--feast-items`` items are exported, materialized into Feast's SQLite online store and read through
``get_online_features``, in a separate process after ours has read the same ids.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import interleave, line, parse
from benchmarks.support.store_peers import LMDB, SQLite, redis_server
from embeddings.store import Collection, open_store
from embeddings.store.feast import export_feast
from embeddings.vectors.item_vectors import ItemVectors

DIM = 128
NUM_IDS = 1000

Items = tuple[np.ndarray, np.ndarray]


def make_items(num_items: int) -> Items:
    """Return ids and directions that float16 can store without loss."""
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((num_items, DIM), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    keys = np.sort(generator.choice(10 * num_items, num_items, replace=False))
    return keys, vectors.astype(np.float16).astype(np.float32)


def publish(collection: Collection, items: Items) -> None:
    parent = collection.current()
    version = collection.write(ItemVectors(items[0], items[1]), parent=parent, dtype="float16")
    collection.publish(version, parent)


def get(name: str, collection: Collection, peers: list[Any], items: Items, iterations: int) -> Iterator[dict[str, Any]]:
    keys = items[0]
    publish(collection, items)
    generator = np.random.default_rng(1)

    def draw() -> np.ndarray:
        # About one id in ten is not in the store.
        ids = generator.choice(keys, NUM_IDS)
        ids[:: NUM_IDS // 100] += 1
        return ids

    probe = draw()
    answer = collection.lookup(probe)[2]
    for peer in peers:
        np.testing.assert_array_equal(answer, peer.get(probe))
    contestants = [collection.lookup, *(peer.get for peer in peers)]
    times = interleave(draw, *contestants, iterations=iterations)
    case = f"{name} get {NUM_IDS} of {len(keys)} D{DIM} float16"
    yield from lines(case, peers, times, figures_of_get)


def put(name: str, collection: Collection, peers: list[Any], items: Items, iterations: int) -> Iterator[dict[str, Any]]:
    keys, vectors = items
    halves = vectors.astype(np.float16)
    turned = [0]

    def next_items() -> tuple[Items, np.ndarray]:
        # Every item gets another row, so that nothing of the previous version can be reused.
        turned[0] += 1
        if collection.current() is not None:
            collection.retain(1)
        return (keys, np.roll(vectors, turned[0], axis=0)), np.roll(halves, turned[0], axis=0)

    def write_into(peer: Any) -> Callable[[Any], None]:
        return lambda given: peer.write(keys, given[1])

    contestants: list[Callable[[Any], None]] = [lambda given: publish(collection, given[0]), *map(write_into, peers)]
    times = interleave(next_items, *contestants, iterations=iterations, warm_up=1)
    case = f"publish {name} {len(keys)} D{DIM} float16"
    yield from lines(case, peers, times, lambda ours, theirs: figures_of_put(len(keys), ours, theirs))


def feast(collection: Collection, items: Items, folder: Path, python: str, iterations: int) -> None:
    publish(collection, items)
    export_feast(collection, folder, ttl_seconds=86_400)
    subprocess.run([str(Path(python).parent / "feast"), "apply"], cwd=folder, check=True, capture_output=True)
    generator, files, ours, sums = np.random.default_rng(1), [], [], []
    for number in range(iterations):
        ids = generator.choice(items[0], NUM_IDS)
        files.append(folder / f"ids-{number}.npy")
        np.save(files[-1], ids)
        start = time.perf_counter()
        vectors = collection.lookup(ids)[2]
        ours.append(1e3 * (time.perf_counter() - start))
        sums.append(float(vectors.sum(dtype=np.float64)))
    script = Path(__file__).parent / "support" / "feast_peer.py"
    command = [python, str(script), str(folder), "items", "item", *map(str, files)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    np.testing.assert_allclose(found["sums"], sums, rtol=1e-6, atol=1e-3)
    case = f"feast get {NUM_IDS} of {len(items[0])} D{DIM} float16"
    rate = round(len(items[0]) / found["materialize_seconds"])
    times = np.array([ours, found["get_ms"]]).T
    line("store", case, "feast", times, **figures_of_get(*times.T), peer_materialize_rows_per_second=rate)


def lines(case: str, peers: list[Any], times: np.ndarray, figures: Any) -> Iterator[dict[str, Any]]:
    for number, peer in enumerate(peers, 1):
        pair = times[:, [0, number]]
        yield line("store", case, peer.name, pair, **figures(pair[:, 0], pair[:, 1]))


def figures_of_get(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(ours, [50, 99]).round(4).tolist()
    peer_p50, peer_p99 = np.percentile(theirs, [50, 99]).round(4).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "peer_p50_ms": peer_p50, "peer_p99_ms": peer_p99}


def figures_of_put(num_items: int, ours: np.ndarray, theirs: np.ndarray) -> dict[str, int]:
    return {
        "rows_per_second": round(1e3 * num_items / float(np.median(ours))),
        "best_rows_per_second": round(1e3 * num_items / float(ours.min())),
        "peer_rows_per_second": round(1e3 * num_items / float(np.median(theirs))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument(
        "--iterations", type=int, default=300, help="rounds of get; publish has a twentieth, 15 at least"
    )
    parser.add_argument("--folder", type=Path, help="where the stores are made (default: the system's folder)")
    parser.add_argument("--feast-items", type=int, default=100_000)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parse(parser, items=1_000_000)
    items = make_items(options.items)
    num_puts = max(options.iterations // 20, 15)
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="evenkeel-bench-") as name,
        redis_server(Path(name)) as url,
        redis_server(Path(name), large_pages=True) as large_url,
    ):
        folder = Path(name)
        peers: list[Any] = [LMDB(folder, DIM), SQLite(folder, DIM)]
        for peer in peers:
            peer.write(items[0], items[1].astype(np.float16))
        stores = {"embedded": open_store(folder / "store")}
        if url is None:
            print("redis-server is not installed: its cases are left out", file=sys.stderr)
        else:
            # The previous version is deleted at once: nothing reads it here.
            stores["redis"] = open_store(f"{url}?cache={folder / 'cache'}&grace_seconds=0")
            stores["redis, large pages"] = open_store(f"{large_url}?cache={folder / 'large'}&grace_seconds=0")
        for kind, run, iterations in (("get", get, options.iterations), ("publish", put, num_puts)):
            for store_name, store in stores.items():
                first, *more = store_name.split(",")
                if kind == "publish" and " large pages" in more:
                    continue
                case = ",".join([f"{first} get", *more]) if kind == "get" else f"publish {store_name}"
                if options.case in case:
                    for _ in run(store_name, store.collection("items"), peers, items, iterations):
                        pass
        python = os.environ.get("EVENKEEL_FEAST_PYTHON")
        if python and options.case in "feast get":
            some = items[0][: options.feast_items], items[1][: options.feast_items]
            feast(open_store(folder / "some").collection("items"), some, folder / "feast", python, 30)


if __name__ == "__main__":
    main()
