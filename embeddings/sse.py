"""Stochastic Shared Embeddings, SSE-SE (Wu et al., NeurIPS 2019, equation 5): an id is sometimes swapped for another.

p(j, j) = 1 - p0 and p(j, k) = p0 / (N - 1) for each of the other N - 1 live rows k: the row itself is never drawn on a
hit. Rows below ``first_live_row`` (padding, unknown) are neither swapped nor drawn.

The draw of one id is fixed bit for bit: Philox4x32-10 with key (seed, crc32(table)) and counter
(step, sample >> 2, crc32(feature) & 0xffff0000 | position & 0xffff, stream), word ``sample & 3`` of the result, where
``sample`` is the index in the global batch and ``position`` the index in the sample's list. Stream 0 decides: a hit if
word < p0 2^32. Stream 1 gives the new row by multiply-shift over N - 1; above 2^22 the word of stream 1 + 2^31 is the
low half.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Literal

import numpy as np
import torch

from embeddings.config import SSEConfig, TableConfig
from embeddings.philox import LOW_WORD_STREAM, lane, philox4x32, table_key, uniform_below

HIT_STREAM = 0
ROW_STREAM = 1


def hit_threshold(probability: float) -> int:
    """A 32-bit word below this is a hit: ceil(p0 2^32), so that word < p0 2^32 exactly."""
    return math.ceil(probability * 2.0**32)


def feature_word(feature: str) -> int:
    """The upper half of the third counter word."""
    return zlib.crc32(feature.encode()) & 0xFFFF0000


def swap(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    table: TableConfig,
    feature: str,
    probability: float,
    seed: int,
    step: int,
    sample_offset: int = 0,
    backend: Literal["numba", "reference"] = "numba",
) -> torch.Tensor:
    """The ids of one feature after SSE-SE; a new tensor. Ids are rows of the whole table, not of a shard.

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

        words = draw_words(table, feature, probability, seed)
        return torch.from_numpy(swap_feature(ids.numpy(), bounds, words, step, sample_offset))
    lengths = np.diff(bounds)
    samples = np.repeat(np.arange(len(lengths)), lengths) + sample_offset
    positions = np.arange(len(samples)) - np.repeat(bounds[:-1], lengths)
    return torch.from_numpy(
        swap_ids(
            ids.numpy(), samples, positions,
            table=table, feature=feature, probability=probability, seed=seed, step=step,
        )
    )  # fmt: skip


def draw_words(table: TableConfig, feature: str, probability: float, seed: int) -> np.ndarray:
    """What compiled swaps need, uint64 [6]: threshold, third counter word, key, number of other rows, first live."""
    others = max(0, table.num_rows - table.first_live_row - 1)
    threshold = hit_threshold(probability) if others else 0
    words = (threshold, feature_word(feature), *table_key(seed, table.name), others, table.first_live_row)
    return np.array(words, dtype=np.uint64)


def swap_ids(
    ids: np.ndarray,
    samples: np.ndarray,
    positions: np.ndarray,
    *,
    table: TableConfig,
    feature: str,
    probability: float,
    seed: int,
    step: int,
) -> np.ndarray:
    """As :func:`swap`, for ids with their global samples and positions given, each int64 [n]."""
    swapped: np.ndarray = ids.copy()
    first, num_others = table.first_live_row, table.num_rows - table.first_live_row - 1
    if num_others < 1 or probability == 0.0:
        return swapped
    key = table_key(seed, table.name)
    place = np.uint64(feature_word(feature)) | (positions.astype(np.uint64) & np.uint64(0xFFFF))

    def words(chosen: np.ndarray, stream: int) -> np.ndarray:
        return lane(philox4x32((step, samples[chosen] >> 2, place[chosen], stream), key), samples[chosen] & 3)

    live = np.flatnonzero(ids >= first)
    hits = live[words(live, HIT_STREAM) < np.uint64(hit_threshold(probability))]
    high = words(hits, ROW_STREAM)
    drawn = uniform_below(num_others, high, words(hits, ROW_STREAM + LOW_WORD_STREAM)).astype(np.int64)
    swapped[hits] = first + drawn + (drawn >= ids[hits] - first)
    return swapped


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
            probability=self.probability, seed=self.seed, step=int(self.num_draws),
        )  # fmt: skip
        return super().forward(swapped.view(input.shape))
