"""SSE-SE: the distribution of equation 5, the bits, and that neither depends on how a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from embeddings.config import SSEConfig, TableConfig
from embeddings.optim import SGD
from embeddings.sse import StochasticSharedEmbedding, swap, swap_ids
from embeddings.tables import EmbeddingTables


def draw(ids, *, num_rows=12, offsets=None, feature="item", **settings):
    offsets = torch.arange(len(ids) + 1) if offsets is None else offsets
    config = SSEConfig(settings.pop("probability", 0.3), settings.pop("graph", None), settings.pop("rho", 1.0))
    settings = {"seed": 1, "step": 1, "backend": "reference"} | settings
    table = TableConfig("item", num_rows, 4, (feature,))
    return swap(ids, offsets, table=table, feature=feature, config=config, **settings)


def test_vector_of_our_own():
    """Fixes key, counter layout, lanes and multiply-shift: a change of any of them changes recorded runs."""
    ids = torch.tensor([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 0])
    assert draw(ids, probability=0.5, seed=2024, step=3, sample_offset=6).tolist() == VECTOR
    offsets = torch.tensor([0, 3, 3, 8, 12])
    assert draw(ids, probability=0.5, seed=2024, step=3, offsets=offsets).tolist() == VECTOR_OF_LISTS
    big = torch.arange(2, 14) * 1_000_000
    assert draw(big, num_rows=2**24, probability=0.5, seed=2024, step=3).tolist() == VECTOR_OF_TWO_WORDS


VECTOR = [2, 3, 10, 11, 10, 11, 8, 9, 10, 9, 1, 0]
VECTOR_OF_LISTS = [4, 3, 2, 5, 10, 2, 8, 9, 8, 11, 1, 0]
VECTOR_OF_TWO_WORDS = [
    2154397,
    14867061,
    4000000,
    12636912,
    6000000,
    5934083,
    8000000,
    9000000,
    14312125,
    16624889,
    13436014,
    15073007,
]


def test_chi_square_against_equation_5():
    """p(j, j) = 1 - p0, p(j, k) = p0 / (N - 1) for live k != j. p-values below 1e-4 would be a fault, not chance."""
    num_rows, probability, num_samples, j = 12, 0.3, 200_000, 5
    drawn = draw(torch.full((num_samples,), j), num_rows=num_rows, probability=probability).numpy()
    counts = np.bincount(drawn, minlength=num_rows)
    assert counts[:2].sum() == 0
    live = num_rows - 2
    expected = np.full(live, num_samples * probability / (live - 1))
    expected[j - 2] = num_samples * (1 - probability)
    assert stats.chisquare(counts[2:], expected).pvalue > 1e-4


def test_lanes_and_positions_are_independent():
    """Hits of samples that share a Philox call, and of positions of one list, are uncorrelated."""
    num_samples, length = 40_000, 4
    ids = torch.full((num_samples * length,), 3)
    offsets = torch.arange(num_samples + 1) * length
    hits = (draw(ids, num_rows=2**20, offsets=offsets) != 3).numpy().reshape(num_samples, length)
    positions = np.corrcoef(hits.T)
    lanes = np.corrcoef(hits[:, 0].reshape(-1, 4).T)
    # Standard errors are .005 and .01.
    assert np.abs(positions - np.eye(4)).max() < 0.02
    assert np.abs(lanes - np.eye(4)).max() < 0.04


def test_above_two_to_the_22_every_row_can_be_drawn():
    """One 32-bit word over 2^24 rows would leave the draw uneven; the mean and the low bits show that it is not."""
    num_rows = 2**24
    drawn = draw(torch.full((100_000,), 7), num_rows=num_rows, probability=1.0).numpy()
    assert abs(drawn.mean() / num_rows - 0.5) < 0.005
    assert stats.chisquare(np.bincount(drawn & 15, minlength=16)).pvalue > 1e-4


@given(
    probability=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 2**31),
    num_rows=st.integers(1, 9),
)
def test_swapped_ids_are_live_and_reserved_rows_stay(probability, seed, step, num_rows):
    ids = torch.arange(200) % num_rows
    drawn = draw(ids, num_rows=num_rows, probability=probability, seed=seed, step=step)
    reserved = ids < 2
    assert torch.equal(drawn[reserved], ids[reserved])
    if (~reserved).any():
        assert int(drawn[~reserved].min()) >= 2
        assert int(drawn.max()) < num_rows
    if probability == 0.0 or num_rows <= 3:
        assert torch.equal(drawn, ids)


def test_certain_swaps_never_keep_the_row():
    ids = torch.arange(5000) % 10 + 2
    assert (draw(ids, probability=1.0) != ids).all()


def test_steps_features_and_seeds_draw_differently():
    ids = torch.full((4000,), 5)
    base = draw(ids)
    assert torch.equal(base, draw(ids))
    for other in (draw(ids, step=2), draw(ids, seed=2), draw(ids, feature="history")):
        assert not torch.equal(base, other)


@given(cut=st.integers(0, 40), lengths=st.lists(st.integers(0, 5), min_size=40, max_size=40))
def test_slices_of_a_batch_draw_what_the_batch_draws(cut, lengths):
    """Ranks hold contiguous slices: with their sample offset they swap as one rank would."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.arange(int(offsets[-1])) % 10 + 2
    whole = draw(ids, offsets=offsets)
    at = int(offsets[cut])
    first = draw(ids[:at], offsets=offsets[: cut + 1])
    second = draw(ids[at:], offsets=offsets[cut:], sample_offset=cut)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_inside_the_lookup_only_in_training_and_gradient_goes_to_the_swapped_row(backend):
    table = TableConfig("item", 50, 1, ("item",))
    tables = EmbeddingTables([table], SGD(1.0), sse={"item": SSEConfig(0.5)}, seed=9, backend=backend)
    tables.weight("item").copy_(torch.arange(50.0)[:, None])
    ids, offsets = torch.arange(2, 34), torch.arange(33)
    expected = draw(ids, num_rows=50, probability=0.5, seed=9, sample_offset=5)
    assert not torch.equal(expected, ids)
    tables.set_context(1, sample_offset=5)
    pooled = tables(ids, offsets)
    assert pooled[:, 0].tolist() == expected.tolist()
    pooled.sum().backward()
    tables.step(1)
    touched = tables.state("item")["last_update_step"].nonzero()[:, 0]
    assert touched.tolist() == sorted(set(expected.tolist()))
    moved = torch.arange(50.0) - tables.weight("item")[:, 0]
    assert moved.tolist() == np.bincount(expected.numpy(), minlength=50).tolist()
    tables.eval()
    tables.weight("item").copy_(torch.arange(50.0)[:, None])
    assert tables(ids, offsets)[:, 0].tolist() == ids.tolist()


