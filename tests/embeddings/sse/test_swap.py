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
from embeddings.kernels.swap import swap, swap_any, swap_classes
from embeddings.optim import SGD
from embeddings.sse import StochasticSharedEmbedding
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import distance_thresholds, swap_ids
from embeddings.tables.config import TableConfig


def draw(ids, *, num_rows=12, offsets=None, feature="item", **settings):
    offsets = torch.arange(len(ids) + 1) if offsets is None else offsets
    asked = {name: settings.pop(name) for name in ("graph", "rho", "restart", "include_unknown") if name in settings}
    config = SSEConfig(settings.pop("probability", 0.3), **asked)
    settings = {"seed": 1, "step": 1, "backend": "reference"} | settings
    table = TableConfig("item", num_rows, 4, (feature,))
    return swap(ids, offsets, table=table, feature=feature, config=config, **settings)


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


# --- SSE-Graph -------------------------------------------------------------------------------------------------------


def graph_of(pairs, num_rows, **settings):
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Graph.from_edges(ends[:, 0], ends[:, 1], num_rows, **settings)


def complete(num_rows, first_live_row=2):
    live = np.arange(first_live_row, num_rows)
    source, target = (ends.ravel() for ends in np.meshgrid(live, live))
    return Graph.from_edges(source, target, num_rows, first_live_row=first_live_row)


def test_vector_of_our_own_with_a_graph():
    """Fixes which streams decide for a neighbour, give it, and draw again: 11 is the one row that 2 is not beside."""
    graph = graph_of([(2, k) for k in range(3, 11)] + [(5, 6)], 12)
    ids = torch.tensor([2, 2, 2, 2, 2, 2, 5, 5, 5, 11, 1, 0])
    settings = {"graph": graph, "rho": 1.5, "probability": 1.0, "seed": 2024}
    assert [draw(ids, step=step, **settings).tolist() for step in (1, 2)] == VECTOR_OF_A_GRAPH
    big = torch.tensor([2_000_000, 7_000_000, 12_000_000])
    graph = graph_of([(2_000_000, k) for k in range(3_000_000, 3_000_005)] + [(7_000_000, 12_000_000)], 2**24)
    settings = {"graph": graph, "rho": 1e7, "probability": 1.0, "seed": 2024}
    assert draw(big.repeat(2), num_rows=2**24, step=3, **settings).tolist() == VECTOR_OF_A_GRAPH_OF_TWO_WORDS
    ring = graph_of([(k, k + 1) for k in range(2, 11)], 12)
    walks = draw(ids, step=1, graph=ring, restart=0.25, probability=1.0, seed=2024)
    assert walks.tolist() == VECTOR_OF_WALKS


VECTOR_OF_A_GRAPH = [
    [5, 3, 6, 5, 5, 4, 10, 10, 2, 2, 1, 0],
    [5, 6, 11, 4, 8, 9, 11, 8, 2, 8, 1, 0],
]
VECTOR_OF_WALKS = [3, 3, 4, 4, 4, 4, 4, 7, 4, 10, 1, 0]
VECTOR_OF_A_GRAPH_OF_TWO_WORDS = [3000000, 14867061, 7000000, 3000003, 7602438, 7000000]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("degree", "rho"), [(3, 4.0), (3, 500.0), (8, 2.0), (1, 1.25)])
def test_chi_square_against_equation_3(backend, degree, rho):
    """p(j, j) = 1 - p0, p(j, k) / p(j, l) = rho for each neighbour k and other l; p-values below 1e-4 would be a fault.

    With eight of nine other rows as neighbours most draws of the ninth are drawn again.
    """
    num_rows, probability, num_samples, j = 12, 0.3, 200_000, 5
    others = [row for row in range(2, num_rows) if row != j]
    neighbours = others[-degree:]
    graph = graph_of([(j, k) for k in neighbours] + [(2, 3)], num_rows, symmetric=False)
    drawn = draw(
        torch.full((num_samples,), j), num_rows=num_rows, probability=probability, graph=graph, rho=rho, backend=backend
    ).numpy()
    counts = np.bincount(drawn, minlength=num_rows)
    z = rho * degree + len(others) - degree
    expected = np.zeros(num_rows)
    expected[others] = num_samples * probability / z
    expected[neighbours] *= rho
    expected[j] = num_samples * (1 - probability)
    assert counts[:2].sum() == 0
    assert expected[2:].min() > 5  # what the chi-square distribution needs
    assert stats.chisquare(counts[2:], expected[2:]).pvalue > 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_without_edges_with_all_edges_and_with_rho_1_it_is_sse_se(backend):
    """Bit for bit: where a graph says nothing, it changes nothing."""
    ids = torch.arange(3000) % 10 + 2
    plain = draw(ids, backend=backend)
    graph = graph_of([(2, 3), (4, 5), (5, 6)], 12)
    for same in ((graph_of([], 12), 7.0), (complete(12), 7.0), (graph, 1.0)):
        assert torch.equal(draw(ids, graph=same[0], rho=same[1], backend=backend), plain)
    assert not torch.equal(draw(ids, graph=graph, rho=7.0, backend=backend), plain)
    # Rows without a neighbour draw as without a graph.
    alone = ids > 6
    assert torch.equal(draw(ids, graph=graph, rho=7.0, backend=backend)[alone], plain[alone])


