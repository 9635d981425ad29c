"""Mean pooling of split rows: divided where the sum is complete."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor, KeyedTensor

from embeddings.tables.config import TableConfig


def num_ids(features: KeyedJaggedTensor, feature: str, table: TableConfig) -> Tensor:
    """Count the ids of ``feature`` that are rows of ``table`` other than padding, at least 1: [B] int64."""
    bag = features[feature]
    ids, offsets = bag.values(), bag.offsets().long()
    counted = (ids >= 0) & (ids < table.num_rows) & (ids != table.padding_row)
    before = torch.cat([offsets.new_zeros(1), counted.cumsum(0)])
    return (before[offsets[1:]] - before[offsets[:-1]]).clamp(min=1)


def divide(pooled: KeyedTensor, names: list[str], divisor: Tensor) -> KeyedTensor:
    """Divide sums to means: block ``names[i]`` by divisor[:, i]."""
    blocks = list(pooled.values().split(pooled.length_per_key(), dim=1))
    for column, name in enumerate(names):
        number = pooled.keys().index(name)
        blocks[number] = blocks[number] / divisor[:, column : column + 1].to(blocks[number].dtype)
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), torch.cat(blocks, dim=1), key_dim=1)
