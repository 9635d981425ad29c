"""Sharded sequences: the sharder of an EmbeddingCollection, and the module that replaces the collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.types import ShardingEnv

from embeddings.sharding.settings import TableSettings
from embeddings.sharding.sharded import ShardedTables, SharderOfTables
from embeddings.sharding.shardings import SequenceColumnWise, SequenceReplicated, SequenceRowWise, SequenceTableWise

SEQUENCE_SHARDINGS: dict[str, type[Any]] = {
    sharding.kind.torchrec_type: sharding
    for sharding in (SequenceTableWise, SequenceRowWise, SequenceColumnWise, SequenceReplicated)
}


class ShardedSequences(ShardedTables, ShardedEmbeddingCollection):
    """The sharded sequences of a model: KeyedJaggedTensor -> {feature: JaggedTensor}, one row for each id.

    A feature that two tables have is named ``feature@table``. Padding ids have rows of zeros.
    """

    _held_as = "embeddings"
    _sharding_type_to_sharding: dict[str, Any]
    _embedding_dim_for_sharding_type: Callable[[str], int]

    def __init__(self, settings: TableSettings, module: EmbeddingCollection, *arguments: Any, **keywords: Any) -> None:
        self._prepare(settings, module.embedding_configs())
        ShardedEmbeddingCollection.__init__(self, module, *arguments, **keywords)

    def create_embedding_sharding(  # type: ignore[override]  # an instance method here: it needs the settings
        self,
        sharding_type: str,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        return SEQUENCE_SHARDINGS[sharding_type](self.settings, self._step_context, sharding_infos, env, device)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        return super().input_dist(ctx, self._checked(ctx, features))

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        self._begin_lookup(ctx)
        rows = []
        # Like TorchRec's method, which fails for a batch without samples.
        for lookup, features, sharding, kind in zip(
            self._lookups, dist_input, ctx.sharding_contexts, self._sharding_type_to_sharding, strict=True
        ):
            sharding.lengths_after_input_dist = features.lengths().view(len(features.keys()), features.stride())
            rows.append(lookup(features).view(-1, self._embedding_dim_for_sharding_type(kind)))
        return rows

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        empty = ctx.sharding_contexts[0].features_before_input_dist.stride() == 0
        if empty:
            # TorchRec cannot split an output without samples by feature: pass it one sample without ids.
            for sharding in ctx.sharding_contexts:
                sharding.features_before_input_dist = _one_sample(sharding.features_before_input_dist)
        awaitable = super().output_dist(ctx, output)
        if empty:
            awaitable.callbacks.append(_no_samples)
        return awaitable

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self.output_dist(ctx, self.compute(ctx, input))


def _one_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = torch.zeros(len(features.keys()), dtype=torch.int64, device=features.values().device)
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths, stride=1)


def _no_samples(sequences: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {name: JaggedTensor(part.values(), lengths=part.lengths()[:0]) for name, part in sequences.items()}


class SequenceSharder(SharderOfTables, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection (no pooling): each rank looks up its shards with EmbeddingTables, on any device."""

    _shardings = SEQUENCE_SHARDINGS
    _sharded = ShardedSequences