@pytest.mark.parametrize("num_rows", [40, 2**22 + 10])
def test_compiled_swaps_equal_reference_bitwise(num_rows):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 6, (300,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, num_rows, (int(offsets[-1]),), generator=generator)
    table = TableConfig("item", num_rows, 1, ("item",))
    tables = EmbeddingTables([table], SGD(1.0), sse={"item": SSEConfig(0.4)}, seed=9)
    tables.set_context(1, sample_offset=3)
    tables(ids, offsets).sum().backward()
    expected = draw(ids, num_rows=num_rows, probability=0.4, seed=9, sample_offset=3, offsets=offsets)
    assert torch.equal(tables._records[0].indices, expected)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=200),
    num_rows=st.sampled_from([1, 3, 40, 2**22 + 10]),
    probability=st.sampled_from([0.0, 0.3, 1.0]),
    sample_offset=st.integers(0, 2**31),
    step=st.integers(1, 2**32 - 1),
)
def test_compiled_swaps_of_one_feature_equal_reference_bitwise(lengths, num_rows, probability, sample_offset, step):
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.randint(0, num_rows, (int(offsets[-1]),), generator=torch.Generator().manual_seed(0))
    settings = {"num_rows": num_rows, "probability": probability, "sample_offset": sample_offset, "step": step}
    expected = draw(ids, offsets=offsets, **settings)
    assert torch.equal(draw(ids, offsets=offsets + 7, backend="numba", **settings), expected)


def test_drop_in_embedding_draws_in_training_alone_and_resumes():
    def module():
        torch.manual_seed(0)
        return StochasticSharedEmbedding(50, 3, padding_idx=0, probability=0.5, seed=4)

    ids = torch.arange(40).view(8, 5)
    shared = module()
    plain = torch.nn.functional.embedding(ids, shared.weight)
    first, second = shared(ids), shared(ids)
    assert first.shape == (8, 5, 3)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)
    assert not first[0, 0].any()
    assert 0.3 < (first != plain).any(dim=-1).float().mean() < 0.7
    resumed = module()
    resumed.load_state_dict(shared.state_dict())
    assert torch.equal(resumed(ids), shared(ids))
    assert torch.equal(shared.eval()(ids), plain)
    with pytest.raises(ValueError, match="None or 0"):
        StochasticSharedEmbedding(50, 3, padding_idx=5)


def test_drop_in_embedding_sends_the_gradient_to_the_swapped_row():
    shared = StochasticSharedEmbedding(4, 1, probability=1.0)
    shared(torch.tensor([2, 2, 2])).sum().backward()
    assert shared.weight.grad[2] == 0.0
    assert shared.weight.grad.sum() == 3.0


def test_ids_with_places_of_their_own():
    """Row-wise input distribution: samples and positions are given, not offsets."""
    ids = np.arange(2, 12)
    places = {"samples": np.arange(10)[::-1].copy(), "positions": np.zeros(10, dtype=np.int64)}
    kwargs = {
        "table": TableConfig("item", 12, 4, ("item",)),
        "feature": "item",
        "config": SSEConfig(0.5),
        "seed": 1,
        "step": 1,
    }
    turned = swap_ids(ids, **places, **kwargs)
    straight = swap_ids(ids[::-1].copy(), np.arange(10), places["positions"], **kwargs)
    assert turned.tolist() == straight[::-1].tolist()


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_impossible_probability_is_refused(probability):
    with pytest.raises(ValueError, match="probability"):
        SSEConfig(probability)


def test_unknown_features_and_split_tables_are_refused():
    table = TableConfig("item", 10, 4, ("item",), row_start=0, row_count=5)
    with pytest.raises(ValueError, match=r"\['itme'\]"):
        EmbeddingTables([table], SGD(), sse={"itme": SSEConfig()}, backend="reference")
    with pytest.raises(ValueError, match="sse_outside"):
        EmbeddingTables([table], SGD(), sse={"item": SSEConfig()}, backend="reference")
    EmbeddingTables([table], SGD(), sse={"item": SSEConfig()}, backend="reference", sse_outside=True)
