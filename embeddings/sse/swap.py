"""Stochastic Shared Embeddings (Wu et al., NeurIPS 2019): an id is sometimes swapped for another one of its table.

SSE-SE (equation 5): p(j, j) = 1 - p0 and p(j, k) = p0 / (N - 1) for each of the other N - 1 live rows k: the row itself
is never drawn on a hit. Rows below ``first_live_row`` (padding, unknown) are neither swapped nor drawn.

SSE-Graph (equation 3): on a hit, row j with d neighbours becomes one of them with probability rho d / Z and one of the
others with (N - 1 - d) / Z, Z = rho d + N - 1 - d, uniformly within both: each neighbour is rho times as likely as each
other row.

A walk with restart (section 3.1): on a hit, row j becomes row k != j with a probability proportional to that of finding
there a random walk over neighbours that returns to j with probability c before each step. Drawn, that is a walk that
stops with probability c after each step, but never at j, where it would only begin anew; c = 1 is a uniform neighbour.

The draw of one id is fixed bit for bit: Philox4x32-10 with key (seed, crc32(table)) and counter
(step, sample >> 2, crc32(feature) & 0xffff0000 | position & 0xffff, stream), word ``sample & 3`` of the result, where
``sample`` is the index in the global batch and ``position`` the index in the sample's list. A number below n is drawn
by multiply-shift, n above 2^22 with the word of the same stream + 2^31 as the low half.

* Stream 0 decides: a hit if word < p0 2^32.
* Stream 2^29, for a row of a graph: a neighbour if word < rho d / Z 2^32
(:meth:`embeddings.sse.graph.Graph.thresholds`).
* Stream 1 gives the new row: the neighbour at that place of the ascending list of d, or else that of the other N - 1
  rows. While the latter is a neighbour, it is drawn again by streams 2, 3, ...
* Step t = 0, 1, ... of a walk goes to the neighbour that stream 1 + t gives, and ends there, unless that is j, if the
  word of stream 2^29 + t < c 2^32. From a row without neighbours it goes on as from j; if j has none, as without graph.

So a row without neighbours, a complete graph and rho = 1 give the very draws of SSE-SE. The expected number of draws of
a hit, retries included, is at most two: it needs (N - 1) / (N - 1 - d) tries with probability (N - 1 - d) / Z, and
(N - 1) / Z <= 1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph, pack_graphs
from embeddings.tables.config import TableConfig
from embeddings.tables.philox import LOW_WORD_STREAM, lane, philox4x32, table_key, uniform_below

HIT_STREAM = 0
ROW_STREAM = 1
NEIGHBOUR_STREAM = 1 << 29


def hit_threshold(probability: float) -> int:
    """Return the 32-bit word below which a word is a hit: ceil(p0 2^32), so that word < p0 2^32 exactly."""
    return math.ceil(probability * 2.0**32)


def feature_word(feature: str) -> int:
    """Return the upper half of the third counter word."""
    return zlib.crc32(feature.encode()) & 0xFFFF0000


def check_sse(table: TableConfig, feature: str, config: SSEConfig) -> None:
    """Raise ValueError where the graph of ``config`` is not over the rows of the feature's table.

    Dynamic tables are refused as well, since SSE could draw a row that belongs to no id.
    """
    if table.grows and config.probability > 0.0:
        raise ValueError(
            f"feature '{feature}': table '{table.name}' grows, and SSE could draw a row that is nobody's: use a table "
            "of known ids, or no SSE"
        )
    if config.graph is not None:
        config.graph.check_fits(f"{table.name}' of feature '{feature}", table.num_rows, table.first_live_row)


def swap_in_numpy(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    table: TableConfig,
    feature: str,
    config: SSEConfig,
    seed: int,
    step: int,
    sample_offset: int = 0,
) -> torch.Tensor:
    """Return the ids of one feature after SSE: those of :func:`embeddings.kernels.swap.swap`, computed plainly."""
    bounds = (offsets - offsets[0]).numpy()
    lengths = np.diff(bounds)
    samples = np.repeat(np.arange(len(lengths)), lengths) + sample_offset
    positions = np.arange(len(samples)) - np.repeat(bounds[:-1], lengths)
    return torch.from_numpy(
        swap_ids(ids.numpy(), samples, positions, table=table, feature=feature, config=config, seed=seed, step=step)
    )


class SwapDraws(NamedTuple):
    """The arrays that compiled swaps of several features need.

    The last three are those of :class:`embeddings.sse.graph.PackedGraphs`. ``words``, uint64 [F, 9]: hit threshold (0:
    nothing is swapped), third counter word, key (2), number of other live rows, first live row, where the feature's
    graph starts in ``offsets`` plus 1 (0: no graph), its thresholds in ``thresholds``, and the threshold below which a
    walk ends (0: no walk).
    """

    words: np.ndarray
    offsets: np.ndarray
    neighbours: np.ndarray
    thresholds: np.ndarray


def swap_draws(features: Sequence[tuple[TableConfig, str, SSEConfig]], seed: int) -> SwapDraws:
    """Return for all (table, feature, config) what their compiled swaps need."""
    graphs: list[tuple[Graph, float, int] | None] = []
    words = np.zeros((len(features), 9), dtype=np.uint64)
    for f, (table, feature, config) in enumerate(features):
        others = max(0, table.num_rows - table.first_live_row - 1)
        threshold = hit_threshold(config.probability) if others else 0
        words[f, :6] = (threshold, feature_word(feature), *table_key(seed, table.name), others, table.first_live_row)
        asks_graph = config.asks_graph and threshold > 0
        words[f, 8] = hit_threshold(config.restart) if asks_graph and config.restart is not None else 0
        graphs.append((config.graph, config.rho, others) if asks_graph else None)  # type: ignore[arg-type]  # not None then
    packed = pack_graphs(graphs)
    words[:, 6] = packed.starts[:, 0] + 1
    words[:, 7] = np.maximum(packed.starts[:, 1], 0)
    return SwapDraws(words, packed.offsets, packed.neighbours, packed.thresholds)


def swap_ids(
    ids: np.ndarray,
    samples: np.ndarray,
    positions: np.ndarray,
    *,
    table: TableConfig,
    feature: str,
    config: SSEConfig,
    seed: int,
    step: int,
) -> np.ndarray:
    """Return ids after SSE as :func:`swap_in_numpy` does, with their global samples and positions given, int64 [n]."""
    swapped: np.ndarray = ids.copy()
    first, num_others = table.first_live_row, table.num_rows - table.first_live_row - 1
    if num_others < 1 or config.probability == 0.0:
        return swapped
    key = table_key(seed, table.name)
    counters = np.uint64(feature_word(feature)) | (positions.astype(np.uint64) & np.uint64(0xFFFF))

    def words(chosen: np.ndarray, stream: int) -> np.ndarray:
        return lane(philox4x32((step, samples[chosen] >> 2, counters[chosen], stream), key), samples[chosen] & 3)

    def below(chosen: np.ndarray, bound: int | np.ndarray, stream: int) -> np.ndarray:
        return uniform_below(bound, words(chosen, stream), words(chosen, stream + LOW_WORD_STREAM)).astype(np.int64)

    def other_rows(chosen: np.ndarray, stream: int) -> np.ndarray:
        drawn = below(chosen, num_others, stream)
        return first + drawn + (drawn >= ids[chosen] - first)

    # An id outside the table counts as padding where bounds are ignored.
    live = np.flatnonzero((ids >= first) & (ids < table.num_rows))
    hits = live[words(live, HIT_STREAM) < np.uint64(hit_threshold(config.probability))]
    graph = config.graph if config.asks_graph else None
    if graph is not None and config.restart is not None:
        hits = _walk(swapped, hits, graph, config.restart, words, below)
    elif graph is not None:
        hits = _swap_for_neighbours(swapped, hits, graph, config.rho, num_others, words, below)
    stream = ROW_STREAM
    while len(hits):
        swapped[hits] = other_rows(hits, stream)
        if graph is None:
            break
        hits = hits[graph.has_edges(ids[hits], swapped[hits])]
        stream += 1
    return swapped


def _swap_for_neighbours(
    ids: np.ndarray,
    hits: np.ndarray,
    graph: Graph,
    rho: float,
    num_others: int,
    words: Callable[[np.ndarray, int], np.ndarray],
    below: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Swap, in place, those hits that a neighbour replaces; return the others."""
    start = graph.offsets[ids[hits]]
    degree = graph.offsets[ids[hits] + 1] - start
    near = words(hits, NEIGHBOUR_STREAM) < graph.thresholds(rho, num_others)[degree]
    ids[hits[near]] = graph.neighbours[start[near] + below(hits[near], degree[near], ROW_STREAM)]
    rest: np.ndarray = hits[~near]
    return rest


def _walk(
    ids: np.ndarray,
    hits: np.ndarray,
    graph: Graph,
    restart: float,
    words: Callable[[np.ndarray, int], np.ndarray],
    below: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Swap, in place, the hits with neighbours for the end of a walk from each; return the others."""
    degrees = graph.degrees
    alone: np.ndarray = hits[degrees[ids[hits]] == 0]
    walking = hits[degrees[ids[hits]] > 0]
    origin = ids[walking]
    here, t = origin, 0
    while len(walking):
        here = np.where(degrees[here] > 0, here, origin)
        here = graph.neighbours[graph.offsets[here] + below(walking, degrees[here], ROW_STREAM + t)]
        ends = (here != origin) & (words(walking, NEIGHBOUR_STREAM + t) < np.uint64(hit_threshold(restart)))
        ids[walking[ends]] = here[ends]
        walking, origin, here, t = walking[~ends], origin[~ends], here[~ends], t + 1
    return alone
