"""How tables are split, and which lookups and exchanges follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType

from embeddings.sharding.exchange import SummingDist, SwappingDist
from embeddings.sharding.lookup import TableLookup
from embeddings.sharding.settings import Place, TableSettings


class TableWise(TwPooledEmbeddingSharding):
    def __init__(self, settings: TableSettings, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._settings = settings

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> TableLookup:
        return TableLookup(
            self._settings,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


class RowWise(RwPooledEmbeddingSharding):
    def __init__(self, settings: TableSettings, place: Place, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._settings = settings
        self._place = place

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """(block name, feature, table) in the order of the features that this sharding takes."""
        for table in self.embedding_tables():
            for name, feature in zip(table.embedding_names, table.feature_names, strict=True):
                yield name, feature, table.name

    def create_input_dist(self, device: torch.device | None = None) -> SwappingDist:
        return SwappingDist(
            self._settings,
            self._place,
            [(feature, self._settings.tables[table]) for _, feature, table in self.blocks()],
            pg=self._pg,
            num_features=self._get_num_features(),
            feature_hash_sizes=self._get_feature_hash_sizes(),
            device=device if device is not None else self._device,
        )

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> TableLookup:
        return TableLookup(
            self._settings,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            sharding_type=ShardingType.ROW_WISE,
            env=self._env,
        )

    def create_output_dist(self, device: torch.device | None = None) -> SummingDist:
        return SummingDist(self._pg)
