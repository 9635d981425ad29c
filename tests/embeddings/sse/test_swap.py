"""SSE: the distributions of equations 3 and 5, the bits, and that neither depends on how a batch is cut."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.swap import swap_any, swap_classes
from embeddings.optim import SGD
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import distance_thresholds, swap_ids
from embeddings.tables.config import TableConfig
from tests.embeddings.sse.swaps import complete, draw


def test_vector_of_our_own():
    """Fixes key, counter layout, distances, lanes and multiply-shift: a change of any of them changes recorded runs."""
    ids = torch.tensor([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 0])
    assert draw(ids, probability=0.5, seed=2024, step=3, sample_offset=6).tolist() == VECTOR
    offsets = torch.tensor([0, 3, 3, 8, 12])
    assert draw(ids, probability=0.5, seed=2024, step=3, offsets=offsets).tolist() == VECTOR_OF_LISTS
    big = torch.arange(2, 14) * 1_000_000
    assert draw(big, num_rows=2**24, probability=0.5, seed=2024, step=3).tolist() == VECTOR_OF_TWO_WORDS


VECTOR = [2, 3, 10, 5, 10, 7, 10, 9, 10, 9, 1, 0]
VECTOR_OF_LISTS = [2, 3, 4, 7, 10, 7, 6, 7, 10, 9, 1, 0]
VECTOR_OF_TWO_WORDS = [
    2000000,
    14867061,
    8940599,
    5000000,
    7602438,
    7000000,
    8000000,
    9000000,
    14312125,
    11000000,
    13436014,
    13000000,
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("j", [1, 5])
def test_chi_square_with_the_row_of_unknown_ids(backend, j):
    """N counts it: it becomes each live row, and each of them becomes it, as often as any other; padding never."""
    num_rows, probability, num_samples = 12, 0.3, 200_000
    ids = torch.full((num_samples,), j)
    drawn = draw(ids, num_rows=num_rows, probability=probability, include_unknown=True, backend=backend).numpy()
    counts = np.bincount(drawn, minlength=num_rows)
    assert counts[0] == 0
    expected = np.full(num_rows - 1, num_samples * probability / (num_rows - 2))
    expected[j - 1] = num_samples * (1 - probability)
    assert stats.chisquare(counts[1:], expected).pvalue > 1e-4
    assert (draw(torch.zeros(1000, dtype=torch.int64), probability=1.0, include_unknown=True) == 0).all()


@pytest.mark.parametrize("rho", [1.0, 5.0])
def test_the_row_of_unknown_ids_has_no_neighbours(rho):
    graph = Graph.from_edges(np.array([2, 2]), np.array([3, 4]), 8)
    settings = {"num_rows": 8, "probability": 1.0, "graph": graph, "rho": rho, "include_unknown": True}
    from_two = draw(torch.full((60_000,), 2), **settings).numpy()
    z = 2 * rho + 4  # d neighbours, and N - 1 - d others: rows 1, 5, 6 and 7
    expected = 60_000 / z * np.array([1.0, rho, rho, 1.0, 1.0, 1.0])
    assert stats.chisquare(np.bincount(from_two, minlength=8)[[1, 3, 4, 5, 6, 7]], expected).pvalue > 1e-4
    from_unknown = draw(torch.full((60_000,), 1), **settings).numpy()
    assert stats.chisquare(np.bincount(from_unknown, minlength=8)[2:]).pvalue > 1e-4
    for backend in ("reference", "cpu"):
        both = draw(torch.arange(8).repeat(500), backend=backend, **settings)
        assert torch.equal(both, draw(torch.arange(8).repeat(500), **settings))


def test_a_table_without_a_row_of_unknown_ids_has_none_to_include():
    with pytest.raises(ValueError, match=r"'item' has no row of unknown ids .* leave include_unknown out"):
        swap_any(torch.arange(4), 8, SSEConfig(include_unknown=True), seed=1, step=1, name="item", first_live_row=1)


def test_samples_positions_and_steps_are_independent():
    """Hits of samples beside one another, of positions of one list, and of steps are uncorrelated."""
    num_samples, length = 40_000, 4
    ids = torch.full((num_samples * length,), 3)
    offsets = torch.arange(num_samples + 1) * length
    hits = (draw(ids, num_rows=2**20, offsets=offsets) != 3).numpy().reshape(num_samples, length)
    positions = np.corrcoef(hits.T)
    samples = np.corrcoef(hits[:, 0].reshape(-1, 4).T)
    later = (draw(ids, num_rows=2**20, offsets=offsets, step=2) != 3).numpy()
    # Standard errors are .005, .01 and .0025.
    assert np.abs(positions - np.eye(4)).max() < 0.02
    assert np.abs(samples - np.eye(4)).max() < 0.04
    assert abs(np.corrcoef(hits.ravel(), later)[0, 1]) < 0.01


def test_distances_are_geometric_across_blocks_too():
    """Distances between hits, and where in a block of 256 they are: chi-square; a p-value below 1e-4 is a fault."""
    probability, num_samples = 0.01, 2560 * 256
    drawn = draw(torch.full((num_samples,), 3), num_rows=2**20, probability=probability)
    hits = np.flatnonzero(drawn.numpy() != 3)
    assert stats.chisquare(np.bincount(hits % 256, minlength=256)).pvalue > 1e-4
    longest = 400
    distances = np.bincount(np.minimum(np.diff(hits), longest), minlength=longest + 1)[1:]
    expected = stats.geom.pmf(np.arange(1, longest + 1), probability)
    expected[-1] = stats.geom.sf(longest - 1, probability)
    # Few are long: what the chi-square distribution needs is five of a kind.
    kinds = np.minimum(np.arange(longest) // 8, 40)
    counts = (np.bincount(kinds, weights=each) for each in (distances, expected * (len(hits) - 1)))
    assert stats.chisquare(*counts).pvalue > 1e-4
    assert abs(len(hits) - probability * num_samples) < 5 * (probability * num_samples) ** 0.5


@given(probability=st.floats(0.0, 1.0) | st.sampled_from([1e-300, 2.0**-41, 2.0**-40, 1e-9, 0.01, 1 - 2.0**-53]))
def test_thresholds_of_distances_are_exact(probability):
    """(1 - (1 - p)^d) 2^32 to the nearest whole number, by fractions; a word of 2^32 - 1 is below that of p = 1."""
    thresholds = distance_thresholds(probability)
    assert len(thresholds) == 256
    for d in (1, 2, 7, 256):
        exact = (1 - (1 - Fraction(probability)) ** d) * 2**32
        assert abs(int(thresholds[d - 1]) - exact) <= Fraction(1, 2)
    assert not np.diff(thresholds.astype(np.int64)).min() < 0
    assert (probability < 1.0) or (thresholds == 2**32).all()


def test_above_two_to_the_22_every_row_can_be_drawn():
    """One 32-bit word over 2^24 rows would leave the draw uneven; the mean and the low bits show that it is not."""
    num_rows = 2**24
    drawn = draw(torch.full((100_000,), 7), num_rows=num_rows, probability=1.0).numpy()
    assert abs(drawn.mean() / num_rows - 0.5) < 0.005
    assert stats.chisquare(np.bincount(drawn & 15, minlength=16)).pvalue > 1e-4


# --- batches ----------------------------------------------------------------------------------------------------------


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


@given(
    cut=st.integers(0, 40),
    lengths=st.lists(st.integers(0, 5), min_size=40, max_size=40),
    sample_offset=st.integers(200, 300),
    include_unknown=st.booleans(),
    backend=st.sampled_from(["reference", "cpu"]),
)
def test_slices_of_a_batch_draw_what_the_batch_draws(cut, lengths, sample_offset, include_unknown, backend):
    """Ranks hold contiguous slices: with their sample offset they swap as one would, also inside a block of 256."""
    options = {"include_unknown": include_unknown, "backend": backend}
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.arange(int(offsets[-1])) % 11 + 1
    whole = draw(ids, offsets=offsets, sample_offset=sample_offset, **options)
    at = int(offsets[cut])
    first = draw(ids[:at], offsets=offsets[: cut + 1], sample_offset=sample_offset, **options)
    second = draw(ids[at:], offsets=offsets[cut:], sample_offset=sample_offset + cut, **options)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
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
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=300),
    num_rows=st.sampled_from([1, 3, 40, 2**22 + 10]),
    probability=st.sampled_from([0.0, 1e-12, 0.01, 0.3, 1.0]) | st.floats(0.0, 1.0),
    sample_offset=st.integers(0, 2**31) | st.sampled_from([1, 255, 256, 257, 511]),
    step=st.integers(1, 2**32 - 1),
)
def test_compiled_swaps_of_one_feature_equal_reference_bitwise(lengths, num_rows, probability, sample_offset, step):
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.randint(0, num_rows, (int(offsets[-1]),), generator=torch.Generator().manual_seed(0))
    settings = {"num_rows": num_rows, "probability": probability, "sample_offset": sample_offset, "step": step}
    expected = draw(ids, offsets=offsets, **settings)
    assert torch.equal(draw(ids, offsets=offsets + 7, backend="cpu", **settings), expected)


# --- label side -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [2, 5])
def test_swapped_classes_are_label_smoothing(num_classes):
    """Each class becomes each other with p / (C - 1): chi-square; the type of the labels stays."""
    probability, num_samples = 0.2, 100_000
    for label in (0, 1):
        labels = torch.full((num_samples,), float(label))
        swapped = swap_classes(labels, probability, seed=1, step=1, num_classes=num_classes)
        assert swapped.dtype == torch.float32
        counts = np.bincount(swapped.long().numpy(), minlength=num_classes)
        expected = np.full(num_classes, num_samples * probability / (num_classes - 1))
        expected[label] = num_samples * (1 - probability)
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_slices_of_labels_are_swapped_as_the_whole():
    labels = (torch.arange(101) % 3 == 0).float()
    whole = swap_classes(labels, 0.4, seed=1, step=9)
    parts = [swap_classes(labels[a:b], 0.4, seed=1, step=9, sample_offset=a) for a, b in ((0, 37), (37, 37), (37, 101))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(swap_classes(labels, 0.4, seed=1, step=10), whole)
    assert torch.equal(swap_classes(labels, 0.0, seed=1, step=9), labels)
    assert torch.equal(swap_classes(labels, 1.0, seed=1, step=9), 1 - labels)


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


@pytest.mark.parametrize("rho", [0.5, float("nan"), float("inf")])
def test_impossible_rho_is_refused(rho):
    with pytest.raises(ValueError, match="rho must be a finite number of at least 1"):
        SSEConfig(0.1, complete(5), rho)
    with pytest.raises(ValueError, match="needs a graph"):
        SSEConfig(0.1, rho=2.0)


def test_impossible_walks_are_refused():
    for restart in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"restart must lie in \[0.01, 1\]"):
            SSEConfig(0.1, complete(5), restart=restart)
    for settings in ({}, {"graph": complete(5), "rho": 2.0}):
        with pytest.raises(ValueError, match="needs a graph and no rho"):
            SSEConfig(0.1, restart=0.2, **settings)


def test_a_graph_of_another_size_is_refused_with_its_table_and_feature():
    with pytest.raises(ValueError, match=r"table 'item' of feature 'click' has 9 rows, its graph 8: .*num_rows=9"):
        EmbeddingTables(
            [TableConfig("item", 9, 4, ("click",))], SGD(), sse={"click": SSEConfig(0.1, complete(8))},
            backend="reference",
        )  # fmt: skip


def test_unknown_features_and_split_tables_are_refused():
    table = TableConfig("item", 10, 4, ("item",), row_start=0, row_count=5)
    with pytest.raises(ValueError, match=r"\['itme'\]"):
        EmbeddingTables([table], SGD(), sse={"itme": SSEConfig()}, backend="reference")
    with pytest.raises(ValueError, match="sse_outside"):
        EmbeddingTables([table], SGD(), sse={"item": SSEConfig()}, backend="reference")
    EmbeddingTables([table], SGD(), sse={"item": SSEConfig()}, backend="reference", sse_outside=True)
