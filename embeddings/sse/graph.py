"""Graphs over the rows of a table, for SSE-Graph (Wu et al., NeurIPS 2019, equation 3); numpy only, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Row numbers of neighbours are int32.
MAX_ROWS = 1 << 31


@dataclass(frozen=True, eq=False)
class Graph:
    """Neighbours of each row in compressed sparse row form: those of row j are neighbours[offsets[j]:offsets[j + 1]].

    The lists ascend strictly, so that membership is a binary search and nothing is listed twice. No row is its own
    neighbour. Two graphs are equal only if they are one object, which makes them keys of dictionaries.

    Attributes:
        offsets: int64 [num_rows + 1].
        neighbours: int32 [number of entries]; an undirected edge is two entries.

    Raises:
        ValueError: arrays that are not such a graph (:meth:`validate`).
    """

    offsets: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int32]
    _thresholds: dict[tuple[float, int], npt.NDArray[np.uint64]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("offsets", "neighbours"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name)))
        self.validate()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        # A graph never changes and may be large, so copies of a model share it.
        return self

    @staticmethod
    def from_edges(
        source: npt.NDArray[np.integer],
        target: npt.NDArray[np.integer],
        num_rows: int,
        *,
        symmetric: bool = True,
        first_live_row: int = 2,
    ) -> Graph:
        """Build a graph from pairs of rows, in any order.

        Repeated edges count once. Self-loops and edges at rows below ``first_live_row`` (padding, unknown), which SSE
        never swaps, are left out.

        Args:
            source: integers [E], rows in [0, num_rows).
            target: integers [E], likewise, the other end of each edge.
            num_rows: rows of the table, in [1, 2^31].
            symmetric: True if the ends of an edge are each other's neighbours, as in equation 3 of Wu et al. False:
                only the target is a neighbour of the source.
            first_live_row: the first row that SSE may swap.

        Raises:
            ValueError: shapes or types that do not fit, or a row outside the table; says where.
        """
        if not 1 <= num_rows <= MAX_ROWS:
            raise ValueError(f"graph: num_rows must lie in [1, 2^31], not {num_rows}")
        source, target = np.asarray(source), np.asarray(target)
        if source.ndim != 1 or source.shape != target.shape:
            raise ValueError(
                f"graph: source and target must be one-dimensional and equally long, not {source.shape} and "
                f"{target.shape}"
            )
        for name, ends in (("source", source), ("target", target)):
            if ends.dtype.kind not in "iu":
                raise ValueError(f"graph: {name} must hold integers (rows of the table), not {ends.dtype}")
            outside = (ends < 0) | (ends >= num_rows)
            if outside.any():
                edge = int(np.argmax(outside))
                raise ValueError(
                    f"graph: {name} of edge {edge} is {ends[edge]}, not a row of a table of {num_rows} rows: "
                    "map ids to rows and drop the unknown"
                )
        is_edge = (source != target) & (source >= first_live_row) & (target >= first_live_row)
        source, target = source[is_edge], target[is_edge]
        # One number for each entry: sorting them sorts by row, then by neighbour.
        entries = np.empty(len(source) * (2 if symmetric else 1), dtype=np.int64)
        np.multiply(source, num_rows, out=entries[: len(source)], dtype=np.int64, casting="unsafe")
        entries[: len(source)] += target.astype(np.int64, copy=False)
        if symmetric:
            np.multiply(target, num_rows, out=entries[len(source) :], dtype=np.int64, casting="unsafe")
            entries[len(source) :] += source.astype(np.int64, copy=False)
        entries.sort()
        if len(entries):
            entries = entries[np.concatenate([[True], entries[1:] != entries[:-1]])]
        # Bounds of the rows among the sorted entries, without a second array of their size.
        offsets = np.searchsorted(entries, np.arange(num_rows + 1, dtype=np.int64) * num_rows)
        np.remainder(entries, num_rows, out=entries)
        return Graph(offsets, entries.astype(np.int32))

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """The number of neighbours of each row, [num_rows]."""
        return np.diff(self.offsets)

    def validate(self) -> None:
        """Raise ValueError, naming the fault and its position, if the arrays are not a graph as the class describes."""
        offsets, neighbours = self.offsets, self.neighbours
        if offsets.dtype != np.int64 or neighbours.dtype != np.int32 or offsets.ndim != 1 or neighbours.ndim != 1:
            raise ValueError(
                "graph: offsets must be int64 [num_rows + 1] and neighbours int32 [entries], not "
                f"{offsets.dtype} {list(offsets.shape)} and {neighbours.dtype} {list(neighbours.shape)}: build it with "
                "Graph.from_edges"
            )
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(neighbours):
            ends = f"{offsets[0]} to {offsets[-1]}" if len(offsets) else "nothing"
            raise ValueError(f"graph: offsets must run from 0 to the number of entries, {len(neighbours)}, not {ends}")
        if (np.diff(offsets) < 0).any():
            row = int(np.argmax(np.diff(offsets) < 0))
            raise ValueError(f"graph: offsets must not decrease, as they do after row {row}")
        if not len(neighbours):
            return
        if int(neighbours.min()) < 0 or int(neighbours.max()) >= self.num_rows:
            entry = int(np.argmax((neighbours < 0) | (neighbours >= self.num_rows)))
            raise ValueError(
                f"graph: row {self._row_of(entry)} has the neighbour {neighbours[entry]}, which is not one of "
                f"{self.num_rows} rows"
            )
        starts_row = np.zeros(len(neighbours), dtype=bool)
        starts_row[offsets[:-1][offsets[:-1] < len(neighbours)]] = True
        unordered = (neighbours[1:] <= neighbours[:-1]) & ~starts_row[1:]
        if unordered.any():
            row = self._row_of(int(np.argmax(unordered)))
            raise ValueError(
                f"graph: neighbours of row {row} must ascend, each once: build the graph with Graph.from_edges"
            )
        rows = np.repeat(np.arange(self.num_rows, dtype=np.int32), self.degrees)
        if (rows == neighbours).any():
            row = int(rows[np.argmax(rows == neighbours)])
            raise ValueError(f"graph: row {row} is its own neighbour: remove self-loops")

    def check_fits(self, table: str, num_rows: int, first_live_row: int) -> None:
        """Raise ValueError unless the graph is over the rows of this table, without edges at its reserved rows."""
        if self.num_rows != num_rows:
            raise ValueError(
                f"table '{table}' has {num_rows} rows, its graph {self.num_rows}: build it with num_rows={num_rows}"
            )
        if self.offsets[min(first_live_row, num_rows)] > 0 or (
            len(self.neighbours) and int(self.neighbours.min()) < first_live_row
        ):
            raise ValueError(
                f"table '{table}': its graph has edges at rows below {first_live_row}, which are padding or unknown "
                f"ids: build it with Graph.from_edges(..., first_live_row={first_live_row})"
            )

    def turned(self, by: int) -> Graph:
        """Return the graph with every row j renumbered to (j - by) modulo num_rows."""
        rows = np.repeat(np.arange(self.num_rows, dtype=np.int32), self.degrees)
        source, target = ((ends - np.int64(by)) % self.num_rows for ends in (rows, self.neighbours))
        return Graph.from_edges(source, target, self.num_rows, symmetric=False, first_live_row=0)

    def thresholds(self, rho: float, num_others: int) -> npt.NDArray[np.uint64]:
        """Return for each degree d the 32-bit word below which a hit becomes a neighbour, uint64 [largest degree + 1].

        The threshold is ceil(rho d / Z 2^32) with Z = rho d + (num_others - d), from equation 3 of Wu et al. Only this
        method computes it, in float64: kernels compare integers, and so agree bit for bit.
        """
        thresholds = self._thresholds.get((rho, num_others))
        if thresholds is None:
            degree = np.arange(int(self.degrees.max()) + 1, dtype=np.float64)
            share = rho * degree / np.maximum(rho * degree + (num_others - degree), 1.0)
            thresholds = self._thresholds[rho, num_others] = np.ceil(share * 2.0**32).astype(np.uint64)
        return thresholds

    def has_edges(self, rows: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return True if others[i] is a neighbour of rows[i], by binary search in all lists at once."""
        low, end = self.offsets[rows], self.offsets[rows + 1]
        high = end.copy()
        while (open_ := low < high).any():
            middle = (low + high) >> 1
            below = np.zeros(len(rows), dtype=bool)
            below[open_] = self.neighbours[middle[open_]] < others[open_]
            low, high = np.where(below, middle + 1, low), np.where(open_ & ~below, middle, high)
        is_neighbour = low < end
        is_neighbour[is_neighbour] = self.neighbours[low[is_neighbour]] == others[is_neighbour]
        return is_neighbour

    def _row_of(self, entry: int) -> int:
        return int(np.searchsorted(self.offsets, entry, side="right")) - 1


