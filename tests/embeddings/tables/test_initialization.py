"""Initial rows: standard normal, and a function of the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD
from embeddings.tables.config import InitConfig, TableConfig
from embeddings.tables.initialization import ROW_STREAM, initial_rows, standard_normal


def test_rows_are_standard_normal_and_uncorrelated():
    rows = standard_normal(np.arange(20_000, dtype=np.uint64), 6, (1, 2), ROW_STREAM)
    assert stats.kstest(rows.reshape(-1), "norm").pvalue > 1e-4
    assert np.abs(np.corrcoef(rows.T) - np.eye(6)).max() < 0.04


@given(
    dim=st.integers(1, 20),
    start=st.integers(0, 50),
    count=st.integers(1, 50),
    columns=st.tuples(st.integers(0, 19), st.integers(1, 20)),
    kind=st.sampled_from(["normal", "hash"]),
)
def test_a_shard_starts_as_the_whole_does(dim, start, count, columns, kind):
    keys = np.random.default_rng(0).integers(0, 2**63, 100).astype(np.uint64)
    common = {
        "name": "t",
        "num_rows": 100,
        "dim": dim,
        "features": ("f",),
        "init": InitConfig(kind, 0.5),
        "row_keys": keys,
    }
    whole = EmbeddingTables([TableConfig(**common)], SGD(), seed=3, backend="reference").weight("t")
    shard = TableConfig(**common, row_start=start, row_count=count)
    part = EmbeddingTables([shard], SGD(), seed=3, backend="reference").weight("t")
    assert torch.equal(part, whole[start : start + count])
    first = columns[0] % dim
    width = min(columns[1], dim - first)
    sliced = TableConfig(**common | {"dim": width}, row_start=start, row_count=count, column_start=first, total_dim=dim)
    part = EmbeddingTables([sliced], SGD(), seed=3, backend="reference").weight("t")
    assert torch.equal(part, whole[start : start + count, first : first + width])


@pytest.mark.parametrize(("start", "total"), [(-1, 8), (5, 8), (1, 3)])
def test_columns_outside_the_table_are_refused(start, total):
    with pytest.raises(ValueError, match=r"table 't': columns .* total_dim is the dim of the whole table"):
        TableConfig("t", 10, 4, ("f",), column_start=start, total_dim=total)


def test_hash_follows_the_key_and_normal_the_row():
    keys = np.arange(10, dtype=np.uint64) + np.uint64(2**40)
    hashed = TableConfig("t", 10, 4, ("f",), init=InitConfig("hash"), row_keys=keys, first_live_row=0)
    turned = TableConfig("t", 10, 4, ("f",), init=InitConfig("hash"), row_keys=keys[::-1].copy(), first_live_row=0)
    np.testing.assert_array_equal(initial_rows(hashed, 1, 0, 10), initial_rows(turned, 1, 0, 10)[::-1])
    normal = TableConfig("t", 10, 4, ("f",), init=InitConfig("normal"), first_live_row=0)
    assert not np.array_equal(initial_rows(normal, 1, 0, 10), initial_rows(normal, 2, 0, 10))
    assert not np.array_equal(initial_rows(normal, 1, 0, 10), initial_rows(hashed, 1, 0, 10))


def test_padding_is_zero_and_std_scales():
    table = TableConfig("t", 10, 4, ("f",), init=InitConfig("normal", 2.0))
    rows = initial_rows(table, 1, 0, 10)
    assert not rows[0].any()
    assert rows[1:].all()
    unit = initial_rows(TableConfig("t", 10, 4, ("f",), init=InitConfig("normal", 1.0)), 1, 0, 10)
    np.testing.assert_array_equal(rows, 2.0 * unit)


def test_vector_of_our_own():
    """Fixes the bits of initial rows (up to the last one of the math library)."""
    rows = standard_normal(np.array([5, 2**40 + 1], dtype=np.uint64), 5, (2024, 7), ROW_STREAM)
    np.testing.assert_allclose(rows, VECTOR, rtol=1e-14)


VECTOR = [
    [1.2919217726022045, -0.06132905686979608, -1.395000311872008, 0.9108849994526917, 0.4006950233046848],
    [1.5804051569235882, 2.1626800936510646, -1.6589173458563335, -0.9726119417455906, -1.2395606924170484],
]


def test_hash_without_keys_is_refused():
    with pytest.raises(ValueError, match="row_keys"):
        TableConfig("t", 10, 4, ("f",), init=InitConfig("hash"))
    with pytest.raises(ValueError, match="3 entries for 10 rows"):
        TableConfig("t", 10, 4, ("f",), row_keys=np.zeros(3, dtype=np.uint64))
