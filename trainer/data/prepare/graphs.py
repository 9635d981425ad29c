"""Graphs between the ids of a table, for SSE-Graph: files of edges become sparse rows on disk. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embeddings.sse.graph import Graph
from trainer.data.columns import values
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.values import Kind
from trainer.data.columns.vocabulary import Codes
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, OFFSET, map_array, write_array
from trainer.data.sources.key_matches import LEAST_FOUND, KeyMatches, likely_reason, shown
from trainer.data.sources.source import Source, beside
from trainer.spec import DatasetSpec, JobSpec


@dataclass(frozen=True)
class EdgeFile:
    """A graph in the dataset: pairs of raw ids of ``table``, in two columns."""

    name: str
    table: str
    source: Source
    columns: tuple[str, str]
    max_unmatched: float
    """Share of edges with an id that training lacks, above which a warning is due."""


def edge_files(dataset: DatasetSpec, job: JobSpec) -> dict[str, EdgeFile]:
    """Return the graphs that the job's sse and regularizers name.

    Raises:
        DataError: a file, or a column of ids in it, is missing.
    """
    used = {sse.graph for sse in job.sse.values() if sse.graph is not None and sse.probability > 0}
    used |= {job.regularizers.laplacian.graph} if job.regularizers.laplacian is not None else set()
    files = {}
    for name in sorted(used):
        graph = dataset.graphs[name]
        source = Source(beside(graph.uri, dataset.uri), ids=(graph.source, graph.target))
        source.require([graph.source, graph.target])
        for column in (graph.source, graph.target):
            values.id_kind(source.column_type(column), f"{source.uri}, column '{column}'")
        table = dataset.features[graph.of].shares or graph.of
        files[name] = EdgeFile(name, table, source, (graph.source, graph.target), dataset.max_unmatched)
    return files


def write_graph(
    edges: EdgeFile,
    kind: Kind,
    vocabulary: pa.Array,
    directory: Path,
    log: Callable[[str], Any],
    warn: Callable[[str], Any],
) -> dict[str, Any]:
    """Write ``<name>.offsets.bin`` and ``<name>.neighbours.bin`` under ``directory``.

    Edges count in both directions. Edges with an id that ``vocabulary`` (row r >= 2 is entry r - 2) does not have are
    left out, counted and logged; more of them than ``max_unmatched`` of the dataset are a warning.

    Returns:
        The graph's entry in the manifest.

    Raises:
        DataError: no edge, or nearly none, joins two known ids, or an id is of another kind than the table's.
    """
    codes = Codes(vocabulary)
    parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
    num_edges = num_unknown = 0
    found = KeyMatches()
    for chunk in edges.source.stream(edges.columns):
        ends = [
            codes.encode(values.as_ids(chunk.column(column), kind, chunk.where(column))) for column in edges.columns
        ]
        for column, end in zip(edges.columns, ends, strict=True):
            found.add(KeyMatches.of(chunk.column(column), end))
        known = (ends[0] >= 0) & (ends[1] >= 0)
        num_edges += len(chunk)
        num_unknown += len(chunk) - int(known.sum())
        source, target = ((end[known] + NUM_SPECIAL_ROWS).astype(np.int32) for end in ends)
        parts.append((source, target))
    source, target = (np.concatenate([np.empty(0, np.int32), *[part[end] for part in parts]]) for end in (0, 1))
    graph = Graph.from_edges(source, target, len(vocabulary) + NUM_SPECIAL_ROWS, first_live_row=NUM_SPECIAL_ROWS)
    num_connected = int((graph.degrees > 0).sum())
    left = KeyMatches(num_edges, num_edges - num_unknown)
    where = f"{edges.source.uri}, columns '{edges.columns[0]}' and '{edges.columns[1]}'"
    is_empty = left.exceeds(max(edges.max_unmatched, 1 - LEAST_FOUND)) and num_connected < LEAST_FOUND * len(vocabulary)
    if is_empty or not len(graph.neighbours):
        joined = left.num_found if len(graph.neighbours) else "none"
        raise DataError(
            f"{joined} of its {num_edges:,} edges joins two ids of table '{edges.table}' that occur in training"
            f"{_unlike(found, vocabulary)}",
            where=where,
            remedy=f"check source, target and of in graphs.{edges.name}, or leave the graph out of sse",
        )
    if left.exceeds(edges.max_unmatched):
        left_out = f"{num_unknown:,} of {num_edges:,} edges are left out because training lacks one of their ids"
        warn(f"{where}: {left_out}{_unlike(found, vocabulary)}")
    for part, array, dtype in (("offsets", graph.offsets, OFFSET), ("neighbours", graph.neighbours, CODE)):
        write_array(directory / f"{edges.name}.{part}.bin", array, dtype)
    log(
        f"graph {edges.name}: {num_edges:,} edges, {num_unknown:,} left out because training lacks one of their ids; "
        f"{num_connected:,} of {len(vocabulary):,} rows of {edges.table} have neighbours, "
        f"{len(graph.neighbours) / num_connected:.1f} on average"
    )
    return {"table": edges.table, "edges": num_edges, "unknown": num_unknown, "entries": len(graph.neighbours)}


def _unlike(found: KeyMatches, vocabulary: pa.Array) -> str:
    """Describe why edges did not match: some of their unknown ids, some ids of the table, and the likely reason."""
    if not found.unknown:
        return ""
    reason = likely_reason(found.unknown, vocabulary)
    both = f": it has {shown(found.unknown)}, the table {shown(vocabulary)}"
    return both if reason is None else f"{both}; {reason}"


def open_graph(directory: Path, name: str) -> Graph:
    """Open what :func:`write_graph` wrote, memory-mapped: ranks of one host share the pages."""
    # Mapped as private rather than read-only: compiled code is made for arrays that can be written.
    offsets, neighbours = (
        map_array(directory / f"{name}.{part}.bin", dtype, mode="c")
        for part, dtype in (("offsets", OFFSET), ("neighbours", CODE))
    )
    return Graph(offsets, neighbours)
