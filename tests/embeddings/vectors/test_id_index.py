"""The index of ids finds what a binary search finds, whatever ids there are."""

import numpy as np
import pytest

from embeddings.vectors.id_index import STEPS, IdIndex
from embeddings.vectors.item_vectors import find_rows

INT64 = np.iinfo(np.int64)


def ids_named(name, generator):
    return {
        "one": [5],
        "the ends of int64": [INT64.min, INT64.max],
        "over all of int64": generator.integers(INT64.min, INT64.max, 10_000),
        "dense": np.arange(-50, 20_000),
        "every seventh": 7 * np.arange(10_000) + 10**12,
        "one far away": np.append(10**15 + np.arange(10_000), -1),
        "shards": np.concatenate([(shard << 48) + generator.choice(10**6, 300, replace=False) for shard in range(90)]),
        "ever farther apart": np.exp(40 * generator.random(10_000)).astype(np.int64),
        "powers of two": 2 ** np.arange(63),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["one", "the ends of int64", "over all of int64", "dense", "every seventh", "one far away", "shards",
     "ever farther apart", "powers of two"],
)  # fmt: skip
def test_finds_what_a_binary_search_finds(name):
    generator = np.random.default_rng(0)
    keys = np.unique(np.asarray(ids_named(name, generator), dtype=np.int64))
    chosen = generator.choice(keys, 2000)
    # Neighbours of ids too, but for those that would leave int64.
    beside = np.concatenate([chosen[chosen < INT64.max] + 1, chosen[chosen > INT64.min] - 1])
    queries = np.concatenate([keys, chosen, beside, [INT64.min, INT64.max, 0, -1]])
    index = IdIndex(keys)
    np.testing.assert_array_equal(index.rows(queries), find_rows(keys, queries))
    assert len(index.rows(np.empty(0, dtype=np.int64))) == 0


@pytest.mark.parametrize("num_keys", [1, 2, 63, 64, 65, 127, 1000])
def test_any_number_of_ids(num_keys):
    generator = np.random.default_rng(num_keys)
    keys = np.unique(generator.integers(-1000, 1000, num_keys))
    queries = np.arange(-1100, 1100)
    np.testing.assert_array_equal(IdIndex(keys).rows(queries), find_rows(keys, queries))


def test_ids_that_crowd_into_one_bucket_are_found():
    # Of 1,000 ids in each span all but one stand side by side, so that a bucket holds more than are compared.
    keys = np.unique(np.concatenate([(span << 40) + np.append(np.arange(999), 1 << 39) for span in range(64)]))
    index = IdIndex(keys)
    assert int(np.diff(np.append(index._starts, len(keys))).max()) > STEPS + 1
    np.testing.assert_array_equal(index.rows(keys), np.arange(len(keys)))
    np.testing.assert_array_equal(index.rows(keys + 1), find_rows(keys, keys + 1))


@pytest.mark.parametrize(("name", "num_spans"), [("dense", 1), ("over all of int64", 1), ("shards", 64)])
def test_spans_are_made_where_one_width_does_not_fit_all(name, num_spans):
    keys = np.unique(ids_named(name, np.random.default_rng(0)))
    assert len(IdIndex(keys)._lows) == num_spans


def test_takes_four_bytes_an_id_at_most():
    keys = np.unique(np.random.default_rng(0).integers(0, 10**9, 100_000))
    tables = [part for part in vars(IdIndex(keys)).values() if part is not keys]
    assert sum(part.nbytes for part in tables) < 4.1 * len(keys)
