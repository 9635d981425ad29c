"""TorchRec's lookups, run by the kernels of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

from embeddings.embedding_tables import EmbeddingTables
from embeddings.sharding.replicas import ReplicatedTables
from embeddings.sharding.settings import TableSettings, pooling_of
from embeddings.tables.config import TableConfig


class TableLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's grouped lookup of bags, run by a kernel of this package."""

    def __init__(self, settings: TableSettings, *, rows_are_split: bool, replicated: bool, **keywords: Any) -> None:
        self._build = partial(TableKernel, settings, rows_are_split=rows_are_split, replicated=replicated)
        # Shards of split rows give sums, whatever pooling the collection has.
        super().__init__(sharding_type=ShardingType.ROW_WISE if rows_are_split else None, **keywords)
        _type_dummy(self, settings)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> TableKernel:
        return self._build(config, pg, device)


class SequenceLookup(GroupedEmbeddingsLookup):
    """TorchRec's grouped lookup of sequences, run by a kernel of this package."""

    def __init__(self, settings: TableSettings, *, rows_are_split: bool, replicated: bool, **keywords: Any) -> None:
        self._build = partial(TableKernel, settings, rows_are_split=rows_are_split, replicated=replicated)
        super().__init__(**keywords)
        _type_dummy(self, settings)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> TableKernel:
        return self._build(config, pg, device)


def _type_dummy(lookup: TableLookup | SequenceLookup, settings: TableSettings) -> None:
    """Set the dtype of a rank's empty tensor, sent if it has no tables, to the dtype of other ranks' tensors."""
    dummy = lookup._dummy_embs_tensor
    lookup._dummy_embs_tensor = dummy.detach().to(settings.compute_dtype).requires_grad_()


class TableKernel(BaseBatchedEmbeddingBag[Tensor], FusedOptimizerModule):
    """The shards of a group of tables on one rank, looked up by EmbeddingTables; bags or sequences.

    TorchRec sees an empty optimizer state, since the state of rows is saved by row (trainer/checkpoint/format.py). An
    EmbeddingTables has each feature once, one type of rows and one type of state. If a group of TorchRec has a feature
    twice (for two tables, or two column shards of one), or several types, it is looked up in several parts.
    """

    def __init__(
        self,
        settings: TableSettings,
        config: GroupedEmbeddingConfig,
        group: dist.ProcessGroup,
        device: torch.device | None,
        *,
        rows_are_split: bool,
        replicated: bool,
    ) -> None:
        super().__init__(config, group, device, ShardingType.ROW_WISE if rows_are_split else None)
        self._compute_dtype = settings.compute_dtype
        self._is_sequence = config.pooling == PoolingType.NONE
        self._parts = nn.ModuleList()
        self._num_features: list[int] = []
        build: Any = partial(ReplicatedTables, group=group) if replicated else EmbeddingTables
        for tables in _parts(config.embedding_tables, settings):
            shards = [
                _shard_config(settings.tables[table.name], table, rows_are_split and not self._is_sequence)
                for table in tables
            ]
            features = [feature for shard in shards for feature in shard.features]
            self._parts.append(
                build(
                    shards,
                    settings.optimizer,
                    sse={feature: settings.sse[feature] for feature in features if feature in settings.sse},
                    seed=settings.seed,
                    backend=settings.backend,
                    dtype=settings.dtype_of(tables[0].name),
                    state_dtype=settings.state_dtype_of(tables[0].name),
                    device=device,
                    bounds=settings.bounds,
                    sse_outside=rows_are_split,
                )
            )
            self._num_features.append(len(features))

    def forward(self, features: KeyedJaggedTensor, vbe_output: Any = None, vbe_output_offsets: Any = None) -> Tensor:
        parts = features.split(self._num_features) if len(self._parts) > 1 else [features]
        outputs = [tables(*self._inputs(part)) for tables, part in zip(self._parts, parts, strict=True)]
        # Bags stand side by side, sequences one after another.
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0 if self._is_sequence else 1)

    def _inputs(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = features.weights_or_none() if self._config.is_weighted else None
        if weights is not None:
            weights = weights.to(self._compute_dtype)
        return features.values().long(), features.offsets().long(), weights

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
    """Return the rows as a parameter that no dense optimizer updates, which TorchRec expects."""
    parameter = nn.Parameter(weight, requires_grad=False)
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
    return parameter


def _shard_config(table: TableConfig, shard: ShardedEmbeddingTable, only_sums: bool) -> TableConfig:
    """Return the part of ``table`` that TorchRec's ``shard`` describes; all of it if the shard has no metadata."""
    rows, columns = shard.local_metadata.shard_offsets if shard.local_metadata is not None else (0, 0)
    return dataclasses.replace(
        table,
        features=tuple(shard.feature_names),
        # A mean over several ranks is divided where the sum is complete.
        pooling="sum" if only_sums else {feature: pooling_of(table, feature) for feature in shard.feature_names},
        row_start=rows,
        row_count=shard.local_rows,
        dim=shard.local_cols,
        column_start=columns,
        total_dim=table.dim,
    )


def _parts(tables: Sequence[ShardedEmbeddingTable], settings: TableSettings) -> list[list[ShardedEmbeddingTable]]:
    """Split the tables into consecutive parts with unique features and the same types of rows and of state."""
    parts: list[list[ShardedEmbeddingTable]] = []
    seen: set[str] = set()
    before = None
    for table in tables:
        stored = settings.dtype_of(table.name), settings.state_dtype_of(table.name)
        if stored != before or seen & set(table.feature_names):
            parts.append([])
            seen = set()
        before = stored
        parts[-1].append(table)
        seen |= set(table.feature_names)
    return parts