def visits(graph, j, restart):
    """How often a walk with restart from j is at each row, but for its starts: pi = (c e_j + (1 - c) pi) P, where rows
    without neighbours lead to j."""
    steps = np.zeros((graph.num_rows, graph.num_rows))
    for row in range(graph.num_rows):
        listed = graph.neighbours[graph.offsets[row] : graph.offsets[row + 1]]
        steps[row, listed if len(listed) else j] = 1 / max(1, len(listed))
    return np.linalg.solve(np.eye(graph.num_rows) - (1 - restart) * steps.T, restart * steps[j])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("restart", "symmetric"), [(0.15, True), (0.5, False), (1.0, True)])
def test_chi_square_of_walks_with_restart(backend, restart, symmetric):
    """p(j, k) = p0 pi(k) / (1 - pi(j)); directed graphs have rows that lead nowhere."""
    pairs = [(5, 6), (5, 7), (6, 8), (7, 8), (8, 9), (9, 5), (8, 10), (3, 4)]
    graph, num_samples, probability, j = graph_of(pairs, 12, symmetric=symmetric), 200_000, 0.3, 5
    pi = visits(graph, j, restart)
    pi[j] = 0.0
    expected = num_samples * probability * pi / pi.sum()
    expected[j] = num_samples * (1 - probability)
    drawn = draw(
        torch.full((num_samples,), j), probability=probability, graph=graph, restart=restart, backend=backend
    ).numpy()
    counts = np.bincount(drawn, minlength=12)
    reached = expected > 1e-9
    assert counts[~reached].sum() == 0
    assert expected[reached].min() > 5
    assert stats.chisquare(counts[reached], expected[reached]).pvalue > 1e-4
    # A row without neighbours has nowhere to walk to: it draws as without a graph.
    ids = torch.full((2000,), 11)
    assert torch.equal(draw(ids, graph=graph, restart=restart, backend=backend), draw(ids, backend=backend))


@st.composite
def graphs(draw):
    """Graphs of one to seven live rows: empty, complete, a star, or any pairs; the table's first live row 0 or 2."""
    first, live = draw(st.sampled_from([0, 2])), draw(st.integers(1, 7))
    row = st.integers(first, first + live - 1)
    kind = draw(st.sampled_from(["empty", "complete", "star", "any"]))
    if kind == "complete":
        return first, complete(first + live, first)
    pairs = {
        "empty": [],
        "star": [(first, first + k) for k in range(1, live)],
        "any": draw(st.lists(st.tuples(row, row), max_size=15)),
    }
    return first, graph_of(pairs[kind], first + live, first_live_row=first, symmetric=draw(st.booleans()))