class PackedGraphs(NamedTuple):
    """The graphs of several features in three arrays, as compiled kernels take them.

    Feature f has no graph if ``starts[f, 0]`` is -1. Else its offsets begin at offsets[starts[f, 0]] and point into
    ``neighbours``, and its threshold for degree d (:meth:`Graph.thresholds`) is thresholds[starts[f, 1] + d].
    """

    offsets: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int32]
    thresholds: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]


def pack_graphs(graphs: Sequence[tuple[Graph, float, int] | None]) -> PackedGraphs:
    """Pack a (graph, rho, number of other live rows), or None, for each feature; a single graph is not copied."""
    starts = np.full((len(graphs), 2), -1, dtype=np.int64)
    placed: dict[Graph, int] = {}
    offsets: list[npt.NDArray[np.int64]] = []
    neighbours: list[npt.NDArray[np.int32]] = []
    thresholds: list[npt.NDArray[np.uint64]] = []
    num_offsets = num_entries = num_thresholds = 0
    for f, entry in enumerate(graphs):
        if entry is None:
            continue
        graph, rho, num_others = entry
        if graph not in placed:
            placed[graph] = num_offsets
            offsets.append(graph.offsets + num_entries if num_entries else graph.offsets)
            neighbours.append(graph.neighbours)
            num_offsets += len(graph.offsets)
            num_entries += len(graph.neighbours)
        thresholds.append(graph.thresholds(rho, num_others))
        starts[f] = placed[graph], num_thresholds
        num_thresholds += len(thresholds[-1])
    return PackedGraphs(
        _joined(offsets, np.dtype(np.int64)),
        _joined(neighbours, np.dtype(np.int32)),
        _joined(thresholds, np.dtype(np.uint64)),
        starts,
    )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
