"""Edges for SSE-Graph: between movies with similar genres or titles, users of one age, items of one cluster."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.generalization.label_randomization import write_table

MAX_TITLES = 20
"""A word that occurs in more titles than this makes no edges."""
MIN_LETTERS = 4
Edges = set[tuple[int, int]]


def genre_edges(genres: Mapping[int, str]) -> Edges:
    """Return pairs of movies with two genres in common or the same genres; ``genres``: ``A|B|..`` of each movie."""
    by_set: dict[frozenset[str], list[int]] = {}
    for movie, text in genres.items():
        by_set.setdefault(frozenset(text.split("|")), []).append(movie)
    edges: Edges = set()
    for left, right in itertools.combinations_with_replacement(by_set, 2):
        if left == right:
            edges.update(itertools.combinations(sorted(by_set[left]), 2))
        elif len(left & right) >= 2:
            edges.update(_ordered(pair) for pair in itertools.product(by_set[left], by_set[right]))
    return edges


def title_edges(titles: Mapping[int, str]) -> Edges:
    """Return pairs that share a word of at least MIN_LETTERS letters that occurs in at most MAX_TITLES titles.

    The year in brackets does not count as a word.
    """
    having: dict[str, set[int]] = {}
    for movie, title in titles.items():
        for word in re.findall(rf"[^\W\d_]{{{MIN_LETTERS},}}", title.lower()):
            having.setdefault(word, set()).add(movie)
    return _within(movies for movies in having.values() if len(movies) <= MAX_TITLES)


def cluster_edges(clusters: Mapping[int, int]) -> Edges:
    """Return all pairs within a cluster, such as an age group."""
    members: dict[int, list[int]] = {}
    for row, cluster in clusters.items():
        members.setdefault(cluster, []).append(row)
    return _within(members.values())


def write_edges(edges: Edges, path: Path) -> None:
    """Write the columns ``source`` and ``target``, each edge once, sorted."""
    pairs = sorted(edges)
    columns = {name: pa.array([pair[end] for pair in pairs], pa.int64())
               for end, name in enumerate(("source", "target"))}  # fmt: skip
    write_table(pa.table(columns), path)


def write_edges_by(
    rows: Path, column: str, edges_of: Callable[[dict[int, Any]], Edges], path: Path, of: str = "item"
) -> None:
    """Write the edges that ``edges_of`` makes from ``column`` of the items (or ``of``), unless ``path`` exists."""
    if not path.exists():
        table = pq.read_table(rows, columns=[of, column])
        write_edges(edges_of(dict(zip(*(values.to_pylist() for values in table.columns), strict=True))), path)


def _within(groups: Iterable[Iterable[int]]) -> Edges:
    return {pair for group in groups for pair in itertools.combinations(sorted(group), 2)}


def _ordered(pair: Sequence[int]) -> tuple[int, int]:
    return min(pair), max(pair)