@given(
    graph=graphs(),
    rho=st.sampled_from([1.0, 1.5, 50.0, 1e12]),
    restart=st.sampled_from([None, 0.1, 1.0]),
    probability=st.sampled_from([0.2, 1.0]),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=150),
    sample_offset=st.integers(0, 2**31),
    step=st.integers(1, 2**32 - 1),
)
def test_any_graph_gives_the_reference_bits_and_what_equation_3_allows(
    graph, rho, restart, probability, lengths, sample_offset, step
):
    first, graph = graph
    config = SSEConfig(probability, graph, rho) if restart is None else SSEConfig(probability, graph, restart=restart)
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.randint(0, graph.num_rows, (int(offsets[-1]),), generator=torch.Generator().manual_seed(step % 100))
    table = TableConfig("item", graph.num_rows, 1, ("item",), first_live_row=first)
    expected, compiled = (
        swap(
            ids, offsets, table=table, feature="item", config=config, seed=3, step=step, sample_offset=sample_offset,
            backend=backend,
        )
        for backend in ("reference", "cpu")
    )  # fmt: skip
    assert torch.equal(compiled, expected)
    reserved = ids < first
    assert torch.equal(expected[reserved], ids[reserved])
    drawn, live = expected[~reserved], ids[~reserved]
    assert bool(((drawn >= first) & (drawn < graph.num_rows)).all())
    if probability == 1.0 and graph.num_rows - first > 1:
        assert bool((drawn != live).all())
        if restart == 1.0 or (restart is None and rho == 1e12):
            # Of 1e12 the others' share is below 2^-32.
            near = graph.has_edges(live.numpy(), drawn.numpy())
            assert near[graph.degrees[live.numpy()] > 0].all()


def test_lists_of_more_than_two_to_the_22_neighbours():
    """A hub beside every other row: its neighbours are drawn by two words, those of the others are the hub."""
    num_rows = 2**22 + 100
    hub = 1000
    graph = Graph.from_edges(np.full(num_rows - 2, hub), np.arange(2, num_rows), num_rows)
    ids = torch.where(torch.arange(20_000) % 2 == 0, hub, torch.arange(20_000) * 200 + 3)
    settings = {"num_rows": num_rows, "graph": graph, "rho": 1e9, "probability": 1.0}
    drawn = draw(ids, **settings)
    assert torch.equal(draw(ids, backend="cpu", **settings), drawn)
    assert bool((drawn[1::2] == hub).float().mean() > 0.99)
    of_hub = drawn[::2].numpy()
    assert abs(of_hub.mean() / num_rows - 0.5) < 0.01
    assert stats.chisquare(np.bincount(of_hub & 15, minlength=16)).pvalue > 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_graphs_inside_the_lookup(backend):
    """Two features of one table with one graph and two rho, and one of another table: each as alone."""
    tables = (TableConfig("item", 12, 1, ("item", "history")), TableConfig("user", 40, 1, ("user",)))
    graph, other = graph_of([(2, 3), (3, 4), (7, 9)], 12), graph_of([(k, k + 1) for k in range(2, 39)], 40)
    sse = {
        "item": SSEConfig(0.5, graph, 3.0),
        "history": SSEConfig(0.5, graph, 40.0),
        "user": SSEConfig(0.5, other, 9.0),
    }
    module = EmbeddingTables(tables, SGD(1.0), sse=sse, seed=9, backend=backend)
    ids = torch.cat([torch.arange(12), torch.arange(12).flip(0), torch.arange(2, 38, 3)])
    module.set_context(1, sample_offset=5)
    module(ids, torch.arange(37)).sum().backward()
    expected = [
        swap(
            ids[f * 12 : f * 12 + 12], torch.arange(13), table=tables[f // 2], feature=feature, config=sse[feature],
            seed=9, step=1, sample_offset=5, backend="reference",
        )
        for f, feature in enumerate(("item", "history", "user"))
    ]  # fmt: skip
    assert torch.equal(module._records[0].indices, torch.cat(expected))
    assert not torch.equal(torch.cat(expected), ids)


def test_ids_outside_the_table_are_left_to_the_lookup():
    """With bounds ignored they count as padding, so nothing may be drawn for them or looked up in the graph."""
    ids = torch.tensor([-1, 12, 10**12, -(10**12), 5, 0])
    for backend in ("reference", "cpu"):
        for settings in ({}, {"graph": complete(12), "rho": 3.0}):
            drawn = draw(ids, probability=1.0, backend=backend, **settings)
            assert drawn[[0, 1, 2, 3, 5]].tolist() == ids[[0, 1, 2, 3, 5]].tolist()
            assert drawn[4] != 5


# --- both ------------------------------------------------------------------------------------------------------------


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
)
def test_slices_of_a_batch_draw_what_the_batch_draws(cut, lengths, sample_offset):
    """Ranks hold contiguous slices: with their sample offset they swap as one would, also inside a block of 256."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.arange(int(offsets[-1])) % 10 + 2
    whole = draw(ids, offsets=offsets, sample_offset=sample_offset)
    at = int(offsets[cut])
    first = draw(ids[:at], offsets=offsets[: cut + 1], sample_offset=sample_offset)
    second = draw(ids[at:], offsets=offsets[cut:], sample_offset=sample_offset + cut)
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


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_drop_in_embedding_takes_what_torch_takes(padding):
    """Any padding row, other shapes and types of ids, torch's own arguments and errors, and pretrained rows."""
    shared = StochasticSharedEmbedding(8, 2, padding, 1.0, probability=1.0, sparse=True)
    plain = torch.nn.Embedding(8, 2, padding, 1.0, sparse=True)
    plain.load_state_dict({"weight": shared.weight.detach()})
    assert shared.padding_idx == plain.padding_idx
    ids = torch.arange(8, dtype=torch.int32).repeat(40)
    shared.weight.data.copy_(torch.arange(8.0)[:, None] / 100)
    drawn = (shared(ids)[:, 0] * 100).round().int()
    reserved = ids == (-1 if plain.padding_idx is None else plain.padding_idx)
    assert bool((drawn[~reserved] != ids[~reserved]).all())
    assert torch.equal(drawn[reserved], ids[reserved])
    assert set(drawn[~reserved].tolist()) == set(range(8)) - {plain.padding_idx}
    assert shared(torch.tensor(5)).shape == (2,)
    assert shared(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 2)
    for bad in (-1, 8):
        with pytest.raises(IndexError):
            shared(torch.tensor([bad, 1]))
    rows = torch.arange(12.0).view(6, 2)
    pretrained = StochasticSharedEmbedding.from_pretrained(rows, padding_idx=padding, freeze=False)
    assert torch.equal(pretrained.eval()(torch.arange(6)), rows)
    assert pretrained.weight.requires_grad


