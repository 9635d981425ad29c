"""``evenkeel advise`` against a real service: a task's file in, a table and a chart out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.store import open_store
from embeddings.vectors.item_vectors import FOUND, MISSING, ItemVectors
from tests.service import serving
from tests.service.serving import Served

N, D = 600, 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving.serving(tmp_path_factory.mktemp("served")) as served:
        vectors = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
        same = vectors[:, 0] * vectors[:, 1] > 0
        statuses = np.full(N, FOUND, dtype=np.uint8)
        statuses[:50] = MISSING
        vectors[:50] = 0
        collection = open_store(served.settings.store_url).collection("films")
        collection.publish(collection.write(ItemVectors(np.arange(N), vectors, statuses=statuses)), None)
        labels = pa.table({"id": np.arange(N + 10), "label": [*map(str, same), *[None] * 10]})
        pq.write_table(labels, served.data / "task.parquet")
        pq.write_table(labels.rename_columns(["item", "label"]), served.data / "wrong.parquet")
        yield served


def advise(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [serving.EVENKEEL, "advise", *arguments], env=served.environment(), capture_output=True, text=True, check=False
    )


def test_a_task_is_tried_and_drawn(served: Served, tmp_path: Path) -> None:
    chart = tmp_path / "task.png"
    done = advise(served, "films", str(served.data / "task.parquet"), "--plot", str(chart), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["items"] == N - 50, "items without a vector, and labels without an item, do not count"
    assert found["tried"][0]["sigma"] is None
    assert len(found["tried"]) == 10
    assert found["best"]["accuracy"] > found["tried"][0]["accuracy"] + 0.15
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert len(chart.read_bytes()) > 10_000


def test_a_table_and_one_sentence_for_people(served: Served) -> None:
    done = advise(served, "films", str(served.data / "task.parquet"))
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.split("\t") == ["DIM", "SIGMA", "ACCURACY"]
    assert second.split("\t")[:2] == ["4", "vectors"]
    assert "take dim" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing", "task.parquet"), "no collection 'nothing'"),
        (("films", "wrong.parquet"), "columns id and label"),
        (("films", "gone.parquet"), "gone.parquet"),
    ],
)
def test_what_cannot_be_tried(served: Served, arguments: tuple[str, str], says: str) -> None:
    collection, file = arguments
    done = advise(served, collection, str(served.data / file))
    assert done.returncode == 1
    assert says in done.stderr
