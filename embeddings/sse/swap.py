"""Stochastic Shared Embeddings (Wu et al., NeurIPS 2019): an id is sometimes swapped for another id of its table.

SSE-SE (equation 5): p(j, j) = 1 - p0 and p(j, k) = p0 / (N - 1) for each of the other N - 1 live rows k: the row itself
is never drawn on a hit. Rows below ``first_live_row`` (padding, unknown) are neither swapped nor drawn; with
``include_unknown`` the row before the live ones, that of unknown ids, is one of the N.

SSE-Graph (equation 3): on a hit, row j with d neighbours becomes one of them with probability rho d / Z and one of the
others with (N - 1 - d) / Z, Z = rho d + N - 1 - d. Draws within both are uniform: each neighbour
has rho times the probability of each other row.

A walk with restart (section 3.1): a random walk over neighbours returns to j with probability c before each step. On a
hit, row j becomes row k != j with a probability proportional to that of finding the walk at k. To draw it, a walk stops
with probability c after each step, but never at j, where it would only begin anew; c = 1 is a uniform neighbour.

Every draw is fixed bit for bit: Philox4x32-10 with key (seed, crc32(table)) and counter
(step, index, crc32(feature) & 0xffff0000 | position & 0xffff, stream), where ``position`` is the index in a sample's
list.

The samples that hit (are swapped) are drawn as distances, anew for each position and each block of 2^s samples. Here s
is :func:`block_shift`, ``index`` = sample >> s, and ``sample`` is the sample's index in the global batch. Distance 0
leads from sample -1 of the block to the first hit, each later distance from a hit to the next. Distance n is the number
of words of :func:`distance_thresholds` that are not above word ``n & 3`` of stream 2^30 + n >> 2, plus 1: geometric, so
that each sample hits with probability p0, independently. A block has 256 samples, or fewer, so that under three hits
are expected in it. At p0 = .01 a block has 256 samples, and its hits take three or four words.

The other draws are made only for hits: ``index`` = sample >> 2, word ``sample & 3`` of the result. A number below n
is drawn by multiply-shift, n above 2^22 with the word of the same stream + 2^31 as the low half.

* Stream 2^29, for a row of a graph: a neighbour if word < rho d / Z 2^32
(:meth:`embeddings.sse.graph.Graph.thresholds`).
* Stream 1 gives the new row, as an index into the ascending list of d neighbours or of the other N - 1 rows. While the
  latter is a neighbour, it is drawn again by streams 2, 3, ...
* Step t = 0, 1, ... of a walk goes to the neighbour that stream 1 + t gives, and ends there, unless that is j, if the
  word of stream 2^29 + t < c 2^32. From a row without neighbours the walk continues as from j; if j has none, the draw
  is that of SSE-SE.

So rows without neighbours, complete graphs and rho = 1 each give the same draws as SSE-SE. The expected number of draws
of a hit, retries included, is at most two: it needs (N - 1) / (N - 1 - d) tries with probability (N - 1 - d) / Z, and
(N - 1) / Z <= 1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph, pack_graphs
from embeddings.tables.config import TableConfig
from embeddings.tables.philox import LOW_WORD_STREAM, lane, philox4x32, table_key, uniform_below

ROW_STREAM = 1
NEIGHBOUR_STREAM = 1 << 29
DISTANCE_STREAM = 1 << 30
# Largest number of samples of a block; a rank whose slice starts inside a block also walks through its samples before.
LONGEST_BLOCK = 256


def hit_threshold(probability: float) -> int:
    """Return the 32-bit word below which a word is a hit: ceil(p0 2^32), so that word < p0 2^32 exactly."""
    return math.ceil(probability * 2.0**32)


def block_shift(probability: float) -> int:
    """Return s, for blocks of 2^s samples.

    A block has at most LONGEST_BLOCK samples, and is so short that fewer than three hits are expected in it. So few
    draws are wasted if only one sample of the block has an id at this position.
    """
    shift = LONGEST_BLOCK.bit_length() - 1
    while shift > 0 and probability * (1 << shift) >= 3.0:
        shift -= 1
    return shift


@cache
def distance_thresholds(probability: float) -> np.ndarray:
    """Return for d = 1, ..., 256 the 32-bit word below which the next hit is at most d samples away, uint64 [256].

    The threshold is (1 - (1 - p0)^d) 2^32, rounded. Only this function computes it, in exact integers: kernels compare
    integers, and so agree bit for bit.
    """
    numerator, denominator = probability.as_integer_ratio()
    missed, whole, thresholds = 1, 1, []
    for _ in range(LONGEST_BLOCK):
        missed, whole = missed * (denominator - numerator), whole * denominator
        thresholds.append((((whole - missed) << 33) // whole + 1) >> 1)
    return np.array(thresholds, dtype=np.uint64)


def feature_word(feature: str) -> int:
    """Return the upper 16 bits of the third counter word of a feature's draws, with zeros below."""
    return zlib.crc32(feature.encode()) & 0xFFFF0000