@pytest.mark.parametrize("padding", [None, 0, 3])
def test_drop_in_embedding_with_a_graph(padding):
    """Neighbours by the ids that the user knows, wherever the padding row is."""
    ring = graph_of([(k, k + 1) for k in range(4, 11)], 12, first_live_row=0)
    shared = StochasticSharedEmbedding(12, 1, padding, probability=1.0, graph=ring, rho=1e12)
    shared.weight.data.copy_(torch.arange(12.0)[:, None])
    ids = torch.arange(4, 12).repeat(50)
    drawn = shared(ids)[:, 0].long()
    assert ring.has_edges(ids.numpy(), drawn.numpy()).all()
    assert "rho=1e+12" in repr(shared)
    with pytest.raises(ValueError, match=r"table 'words' has 13 rows, its graph 12"):
        StochasticSharedEmbedding(13, 1, padding, graph=ring, name="words")
    with pytest.raises(ValueError, match=r"edges at rows below 1"):
        StochasticSharedEmbedding(12, 1, 5, graph=ring)


def test_drop_in_embeddings_of_ranks_draw_as_one():
    ids = torch.arange(40).view(10, 4)
    whole, part = (StochasticSharedEmbedding(40, 1, probability=0.5) for _ in range(2))
    part.load_state_dict(whole.state_dict())
    part.sample_offset = 7
    assert torch.equal(part(ids[7:]), whole(ids)[7:])


def test_any_module_can_be_given_swapped_ids():
    """The functional form: same shape and type, the draws of a table of that name."""
    ids = (torch.arange(60) % 10 + 2).view(20, 3)
    table, config = TableConfig("item", 12, 1, ("item",), first_live_row=0), SSEConfig(0.5, complete(12, 0), 3.0)
    expected = swap(
        ids.flatten(), torch.arange(21) * 3, table=table, feature="item", config=config, seed=4, step=2, sample_offset=3
    )
    swapped = swap_any(ids.int(), 12, config, seed=4, step=2, name="item", sample_offset=3)
    assert swapped.dtype == torch.int32
    assert torch.equal(swapped, expected.view(20, 3).int())
    assert not torch.equal(swapped, ids)
    assert torch.equal(swap_any(ids, 12, SSEConfig(0.0), seed=4, step=2), ids)
    with pytest.raises(ValueError, match=r"has 13 rows, its graph 12"):
        swap_any(ids, 13, config, seed=4, step=2)


# --- label side ------------------------------------------------------------------------------------------------------


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
