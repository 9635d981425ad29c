"""TorchRec's lookups with our kernel in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

from embeddings.config import TableConfig
from embeddings.sharding.settings import TableSettings, pooling_of
from embeddings.tables import EmbeddingTables


class TableLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's grouped lookup with our kernel in it."""

    def __init__(self, settings: TableSettings, **keywords: Any) -> None:
        self._settings = settings
        super().__init__(**keywords)
        # What a rank without tables sends must have the type of what the others send.
        self._dummy_embs_tensor = torch.empty(0, dtype=settings.dtype, device=keywords["device"], requires_grad=True)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> TableKernel:
        if config.is_weighted:
            raise ValueError("weighted bags are not available yet: build the collection with is_weighted=False")
        return TableKernel(self._settings, config, pg, device, sharding_type)


class TableKernel(BaseBatchedEmbeddingBag[Tensor], FusedOptimizerModule):
    """The shards of a group of tables on one rank, looked up by EmbeddingTables.

    Row state is no state of a torch optimizer: it is saved by row (trainer/checkpoint.py), so TorchRec's is empty.
    A feature may read two tables, but EmbeddingTables takes it once: then the group is looked up in two parts.
    """

    def __init__(
        self,
        settings: TableSettings,
        config: GroupedEmbeddingConfig,
        group: dist.ProcessGroup,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> None:
        super().__init__(config, group, device, sharding_type)
        split = sharding_type == ShardingType.ROW_WISE
        self._parts = nn.ModuleList()
        self._num_features: list[int] = []
        for tables in _without_repeated_features(config.embedding_tables):
            shards = [_shard_config(settings.tables[table.name], table, split) for table in tables]
            features = [feature for shard in shards for feature in shard.features]
            self._parts.append(
                EmbeddingTables(
                    shards,
                    settings.optimizer,
                    sse={feature: settings.sse[feature] for feature in features if feature in settings.sse},
                    seed=settings.seed,
                    backend=settings.backend,  # type: ignore[arg-type]
                    dtype=settings.dtype,
                    sse_outside=split,
                )
            )
            self._num_features.append(len(features))

    def forward(self, features: KeyedJaggedTensor, vbe_output: Any = None, vbe_output_offsets: Any = None) -> Tensor:
        parts = features.split(self._num_features) if len(self._parts) > 1 else [features]
        pooled = [
            tables(part.values().long(), part.offsets().long()) for tables, part in zip(self._parts, parts, strict=True)
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    @property
    def emb_module(self) -> nn.ModuleList:  # type: ignore[override]
        return self._parts

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return EmptyFusedOptimizer()

    def split_embedding_weights(self) -> list[Tensor]:
        return [part.weight(table.name) for part in self._parts for table in part.layout.tables]  # type: ignore[union-attr, operator]

    def named_split_embedding_weights(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        dot = f"{prefix}." if prefix else ""
        for table, weight in zip(self._config.embedding_tables, self.split_embedding_weights(), strict=True):
            yield f"{dot}{table.name}.weight", weight

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_split_embedding_weights(prefix):
            yield name, _fused_parameter(weight)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        for table, weight in zip(self._config.embedding_tables, self.split_embedding_weights(), strict=True):
            yield table.name, _fused_parameter(weight)


def _fused_parameter(weight: Tensor) -> nn.Parameter:
    """The rows as TorchRec wants to see them: a parameter that no dense optimizer steps."""
    parameter = nn.Parameter(weight, requires_grad=False)
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return parameter


def _shard_config(table: TableConfig, shard: ShardedEmbeddingTable, split: bool) -> TableConfig:
    return dataclasses.replace(
        table,
        features=tuple(shard.feature_names),
        # A mean over several ranks is divided where the sum is complete.
        pooling="sum" if split else {feature: pooling_of(table, feature) for feature in shard.feature_names},
        row_start=shard.local_metadata.shard_offsets[0],
        row_count=shard.local_rows,
    )


def _without_repeated_features(tables: Sequence[ShardedEmbeddingTable]) -> list[list[ShardedEmbeddingTable]]:
    """The tables in order, cut wherever a feature would come a second time."""
    parts: list[list[ShardedEmbeddingTable]] = []
    seen: set[str] = set()
    for table in tables:
        if not parts or seen & set(table.feature_names):
            parts.append([])
            seen = set()
        parts[-1].append(table)
        seen |= set(table.feature_names)
    return parts
