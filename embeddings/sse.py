"""Stochastic Shared Embeddings (Wu et al., NeurIPS 2019): an id is sometimes swapped for another one of its table.

SSE-SE (equation 5): p(j, j) = 1 - p0 and p(j, k) = p0 / (N - 1) for each of the other N - 1 live rows k: the row itself
is never drawn on a hit. Rows below ``first_live_row`` (padding, unknown) are neither swapped nor drawn.

SSE-Graph (equation 3): on a hit, row j with d neighbours becomes one of them with probability rho d / Z and one of the
others with (N - 1 - d) / Z, Z = rho d + N - 1 - d, uniformly within both: each neighbour is rho times as likely as each
other row.

The draw of one id is fixed bit for bit: Philox4x32-10 with key (seed, crc32(table)) and counter
(step, sample >> 2, crc32(feature) & 0xffff0000 | position & 0xffff, stream), word ``sample & 3`` of the result, where
``sample`` is the index in the global batch and ``position`` the index in the sample's list. A number below n is drawn
by multiply-shift, n above 2^22 with the word of the same stream + 2^31 as the low half.

* Stream 0 decides: a hit if word < p0 2^32.
* Stream 2^29, for a row of a graph: a neighbour if word < rho d / Z 2^32 (:meth:`embeddings.graph.Graph.thresholds`).
* Stream 1 gives the new row: the neighbour at that place of the ascending list of d, or else that of the other N - 1
  rows. While the latter is a neighbour, it is drawn again by streams 2, 3, ...

So a row without neighbours, a complete graph and rho = 1 give the very draws of SSE-SE. The expected number of draws of
a hit, retries included, is at most two: it needs (N - 1) / (N - 1 - d) tries with probability (N - 1 - d) / Z, and
(N - 1) / Z <= 1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from embeddings.config import SSEConfig, TableConfig
from embeddings.graph import Graph, pack_graphs
from embeddings.philox import LOW_WORD_STREAM, lane, philox4x32, table_key, uniform_below

HIT_STREAM = 0
ROW_STREAM = 1
NEIGHBOUR_STREAM = 1 << 29


def hit_threshold(probability: float) -> int:
    """A 32-bit word below this is a hit: ceil(p0 2^32), so that word < p0 2^32 exactly."""
    return math.ceil(probability * 2.0**32)


def feature_word(feature: str) -> int:
    """The upper half of the third counter word."""
    return zlib.crc32(feature.encode()) & 0xFFFF0000


def check_sse(table: TableConfig, feature: str, config: SSEConfig) -> None:
    """Raises ValueError where the graph of ``config`` is not over the rows of the feature's table."""
    if config.graph is not None:
        config.graph.check_fits(f"{table.name}' of feature '{feature}", table.num_rows, table.first_live_row)


def swap(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    table: TableConfig,
    feature: str,
    config: SSEConfig,
    seed: int,
    step: int,
    sample_offset: int = 0,
    backend: Literal["numba", "reference"] = "numba",
) -> torch.Tensor:
    """The ids of one feature after SSE; a new tensor. Ids are rows of the whole table, not of a shard.

    Args:
        ids: int64 [n].
        offsets: int64 [B + 1], where each sample's list starts in ``ids``, up to a constant.
        step: the step being computed, 1, 2, ...
        sample_offset: index in the global batch of the first sample here.
    """
    bounds = (offsets - offsets[0]).numpy()
    if backend == "numba":
        # Numba takes a second to import: only who uses it pays.
        from embeddings.kernels.cpu import swap_feature

        draws = swap_draws([(table, feature, config)], seed)
        return torch.from_numpy(swap_feature(ids.numpy(), bounds, draws, step, sample_offset))
    lengths = np.diff(bounds)
    samples = np.repeat(np.arange(len(lengths)), lengths) + sample_offset
    positions = np.arange(len(samples)) - np.repeat(bounds[:-1], lengths)
    return torch.from_numpy(
        swap_ids(ids.numpy(), samples, positions, table=table, feature=feature, config=config, seed=seed, step=step)
    )


class SwapDraws(NamedTuple):
    """What compiled swaps of several features need; the last three are those of :class:`embeddings.graph.PackedGraphs`.

    ``words``, uint64 [F, 8]: hit threshold (0: nothing is swapped), third counter word, key (2), number of other live
    rows, first live row, where the feature's graph starts in ``offsets`` plus 1 (0: no graph), and its thresholds in
    ``thresholds``.
    """

    words: np.ndarray
    offsets: np.ndarray
    neighbours: np.ndarray
    thresholds: np.ndarray


