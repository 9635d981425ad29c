"""Graphs over rows: against sets of pairs, and what is not a graph is refused with its place."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.kernels.swap import swap_any
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph, pack_graphs


@st.composite
def edges(draw):
    """(number of rows, pairs of rows): also one row, no pair, and repeated or self-directed ones."""
    num_rows = draw(st.integers(1, 7))
    row = st.integers(0, num_rows - 1)
    return num_rows, draw(st.lists(st.tuples(row, row), max_size=30))


def build(num_rows, pairs, **settings):
    ends = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return Graph.from_edges(ends[:, 0], ends[:, 1], num_rows, **settings)


@given(edges=edges(), symmetric=st.booleans(), first_live_row=st.integers(0, 3))
def test_lists_are_the_set_of_edges_sorted(edges, symmetric, first_live_row):
    num_rows, pairs = edges
    graph = build(num_rows, pairs, symmetric=symmetric, first_live_row=first_live_row)
    kept = {(j, k) for j, k in pairs if j != k and min(j, k) >= first_live_row}
    kept |= {(k, j) for j, k in kept} if symmetric else set()
    assert graph.num_rows == num_rows
    assert graph.degrees.tolist() == [sum(j == row for j, _ in kept) for row in range(num_rows)]
    for row in range(num_rows):
        listed = graph.neighbours[graph.offsets[row] : graph.offsets[row + 1]]
        assert listed.tolist() == sorted(k for j, k in kept if j == row)
    everyone = np.array([(j, k) for j in range(num_rows) for k in range(num_rows)]).T
    assert graph.has_edges(*everyone).tolist() == [(j, k) in kept for j, k in everyone.T.tolist()]
    graph.check_fits("t", num_rows, first_live_row)


@given(edges=edges(), by=st.integers(0, 6))
def test_turned_graphs_keep_their_edges(edges, by):
    num_rows, pairs = edges
    graph = build(num_rows, pairs, first_live_row=0)
    turned = build(num_rows, [((j - by) % num_rows, (k - by) % num_rows) for j, k in pairs], first_live_row=0)
    assert graph.turned(by).offsets.tolist() == turned.offsets.tolist()
    assert graph.turned(by).neighbours.tolist() == turned.neighbours.tolist()


def test_thresholds_are_exact_at_both_ends_and_in_between():
    """rho d / Z with Z = rho d + N - 1 - d, in units of 2^-32; nine other rows."""
    graph = build(10, [(0, k) for k in range(1, 10)], first_live_row=0)
    thresholds = graph.thresholds(3.0, 9)
    assert thresholds[0] == 0
    assert thresholds[9] == 2**32
    assert thresholds[3] == 2**32 * 9 // 15 + 1  # 0.6 is no multiple of 2^-32: rounded up
    assert graph.thresholds(3.0, 9) is thresholds


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1, 2], [2], "equally long"),
        ([1.0], [2.0], "source must hold integers"),
        ([1, 2], [2, 5], "target of edge 1 is 5, not a row of a table of 5 rows"),
        ([-1, 2], [2, 3], "source of edge 0 is -1"),
    ],
)
def test_bad_edges_are_refused_with_their_place(source, target, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_edges(np.array(source), np.array(target), 5)


@pytest.mark.parametrize(
    ("offsets", "neighbours", "message"),
    [
        ([0, 1], [0], "row 0 is its own neighbour"),
        ([0, 1, 2], [1], "offsets must run from 0 to the number of entries, 1, not 0 to 2"),
        ([0, 2, 1, 1], [1], "must not decrease, as they do after row 1"),
        ([0, 1, 2], [1, 2], "row 1 has the neighbour 2, which is not one of 2 rows"),
        ([0, 0, 2, 2], [2, 0], "neighbours of row 1 must ascend"),
        ([0, 0, 2, 2], [2, 2], "neighbours of row 1 must ascend"),
    ],
)
def test_what_is_not_a_graph_is_refused_with_its_place(offsets, neighbours, message):
    with pytest.raises(ValueError, match=message):
        Graph(np.array(offsets), np.array(neighbours, dtype=np.int32))


def test_types_other_than_the_kernels_are_refused():
    with pytest.raises(ValueError, match=r"neighbours int32.*Graph\.from_edges"):
        Graph(np.array([0, 0]), np.empty(0, dtype=np.int64))
    with pytest.raises(ValueError, match=r"num_rows must lie in"):
        build(0, [])
    with pytest.raises(ValueError, match=r"num_rows must lie in"):
        build(2**31 + 1, [])


def test_graphs_of_another_table_are_refused():
    graph = build(5, [(1, 2)], first_live_row=0)
    with pytest.raises(ValueError, match=r"table 'user' has 6 rows, its graph 5: build it with num_rows=6"):
        graph.check_fits("user", 6, 0)
    with pytest.raises(ValueError, match=r"edges at rows below 2.*first_live_row=2"):
        graph.check_fits("user", 5, 2)


def test_packed_graphs_are_found_again():
    one, two = build(4, [(0, 1), (0, 2)], first_live_row=0), build(3, [(0, 2)], first_live_row=0)
    packed = pack_graphs([(one, 2.0, 3), None, (two, 2.0, 2), (one, 5.0, 3)])
    assert packed.starts[1].tolist() == [-1, -1]
    for f, graph, rho in ((0, one, 2.0), (2, two, 2.0), (3, one, 5.0)):
        at, thresholds_at = packed.starts[f]
        for row in range(graph.num_rows):
            first, last = packed.offsets[at + row : at + row + 2]
            expected = graph.neighbours[graph.offsets[row] : graph.offsets[row + 1]]
            assert packed.neighbours[first:last].tolist() == expected.tolist()
            threshold = packed.thresholds[thresholds_at + last - first]
            assert threshold == graph.thresholds(rho, graph.num_rows - 1)[last - first]
    assert len(packed.neighbours) == len(one.neighbours) + len(two.neighbours)
    alone = pack_graphs([None, (one, 2.0, 3)])
    assert alone.offsets is one.offsets
    assert alone.neighbours is one.neighbours
    assert pack_graphs([None]).starts.tolist() == [[-1, -1]]


def test_copies_of_a_model_share_its_graph():
    graph = build(3, [(0, 1)], first_live_row=0)
    assert copy.deepcopy({"sse": graph})["sse"] is graph
    again = pickle.loads(pickle.dumps(graph))
    assert again is not graph
    assert again.neighbours.tolist() == graph.neighbours.tolist()


def test_read_only_arrays_are_swapped_by():
    """As they are: memory-mapped ones are read-only."""
    offsets, neighbours = np.array([0, 1, 2]), np.array([1, 0], dtype=np.int32)
    offsets.flags.writeable = neighbours.flags.writeable = False
    graph = Graph(offsets, neighbours)
    assert graph.neighbours is neighbours
    found = swap_any(torch.tensor([0, 1]), 2, SSEConfig(1.0, graph, 1e9), seed=0, step=1)
    assert found.tolist() == [1, 0]
