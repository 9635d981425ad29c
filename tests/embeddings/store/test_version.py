"""Rows of one version: what a lookup gives is what was written."""

import numpy as np

from embeddings.store import open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, ItemVectors


def test_lookup_of_integers_and_of_strings_in_any_order(tmp_path):
    generator = np.random.default_rng(0)
    numbers = np.unique(generator.integers(-(2**62), 2**62, 3000))
    vectors = generator.standard_normal((len(numbers), 8), dtype=np.float32)
    statuses = generator.choice(np.array([FOUND, CARRIED], dtype=np.uint8), len(numbers))
    asked = generator.permutation(np.concatenate([numbers[:500], numbers[:500], numbers[-500:] + 1]))
    where = {int(number): row for row, number in enumerate(numbers)}
    store = open_store(tmp_path)
    for name, ids, queries in (
        ("numbers", numbers, asked.tolist()),
        ("words", [f"item-{number}" for number in numbers], [f"item-{number}" for number in asked]),
    ):
        collection = store.collection(name)
        collection.publish(collection.write(ItemVectors(ids, vectors, statuses=statuses)), None)
        status, found = collection.open().lookup(queries)
        for number, one_status, one in zip(asked.tolist(), status, found, strict=True):
            row = where.get(number)
            assert one_status == (MISSING if row is None else statuses[row])
            np.testing.assert_array_equal(one, np.zeros(8) if row is None else vectors[row])
