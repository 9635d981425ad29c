"""Run by test_publish_memory.py in a process of its own: what a refresh of N items takes in memory.

``python publish_memory.py DIRECTORY NUM_ITEMS DIM GATE_MODE [LIMIT_BYTES]`` publishes NUM_ITEMS vectors, refreshes them
from a memory-mapped file, and prints the most that Python and NumPy had allocated during the refresh. With LIMIT_BYTES
the process may not allocate more than that (RLIMIT_DATA; mapped files do not count).
"""

from __future__ import annotations

import resource
import sys
import tracemalloc
from pathlib import Path

import numpy as np

from embeddings.refresh.publish import Gate, RefreshRequest, Settings, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors

PIECE = 4096


def written(path: Path, num_items: int, dim: int, seed: int) -> np.memmap:
    """A refresh in a file: the same geometry for all seeds, a little noise, another basis."""
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]
    with open(path, "wb") as file:
        for start in range(0, num_items, PIECE):
            count = min(PIECE, num_items - start)
            base = np.random.default_rng(start).standard_normal((count, dim), dtype=np.float32)
            noise = np.random.default_rng([seed, start]).standard_normal((count, dim), dtype=np.float32)
            file.write(((base + 0.1 * noise) @ turn).astype(np.float32))
    return np.memmap(path, np.float32, "r", shape=(num_items, dim))


def refresh(directory: Path, num_items: int, dim: int, mode: str, seed: int) -> str:
    """One item in a hundred is gone and another is new, so that some are carried."""
    store = open_store(directory / "store")
    ids = np.arange(num_items) + seed * (num_items // 100)
    items = ItemVectors(ids, written(directory / f"{seed}.bin", num_items, dim, seed), counts=np.ones(num_items))
    tracemalloc.start()
    end = publish_candidate(
        store,
        "items",
        RefreshRequest(items, Settings(gate=Gate(mode)), parent_version=store.collection("items").current()),
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert end.status == "published", end.reasons
    return str(peak)


if __name__ == "__main__":
    where, num_items, dim, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    (where / "warm").mkdir()
    refresh(where / "warm", 4000, dim, mode, 0)
    refresh(where, num_items, dim, mode, 0)
    if len(sys.argv) > 5:
        with open("/proc/self/status") as status:
            data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        limit = data + int(sys.argv[5])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(refresh(where, num_items, dim, mode, 1))
