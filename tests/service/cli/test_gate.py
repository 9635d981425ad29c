"""``evenkeel canaries`` against a real service and store."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.service import published
from tests.service.serving import Run, Served

N = 300


def test_canaries_on_the_command_line(run: Run, served: Served) -> None:
    labels = np.repeat(["a", "b", "c"], N // 3)
    vectors = np.repeat(2 * np.eye(3, published.DIM), N // 3, axis=0)
    vectors += np.random.default_rng(0).standard_normal(vectors.shape)
    collection = published.store_at(served.settings).collection("plays")
    collection.publish(published.write(collection, np.arange(N), vectors.astype(np.float32)), None)
    path = served.data / "labels.parquet"
    pq.write_table(pa.table({"id": np.arange(N), "label": labels}), path)
    done = run("canaries", "add", "plays", "kind", str(path))
    assert done.code == 0, done.err
    assert done.out.startswith("canary kind: 300 items, 3 classes, accuracy 0.")
    (line,) = run("canaries", "list", "plays").out.splitlines()[1:]
    assert line.split("\t")[:5] == ["kind", "v000001", "1", "300", "3"]
    assert run("canaries", "delete", "plays", "kind").code == 0
    assert run("canaries", "list", "plays", "--json").out.strip() == "[]"
    assert run("canaries", "delete", "plays", "kind").code == 1
