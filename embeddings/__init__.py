"""Embedding tables, row optimizers, Stochastic Shared Embeddings, random Fourier features, alignment and the store.

The names below are loaded on first use, so that the torch-free parts can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embeddings.embedding_tables import EmbeddingTables
    from embeddings.optimized_embedding import OptimizedEmbedding
    from embeddings.recent_counts import RecentCounts
    from embeddings.sse.config import SSEConfig
    from embeddings.tables.config import InitConfig, TableConfig

__all__ = ["EmbeddingTables", "InitConfig", "OptimizedEmbedding", "RecentCounts", "SSEConfig", "TableConfig"]

_HOMES = {
    "EmbeddingTables": "embeddings.embedding_tables",
    "InitConfig": "embeddings.tables.config",
    "OptimizedEmbedding": "embeddings.optimized_embedding",
    "RecentCounts": "embeddings.recent_counts",
    "SSEConfig": "embeddings.sse.config",
    "TableConfig": "embeddings.tables.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'embeddings' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
