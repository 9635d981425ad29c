"""Writers that are killed at any moment leave a whole version served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import FOUND, ItemVectors
from tests.embeddings.store.backends.versions import NUM_ITEMS, publish, vectors_of

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.process


_WRITER = """
import sys
import numpy as np
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
collection = open_store(sys.argv[1]).collection("items")
print("ready", flush=True)
while True:
    parent = collection.current()
    number = 1 + max(int(manifest["version"][1:]) for manifest in collection.versions())
    vectors = np.full((3000, 8), float(number))
    version = collection.write(ItemVectors(np.arange(3000), vectors), parent=parent)
    assert int(version[1:]) == number, version
    collection.publish(version, parent)
    collection.retain(3)
"""


def killed_writers(url: str, mirror: Path, collection: Collection, unlock: Callable[[], None], seed: int) -> None:
    """Starts a writer that publishes on and on, kills it at a random moment, and looks at what is served; so many times
    as EVENKEEL_TEST_KILLS says."""
    num_kills = int(os.environ.get("EVENKEEL_TEST_KILLS", "5"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    moments = np.random.default_rng(seed).uniform(0.0, 0.4, num_kills)
    for moment in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, f"{url}cache={mirror}"], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        unlock()
        reader = collection.open()
        number = float(int(reader.version[1:]))
        status, vectors = reader.lookup(np.arange(NUM_ITEMS))
        assert (status == FOUND).all()
        assert np.unique(vectors).tolist() == [number], reader.version


@pytest.mark.long
def test_writers_killed_at_random_points_embedded(tmp_path: Path) -> None:
    root = tmp_path / "store"
    collection = open_store(root).collection("items")
    collection.publish(collection.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(1))), None)
    killed_writers(f"file://{root}?", Path("unused"), collection, lambda: None, seed=0)
    collection.clean()
    assert list(root.rglob(".*")) == []


@pytest.mark.long
def test_writers_killed_at_random_points_redis(opened: Callable[..., Store], redis_server: Any, tmp_path: Path) -> None:
    collection = opened("grace_seconds=0").collection("items")
    collection.publish(collection.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(1))), None)

    def unlock() -> None:
        # Its lease would end by itself.
        with redis_server.client() as client:
            client.delete("evenkeel:items:LOCK")

    killed_writers(f"{redis_server.url}?grace_seconds=60&", tmp_path / "writer", collection, unlock, seed=1)
    # The next writer cleans up.
    after = publish(collection, int(str(collection.current())[1:]) + 1)
    collection.retain(1)
    collection.clean()
    assert collection.open().version == after
