"""SSE-Graph: equation 3, walks with restart, and the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.swap import swap
from embeddings.optim import SGD
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import swap_in_numpy
from embeddings.tables.config import TableConfig
from tests.embeddings.sse.swaps import complete, draw, graph_of


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
        function(
            ids, offsets, table=table, feature="item", config=config, seed=3, step=step, sample_offset=sample_offset
        )
        for function in (swap_in_numpy, swap)
    )
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
        swap_in_numpy(
            ids[f * 12 : f * 12 + 12], torch.arange(13), table=tables[f // 2], feature=feature, config=sse[feature],
            seed=9, step=1, sample_offset=5,
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