def check_sse(table: TableConfig, feature: str, config: SSEConfig) -> None:
    """Raise ValueError if the graph of ``config`` does not have the rows of the feature's table.

    Dynamic tables are refused as well, since SSE could draw a row that belongs to no id.
    """
    if table.grows and config.probability > 0.0:
        raise ValueError(
            f"feature '{feature}': table '{table.name}' grows, and SSE could draw a row without an id: use a table "
            "of known ids, or no SSE"
        )
    if config.include_unknown and table.first_live_row < 2:
        raise ValueError(
            f"feature '{feature}': table '{table.name}' has no row of unknown ids before its live rows, which begin at "
            f"{table.first_live_row}: leave include_unknown out of its SSE"
        )
    if config.graph is not None:
        config.graph.check_fits(f"{table.name}' of feature '{feature}", table.num_rows, table.first_live_row)


def first_swapped_row(table: TableConfig, config: SSEConfig) -> int:
    """Return the first row that SSE swaps and draws."""
    return table.first_live_row - config.include_unknown


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
    """Return the ids of one feature after SSE, the same as :func:`embeddings.kernels.swap.swap`, in plain numpy."""
    bounds = (offsets - offsets[0]).numpy()
    lengths = np.diff(bounds)
    samples = np.repeat(np.arange(len(lengths)), lengths) + sample_offset
    positions = np.arange(len(samples)) - np.repeat(bounds[:-1], lengths)
    return torch.from_numpy(
        swap_ids(ids.numpy(), samples, positions, table=table, feature=feature, config=config, seed=seed, step=step)
    )


class SwapDraws(NamedTuple):
    """The arrays that compiled swaps of several features need.

    The last three are as in :class:`embeddings.sse.graph.PackedGraphs`; ``thresholds`` also has, after those of graphs,
    the thresholds of distances. ``words`` is uint64 [F, 10], with these words for each feature:

    - 0: 1 + start of its distance thresholds in ``thresholds``; 0: nothing is swapped. 1: third counter word.
    - 2, 3: key of its draws. 4: number of other rows to draw from. 5: the first of these rows.
    - 6: 1 + start of its graph in ``offsets``; 0: no graph. 7: start of the graph's thresholds in ``thresholds``.
    - 8: threshold below which a walk ends; 0: no walk. 9: :func:`block_shift`.
    """

    words: np.ndarray
    offsets: np.ndarray
    neighbours: np.ndarray
    thresholds: np.ndarray