def swap_draws(features: Sequence[tuple[TableConfig, str, SSEConfig]], seed: int) -> SwapDraws:
    """For each (table, feature, config) what its compiled swaps need."""
    graphs: list[tuple[Graph, float, int] | None] = []
    words = np.zeros((len(features), 8), dtype=np.uint64)
    for f, (table, feature, config) in enumerate(features):
        others = max(0, table.num_rows - table.first_live_row - 1)
        threshold = hit_threshold(config.probability) if others else 0
        words[f, :6] = (threshold, feature_word(feature), *table_key(seed, table.name), others, table.first_live_row)
        wanted = config.graph is not None and config.rho != 1.0 and threshold > 0
        graphs.append((config.graph, config.rho, others) if wanted else None)  # type: ignore[arg-type]  # not None then
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
    """As :func:`swap`, for ids with their global samples and positions given, each int64 [n]."""
    swapped: np.ndarray = ids.copy()
    first, num_others = table.first_live_row, table.num_rows - table.first_live_row - 1
    if num_others < 1 or config.probability == 0.0:
        return swapped
    key = table_key(seed, table.name)
    place = np.uint64(feature_word(feature)) | (positions.astype(np.uint64) & np.uint64(0xFFFF))

    def words(chosen: np.ndarray, stream: int) -> np.ndarray:
        return lane(philox4x32((step, samples[chosen] >> 2, place[chosen], stream), key), samples[chosen] & 3)

    def below(chosen: np.ndarray, bound: int | np.ndarray, stream: int) -> np.ndarray:
        return uniform_below(bound, words(chosen, stream), words(chosen, stream + LOW_WORD_STREAM)).astype(np.int64)

    def other_rows(chosen: np.ndarray, stream: int) -> np.ndarray:
        drawn = below(chosen, num_others, stream)
        return first + drawn + (drawn >= ids[chosen] - first)

    # An id outside the table counts as padding where bounds are ignored.
    live = np.flatnonzero((ids >= first) & (ids < table.num_rows))
    hits = live[words(live, HIT_STREAM) < np.uint64(hit_threshold(config.probability))]
    if config.graph is not None and config.rho != 1.0:
        hits = _swap_for_neighbours(swapped, hits, config.graph, config.rho, num_others, words, below)
    stream = ROW_STREAM
    while len(hits):
        swapped[hits] = other_rows(hits, stream)
        if config.graph is None or config.rho == 1.0:
            break
        hits = hits[config.graph.has_edges(ids[hits], swapped[hits])]
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
    """Swaps, in place, those hits that a neighbour replaces; returns the others."""
    start = graph.offsets[ids[hits]]
    degree = graph.offsets[ids[hits] + 1] - start
    near = words(hits, NEIGHBOUR_STREAM) < graph.thresholds(rho, num_others)[degree]
    ids[hits[near]] = graph.neighbours[start[near] + below(hits[near], degree[near], ROW_STREAM)]
    rest: np.ndarray = hits[~near]
    return rest


class StochasticSharedEmbedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` that in training swaps each id with ``probability`` for another row (SSE-SE).

    The first dimension of the input counts samples, the others positions. Each forward in training is a step of its
    own; ``num_draws`` counts them and is saved with the module, so that a resumed run draws what it would have drawn.

    Args:
        name: goes into the draws, so that two embeddings of one seed differ.
        padding_idx: None or 0, which is neither swapped nor drawn.
        settings: as of ``torch.nn.Embedding``.
    """

    num_draws: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        probability: float = 0.01,
        seed: int = 0,
        name: str = "embedding",
        **settings: Any,
    ) -> None:
        if padding_idx not in (None, 0):
            raise ValueError(f"padding_idx must be None or 0, not {padding_idx}")
        super().__init__(num_embeddings, embedding_dim, padding_idx, **settings)
        self.probability, self.seed = SSEConfig(probability).probability, seed
        first_live_row = 0 if padding_idx is None else 1
        self.table = TableConfig(name, num_embeddings, embedding_dim, (name,), first_live_row=first_live_row)
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows [..., embedding_dim] of the ids [...]."""
        if not self.training or self.probability == 0.0 or not input.numel():
            return super().forward(input)
        self.num_draws += 1
        num_samples = input.shape[0] if input.dim() else 1
        offsets = torch.arange(num_samples + 1) * (input.numel() // num_samples)
        swapped = swap(
            input.reshape(-1).long(), offsets, table=self.table, feature=self.table.name,
            config=SSEConfig(self.probability), seed=self.seed, step=int(self.num_draws),
        )  # fmt: skip
        return super().forward(swapped.view(input.shape))
