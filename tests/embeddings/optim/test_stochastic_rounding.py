"""Stochastic rounding of half rows: exact where it must be, unbiased elsewhere, the same in shards and backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, Adam, RMSprop, RowwiseAdagrad, RowwiseAdam
from embeddings.optim.stochastic_rounding import rounding_words, to_bfloat16, to_float16
from embeddings.tables.config import InitConfig, TableConfig

HALVES = (torch.bfloat16, torch.float16)


def rounded(values: np.ndarray, words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        return torch.from_numpy(to_float16(values, words))
    return torch.from_numpy(to_bfloat16(values, words)).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
@given(
    value=st.floats(-6e4, 6e4, width=32) | st.sampled_from([0.0, 6e-8, 1e-5, -3.1e-7, 65504.0]),
    word=st.integers(0, 2**32 - 1),
)
def test_the_result_is_one_of_the_two_halves_around(dtype, value, word):
    got = rounded(np.array([value], dtype=np.float32), np.array([word], dtype=np.uint32), dtype)
    nearest = torch.tensor([value], dtype=torch.float32).to(dtype)
    around = [nearest, *(torch.nextafter(nearest, torch.full_like(nearest, way)) for way in (-np.inf, np.inf))]
    exact = float(nearest) == np.float32(value)
    assert any(torch.equal(got, each) for each in (around[:1] if exact else around))
    assert abs(float(got) - float(np.float32(value))) <= abs(float(around[2]) - float(around[1])) / 2 or exact


@pytest.mark.parametrize(("dtype", "gap"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
@pytest.mark.parametrize("place", [0.0, 0.25, 0.7])
def test_the_mean_is_the_value(dtype, gap, place):
    """40,000 draws: a standard error of 0.0025 of the gap; five of them are allowed."""
    words = rounding_words((7, 8), 3, np.arange(10_000), 0, 4)
    values = np.full(words.shape, -(1.0 + place * gap), dtype=np.float32)
    up = (rounded(values, words, dtype).double().abs() - 1.0) / gap
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    assert float(up.mean()) == pytest.approx(place, abs=0.0125 if place else 0.0)


@pytest.mark.parametrize("place", [0.0, 0.25, 0.7])
def test_the_mean_is_the_value_where_float16_is_subnormal(place):
    """The gap is 2^-24 there, whatever the exponent. 40,000 draws, as above."""
    words = rounding_words((7, 8), 3, np.arange(10_000), 0, 4)
    values = np.full(words.shape, (100.0 + place) * 2.0**-24, dtype=np.float32)
    up = to_float16(values, words).astype(np.float64) * 2.0**24 - 100.0
    assert set(np.unique(up).tolist()) <= {0.0, 1.0}
    assert float(up.mean()) == pytest.approx(place, abs=0.0125 if place else 0.0)


def test_infinity_stays():
    values, words = np.array([np.inf, -np.inf], dtype=np.float32), np.array([2**32 - 1] * 2, dtype=np.uint32)
    for dtype in HALVES:
        assert rounded(values, words, dtype).tolist() == [np.inf, -np.inf]


def test_words_of_a_shard_are_those_of_the_whole():
    whole = rounding_words((1, 2), 9, np.arange(50), 0, 23)
    np.testing.assert_array_equal(rounding_words((1, 2), 9, np.arange(20, 40), 5, 9), whole[20:40, 5:14])
    # A step that touches no row of a table.
    assert rounding_words((1, 2), 9, np.arange(0), 5, 9).shape == (0, 9)
    high = rounding_words((1, 2), 9, np.array([5, 5 + 2**32]), 0, 4)
    assert not np.array_equal(high[0], high[1])
    assert len(np.unique(np.stack([whole, rounding_words((1, 2), 10, np.arange(50), 0, 23)]))) > 2 * whole.size - 5


def train(
    backend: str, dtype: torch.dtype, state_dtype: torch.dtype | None, optimizer, columns=(0, 24)
) -> torch.Tensor:
    """Rows of a table of 24 columns, or of a shard of its columns, after steps that need rounding."""
    config = TableConfig(
        "t", 40, columns[1] - columns[0], ("f",), init=InitConfig("normal", 1.0), column_start=columns[0], total_dim=24
    )
    tables = EmbeddingTables([config], optimizer, seed=5, backend=backend, dtype=dtype, state_dtype=state_dtype)
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 5):
        ids = torch.randint(0, 40, (30,), generator=generator)
        grad = torch.randn(30, 24, generator=generator)
        tables(ids, torch.arange(31)).backward(grad[:, columns[0] : columns[1]])
        tables.step(k)
    return tables.weight("t")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1)])
def test_column_shards_hold_the_bits_of_the_whole(dtype, optimizer):
    whole = train("reference", dtype, None, optimizer)
    parts = [train("reference", dtype, None, optimizer, columns) for columns in ((0, 6), (6, 24))]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_compiled_rows_hold_the_bits_of_the_reference(dtype, state_dtype):
    """But where float32 sums differ in their last bit, which one element in some 10,000 shows."""
    for optimizer in (SGD(0.1), Adagrad(0.1), Adam(0.01), RowwiseAdagrad(0.1), RMSprop(0.01), RowwiseAdam(0.01)):
        expected, got = (train(backend, dtype, state_dtype, optimizer) for backend in ("reference", "cpu"))
        assert got.dtype == dtype
        assert int((expected != got).sum()) <= 2, optimizer
