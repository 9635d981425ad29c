"""Embedding tables, row optimizers, Stochastic Shared Embeddings, random Fourier features, alignment and the store.

The names below are loaded on first use, so that the torch-free parts can be imported without torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.embedding_tables import EmbeddingTables as EmbeddingTables
    from embeddings.optimized_embedding import OptimizedEmbedding as OptimizedEmbedding
    from embeddings.recent_counts import RecentCounts as RecentCounts
    from embeddings.sse.config import SSEConfig as SSEConfig
    from embeddings.tables.config import InitConfig as InitConfig
    from embeddings.tables.config import TableConfig as TableConfig

__getattr__ = lazy_exports(__name__)
