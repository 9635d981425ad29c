"""Run by test_erasure.py in a process of its own, because it kills itself.

``python -m tests.embeddings.store.collection.erasure_scenarios kill ROOT STRIDE`` erases in a forked child for each
STRIDE-th kill point i, in ROOT/i, and prints the first i that is none any more.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from embeddings.refresh.publish import Gate, RefreshRequest, Settings, View, publish_candidate
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import ItemVectors
from tests.embeddings.store import store_scenarios

DIM = 4
NUM_ITEMS = 120
ERASED = [0, 60, 119]
WIDE = View("wide", dim=16, materialized=True)


def publish(store: Store, seed: int, without: Any = (), mode: str = "report") -> Any:
    """A refresh: the same geometry in every one, a little noise, another basis; some items may be left out."""
    base = np.random.default_rng(0).standard_normal((NUM_ITEMS, DIM))
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    vectors = ((base + 0.05 * rng.standard_normal(base.shape)) @ basis).astype(np.float32)
    ids = np.setdiff1d(np.arange(NUM_ITEMS), without)
    settings = Settings(gate=Gate(mode), views=(WIDE,))  # type: ignore[arg-type]
    parent = store.collection("items").current()
    return publish_candidate(
        store, "items", RefreshRequest(ItemVectors(ids, vectors[ids]), settings, parent_version=parent)
    )


def prepare(root: Path) -> None:
    """Three published versions, a held one, and a candidate."""
    store = open_store(root)
    for seed in range(3):
        assert publish(store, seed).status == "published"
    collection = store.collection("items")
    items = collection.open().items()
    for held in (True, False):
        turned = np.roll(np.asarray(items.vectors), 1, axis=1) * (1 if held else -1)
        version = collection.write(ItemVectors(items.keys, turned), parent=collection.current())
        if held:
            collection.hold(version, ["for the test"])


def kill(root: Path, stride: int) -> None:
    template = root / "template"
    prepare(template)
    point = 0
    while True:
        target = root / str(point)
        shutil.copytree(template, target)
        child = os.fork()
        if child == 0:
            store_scenarios.kill_at(point)
            open_store(target).collection("items").erase(ERASED, "they asked")
            os._exit(0)
        _, ended = os.waitpid(child, 0)
        if not os.WIFSIGNALED(ended):
            assert os.WEXITSTATUS(ended) == 0
            break
        point += stride
    print(point)


if __name__ == "__main__":
    kill(Path(sys.argv[2]), int(sys.argv[3]))
