"""Sharded sequences: the sharder of an EmbeddingCollection, and what it puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingEnv

from embeddings.sharding.settings import TableSettings, check_collection, data_type_of
from embeddings.sharding.sharded import ShardedTables
from embeddings.sharding.shardings import (
    SequenceColumnWise,
    SequenceReplicated,
    SequenceRowWise,
    SequenceTableWise,
)

SEQUENCE_SHARDINGS: dict[str, type[Any]] = {
    sharding.kind.torchrec_type: sharding
    for sharding in (SequenceTableWise, SequenceRowWise, SequenceColumnWise, SequenceReplicated)
}


class SequenceSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection over EmbeddingTables without pooling, on every kind of device."""

    def __init__(self, settings: TableSettings) -> None:
        super().__init__()
        self._settings = settings

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SEQUENCE_SHARDINGS)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shard(
        self,
        module: EmbeddingCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedSequences:
        check_collection(module.embedding_configs(), self._settings.tables)
        return ShardedSequences(self._settings, module, params, env, device, module_fqn)

    @property
    def sharded_module_type(self) -> type[ShardedSequences]:
        return ShardedSequences


class ShardedSequences(ShardedTables, ShardedEmbeddingCollection):
    """The sharded sequences of a model: KeyedJaggedTensor -> {feature: JaggedTensor}, one row for each id.

    A feature of two tables is named ``feature@table``. Padding ids have rows of zeros.
    """

    _lookups: list[nn.Module]
    _sharding_type_to_sharding: dict[str, Any]
    _embedding_dim_for_sharding_type: Callable[[str], int]

    def __init__(
        self,
        settings: TableSettings,
        module: EmbeddingCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        configs = module.embedding_configs()
        self._prepare(settings, [config.name for config in configs])
        for config in configs:
            config.data_type = data_type_of(settings.dtype_of(config.name)) or config.data_type
        ShardedEmbeddingCollection.__init__(self, module, params, env, device=device, module_fqn=module_fqn)

    def create_embedding_sharding(  # type: ignore[override]  # an instance method here: it needs the settings
        self,
        sharding_type: str,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        return SEQUENCE_SHARDINGS[sharding_type](self.settings, self._place, sharding_infos, env, device)

    def init_data_parallel(self) -> None:
        self._replicate()

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        if data_type_of(self.settings.dtype) is not None:
            super()._initialize_torch_state(skip_registering)
        else:
            # TorchRec has no data type for float64, so there state_dict() holds no tables.
            self.embeddings = nn.ModuleDict()

    def reset_parameters(self) -> None:
        """Do nothing: EmbeddingTables has drawn its initial rows by row number or key, the same in every plan."""

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        return super().input_dist(ctx, self._voted(ctx, features))

    def compute(self, ctx: Any, dist_input: Any) -> list[Tensor]:
        ctx.vote.count()
        rows = []
        # As TorchRec's, which cannot shape the lengths of a batch without samples.
        for lookup, features, sharding, kind in zip(
            self._lookups, dist_input, ctx.sharding_contexts, self._sharding_type_to_sharding, strict=True
        ):
            sharding.lengths_after_input_dist = features.lengths().view(len(features.keys()), features.stride())
            rows.append(lookup(features).view(-1, self._embedding_dim_for_sharding_type(kind)))
        return rows

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        empty = ctx.sharding_contexts[0].features_before_input_dist.stride() == 0
        if empty:
            # TorchRec cannot cut the output of no samples into features: it is given one without ids.
            for sharding in ctx.sharding_contexts:
                sharding.features_before_input_dist = _one_sample(sharding.features_before_input_dist)
        found = super().output_dist(ctx, output)
        if empty:
            found.callbacks.append(_no_samples)
        return found

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        return self.output_dist(ctx, self.compute(ctx, input))


def _one_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = torch.zeros(len(features.keys()), dtype=torch.int64, device=features.values().device)
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths, stride=1)


def _no_samples(found: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {name: JaggedTensor(part.values(), lengths=part.lengths()[:0]) for name, part in found.items()}