def swap_draws(features: Sequence[tuple[TableConfig, str, SSEConfig]], seed: int) -> SwapDraws:
    """Return the arrays for the compiled swaps of several features, each given as (table, feature, config)."""
    graphs: list[tuple[Graph, float, int] | None] = []
    words = np.zeros((len(features), 10), dtype=np.uint64)
    probabilities: dict[float, int] = {}
    for f, (table, feature, config) in enumerate(features):
        first = first_swapped_row(table, config)
        others = max(0, table.num_rows - first - 1)
        swaps = others > 0 and config.probability > 0.0
        number = probabilities.setdefault(config.probability, len(probabilities)) + 1 if swaps else 0
        words[f, :6] = (number, feature_word(feature), *table_key(seed, table.name), others, first)
        asks_graph = config.asks_graph and swaps
        words[f, 9] = block_shift(config.probability)
        words[f, 8] = hit_threshold(config.restart) if asks_graph and config.restart is not None else 0
        graphs.append((config.graph, config.rho, others) if asks_graph else None)  # type: ignore[arg-type]  # not None then
    packed = pack_graphs(graphs)
    swapping = words[:, 0] > 0
    words[swapping, 0] = len(packed.thresholds) + 1 + LONGEST_BLOCK * (words[swapping, 0] - 1)
    words[:, 6] = packed.starts[:, 0] + 1
    words[:, 7] = np.maximum(packed.starts[:, 1], 0)
    thresholds = np.concatenate([packed.thresholds, *map(distance_thresholds, probabilities)])
    return SwapDraws(words, packed.offsets, packed.neighbours, thresholds)


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
    """Return ids after SSE, int64 [n], as :func:`swap_in_numpy` does; the caller gives each id's sample and position.

    ``samples`` are indices in the global batch, ``positions`` indices in a sample's list.
    """
    swapped: np.ndarray = ids.copy()
    first = first_swapped_row(table, config)
    num_others = table.num_rows - first - 1
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
    hits = live[_is_hit(samples[live], counters[live], config.probability, step, key)]
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


def _is_hit(
    samples: np.ndarray, counters: np.ndarray, probability: float, step: int, key: tuple[int, int]
) -> np.ndarray:
    """Flag the samples that are hit, bool [n]; ``counters`` are their third counter words."""
    thresholds, shift = distance_thresholds(probability), block_shift(probability)
    length = 1 << shift
    block_keys = (samples.astype(np.uint64) >> np.uint64(shift) << np.uint64(32)) | counters
    block_keys, block_of = np.unique(block_keys, return_inverse=True)
    blocks, positions = block_keys >> np.uint64(32), block_keys & np.uint64(0xFFFFFFFF)
    hits = np.zeros((len(blocks), length), dtype=bool)
    walking, at, call = np.arange(len(blocks)), np.full(len(blocks), -1), 0
    while len(walking):
        for word in philox4x32((step, blocks[walking], positions[walking], DISTANCE_STREAM + call), key):
            at[walking] += 1 + np.searchsorted(thresholds, word, side="right")
            inside = walking[at[walking] < length]
            hits[inside, at[inside]] = True
        walking, call = walking[at[walking] < length], call + 1
    return hits[block_of, samples % length]


def _swap_for_neighbours(
    ids: np.ndarray,
    hits: np.ndarray,
    graph: Graph,
    rho: float,
    num_others: int,
    words: Callable[[np.ndarray, int], np.ndarray],
    below: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Draw the hits to be replaced by a neighbour, and replace them in ``ids``, in place; return the other hits."""
    start = graph.offsets[ids[hits]]
    degree = graph.offsets[ids[hits] + 1] - start
    near = words(hits, NEIGHBOUR_STREAM) < graph.thresholds(rho, num_others)[degree]
    ids[hits[near]] = graph.neighbours[start[near] + below(hits[near], degree[near], ROW_STREAM)]
    return hits[~near]


def _walk(
    ids: np.ndarray,
    hits: np.ndarray,
    graph: Graph,
    restart: float,
    words: Callable[[np.ndarray, int], np.ndarray],
    below: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Replace each hit that has neighbours, in place, with the row where a walk from it ends; return the other hits."""
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
