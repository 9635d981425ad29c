"""Edges between movies, written out by hand."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.papers.sse.graphs import MAX_TITLES, cluster_edges, genre_edges, title_edges, write_edges


def test_movies_with_two_genres_in_common_or_the_same_ones() -> None:
    genres = {1: "Drama", 2: "Drama", 3: "Comedy|Drama", 4: "Drama|Comedy|War", 5: "War", 6: "Comedy|Drama"}
    assert genre_edges(genres) == {(1, 2), (3, 4), (3, 6), (4, 6)}


def test_titles_that_share_a_rare_word_of_four_letters() -> None:
    titles = {1: "Toy Story (1995)", 2: "Toy Story 2 (1999)", 3: "Story of Us, The (1999)", 4: "Jumanji (1995)"}
    assert title_edges(titles) == {(1, 2), (1, 3), (2, 3)}
    assert title_edges(dict.fromkeys(range(MAX_TITLES), "Story")) != set()
    assert title_edges(dict.fromkeys(range(MAX_TITLES + 1), "Story")) == set()


def test_items_of_a_cluster_and_the_file_of_edges(tmp_path: Path) -> None:
    edges = cluster_edges({7: 0, 3: 0, 5: 1, 1: 0})
    assert edges == {(3, 7), (1, 3), (1, 7)}
    write_edges(edges, tmp_path / "rows" / "edges.parquet")
    table = pq.read_table(tmp_path / "rows" / "edges.parquet")
    assert table.to_pydict() == {"source": [1, 1, 3], "target": [3, 7, 7]}
